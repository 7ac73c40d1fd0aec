"""Losses by sum with counts: every token weighs the same, wherever ranks, microbatches and stages have it."""

import itertools
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.models import Five
from inside import loss_count_of
from offload.offloaded import executing
from pool import Pool, WorkerError
from selection import by_default
from torch import Tensor, nn
from torch.nn import functional as F

import zeroshard as zs
from zeroshard.errors import BatchError, PlanError

ROWS, LENGTH, IGNORED = 24, 6, -100
KINDS = ("padded", "packed", "unequal", "starved rank", "starved microbatch")
SIZES = {  # rows of each data rank, where they have unequally many
    1: [24],
    2: [7, 17],
    4: [5, 4, 9, 6],
}
TOLERANCE = 1e-6
ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1, eps=1e-3)
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
NETWORK = {"transport": "network"}
TWO = {"pipeline_parallel": 2, "pipeline_parallel.balance": "parameters"}
PLANS: dict[str, dict[str, Any]] = {
    "zero 0": {"zero": 0, "clip_norm": 0.5},
    "zero 1": {"zero": 1},
    "zero 2": {"zero": 2, **NETWORK},
    "zero 2 once": {"zero": 2, **NETWORK, "reduce_every": "step"},
    "zero 3": {"zero": 3, **NETWORK, "clip_norm": 0.5},
    "groups": {"zero": 3, "shard_group": 2, **NETWORK},
    "states": {"zero": 2, "offload": "optimizer"},
    "states after": {"zero": 2, "offload": "optimizer", "offload.speculate": False},
    "streamed": {"zero": 3, "offload": "optimizer,parameters", **NETWORK},
    "activations": {"zero": 1, "offload": "activations"},
    "gpipe": {**TWO, "zero": 0, "pipeline_parallel.schedule": "gpipe"},
    "1f1b": {**TWO, "zero": 1, "clip_norm": 0.5},
    "1f1b recomputed": {**TWO, "zero": 0, "recompute": "blocks"},
    "1f1b zero 3": {**TWO, "zero": 3, **NETWORK},
    "interleaved": {
        **TWO,
        "zero": 0,
        "pipeline_parallel.schedule": "interleaved",
        "pipeline_parallel.virtual_stages": 2,
    },
    "zb-h1": {**TWO, "zero": 2, "pipeline_parallel.schedule": "zb-h1"},
    "1f1b states": {**TWO, "zero": 1, "offload": "optimizer"},
    "uneven": {**TWO, "zero": 0, "pipeline_parallel.replicas": (2, 1)},
}
SEVERAL = ("zero 2 once", "interleaved", "uneven")  # which need more than one microbatch
Batch = tuple[Tensor, Tensor]


def logits_of(model: Five, tokens: Tensor, labels: Tensor) -> Tensor:
    """A forward to the logits; `labels` are for the loss function."""
    return model.head(model.body(model.embed(tokens), 0))


def build() -> nn.Module:
    """A model that returns logits, the same every time."""
    torch.manual_seed(0)
    model = Five()
    model.forward = partial(logits_of, model)  # type: ignore[method-assign]
    return model


