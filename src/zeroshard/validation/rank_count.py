"""The number of ranks that a plan divides; checked without torch, before any rank is started, and by every engine."""

import math
from collections.abc import Iterator, Mapping

from zeroshard.errors import PlanError
from zeroshard.plan import Plan

STAGES, LAYERS, EXPERTS, SLICES = "pipeline_parallel", "tensor_parallel", "expert_parallel", "shard_group"


def check_ranks(plan: Plan, ranks: int) -> None:
    """Refuse a number of ranks that a plan does not divide.

    Raises:
        PlanError: with every setting that divides them, the number that is needed, and settings that would fit.
    """
    sizes = {STAGES: plan.pipeline.stages, LAYERS: plan.tensor.ranks}
    sizes |= {EXPERTS: plan.experts.ranks, SLICES: plan.shard_group or 1}
    replicas = plan.pipeline.replicas
    if replicas is not None:
        needed = sum(replicas) * plan.tensor.ranks
        if ranks % needed:  # a multiple may serve other techniques, which need several ranks for one batch
            several = f" times {LAYERS}={plan.tensor.ranks}" if plan.tensor.ranks > 1 else ""
            raise PlanError(f"replicas={replicas}{several} needs {needed} ranks and there are {ranks}; start as many.")
        return
    needed = _needed(sizes)
    if ranks % needed:
        among = " times ".join(f"{name}={size}" for name, size in sizes.items() if size > 1)
        found = "1 rank does not divide" if ranks == 1 else f"{ranks} ranks do not divide"
        raise PlanError(f"{found} among {among}; start a multiple of {needed} ranks, {', '.join(_ways(sizes, ranks))}.")


def _needed(sizes: Mapping[str, int]) -> int:
    """The least number of ranks: those that split a layer work on one batch, and slices are of other batches."""
    return sizes[STAGES] * math.lcm(sizes[LAYERS] * sizes[SLICES], sizes[EXPERTS])


def _ways(sizes: Mapping[str, int], ranks: int) -> Iterator[str]:
    """Settings that fit so many ranks: one changed, or all of them left out."""
    given = [name for name, size in sizes.items() if size > 1]
    found = 0
    for name in given:
        fine = [size for size in range(1, ranks + 1) if ranks % _needed({**sizes, name: size}) == 0]
        if fine:
            nearest = min(fine, key=lambda size: (size == 1, abs(size - sizes[name])))
            found += 1
            yield f"or set {name} to {nearest}" if nearest > 1 else f"or leave {name} out"
    if not found:
        yield f"or leave {' and '.join(given)} out"
    each, over = divmod(ranks, sizes[STAGES])
    if given == [STAGES] and each:
        uneven = (each + 1,) * over + (each,) * (sizes[STAGES] - over)
        yield f"or say how many each stage gets, such as replicas={uneven}"
