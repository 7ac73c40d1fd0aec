"""The messages of one pipeline rank, and the buffers they arrive in.

Both ends compute the shape of a message from the microbatch, once per shape, and put it into the message's name. So
ranks with different batches get an error, and no shape is sent.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from zeroshard.comm.collectives import BACKWARDS, Comm, Purpose
from zeroshard.comm.pending import Pending
from zeroshard.errors import BatchError
from zeroshard.memory.ledger import Arena
from zeroshard.parts.part import Scratch
from zeroshard.pipeline.cut.bypass import Bypass, SentValues
from zeroshard.pipeline.cut.carried import packed_shape
from zeroshard.pipeline.cut.origins import ReturnedValue
from zeroshard.pipeline.run.scattered import GATHERS
from zeroshard.pipeline.stage import Stage
from zeroshard.schedule import Action, Kind
from zeroshard.schedule.lower import LOANS_UNDER_WAY
from zeroshard.step.losses import adds_penalties
from zeroshard.traffic import LOANS

UNDER_WAY = 4  # messages in flight before a wait for the oldest; lists are verified even for none
SENDS = {Kind.SEND_FORWARD: Purpose.SEND_ACTIVATIONS, Kind.SEND_BACKWARD: Purpose.SEND_GRADIENTS}
RECEIVES = {Kind.RECEIVE_FORWARD: Purpose.SEND_ACTIVATIONS, Kind.RECEIVE_BACKWARD: Purpose.SEND_GRADIENTS}
INTO = (Kind.RECEIVE_FORWARD, Kind.SEND_BACKWARD)  # messages of a chunk's input
Shape = tuple[tuple[int, ...], torch.dtype]
NOTHING: Shape = ((0,), torch.uint8)


class Boundary(NamedTuple):
    """The messages at a boundary between two chunks, for the microbatches of one shape.

    Attributes:
        entering: the input of the chunk after it.
        leaving: the output of the chunk before it, which is the same unless messages pass over chunks ([Note: skips]).
        into: the part of the input from each chunk.
        out: the part of the output for each chunk.
        brought: values beside the input, from each chunk that sends some.
        handed: values beside the output, for each chunk that gets some.
    """

    entering: Shape
    leaving: Shape
    into: dict[int, Shape]
    out: dict[int, Shape]
    brought: dict[int, SentValues]
    handed: dict[int, SentValues]

    @property
    def pieces(self) -> list[int]:
        """Elements of each part of the input, if there are several."""
        return [size[0] for size, _ in self.into.values()] if len(self.into) > 1 else []


class Messages:
    """Sends and receives of one rank; only `take`, `finish` and a full queue of sends wait.

    Attributes:
        weights: of penalties.
        beside: values beside activations.
    """

    def __init__(self, stage: Stage, arena: Arena, inputs: Scratch | None = None) -> None:
        self._stage, self._comm, self._arena, self._inputs = stage, stage.world, arena, inputs or arena
        self._lenders: dict[int, Scratch] = {}  # of posted buffers
        self.weights, self.beside = PenaltyWeights(stage, self), ValuesBeside(stage, self)
        self._shapes: dict[Any, dict[int, Boundary]] = {}
        self._posted: dict[str, tuple[Pending, Tensor]] = {}
        self._gathers: dict[str, tuple[Tensor, Callable[[Tensor], None]]] = {}  # of messages whose parts come scattered
        self._sent: dict[tuple[Purpose, int], list[tuple[Pending, Tensor, bool]]] = defaultdict(list)

    @property
    def comm(self) -> Comm:
        """The collectives of all ranks of the pipeline."""
        return self._comm

    @property
    def awaited(self) -> Iterable[str]:
        """The names of messages that this rank has posted a buffer for."""
        return self._posted

    def shapes(self, microbatch: Any, forward: Callable[[], Any]) -> dict[int, Boundary]:
        """The messages of this rank's chunks, by the layer after each boundary."""
        flat = type(microbatch) is tuple and all(type(leaf) is Tensor for leaf in microbatch)  # pytrees are slow
        leaves = microbatch if flat else tree_leaves(microbatch)
        key = tuple((tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else type(leaf) for leaf in leaves)
        if key not in self._shapes:
            stage, last = self._stage, len(self._stage.chain.layers)
            chunks = stage.pipeline.layout.chunks_of(stage.number)
            layers = {layer for c in chunks for layer in stage.firsts[c : c + 2]} - {0, last}
            self._shapes[key] = {layer: self._boundary(layer, forward) for layer in sorted(layers)}
        return self._shapes[key]

    def _boundary(self, layer: int, forward: Callable[[], Any]) -> Boundary:
        chain, known = self._stage.chain, Bypass()
        found, after = chain.run_standing_in(layer, layer, forward, known), self._stage.chunk_of_layer(layer)
        routes = chain.crossing.routes.items()
        brought, handed = (
            {hop[end]: SentValues.of(groups, known.known) for hop, groups in routes if hop[1 - end] == after - end}
            for end in (0, 1)
        )
        if layer in chain.carried.into:
            sides = chain.carried.into[layer], chain.carried.out[layer]
            into, out = ({c: packed_shape(_of(found, keys)) for c, keys in side.items()} for side in sides)
            entering, leaving = (packed_shape([v for c in side for v in _of(found, side[c])]) for side in sides)
            return Boundary(entering, leaving, into, out, brought, handed)
        one = isinstance(found, Tensor)
        shape = (tuple(found.shape), found.dtype) if one else packed_shape([*found.values()])
        return Boundary(shape, shape, {after - 1: shape}, {after: shape}, brought, handed)

    def check(self, output: Tensor, expected: Shape, layer: int) -> None:
        """Refuse an output of another shape than the next stage expects.

        Raises:
            BatchError: with both shapes.
        """
        if (tuple(output.shape), output.dtype) != expected:
            names = self._stage.chain.layers
            raise BatchError(
                f"{names[layer - 1].name!r} hands on {list(output.shape)} {output.dtype}, and {names[layer].name!r} on "
                f"the next stage expects {list(expected[0])} {expected[1]}; what a block returns must depend on the "
                f"shapes of the microbatch alone."
            )

    def post(
        self, name: str, shape: Shape, peer: int, purpose: Purpose, layer: int | None = None, saved: bool = False
    ) -> None:
        """Post a buffer for the message `name`.

        Args:
            layer: of an activation, or of its gradient: the layer that it enters.
            saved: whether it is kept for a backward.
        """
        if is_empty(shape):
            return  # neither end starts a message
        size, dtype = shape
        numel, scattered = torch.Size(size).numel(), self._stage.scattered.get(layer)
        lender = self._inputs if saved else self._arena
        room = lender.take(numel if scattered is None else scattered.room(numel), dtype, "messages")
        self._lenders[id(room)] = lender
        if scattered is None:
            self.post_into(name, room, size, peer, purpose)
            return
        own, label = scattered.own(room), name.partition(".")[0]
        self.post_into(name, own, own.shape, peer, purpose)
        self._gathers[name] = room, partial(scattered.gather, whole=numel, sent=purpose, label=label)

    def post_into(self, name: str, buffer: Tensor, size: Sequence[int], peer: int, purpose: Purpose) -> None:
        """Post `buffer` for the message `name`."""
        self._posted[name] = (self._comm.receive(buffer, peer, purpose, _label(name, size)), buffer)

    def take(self, name: str) -> Tensor:
        """Wait for the message `name`; the caller passes its buffer to `release` after the last use.

        If the message is scattered, a collective call of the replica's ranks; the buffer may then end in padding.
        """
        pending, buffer = self._posted[name]
        pending.wait()
        del self._posted[name]
        if name in self._gathers:
            buffer, gather = self._gathers.pop(name)
            gather(buffer)
        return buffer

    def release(self, buffer: Tensor) -> None:
        """Return the buffer of a message."""
        self._lenders.pop(id(buffer)).give(buffer)

    def send(
        self,
        name: str,
        tensor: Tensor,
        peer: int,
        purpose: Purpose,
        scratch: bool = False,
        layer: int | None = None,
    ) -> None:
        """Start to send.

        Args:
            scratch: the tensor is the arena's, and free once it is sent.
            layer: as of `post`.
        """
        if not tensor.numel():
            return
        scattered = self._stage.scattered.get(layer)
        tensor = tensor.contiguous() if scattered is None else scattered.part(tensor)
        sent = self._sent[purpose, peer]
        sent.append((self._comm.send(tensor, peer, purpose, _label(name, tensor.shape)), tensor, scratch))
        while len(sent) > (LOANS_UNDER_WAY if purpose in LOANS else UNDER_WAY):
            self._drop(sent.pop(0))

    def planned(self, action: Action, layer: int, boundary: Boundary | None) -> tuple[Purpose, int] | None:
        """The purpose and elements of an activation's message, or of the gather after it; None if there is none."""
        scattered, chunk = self._stage.scattered.get(layer), action.chunk
        purpose, after = SENDS.get(action.kind), RECEIVES.get(action.kind)
        if boundary is None or (purpose is None and (after is None or scattered is None)):
            return None if purpose is None else (purpose, 0)
        other = self._stage.other(action)
        size, _ = (boundary.into if action.kind in INTO else boundary.out).get(other, NOTHING)
        numel = torch.Size(size).numel()
        if purpose is None:
            assert after is not None
            return GATHERS[after], numel
        numel = numel if scattered is None else scattered.numel(numel)
        if purpose in BACKWARDS:
            return purpose, numel + (self.weights.numel if other == chunk - 1 else 0)
        return purpose, numel + (boundary.handed[other].nbytes if other in boundary.handed else 0)

    def finish(self) -> None:
        """Wait for all sends."""
        for sent in self._sent.values():
            while sent:
                self._drop(sent.pop(0))

    def _drop(self, sent: tuple[Pending, Tensor, bool]) -> None:
        pending, tensor, scratch = sent
        pending.wait()
        if scratch:
            self._arena.give(tensor)


Weight = float | Tensor
SCALAR: Shape = ((1,), torch.float32)


class PenaltyWeights:
    """The weights of penalties, sent from the loss to earlier stages: a scalar beside each gradient message.

    A penalty has its microbatch's weight in the mean of the step ([Note: penalties]). If losses are sums, only the
    stage with the loss has this weight, when the backward begins. Models without penalties send nothing.
    """

    def __init__(self, stage: Stage, messages: "Messages") -> None:
        self._messages, self._device = messages, stage.mesh.device
        self._needed = adds_penalties(stage.chain.model)
        self._known: dict[tuple[int, int], Weight] = {}  # by the chunk that the gradient goes to, and microbatch

    @property
    def numel(self) -> int:
        """Elements beside each gradient."""
        return int(self._needed)

    def keep(self, chunk: int, j: int, weight: Weight) -> None:
        """Keep the weight with which the backward of the next chunk has run."""
        if self._needed:
            self._known[chunk, j] = weight

    def take(self, chunk: int, j: int) -> Weight:
        """The weight of a backward whose gradient has arrived."""
        if not self._needed:
            return 1.0
        if (chunk, j) in self._known:
            return self._known.pop((chunk, j))
        buffer = self._messages.take(_weight(chunk, j))
        weight = buffer[0].clone()
        self._messages.release(buffer)
        return weight

    def post(self, chunk: int, j: int, peer: int) -> None:
        """Post the receive of the weight with the gradient for a chunk."""
        if self._needed:
            self._messages.post(_weight(chunk, j), SCALAR, peer, Purpose.SEND_GRADIENTS)

    def send(self, chunk: int, j: int, peer: int) -> None:
        """Send the weight with the gradient for a chunk."""
        if self._needed:
            weight = torch.ones(1, device=self._device) * self._known.pop((chunk, j))
            self._messages.send(_weight(chunk, j), weight, peer, Purpose.SEND_GRADIENTS)


Way = tuple[int, int, int]  # the chunks that send and get values, and the microbatch


class Arrived(NamedTuple):
    """A message of values beside an input, with the buffer to release after its last use."""

    values: SentValues
    message: Tensor
    buffer: Tensor | None


class ValuesBeside:
    """Values of earlier layers that later chunks read beside the activation, in one message for each of them."""

    def __init__(self, stage: Stage, messages: "Messages") -> None:
        self._messages, self._device = messages, stage.mesh.device
        self._left: dict[Way, Tensor] = {}

    def keep(self, chunk: int, j: int, handed: Mapping[int, SentValues], beside: Bypass | None) -> None:
        """Pack the values for other chunks, after a chunk has run."""
        for target, values in handed.items():
            if values and beside is not None:
                self._left[chunk, target, j] = values.pack(beside.known, self._device)

    def take(self, chunk: int, j: int, brought: Mapping[int, SentValues]) -> list[Arrived]:
        """The messages for a chunk."""
        found = []
        for source, values in brought.items():
            local = self._left.pop((source, chunk, j), None)
            buffer = self._messages.take(_beside((source, chunk, j))) if values and local is None else None
            message = buffer if local is None else local
            found += [] if message is None else [Arrived(values, message, buffer)]
        return found

    def post(self, way: Way, values: SentValues | None, peer: int, purpose: Purpose) -> None:
        """Post the receive of values, if there are some."""
        if values:
            self._messages.post(_beside(way), ((values.nbytes,), torch.uint8), peer, purpose)

    def send(self, way: Way, peer: int, purpose: Purpose) -> None:
        """Send values, if there are some."""
        message = self._left.pop(way, None)
        if message is not None:
            self._messages.send(_beside(way), message, peer, purpose)


def _of(found: Mapping[ReturnedValue, Tensor], keys: set[ReturnedValue]) -> list[Tensor]:
    return [value for key, value in found.items() if key in keys]


def _beside(way: Way) -> str:
    source, chunk, j = way
    return f"values of chunk {source} beside the input of F{chunk}.{j}"


def _weight(chunk: int, j: int) -> str:
    return f"weight for B{chunk}.{j}"


def _label(name: str, size: Sequence[int]) -> str:
    return f"{name} {list(size)}"


def is_empty(shape: Shape) -> bool:
    """Whether a message has no elements, as between the chunks of two towers: it is not sent."""
    return 0 in shape[0]


def widened(output: Tensor, dtype: torch.dtype) -> Tensor:
    """An activation in the dtype that the next stage expects, which torch.autocast may have narrowed.

    The next layer narrows it again, and so is its gradient. Shapes come from the meta device, which has no autocast.
    """
    narrowed = torch.is_autocast_enabled(output.device.type) and output.dtype.itemsize < dtype.itemsize
    return output.to(dtype) if narrowed else output
