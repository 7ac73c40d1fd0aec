"""Plans under a loop of another package, which draws the batches and calls forward, backward and step."""

from dataclasses import replace
from typing import Any, Final

from zeroshard.errors import PlanError
from zeroshard.plan import Plan

DTYPES: Final = ("fp32", "bf16", "fp16")  # of plans


def check_loop(plan: Plan, accumulation: str) -> None:
    """Refuse plans that do not go with a loop of another package.

    Args:
        accumulation: the way out for `microbatches`, such as "accumulate by gradient_accumulation_steps".

    Raises:
        PlanError: with the way out.
    """
    if not isinstance(plan, Plan):
        raise PlanError(f"plan is {plan!r}, a {type(plan).__name__}; pass a plan, such as zs.Plan(zero=3).")
    if plan.pipelined or plan.microbatches > 1:
        raise PlanError(
            f"pipeline_parallel={plan.pipeline.stages} and microbatches={plan.microbatches} are for "
            f"engine.train_step, and here the loop is not the engine's. Leave both at 1, and {accumulation}."
        )
    if plan.tensor.ranks > 1:
        raise PlanError(
            f"tensor_parallel={plan.tensor.ranks} needs the same rows on all ranks that split a layer, and here each "
            f"process takes rows of its own. Use zero=3, or engine.train_step with your own loader."
        )


def with_dtype(plan: Plan, dtype: Any, source: str) -> Plan:
    """The plan in the dtype of computation that another package's settings name, as plans name it.

    Raises:
        PlanError: the plan names another one already, or plans do not know it.
    """
    named = {dtype, plan.precision} - {"fp32"}
    if len(named) > 1 or not named.issubset(DTYPES):
        raise PlanError(
            f"{source} asks for {dtype}, and the plan for precision={plan.precision!r}. Leave one of them out; plans "
            f"know {', '.join(DTYPES)}."
        )
    return replace(plan, precision=named.pop() if named else "fp32")


def rounds_weights(plan: Plan) -> bool:
    """Whether the plan computes with rounded copies of fp32 master weights."""
    return plan.precision != "fp32"


def absent_weights(plan: Plan) -> bool:
    """Whether whole parameters are on the device only while a forward or backward uses them."""
    return any((plan.zero == 3, plan.offloading.parameters))
