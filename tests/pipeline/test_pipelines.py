"""Schedules that flush give the losses, norms and weights of a plain loop, and bitwise those of one stage."""

import functools
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from engine import models
from engine.models import OPTIMIZERS, build
from pipeline.pipelines import data
from plain_loop import PlainRun, follows_plain_loop
from pool import Pool
from selection import by_default
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import zeroshard as zs

STEPS = 3
FLUSHING = ("naive", "gpipe", "1f1b", "zb-h1")
# Schedule, stages, chunks on each, microbatches: as many as stages, a few more and many; of what does not divide, too.
CASES = [
    *((schedule, d, 1, m) for schedule in FLUSHING for d, m in ((2, 8), (3, 5), (4, 4))),
    ("1f1b", 2, 1, 2),
    ("zb-h1", 3, 1, 12),
    ("pipedream-flush", 3, 1, 4),
    *(("interleaved", d, v, m) for d, v, m in ((2, 1, 2), (2, 2, 8), (2, 3, 2), (3, 2, 12), (4, 3, 4))),
    *(("gpipe", d, v, 3) for d, v in ((2, 3), (4, 2))),
    ("naive", 2, 3, 3),
]
LONG = ("1f1b", 3, 1, 5), ("interleaved", 2, 2, 8), ("zb-h1", 2, 1, 8)  # of six steps

plain = functools.cache(models.plain)


def train(mesh: zs.Mesh, name: str, plan: dict[str, Any], rows: tuple[int, ...], optimizer: str = "sgd") -> Any:
    """Losses, norms and final weights of one step per number of rows; an evaluation now and then."""
    model = build(name, seed=mesh.rank)
    wanted = zs.Plan.from_dict({"pipeline_parallel.balance": "parameters", **plan})
    make = OPTIMIZERS[optimizer]
    # A microbatch, where replicas are even; others have shapes that are found without values.
    each = rows[0] // wanted.microbatches // max(1, mesh.ranks // wanted.pipeline.stages)
    engine = zs.Engine(
        model,
        lambda ps: make([p for p in ps if p.requires_grad]),
        wanted,
        mesh=mesh,
        example=(data(0, 0, 1, max(1, each)), 0),
    )
    losses, norms = [], []
    for step, count in enumerate(rows):
        batch = data(step, engine.data_rank, engine.data_ranks, count), step
        with mock.patch.object(Tensor, "__repr__", side_effect=AssertionError("a step made text of values")):
            result = engine.train_step(batch)
        assert result.loss is not None
        losses.append(result.loss.item())
        norms.append(result.grad_norm)
        sent = [row for row in engine.traffic() if row.purpose in ("send activations", "send their gradients")]
        assert engine.plan.streams or [r.planned_elements for r in sent] == [r.measured_elements for r in sent]
        if step % 4 == 1:
            with torch.no_grad():
                engine(data(step, engine.data_rank, engine.data_ranks, count), step)
    return losses, norms, engine.state_dict()


def close(run: list[Any], expected: PlainRun) -> None:
    """Every rank knows the losses and norms of the whole, and takes out the whole model."""
    for losses, norms, weights in run:
        follows_plain_loop([(losses, weights)], expected)
        torch.testing.assert_close(torch.tensor(norms), torch.tensor(expected.norms), rtol=1e-4, atol=0)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_follows_a_plain_loop(pool: Pool, case: tuple[str, int, int, int]) -> None:
    schedule, d, v, m = case
    plan = {
        "pipeline_parallel": d,
        "pipeline_parallel.schedule": schedule,
        "pipeline_parallel.virtual_stages": v,
        "microbatches": m,
    }
    rows = (m,) * (6 if case in LONG else STEPS)
    close(pool.run(train, d, "DeepTied", plan, rows), plain("DeepTied", "sgd", rows))


