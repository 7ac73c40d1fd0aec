"""Ranges in `torch.profiler`, such as `zeroshard::gather blocks.3`: the engine's work beside torch's operations.

A hot path asks `profiler._is_profiler_enabled`, torch's own flag, and calls this module where it is set; else neither a
name nor a context is made. `emit_nvtx` sets the flag too, so that Nsight shows the same ranges.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.autograd import profiler as profiler

PREFIX = "zeroshard::"


def named(action: str, label: object = "") -> profiler.record_function:
    """A range of this thread: an action and its object."""
    return profiler.record_function(f"{PREFIX}{action} {label}".rstrip())


@contextmanager
def profiled(path: Path) -> Iterator[None]:
    """Profile all threads inside, and write a Chrome trace, which Perfetto opens, to `path`."""
    from torch._C._profiler import _ExperimentalConfig
    from torch.profiler import profile

    with profile(experimental_config=_ExperimentalConfig(profile_all_threads=True)) as found:
        yield
    path.parent.mkdir(parents=True, exist_ok=True)
    found.export_chrome_trace(str(path))
