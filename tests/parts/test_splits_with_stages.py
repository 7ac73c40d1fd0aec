"""A technique that splits parameters over ranks together with pipeline stages: the losses, norms and weights of a loop.

Ranks are 2 stages x data ranks x 2 ranks that split layers, the latter innermost (PTD-P, 2104.04473). "replicated"
layers have equal activations on both, of which each sends half between stages; "sequence" ones have positions of their
own, which are sent as they are.
"""

import gc
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from engine import models
from engine.models import OPTIMIZERS, build, plain
from inside import axes_of, parts_of
from parts.split_blocks import POSITIONS, SplitBlocks
from pipeline.pipelines import data
from pool import Pool
from selection import by_default
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import zeroshard as zs
from zeroshard.engine import techniques
from zeroshard.parts.technique import NewAxis
from zeroshard.step.context import WeightGradients

STEPS, ROWS, WIDTH = 3, 8, 10
TWO = {"pipeline_parallel": 2, "pipeline_parallel.balance": "parameters", "microbatches": 4}
KINDS = {
    "replicated": SplitBlocks(2),
    "sequence": SplitBlocks(2, sequence=True),
    "thirds": SplitBlocks(3),
    "whole": None,
}
SCHEDULES = ("naive", "gpipe", "1f1b", "pipedream-flush", "interleaved", "zb-h1")
MESSAGES = ("send activations", "send their gradients", "gather messages", "lend weights", "repay their gradients")


def make(
    mesh: zs.Mesh,
    name: str,
    plan: Mapping[str, Any],
    kind: str,
    optimizer: str = "adamw",
    seed: int = 0,
    loss: Any = None,
) -> zs.Engine:
    """An engine whose layers are split as `kind` says."""
    before = techniques.TECHNIQUES[:]
    technique = KINDS[kind]
    techniques.TECHNIQUES[:] = [] if technique is None else [lambda _: technique]
    try:
        example, of = (data(0, 0, 1, 2), 0), zs.Plan.from_dict({**TWO, **plan})
        return zs.Engine(build(name, seed), OPTIMIZERS[optimizer], of, mesh=mesh, example=example, loss=loss)
    finally:
        techniques.TECHNIQUES[:] = before


def step(engine: zs.Engine, rows: int = ROWS) -> zs.StepResult:
    batch = data(engine.steps, engine.data_rank, engine.data_ranks, rows)
    return engine.train_step((batch, engine.steps))


def train(mesh: zs.Mesh, name: str, plan: dict[str, Any], kind: str, optimizer: str = "adamw") -> dict[str, Any]:
    """What one rank sees of a few steps."""
    engine = make(mesh, name, plan, kind, optimizer, seed=mesh.rank)
    results = [step(engine) for _ in range(STEPS)]
    seen: dict[str, Any] = {"data": (engine.data_rank, engine.data_ranks)}
    seen["losses"] = [None if each.loss is None else each.loss.item() for each in results]
    seen["norms"] = [each.grad_norm for each in results]
    seen["wire"] = {
        row.purpose: (row.planned_elements, row.measured_elements)
        for row in engine.traffic()
        if row.planned_elements is not None
    }
    engine.flush()
    engine.check_replicas()
    seen["memory"] = {
        row.category: (row.planned_bytes + row.padding_bytes, row.measured_bytes)
        for row in engine.memory()
        if row.planned_bytes is not None
    }
    seen["weights"] = engine.state_dict()
    return seen


def same(seen: list[dict[str, Any]], name: str, optimizer: str = "adamw", clip: float | None = None) -> None:
    """Every rank knows the losses and norms of a plain loop, takes out its weights, and met its formulas."""
    wanted = plain(name, optimizer, (ROWS,) * STEPS, clip)
    for mine in seen:
        assert mine["losses"] == pytest.approx(wanted.losses, rel=1e-5)
        assert mine["norms"] == pytest.approx(wanted.norms, rel=1e-5)
        assert mine["weights"].keys() == wanted.weights.keys()
        for key, value in wanted.weights.items():
            torch.testing.assert_close(mine["weights"][key], value, rtol=1e-5, atol=1e-5)
        for table in ("wire", "memory"):
            assert {k: p for k, (p, _) in mine[table].items()} == {k: m for k, (_, m) in mine[table].items()}