@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved", "zb-h1"])
def test_with_data_parallel_replicas_of_two_stages(pool: Pool, schedule: str, zero: int) -> None:
    plan = {
        "pipeline_parallel": 2,
        "pipeline_parallel.schedule": schedule,
        "microbatches": 4,
        "zero": zero,
        "clip_norm": 0.5,
    }
    plan |= {"pipeline_parallel.virtual_stages": 2} if schedule == "interleaved" else {}
    rows = (8,) * STEPS
    close(pool.run(train, 4, "TiedFive", plan, rows, "adamw"), plain("TiedFive", "adamw", rows, 0.5))


@pytest.mark.parametrize("case", by_default([("1f1b", 1), ("zb-h1", 1), ("interleaved", 2)], ("zb-h1", 1)), ids=str)
def test_with_data_parallel_replicas_of_more_stages(wide_pool: Pool, case: tuple[str, int]) -> None:
    schedule, v = case
    plan = {
        "pipeline_parallel": 3,
        "pipeline_parallel.schedule": schedule,
        "pipeline_parallel.virtual_stages": v,
        "microbatches": 3,
        "zero": 1,
    }
    rows = (6,) * STEPS
    close(wide_pool.run(train, 6, "DeepTied", plan, rows), plain("DeepTied", "sgd", rows))


@pytest.mark.parametrize("model", ["Deep", "DeepTied"])
@pytest.mark.parametrize("replicas", [(2, 1), (1, 2), (1, 2, 1), (1, 3)], ids=str)
def test_with_uneven_replicas(pool: Pool, replicas: tuple[int, ...], model: str) -> None:
    plan = {
        "pipeline_parallel": len(replicas),
        "pipeline_parallel.replicas": replicas,
        "microbatches": 4 if 3 not in replicas else 3,
    }
    plan, rows = {**plan, "clip_norm": 0.5}, (8 if 3 not in replicas else 6,) * STEPS
    close(pool.run(train, sum(replicas), model, plan, rows), plain(model, "sgd", rows, 0.5))


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_reducing_every_microbatch(pool: Pool, zero: int) -> None:
    plan = {"pipeline_parallel": 2, "microbatches": 2, "zero": zero, "reduce_every": "microbatch"}
    rows = (8,) * STEPS
    close(pool.run(train, 4, "TiedFive", plan, rows), plain("TiedFive", "sgd", rows))


def in_float64(mesh: zs.Mesh, by_sum: bool) -> list[Tensor | None]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4))).double()

    def loss(output: Tensor, batch: Tensor) -> Any:
        return (output.square().sum(), output.numel()) if by_sum else output.square().mean()

    plan = zs.Plan(pipeline_parallel=2, microbatches=4)
    example = torch.ones(2, 8, dtype=torch.float64)
    engine = zs.Engine(model, functools.partial(torch.optim.SGD, lr=0.1), plan, mesh=mesh, example=example, loss=loss)
    return [engine.train_step(data_in_float64(step)).loss for step in range(3)]


def data_in_float64(step: int) -> Tensor:
    return torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


@pytest.mark.parametrize("by_sum", [False, True])
def test_losses_in_float64_stay_so(pool: Pool, by_sum: bool) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4))).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    runs = pool.run(in_float64, 2, by_sum)
    for step in range(3):
        expected = model(data_in_float64(step)).square().mean()
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        for run in runs:
            torch.testing.assert_close(run[step], expected.detach(), rtol=1e-14, atol=0)


def test_strict_gathers_without_replicas(pool: Pool) -> None:
    """The lists of actions gather each chunk, which has one rank, since `strict` keeps it in a slice."""
    plan, rows = {"pipeline_parallel": 2, "microbatches": 2, "zero": 3, "strict": True}, (4,) * 2
    close(pool.run(train, 2, "TiedFive", plan, rows), plain("TiedFive", "sgd", rows))


