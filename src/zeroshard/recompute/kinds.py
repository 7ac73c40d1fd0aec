"""The savers and the recomputation that a plan asks for."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any, Protocol

from torch import Tensor, nn

from zeroshard.comm.mesh import Mesh
from zeroshard.memory import HostMemory
from zeroshard.memory.ledger import Ledger
from zeroshard.memory.transfers import Transfers
from zeroshard.parts.part import Parts
from zeroshard.parts.planned import Planned
from zeroshard.parts.saver import Saver
from zeroshard.parts.tables import planned_bytes
from zeroshard.recompute.auto.auto_recomputation import AutoRecomputation
from zeroshard.recompute.auto.budget import ActivationBudget
from zeroshard.recompute.auto.decision import Rules
from zeroshard.recompute.auto.first_step import FirstStep
from zeroshard.recompute.auto.stored import choices_of
from zeroshard.recompute.context import Surroundings
from zeroshard.recompute.operations import operations_of
from zeroshard.recompute.policy import LOSSY, Activations
from zeroshard.recompute.recomputation import Recomputation
from zeroshard.recompute.segments import Hooks, keep_input
from zeroshard.saved.codes.lossy import lossy_of
from zeroshard.saved.compression import Allowed, CompressedStore
from zeroshard.saved.gist import GistMode, enter_forwards
from zeroshard.saved.offload import ActivationStore
from zeroshard.saved.regions import SMALLEST
from zeroshard.saved.savers import Savers

AHEAD = 8  # copies under way in each direction where blocks are sent to the host: about what one block saves


class HostTier(Protocol):
    """Host memory and the link to it."""

    @property
    def host(self) -> HostMemory:
        """The memory."""

    @property
    def link(self) -> Transfers:
        """Copies between the device and it."""


@dataclass(frozen=True)
class SaverMeans:
    """What savers are made from.

    Attributes:
        policy: the plan's settings of activations.
        ledger: counts what they hold.
        model: whose forwards save them.
        key: of random numbers, for the step under way.
        tier: where activations go that are offloaded, if any are.
    """

    policy: Activations
    ledger: Ledger
    model: nn.Module
    key: Callable[[], int]
    tier: HostTier | None = None


def saver_of(means: SaverMeans) -> Savers:
    """What takes in the tensors that autograd saves, as a plan says; it keeps those that no saver of the list takes."""
    return Savers([saver for make in SAVERS if (saver := make(means)) is not None])


def _offload(means: SaverMeans) -> Saver | None:
    tier, window = means.tier, AHEAD if means.policy.recompute == "auto" else 2
    return None if tier is None else ActivationStore(tier.link, tier.host, means.ledger, window=window)


def _compress(means: SaverMeans) -> Saver | None:
    names = means.policy.compress
    if not names:
        return None
    lossy = next((lossy_of(name, means.key) for name in names if name in LOSSY), None)
    store = CompressedStore(Allowed("binarize" in names, "sparse" in names, lossy), means.ledger)
    if lossy is not None or "binarize" in names:
        enter_forwards(means.model, GistMode(store, "binarize" in names, SMALLEST), "inplace" in names)
    return store


SAVERS: Sequence[Callable[[SaverMeans], Saver | None]] = (_compress, _offload)  # in the order in which they are asked


@dataclass(frozen=True)
class Means:
    """What a recomputation is made from.

    Attributes:
        parts: of the model.
        planned: gives planned bytes besides those of the parts.
        mesh: of the ranks of the stage.
        staged: whether the model is cut into stages, so that other forwards come before a forward's backward.
        streams: whether stages update without waiting for each other.
        splits: whether layers are split over ranks.
        shares_experts: whether ranks share out experts.
    """

    parts: Parts
    planned: Callable[[], Iterable[Planned]]
    mesh: Mesh
    staged: bool
    streams: bool
    splits: bool
    shares_experts: bool


def recomputation_of(
    policy: Activations, model: nn.Module, blocks: Sequence[tuple[nn.Module, int]], around: Surroundings, means: Means
) -> Recomputation:
    """Recompute the blocks of a model as a policy says."""
    around.exact = not any(name in LOSSY for name in policy.compress)
    if policy.recompute == "auto":
        return _auto_of(policy, model, blocks, around, means)
    operations = operations_of(policy.operations) if policy.recompute == "selective" else _no_operations
    lengths, last = LENGTHS[policy.recompute], means.staged or policy.recompute != "sqrt"
    sums = policy.save_sums and not policy.partition  # which are as large as the inputs
    return Recomputation(model, blocks, lengths, around, operations, sums, last)


def keeper_of(around: Surroundings, hooks: Hooks, offloads: bool) -> Callable[[Tensor], Callable[[], Tensor]] | None:
    """What keeps the inputs of a pipeline's chunks outside of the buffers of messages, if they do not stay there.

    Args:
        hooks: of saved tensors.
        offloads: whether activations go to the host.
    """
    if around.partition is None and not offloads:
        return None
    partition = around.partition

    def keep(hidden: Tensor) -> Callable[[], Tensor]:
        divided = partition is not None and partition.takes(hidden)
        apart = hidden if divided else hidden.detach().clone()  # its buffer is free for the next message
        return keep_input(apart, hooks, around).tensor

    return keep


def _auto_of(
    policy: Activations, model: nn.Module, blocks: Sequence[tuple[nn.Module, int]], around: Surroundings, means: Means
) -> Recomputation:
    """Recompute the blocks of a model as its measurements in the first step decide."""
    parts, together = means.parts, means.splits or means.shares_experts
    largest = max((sum(part.flat.index.padded_numel for part in of_unit) for of_unit in parts.of_units), default=0)
    scratch = 16 * largest if means.mesh.ranks > 1 else 0  # two units on their way, as they are and summed in fp32
    planned = lambda: planned_bytes(parts, means.planned())  # noqa: E731
    first = FirstStep(model, around.device, around.ledger, parts.reserve, waits=not means.streams)
    budget = ActivationBudget(around.ledger, planned, first, scratch, not means.shares_experts, together)
    rules = Rules(parts.gatherer.passes or together, choices_of(around.saver))
    return AutoRecomputation(model, blocks, around, budget, rules, policy.save_sums)


def one_by_one(blocks: int) -> list[int]:
    """Segments of one block each."""
    return [1] * blocks


def by_square_root(blocks: int) -> list[int]:
    """The lengths of about √l segments of l blocks, which differ by one at most (1604.06174, section 3)."""
    segments = max(1, round(sqrt(blocks)))
    return [blocks * (n + 1) // segments - blocks * n // segments for n in range(segments)]


LENGTHS: Mapping[str, Callable[[int], list[int]]] = {
    "schedule": one_by_one,
    "blocks": one_by_one,
    "selective": one_by_one,
    "sqrt": by_square_root,
}


def _no_operations(region: Any) -> None:
    return None
