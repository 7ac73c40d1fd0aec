"""The streams of random numbers of one process, as tensors, so that a resumed run draws the same numbers."""

import random
import struct
from collections.abc import Iterator

import numpy as np
import torch

from zeroshard.platform import accelerator

PYTHON = struct.Struct("<625qd?")  # Mersenne Twister: 624 words, position; pending gauss, whether there is one
NUMPY = struct.Struct("<624Iqqd")  # the same: words, position, whether there is a gauss, the gauss


def streams(device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, state as uint8) of torch's, Python's and numpy's global generators, and of this rank's GPU."""
    yield "torch", torch.get_rng_state()
    state = accelerator.random_state(device)
    if state is not None:
        yield device.type, state
    _, values, gauss = random.getstate()
    yield "python", _tensor(PYTHON.pack(*values, gauss or 0.0, gauss is not None))
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    yield "numpy", _tensor(NUMPY.pack(*map(int, keys), position, has_gauss, cached))


def restore(name: str, state: torch.Tensor, device: torch.device) -> None:
    """Set a stream to a state of `streams`; a stream that this process lacks is skipped."""
    content = state.numpy().tobytes()
    if name == "torch":
        torch.set_rng_state(state)
    elif name == device.type:
        accelerator.set_random_state(device, state)
    elif name == "python":
        *values, gauss, has_gauss = PYTHON.unpack(content)
        random.setstate((3, tuple(values), gauss if has_gauss else None))
    elif name == "numpy":
        *keys, position, has_gauss, cached = NUMPY.unpack(content)
        np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, cached))


def _tensor(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