_wholes: dict[str, Any] = {}  # the runs in one stage, by precision


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("schedule", ["naive", "gpipe", "1f1b", "interleaved", "zb-h1"])
def test_the_same_bits_as_one_stage(pool: Pool, schedule: str, precision: str) -> None:
    """One stage adds up the same microbatches in the same order."""
    plan = {
        "pipeline_parallel.schedule": schedule,
        "microbatches": 4,
        "precision": precision,
        "recompute": "off",
        "zero": 0,
    }
    rows = (8,) * STEPS
    if precision not in _wholes:
        one = {**plan, "pipeline_parallel.schedule": "1f1b", "recompute": "schedule"}
        _wholes[precision] = pool.run(train, 1, "Five", one, rows, "adamw")[0]
    whole = _wholes[precision]
    for losses, _, weights in pool.run(train, 2, "Five", {**plan, "pipeline_parallel": 2}, rows, "adamw"):
        assert losses == pytest.approx(whole[0], rel=1e-6)  # the sum of the shares is made in another order
        for key, value in weights.items():
            assert torch.equal(value, whole[2][key]), key


@pytest.mark.parametrize("name", ["Frozen", "TwoDtypes", "Nested", "Dropped"])
def test_awkward_models(pool: Pool, name: str) -> None:
    """Frozen parts; two dtypes; lists of lists; dropout under recomputation."""
    rows = (8,) * STEPS
    if name == "Dropped":
        runs = [
            pool.run(
                train,
                2,
                name,
                {
                    "pipeline_parallel": 2,
                    "pipeline_parallel.schedule": "gpipe",
                    "microbatches": 4,
                    "recompute": recompute,
                },
                rows,
            )
            for recompute in ("blocks", "off")
        ]
        for (losses, _, weights), (others, _, other_weights) in zip(*runs, strict=True):
            assert losses == others
            assert all(torch.equal(weights[key], other_weights[key]) for key in weights)
        assert runs[0][0][0] != plain(name, "sgd", rows).losses  # so there was dropout
        return
    close(pool.run(train, 2, name, {"pipeline_parallel": 2, "microbatches": 4}, rows), plain(name, "sgd", rows))


@pytest.mark.parametrize("schedule", ["naive", "gpipe", "1f1b", "interleaved", "zb-h1"])
def test_recomputation_changes_nothing(pool: Pool, schedule: str) -> None:
    """The other way than the schedule's own: only gpipe recomputes unless it is told not to."""
    recompute = "off" if schedule == "gpipe" else "blocks"
    plan = {"pipeline_parallel": 2, "pipeline_parallel.schedule": schedule, "microbatches": 4, "recompute": recompute}
    plan |= {"pipeline_parallel.virtual_stages": 2} if schedule == "interleaved" else {}
    rows = (8,) * STEPS
    close(pool.run(train, 2, "TiedFive", plan, rows), plain("TiedFive", "sgd", rows))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved", "zb-h1"])
def test_batches_of_other_sizes_and_microbatches_of_unlike_sizes(pool: Pool, schedule: str) -> None:
    plan = {"pipeline_parallel": 2, "pipeline_parallel.schedule": schedule, "microbatches": 4}
    rows = (8, 8, 7, 8, 5, 4, 9, 8)
    close(pool.run(train, 2, "TiedFive", plan, rows), plain("TiedFive", "sgd", rows))


def evaluate(mesh: zs.Mesh, plan: dict[str, Any]) -> list[Tensor]:
    """What the model returns on every rank, before and after a step."""
    model = build("DeepTied")
    engine = zs.Engine(
        model,
        OPTIMIZERS["sgd"],
        zs.Plan.from_dict({"pipeline_parallel.balance": "parameters", **plan}),
        mesh=mesh,
        example=(data(0, 0, 1, 2), 0),
    )
    seen = []
    for step in range(2):
        with torch.no_grad():
            seen.append(engine(data(9, engine.data_rank, engine.data_ranks, 6)))
        engine.train_step((data(step, engine.data_rank, engine.data_ranks, 4), step))
    return seen


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-h1", "pipedream", "2bw"])
def test_evaluation_gives_every_rank_the_output(pool: Pool, schedule: str) -> None:
    model = build("DeepTied")
    with torch.no_grad():
        expected = model(data(9, 0, 1, 6))
    plan = {
        "pipeline_parallel": 2,
        "pipeline_parallel.schedule": schedule,
        "microbatches": 2,
        "pipeline_parallel.virtual_stages": 2 if schedule == "interleaved" else 1,
    }
    runs = pool.run(evaluate, 2, plan)
    assert torch.equal(runs[0][1], runs[1][1])
    assert all(torch.equal(run[0], expected) and not torch.equal(run[1], expected) for run in runs)


