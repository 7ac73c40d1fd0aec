"""`engine.trace()`: actions, tasks and memory of what runs inside, in one object that can be read."""

from functools import partial

import torch
from engine.models import batch, build
from offload.offloaded import executing

import zeroshard as zs

ADAMW = partial(torch.optim.AdamW, lr=1e-3)


def engine_of(plan: zs.Plan) -> zs.Engine:
    return zs.Engine(build("Plain", seed=0), ADAMW, plan, mesh=zs.Mesh())


def step(engine: zs.Engine) -> None:
    engine.train_step((batch(engine.steps, 0, 1, 8), engine.steps))


def test_memory_is_kept_when_it_is_asked_for() -> None:
    engine = engine_of(zs.Plan(microbatches=2))
    with engine.trace() as trace:
        step(engine)
    assert len(trace.actions) == 5 and trace.memory == []
    with engine.trace(memory=True) as trace:
        step(engine)
    step(engine)
    assert len(trace.actions) == 5 and trace.memory[0].label == "start" and trace.memory[0].t == 0
    assert max(event.nbytes["activations"] for event in trace.memory) > 0 == trace.memory[-1].nbytes["activations"]
    assert [event.t for event in trace.memory] == sorted(event.t for event in trace.memory)


def test_a_trace_inside_of_another_leaves_it_complete() -> None:
    with executing("worker"):
        engine = engine_of(zs.Plan(offload="optimizer", precision="bf16"))
        step(engine)  # from the second on updates run before their verdict
        engine.flush()
    with engine.trace(memory=True) as outer:
        step(engine)
        engine.flush()
        with engine.trace(memory=True) as inner:
            step(engine)
            engine.flush()
        step(engine)
        engine.flush()
    assert len(outer.actions) == 3 * len(inner.actions) == 9
    assert len([task for task in outer.tasks if task.cause == "compute"]) == 6
    assert len(outer.tasks) == 3 * len(inner.tasks) > 18
    labels = [event.label for event in inner.memory[1:]]
    assert labels and labels in [
        [event.label for event in outer.memory[first : first + len(labels)]] for first in range(len(outer.memory))
    ]


def test_a_trace_prints_as_seconds_by_kind() -> None:
    with executing("eager"):
        engine = engine_of(zs.Plan(offload="optimizer", precision="bf16"))
    with engine.trace(memory=True) as trace:
        step(engine)
        step(engine)
        engine.flush()
    first, *lines = repr(trace).splitlines()
    assert first == f"trace of 6 actions and {len(trace.tasks)} tasks"
    counts = {line.rsplit(" x ", 1)[0].rsplit(maxsplit=1)[0].strip(): line for line in lines[:-1]}
    kinds = {"forward", "backward", "update", "gradients down", "parameters up"}
    assert kinds <= counts.keys()
    assert counts["forward"].split()[1:3] == ["2", "x"] and counts["forward"].endswith(" ms")
    most = max(sum(event.nbytes.values()) for event in trace.memory)
    assert lines[-1] == f"  memory: {len(trace.memory):,} changes, at most {most:,} bytes"
    assert repr(zs.Trace()) == "trace of 0 actions and 0 tasks"
