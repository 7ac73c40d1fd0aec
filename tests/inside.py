"""The door into an engine: the one file of the tests that reads an engine's private attributes."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

import zeroshard as zs
from zeroshard.checkpoint.writer import Savings
from zeroshard.memory.ledger import Arena
from zeroshard.optim.slices.spans import SpanOptimizer
from zeroshard.parts.axes import Axes
from zeroshard.parts.part import LateUpdates
from zeroshard.parts.tables import Parts
from zeroshard.saved.savers import Saver
from zeroshard.zero.gradients import BufferedGradients


def parts_of(engine: zs.Engine) -> Parts:
    """The flats with their weights, gradients and updaters."""
    return engine._assembly.parts


def optimizer_of(engine: zs.Engine) -> SpanOptimizer:
    """The user's optimizer, over slices."""
    return engine._assembly.optimizer


def held_states(engine: zs.Engine) -> dict[Any, dict[str, Any]]:
    """The optimizer's states by parameter of the optimizer."""
    return optimizer_of(engine).held.states


def late_updates_of(engine: zs.Engine) -> LateUpdates:
    """Updates that run beside the steps."""
    return engine._assembly.late


def gradients_of(engine: zs.Engine) -> list[BufferedGradients]:
    """The gradient sums, one per flat."""
    return engine._backward.gradients


def loss_count_of(engine: zs.Engine) -> float:
    """The number of terms in the losses of the step under way."""
    return engine._backward.losses.count


def axes_of(engine: zs.Engine) -> Axes:
    """The axes of ranks."""
    return engine._axes


def chunks_of(engine: zs.Engine) -> Sequence[int]:
    """The chunk of the pipeline that each unit belongs to."""
    return engine._stage.chunk_of


def all_gathered(engine: zs.Engine) -> bool:
    """Whether all units of this rank are gathered."""
    return engine._gatherer.all_gathered


def asked_savers_of(engine: zs.Engine) -> Sequence[Saver]:
    """The savers that are asked, in their order, about each tensor saved for backward."""
    return engine._forward.saver.asked


def gradient_tensors_of(engine: zs.Engine) -> list[Tensor | None]:
    """The buffers of gradients, and the sums that are kept beside them."""
    gradients = [part.gradients for part in parts_of(engine).all if part.gradients]
    return [t for g in gradients for t in (g.buffer.tensor, getattr(g._sum, "_own", None))]


def free_blocks_of(arena: Arena) -> list[Tensor]:
    """The blocks of an arena that nothing uses."""
    return arena._free


def shared_bytes_of(engine: zs.Engine) -> Tensor:
    """The memory that the ranks of a slice share."""
    shared = axes_of(engine).dense.slices.comm.shared
    assert shared is not None
    return shared.memory._bytes


def savings_of(engine: zs.Engine) -> Savings:
    """The checkpoints that are being written."""
    return engine._savings