def sent(mesh: zs.Mesh, evaluates: bool) -> list[tuple[str, int | None, int]]:
    """What the engine says that its second step moved."""
    engine = zs.Engine(
        build("Five"),
        OPTIMIZERS["sgd"],
        zs.Plan(pipeline_parallel=zs.Pipeline(2, balance="parameters")),
        mesh=mesh,
        example=(data(0, 0, 1, 2), 0),
    )
    for step in range(2):
        if evaluates and step == 1:
            with torch.no_grad():
                engine(data(9, 0, 1, 6))
        engine.train_step((data(step, 0, 1, 4), step))
    return [(row.purpose, row.planned_elements, row.measured_elements) for row in engine.traffic()]


def test_an_evaluation_is_not_counted_among_the_activations_of_a_step(pool: Pool) -> None:
    for with_evaluation, without in zip(pool.run(sent, 2, True), pool.run(sent, 2, False), strict=True):
        rows = {purpose: row for purpose, *row in with_evaluation}
        evaluation = rows.pop("send to evaluate")
        assert evaluation[0] is None
        assert {**rows, "agreement": None} == {**{p: row for p, *row in without}, "agreement": None}
        assert all(planned is None or planned == measured for planned, measured in rows.values())


def reduced(mesh: zs.Mesh, plan: dict[str, Any]) -> tuple[int | None, int]:
    """What the engine says that its last step reduced."""
    engine = zs.Engine(
        build("Five"),
        OPTIMIZERS["sgd"],
        zs.Plan.from_dict({"pipeline_parallel.balance": "parameters", **plan}),
        mesh=mesh,
        example=(data(0, 0, 1, 2), 0),
    )
    for step in range(3):
        engine.train_step((data(step, engine.data_rank, engine.data_ranks, 8), step))
    row = engine.traffic()["reduce gradients"]
    return row.planned_elements, row.measured_elements


@pytest.mark.parametrize("schedule, every", [("1f1b", "microbatch"), ("1f1b", "auto"), ("pipedream", "auto")])
def test_uneven_replicas_reduce_their_own_microbatches(pool: Pool, schedule: str, every: str) -> None:
    """A stage of r replicas reduces m/r times where each microbatch, or each update of one, is reduced."""
    plan = {
        "pipeline_parallel": 2,
        "pipeline_parallel.replicas": (2, 1),
        "microbatches": 4,
        "pipeline_parallel.schedule": schedule,
        "reduce_every": every,
    }
    answers = pool.run(reduced, 3, plan)
    assert all(planned == measured for planned, measured in answers)
    assert answers[0][1] > 0 and answers[2] == (0, 0)


def overflow(mesh: zs.Mesh, stage: int) -> list[tuple[bool, float]]:
    """fp16 steps, the first with a gradient that overflows on one stage alone."""
    model = build("Deep")
    engine = zs.Engine(
        model,
        OPTIMIZERS["adamw"],
        zs.Plan(
            pipeline_parallel=zs.Pipeline(2, balance="parameters"),
            microbatches=2,
            precision="fp16",
            loss_scale=zs.LossScale(initial=256.0),
        ),
        mesh=mesh,
        example=(data(0, 0, 1, 2), 0),
    )
    seen = []
    for step in range(3):
        if step == 0 and mesh.rank == stage:
            block = next(m for m in model.blocks if not next(m.parameters()).is_meta)
            handle = block.down.weight.register_hook(lambda gradient: gradient * float("inf"))
        result = engine.train_step((data(step, 0, 1, 4), step))
        if step == 0 and mesh.rank == stage:
            handle.remove()
        seen.append((result.skipped, result.loss_scale))
    return seen


