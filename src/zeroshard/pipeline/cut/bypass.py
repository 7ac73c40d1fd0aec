"""Values sent between stages beside the activation ([Note: values beside the activation]), and their message.

Both ends have the list of a message's values from the probe, and their shapes from placeholders; so one message of
bytes holds all that one chunk sends to another. A value goes from its chunk to the next that reads it, and on from
there ([Note: skips]).
"""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from zeroshard.errors import BatchError, ModelError
from zeroshard.pipeline.cut.carried import hops_of
from zeroshard.pipeline.cut.gates import Gate
from zeroshard.pipeline.cut.origins import Aside, Origins, ReturnedValue
from zeroshard.schedule.lower import Skip

Absent = Callable[[Tensor], Tensor]
ALIGNMENT = 16  # bytes at which each value of a message begins
NUMBERS = {bool: torch.int64, int: torch.int64, float: torch.float64}  # the dtypes in which numbers are sent


@dataclass(slots=True)
class Crossing:
    """The sources that cross boundaries of a chain.

    Attributes:
        groups: sources of one value, with the layer of each and the later layers that read it.
        routes: the groups in each message, by the chunks that send and get it.
        examples: their values in the example, for forwards that only compute shapes.
        asides: tensors that layers read but no module returned.
        leaves: by module and call, the number of values that a module returned in the example.
    """

    groups: list[list[tuple[ReturnedValue, int, tuple[int, ...]]]] = field(default_factory=list)
    routes: dict[Skip, list[tuple[ReturnedValue, ...]]] = field(default_factory=dict)
    examples: dict[ReturnedValue, Any] = field(default_factory=dict)
    asides: set[Aside] = field(default_factory=set)
    leaves: dict[tuple[str, int], int] = field(default_factory=dict)

    @classmethod
    def of(cls, origins: Origins, end: int, overwritten: set[str]) -> "Crossing":
        """The crossing values of a probe's forward.

        Args:
            end: the number of the last layer.
            overwritten: names of modules whose outputs the code around them overwrites; each has a copy.
        """
        made = origins.layer_of
        reads = {
            source: {n for n in range(made[source] + 1, end + 1) if n in layers or math.inf in layers}
            for source, layers in origins.reads.items()
        }
        groups: dict[ReturnedValue, list[ReturnedValue]] = {source: [source] for source in reads}
        examples: dict[ReturnedValue, Any] = {}
        for tensor, alike in origins.alike:
            read = [source for source in alike if source in reads]
            together = [source for source in read if source.path not in overwritten]
            groups |= dict.fromkeys(together, together)
            if not tensor.is_meta:
                examples |= dict.fromkeys(read, tensor.detach())
            passing = {made[source] for source in read if reads[source]}  # layers that return it as they got it
            for source in read:
                reads[source] |= {layer for layer in passing if layer > made[source]}
        unique = sorted({tuple(sorted(group)) for group in groups.values()})
        named = [[(source, made[source], tuple(sorted(reads[source]))) for source in group] for group in unique]
        crossing = [group for group in named if any(layers for _, _, layers in group)]
        return cls(crossing, examples=examples, asides=origins.asides, leaves=origins.leaves)

    def plain(self) -> list[Any]:
        """The groups as JSON values."""
        return [[[list(source), layer, list(reads)] for source, layer, reads in group] for group in self.groups]

    def follow(self, plain: list[Any]) -> None:
        """Replace the groups by another rank's."""
        self.groups = [
            [(ReturnedValue(*source), layer, tuple(reads)) for source, layer, reads in group] for group in plain
        ]

    def route(
        self, firsts: Sequence[int], stages: int, carried: Collection[ReturnedValue], most: float = math.inf
    ) -> list[Skip]:
        """Choose the messages of each value; returns those that pass over chunks from stage to stage.

        Args:
            firsts: the first layer of every chunk, and one past the last layer.
            carried: sources that go with gradients.
            most: chunks from the source of a message to its target.
        """
        self.routes = {}
        for group in self.groups:
            together: dict[Skip, tuple[ReturnedValue, ...]] = {}
            for source, made, reads in (each for each in group if each[0] not in carried):
                own, *readers = dict.fromkeys(bisect_right(firsts, layer) - 1 for layer in (made, *reads))
                for hop in hops_of(own, readers, stages, most):
                    together[hop] = (*together.get(hop, ()), source)
            for hop, sources in together.items():
                self.routes.setdefault(hop, []).append(sources)
        return [hop for hop in self.routes if hop.target > hop.source + 1 and (hop.target - hop.source) % stages]

    def of_call(self, path: str, number: int) -> list[ReturnedValue]:
        """The sources in a module's output of one call."""
        return [s for group in self.groups for s, *_ in group if s.path == path and s.call == number]

    def refuse_asides(self, firsts: Iterable[int], names: list[str]) -> None:
        """Refuse tensors that another stage reads but no module returns.

        Raises:
            ModelError: with the module that makes one.
        """
        for aside in sorted(self.asides):
            if any(aside.made < first <= aside.read for first in firsts):
                raise ModelError(
                    f"{names[aside.read]!r} reads a tensor that {aside.path!r} made on an earlier stage and did not "
                    f"return (an attribute, or a variable around the model), so that stage cannot send it. Return it "
                    f"from the module, keep both on one stage with pipeline_parallel.split=(...), or use "
                    f"pipeline_parallel=1."
                )