@pytest.mark.parametrize("kind", ["replicated", "sequence"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_trains_like_a_plain_loop(pool: Pool, schedule: str, kind: str) -> None:
    plan = {"pipeline_parallel.schedule": schedule, "clip_norm": 0.5}
    plan |= {"pipeline_parallel.virtual_stages": 2} if schedule == "interleaved" else {}
    seen = pool.run(train, 4, "TiedFive", plan, kind)
    same(seen, "TiedFive", clip=0.5)
    assert [mine["data"] for mine in seen] == [(0, 1)] * 4


def wires(seen: list[dict[str, Any]]) -> list[dict[str, int]]:
    """What each rank sent and gathered of messages, elements."""
    return [{k: measured for k, (_, measured) in mine["wire"].items() if k in MESSAGES} for mine in seen]


def test_messages_carry_parts_of_what_ranks_hold_alike(pool: Pool) -> None:
    """By hand: 4 microbatches of 2 x 5 x 10 elements, halves of which are gathered; the tied matrix, 7 or 6 x 10."""
    plan = {"pipeline_parallel.split": ("blocks.2",)}
    whole, tied = ROWS * POSITIONS * WIDTH, (7 * WIDTH, 6 * WIDTH)
    first = [{"send activations": whole // 2, "gather messages": whole, "lend weights": each} for each in tied]
    last = [
        {"send their gradients": whole // 2, "gather messages": whole, "repay their gradients": each} for each in tied
    ]
    assert wires(pool.run(train, 4, "TiedFive", plan, "replicated")) == first + last
    rows = [ROWS * positions * WIDTH for positions in (3, 2)]  # under sequence parallelism they are not gathered
    first = [{"send activations": n, "lend weights": each} for n, each in zip(rows, tied, strict=True)]
    last = [{"send their gradients": n, "repay their gradients": each} for n, each in zip(rows, tied, strict=True)]
    assert wires(pool.run(train, 4, "TiedFive", plan, "sequence")) == first + last


def test_messages_that_do_not_divide(wide_pool: Pool) -> None:
    """100 elements over 3 ranks: parts of 34, of which the last ends in 2 of padding."""
    seen = wide_pool.run(train, 6, "TiedFive", {}, "thirds")
    same(seen, "TiedFive")
    assert [mine["data"] for mine in seen] == [(0, 1)] * 6
    for n, mine in enumerate(wires(seen)):
        assert mine["gather messages"] == ROWS * POSITIONS * WIDTH
        assert mine["send their gradients" if n > 2 else "send activations"] == 4 * 34


@pytest.mark.parametrize("recompute", ["blocks", "off"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_recomputation(pool: Pool, schedule: str, recompute: str) -> None:
    plan = {"pipeline_parallel.schedule": schedule, "recompute": recompute}
    same(pool.run(train, 4, "TiedFive", plan, "sequence"), "TiedFive")


@pytest.mark.parametrize("zero", by_default(range(4), 1, 3))
@pytest.mark.parametrize("kind, schedule", [("replicated", "gpipe"), ("sequence", "1f1b"), ("sequence", "zb-h1")])
def test_with_data_ranks(wide_pool: Pool, kind: str, schedule: str, zero: int) -> None:
    """2 stages x 2 data ranks x 2 ranks that split layers."""
    plan = {"pipeline_parallel.schedule": schedule, "zero": zero, "clip_norm": 0.5, "microbatches": 2}
    seen = wide_pool.run(train, 8, "TiedFive", plan, kind)
    same(seen, "TiedFive", clip=0.5)
    assert [mine["data"] for mine in seen] == [(0, 2), (0, 2), (1, 2), (1, 2)] * 2


OTHERS: list[dict[str, Any]] = [
    {"zero": 2, "shard_group": 1},
    {"zero": 1, "transport": "network"},
    {"zero": 3, "transport": "network"},
    {"zero": 2, "reduce_every": "microbatch"},
    {"zero": 2, "offload": "optimizer"},
    {"zero": 1, "pipeline_parallel.virtual_stages": 2, "pipeline_parallel.schedule": "interleaved"},
]


@pytest.mark.parametrize("plan", by_default(OTHERS, OTHERS[2], OTHERS[4]), ids=lambda p: "-".join(map(str, p.values())))
def test_with_data_ranks_under_other_settings(wide_pool: Pool, plan: dict[str, Any]) -> None:
    seen = wide_pool.run(train, 8, "TiedFive", {"clip_norm": 0.5, "microbatches": 2, **plan}, "sequence")
    same(seen, "TiedFive", clip=0.5)


@pytest.mark.parametrize("replicas", [(2, 1), (1, 2)], ids=str)
def test_with_uneven_replicas(wide_pool: Pool, replicas: tuple[int, int]) -> None:
    """Replicas of two ranks each."""
    plan = {"pipeline_parallel.replicas": replicas, "clip_norm": 0.5}
    same(wide_pool.run(train, 6, "TiedFive", plan, "replicated"), "TiedFive", clip=0.5)


@pytest.mark.parametrize("kind", ["replicated", "sequence"])
@pytest.mark.parametrize("schedule", ["pipedream", "2bw"])
def test_streams_are_those_of_whole_layers(pool: Pool, schedule: str, kind: str) -> None:
    plan = {"pipeline_parallel.schedule": schedule, "clip_norm": 0.5}
    *_, whole = pool.run(train, 2, "TiedFive", plan, "whole", "sgd")
    split = pool.run(train, 4, "TiedFive", plan, kind, "sgd")
    for mine in split:
        for key, value in whole["weights"].items():
            torch.testing.assert_close(mine["weights"][key], value, rtol=1e-5, atol=1e-6)
        for table in ("wire", "memory"):
            assert {k: p for k, (p, _) in mine[table].items()} == {k: m for k, (_, m) in mine[table].items()}
    for mine in split[2:]:
        assert mine["losses"] == pytest.approx(whole["losses"], rel=1e-5)
        assert mine["norms"] == pytest.approx(whole["norms"], rel=1e-5)


def deferred(mesh: zs.Mesh) -> list[tuple[int, ...]]:
    """The shapes of the weights whose gradients a step of zb-h1 leaves for later."""
    engine = make(mesh, "Five", {"pipeline_parallel.schedule": "zb-h1", "microbatches": 1}, "sequence")
    add, shapes = WeightGradients.add, []

    def counted(self: WeightGradients, weight: nn.Parameter, *rest: Any) -> None:
        assert any(weight is parameter for parameter in engine.model.parameters())
        shapes.append(tuple(weight.shape))
        add(self, weight, *rest)

    with patch.object(WeightGradients, "add", counted):
        step(engine)
    return sorted(shapes)


def test_gradients_of_parts_are_left_for_later(pool: Pool) -> None:
    """Of the first matrix of each block, and of the second, whose bias comes after the sum; of the output layer."""
    seen = pool.run(deferred, 4)
    blocks = [len([shape for shape in shapes if shape[1:] == (10,) and shape[0] in (8, 9)]) for shapes in seen]
    assert sum(blocks) == 2 * 5
    for rank, shapes in enumerate(seen):
        n, part = blocks[rank], 8 if rank % 2 else 9
        head = [(6 if rank % 2 else 7, 10)] if rank > 1 else []
        assert shapes == sorted([(part, 10)] * n + [(10, part)] * n + head)


def evaluate(mesh: zs.Mesh, schedule: str) -> tuple[Tensor, list[int]]:
    """What the model returns after a step, and what the next step has on the wire beside its formulas."""
    engine = make(mesh, "TiedFive", {"pipeline_parallel.schedule": schedule}, "replicated")
    step(engine)
    with torch.no_grad():
        loss = engine(data(9, engine.data_rank, engine.data_ranks, 6))
    step(engine)
    rows = [row for row in engine.traffic() if row.planned_elements is not None]
    return loss, [row.planned_elements - row.measured_elements for row in rows]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "2bw"])
def test_evaluation(pool: Pool, schedule: str) -> None:
    seen = pool.run(evaluate, 4, schedule)
    (whole,) = pool.run(evaluate_whole, 1)
    for loss, differences in seen:
        assert not any(differences)
        if schedule != "2bw":  # whose first update lacks the later microbatches
            torch.testing.assert_close(loss, whole, rtol=1e-5, atol=0)
    assert len({float(loss) for loss, _ in seen}) <= 2


def evaluate_whole(mesh: zs.Mesh) -> Tensor:
    engine = make(mesh, "TiedFive", {"pipeline_parallel": 1}, "whole")
    step(engine)
    with torch.no_grad():
        return engine(data(9, 0, 1, 6))


def tokens(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    """The model's mean as a sum with its count."""
    count = batch[0].shape[0] * POSITIONS
    return output * count, count


def train_by_sum(mesh: zs.Mesh, plan: dict[str, Any], kind: str, rows: int) -> tuple[list[float], list[float]]:
    engine = make(mesh, "TiedFive", plan, kind, loss=tokens)
    results = [step(engine, rows) for _ in range(STEPS)]
    return [each.loss.item() for each in results], [each.grad_norm for each in results]


def test_losses_by_sum_count_each_batch_once(wide_pool: Pool) -> None:
    """Seven rows: four and three on the data ranks, in microbatches of unlike sizes."""
    wanted = plain("TiedFive", "adamw", (7,) * STEPS, None)
    losses, norms = wanted.losses, wanted.norms
    for mine in wide_pool.run(train_by_sum, 8, {"microbatches": 2}, "sequence", 7):
        assert mine[0] == pytest.approx(losses, rel=1e-5)
        assert mine[1] == pytest.approx(norms, rel=1e-5)


LAYOUTS = {  # ranks, plan and kind
    "2x2x2": (8, {"zero": 2, "microbatches": 2}, "sequence"),
    "2x1x2": (4, {"pipeline_parallel.schedule": "zb-h1"}, "replicated"),
    "1x2x2": (4, {"pipeline_parallel": 1, "zero": 3, "transport": "network"}, "sequence"),
    "2x2x1": (4, {"zero": 1}, "whole"),
    "1x1x1": (1, {"pipeline_parallel": 1}, "whole"),
}


def save(mesh: zs.Mesh, layout: str, folder: str) -> None:
    _, plan, kind = LAYOUTS[layout]
    engine = make(mesh, "TiedFive", plan, kind)
    for _ in range(2):
        step(engine)
    engine.save(f"{folder}/{layout}", wait=True)


def load(mesh: zs.Mesh, layout: str, folder: str, saved: str) -> tuple[list[float], list[float]]:
    """Losses and norms of two more steps."""
    _, plan, kind = LAYOUTS[layout]
    engine = make(mesh, "TiedFive", plan, kind, seed=3)
    engine.load(f"{folder}/{saved}")
    results = [step(engine) for _ in range(2)]
    return [each.loss.item() for each in results], [each.grad_norm for each in results]


@pytest.mark.parametrize("saved", by_default(LAYOUTS, "2x1x2"))
def test_a_checkpoint_loads_under_any_layout(pool: Pool, wide_pool: Pool, tmp_path: Path, saved: str) -> None:
    wanted = plain("TiedFive", "adamw", (ROWS,) * 4, None)
    losses, norms = wanted.losses, wanted.norms
    of = {ranks: wide_pool if ranks > 4 else pool for ranks, _, _ in LAYOUTS.values()}
    ranks = LAYOUTS[saved][0]
    of[ranks].run(save, ranks, saved, str(tmp_path))
    for layout, (ranks, _, _) in LAYOUTS.items():
        seen = of[ranks].run(load, ranks, layout, str(tmp_path), saved)
        for _, mine in seen:
            assert mine == pytest.approx(norms[2:], rel=1e-5), layout
        each = [seen[0][0], seen[-1][0]]  # in one stage, a rank knows the loss of its own data
        mean = [sum(pair) / 2 for pair in zip(*each, strict=True)]
        assert mean == pytest.approx(losses[2:], rel=1e-5), layout


def divide(mesh: zs.Mesh, name: str, ranks: tuple[int, ...]) -> str:
    """The error of a comparison after some of 8 ranks wrote into a weight of theirs."""
    engine = make(mesh, "Five", {"microbatches": 2, "transport": "network"}, "replicated")
    for part in parts_of(engine).all if mesh.rank in ranks else ():
        for number, entry in enumerate(part.flat.index.entries):
            if entry.name == name:
                with torch.no_grad():
                    part.flat.view(part.weights.full, number).add_(1)
    try:
        engine.check_replicas()
    except zs.errors.DivergenceError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "name, ranks, found",
    [
        ("blocks.4.norm.weight", (6,), {("4", "6")}),
        ("blocks.4.norm.weight", (4, 6), {("4", "5")}),
        ("blocks.4.up.weight", (6,), {("4", "6")}),
        ("blocks.4.up.weight", (4, 6), set()),
    ],
)
def test_replicas_are_compared_over_data_ranks_and_in_a_replica(
    wide_pool: Pool, name: str, ranks: tuple[int, ...], found: set[tuple[str, str]]
) -> None:
    """Parts of layers with those of other data ranks; the rest with those of ranks on the same data, too."""
    for said in wide_pool.run(divide, 8, name, ranks):
        pairs = set(re.findall(r"rank (\d) against rank (\d)", said))
        assert pairs == found, said


def disagree(mesh: zs.Mesh) -> str:
    """One rank of each stage gathers once more than the other."""
    engine = make(mesh, "TiedFive", {}, "replicated")
    step(engine)
    axes_of(engine).new["tensor"].comm.digests["gather"] += mesh.rank % 2
    try:
        step(engine)
    except zs.errors.CommError as error:
        return str(error)
    return ""


def test_the_digests_of_a_stage_are_compared(pool: Pool) -> None:
    """Ranks that split the layers of a stage have not done the same."""
    assert all("The ranks disagree" in said for said in pool.run(disagree, 4))


def initial(mesh: zs.Mesh, plan: dict[str, Any], kind: str) -> dict[str, Tensor]:
    """The weights of a model that was built on the meta device."""
    with patch(f"{__name__}.build", on_meta):
        return make(mesh, "TiedFive", plan, kind).state_dict()


def on_meta(name: str, seed: int) -> nn.Module:
    with torch.device("meta"):
        return models.build(name, seed)


def test_initial_weights_of_parts_are_those_of_one_process(pool: Pool) -> None:
    (whole,) = pool.run(initial, 1, {"pipeline_parallel": 1}, "whole")
    for kind in ("replicated", "sequence"):
        for mine in pool.run(initial, 4, {}, kind):
            assert mine.keys() == whole.keys()
            assert all(torch.equal(mine[name], value) for name, value in whole.items())


def given(mesh: zs.Mesh, plan: dict[str, Any], kind: str) -> dict[str, Tensor]:
    """The weights after those of another model were loaded as a state dict."""
    engine = make(mesh, "TiedFive", plan, kind)
    engine.load_state_dict(build("TiedFive", 7).state_dict())
    step(engine)
    return engine.state_dict()


def test_whole_weights_are_loaded_into_parts(pool: Pool) -> None:
    (whole,) = pool.run(given, 1, {"pipeline_parallel": 1}, "whole")
    for mine in pool.run(given, 4, {}, "sequence"):
        for name, value in whole.items():
            torch.testing.assert_close(mine[name], value, rtol=1e-5, atol=1e-5)


def left(mesh: zs.Mesh) -> list[str]:
    """The parameters whose whole values are still in memory once the engine is made."""
    kept: dict[str, StorageWeakRef] = {}

    def noted(name: str, seed: int) -> nn.Module:
        model = models.build(name, seed)
        kept.update({n: StorageWeakRef(p.untyped_storage()) for n, p in model.named_parameters()})
        return model

    with patch(f"{__name__}.build", noted):
        engine = make(mesh, "TiedFive", {}, "sequence")
    gc.collect()
    found = [name for name, reference in kept.items() if not reference.expired()]
    step(engine)
    return found


def test_whole_values_are_freed(pool: Pool) -> None:
    assert pool.run(left, 4) == [[]] * 4


def far(mesh: zs.Mesh) -> str:
    """Groups of ranks that are no neighbours."""
    technique = SplitBlocks(2)
    technique.axes = lambda ranks: {"tensor": NewAxis([[0, 2], [1, 3]], data=False)}  # type: ignore[method-assign]
    with patch.dict(KINDS, far=technique):
        try:
            make(mesh, "TiedFive", {"pipeline_parallel": 1}, "far")
        except zs.errors.PlanError as error:
            return str(error)
    return ""


def odd(mesh: zs.Mesh) -> str:
    try:
        make(mesh, "TiedFive", {}, "thirds")
    except zs.errors.PlanError as error:
        return str(error)
    return ""


def test_ranks_that_do_not_fit_are_refused(pool: Pool) -> None:
    assert all("Ranks 0, 2 of a stage" in said and "2 at a time" in said for said in pool.run(far, 4))
    said = pool.run(odd, 4)
    assert all(
        "4 ranks do not divide among pipeline_parallel=2 times 3 ranks on the same data" in text for text in said
    )
    assert all("start a multiple of 6 ranks" in text for text in said)
