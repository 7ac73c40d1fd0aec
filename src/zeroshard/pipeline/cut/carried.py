"""Learned values that cross a boundary besides one activation, carried in one packed message with their gradients.

[Note: carried values] A model whose blocks hand on more than one tensor with a gradient (an encoder's output, a skip, a
residual around a block, router logits for the loss) has a set of values at each boundary: those made before it and read
after it. A value is what a module returned, or the result of one function of the code around the blocks; its key counts
calls of a module, or calls of a function after so many blocks, which is the same on all stages, since each runs that
code. A stage concatenates the values in the order in which they were made, and the next one cuts the message apart in
the same order, where its own forward makes placeholders of the same shapes. Autograd splits and sums the gradients.
Once the chain is cut, a value goes from its chunk to the next that reads it, and on from there ([Note: skips]): a
chunk's input is the messages of its sources one after the other, and its output those to its targets.

The idea of values that bypass layers is torchgpipe's (2004.09910, section 3.2.2: skip connections); here the model
needs no change.
"""

import math
import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import SUPPORTED_NODES, tree_flatten, tree_leaves, tree_map, tree_unflatten

from zeroshard.errors import BatchError
from zeroshard.pipeline.cut.layers import Layer
from zeroshard.pipeline.cut.origins import ReturnedValue
from zeroshard.pipeline.cut.placeholders import stand_in_for
from zeroshard.schedule.lower import Skip

WRITTEN, UNDER = -1, -2  # the leaf of a function that wrote into its first argument, and of what that is a view of


