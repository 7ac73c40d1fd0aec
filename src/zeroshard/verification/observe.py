"""One rank's run under the plan, and its observations."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from zeroshard.access.gradient_shares import GradientShare
from zeroshard.checkpoint.boxes import Box
from zeroshard.comm.mesh import Mesh
from zeroshard.engine import Engine
from zeroshard.step.batch import loss_of
from zeroshard.step.losses import Loss
from zeroshard.verification.job import VerificationJob
from zeroshard.verification.sketch import Sketch, sketch
from zeroshard.verification.watch import ModuleCall, Place, Watch

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class SeenShare:
    """A rank's share of a parameter's gradient: the elements of some boxes of it, in the flat buffer."""

    name: str
    flat: str
    boxes: tuple[Box, ...]
    values: Array
    counted: bool

    def same_of(self, whole: Tensor) -> Tensor:
        """The same elements of a tensor in the shape of the parameter, in the same order [elements]."""
        inside = Box.whole(tuple(whole.shape))
        return torch.cat([whole[box.slices(inside)].reshape(-1) for box in self.boxes])


@dataclass(slots=True)
class SeenStep:
    """The observations of one rank in a step.

    Attributes:
        loss: as `train_step` returned it; None on ranks without it.
        losses: of each part whose loss this rank computed.
        norm: before clipping.
        skipped: the weights stayed as they were.
        shares: of the mean gradients.
        calls: of modules, by part.
        weights: after the step; on rank 0 alone.
        sketches: of the same, on every rank.
    """

    loss: float | None
    losses: dict[int, float]
    norm: float
    skipped: bool
    shares: list[SeenShare]
    calls: dict[int, dict[Place, ModuleCall]]
    weights: dict[str, Array]
    sketches: dict[str, Sketch]


@dataclass(slots=True)
class RankRecord:
    """The observations of one rank in the run.

    Attributes:
        start: the weights before the first step; on rank 0 alone.
    """

    rank: int
    data_rank: int
    start: dict[str, Array]
    start_sketches: dict[str, Sketch]
    steps: list[SeenStep] = field(default_factory=list)


def observe(mesh: Mesh, job: VerificationJob) -> RankRecord:
    """Run a job under its plan on one rank; a collective call.

    Raises:
        ZeroshardError: the engine refuses the model or the plan.
    """
    model = job.model(mesh.rank)  # different weights on each rank: the engine must take rank 0's
    model.train()
    numbers = _Numbers()
    losses: dict[int, float] = {}
    watches: list[Watch] = []  # empty until the engine is made, which may run the model

    def loss(output: Any, batch: Any) -> Any:
        found = loss_of(model, output, batch) if job.loss is None else Loss.of(job.loss(output, batch))
        now = watches[0].now if watches else None
        if now is not None and isinstance(found.value, Tensor) and not found.value.is_meta:
            losses.setdefault(now, float(found.value.detach()))
        return found

    engine = Engine(
        model, job.optimizer, job.plan, mesh=mesh, loss=loss, example=job.microbatches(0, 0)[0][0]
    )  # fmt: skip
    watch = Watch(engine.model, numbers.of)
    watches.append(watch)
    shares: list[GradientShare] = []
    engine.watch_gradients(shares.extend)
    start = engine.state_dict()
    record = RankRecord(mesh.rank, engine.data_rank, _arrays(start, mesh.rank), _sketches(start))
    for number in range(job.steps):
        own = job.microbatches(number, engine.data_rank)
        numbers.begin([batch for batch, _ in own], engine.data_rank * len(own))
        losses.clear()
        shares.clear()
        with watch.step() as calls:
            result = engine.train_step(job.rank_batch(number, engine.data_rank))
        numbers.begin([], 0)
        state = engine.state_dict()
        taken = [SeenShare(s.name, s.flat, s.boxes, _array(s.values), s.counted) for s in shares]
        record.steps.append(
            SeenStep(
                None if result.loss is None else float(result.loss),
                {part: value for part, value in losses.items() if value == value or not engine.layers},
                result.grad_norm,
                result.skipped,
                taken,
                _with_values(calls) if engine.layers else calls,
                _arrays(state, mesh.rank),
                _sketches(state),
            )
        )
    return record


class _Numbers:
    """Finds the number of a microbatch by the content of the model's arguments."""

    def __init__(self) -> None:
        self._known: dict[tuple[Sketch, ...], list[int]] = {}
        self._met: Counter[tuple[Sketch, ...]] = Counter()

    def begin(self, batches: list[Any], first: int) -> None:
        """A step on these microbatches begins, the first of which has this number; an empty list ends it."""
        self._known.clear()
        self._met.clear()
        for number, batch in enumerate(batches):
            self._known.setdefault(_content(batch), []).append(first + number)

    def of(self, arguments: Any) -> int | None:
        """The number of the microbatch with these arguments; equal ones are counted in turn."""
        content = _content(arguments)
        known = self._known.get(content)
        if known is None:
            return None
        turn = self._met[content]
        self._met[content] += 1
        return known[turn % len(known)]


def _content(tree: Any) -> tuple[Sketch, ...]:
    return tuple(sorted(sketch(leaf) for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and not leaf.is_meta))


def _with_values(calls: dict[int, dict[Place, ModuleCall]]) -> dict[int, dict[Place, ModuleCall]]:
    """Drop calls whose output is a placeholder (NaN): their module runs on another stage."""

    def real(call: ModuleCall) -> bool:
        return bool(call.outputs) and all(value[1] == value[1] for value in call.outputs)

    return {part: {place: call for place, call in of.items() if real(call)} for part, of in calls.items()}


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _arrays(state: dict[str, Any], rank: int) -> dict[str, Array]:
    return {name: _array(value) for name, value in state.items() if _is_number(value)} if rank == 0 else {}


def _array(value: Tensor) -> Array:
    wide = value if value.dtype in (torch.float32, torch.float64) else value.float()
    array: Array = wide.detach().cpu().numpy().copy()
    return array


def _sketches(state: dict[str, Any]) -> dict[str, Sketch]:
    return {name: sketch(value) for name, value in state.items() if _is_number(value)}
