"""`python -m zeroshard`, which is what torchrun starts."""

from zeroshard.cli import main

if __name__ == "__main__":
    main()
