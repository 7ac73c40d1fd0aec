"""`python -m zeroshard`, which is what torchrun starts."""

import os
import signal
import sys


def main() -> None:
    """Run the command line, without the current folder, which `python -m` puts first on the path.

    Modules in that folder would hide Python's own. It stays on the path if zeroshard itself is imported from it.
    """
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if sys.path and os.path.abspath(sys.path[0]) == os.getcwd() != root and not sys.flags.safe_path:
        del sys.path[0]
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the process without a trace while modules are loaded
    from zeroshard.cli.main import main as command_line

    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, handler)
    command_line()


if __name__ == "__main__":
    main()
