"""Where to cut a model into stages: PipeDream's dynamic program over layer costs that are traced, not measured."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from zeroshard.doctor.hardware import Machines
from zeroshard.errors import PlanError
from zeroshard.pipeline.cut.chain import Chain
from zeroshard.pipeline.cut.origins import ReturnedValue
from zeroshard.pipeline.partition.cluster import Cluster
from zeroshard.pipeline.partition.measure import measure
from zeroshard.pipeline.partition.pipedream import partition
from zeroshard.pipeline.partition.profile import LayerCost
from zeroshard.plan import Plan
from zeroshard.planner.predict.memory_tracker import Tracker
from zeroshard.planner.predict.rehearse import Rates, TrainingTask
from zeroshard.planner.predict.shallow import FEW, Stack, quiet, shallow_copies
from zeroshard.planner.predict.torch_internals import Results, fakes, forget_values
from zeroshard.platform.rehearsed import Clock
from zeroshard.step.batch import call_with, loss_in


@dataclass(frozen=True, slots=True)
class Layers:
    """The blocks of a chain; the costs of the first and the last include the modules before and after all blocks."""

    names: tuple[str, ...]
    costs: tuple[LayerCost, ...]
    bandwidth: float

    def split(self, chunks: int) -> tuple[str, ...]:
        """The first layer of every chunk but the first, minimising the time of the slowest chunk or message.

        Raises:
            PlanError: fewer blocks than chunks.
        """
        if chunks > len(self.costs):
            raise PlanError(f"{len(self.costs)} blocks do not make {chunks} chunks; use at most {len(self.costs)}.")
        return _split(self, chunks) if chunks > 1 else ()


@lru_cache(maxsize=64)
def _split(layers: Layers, chunks: int) -> tuple[str, ...]:
    found = partition(layers.costs, Cluster.flat(chunks, layers.bandwidth), shape="straight")
    return tuple(layers.names[stage.first] for stage in found.stages[1:])


def layers_of(task: TrainingTask, machines: Machines, rows: int) -> Layers:
    """Rehearse a model layer by layer, with few blocks of one long stack of equal ones.

    Args:
        rows: of one microbatch.

    Raises:
        ModelError: the model is no chain of blocks.
    """
    stacks = task.facts.stacks
    deep = stacks[0] if len(stacks) == 1 else None
    found = _layers(task, machines, rows, deep)
    return found if deep is None or found.names == deep.names else _layers(task, machines, rows, None)


def _layers(task: TrainingTask, machines: Machines, rows: int, deep: Stack | None) -> Layers:
    """The layers, with few blocks of one stack; their names are other ones where the stack's blocks are cut further."""
    clock = Clock()
    rates = Rates(clock, machines)
    build = task.build if deep is None else shallow_copies(task.build, {deep.path: deep.others + FEW})
    with fakes(task.integers) as mode, quiet(), Tracker(rates.hear, answers=True, results=Results(mode)):
        model = build()
        forget_values(model)
        chain, forward = _chain(model, task, rows)
        costs = measure(model, chain, forward, torch.device("cpu"), repeats=1, now=lambda: clock.now)
    first, *blocks, last = costs
    blocks[0] = _joined(first, blocks[0])
    blocks[-1] = _joined(blocks[-1], last)
    names = [layer.name for layer in chain.layers[1:-1]]
    if deep is not None:  # the first and the last include the modules before and after all blocks
        start = max(1, deep.others)
        blocks = [*blocks[:start], *[blocks[-FEW // 2]] * (deep.others + deep.depth - start - 1), blocks[-1]]
        names = list(deep.names) if tuple(names) == deep.names[: len(names)] else names
    return Layers(tuple(names), tuple(blocks), _bandwidth(machines, blocks))


def _chain(model: nn.Module, task: TrainingTask, rows: int) -> tuple[Chain, Callable[[], Tensor]]:
    """The chain of a task's model, and its forward on a microbatch, down to the loss."""
    batch = task.batch(rows)
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    loss_of = task.loss or (lambda output, batch: loss_in(output))

    def run(inputs: Any) -> Tensor:
        found: Tensor = loss_of(call_with(model, inputs), inputs)
        return found

    return Chain(model, lambda: run(tree_map(_to_meta, batch) if on_meta else batch)), lambda: run(batch)


def boundaries_of(task: TrainingTask, plan: Plan) -> list[str]:
    """Sentences about the values that cross each boundary between the stages of a plan with a split.

    Raises:
        ModelError: the model cannot be cut.
    """
    with fakes(task.integers) as mode, quiet(), Tracker(answers=True, results=Results(mode)):
        chain, _ = _chain(task.build(), task, 1)
    firsts, stages = [0, *map(chain.number, plan.pipeline.split), len(chain.layers)], plan.pipeline.stages
    chain.route(firsts, plan.pipeline_schedule(plan.pipeline.least_ranks * plan.tensor.ranks))
    return [
        f"Before {name}: {_crossing(chain, firsts, chunk, stages)}."
        for chunk, name in enumerate(plan.pipeline.split, 1)
    ]


def _crossing(chain: Chain, firsts: Sequence[int], chunk: int, stages: int) -> str:
    layer = firsts[chunk]
    into = chain.carried.into.get(layer, {chunk - 1: chain.carried.at(layer)})
    some = [_packed(chain, into[chunk - 1], bool(chain.carried.into))]
    for source in (source for source in into if source != chunk - 1):
        some.append(f"{_packed(chain, into[source], True)} {_way(source, chunk, stages)}")
    for (source, target), groups in sorted(chain.crossing.routes.items(), reverse=True):
        if target == chunk:
            named = ", ".join(dict.fromkeys(group[0].path for group in groups))
            way = "" if source == chunk - 1 else f" {_way(source, chunk, stages)}"
            some.append(f"values without a gradient of {named}{way}")
    return "; ".join(some)


def _way(source: int, chunk: int, stages: int) -> str:
    kept = (chunk - source) % stages == 0
    return f"kept on the stage since chunk {source}" if kept else f"directly from stage {source % stages}"


def _packed(chain: Chain, keys: set[ReturnedValue], known: bool) -> str:
    learned = sorted(keys, key=lambda key: chain.carried.reach[key])
    named = [key.path + (f" [{key.leaf}]" if key.leaf > 0 else "") for key in learned]
    if known and not named:
        return "nothing"
    count = f"{len(named)} tensors with gradients, packed" if len(named) > 1 else "one activation with gradients"
    return f"{count} ({', '.join(named)})" if named else count


def _bandwidth(machines: Machines, blocks: Sequence[LayerCost]) -> float:
    """Bytes per second of the link between neighbouring stages, for their messages."""
    nbytes = max(1, max(block.activation_bytes for block in blocks))
    seconds = machines.wire_seconds("send", nbytes, max(2, machines.count))
    return nbytes / seconds if seconds else float("inf")


def _joined(a: LayerCost, b: LayerCost) -> LayerCost:
    return replace(
        a if b.activation_bytes == 0 else b,
        forward_seconds=a.forward_seconds + b.forward_seconds,
        backward_seconds=a.backward_seconds + b.backward_seconds,
        saved_bytes=a.saved_bytes + b.saved_bytes,
        parameter_bytes=a.parameter_bytes + b.parameter_bytes,
    )


def _to_meta(leaf: Any) -> Any:
    return leaf.to("meta") if isinstance(leaf, Tensor) else leaf
