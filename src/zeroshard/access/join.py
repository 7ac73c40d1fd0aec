"""Uneven numbers of batches: a rank whose batches have ended takes part in the steps of the others with weight zero.

[Note: join] Inside of `engine.join()` each collective call of the engine begins with a small message that names it. A
rank that has left its loop answers until no rank is in its loop: it makes the same call, on a batch of the lowest rank
that has one, with a loss of count 0. Losses are sums over counts inside, a mean counting 1, so such a rank adds nothing
and the step is that of a plain loop over the batches that there are (as `torch.distributed.algorithms.Join`, whose
ranks repeat collectives instead). Options of the optimizer, which a schedule of the other ranks may change, are taken
over; buffers and random numbers are put back at the end.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from zeroshard.checkpoint import rng
from zeroshard.checkpoint.facts import plain, setting
from zeroshard.comm.collectives import Comm
from zeroshard.errors import CommError, PlanError, ZeroshardError
from zeroshard.optim.states.whole_states import NAMES, decoded, encoded
from zeroshard.step.backward import Backward
from zeroshard.step.losses import Loss, Unjoined

END = "end"  # the call of a rank without batches
FAILED = "failed"  # of one whose own code raised an error
LABEL = "engine.join()"
ON_BATCHES = ("__call__", "train_step")
Frame = Mapping[str, Any]


class Joined(Protocol):
    """The calls of an engine that a rank without batches repeats."""

    model: nn.Module
    _joins: Unjoined

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """A forward."""

    def backward(self, loss: Tensor, count: Any = None) -> None:
        """A backward."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Backwards without a reduction."""


