"""Predictions and refusals made by hand, for the tests of what is shown of them."""

from dataclasses import replace
from typing import Any

from zeroshard.memory.ledger import Event
from zeroshard.plan import Plan
from zeroshard.planner.predict.result import Prediction, Refusal
from zeroshard.schedule.layout import Layout
from zeroshard.schedule.simulate import Costs, simulate

GIB = 2**30
AT_PEAK = {
    "parameters": 3 * GIB,
    "gradients": 2 * GIB,
    "master weights": GIB,
    "optimizer states": 2 * GIB,
    "activations": 6 * GIB,
    "buffers": GIB // 2,
    "temporaries": GIB // 2,
}
CAUSES = {"compute": 0.3, "optimizer": 0.02, "wire": 0.1, "host link": 0.0, "bubble": 0.0}


def prediction(plan: Plan | None = None, **given: Any) -> Prediction:
    """15 GiB of 20 at the peak, 0.42 s per step, 8 ranks, unless told otherwise."""
    held = dict.fromkeys(AT_PEAK, 0) | {name: AT_PEAK[name] for name in tuple(AT_PEAK)[:4]}
    steps = [held, held | {"activations": 3 * GIB, "gradients": 0}, AT_PEAK, held | {"activations": GIB}, held]
    values: dict[str, Any] = {
        "plan": plan or Plan(zero=3, precision="bf16", microbatches=2),
        "batch": 4,
        "ranks": 8,
        "rank": 0,
        "mode": "fake",
        "time_mode": "roofline",
        "memory": AT_PEAK,
        "capacity_bytes": 20 * GIB,
        "host_bytes": 0,
        "wire_bytes": {"gather parameters": 4 * GIB, "reduce gradients": 2 * GIB},
        "causes": CAUSES,
        "tokens": 32768,
        "events": tuple(Event(0.1 * i, f"event {i}", nbytes) for i, nbytes in enumerate(steps)),
    }
    return Prediction(**values | given)


def piped(**given: Any) -> Prediction:
    """Two stages of 1F1B with 4 microbatches, and what each rank does when."""
    plan = Plan(zero=1, pipeline_parallel=2, microbatches=4, precision="bf16")
    layout = Layout.equal(2)
    spans = simulate(plan.pipeline_schedule(2).stretch(1), layout, Costs.uniform(layout, 0.02, 0.04)).spans
    causes = {"compute": 0.24, "optimizer": 0.0, "wire": 0.0, "host link": 0.0, "bubble": 0.06}
    rest: dict[str, Any] = {"ranks": 2, "spans": tuple(tuple(row) for row in spans), "causes": causes}
    return prediction(plan, **rest | given)


def refusal(plan: Plan, needs: str) -> Refusal:
    """One for want of memory."""
    return Refusal(plan, 4, f"Rank 0 needs {needs} of 20.00 GiB.", "With zero=3 it would need 12.00 GiB.")


def later(prediction: Prediction, seconds: float) -> Prediction:
    """The same with so much more computation."""
    causes = dict(prediction.causes)
    return replace(prediction, causes=causes | {"compute": causes["compute"] + seconds})