@dataclass(slots=True)
class Carried:
    """The learned values of a chain that cross boundaries.

    Attributes:
        reach: by key, the layer that makes a value and the layers that read it, in order.
        written: keys of values that are overwritten later.
        same: the first key of a value that one call returns several times, by the others, which are not sent.
        needed: whether some boundary has other values than the activation.
        into: by the first layer of a chunk, the keys of its messages by the chunk that sends them, if some pass over
            chunks.
        out: by the layer after a chunk, the keys of its messages by the chunk that gets them, likewise.
    """

    reach: dict[ReturnedValue, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    written: set[ReturnedValue] = field(default_factory=set)
    same: dict[ReturnedValue, ReturnedValue] = field(default_factory=dict)
    needed: bool = False
    into: dict[int, dict[int, set[ReturnedValue]]] = field(default_factory=dict)
    out: dict[int, dict[int, set[ReturnedValue]]] = field(default_factory=dict)

    def at(self, boundary: int) -> set[ReturnedValue]:
        """The keys of the values that cross before a layer; empty if the activation is all."""
        if not self.needed:
            return set()
        return {key for key, (made, reads) in self.reach.items() if made < boundary <= reads[-1]}

    def plain(self) -> list[tuple[str, list[int]]]:
        """The values as text, with the layers that read them, for the agreement of ranks."""
        return [
            (f"result {key.leaf} of call {key.call} of {key.path!r} in layer {made}", list(reads))
            for key, (made, reads) in (self.reach if self.needed else {}).items()
        ]

    def read(self, key: ReturnedValue, layers: Iterable[int]) -> None:
        """Note that more layers read a value."""
        made, reads = self.reach[key]
        self.reach[key] = made, tuple(sorted({*reads, *layers}))

    def keep(self, reads: Mapping[ReturnedValue, Iterable[float]], end: int) -> None:
        """Note the layers that read values without their gradients; an infinite one stands for all up to `end`."""
        for key in reads.keys() & self.reach.keys():
            made, _ = self.reach[key]
            layers = set(range(made + 1, end + 1) if math.inf in reads[key] else map(int, reads[key]))
            self.read(key, (layer for layer in layers if layer > made))

    def route(self, firsts: Sequence[int], stages: int, most: float = math.inf) -> list[Skip]:
        """Choose the messages of each value; returns those that pass over chunks from stage to stage.

        Args:
            firsts: the first layer of every chunk, and one past the last layer.
            most: chunks from the source of a message to its target.
        """
        hops: dict[Skip, set[ReturnedValue]] = {}
        for key, (made, reads) in self.reach.items() if self.needed else ():
            own, *readers = dict.fromkeys(bisect_right(firsts, layer) - 1 for layer in (made, *reads))
            for hop in hops_of(own, readers, stages, most):
                hops.setdefault(hop, set()).add(key)
        far = [hop for hop in hops if hop.target > hop.source + 1]
        if far:
            for source, target in sorted({*hops, *map(Skip, range(len(firsts) - 2), range(1, len(firsts) - 1))}):
                keys = hops.get(Skip(source, target), set())
                self.into.setdefault(firsts[target], {})[source] = keys
                self.out.setdefault(firsts[source + 1], {})[target] = keys
        return sorted(hop for hop in far if (hop.target - hop.source) % stages)


class _FrameFunctions(TorchFunctionMode):
    """A mode that numbers the functions of the code around the blocks.

    Attributes:
        phase: number of blocks that have run.
    """

    def __init__(self) -> None:
        super().__init__()
        self.phase = 0
        self._calls: Counter[str] = Counter()
        self._outside = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function, and enter its result."""
        kwargs = kwargs or {}
        if not self._outside:
            return func(*args, **kwargs)
        target = args[0] if args and isinstance(args[0], Tensor) else None
        version = None if target is None else _version(target)
        self.takes((args, kwargs))
        output = func(*args, **kwargs)
        path = f"{getattr(func, '__name__', func)} after {self.phase} blocks"
        call = self._calls[path]
        self._calls[path] += 1
        if target is not None and version is not None and target._version > version:
            for leaf, written in ((WRITTEN, target), (UNDER, target._base)):
                value = self.made(ReturnedValue(path, call, leaf), written)
                if written is not None and value is not written:
                    (written if written._base is None else written._base).detach_()  # else 0 times NaN: gradients
                    written.copy_(value)
            return output
        return self.returned(path, call, output)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Number nothing inside: a module runs."""
        top = torch.overrides._get_current_function_mode() is self
        before, self._outside = self._outside, False
        if top:
            torch.overrides._pop_mode()
        try:
            yield
        finally:
            if top:
                torch.overrides._push_mode(self)
            self._outside = before

    def returned(self, path: str, call: int, output: Any) -> Any:
        """Enter the leaves of an output; returns it with the leaves that take their places."""
        if isinstance(output, Tensor):
            return self.made(ReturnedValue(path, call, 0), output)
        if not isinstance(output, (tuple, list, dict)) and type(output) not in SUPPORTED_NODES:
            return output
        leaves, spec = tree_flatten(output)
        new = [self.made(ReturnedValue(path, call, n), leaf) for n, leaf in enumerate(leaves)]
        same = all(one is other for one, other in zip(leaves, new, strict=True))
        return output if same else tree_unflatten(new, spec)

    def takes(self, tree: Any) -> None:
        """Note the arguments of a function or a module."""

    def made(self, key: ReturnedValue, leaf: Any) -> Any:
        """Enter a value; returns the one that takes its place."""
        raise NotImplementedError


class LearnedValues(_FrameFunctions):
    """Follows values with a gradient through the code around the blocks, in the forward of the example.

    Args:
        device: of the code around the blocks, if the blocks are on meta; results that hooks take out of a block are
            placeholders there.

    Attributes:
        layer_of: by key, the layer that makes a value.
        reads: by key, the layers that read it, except as the activation that enters a block.
        nodes: by key, its node in autograd's graph.
        entered: by the number of a layer, the keys of its activation.
        written: keys of values that were overwritten.
        same: the first key of a value that one call returned several times, by the others.
        unknown: by layer, the shape of a learned tensor of unknown origin that it read.
        began: by phase, the number that autograd gives to the next node.
        outer: by the name of a module that ran inside of a gated one, the other's name.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__()
        self._device, self._shown = device, dict[int, Tensor]()
        self.layer_of: dict[ReturnedValue, int] = {}
        self.reads: dict[ReturnedValue, set[int]] = {}
        self.nodes: dict[ReturnedValue, Any] = {}
        self.entered: dict[int, list[ReturnedValue]] = {}
        self.written: set[ReturnedValue] = set()
        self.same: dict[ReturnedValue, ReturnedValue] = {}
        self.unknown: dict[int, tuple[int, ...]] = {}
        self.began: list[int] = [0]
        self.outer: dict[str, str] = {}
        self._keys: dict[int, tuple[list[ReturnedValue], int]] = {}  # by id: keys, and the version of the values
        self._inner: set[ReturnedValue] = set()
        self._marked: set[int] = set()  # copies of activations, which enter blocks
        self._known: dict[int, Any] = {}  # weak references, so that no address is mistaken for an earlier one's

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function, and enter its result."""
        if self._device is not None and self._outside:
            args, kwargs = tree_map(self._on_device, (args, kwargs))
        return super().__torch_function__(func, types, args, kwargs)

    def _on_device(self, leaf: Any) -> Any:
        """A placeholder for a learned value on meta; any other leaf as it is."""
        if not isinstance(leaf, Tensor) or not leaf.is_meta or id(leaf) not in self._keys:
            return leaf
        if id(leaf) not in self._shown:
            shown = self._shown[id(leaf)] = stand_in_for(leaf, self._device)
            self._keys[id(shown)] = self._keys[id(leaf)][0], _version(shown)
        return self._shown[id(leaf)]

    def begin_phase(self, phase: int) -> None:
        """Begin the code after so many blocks, or the last code of the model."""
        self.phase = phase
        node = torch.ones((), requires_grad=True).clone().grad_fn
        assert node is not None
        self.began.append(node._sequence_nr())

    def made(self, key: ReturnedValue, leaf: Any) -> Any:
        """Enter a learned value, under one more key if it has some and is unchanged; returns it."""
        if isinstance(leaf, Tensor) and leaf.requires_grad and not isinstance(leaf, nn.Parameter):
            known, version = self._keys.get(id(leaf), ([], _version(leaf)))
            if version != _version(leaf):
                self.written.update(known)
                known = []
            if known and known[-1][:2] == key[:2]:
                self.same[key] = known[-1]
                return leaf
            self._keys[id(leaf)] = [*(each for each in known if each not in self._inner), key], _version(leaf)
            self._follow(leaf)
            self._marked.discard(id(leaf))
            self.layer_of[key], self.nodes[key] = self.phase, leaf.grad_fn
        return leaf

    def came_out(self, path: str, call: int, output: Any, outer: str) -> None:
        """Enter the results of a module inside of a running one, `outer`, which hooks may take out."""
        self.outer[path] = outer
        for n, leaf in enumerate(tree_leaves(output)):
            if isinstance(leaf, Tensor) and id(leaf) not in self._keys:
                self._inner.add(ReturnedValue(path, call, n))
                self.made(ReturnedValue(path, call, n), leaf)

    def takes(self, tree: Any) -> None:
        """Note that the current layer reads values."""
        for leaf in tree_leaves(tree):
            if not isinstance(leaf, Tensor) or isinstance(leaf, nn.Parameter) or id(leaf) in self._marked:
                continue
            if leaf.requires_grad:
                keys = self.keys(leaf)
                if not keys:
                    self.unknown.setdefault(self.phase, tuple(leaf.shape))
                for key in keys:
                    self.reads.setdefault(key, set()).add(self.phase)

    def keys(self, leaf: Tensor) -> list[ReturnedValue]:
        """The keys of a value; empty if it has none, or was overwritten under another name."""
        known, version = self._keys.get(id(leaf), ([], -1))
        return known if version == _version(leaf) else []

    def enter(self, layer: int, activation: Tensor, marked: Tensor, block: bool) -> None:
        """Note the activation that enters a block, or the code after the blocks, and its copy that enters in fact."""
        self.entered[layer] = self.keys(activation)
        self._follow(marked)
        if block:
            self._marked.add(id(marked))
        elif self.entered[layer]:
            self._keys[id(marked)] = self.entered[layer], _version(marked)

    def _follow(self, leaf: Tensor) -> None:
        """Drop the keys of a tensor when it is freed; the callback holds no values, which would live on in a cycle."""
        self._known[id(leaf)] = weakref.ref(leaf, partial(_forget, id(leaf), self._keys, self._marked))

    def carried(self, suffix: int, by_key: bool) -> Carried:
        """The values that cross boundaries of a chain.

        Args:
            suffix: the number of the last layer.
            by_key: whether activations are found by key in any case, as where a block runs several times.
        """
        reads = {key: set(layers) for key, layers in self.reads.items()}
        at_end = self.entered.get(suffix, [])
        needed = by_key or any(
            self.layer_of[key] < max(layers) and not (key in at_end and self.layer_of[key] == suffix - 1)
            for key, layers in reads.items()
        )
        for layer, keys in self.entered.items():
            for key in keys:
                reads.setdefault(key, set()).add(layer)
        later = {
            key: tuple(sorted(layer for layer in reads.get(key, ()) if layer > made))
            for key, made in self.layer_of.items()
        }
        reach = {key: (self.layer_of[key], layers) for key, layers in later.items() if layers}
        return Carried(reach, self.written, self.same, needed)


class Passing(_FrameFunctions):
    """The carried values in one forward of a range of layers.

    Args:
        carried: of the chain.
        first: the first layer that runs.
        hidden: the messages that enter it, one after the other; None for placeholders alone.
        pieces: their elements, where there are several.
        last: the layer before which the forward is left; `first` for the placeholders of all values that cross there.

    Attributes:
        received: values of the messages by key.
    """

    def __init__(
        self, carried: Carried, first: int, hidden: Tensor | None, last: int, pieces: Sequence[int] = ()
    ) -> None:
        super().__init__()
        self._carried, self._first, self._last = carried, first, last
        self._messages = () if hidden is None else hidden.split(pieces) if pieces else (hidden,)
        into = (carried.into.get(first) or {0: carried.at(first)}) if hidden is not None else {}
        out = (carried.out.get(last) if last > first else None) or {0: carried.at(last)}
        self._message_of = {key: number for number, keys in enumerate(into.values()) for key in keys}
        self._sent = [*out.values()]
        self._out = set().union(*self._sent)
        self._made: dict[ReturnedValue, Tensor] = {}
        self._starts = [0 for _ in self._messages]
        self._absent: dict[int, tuple[weakref.ref[Tensor], ReturnedValue]] = {}  # by id: placeholders of learned values
        self.received: dict[ReturnedValue, Tensor] = {}

    def made(self, key: ReturnedValue, leaf: Any) -> Any:
        """Enter a value of this run; returns the received one in place of a placeholder."""
        first = self._carried.same.get(key)
        if first in self._out and self.phase >= self._first and self._made.get(first) is not leaf:
            raise BatchError(
                f"{key.path!r} returns one tensor twice in the example, and two in this microbatch; give every "
                f"microbatch the way of the example through the model's code, or let it return the tensor once."
            )
        if first in self.received:
            return self.received[first]
        if key in self._message_of and isinstance(leaf, Tensor):
            self._absent.pop(id(leaf), None)  # a tensor that was written gets the values
            leaf = self.received[key] = self._cut(key, leaf)
        elif self.phase < self._first and key in self._carried.reach and isinstance(leaf, Tensor):
            self._absent[id(leaf)] = weakref.ref(leaf), key
        if key in self._out and isinstance(leaf, Tensor):
            self._made[key] = leaf
        return leaf

    def takes(self, tree: Any) -> None:
        """Refuse placeholders that a layer of this run reads.

        Raises:
            BatchError: the layer did not read this value in the example, so no message brings it.
        """
        if not self._absent or not self._first <= self.phase < self._last:
            return
        for leaf in tree_leaves(tree):
            found, key = self._absent.get(id(leaf), (None, None))
            if found is not None and key is not None and found() is leaf:
                raise BatchError(
                    f"The code after {self.phase} blocks reads the result of {key.path!r}, which it does not read in "
                    f"the example, so no message brings it. Give Engine(..., example=...) a microbatch that takes the "
                    f"same way through the model's code, or use pipeline_parallel=1."
                )

    def leave(self, layers: Sequence[Layer]) -> Any:
        """The packed values [N] that leave, those of one target after the other, in the widest of their dtypes.

        Without layers to run, the placeholders by key.

        Raises:
            BatchError: a value of the example was not made.
        """
        absent = self._out - self._made.keys()
        if absent:
            raise BatchError(
                f"{layers[self._last].name!r} or a later layer reads the result of {min(absent).path!r} in the "
                f"example, which was not made for this microbatch. Give every microbatch the way of the example "
                f"through the model's code, or use pipeline_parallel=1."
            )
        if self._first == self._last:
            return self._made
        return packed([value for keys in self._sent for key, value in self._made.items() if key in keys])

    def check(self, layers: Sequence[Layer]) -> None:
        """Refuse messages that were not used up by the placeholders before the first layer.

        Raises:
            BatchError: with both numbers of elements.
        """
        arrived = [message.numel() for message in self._messages]
        if arrived != self._starts:
            raise BatchError(
                f"{sum(arrived):,} elements enter {layers[self._first].name!r} from the stages before, and "
                f"this stage expects {sum(self._starts):,}; the shapes of values between blocks must follow from the "
                f"shapes of the microbatch, and the model's code must take the way of the example."
            )

    def _cut(self, key: ReturnedValue, leaf: Tensor) -> Tensor:
        number = self._message_of[key]
        start = self._starts[number]
        piece = self._messages[number][start : start + leaf.numel()]
        self._starts[number] += leaf.numel()
        if piece.numel() != leaf.numel():
            return leaf  # refused at the first layer
        piece = piece.view(leaf.shape).to(leaf.dtype)
        return piece.clone() if key in self._carried.written else piece


def packed(values: Sequence[Tensor]) -> Tensor:
    """The values [N] one after the other, in the widest of their dtypes."""
    if not values:
        return torch.empty(0)
    _, dtype = packed_shape(values)
    return torch.cat([value.to(dtype).reshape(-1) for value in values])


def packed_shape(values: Sequence[Tensor]) -> tuple[tuple[int, ...], torch.dtype]:
    """The shape and dtype of `packed`."""
    dtype = values[0].dtype if values else torch.get_default_dtype()
    for value in values:
        dtype = torch.promote_types(dtype, value.dtype)
    return (sum(value.numel() for value in values),), dtype


def hops_of(own: int, readers: Iterable[int], stages: int, most: float = math.inf) -> Iterator[Skip]:
    """The messages of a value of chunk `own` to the chunks that read it, in order ([Note: skips]).

    Args:
        most: chunks from the source of a message to its target; a chunk between them passes it on.
    """
    holders = [own]
    for reader in readers:
        here = next((chunk for chunk in reversed(holders) if (reader - chunk) % stages == 0), None)
        if here is None:
            here = holders[-1] + (reader - holders[-1]) % stages
            while holders[-1] < here:
                holders.append(int(min(here, holders[-1] + most)))
                yield Skip(*holders[-2:])
        if here != reader:
            yield Skip(here, reader)
            holders.append(reader)


def _forget(address: int, keys: dict[int, Any], marked: set[int], reference: Any) -> None:
    keys.pop(address, None)
    marked.discard(address)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
