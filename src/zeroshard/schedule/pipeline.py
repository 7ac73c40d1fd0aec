"""The lists of all ranks under one schedule, as pure functions of its description.

[Note: vertical sync] Each microbatch uses one version of the weights on all stages, that of its first forward
(PipeDream, SOSP 2019, section 3.3): the lists name it in every action, and `pipeline.stage` keeps as many versions as
there are stages.
"""

from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, pairwise

from zeroshard.errors import PlanError
from zeroshard.schedule import lower
from zeroshard.schedule.actions import Action, Kind, Schedule
from zeroshard.schedule.layout import Layout
from zeroshard.schedule.lower import Loan, Skip
from zeroshard.schedule.orders import FLUSHING, STREAMING, check, one_f_one_b_part, one_f_one_b_rest, warm_up


@dataclass(frozen=True)
class PipelineSchedule:
    """A schedule over a layout.

    A schedule that flushes has the same list for every step. One that streams (PipeDream, 2BW) goes on from step to
    step; `rest` drains it, after which it may start anew. Versions of weights
    count the updates since that start; the microbatches of a step that flushes are numbered from 0, those of
    a stream on from step to step.

    Attributes:
        name: one of `SCHEDULES`.
        microbatches: per step and data rank (an even layout has as many data ranks as replicas, an uneven one a
            single one that all replicas share).
        vertical_sync: of PipeDream: every stage uses the version that the input stage had (SOSP 2019, section 3.3).
        reduce_each: reduce gradients after every microbatch.
        loans: weights that two chunks share.
        gathers: gather the chunks for use (ZeRO 3).
        skips: messages that pass over chunks ([Note: skips]).
        one_way: those of them whose values have no gradient, so that none comes back.

    Raises:
        PlanError: settings that do not fit together.
    """

    name: str
    layout: Layout
    microbatches: int
    vertical_sync: bool = False
    reduce_each: bool = False
    loans: tuple[Loan, ...] = field(default=())
    gathers: bool = False
    skips: tuple[Skip, ...] = field(default=())
    one_way: tuple[Skip, ...] = field(default=())

    def __post_init__(self) -> None:
        check(self.name, self.layout, self.microbatches)
        if self.vertical_sync and (self.name != "pipedream" or self.layout.uneven):
            raise PlanError(
                f"vertical_sync=True is for schedule='pipedream' with equally many replicas of every stage, so that "
                f"all count versions alike; the schedule is {self.name!r} and replicas is {self.layout.replicas}."
            )
        for owner, borrower in self.loans:
            if not 0 <= owner < borrower < self.layout.all_chunks or (self.layout.uneven and self.streams):
                raise PlanError(
                    f"Chunk {borrower} cannot borrow weights from chunk {owner}: there are {self.layout.all_chunks} "
                    f"chunks, the owner must come before the borrower, and in a schedule that never flushes every "
                    f"stage must have equally many replicas; {self.name!r} has replicas={self.layout.replicas}."
                )

    @property
    def streams(self) -> bool:
        """Whether the pipeline goes on without a flush from step to step."""
        return self.name in STREAMING

    @property
    def update_every(self) -> int:
        """Microbatches of one rank in one update of a stream; a schedule that flushes updates once a step."""
        return 1 if self.name == "pipedream" else self.microbatches

    def step(self, rank: int, number: int = 0) -> Schedule:
        """The list of a rank for step `number` since the start, or the last flush."""
        stage = self.layout.stage_of(rank)
        m = self._share(rank)
        if not self.streams:
            compute = FLUSHING[self.name](self.layout, stage, m)
            actions = lower.with_update(lower.with_reductions(compute, self.reduce_each))
            actions = lower.with_gathers(actions) if self.gathers else actions
            return self._with_messages(actions, rank, 0, made=1)
        compute = one_f_one_b_part(self.layout, stage, number * m, (number + 1) * m)
        return self._streamed(compute, rank, number * m, made=0)

    def rest(self, rank: int, steps: int) -> Schedule:
        """The list that drains a rank of a stream after `steps` steps; empty for a schedule that flushes."""
        if not self.streams or steps == 0:
            return []
        stage, fed = self.layout.stage_of(rank), steps * self._share(rank)
        compute = one_f_one_b_rest(self.layout, stage, fed)
        return self._streamed(compute, rank, fed, made=fed // self.update_every)

    def stretch(self, steps: int = 1) -> list[Schedule]:
        """The lists of all ranks for `steps` steps from the start, to the end."""
        ranks = range(self.layout.ranks)
        if self.streams:
            parts = ([*(self.step(r, n) for n in range(steps)), self.rest(r, steps)] for r in ranks)
            return [list(chain.from_iterable(part)) for part in parts]
        return [self.step(rank) for rank in ranks]

    @property
    def narrow(self) -> "PipelineSchedule":
        """The lists of one rank of each replica; those of the others are the same but for the ranks that they name."""
        return replace(self, layout=self.layout.narrow)

    @property
    def distinct(self) -> "PipelineSchedule":
        """The lists of `narrow`; of one replica alone where all stages have equally many.

        These are then alike, and meet at reductions only.
        """
        layout = self.layout
        return self.narrow if layout.uneven else replace(self, layout=Layout.equal(layout.stages, layout.chunks))

    def unlike(self, steps: int) -> int:
        """How many of so many steps have lists of their own: all steps of a stream, one of a schedule that flushes."""
        return steps if self.streams else 1

    @property
    def title(self) -> str:
        """The schedule's name with its chunks and vertical sync."""
        name = "1f1b (PipeDream-flush)" if self.name == "1f1b" else self.name
        extra = f", {self.layout.chunks} chunks per stage" if self.layout.chunks > 1 else ""
        return name + extra + (", vertical sync" if self.vertical_sync else "")

    @property
    def splits_backward(self) -> bool:
        """Whether a backward comes in two parts."""
        return self.name == "zb-h1"

    def evaluation(self, rank: int, microbatch: int) -> Schedule:
        """The list of a rank that brings one microbatch forward through all chunks.

        All replicas of a chunk gather it, whichever of them has the microbatch.
        """
        layout = self.layout
        actions = [Action(Kind.FORWARD, c, microbatch) for c in layout.chunks_of(layout.stage_of(rank))]
        actions = lower.with_gathers(actions) if self.gathers else actions
        place = layout.place_of(rank)
        local_actions = [
            a for a in actions if a.kind is not Kind.FORWARD or layout.rank_of(a.chunk, microbatch, place) == rank
        ]
        return lower.with_messages(local_actions, layout, rank, self._lookahead, self.skips)

    def peers(self, loan: Loan, rank: int) -> list[int]:
        """The ranks to which `rank` lends, or from which it borrows, the weights of a loan.

        Replica n of the borrower borrows from replica n modulo the owner's replicas, rank by rank.
        """
        layout, place = self.layout, self.layout.place_of(rank)
        borrowers = layout.members(loan.borrower % layout.stages)[place :: layout.ranks_per_replica]
        pairs = [(layout.rank_of(loan.owner, n, place), borrower) for n, borrower in enumerate(borrowers)]
        return [b for o, b in pairs if o == rank] + [o for o, b in pairs if b == rank]

    def version_of(self, stage: int, microbatch: int) -> int:
        """The version of a stage's weights that a rank's `microbatch`-th microbatch uses; 0 where steps flush."""
        if not self.streams:
            return 0
        if self.name == "2bw":
            return max(0, microbatch // self.microbatches - 1)  # 2006.09503, section 3.1
        return max(0, microbatch - warm_up(self.layout, 0 if self.vertical_sync else stage))

    def _share(self, rank: int) -> int:
        """Microbatches per step that come to a rank."""
        uneven = self.layout.uneven
        return self.microbatches // self.layout.replicas[self.layout.stage_of(rank)] if uneven else self.microbatches

    @property
    def farthest(self) -> int:
        """The most chunks that a message goes on so that no send waits for a send.

        PipeDream posts a receive in the step of its microbatch, which is too late for a source that is further ahead;
        where stages lend weights to each other, for every source but the neighbour.
        """
        if self.name != "pipedream":
            return self.layout.all_chunks
        if self.loans:
            return 1
        uneven = self.layout.uneven
        return max(1, self.microbatches // max(self.layout.replicas) - 1 if uneven else self.microbatches)

    @property
    def _lookahead(self) -> int:
        """Computes by which receives are posted ahead of their use, so that no send waits for a send.

        Breadth-first, m/d rounds of outputs for the next chunk arrive while a rank computes one chunk. A rank of a
        stream that faces r replicas, which reduce together, needs a round of r forwards and r backwards.
        """
        lookahead = lower.LOOKAHEAD
        if self.name == "gpipe" and self.layout.chunks > 1:
            lookahead = max(lookahead, self.microbatches // self.layout.stages)
        if self.streams:
            for a, b in pairwise(self.layout.replicas if self.layout.uneven else ()):
                lookahead = max(lookahead, 2 * -(-max(a, b) // min(a, b)) + 1)
        return lookahead

    def _streamed(self, compute: Schedule, rank: int, first: int, made: int) -> Schedule:
        stage = self.layout.stage_of(rank)
        actions = lower.with_updates(compute, self.update_every, lambda j: self.version_of(stage, j))
        return self._with_messages(actions, rank, first, made)

    def _with_messages(self, actions: Schedule, rank: int, first: int, made: int) -> Schedule:
        """Add the messages of a rank, and number its microbatches among those of all data ranks.

        `first` is this rank's first microbatch, `made` the last version that owners make for their borrowers.
        """
        layout, every = self.layout, self.update_every if self.streams else self._share(rank)
        stage = layout.stage_of(rank)
        for loan in self.loans:
            lender, borrows = loan.owner % layout.stages, loan.borrower % layout.stages == stage
            if lender == loan.borrower % layout.stages:
                continue  # one stage holds both chunks, which share the tensor itself
            for peer in self.peers(loan, rank):
                if borrows:
                    actions = lower.with_repayments(actions, loan.borrower, every, peer)
                    wanted = partial(self.version_of, lender) if self.streams else None
                    posted = self.version_of(lender, first - 1) + 1 if first else 0
                    actions = lower.with_borrowing(actions, loan.borrower, peer, wanted, posted, made)
                else:
                    actions = lower.with_lending(actions, loan.owner, peer, every)
        actions = self._numbered(actions, rank)
        return lower.with_messages(actions, layout, rank, self._lookahead, self.skips, self.one_way)

    def _numbered(self, actions: Schedule, rank: int) -> Schedule:
        replicas, own = self.layout.replicas[self.layout.stage_of(rank)], self.layout.replica_of(rank)
        if replicas == 1:
            return actions

        def number(action: Action) -> Action:
            j = action.microbatch
            return action if j is None else action._replace(microbatch=own + replicas * j)

        return [number(action) for action in actions]
