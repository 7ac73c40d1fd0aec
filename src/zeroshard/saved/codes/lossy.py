"""Lossy codes by name, with one interface: encode fp32 values, and decode them."""

from collections.abc import Callable
from itertools import count
from typing import Protocol

from torch import Tensor

from zeroshard.saved.codes.groups import GroupFloats, GroupIntegers, Scaled
from zeroshard.saved.codes.small_floats import FP8, FP10, FP16, SmallFloat


class Lossy(Protocol):
    """Codes of fp32 values."""

    def begin(self) -> None:
        """Begin a step."""

    def nbytes(self, numel: int) -> int:
        """Bytes of the codes of so many values."""

    def encode(self, values: Tensor) -> tuple[Tensor, ...]:
        """The codes of fp32 values [n]."""

    def decode(self, codes: tuple[Tensor, ...], numel: int) -> Tensor:
        """The fp32 values [numel] of their codes."""


class Rounded:
    """Numbers of a smaller format."""

    def __init__(self, code: SmallFloat) -> None:
        self._code, self.nbytes = code, code.nbytes

    def begin(self) -> None:
        """Nothing to do: the code has no state of a step."""

    def encode(self, values: Tensor) -> tuple[Tensor, ...]:
        """The words of values [n]."""
        return (self._code.encode(values),)

    def decode(self, codes: tuple[Tensor, ...], numel: int) -> Tensor:
        """The values [numel] of words."""
        return self._code.decode(codes[0], numel)


class RoundedAtRandom:
    """Integers of groups, with random numbers keyed by the step and the tensor's number in it.

    Args:
        code: the integers.
        key: returns the key of the current step.
    """

    def __init__(self, code: GroupIntegers, key: Callable[[], int]) -> None:
        self._code, self._key, self.nbytes = code, key, code.nbytes
        self.begin()

    def begin(self) -> None:
        """Count tensors from zero again."""
        self._numbers = count()
        self._step_key: int | None = None

    def encode(self, values: Tensor) -> tuple[Tensor, ...]:
        """Codes, scales and least values of the groups of values [n]."""
        if self._step_key is None:
            self._step_key = self._key()
        found = self._code.encode(values, self._step_key, next(self._numbers))
        assert found.least is not None
        return found.codes, found.scales, found.least

    def decode(self, codes: tuple[Tensor, ...], numel: int) -> Tensor:
        """The values [numel] of codes."""
        return self._code.decode(Scaled(*codes), numel)


class RoundedInGroups:
    """Numbers of e4m3 with a scale for each group."""

    def __init__(self, code: GroupFloats) -> None:
        self._code, self.nbytes = code, code.nbytes

    def begin(self) -> None:
        """Nothing to do: the code has no state of a step."""

    def encode(self, values: Tensor) -> tuple[Tensor, ...]:
        """Codes and scales of the groups of values [n]."""
        found = self._code.encode(values)
        return found.codes, found.scales

    def decode(self, codes: tuple[Tensor, ...], numel: int) -> Tensor:
        """The values [numel] of codes."""
        return self._code.decode(Scaled(*codes), numel)


def lossy_of(name: str, key: Callable[[], int]) -> Lossy:
    """The code of a name in `policy.LOSSY`.

    Args:
        key: returns the key of the current step's random numbers.
    """
    if name in ROUNDED:
        return Rounded(ROUNDED[name])
    return RoundedInGroups(GroupFloats()) if name == "e4m3" else RoundedAtRandom(GroupIntegers(int(name[3:])), key)


ROUNDED = {"fp16": FP16, "fp10": FP10, "fp8": FP8}
