"""Samples of tensors: a few elements at even distances, by which a forward and its recomputation are compared.

[Note: other values] A forward that is computed again with other random numbers, or with another value of a variable
that the model has set since, gives other values in nearly every element, so a few tell. Samples of all tensors are
taken in the first forwards of a block, and of every eighth later, of others each time: less than a percent of a step.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

POINTS = 32  # elements of a sample, about
FIRST = 3  # forwards of which all tensors are sampled
EVERY = 8  # of so many tensors one is sampled later
SELDOM = 64  # on an accelerator, where a comparison waits for the device, the forwards between two that are sampled
TOLERANCES = {torch.float16: 2e-2, torch.bfloat16: 1e-1}  # of the largest element: the last bits may differ
USUAL = 1e-3
WITHOUT_NUMPY = {torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.uint8, torch.float8_e5m2: torch.uint8}
OTHER_VALUES = (
    "its values are others, so something that it reads has changed between forward and backward, such as weights by a "
    "step since, a generator of random numbers that no module or function of it names, or a variable that the model "
    "sets before each call. Call the backward before the step, make the generator an attribute of the module, and hand "
    "over the variable as an argument, or set it as a number in an attribute of the module"
)


def spacing(forwards: int, on_accelerator: bool) -> int:
    """Of how many tensors one is sampled in a forward, by the number of forwards before it; 0 for none."""
    if forwards < FIRST:
        return 1
    if on_accelerator:
        return 0 if forwards % SELDOM else 1
    return EVERY


def sample_of(tensor: Tensor) -> bytes | None:
    """The values of a few elements; None of what has none that can be read so.

    They are no tensor: small pieces of memory between large ones would keep these from being used again.
    """
    if type(tensor) is not Tensor or tensor.is_meta or tensor.layout is not torch.strided or not tensor.numel():
        return None
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        span = tensor.numel()
        if not tensor.is_contiguous():
            span = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        step = span // POINTS | 1  # odd, so that it meets all columns
        points = tensor.detach().as_strided(((span - 1) // step + 1,), (step,), tensor.storage_offset())
        if points.dtype in WITHOUT_NUMPY:
            points = points.view(WITHOUT_NUMPY[points.dtype])
        return points.cpu().numpy().tobytes()


def agrees(tensor: Tensor, sample: bytes) -> bool:
    """Whether a tensor has the values of a sample, but for rounding."""
    found = sample_of(tensor)
    if found == sample:
        return True
    if found is None or len(found) != len(sample) or not (tensor.is_floating_point() or tensor.is_complex()):
        return False
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    mine, other = (torch.frombuffer(bytearray(each), dtype=tensor.dtype).to(wide) for each in (found, sample))
    tolerance = TOLERANCES.get(tensor.dtype, USUAL) * other.abs().nan_to_num(0.0, 0.0, 0.0).max().item()
    return torch.allclose(mine, other, rtol=0.0, atol=tolerance, equal_nan=True)


class ForwardSamples:
    """Samples of what one forward of a block saves and returns.

    Args:
        forwards: of the block before it.
        on_accelerator: whether it runs on one.
    """

    def __init__(self, forwards: int, on_accelerator: bool) -> None:
        self._forwards, self._spacing = forwards, spacing(forwards, on_accelerator)
        self._ends: list[bytes | None] = []

    def saved(self, tensor: Tensor, number: int) -> bytes | None:
        """A sample of what is saved as one of that number, if it is to be compared."""
        compared = self._spacing and (number + self._forwards) % self._spacing == 0
        return sample_of(tensor) if compared else None

    def returned(self, values: Sequence[Any]) -> None:
        """The forward is over."""
        if self._spacing:
            self._ends = [sample_of(each) if isinstance(each, Tensor) else None for each in values]

    def agree(self, values: Sequence[Any]) -> bool:
        """Whether what a recomputation returns has the same values; no if they were not sampled."""
        pairs = [(each, sample) for each, sample in zip(values, self._ends, strict=False) if sample is not None]
        return bool(pairs) and all(isinstance(each, Tensor) and agrees(each, sample) for each, sample in pairs)