class Bypass:
    """The values of sources in one forward of a part of the chain.

    Attributes:
        known: values by source, of earlier stages and of modules that have returned since.
    """

    def __init__(self, known: Mapping[ReturnedValue, Any] | None = None) -> None:
        self.known = dict(known or {})
        self._calls: Counter[str] = Counter()

    def call(self, path: str) -> int:
        """The number of a module's next call."""
        self._calls[path] += 1
        return self._calls[path] - 1

    def record(self, crossing: Crossing, gate: Gate, number: int, output: Any) -> None:
        """Record the outputs of a module's call.

        Raises:
            BatchError: it returns more or fewer values than in the example, and later layers read some.
        """
        sources = crossing.of_call(gate.path, number)
        if sources:
            leaves, _ = tree_flatten(output)
            expected = crossing.leaves.get((gate.path, number), len(leaves))
            if len(leaves) != expected:
                raise BatchError(
                    f"{gate.path!r} returns {len(leaves)} values and {expected} in the example, and later stages read "
                    f"some of them. Return them as one tensor, or give every microbatch the shape of the example."
                )
            for source in sources:
                leaf = leaves[source.leaf]
                copies = gate.overwritten and isinstance(leaf, Tensor)  # the code around it writes into its output
                self.known[source] = leaf.detach().clone() if copies else leaf

    def fill(self, crossing: Crossing, gate: Gate, number: int, output: Any, by_example: bool, absent: Absent) -> Any:
        """A placeholder for an output, filled with known values, else with fitting ones of the example.

        Args:
            by_example: whether values of the example stand for all.
            absent: marks a value that the stage does not get.
        """
        leaves, spec = tree_flatten(output)
        sources = {source.leaf: source for source in crossing.of_call(gate.path, number)}
        for n, leaf in enumerate(leaves):
            source, value = sources.get(n), leaf
            received = source in self.known
            if source is not None:
                shown = crossing.examples.get(source)
                if isinstance(leaf, Tensor) and shown is not None and shown.shape == leaf.shape:
                    value = shown.to(leaf.device, leaf.dtype)
                value = self.known.setdefault(source, value)
            if isinstance(value, Tensor):
                shown = value.clone() if gate.overwritten and value is not leaf else value
                is_nan = value is leaf and (leaf.is_floating_point() or leaf.is_complex())
                known = received or is_nan or (by_example and source is not None)
                value = shown if known else absent(shown)
            leaves[n] = value
        return tree_unflatten(leaves, spec)


class SentValue(NamedTuple):
    """One value in a message: its sources, its shape and dtype, and the type of a number."""

    sources: tuple[ReturnedValue, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    number: type | None = None

    @property
    def nbytes(self) -> int:
        """Its bytes, without padding for alignment."""
        return math.prod(self.shape) * self.dtype.itemsize


class SentValues(tuple[SentValue, ...]):
    """The values of one message."""

    __slots__ = ()

    @classmethod
    def of(cls, groups: list[tuple[ReturnedValue, ...]], known: Mapping[ReturnedValue, Any]) -> "SentValues":
        """The values of a boundary, with shapes from values or placeholders."""
        slots = (_slot(group, known.get(group[0])) for group in groups)
        return cls(slot for slot in slots if slot is not None)

    @property
    def nbytes(self) -> int:
        """Bytes of the message."""
        return sum(_aligned(slot.nbytes) for slot in self)

    def pack(self, known: Mapping[ReturnedValue, Any], device: torch.device) -> Tensor:
        """The message.

        Raises:
            BatchError: a value is not what the next stage expects.
        """
        message = torch.zeros(self.nbytes, dtype=torch.uint8, device=device)
        start = 0
        for slot in self:
            value = known.get(slot.sources[0])
            same = all(_equal(known.get(source), value) for source in slot.sources)
            if not same or _slot(slot.sources, value) != slot:
                raise BatchError(
                    f"{slot.sources[0].path!r} returns {_description(value)} which a later stage reads, and that stage "
                    f"expects {_described(slot)}, as in the example; what a module returns besides the activation must "
                    f"be alike for all microbatches of a shape. Pad it to a shape that does not depend on the data."
                )
            data = value if isinstance(value, Tensor) else torch.tensor(value)
            flat = data.detach().to(device, slot.dtype).contiguous().reshape(-1)
            message[start : start + slot.nbytes] = flat.view(torch.uint8)
            start += _aligned(slot.nbytes)
        return message

    def unpack(self, message: Tensor) -> dict[ReturnedValue, Any]:
        """The values of a message, in memory of their own."""
        known: dict[ReturnedValue, Any] = {}
        start = 0
        for slot in self:
            data = message[start : start + slot.nbytes].clone().view(slot.dtype).view(slot.shape)
            value = data if slot.number is None else slot.number(data.item())
            known |= dict.fromkeys(slot.sources, value)
            start += _aligned(slot.nbytes)
        return known


def _equal(one: Any, other: Any) -> bool:
    """Whether two values of one group are equal: one object, unless they came in several messages."""
    if one is other or type(one) is not type(other):
        return one is other
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)


def _slot(sources: tuple[ReturnedValue, ...], value: Any) -> SentValue | None:
    if isinstance(value, Tensor):
        return SentValue(sources, tuple(value.shape), value.dtype)
    dtype = NUMBERS.get(type(value))
    return None if dtype is None else SentValue(sources, (), dtype, type(value))


def _described(slot: SentValue) -> str:
    return f"{list(slot.shape)} {slot.dtype}" if slot.number is None else f"a number ({slot.number.__name__})"


def _description(value: Any) -> str:
    slot = _slot((), value)
    return f"a {type(value).__name__}" if slot is None else _described(slot)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
