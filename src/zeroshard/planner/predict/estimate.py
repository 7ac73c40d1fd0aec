"""First estimates of plans, before any of them is rehearsed; a search shows them first, and starts from them.

Two rehearsals of a single rank, with one row and with two, give the memory and time of a microbatch of any size; one
more, alone too, is of the most ranks that split layers. Between, numbers are linear in 1 / t for t ranks, as are the
slices of t ranks, and the (t - 1) / t of a tensor that each of them sends. Model states come from the formulas, traffic
from the ZeRO paper's volumes, waits for other stages from (D - 1) of m microbatches (GPipe, 1811.06965, section 2.3);
with recomputation, activations by the shares of inputs and of saved tensors in a chain's layers, and a forward more
(1604.06174). Refusals and final figures never come from here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from zeroshard.doctor.hardware import Machines
from zeroshard.engine.techniques import data_ranks_of
from zeroshard.memory.ledger import Category
from zeroshard.pipeline.partition.profile import LayerCost
from zeroshard.plan import Plan
from zeroshard.planner.choices import choices_of
from zeroshard.planner.predict.predict import put_together, way_of
from zeroshard.planner.predict.rehearse import TrainingTask
from zeroshard.planner.predict.result import Prediction
from zeroshard.planner.predict.states import Sizes, least_bytes, states_of

STATES = (Category.PARAMETERS, Category.GRADIENTS, Category.MASTER_WEIGHTS, Category.OPTIMIZER_STATES)
MODEL_STATES = "model states"  # all four, as one category
RECOMPUTED = 4 / 3  # times the seconds of a plan that computes its forwards twice


@dataclass(frozen=True)
class Estimator:
    """Estimates from predictions of one replica of the model, for a microbatch of one row and of two.

    Attributes:
        together: ranks of the replica, which split layers; the estimated plans have as many.
        layers: the costs of its layers; None for a model that is no chain.
    """

    machines: Machines
    sizes: Sizes
    sequence: int
    together: int
    one: Prediction
    two: Prediction
    layers: Sequence[LayerCost] | None = None

    @classmethod
    def of(
        cls,
        task: TrainingTask,
        base: Plan,
        machines: Machines,
        sizes: Sizes,
        together: int = 1,
        like: "Estimator | None" = None,
    ) -> "Estimator":
        """Rehearse one replica alone.

        Args:
            like: for another number of ranks, whose growth from one row to two is taken as this one's.

        Raises:
            ZeroshardError: the engine refuses the task.
        """
        alone = replace(machines, count=together, per_node=together)
        plan = replace(base, zero=0, pipeline_parallel=1, microbatches=1)
        plan = plan.with_settings({"tensor_parallel.ranks": together})
        one = _update_apart(task, plan, alone, 1)
        two = _update_apart(task, plan, alone, 2) if like is None else like._grown(one)
        return cls(machines, sizes, task.sequence, together, one, two)

    def between(self, other: "Estimator", together: int) -> "Estimator":
        """Estimates for a number of ranks that split layers between this one's and another's."""
        ends = 1 / self.together, 1 / other.together
        share = (1 / together - ends[1]) / (ends[0] - ends[1])
        one, two = (_mixed(share, *pair) for pair in ((self.one, other.one), (self.two, other.two)))
        return replace(self, together=together, one=one, two=two)

    def prediction(self, plan: Plan, rows: int) -> Prediction:
        """The first estimate of a plan, without its offload.

        Args:
            rows: of one data rank in one step.
        """
        ranks, each = self.machines.count, rows / plan.microbatches
        data_ranks = data_ranks_of(plan, ranks)
        beside = {name: 0 for name in self.one.memory if name not in STATES}
        layers, choices = self.layers or (), choices_of(plan)
        saved, inputs = ([one.saved_bytes for one in layers], [one.activation_bytes for one in layers])
        share = choices.stages.kept_share(saved, inputs if choices.recomputing.in_blocks else ())
        kept = {name: round(share * self._at(name, each)) for name in beside}
        states = states_of(self.sizes, plan, ranks)
        kept[Category.BUFFERS] = kept.get(Category.BUFFERS, 0) + choices.stages.summed_bytes(states, data_ranks)
        return replace(
            self.one,
            plan=plan,
            batch=rows,
            ranks=ranks,
            mode="estimate",
            time_mode="estimate",
            memory={MODEL_STATES: least_bytes(self.sizes, plan, ranks), **kept},
            capacity_bytes=self.machines.device.capacity_bytes,
            host_bytes=0,
            host_capacity_bytes=None,
            wire_bytes={},
            causes=self._causes(plan, each, data_ranks),
            tokens=rows * data_ranks * self.sequence,
            events=(),
            notes=(),
        )

    def _grown(self, one: Prediction) -> Prediction:
        """The prediction for two rows, from one for one row."""
        pairs = ((self.one.memory, self.two.memory, one.memory), (self.one.causes, self.two.causes, one.causes))
        memory, causes = (
            {name: n * (high.get(name, n) / low[name] if low.get(name) else 1.0) for name, n in found.items()}
            for low, high, found in pairs
        )
        return replace(one, memory={name: round(n) for name, n in memory.items()}, causes=causes)

    def _at(self, category: str, rows: float) -> float:
        low, high = (one.memory.get(category, 0) for one in (self.one, self.two))
        return max(0.0, low + (rows - 1) * (high - low))

    def _causes(self, plan: Plan, rows: float, data_ranks: int) -> Mapping[str, float]:
        """Seconds by cause; traffic overlaps with the computation, and only the rest of it counts."""
        low, high = (one.causes["compute"] + one.causes.get("wire", 0.0) for one in (self.one, self.two))
        stages, m = plan.pipeline.stages, plan.microbatches
        again = RECOMPUTED if choices_of(plan).recomputing.in_blocks else 1.0
        states, slicing = states_of(self.sizes, plan, self.machines.count), choices_of(plan).slicing
        reductions, gathers = slicing.passes(m)
        compute = again * m * max(0.0, low + (rows - 1) * (high - low)) / stages
        compute += self.machines.device.op_seconds(0, slicing.added_bytes(states, m))
        update = self.one.causes.get("optimizer", 0.0) / stages / slicing.updated_by(data_ranks)
        nbytes = (self.sizes.trainable + self.sizes.frozen) * states.parameter / stages / self.together
        wire = 0.0
        if data_ranks > 1:
            wire += reductions * self.machines.wire_seconds("exchange", nbytes, data_ranks, self.together)
            wire += gathers * self.machines.wire_seconds("gather", nbytes, data_ranks, self.together)
        bubble = compute * (stages - 1) / m
        wire = max(0.0, wire - compute * choices_of(plan).stages.share_beside_reductions)
        return {"compute": compute, "optimizer": update, "wire": wire, "bubble": bubble}


def _mixed(share: float, one: Prediction, other: Prediction) -> Prediction:
    """A prediction with a share of one's bytes and seconds, and the rest of another's."""
    memory, causes = (
        {name: share * low.get(name, 0) + (1 - share) * high.get(name, 0) for name in {**low, **high}}
        for low, high in ((one.memory, other.memory), (one.causes, other.causes))
    )
    return replace(one, memory={name: round(n) for name, n in memory.items()}, causes=causes)


def _update_apart(task: TrainingTask, plan: Plan, machines: Machines, rows: int) -> Prediction:
    """The prediction of a plan without stages, whose cause "optimizer" is the whole update.

    Sums, norms and clipping of gradients are shared by the ranks that share the update.
    """
    per_rank = way_of(plan).rank_costs(task, plan, machines, rows, task.facts.stacks)
    found = put_together(per_rank, task, plan, machines, rows)
    optimizer, compute = (found.causes.get(cause, 0.0) for cause in ("optimizer", "compute"))
    others = min(compute, max(0.0, per_rank[0].costs.get("update/0", 0.0) - optimizer))
    return replace(found, causes={**found.causes, "compute": compute - others, "optimizer": optimizer + others})