@pytest.mark.parametrize("stage", [0, 1])
def test_all_stages_decide_on_the_loss_scale(pool: Pool, stage: int) -> None:
    runs = pool.run(overflow, 2, stage)
    assert runs[0] == runs[1] == [(True, 256.0), (False, 128.0), (False, 128.0)]


def not_finite(mesh: zs.Mesh, nonfinite: str) -> Any:
    """A step with a NaN in a gradient on the first stage."""
    model = build("Deep")
    engine = zs.Engine(
        model,
        OPTIMIZERS["adamw"],
        zs.Plan(pipeline_parallel=zs.Pipeline(2, balance="parameters"), microbatches=2, nonfinite=nonfinite),  # type: ignore[arg-type]
        mesh=mesh,
        example=(data(0, 0, 1, 2), 0),
    )
    if mesh.rank == 0:
        model.blocks[0].down.weight.register_hook(lambda gradient: gradient * float("nan"))
    before = engine.state_dict()
    try:
        skipped = engine.train_step((data(0, 0, 1, 4), 0)).skipped
    except zs.errors.NonFiniteError as error:
        return str(error)
    after = engine.state_dict()
    return skipped and all(torch.equal(before[key], after[key]) for key in before)


def test_gradients_that_are_not_finite(pool: Pool) -> None:
    for words in pool.run(not_finite, 2, "raise"):
        assert "blocks.0.down.weight" in words
    assert pool.run(not_finite, 2, "skip") == [True, True]


def gpt(mesh: zs.Mesh, stages: int) -> Any:
    """The built-in model from meta: its initial weights, and the losses of two steps."""
    from zeroshard.train.gpt import GPT
    from zeroshard.train.sizes import GPTConfig

    with torch.device("meta"):
        model = GPT(GPTConfig(vocabulary=17, context=8, width=8, heads=2, layers=4))
    tokens = torch.randint(17, (4, 9), generator=torch.Generator().manual_seed(1))
    inputs = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    plan = zs.Plan(pipeline_parallel=stages, microbatches=2, zero=0, seed=3)
    example = {key: value[:2] for key, value in inputs.items()} if stages > 1 else None
    engine = zs.Engine(model, OPTIMIZERS["adamw"], plan, mesh=mesh, example=example)
    weights = engine.state_dict()
    return weights, [engine.train_step(inputs).loss.item() for _ in range(2)], engine.layers


def test_a_model_on_meta_starts_from_the_same_weights(pool: Pool) -> None:
    """Also the split by measured time, in which every layer is on exactly one rank."""
    ((weights, losses, _),) = pool.run(gpt, 1, 1)
    runs = pool.run(gpt, 3, 3)
    for others, other_losses, _ in runs:
        assert others.keys() == weights.keys()
        assert all(torch.equal(others[key], weights[key]) for key in weights)
        assert other_losses == pytest.approx(losses, rel=1e-5)
    assert [layer for _, _, layers in runs for layer in layers] == [
        "prefix",
        *(f"blocks.{n}" for n in range(4)),
        "suffix",
    ]