def token_sum(logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """As users write it."""
    labels = batch[1].flatten()
    return F.cross_entropy(logits.flatten(0, 1), labels, ignore_index=IGNORED, reduction="sum"), (labels >= 0).sum()


def whole_batch(step: int, kind: str, ranks: int) -> tuple[Batch, list[int]]:
    """The rows of a step, and how many of them each data rank has."""
    generator = torch.Generator().manual_seed(50 + step)
    tokens = torch.randint(13, (ROWS, LENGTH), generator=generator)
    labels = torch.randint(13, (ROWS, LENGTH), generator=generator)
    sizes = [ROWS // ranks] * ranks
    if kind == "padded":
        lengths = torch.randint(1, LENGTH + 1, (ROWS, 1), generator=generator)
        labels = labels.masked_fill(torch.arange(LENGTH) >= lengths, IGNORED)
    elif kind == "packed":
        labels = labels.masked_fill(torch.rand(ROWS, LENGTH, generator=generator) < 0.2, IGNORED)
    else:
        sizes = SIZES.get(ranks, sizes)
        labels[: {"unequal": 0, "starved rank": sizes[0] if ranks > 1 else 0, "starved microbatch": 2}[kind]] = IGNORED
    return (tokens, labels), sizes


def own_part(step: int, kind: str, rank: int, ranks: int) -> Batch:
    """The rows of one data rank."""
    (tokens, labels), sizes = whole_batch(step, kind, ranks)
    return tokens.split(sizes)[rank], labels.split(sizes)[rank]


def optimizer_of(name: str) -> Any:
    """The host's own Adam is for AdamW."""
    return ADAMW if "offload" in PLANS[name] else SGD


def train(mesh: zs.Mesh, name: str, microbatches: int) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses, norms and final weights of one step of each kind."""
    plan = zs.Plan.from_dict({**PLANS[name], "microbatches": microbatches})
    example = own_part(0, "padded", 0, ROWS // 2)
    engine = zs.Engine(build(), optimizer_of(name), plan, mesh=mesh, loss=token_sum, example=example)
    losses, norms = [], []
    for step, kind in enumerate(KINDS):
        result = engine.train_step(own_part(step, kind, engine.data_rank, engine.data_ranks))
        assert result.loss is not None
        losses.append(result.loss.item())
        norms.append(result.grad_norm)
    return losses, norms, engine.state_dict()


def train_all(mesh: zs.Mesh, cases: list[tuple[str, int]]) -> list[Any]:
    """The cases of one rank count, one after the other."""
    return [train(mesh, *case) for case in cases]


@cache
def plain(name: str, data_ranks: int) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """The same in one process, on whole batches."""
    model, limit = build(), PLANS[name].get("clip_norm", float("inf"))
    optimizer, losses, norms = optimizer_of(name)(model.parameters()), [], []
    for step, kind in enumerate(KINDS):
        batch, _ = whole_batch(step, kind, data_ranks)
        total, count = token_sum(model(*batch), batch)
        optimizer.zero_grad()
        (total / count).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), limit).item())
        losses.append((total / count).item())
        optimizer.step()
    return losses, norms, model.state_dict()


def cases_of(ranks: int) -> list[tuple[str, int]]:
    """Every plan that so many ranks can carry out, with one microbatch where more ranks add something to that."""
    fits = lambda plan: ranks % max(plan.get("pipeline_parallel", 1), plan.get("shard_group", 1)) == 0  # noqa: E731
    names = [name for name, plan in PLANS.items() if fits(plan) and name != "uneven"]
    cases = itertools.product(["uneven"] if ranks == 3 else names, (1, 4))
    alone = set(names) - set(SEVERAL) if ranks <= 2 else {"groups", "1f1b"}  # two replicas of two slices, or stages
    return [(name, count) for name, count in cases if count > 1 or name in alone]


def assert_equal_to_one_process(name: str, data_ranks: int, found: Any) -> None:
    losses, norms, weights = plain(name, data_ranks)
    torch.testing.assert_close(found[0], losses, rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(found[1], norms, rtol=5 * TOLERANCE, atol=TOLERANCE)
    for key, weight in weights.items():
        torch.testing.assert_close(found[2][key], weight, rtol=TOLERANCE, atol=TOLERANCE, msg=key)


@pytest.mark.parametrize("ranks", by_default([1, 2, 3, 4], 3))
def test_every_token_weighs_the_same(pool: Pool, ranks: int) -> None:
    cases = cases_of(ranks)
    everyone = pool.run(train_all, ranks, cases) if ranks > 1 else [train_all(zs.init_mesh(), cases)]
    wrong = []
    for rank, answers in enumerate(everyone):
        for (name, microbatches), found in zip(cases, answers, strict=True):
            stages = PLANS[name].get("pipeline_parallel", 1)
            try:
                assert_equal_to_one_process(name, 1 if name == "uneven" else ranks // stages, found)
            except AssertionError as error:
                wrong.append(f"{name} with {microbatches} microbatches on rank {rank}: {error}")
    assert not wrong, "\n".join(wrong)


def test_one_more_weight_on_a_rank_is_noticed() -> None:
    """The comparison has teeth: means of the ranks' means are not the mean."""
    losses, norms, weights = plain("zero 0", 2)
    means = []
    for step, kind in enumerate(KINDS[:3]):
        parts = [own_part(step, kind, rank, 2) for rank in range(2)]
        pairs = [token_sum(build()(*part), part) for part in parts]
        means.append((sum(total / count for total, count in pairs) / 2).item())  # type: ignore[union-attr]
    assert abs(means[0] - losses[0]) > 1e-4
    with pytest.raises(AssertionError):
        assert_equal_to_one_process("zero 0", 2, (means + losses[3:], norms, weights))


FORMS = ("each", "no_sync", "tensor", "clip", "clip value", "discarded", "zeroed", "penalty", "clip inf")


def loop(mesh: zs.Mesh, form: str, zero: int) -> list[Any]:
    """Two steps of a user's own loop, of three backwards each."""
    stage: Any = 2 if form == "penalty" and zero == 3 else zero  # a loop reads no weights at stage 3
    plan = zs.Plan(zero=stage, transport="network")
    engine, found = zs.Engine(build(), SGD, plan, mesh=mesh), []
    for step in range(2):
        tokens, labels = own_part(step, "padded", mesh.rank, mesh.ranks)
        if form in ("discarded", "zeroed"):
            engine.backward(*token_sum(engine(tokens, labels), (tokens, labels)))
            engine.zero_grad() if form == "discarded" else engine.model.zero_grad(set_to_none=False)
        for part in zip(tokens.split([2, 3, len(tokens) - 5]), labels.split([2, 3, len(tokens) - 5]), strict=True):
            total, count = token_sum(engine(*part), part)
            penalty = 0.1 * engine.model.head.weight.square().sum() if form == "penalty" else None
            with engine.no_sync() if form == "no_sync" else torch.enable_grad():
                engine.backward(total, count if form == "tensor" else int(count), penalty)
        norm = 0.0
        if form.startswith("clip"):
            norm = {"clip": engine.clip_grad_norm, "clip inf": partial(engine.clip_grad_norm, norm_type=float("inf")),
                    "clip value": engine.clip_grad_value}[form](0.01) or 0.0  # fmt: skip
        result = engine.step()
        assert result.loss is not None
        found.append((result.loss.item(), result.grad_norm, norm))
    return [found, engine.state_dict()]


def loop_alone(form: str) -> list[Any]:
    """The same in one process."""
    model, found = build(), []
    optimizer = SGD(model.parameters())
    for step in range(2):
        batch, _ = whole_batch(step, "padded", 1)
        total, count = token_sum(model(*batch), batch)
        loss = total / count + (0.1 * model.head.weight.square().sum() if form == "penalty" else 0.0)
        optimizer.zero_grad()
        loss.backward()
        parameters, norm = list(model.parameters()), 0.0
        whole = nn.utils.get_total_norm([p.grad for p in parameters]).item()
        if form == "clip value":
            nn.utils.clip_grad_value_(parameters, 0.01)
            whole = nn.utils.get_total_norm([p.grad for p in parameters]).item()
        elif form.startswith("clip"):
            kind = float("inf") if form == "clip inf" else 2.0
            norm = nn.utils.clip_grad_norm_(parameters, 0.01, kind).item()
        found.append((loss.item(), whole, norm))
        optimizer.step()
    return [found, model.state_dict()]


def loops(mesh: zs.Mesh) -> list[Any]:
    return [loop(mesh, form, zero) for form in FORMS for zero in (0, 3)]


@pytest.mark.parametrize("ranks", by_default([1, 2], 2))
def test_loops_of_the_user(pool: Pool, ranks: int) -> None:
    everyone = pool.run(loops, ranks) if ranks > 1 else [loops(zs.init_mesh())]
    for answers in everyone:
        for (form, zero), (found, weights) in zip(itertools.product(FORMS, (0, 3)), answers, strict=True):
            wanted, others = loop_alone(form)
            for one, other in zip(found, wanted, strict=True):
                assert one == pytest.approx(other, rel=2e-5 if "clip" in form else 5e-6), (form, zero)
            for name, value in others.items():
                torch.testing.assert_close(weights[name], value, rtol=2e-6, atol=1e-6, msg=f"{form} {zero} {name}")


WRONG: dict[str, tuple[type[Exception], str]] = {
    "text": (BatchError, "The count of a loss is not a number on rank 1, and it must be the number of tokens or rows"),
    "nan": (BatchError, "The count of a loss is not a number on rank 1, and it must be"),
    "negative": (BatchError, "The count of a loss is -3 on rank 1, and it must be the number of tokens or rows"),
    "mean": (BatchError, "by sum on rank 0 and by mean on rank 1; give all losses of a step by sum with their counts"),
    "plain": (BatchError, "by sum on rank 0, 1 and by mean on rank 0, 1; "),
}


def wrong(mesh: zs.Mesh, name: str, stages: int) -> tuple[str, str, bool]:
    """The error of a step in which the last rank gives something wrong, and whether a step after it is as the first."""

    def loss_of(logits: Tensor, batch: Batch) -> Any:
        total, count = token_sum(logits, batch)
        if mesh.rank < mesh.ranks - 1 or not bad:
            return total, count
        return {
            "text": (total, "many"), "nan": (total, float("nan")), "negative": (total, torch.tensor(-3)),
            "mean": total / count,
        }[name]  # fmt: skip

    bad, example = False, own_part(0, "padded", 0, ROWS // 2)
    plan = {"zero": 2, "microbatches": 2, **(TWO if stages > 1 else {})}
    engine = zs.Engine(build(), SGD, zs.Plan.from_dict(plan), mesh=mesh, loss=loss_of, example=example)
    batch = own_part(0, "padded", engine.data_rank, engine.data_ranks)
    bad, before = True, engine.state_dict()
    try:
        if name == "plain":
            engine.backward(*token_sum(engine(*batch), batch))
            engine(*batch).square().mean().backward()
            engine.step()
        engine.train_step(batch)
    except BatchError as error:
        bad = False
        same = all(torch.equal(value, before[key]) for key, value in engine.state_dict().items())
        result = engine.train_step(batch)
        assert result.loss is not None
        return type(error).__name__, str(error), same and abs(result.loss.item() - plain("zero 2", 2)[0][0]) < 1e-6
    return "no error", "", False


def all_wrong(mesh: zs.Mesh, stages: int) -> list[tuple[str, str, bool]]:
    return [wrong(mesh, name, stages) for name in WRONG if stages == 1 or name not in ("mean", "plain")]


@pytest.mark.parametrize("stages", [1, 2])
def test_what_is_wrong_on_one_rank_is_one_sentence_on_all(pool: Pool, stages: int) -> None:
    everyone = pool.run(all_wrong, 2, stages)
    assert everyone[0] == everyone[1]
    for name, (kind, message, on) in zip(WRONG, everyone[0], strict=False):
        assert kind == WRONG[name][0].__name__ and WRONG[name][1] in message, (name, kind, message)
        assert message.count(". ") == 0 and on, (name, message)


def unlabelled(mesh: zs.Mesh, settings: dict[str, Any]) -> Any:
    """Three steps, of which the second has no label on any rank: losses, norms, and whole weights."""
    plan = zs.Plan.from_dict({"microbatches": 2, **settings})
    own = engine_of(plan, mesh)
    found = []
    for step in range(3):
        tokens, labels = own_part(step, "padded", own.data_rank, own.data_ranks)
        result = own.train_step((tokens, torch.full_like(labels, IGNORED) if step == 1 else labels))
        assert result.loss is not None and not result.skipped
        found.append((result.loss.item(), result.grad_norm))
    return found, own.state_dict()


def engine_of(plan: zs.Plan, mesh: zs.Mesh) -> zs.Engine:
    """An engine of the model whose losses are sums, also where a mean over no token was NaN."""

    def loss_of(logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        labels = batch[1].flatten()
        count = (labels >= 0).sum()
        return F.cross_entropy(logits.flatten(0, 1), labels, ignore_index=IGNORED) * count, count

    return zs.Engine(build(), SGD, plan, mesh=mesh, loss=loss_of, example=own_part(0, "padded", 0, ROWS // 2))


def unlabelled_plans(mesh: zs.Mesh) -> list[Any]:
    names = ("zero 0", "zero 2", "zero 3", "1f1b")
    return [unlabelled(mesh, {**PLANS[name], "clip_norm": None}) for name in names]


def test_a_step_without_any_label_has_gradients_of_zeros(pool: Pool) -> None:
    model = build()
    optimizer, wanted = SGD(model.parameters()), []
    for step in range(3):
        batch = own_part(step, "padded", 0, 1)
        total, count = token_sum(model(*batch), batch)
        loss = total / count if step != 1 else total * 0.0
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        wanted.append((loss.item(), norm.item()))
    assert wanted[1] == (0.0, 0.0)
    for answers in pool.run(unlabelled_plans, 2):
        for found, weights in answers:
            for one, other in zip(found, wanted, strict=True):
                assert one == pytest.approx(other, rel=1e-5)
            for name, value in model.state_dict().items():
                torch.testing.assert_close(weights[name], value, rtol=2e-6, atol=1e-6, msg=name)


def mixed_stages(mesh: zs.Mesh) -> list[str]:
    """Two replicas of two stages: the last stage's ranks give a sum and a mean."""

    def loss_of(logits: Tensor, batch: Batch) -> Any:
        total, count = token_sum(logits, batch)
        return (total, count) if mesh.rank != 3 else total / count

    example = own_part(0, "padded", 0, ROWS // 2)
    engine = zs.Engine(build(), SGD, zs.Plan.from_dict({**TWO, "zero": 1}), mesh=mesh, loss=loss_of, example=example)
    with pytest.raises(BatchError) as caught:
        engine.train_step(own_part(0, "padded", engine.data_rank, engine.data_ranks))
    return [str(caught.value)]


def test_a_sum_and_a_mean_on_two_replicas_of_a_pipeline(pool: Pool) -> None:
    messages = {message for (message,) in pool.run(mixed_stages, 4)}
    assert len(messages) == 1 and "by sum on rank 2 and by mean on rank 3; " in messages.pop()


def test_nonfinite_skip_leaves_a_step_without_tokens_out() -> None:
    engine = zs.Engine(build(), SGD, zs.Plan(zero=0, nonfinite="skip"), loss=token_sum)
    batch = own_part(0, "padded", 0, 1)
    engine.train_step(batch)
    before = engine.state_dict()
    result = engine.train_step((batch[0], torch.full_like(batch[1], IGNORED)))
    assert result.skipped and result.loss is not None and result.loss.isnan()
    assert all(torch.equal(value, before[key]) for key, value in engine.state_dict().items())
    assert not engine.train_step(batch).skipped


@pytest.mark.parametrize("given", [{"loss": torch.zeros(())}, 1.5, None])
def test_a_loss_that_is_no_tensor_is_named(given: Any) -> None:
    engine = zs.Engine(torch.nn.Linear(2, 1), partial(torch.optim.SGD, lr=0.1))
    with pytest.raises(BatchError, match=rf"The loss is a {type(given).__name__}; a backward needs a scalar tensor"):
        engine.backward(given)
    engine.backward(engine(torch.ones(1, 2)).mean())
    assert engine.step().grad_norm > 0


def test_a_mean_needs_even_microbatches() -> None:
    engine = zs.Engine(
        build(),
        SGD,
        zs.Plan(microbatches=4),
        loss=lambda logits, batch: F.cross_entropy(logits.mT, batch[1].clamp(min=0)),
    )
    with pytest.raises(BatchError, match=r"A batch of 6 does not divide into 4 .* give the loss as \(sum, count\)"):
        engine.train_step(own_part(1, "packed", 0, 4))
    with pytest.raises(BatchError, match="A batch of 3 does not make 4 microbatches"):
        engine.train_step(tuple(tensor[:3] for tensor in own_part(1, "packed", 0, 4)))


@pytest.mark.parametrize("schedule", ["pipedream", "2bw"])
def test_streams_refuse_sums_when_the_engine_is_made(pool: Pool, schedule: str) -> None:
    with pytest.raises(WorkerError, match=f"PlanError.*by sum with a count, and schedule='{schedule}'") as caught:
        pool.run(make_stream, 2, schedule)
    assert {kind for kind, _, _ in caught.value.errors.values()} == {PlanError.__name__}


def make_stream(mesh: zs.Mesh, schedule: str) -> None:
    plan = zs.Plan.from_dict({**TWO, "zero": 0, "microbatches": 4, "pipeline_parallel.schedule": schedule})
    zs.Engine(build(), SGD, plan, mesh=mesh, loss=token_sum, example=own_part(0, "padded", 0, ROWS // 2))


class Bigram(nn.Module):
    """A table of logits [13, 13]."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(13, 13, generator=torch.Generator().manual_seed(2)))

    def forward(self, tokens: Tensor) -> Tensor:
        return F.one_hot(tokens, 13).to(self.table.dtype) @ self.table


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_sums_over_many_tokens_stay_in_range(precision: str) -> None:
    """100,000 tokens, whose sum and the scaled gradient of it are beyond float16, where those of the mean are not."""
    tokens = torch.randint(13, (100_000,), generator=torch.Generator().manual_seed(1))
    found = []
    narrow = {"precision": precision, **({"loss_scale": 1024.0} if precision == "fp16" else {})}
    for settings in (narrow, narrow, {}):
        by_sum = len(found) == 0

        def loss_of(output: Tensor, batch: Tensor, by_sum: bool = by_sum) -> Any:
            total = F.cross_entropy(output.float(), batch, reduction="sum")
            return (total, len(batch)) if by_sum else total / len(batch)

        engine = zs.Engine(Bigram(), partial(torch.optim.SGD, lr=1.0), zs.Plan.from_dict(settings), loss=loss_of)
        results = [engine.train_step(tokens) for _ in range(4)]
        assert not any(result.skipped for result in results)
        found.append([(result.loss.item(), result.grad_norm) for result in results if result.loss is not None])
    assert found[0][0][0] * len(tokens) > 65_504 and found[2][0][1] * len(tokens) * 1024 > 65_504
    for one, mean, exact in zip(*found, strict=True):
        assert one == pytest.approx(mean, rel=2e-3 if precision == "fp16" else 2e-2)
        assert one == pytest.approx(exact, rel=1e-2 if precision == "fp16" else 5e-2)


@pytest.mark.parametrize("settings", [{"zero": 1}, {"zero": 1, "precision": "fp16", "loss_scale": 256.0}])
def test_a_checkpoint_keeps_the_count_of_the_last_step(settings: dict[str, Any], tmp_path: Path) -> None:
    def engine_of() -> zs.Engine:
        return zs.Engine(build(), SGD, zs.Plan.from_dict(settings), loss=float_sum)

    straight, stopped = engine_of(), engine_of()
    for step in range(2):
        for engine in (straight, stopped):
            engine.train_step(own_part(step, "packed", 0, 1))
    stopped.save(tmp_path / "saved", wait=True)
    resumed = engine_of()
    resumed.load(tmp_path / "saved")
    for engine in (straight, resumed):
        engine.train_step(own_part(2, "padded", 0, 1))
        assert loss_count_of(engine) == float((own_part(2, "padded", 0, 1)[1] >= 0).sum())
    assert all(torch.equal(value, resumed.state_dict()[key]) for key, value in straight.state_dict().items())


@pytest.mark.parametrize("executor", ["latest", "worker"])
def test_a_delayed_update_takes_the_count_of_its_own_step(executor: str) -> None:
    """On one rank and one microbatch the mean over its tokens says the same, whatever their number in each step."""
    found = []
    for by_sum in (True, False):
        plan = zs.Plan.from_dict({"offload": "optimizer", "offload.delayed_update": True, "offload.delayed_warmup": 1})
        with executing(executor):
            mean = lambda logits, batch: torch.div(*token_sum(logits, batch))  # noqa: E731
            engine = zs.Engine(build(), ADAMW, plan, loss=token_sum if by_sum else mean)
            for step in range(6):
                tokens, labels = own_part(step, "padded", 0, 1)
                engine.train_step((tokens, labels.masked_fill(tokens < 2 * step, IGNORED)))
            found.append(engine.state_dict())
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name], rtol=1e-5, atol=1e-6)


def float_sum(logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    return token_sum(logits.float(), batch)


def test_speculation_goes_on_while_steps_count_alike() -> None:
    """And is undone, with the same result, where they do not."""
    found = []
    for offload in ("optimizer", ""):
        engine = zs.Engine(build(), ADAMW, zs.Plan(zero=2, offload=offload), loss=token_sum)
        for step in range(8):
            tokens, labels = own_part(step, "unequal", 0, 1)
            engine.train_step((tokens, labels if step < 6 else labels.masked_fill(labels == step, IGNORED)))
        if offload:
            units = len(engine.units)
            counts = engine.speculation_counts
            assert (counts.taken, counts.undone) == (5 * units, 2 * units)  # steps 2 to 6; 7 and 8
        found.append(engine.state_dict())
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name], rtol=1e-5, atol=1e-6)
