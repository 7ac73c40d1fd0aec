"""Pipelines in the planner: the answers on a plan's stages, and the plans offered to a search."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from zeroshard.errors import PlanError
from zeroshard.planning.offers import Fastest, Offer, Refused, Site, divisors
from zeroshard.planning.questions import Choice, Description, LeftOut, Split, States
from zeroshard.schedule import PipelineSchedule
from zeroshard.schedule.lower import LOANS_UNDER_WAY
from zeroshard.schedule.peaks import MOST_FILLED

FASTER: tuple[dict[str, Any], ...] = (
    {"pipeline_parallel.schedule": "interleaved", "pipeline_parallel.virtual_stages": 2},
    {"pipeline_parallel.schedule": "zb-h1"},
)
LEANER: dict[str, Any] = {"activations.recompute": "blocks"}
SUM = 4  # bytes of an element of gradients that are summed over microbatches
FINEST = 4  # microbatches per stage that make the bubble small
WAITING = LeftOut(
    "its waiting for other stages",
    "Memory over the step leaves out the time in which the rank waits for other stages.",
)
Made = TypeVar("Made")


@dataclass(frozen=True)
class Stages(Choice):
    """The stages of a plan.

    Attributes:
        stages: number of stages; 1 for a model that is not cut.
        schedule: name of the schedule.
        chunks: chunks per stage.
        microbatches: of one step.
        replicas: replicas of each stage; None for equally many.
        split: first layers of the chunks after the first; () if undecided.
        together: ranks of each replica, which work on the same data.
    """

    stages: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    microbatches: int = 1
    replicas: tuple[int, ...] | None = None
    split: tuple[str, ...] = ()
    together: int = 1

    def describe(self, ranks: int | None) -> Description:
        """The stages and their order, their microbatches and chunks."""
        cut = (f"{self.stages} stages {self.schedule}{self._replicas(ranks)}",) if self.stages > 1 else ()
        sizes = {"microbatches": self.microbatches, "chunks per stage": self.chunks}
        return Description(cut, tuple(f"{number} {name}" for name, number in sizes.items() if number > 1))

    def _replicas(self, ranks: int | None) -> str:
        replicas = self.replicas
        least = self.stages * self.together
        if replicas is None and ranks is not None and ranks % least == 0:
            replicas = (ranks // least,) * self.stages
        if replicas is None or set(replicas) == {1}:
            return ""
        return f" x {replicas[0]}" if len(set(replicas)) == 1 else f" x {'-'.join(map(str, replicas))}"

    def share(self, states: States, ranks: int) -> States:
        """The stage with most holds at least an equal part."""
        trainable, frozen, packed = (n // self.stages for n in (states.trainable, states.frozen, states.packed))
        return replace(states, trainable=trainable, frozen=frozen, packed=packed)

    @property
    def level(self) -> Mapping[str, Any]:
        """Settings with which plans are equal that differ in their number of stages alone; none for one stage."""
        return {} if self.stages == 1 else {"pipeline_parallel.stages": 2, "zero": 1, "microbatches": 2}

    def kept_share(self, saved: Sequence[int], inputs: Sequence[int]) -> float:
        """The share that the first stage keeps of a microbatch's activations in the whole model.

        Args:
            saved: bytes that each layer saves for its backward.
            inputs: of recomputed layers, bytes of each one's input; else none.
        """
        in_flight = min(self.stages, self.microbatches)
        if not inputs:
            return in_flight / self.stages  # of 1/D each
        own = -(-len(saved) // self.stages)
        blocks, kept = (own, in_flight) if self.stages > 1 else (1, own)
        return (blocks * max(saved) + kept * max(inputs)) / max(1, sum(saved))

    def summed_bytes(self, states: States, data_ranks: int) -> int:
        """Bytes of a stage's gradients beyond its states: summed in fp32, and on their way between its replicas."""
        if self.stages == 1:
            return 0
        return states.trainable * (SUM * (1 + (data_ranks > 1)) - states.kept_gradient)

    @property
    def share_beside_reductions(self) -> float:
        """The share of a step's computation beside which reductions may run: of stages the last microbatch's."""
        return 1.0 if self.stages == 1 else 1 / self.microbatches

    def filled(self, split: Split) -> Mapping[str, Any]:
        """The setting for the cut, unless the plan has one."""
        return {} if self.stages == 1 or self.split else {"pipeline_parallel.split": split(self.stages * self.chunks)}

    def settled(self, pipeline: PipelineSchedule, usual: int) -> int:
        """Steps until the most messages are in flight and all versions of a stream exist.

        A loan has one message per step, and the step after the last new one in flight may need further buffers.
        """
        if self.stages == 1:
            return usual
        usual = 2 + LOANS_UNDER_WAY if pipeline.loans else usual
        in_flight = 2 * self.stages * self.chunks
        return max(usual, 2 + -(-in_flight // self.microbatches)) if pipeline.streams else usual

    def row_owner(self, usual: str) -> str:
        """All stages take the same rows."""
        return "data rank" if self.stages > 1 else usual

    def left_out(self) -> tuple[LeftOut, ...]:
        """A stage is rehearsed alone."""
        return (WAITING,) if self.stages > 1 else ()

    def example(self, make: Callable[[], Made]) -> Made | None:
        """An example from `make` for the cut; None for one stage."""
        return make() if self.stages > 1 else None

    def fewest(self, most: int) -> int:
        """Microbatches of a rehearsal: at most `most`, but all of them with several stages."""
        return self.microbatches if self.stages > 1 else min(most, self.microbatches)


def offers(site: Site) -> Iterator[Offer | Refused]:
    """Every number of stages that divides the ranks."""
    for stages in divisors(site.ranks)[1:]:
        replicas, settings = site.ranks // stages, {"pipeline_parallel": stages, "zero": 0, "microbatches": stages}
        if site.rows % replicas:
            continue
        try:
            blocks = site.blocks()
        except PlanError as error:  # the model is no chain
            yield Refused(settings, str(error))
            return
        if blocks < stages:
            why, way_out = f"The model has {blocks} blocks for {stages} stages.", f"Use {blocks} stages or fewer."
            yield Refused(settings, why, way_out)
            continue
        common = {"transport": "auto", "reduce_every": "auto", "zero": 1 if replicas > 1 else 0}
        rows = site.rows // replicas
        counts = [m for m in divisors(rows) if m >= stages]
        why = f"{rows} rows per data rank do not make the {stages} microbatches that fill the stages."
        yield Offer(
            settings=settings | common,
            data_ranks=replicas,
            counts=counts,
            order=Fastest(),
            usual=max(FINEST * stages, min(counts, default=0)),
            without_counts=(why, "Use more rows per step, or fewer stages."),
            leaner=LEANER,
            faster=partial(_faster, stages),
            most_faster=len(FASTER),
        )


def _faster(stages: int, microbatches: int, site: Site) -> Iterator[Mapping[str, Any]]:
    for other in FASTER:
        chunks = other.get("pipeline_parallel.virtual_stages", 1)
        if chunks > 1 and (microbatches % stages or stages > MOST_FILLED):
            continue  # each of more stages would be rehearsed, for minutes
        if stages * chunks <= site.blocks():
            yield other