class Joins(Unjoined):
    """The `join` contexts of one engine ([Note: join]).

    Args:
        world: all ranks.
        groups: the optimizer's groups.
        refusal: the reason why the plan takes no uneven batches; None if it takes them.
    """

    def __init__(
        self,
        world: Comm,
        backward: Backward,
        groups: Callable[[], Sequence[dict[str, Any]]],
        refusal: str | None,
    ) -> None:
        self._world, self._backward, self._groups, self._refusal = world, backward, groups, refusal
        self._repeats = False  # calls of another rank
        self._example: tuple[Sequence[Any], Mapping[str, Any]] | None = None
        self._outputs: list[Any] = []  # of repeated forwards without a backward
        self._own = 0  # steps that this rank took by itself

    def announce(self, method: str, *args: Any, **kwargs: Any) -> None:
        """Name a call that this rank makes now; a collective call inside of `join`.

        Raises:
            CommError: another rank makes another call.
        """
        if self._repeats:
            return
        batch, self._own = method in ON_BATCHES, self._own + (method in ("step", "train_step"))
        frame = {
            "call": method,
            "args": [] if batch else list(args),
            "grad": torch.is_grad_enabled(),
            "reduces": self._backward.reduces,
            "options": self._options(),
        }
        everyone = self._world.agree_on(frame, LABEL)
        self._checked(everyone)
        if batch and any(theirs.get("lacks") for theirs in everyone):
            self._share(everyone, (args, kwargs))

    def weighed(self, loss: Loss) -> Loss:
        """A loss as a sum with its count inside of `join`: a mean counts 1, that of a repeated call 0."""
        if self._repeats:
            return Loss(_nothing_of(loss.value), 0.0)
        return loss if loss.items is not None else Loss(loss.value.float(), 1.0)

    @contextmanager
    def within(self, engine: Joined) -> Iterator[None]:
        """As `JoinAccess.join`."""
        if self._refusal is not None:
            raise PlanError(f"engine.join() is not for this plan: {self._refusal}")
        within = self._backward.weighs
        if within or self._backward.count:
            when = "inside of another" if within else "after a backward whose step is still to come"
            raise PlanError(f"engine.join() was entered {when}. Put one around the whole loop, between two steps.")
        self._backward.weighs, self._own, engine._joins = True, 0, self
        self._backward.losses.passes.counts = False
        try:
            try:
                yield
            except ZeroshardError:  # which other ranks raise as well
                raise
            except Exception as error:
                self._fail(error)
                raise
            self._repeat(engine)
        finally:
            self._backward.weighs, engine._joins = False, Unjoined()
            self._backward.losses.passes.counts = True
            self._example = None
            self._outputs.clear()

    def _fail(self, error: Exception) -> None:
        """Send an error of the user's own code to the other ranks."""
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
        with suppress(ZeroshardError):  # a rank that is in a collective call does not listen
            self._world.agree_on({"call": FAILED, "why": why}, LABEL)

    def _repeat(self, engine: Joined) -> None:
        """Repeat the calls of ranks with batches until there are none."""
        device, model = self._world.mesh.device, engine.model
        before = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
        numbers = list(rng.streams(device))
        repeated = 0
        while True:
            mine = {"call": END, "lacks": self._example is None, "own": self._own, "options": self._options()}
            everyone = self._world.agree_on(mine, LABEL)
            frame = self._checked(everyone)
            if frame is None:
                self._take(max(everyone, key=lambda theirs: int(theirs["own"])))
                break
            self._take(frame)
            if frame["call"] in ON_BATCHES and any(theirs.get("lacks") for theirs in everyone):
                self._share(everyone, None)
            self._repeats = True
            try:
                self._one(engine, frame)
            finally:
                self._repeats = False
            repeated += 1
        self._outputs.clear()
        if repeated:
            with torch.no_grad():
                for buffer, values in before:
                    buffer.copy_(values)
            for name, state in numbers:
                rng.restore(name, state, device)

    def _one(self, engine: Joined, frame: Frame) -> None:
        """Repeat one call."""
        args, kwargs = self._example or ((), {})
        match frame["call"]:
            case "__call__":
                with torch.set_grad_enabled(frame["grad"]):
                    output = engine(*args, **kwargs)
                if frame["grad"]:
                    self._outputs.append(output)
            case "backward":
                outputs, self._outputs = self._outputs, []
                with engine.no_sync() if not frame["reduces"] else torch.enable_grad():
                    engine.backward(_nothing_of(outputs), 0.0)
            case "train_step":
                engine.train_step(*args)  # type: ignore[attr-defined]
            case method:
                getattr(engine, method)(*frame["args"])

    def _checked(self, everyone: Sequence[Frame]) -> Frame | None:
        """The call of the ranks with batches; None if there are none.

        Raises:
            CommError: they make different ones, or one has failed.
        """
        for rank, theirs in enumerate(everyone):
            if theirs["call"] == FAILED:
                raise CommError(
                    f"Rank {rank} failed inside of engine.join(): {theirs['why']}. Its log has the trace; correct "
                    f"the cause, and start all ranks again."
                )
        calls = {rank: theirs for rank, theirs in enumerate(everyone) if theirs["call"] != END}
        first, *others = [*calls] or [0]
        for rank in others:
            one, other = (_text(calls[each]) for each in (first, rank))
            if one != other:
                raise CommError(
                    f"Inside of engine.join() rank {first} calls engine.{one} and rank {rank} engine.{other}. Ranks "
                    f"with batches make the same calls for each; those whose batches have ended leave the block."
                )
        return calls.get(first)

    def _share(self, everyone: Sequence[Frame], batch: tuple[Sequence[Any], Mapping[str, Any]] | None) -> None:
        """Send a batch of the lowest rank that has one to those that lack one; a collective call.

        Raises:
            PlanError: on all ranks, if it holds other values than tensors, numbers, texts, lists and tables.
        """
        root = next(rank for rank, theirs in enumerate(everyone) if theirs["call"] != END)
        tensors: dict[str, Tensor] = {}
        facts: Any = None
        problem = None
        if batch is not None and root == self._world.mesh.rank:
            try:
                facts = _plain(encoded([list(batch[0]), dict(batch[1])], "", tensors))
            except Exception as error:  # of a value of the user's own class
                problem = f"{type(error).__name__}: {error}"
        table = [[path, list(values.shape), str(values.dtype)] for path, values in tensors.items()]
        facts, problem, table = self._world.agree_on([facts, problem, table], "a batch for engine.join()")[root]
        if problem is not None:
            raise PlanError(
                f"Rank {root} has a batch for ranks without one, and it cannot be sent ({problem}). Inside of "
                f"engine.join() give the engine tensors, numbers and texts, and lists, tuples and dicts of them."
            )
        received: dict[str, Tensor] = {}
        for path, shape, dtype in table:
            values = torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")), device=self._device)
            if root == self._world.mesh.rank:
                values.copy_(tensors[path].detach())
            self._world.broadcast(values.reshape(-1).view(torch.uint8), f"batch {path}", root)
            received[path] = values
        if batch is None:
            args, kwargs = decoded(facts, received.__getitem__)
            self._example = args, kwargs

    @property
    def _device(self) -> torch.device:
        return self._world.mesh.device

    def _options(self) -> list[dict[str, Any]]:
        """The options of the optimizer's groups that are numbers or texts, in JSON."""
        kinds = (bool, int, float, str, list, tuple, Tensor)
        return [
            {
                key: plain(value)
                for key, value in group.items()
                if key not in ("params", NAMES) and isinstance(value, kinds)
            }
            for group in self._groups()
        ]

    def _take(self, frame: Frame) -> None:
        """Take over the options of a rank with batches."""
        for group, options in zip(self._groups(), frame["options"], strict=True):
            for key, value in options.items():
                live, new = group.get(key), setting(value)
                if isinstance(live, Tensor):
                    live.copy_(new)
                else:
                    group[key] = list(new) if isinstance(live, list) else new