def hugging_face(mesh: zs.Mesh, stages: int) -> list[float]:
    """Three steps of an unmodified transformers model."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=31, n_positions=16, n_embd=8, n_layer=4, n_head=2, resid_pdrop=0.0)
    config.embd_pdrop = config.attn_pdrop = 0.0
    config.use_cache = False
    model = transformers.GPT2LMHeadModel(config)
    tokens = torch.randint(31, (4, 8), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": tokens, "labels": tokens}
    example = {key: value[:2] for key, value in batch.items()} if stages > 1 else None
    plan = zs.Plan(pipeline_parallel=zs.Pipeline(stages, balance="parameters"), microbatches=2, zero=0)
    engine = zs.Engine(model, OPTIMIZERS["adamw"], plan, mesh=mesh, example=example)
    losses = [engine.train_step(batch).loss.item() for _ in range(3)]
    with torch.no_grad():
        logits = engine(input_ids=tokens).logits
    return [*losses, logits.sum().item()]


def test_an_unmodified_transformers_model_with_tied_weights(pool: Pool) -> None:
    pytest.importorskip("transformers")
    (whole,) = pool.run(hugging_face, 1, 1)
    for run in pool.run(hugging_face, 2, 2):
        assert run == pytest.approx(whole, rel=1e-4)


def offloaded(mesh: zs.Mesh, schedule: str, offload: str) -> Any:
    """Losses, weights, and elements of activations that went to the host, where they are large enough to go."""
    plan = zs.Plan(
        pipeline_parallel=zs.Pipeline(2, schedule=schedule, balance="parameters"), microbatches=2, offload=offload
    )
    engine = zs.Engine(build("Five"), OPTIMIZERS["adamw"], plan, mesh=mesh, example=(data(0, 0, 1, 128), 0))
    losses = [engine.train_step((data(step, engine.data_rank, engine.data_ranks, 256), step)).loss for step in range(3)]
    moved = sum(row.measured_elements for row in engine.traffic() if row.purpose == "activations down")
    return [float(loss) for loss in losses if loss is not None], engine.state_dict(), moved


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_activations_may_be_offloaded_bit_for_bit(pool: Pool, schedule: str) -> None:
    runs = zip(*(pool.run(offloaded, 2, schedule, offload) for offload in ("activations", "")), strict=True)
    for (losses, weights, moved), (others, other_weights, none) in runs:
        assert len(losses) == 3 and losses == others
        assert all(torch.equal(weights[key], other_weights[key]) for key in weights)
        assert moved > 0 == none


class Recomputing(torch.nn.Module):
    """A block that computes a part of itself again in the backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.inner = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 6))

    def forward(self, x: Tensor) -> Tensor:
        inner: Tensor = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return x + inner


def recomputing(reentrant: bool) -> torch.nn.Sequential:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(6, 6), *(Recomputing(reentrant) for _ in range(4)))


def split_backwards_that_recompute(mesh: zs.Mesh, reentrant: bool) -> Any:
    plan = zs.Plan(pipeline_parallel=zs.Pipeline(2, schedule="zb-h1", balance="parameters"), microbatches=4)
    engine = zs.Engine(
        recomputing(reentrant),
        OPTIMIZERS["sgd"],
        plan,
        mesh=mesh,
        loss=lambda y, x: y.square().mean(),
        example=ROWS[:2],
    )
    for _ in range(2):
        engine.train_step(ROWS)
    return engine.state_dict()


ROWS = torch.linspace(-1, 1, 48).reshape(8, 6)


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_block_recomputes_leaves_its_weight_gradients_too(pool: Pool, reentrant: bool) -> None:
    model = recomputing(reentrant)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        model(ROWS).square().mean().backward()
        optimizer.step()
    for weights in pool.run(split_backwards_that_recompute, 2, reentrant):
        for key, value in model.state_dict().items():
            torch.testing.assert_close(weights[key], value, rtol=1e-5, atol=1e-6)


