"""One step of an optimizer in several calls, each over some of its tensors.

A rank updates one flat after the other, and an optimizer that counts steps by group (`group["step"] += 1`) or by itself
would count calls. So each call starts from the numbers that the step began with, and those that a call left are put
there when the step ends.
"""

from collections.abc import Iterator
from typing import Any

import torch

Numbers = list[dict[str, Any]]


class OneStep:
    """The calls of an optimizer's `step` that make one step together."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._left: Numbers | None = None  # by the last call of the step under way

    def call(self) -> None:
        """Call `step` once."""
        before, everything = self._numbers(), list(map(dict, self._tables()))
        self._optimizer.step()
        after = self._numbers()
        if after != before:
            self._left = after
            for table, numbers, kept in zip(self._tables(), before, everything, strict=True):
                for key in [key for key, value in table.items() if _is_number(value) and key not in numbers]:
                    table[key] = kept.get(key)
                    if key not in kept:
                        del table[key]
                table.update(numbers)

    def end(self) -> None:
        """The step is whole."""
        left, self._left = self._left, None
        for table, numbers in zip(self._tables(), left or (), strict=False):
            table.update(numbers)

    def _numbers(self) -> Numbers:
        return [{key: value for key, value in table.items() if _is_number(value)} for table in self._tables()]

    def _tables(self) -> Iterator[dict[str, Any]]:
        yield vars(self._optimizer)
        yield from self._optimizer.param_groups


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)
