"""The differences of two checkpoints in facts and tensors, block by block, under any plans."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from zeroshard.checkpoint.manifest import COPIES
from zeroshard.checkpoint.reader import Reader
from zeroshard.checkpoint.stream import BLOCK, bytes_of

# Facts about how a checkpoint was written, not about the state in it.
LAYOUT = ("zeroshard", "torch", "plan", "ranks", "cut", "axes", "gradient_layouts", "last_update")


@dataclass(frozen=True, slots=True)
class Difference:
    """A tensor that differs.

    Attributes:
        a, b: its dtype and shape in each checkpoint.
        largest: the largest absolute difference of two elements; None if the shapes differ, or if not finite.
    """

    a: str
    b: str
    largest: float | None


@dataclass(slots=True)
class Comparison:
    """The differences of two checkpoints.

    Attributes:
        facts: by dotted key, both values; None for a missing one.
        layout: likewise the facts about how each was written. A state is the same under every layout, except for the
            random numbers of ranks, which are compared if equally many ranks wrote.
        only_a, only_b: names of the tensors of one checkpoint alone.
        different: by name, the tensors that differ.
        same: number of tensors equal to the last bit.
    """

    facts: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    layout: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    only_a: list[str] = field(default_factory=list)
    only_b: list[str] = field(default_factory=list)
    different: dict[str, Difference] = field(default_factory=dict)
    same: int = 0

    @property
    def equal(self) -> bool:
        """Whether both hold the same state."""
        return not (self.facts or self.only_a or self.only_b or self.different)


def compare(a: Reader, b: Reader) -> Comparison:
    """Compare facts and every byte of every tensor; one block of each is in memory at a time.

    Raises:
        DamagedError: a block does not match its digest.
    """
    found = Comparison()
    mine, theirs = dict(_flat(a.facts)), dict(_flat(b.facts))
    for key in sorted(mine.keys() | theirs.keys()):
        if mine.get(key) != theirs.get(key):
            facts = found.layout if key.partition(".")[0] in LAYOUT else found.facts
            facts[key] = mine.get(key), theirs.get(key)
    found.only_a = sorted(a.tensors.keys() - b.tensors.keys())
    found.only_b = sorted(b.tensors.keys() - a.tensors.keys())
    for name in (name for name in a.tensors if name in b.tensors):
        copies = len(a.tensors[name].chunks), len(b.tensors[name].chunks)
        if name.startswith("rng:") and copies[0] != copies[1]:
            found.layout[name] = f"{copies[0]} copies", f"{copies[1]} copies"
            continue
        difference = _difference(a, b, name)
        if difference is None:
            found.same += 1
        else:
            found.different[name] = difference
    return found


def _difference(a: Reader, b: Reader, name: str) -> Difference | None:
    one, other = a.tensors[name], b.tensors[name]
    kinds = [f"{str(e.dtype).removeprefix('torch.')} {'x'.join(map(str, e.shape)) or 'scalar'}" for e in (one, other)]
    if one.shape != other.shape:
        return Difference(kinds[0], kinds[1], None)
    same, largest = one.dtype == other.dtype, 0.0
    for mine, theirs in _blocks(a, b, name):
        if mine.dtype != theirs.dtype or bytes_of(mine) != bytes_of(theirs):
            same = False
            distance = _distance(mine, theirs)
            largest = distance if math.isnan(distance) else max(largest, distance)
            if math.isnan(largest):
                break
    finite = None if math.isnan(largest) or math.isinf(largest) else largest
    return None if same else Difference(kinds[0], kinds[1], finite)


def _blocks(a: Reader, b: Reader, name: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The same elements of both, flat and each in its own dtype, block by block; copies in pairs."""
    one, other = a.tensors[name], b.tensors[name]
    if name.partition(":")[0] in COPIES:
        paired = len(one.chunks) == len(other.chunks)
        for part in range(len(one.chunks) if paired else 1):
            yield a.whole(name, part), b.whole(name, part)
        return
    step = BLOCK // max(one.dtype.itemsize, other.dtype.itemsize)
    for start in range(0, one.numel, step):
        count = min(step, one.numel - start)
        mine, theirs = torch.empty(count, dtype=one.dtype), torch.empty(count, dtype=other.dtype)
        a.read(name, mine, start)
        b.read(name, theirs, start)
        yield mine, theirs


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest absolute difference; equal infinities count as 0."""
    wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    a, b = a.to(wide), b.to(wide)
    return (a - b).abs().masked_fill(a == b, 0).max().item() if a.numel() else 0.0


def _flat(facts: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Facts by dotted key."""
    for key, value in facts.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value
