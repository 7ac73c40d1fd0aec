"""The executor: carries out the list of one pipeline rank, action by action.

The messages of a list are asynchronous; a forward or backward waits only for its own input.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from zeroshard.comm.collectives import Purpose
from zeroshard.parts.part import MicrobatchRows, Parts
from zeroshard.pipeline.cut.bypass import Bypass
from zeroshard.pipeline.run.chunks import Chunks
from zeroshard.pipeline.run.messages import NOTHING, Arrived, Boundary, Messages, Shape, is_empty, widened
from zeroshard.pipeline.run.tied_weights import TiedWeights
from zeroshard.pipeline.stage import Stage
from zeroshard.recompute.chunks import ChunkForward, ChunkInputs
from zeroshard.schedule import Action, Kind, Schedule
from zeroshard.schedule.actions import COMPUTE
from zeroshard.schedule.run import Handler, Interpreter, Key, key_of, peer_of
from zeroshard.step.context import WeightGradients
from zeroshard.step.losses import Loss
from zeroshard.step.sequence import Run, StepSequence


@dataclass(slots=True)
class Microbatch:
    """One microbatch: the model's batch, the share of its loss in the update's, its rows, and its shapes."""

    batch: Any
    weight: float
    rows: MicrobatchRows | None = None
    shapes: dict[int, Boundary] = field(default_factory=dict)


@dataclass(slots=True)
class _Flight:
    """A microbatch between its forward and its backward on one chunk."""

    buffers: list[Tensor] = field(default_factory=list)  # of messages; deferred weight gradients read them
    hidden: Tensor | None = None
    beside: list[Arrived] = field(default_factory=list)  # the values beside `hidden`
    back: list[Tensor] | None = None  # gets the gradient of `hidden`, if that is no leaf
    edge: GradientEdge | None = None
    loss: Loss | None = None
    again: ChunkForward | None = None  # if the forward is recomputed
    store: WeightGradients = field(default_factory=WeightGradients)


class Executor:
    """Runs actions on this rank's chunks.

    Args:
        run: runs the model on a microbatch, down to the loss.
        losses: gets the losses of microbatches at the end of the model, means times their weights.
        inputs: keeps the inputs of chunks.

    Attributes:
        interpreter: of the actions.
        messages: of this rank; random_numbers: of its modules.
    """

    def __init__(
        self,
        stage: Stage,
        parts: Parts,
        sequence: StepSequence,
        run: Run,
        losses: dict[int, Tensor],
        inputs: ChunkInputs,
    ) -> None:
        self._stage, self._sequence, self._backward, self._inputs = stage, sequence, sequence.backward, inputs
        self._run, self._losses = run, losses
        self.messages, self.random_numbers = Messages(stage, parts.messages, inputs.scratch), parts.random_numbers
        self.tied = TiedWeights(stage, parts, self.messages)
        self._flights: dict[Key, _Flight] = {}
        self._out: dict[tuple[Kind, int, int, int], Tensor] = {}  # by chunk, the one that it is for, and microbatch
        self._parts: dict[int, Microbatch] = {}
        self._last = stage.pipeline.layout.all_chunks - 1
        self._chunks = Chunks(stage, parts, sequence, self.tied)
        handlers: Mapping[Kind, Handler] = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backwards,
            Kind.INPUT_GRADIENT: self._backwards,
            Kind.WEIGHT_GRADIENT: self._weight_gradients,
            Kind.SEND_FORWARD: self._send_forward,
            Kind.SEND_BACKWARD: self._send_backward,
            Kind.RECEIVE_FORWARD: self._receive_forward,
            Kind.RECEIVE_BACKWARD: self._receive_backward,
            Kind.UPDATE: self._update,
            **self._chunks.handlers,
        }
        self.interpreter = Interpreter(handlers, stage.world.mesh.now)

    def feed(self, parts: Mapping[int, Microbatch]) -> None:
        """Add microbatches, by number, for coming actions."""
        self._parts.update(parts)

    def shapes(self, batch: Any) -> dict[int, Boundary]:
        """The messages of a microbatch at the borders of this rank's chunks, by the entered layer."""
        return self.messages.shapes(batch, partial(self._run, batch))

    def run(self, actions: Schedule) -> None:
        """Carry out actions in order."""
        self._at_once = _followed_by_their_backward(actions) if self._inputs.recomputes else set()
        self._chunks.begin(actions)
        self.interpreter.run(actions)

    def under_way(self) -> frozenset[object]:
        """The microbatches and messages between their first and their last action."""
        return frozenset[object]((*self._flights, *self._out, *self.messages.awaited))

    def restart(self) -> None:
        """Count versions anew; nothing is in flight."""
        self._chunks.restart()

    @torch.no_grad()
    def evaluate(self, actions: Schedule, batch: Any, run: Run) -> Any:
        """Run the forwards of `actions` on one microbatch, keeping nothing; returns the output on the last stage."""
        number = next((action.microbatch for action in actions if action.microbatch is not None), 0)
        kept, self._parts, self._run = (self._parts, self._run), {number: Microbatch(batch, 1.0)}, run
        self._at_once, result = set(), None
        self._chunks.trains = False
        try:
            for action in actions:
                if action.kind is Kind.FORWARD:
                    flight = self._enter(action)
                    result, bypass = self._compute(action, flight)
                    self._pass_on(action, result, bypass)
                    self._leave(action, flight)
                else:
                    self.interpreter.run([action])
        finally:
            self._parts, self._run = kept
            self._chunks.trains = True
        return result if self._is_last(actions[-1].chunk) else None

    def _forward(self, action: Action) -> None:
        chunk, j = key_of(action)
        flight = self._flights[chunk, j] = self._enter(action)
        start = self.interpreter.now()
        if self._inputs.recomputes and (chunk, j) not in self._at_once:
            flight.again = self._inputs.begin(f"chunk {chunk} of microbatch {j}")
            with torch.no_grad():
                output, bypass = self._compute(action, flight)
            self._put_aside(flight, flight.again, _values_of(output))
        else:
            output, bypass = self._compute_once(action, flight)
        self.interpreter.note(action, start)
        if self._is_last(chunk):
            self._losses[j] = output.weighted(self._parts[j].weight).value.detach()
        self._pass_on(action, output, bypass)
        if flight.again is None:
            self._keep(action, flight, output)

    def _enter(self, action: Action) -> _Flight:
        """Wait for the chunk's input, and install its weights."""
        chunk, j = key_of(action)
        flight = _Flight()
        if chunk > 0:
            before = self._boundary(self._stage.firsts[chunk], j)
            local = self._joined(Kind.FORWARD, chunk, j, before.into, flight)
            flight.beside = self.messages.beside.take(chunk, j, before.brought)
            flight.hidden = local.detach().requires_grad_(local.is_floating_point() and torch.is_grad_enabled())
        for debt in self.tied.borrowed[chunk]:
            debt.begin((chunk, j))
        self._chunks.use(action)
        return flight

    def _joined(self, kind: Kind, chunk: int, j: int, parts: dict[int, Shape], flight: _Flight) -> Tensor:
        """The input of a chunk, or the gradient of its output: the parts from other chunks, one after the other."""
        found, buffers = [], []
        for other, shape in parts.items():
            local = self._out.pop((kind, other, chunk, j), None)
            if local is None and is_empty(shape):
                local = torch.empty(shape[0], dtype=shape[1], device=self._stage.mesh.device)
            elif local is None:
                buffers.append(self.messages.take(_name(kind, other, chunk, j)))
                local = _viewed(buffers[-1], shape)
            found.append(local)
        if len(found) == 1:
            flight.buffers += buffers
            return found[0]
        whole = torch.cat(found)
        for buffer in buffers:
            self.messages.release(buffer)
        return whole

    def _divide(self, kind: Kind, chunk: int, j: int, whole: Tensor, parts: dict[int, Shape]) -> None:
        """Keep a chunk's output, or the gradient of its input, for the chunks that get its parts."""
        found = whole.split([size[0] for size, _ in parts.values()]) if len(parts) > 1 else (whole,)
        for (other, (_, dtype)), part in zip(parts.items(), found, strict=True):
            self._out[kind, chunk, other, j] = part.to(dtype)

    def _put_aside(self, flight: _Flight, forward: ChunkForward, output: Tensor) -> None:
        """Keep the input of a chunk for its recomputation."""
        forward.ends(output, None if flight.hidden is None else self._inputs.keep(flight.hidden))
        flight.hidden = None
        if self._inputs.moves:
            self._release(flight)

    def _compute_once(self, action: Action, flight: _Flight) -> tuple[Any, Bypass | None]:
        """A forward with a graph; only the graph holds its input, unless it stays in its buffer."""
        if flight.hidden is None or not self._inputs.moves:
            return self._compute(action, flight)
        arrived, flight.back = flight.hidden.detach(), []
        leaf = arrived.new_empty(0).requires_grad_()
        flight.hidden = hidden = _Entrance.apply(leaf, arrived)  # type: ignore[no-untyped-call]
        hidden.register_hook(flight.back.append)
        self._release(flight)
        result = self._compute(action, flight)
        flight.hidden = None
        return result

    def _compute_again(self, action: Action, flight: _Flight, hidden: Tensor | None) -> Tensor:
        """The recomputation of a forward: its output, with a graph."""
        flight.hidden = hidden
        output, _ = self._compute(action, flight)
        self._keep(action, flight, output)
        return _values_of(output)

    def _release(self, flight: _Flight) -> None:
        for buffer in flight.buffers:
            self.messages.release(buffer)
        flight.buffers.clear()

    def _leave(self, action: Action, flight: _Flight) -> None:
        chunk, j = key_of(action)
        if flight.again is not None:
            flight.again.drop()
        self._release(flight)
        for buffer in (each.buffer for each in flight.beside if each.buffer is not None):
            self.messages.release(buffer)
        for debt in self.tied.borrowed[chunk]:
            debt.borrowed.end((chunk, j))

    def _compute(self, action: Action, flight: _Flight) -> tuple[Any, Bypass | None]:
        """The chunk's own forward: its output, and the values beside it, if any cross stages."""
        chunk, j = key_of(action)
        stage = self._stage
        forward = partial(self._run, self._parts[j].batch)
        first, last = stage.firsts[chunk], stage.firsts[chunk + 1]
        bypass = None
        if stage.chain.crossing.groups or stage.chain.carried.needed:
            bypass = Bypass()
            for values, message, _ in flight.beside:
                bypass.known |= values.unpack(message)
        with self._deferring(flight), self.random_numbers.microbatch(self._parts[j].rows):
            listener = self._chunks.early.listener(action)
            pieces = self._boundary(first, j).pieces if chunk else ()
            output = stage.chain.run(first, last, forward, flight.hidden, listener, bypass, pieces)
            return output if self._is_last(chunk) else widened(output, self._boundary(last, j).leaving[1]), bypass

    def _deferring(self, flight: _Flight) -> AbstractContextManager[None]:
        """Leave weight gradients to a microbatch's store, in its forward and its recomputation."""
        deferral = self._stage.deferral
        return nullcontext() if deferral is None else deferral.into(flight.store)

    def _pass_on(self, action: Action, output: Any, bypass: Bypass | None) -> None:
        chunk, j = key_of(action)
        if not self._is_last(chunk):
            layer = self._stage.firsts[chunk + 1]
            after = self._boundary(layer, j)
            self.messages.check(output, after.leaving, layer)
            self._divide(Kind.FORWARD, chunk, j, output.detach(), after.out)
            self.messages.beside.keep(chunk, j, after.handed, bypass)

    def _keep(self, action: Action, flight: _Flight, output: Any) -> None:
        """Keep the root of the graph for the backward, not its output."""
        if self._is_last(action.chunk):
            flight.loss = output.weighted(self._parts[key_of(action)[1]].weight)
        elif output.requires_grad:
            flight.edge = get_gradient_edge(output)

    def _backwards(self, action: Action) -> None:
        chunk, j = key_of(action)
        flight = self._flights[chunk, j]
        gradient = self._gradient_of_output(chunk, j, flight)
        weight: float | Tensor = 1.0 if self._is_last(chunk) else self.messages.weights.take(chunk, j)
        start = self.interpreter.now()
        for debt in self.tied.borrowed[chunk]:  # the model's own recomputation needs the weights of its forward
            debt.borrowed.again((chunk, j))
        self._chunks.use(action)
        if flight.again is not None:
            flight.again.compute(partial(self._compute_again, action, flight))
        self._chunks.backward(action)
        with self._backward.local(), self._deferring(flight):
            if flight.loss is not None:
                weight = self._sequence.add(flight.loss)
            elif flight.edge is not None:
                with self._backward.scaled(weight):
                    torch.autograd.backward((flight.edge,), (gradient,))
        self._backward.add_one()
        self.interpreter.note(action, start)
        if chunk > 0:
            before = self._boundary(self._stage.firsts[chunk], j)
            self._divide(Kind.BACKWARD, chunk, j, self._gradient_of_input(before, flight), before.into)
            self.messages.weights.keep(chunk - 1, j, weight)
        flight.loss = flight.edge = flight.hidden = None
        if action.kind is Kind.BACKWARD:
            self._land(action)

    def _gradient_of_output(self, chunk: int, j: int, flight: _Flight) -> Tensor | None:
        """The gradient from the next chunk."""
        if self._is_last(chunk):
            return None
        after = self._boundary(self._stage.firsts[chunk + 1], j)
        return self._joined(Kind.BACKWARD, chunk, j, after.out, flight)

    def _gradient_of_input(self, before: Boundary, flight: _Flight) -> Tensor:
        """The gradient for the chunks before this one."""
        back = next(iter(flight.back or ()), None) if flight.hidden is None else flight.hidden.grad
        if back is None:
            size, dtype = before.entering
            return torch.zeros(size, dtype=dtype, device=self._stage.mesh.device)
        return back

    def _weight_gradients(self, action: Action) -> None:
        start = self.interpreter.now()
        self._chunks.backward(action)
        with self._backward.local(), self._backward.scaled():
            self._flights[key_of(action)].store.compute()
        self.interpreter.note(action, start)
        self._land(action)

    def _land(self, action: Action) -> None:
        """Release a microbatch after its last action on a chunk."""
        chunk, j = key_of(action)
        self._leave(action, self._flights.pop((chunk, j)))
        if not any(number == j for _, number in self._flights) and chunk < self._stage.pipeline.layout.stages:
            self._parts.pop(j, None)

    def _boundary(self, layer: int, j: int) -> Boundary:
        part = self._parts[j]
        if not part.shapes:
            part.shapes = self.shapes(part.batch)
        return part.shapes[layer]

    def _is_last(self, chunk: int) -> bool:
        return chunk == self._last

    @property
    def _sending(self) -> Purpose:
        return Purpose.SEND_ACTIVATIONS if self._chunks.trains else Purpose.SEND_TO_EVALUATE

    def _receive_forward(self, action: Action) -> None:
        (chunk, j), peer, source = key_of(action), peer_of(action), self._stage.other(action)
        layer = self._stage.firsts[chunk]
        before, purpose = self._boundary(layer, j), self._sending
        saved, shape = self._chunks.trains and len(before.into) == 1, before.into.get(source, NOTHING)
        self.messages.post(_name(Kind.FORWARD, source, chunk, j), shape, peer, purpose, layer, saved=saved)
        self.messages.beside.post((source, chunk, j), before.brought.get(source), peer, purpose)

    def _receive_backward(self, action: Action) -> None:
        (chunk, j), peer, source = key_of(action), peer_of(action), self._stage.other(action)
        layer = self._stage.firsts[chunk + 1]
        shape = self._boundary(layer, j).out[source]
        self.messages.post(_name(Kind.BACKWARD, source, chunk, j), shape, peer, Purpose.SEND_GRADIENTS, layer)
        if source == chunk + 1:
            self.messages.weights.post(chunk, j, peer)

    def _send_forward(self, action: Action) -> None:
        (chunk, j), peer, target = key_of(action), peer_of(action), self._stage.other(action)
        output, layer = self._out.pop((Kind.FORWARD, chunk, target, j), None), self._stage.firsts[chunk + 1]
        if output is not None:
            self.messages.send(_name(Kind.FORWARD, chunk, target, j), output, peer, self._sending, layer=layer)
        self.messages.beside.send((chunk, target, j), peer, self._sending)

    def _send_backward(self, action: Action) -> None:
        (chunk, j), peer, target = key_of(action), peer_of(action), self._stage.other(action)
        gradient, layer = self._out.pop((Kind.BACKWARD, chunk, target, j)), self._stage.firsts[chunk]
        self.messages.send(_name(Kind.BACKWARD, chunk, target, j), gradient, peer, Purpose.SEND_GRADIENTS, layer=layer)
        if target == chunk - 1:
            self.messages.weights.send(target, j, peer)

    def _update(self, action: Action) -> None:
        self._chunks.decide()
        start = self.interpreter.now()
        self._chunks.update(action)
        self.interpreter.note(action, start)


