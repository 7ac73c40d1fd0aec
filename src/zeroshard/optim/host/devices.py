"""Whether an update is one on CPUs: a rehearsal of other devices has their tensors on CPUs, without values."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

_other_devices = ContextVar("other_devices", default=False)  # rehearsals run side by side in threads


@contextmanager
def as_on_devices() -> Iterator[None]:
    """Let tensors on CPUs be updated as on other devices in this thread inside, as in a rehearsal of these."""
    token = _other_devices.set(True)
    try:
        yield
    finally:
        _other_devices.reset(token)


def on_cpus(tensor: Tensor) -> bool:
    """Whether a tensor is updated as CPUs do it."""
    return tensor.device.type == "cpu" and not _other_devices.get()
