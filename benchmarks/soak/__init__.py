"""The faults of the soak test, and their shared code. See benchmarks/soak.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))  # the plans that are killed are those of a test