class _Entrance(torch.autograd.Function):
    """The input of a chunk, copied into a graph that holds only tensors saved by operations: a leaf would stay."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, hidden: Tensor) -> Tensor:
        """The copy; `leaf` lets it require a gradient, which a hook takes."""
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        """No gradient: it has no inputs in the graph."""
        return None, None


def _followed_by_their_backward(actions: Sequence[Action]) -> set[Key]:
    """The forwards whose backward is the next compute on this rank: recomputing them would gain nothing."""
    computes = [action for action in actions if action.kind in COMPUTE]
    pairs = pairwise(computes)
    return {
        key_of(a)
        for a, b in pairs
        if a.kind is Kind.FORWARD and b.kind in (Kind.BACKWARD, Kind.INPUT_GRADIENT) and a[1:3] == b[1:3]
    }


def _name(kind: Kind, source: int, target: int, j: int) -> str:
    """The name of a message from one chunk to another."""
    name = f"input of F{target}.{j}" if kind is Kind.FORWARD else f"gradient for B{target}.{j}"
    return name if abs(target - source) == 1 else f"{name} of chunk {source}"


def _viewed(buffer: Tensor, shape: Shape) -> Tensor:
    """The tensor of a shape in a buffer, which may end in padding."""
    size, _ = shape
    return buffer[: torch.Size(size).numel()].view(size)


def _values_of(output: Any) -> Tensor:
    return output.value if isinstance(output, Loss) else output
