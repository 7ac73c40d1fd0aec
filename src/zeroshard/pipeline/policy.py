"""The settings of pipeline parallelism."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from zeroshard.errors import PlanError
from zeroshard.planning.foreign_names import explains_unknown
from zeroshard.planning.settings import check_choice, check_flag, check_whole, names_of, shown
from zeroshard.schedule import SCHEDULES, STREAMING, Layout, Loan, PipelineSchedule
from zeroshard.schedule.orders import check
from zeroshard.schedule.peaks import MOST_FILLED

MOST_CHUNKS = 2**16
SHORT = 4  # stages of a short pipeline whose first and last are as in a long one
FILLED = ("gpipe", "naive")  # schedules that keep all microbatches in flight
OF_STAGES = ("virtual_stages", "replicas", "split", "vertical_sync")  # settings without effect on a single stage
ScheduleName = Literal["naive", "gpipe", "1f1b", "pipedream-flush", "interleaved", "zb-h1", "pipedream", "2bw"]


@explains_unknown
@dataclass(frozen=True, repr=False)
class Pipeline:
    """Pipeline parallelism: the model in stages, on ranks of their own (GPipe, 1811.06965; PipeDream, SOSP 2019).

    Raises:
        PlanError: a value out of range, or two settings that do not combine.
    """

    stages: int = 1
    """Pipeline stages: contiguous layers of the model, each stage on as many ranks as there are replicas of it."""
    schedule: ScheduleName = "1f1b"
    """Order of forwards and backwards over the stages; "pipedream" and "2bw" never flush and use older weights."""
    virtual_stages: int = 1
    """Chunks of the model per stage, dealt round robin ("interleaved", "gpipe", "naive")."""
    replicas: tuple[int, ...] | None = None
    """Replicas of each stage; by default the ranks are shared out evenly."""
    split: tuple[str, ...] = ()
    """The layer with which every chunk after the first begins; by default the chunks are balanced."""
    balance: Literal["time", "parameters"] = "time"
    """Measure by which the chunks are balanced: each layer's measured time, or its number of parameters."""
    vertical_sync: bool = False
    """Under "pipedream", let every stage use the weight version that the first stage had."""

    def __post_init__(self) -> None:
        for name in ("stages", "virtual_stages"):
            check_whole("pipeline_parallel" if name == "stages" else f"pipeline_parallel.{name}", getattr(self, name))
        check_choice("pipeline_parallel.schedule", self.schedule, SCHEDULES)
        check_choice("pipeline_parallel.balance", self.balance, ("time", "parameters"))
        check_flag("pipeline_parallel.vertical_sync", self.vertical_sync)
        object.__setattr__(self, "split", names_of("pipeline_parallel.split", self.split))
        if self.chunks > MOST_CHUNKS:
            raise PlanError(
                f"pipeline_parallel={self.stages} times virtual_stages={self.virtual_stages} is more than "
                f"{MOST_CHUNKS:,}; use fewer."
            )
        self._check_replicas()
        self._check_stages()
        if self.split and len(self.split) != self.chunks - 1:
            raise PlanError(
                f"split names {len(self.split)} layers and {self.chunks} chunks (stages times virtual_stages) need "
                f"{self.chunks - 1}, the first layer of every chunk but the first. Name as many, or leave split out to "
                f"have the chunks balanced."
            )
        if self.vertical_sync and (self.schedule != "pipedream" or len(set(self.replicas or ())) > 1):
            raise PlanError(
                "vertical_sync=True is for schedule='pipedream' with equally many replicas of every stage; leave it "
                "out otherwise."
            )

    @property
    def chunks(self) -> int:
        """Chunks of the whole model."""
        return self.stages * self.virtual_stages

    @property
    def least_ranks(self) -> int:
        """The ranks of one replica of each stage, or of the given numbers of them."""
        return sum(self.replicas or (1,) * self.stages)

    @property
    def cuts(self) -> bool:
        """Whether the model is cut into several stages."""
        return self.stages > 1

    def rehearsed_stages(self, microbatches: int) -> int:
        """Stages of the shortest pipeline whose first and last stage are as in this one.

        With several chunks per stage microbatches go in groups of as many as stages, and memory depends on these.
        """
        fills = self.streams or self.virtual_stages > 1 or self.schedule in FILLED or microbatches < 2 * MOST_FILLED
        return self.stages if self.stages <= MOST_FILLED or self.replicas or fills else SHORT

    def rehearsed_length(self, stage: int, fewest: int) -> int:
        """Stages of the shortest pipeline in which a stage is as in this one, where the first and last need so many.

        Where backwards are split, the gradients of weights that wait depend on the place of a stage between.
        """
        if stage in (0, self.stages - 1):
            return fewest
        return self.stages if self.splits_backward else min(fewest + 1, self.stages)

    def microbatches_per_update(self, microbatches: int) -> int:
        """Microbatches whose gradients are summed for one update, of so many in a step."""
        return 1 if self.schedule == "pipedream" else microbatches

    def adds_up_locally(self, microbatches: int, reduces_each: bool) -> bool:
        """Whether a rank sums the gradients of several microbatches of an update before they are reduced.

        With backwards in two parts, gradients of biases come with the inputs', before the last microbatch's of weights.
        """
        return microbatches > 1 and (self.splits_backward or not reduces_each)

    @property
    def splits_backward(self) -> bool:
        """Whether a backward comes in two parts."""
        return self.schedule == "zb-h1"

    @property
    def streams(self) -> bool:
        """Whether the pipeline goes on from step to step without a flush."""
        return self.schedule in STREAMING

    def layout(self, ranks: int, together: int = 1) -> Layout:
        """The stages over `ranks` ranks, `together` of which make a replica.

        Raises:
            PlanError: the ranks do not divide among the stages.
        """
        replicas, several = self.replicas, f" times {together} ranks on the same data" if together > 1 else ""
        if replicas is None:
            least = self.stages * together
            if ranks % least:
                raise PlanError(
                    f"{ranks} ranks do not divide among pipeline_parallel={self.stages}{several}; start a multiple of "
                    f"{least} ranks, or say with replicas=(...) how many each stage gets."
                )
            replicas = (ranks // least,) * self.stages
        needed = sum(replicas) * together
        if needed != ranks:
            raise PlanError(f"replicas={replicas}{several} needs {needed} ranks and there are {ranks}; start as many.")
        return Layout(replicas, self.virtual_stages, together)

    def refusals(
        self, zero: int, microbatches: int, transport: str, scales_loss: bool, reduce_every: str
    ) -> Iterator[str]:
        """Sentences about settings of the plan that do not combine with these, each with the way out.

        Raises:
            PlanError: the schedule cannot run so many microbatches.
        """
        if not self.cuts:
            return
        if transport == "shared" and self.streams:
            yield (
                f"transport='shared' and schedule={self.schedule!r} do not combine: each rank keeps older weights of "
                f"its own. Leave transport='auto', or use schedule='1f1b', which flushes."
            )
        check(self.schedule, Layout(self.replicas or (1,) * self.stages, self.virtual_stages), microbatches)
        if zero == 3 and self.streams:
            yield (
                f"zero=3 and schedule={self.schedule!r} do not combine: older versions of the weights are kept whole. "
                f"Use zero=1 or 2, or a schedule that flushes, such as 'gpipe', which gathers a chunk once per pass."
            )
        if self.streams and (scales_loss or reduce_every == "microbatch"):
            yield (
                f"schedule={self.schedule!r} never waits for all stages, so they cannot decide together to skip a step "
                f"(loss scaling), nor reduce at other times than updates. Use precision='bf16' and "
                f"reduce_every='auto', or schedule='1f1b'."
            )

    def _check_replicas(self) -> None:
        if self.replicas is None:
            return
        several = isinstance(self.replicas, (tuple, list))
        counts = tuple(self.replicas) if several else ()
        if len(counts) != self.stages or not all(type(r) is int and r >= 1 for r in counts):
            raise PlanError(
                f"replicas is {self.replicas!r}; it must be a tuple with a whole number of 1 or more for each of the "
                f"{self.stages} stages."
            )
        object.__setattr__(self, "replicas", counts)

    def _check_stages(self) -> None:
        """Refuse settings that have no effect on a single stage."""
        if self.cuts:
            return
        names = [name for name in OF_STAGES if getattr(self, name) != type(self).__dataclass_fields__[name].default]
        names += ["schedule"] if self.streams else []
        for name in names:
            raise PlanError(
                f"{name}={getattr(self, name)!r} is for pipelines; set pipeline_parallel to 2 or more stages: "
                f"pipeline_parallel=Pipeline(2, {name}=...)."
            )

    def __repr__(self) -> str:
        return shown(self)


@dataclass(frozen=True, slots=True)
class Cut:
    """The choices of one plan for its stages.

    Attributes:
        pipeline: the stages.
        schedule: the lists over so many ranks, with these loans.
        units: names of the modules that are units.
        together: ranks that work on the same data, and so are one replica of a stage.
    """

    pipeline: Pipeline
    schedule: Callable[[int, tuple[Loan, ...]], PipelineSchedule]
    units: tuple[str, ...] | None = None
    together: int = 1

    @property
    def defers(self) -> bool:
        """Whether the gradients of weights are computed after those of inputs."""
        return self.pipeline.splits_backward
