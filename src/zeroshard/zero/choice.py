"""ZeRO's answers to the planner, and the stages that it offers to a search."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil
from typing import Any, Literal

from zeroshard.planning.offers import Offer, Refused, Site, divisors
from zeroshard.planning.questions import Choice, Description, Remedy, States
from zeroshard.zero.byte_formulas import BytesPerParameter, state_bytes

LEANER: dict[str, Any] = {"activations.recompute": "blocks"}
TIMES = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)  # as many devices, tried for states that do not fit


@dataclass(frozen=True)
class Slicing(Choice):
    """The stage of a plan.

    Attributes:
        zero: the stage.
        groups: number of groups of ranks, each of which slices among itself.
        shard_group: ranks of such a group that slice among themselves; None for all of it.
        reduce_dtype: of gradients on the wire; None for their own.
        reduce_every: when they are reduced: "auto", "microbatch" or "step".
        reduces_each: whether a reduction follows every microbatch.
    """

    zero: Literal[0, 1, 2, 3] = 0
    groups: int = 1
    shard_group: int | None = None
    reduce_dtype: str | None = None
    reduce_every: str = "auto"
    reduces_each: bool = False

    @property
    def reach(self) -> tuple[float, ...]:
        """The stage."""
        return (self.zero,)

    @property
    def beside_forward(self) -> Mapping[str, Any]:
        """No stage."""
        return {"zero": 0}

    def slices(self, ranks: int) -> int:
        """Ranks that slice among themselves."""
        return self.slices_of(ranks // self.groups)

    def slices_of(self, replicas: int) -> int:
        """Ranks that slice among themselves, out of so many with the same parameters."""
        return self.shard_group or replicas

    def describe(self, ranks: int | None) -> Description:
        """The stage, its groups, and how gradients are reduced."""
        sizes = () if self.shard_group is None else (f"slices over {self.shard_group} ranks",)
        sent = () if self.reduce_dtype is None else (f"gradients sent in {self.reduce_dtype}",)
        when = () if self.reduce_every == "auto" else (f"reduced every {self.reduce_every}",)
        return Description((f"zero {self.zero}",), sizes, (*sent, *when))

    def share(self, states: States, ranks: int) -> States:
        """How many slices there are."""
        return replace(states, slices=self.slices(ranks))

    def least_bytes(self, states: States, ranks: int) -> int:
        """The formula; under stage 3 with the largest unit gathered.

        Under stage 1 the sum of several reductions has a slice beside the gradients of one backward.
        """
        apart = self.zero == 1 and self.reduces_each and states.slices > 1
        gradient = states.gradient if apart else states.kept_gradient
        each = BytesPerParameter(states.parameter, gradient, states.master_weight, states.optimizer_state)
        found = Fraction(states.trainable * states.gradient_sum) / states.slices if apart else Fraction(0)
        found += state_bytes(states.trainable, states.slices, self.zero, each).total
        found += state_bytes(states.frozen, states.slices, self.zero, each, frozen=True).total
        found += Fraction(states.packed) / (states.slices if self.zero == 3 else 1)
        gathered = states.largest * states.parameter if self.zero == 3 and ranks > 1 else 0
        return ceil(found) + gathered

    def remedies(self, ranks: int) -> Iterator[Remedy]:
        """A higher stage, and stage 3 on more devices."""
        for zero in (1, 2, 3):
            if zero > self.zero and ranks > 1 and self.groups == 1:
                yield Remedy(f"zero={zero} would bring the states down to fit.", {"zero": zero}, ranks)
        for more in (ranks * times for times in TIMES):
            yield Remedy(f"zero=3 on {more} devices would hold them.", {"zero": 3}, more, anew=True)

    def updated_by(self, ranks: int) -> int:
        """Ranks that share the update of the same parameters."""
        return ranks if self.zero else 1

    def passes(self, microbatches: int) -> tuple[int, int]:
        """Number of reductions of all gradients in a step, and of gathers of all parameters (section 7)."""
        reductions = microbatches if self.zero >= 2 and self.reduces_each else 1
        return reductions, 2 * microbatches if self.zero == 3 else 1

    def added_bytes(self, states: States, microbatches: int) -> float:
        """Bytes read and written in a step to add up gradients, whole, or of several reductions slices of them."""
        if microbatches == 1:
            return 0.0
        each = states.trainable * (states.gradient + 2 * states.kept_gradient)
        return float(microbatches * each / (states.slices if self.passes(microbatches)[0] > 1 else 1))


def offers(site: Site) -> Iterator[Offer | Refused]:
    """Every stage; on several nodes, also with slices within each node."""
    nodes, ranks = -(-site.ranks // site.per_node), site.ranks
    for zero in (0, 1, 2, 3) if ranks > 1 else (0,):
        groups: list[int | None] = [None]
        if zero and nodes > 1 and site.per_node > 1 and ranks % site.per_node == 0:
            groups.append(site.per_node)
        if site.rows % ranks:
            why = f"{site.rows} rows of a step do not divide among {ranks} ranks."
            yield Refused({"zero": zero}, why, f"Use a multiple of {ranks} rows.")
            continue
        for group in groups:
            settings = {"zero": zero, "shard_group": group, "reduce_every": "auto"}
            yield Offer(settings, ranks, divisors(site.rows // ranks), leaner=LEANER)