class Listed(torch.nn.Module):
    """Blocks in a list, with layers before and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = torch.nn.Linear(6, 6)
        self.blocks = torch.nn.ModuleList([Recomputing(reentrant=False) for _ in range(4)])
        self.leave = torch.nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.leave(x)
        return y


def grouped(parameters: Any) -> torch.optim.Optimizer:
    """Rates by place in the list of all parameters, which is walked twice."""
    groups = [{"params": list(parameters)[:7], "lr": 0.2}, {"params": list(parameters)[7:], "lr": 0.02}]
    return torch.optim.SGD(groups)


def train_in_groups(mesh: zs.Mesh) -> Any:
    torch.manual_seed(3)
    plan = zs.Plan(pipeline_parallel=zs.Pipeline(2, schedule="1f1b", balance="parameters"), microbatches=4)
    engine = zs.Engine(Listed(), grouped, plan, mesh=mesh, loss=lambda y, x: y.square().mean(), example=ROWS[:2])
    for _ in range(2):
        engine.train_step(ROWS)
    return engine.state_dict()


def test_a_function_of_the_parameters_gets_those_of_all_stages(pool: Pool) -> None:
    torch.manual_seed(3)
    model = Listed()
    optimizer = grouped(list(model.parameters()))
    for _ in range(2):
        optimizer.zero_grad()
        model(ROWS).square().mean().backward()
        optimizer.step()
    for weights in pool.run(train_in_groups, 2):
        for key, value in model.state_dict().items():
            torch.testing.assert_close(weights[key], value, rtol=1e-5, atol=1e-6)


def last_stage_without_parameters(mesh: zs.Mesh, folder: str) -> list[tuple[list[float], dict[str, Tensor]]]:
    answers = []
    for zero in range(4):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh(), torch.nn.LogSigmoid())
        plan = zs.Plan(pipeline_parallel=zs.Pipeline(2, split=("1",)), microbatches=2, zero=zero, transport="network")
        optimizer, loss = OPTIMIZERS["adamw"], lambda output, batch: output.square().mean()
        engine = zs.Engine(model, optimizer, plan, mesh=mesh, example=torch.ones(2, 6), loss=loss)
        rows = [torch.randn(4, 6, generator=torch.Generator().manual_seed(step)) for step in range(4)]
        losses = [engine.train_step(part).loss for part in rows[:2]]
        engine.save(f"{folder}/{zero}", wait=True)
        engine.train_step(rows[3])
        engine.load(f"{folder}/{zero}")
        losses += [engine.train_step(part).loss for part in rows[2:]]
        answers.append(([found.item() for found in losses if found is not None], engine.state_dict()))
    return answers


def test_a_stage_without_parameters(pool: Pool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh(), torch.nn.LogSigmoid())
    optimizer, wanted = OPTIMIZERS["adamw"](model.parameters()), []
    for step in range(4):
        rows = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = model(rows).square().mean()
        loss.backward()
        optimizer.step()
        wanted.append(loss.item())
    for answers in pool.run(last_stage_without_parameters, 2, str(tmp_path)):
        for losses, weights in answers:
            assert losses == pytest.approx(wanted, rel=1e-5)
            for key, value in model.state_dict().items():
                torch.testing.assert_close(weights[key], value, rtol=1e-5, atol=1e-6)


def hooked(mesh: zs.Mesh, schedule: str) -> Any:
    """Weights after a step with hooks that make every gradient zero, and after one without them."""
    model = build("DeepTied")
    handles = [parameter.register_hook(lambda gradient: gradient * 0.0) for parameter in model.parameters()]
    plan = {"pipeline_parallel": 2, "pipeline_parallel.schedule": schedule, "pipeline_parallel.balance": "parameters"}
    of = zs.Plan.from_dict({**plan, "microbatches": 4})
    make = functools.partial(torch.optim.SGD, lr=0.01)
    engine = zs.Engine(model, make, of, mesh=mesh, example=(data(0, 0, 1, 2), 0))
    engine.train_step((data(0, 0, 1, 4), 0))
    still = engine.state_dict()
    for handle in handles:
        handle.remove()
    engine.train_step((data(1, 0, 1, 4), 1))
    return still, engine.state_dict()


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream", "2bw"])
def test_hooks_of_parameters_are_those_of_their_versions_and_of_what_is_borrowed(pool: Pool, schedule: str) -> None:
    before = build("DeepTied").state_dict()
    for still, moved in pool.run(hooked, 2, schedule):
        assert [name for name, value in before.items() if not torch.equal(value, still[name])] == []
        assert [name for name, value in before.items() if torch.equal(value, moved[name])] == []
