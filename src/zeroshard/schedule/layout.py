"""Layout: chunks and microbatches of each rank."""

from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from zeroshard.errors import ConfigError, PlanError


@dataclass(frozen=True)
class Layout:
    """A pipeline of `len(replicas)` stages, each on `replicas[s]` ranks, each with `chunks` chunks of the model.

    Chunks are dealt round robin (PTD-P, 2104.04473, section 2.2): chunk c is on stage c mod stages. Microbatches too
    (PipeDream, SOSP 2019, section 3.2): microbatch j goes to replica j mod replicas of every stage, for its forward and
    its backward. With equally many replicas everywhere, replica q of all stages is a pipeline of its own. A replica may
    be several ranks, which work together on each of its microbatches (tensor parallelism): they have the same actions,
    and messages go between ranks in equal places. Ranks count stage by stage, and replica by replica inside (PTD-P).
    """

    replicas: tuple[int, ...]
    chunks: int = 1
    ranks_per_replica: int = 1

    def __post_init__(self) -> None:
        if not self.replicas or min(*self.replicas, self.chunks, self.ranks_per_replica) < 1:
            raise PlanError(
                f"A pipeline of {len(self.replicas)} stages with {self.replicas} replicas and {self.chunks} chunks "
                f"each, on {self.ranks_per_replica} ranks per replica, cannot be; each number must be 1 or more."
            )

    @classmethod
    def equal(cls, stages: int, chunks: int = 1, replicas: int = 1) -> "Layout":
        """Equally many replicas of every stage."""
        return cls((replicas,) * stages, chunks)

    @classmethod
    def described(cls, replicas: tuple[int, ...], stages: int | None, chunks: int, usual: int) -> "Layout":
        """The layout with these numbers of replicas: one number for all stages, or one for each.

        Args:
            stages: how many; None for one per number, or for `usual` where there is a single number.

        Raises:
            ConfigError: there are neither one nor `stages` numbers.
        """
        if len(replicas) == 1:
            return cls.equal(usual if stages is None else stages, chunks, replicas[0])
        if stages not in (None, len(replicas)):
            raise ConfigError(
                f"replicas={','.join(map(str, replicas))} is for {len(replicas)} stages and stages is {stages}; leave "
                f"out one of the two, or give one number per stage."
            )
        return cls(replicas, chunks)

    @property
    def stages(self) -> int:
        """Number of stages d."""
        return len(self.replicas)

    @property
    def all_chunks(self) -> int:
        """Number of chunks of the whole model, d·v."""
        return self.stages * self.chunks

    @cached_property
    def first_ranks(self) -> tuple[int, ...]:
        """The first rank of each stage."""
        return (0, *accumulate(replicas * self.ranks_per_replica for replicas in self.replicas))[:-1]

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return sum(self.replicas) * self.ranks_per_replica

    @property
    def narrow(self) -> "Layout":
        """The same with one rank per replica."""
        return replace(self, ranks_per_replica=1)

    @property
    def uneven(self) -> bool:
        """Whether stages differ in their number of replicas, so that microbatches change data ranks between them."""
        return len(set(self.replicas)) > 1

    def stage_of(self, rank: int) -> int:
        """The stage of a rank."""
        return bisect_right(self.first_ranks, rank) - 1

    def replica_of(self, rank: int) -> int:
        """Which replica of its stage a rank is, or belongs to."""
        return (rank - self.first_ranks[self.stage_of(rank)]) // self.ranks_per_replica

    def place_of(self, rank: int) -> int:
        """The place of a rank among those of its replica."""
        return rank % self.ranks_per_replica

    def members(self, stage: int) -> range:
        """The ranks of all replicas of a stage."""
        first = self.first_ranks[stage]
        return range(first, first + self.replicas[stage] * self.ranks_per_replica)

    def chunks_of(self, stage: int) -> range:
        """The chunks of a stage, from first to last."""
        return range(stage, self.all_chunks, self.stages)

    def target_of(self, chunk: int, rank: int) -> int:
        """The chunk of `rank` to which a chunk sends its values: the first one after it ([Note: skips])."""
        return chunk + ((self.stage_of(rank) - chunk) % self.stages or self.stages)

    def source_of(self, chunk: int, rank: int) -> int:
        """The chunk of `rank` from which a chunk gets values: the last one before it."""
        return chunk - ((chunk - self.stage_of(rank)) % self.stages or self.stages)

    def rank_of(self, chunk: int, microbatch: int, place: int = 0) -> int:
        """The rank on which a microbatch meets a chunk: that in a place among those of the replica."""
        stage = chunk % self.stages
        return self.first_ranks[stage] + microbatch % self.replicas[stage] * self.ranks_per_replica + place