class JoinAccess:
    """The methods of an engine for batches that some ranks do not have, or cannot compute."""

    _joins: Unjoined = Unjoined()  # a `Joins` inside of the context
    _join: Joins
    _backward: Backward
    _discard: Callable[[], None]

    def discard_batch(self) -> None:
        """Discard a batch that a rank cannot compute: its gradients, and forwards without a backward.

        Every rank calls it for the same batch, which the next step checks; the ranks tell each other of an error before
        the backward. `zero_grad` discards gradients alone.
        """
        self._discard()
        self._backward.losses.passes.leave()

    def join(self) -> AbstractContextManager[None]:
        """Inside, ranks may have unlike numbers of batches, none too; a collective call when it begins and ends.

        A rank whose batches have ended leaves the block, and takes part in the steps of the others with weight zero
        until all have left. The step's gradient is that of a plain loop over the batches that there are: of losses by
        sum, over the counts of these; means count alike, once for each backward or microbatch. Inside, ranks with
        batches make the same calls of the engine: forwards as `engine(...)`, `backward`, `clip_grad_norm`,
        `clip_grad_value`, `step`, `train_step`; others (`save`, `state_dict`) after the block. Options of the optimizer
        are those of the ranks with batches when it ends, so schedules may be stepped inside.

        Raises:
            PlanError: the plan is one of stages that update alone, or of experts over ranks; or a step is under way.
            CommError: ranks with batches make different calls, or another rank has failed inside.
        """
        return self._join.within(self)  # type: ignore[arg-type]


def _nothing_of(value: Any) -> Tensor:
    """A loss of 0 whose backward gives every tensor in a value a gradient of zeros."""
    tensors = [each for each in _leaves(value) if isinstance(each, Tensor) and each.requires_grad]
    if not tensors:
        raise PlanError(
            "A rank without batches found no tensor with a gradient in the output of the model for a batch of another "
            "rank. Inside of engine.join() call engine(...) once before each engine.backward(loss)."
        )
    return torch.stack([each.reshape(-1)[:0].float().sum() for each in tensors]).sum()


def _leaves(value: Any) -> Iterator[Any]:
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor) or not hasattr(leaf, "__dict__"):
            yield leaf
        else:  # an output of a class of its own
            yield from (each for each in vars(leaf).values() if isinstance(each, Tensor))


def _plain(value: Any) -> Any:
    """A value of JSON, checked before it is sent.

    Raises:
        TypeError: it is none.
    """
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"a {type(value).__name__}")


def _text(frame: Frame) -> str:
    return f"{frame['call']}({', '.join(map(str, frame['args']))})"
