"""Draws of modules in training are those of one process under any ranks, stages, microbatches and recomputation."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from selection import by_default
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zeroshard as zs
from zeroshard.errors import BatchError, ModelError, PlanError
from zeroshard.train.gpt import GPT, Block
from zeroshard.train.sizes import GPTConfig

ADAM = partial(torch.optim.AdamW, lr=1e-2)
CONFIG = GPTConfig(vocabulary=32, context=12, width=16, heads=2, layers=4, dropout=0.1)
ROWS, STEPS = 8, 8


class RecomputedBlock(Block):
    """Recomputes what is in it, by both ways."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(checkpoint(self.attention, self.attention_norm(x), use_reentrant=False))
        return x + checkpoint(self.dropout, self.mlp(self.mlp_norm(x)), use_reentrant=True)  # type: ignore[no-any-return]


class RecomputedInside(GPT):
    """The built-in model with parts of its blocks recomputed."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        for block in self.blocks:
            block.__class__ = RecomputedBlock


class Recomputed(RecomputedInside):
    """With whole blocks recomputed too, some of them by the older way."""

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.dropout(self.embedding(tokens))
        for number, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=number % 2 == 1)
        loss: Tensor = self.head(self.norm(x), targets)
        return loss


class Tied(GPT):
    """The built-in model as it is, its output tied to its embedding."""


def gpt(kind: type[GPT] = GPT) -> GPT:
    """With an output of its own: a pipeline adds up the gradients of a tied one in another order."""
    torch.manual_seed(0)
    model = kind(CONFIG)
    if kind is not Tied:
        model.head.weight = nn.Parameter(model.embedding.weight.detach().clone())
    return model


def batch(step: int) -> dict[str, Tensor]:
    """The whole batch of a step."""
    tokens = torch.randint(0, 32, (ROWS, 13), generator=torch.Generator().manual_seed(step))
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def part_of(whole: dict[str, Tensor], rank: int, ranks: int) -> dict[str, Tensor]:
    return {name: tensor.chunk(ranks)[rank] for name, tensor in whole.items()}


def train(mesh: zs.Mesh | None, plan: dict[str, Any], steps: int, kind: type[GPT] = GPT) -> tuple[list[float], Tensor]:
    """The losses of steps of `train_step` on this rank, and the final weights as one tensor."""
    torch.manual_seed(-1 if mesh is None else mesh.rank)  # torch's own streams differ everywhere
    model = gpt(kind)
    torch.manual_seed(5 if mesh is None else mesh.rank + 6)
    engine = zs.Engine(
        model, ADAM, zs.Plan.from_dict({"rng": "exact", **plan}), mesh=mesh, example=part_of(batch(0), 0, ROWS)
    )
    losses = []
    for step in range(steps):
        result = engine.train_step(part_of(batch(step), engine.data_rank, engine.data_ranks))
        assert result.loss is not None
        losses.append(float(result.loss))
    return losses, torch.cat([value.flatten() for value in engine.state_dict().values()])


PIPED = {"pipeline_parallel": 2, "microbatches": 2, "pipeline_parallel.balance": "parameters"}


@pytest.fixture(scope="module")
def reference() -> tuple[list[float], Tensor]:
    """Steps of one process in two microbatches."""
    return train(None, {"zero": 0, "microbatches": 2}, STEPS)


@pytest.mark.parametrize("zero", by_default(range(4), 2, 3))
def test_two_ranks_are_one_process_bit_for_bit(pool: Pool, reference: Any, zero: int) -> None:
    (first, weights), (second, _) = pool.run(train, 2, {"zero": zero, "transport": "network"}, STEPS)
    assert (torch.tensor(first) / 2 + torch.tensor(second) / 2).tolist() == reference[0]
    assert torch.equal(weights, reference[1])


STAGED: dict[str, dict[str, Any]] = {
    "1f1b": PIPED,
    "recomputed": {**PIPED, "recompute": "blocks"},
    "gpipe": {**PIPED, "pipeline_parallel.schedule": "gpipe"},
    "interleaved": {**PIPED, "pipeline_parallel.schedule": "interleaved", "pipeline_parallel.virtual_stages": 2},
    "split backward": {**PIPED, "pipeline_parallel.schedule": "zb-h1", "recompute": "blocks"},
}


@pytest.mark.parametrize("name", by_default(STAGED, "1f1b", "split backward"))
def test_two_stages_are_one_process_bit_for_bit(pool: Pool, reference: Any, name: str) -> None:
    for losses, weights in pool.run(train, 2, STAGED[name], STEPS):
        assert losses == reference[0]
        assert torch.equal(weights, reference[1])


def test_recomputation_is_one_process_bit_for_bit(pool: Pool, reference: Any, whole: bool) -> None:
    for kind in (RecomputedInside, Recomputed) if whole else (Recomputed,):
        losses, weights = train(None, {"zero": 0, "microbatches": 2}, STEPS, kind)
        assert losses == reference[0] and torch.equal(weights, reference[1])
    for losses, weights in pool.run(train, 2, {**PIPED, "recompute": "blocks"}, STEPS, RecomputedInside):
        assert losses == reference[0] and torch.equal(weights, reference[1])


@pytest.mark.parametrize("microbatches", by_default([1, 4, 8], 4))
def test_other_orders_of_sums_differ_by_rounding_alone(reference: Any, microbatches: int) -> None:
    losses, _ = train(None, {"zero": 0, "microbatches": microbatches}, STEPS)
    assert losses == pytest.approx(reference[0], rel=1e-6)


def test_four_ranks_of_two_stages_and_replicas(pool: Pool, reference: Any) -> None:
    for losses, _ in pool.run(train, 4, {**PIPED, "zero": 1}, STEPS):
        assert losses == pytest.approx(reference[0], rel=1e-6)


def test_a_tied_output_in_stages_differs_by_rounding_alone(pool: Pool) -> None:
    wanted, _ = train(None, {"zero": 0, "microbatches": 2}, STEPS, Tied)
    for losses, _ in pool.run(train, 2, PIPED, STEPS, Tied):
        assert losses == pytest.approx(wanted, rel=1e-6)


def test_fast_numbers_are_not_those_of_one_process(pool: Pool, reference: Any) -> None:
    answers = pool.run(train, 2, {"zero": 0, "rng": "fast"}, 2)
    assert sum(losses[0] for losses, _ in answers) / 2 != pytest.approx(reference[0][0], rel=1e-4)


def go_on(mesh: zs.Mesh | None, plan: dict[str, Any], folder: str, save: bool) -> list[float]:
    """Two steps and a checkpoint; or two more steps from it."""
    model = gpt()
    engine = zs.Engine(
        model, ADAM, zs.Plan.from_dict({"rng": "exact", **plan}), mesh=mesh, example=part_of(batch(0), 0, ROWS)
    )
    if not save:
        engine.load(folder)
    losses = [
        float(engine.train_step(part_of(batch(engine.steps), engine.data_rank, engine.data_ranks)).loss)  # type: ignore[arg-type]
        for _ in range(2)
    ]
    if save:
        engine.save(folder, wait=True)
    return losses


def test_a_checkpoint_goes_on_with_the_same_numbers_under_another_plan(
    pool: Pool, reference: Any, tmp_path: Path
) -> None:
    first = go_on(None, {"zero": 0, "microbatches": 2}, str(tmp_path / "a"), True)
    assert first == reference[0][:2]
    for losses in pool.run(go_on, 2, PIPED, str(tmp_path / "a"), False):
        assert losses == reference[0][2:4]


def by_hand(mesh: zs.Mesh | None, microbatches: int, counts: tuple[int, ...] | None = None) -> list[float]:
    """Losses of two steps of a loop by hand; `counts` are this rank's rows of each microbatch."""
    model = gpt()
    engine = zs.Engine(model, ADAM, zs.Plan(zero=0, rng="exact", microbatches=microbatches), mesh=mesh)
    losses = []
    for step in range(2):
        mine = part_of(batch(step), engine.data_rank, engine.data_ranks)
        sizes = counts or (len(mine["tokens"]) // microbatches,) * microbatches
        total = 0.0
        for number, size in enumerate(sizes):
            first = sum(sizes[:number])
            loss = engine(**{name: tensor[first : first + size] for name, tensor in mine.items()}) / len(sizes)
            engine.optimizer.zero_grad() if number == 0 else None
            engine.backward(loss)
            total += float(loss.detach())
        engine.step()
        losses.append(total)
    return losses


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_loop_by_hand_draws_as_train_step_does(pool: Pool, reference: Any, microbatches: int) -> None:
    assert by_hand(None, microbatches) == pytest.approx(reference[0][:2], rel=1e-6)
    answers = pool.run(by_hand, 2, microbatches)
    assert [sum(pair) / 2 for pair in zip(*answers, strict=True)] == pytest.approx(reference[0][:2], rel=1e-6)


def refused(mesh: zs.Mesh, microbatches: int, counts: list[tuple[int, ...]]) -> str:
    """Why a loop by hand with these rows is refused on this rank."""
    with pytest.raises(BatchError) as error:
        by_hand(mesh, microbatches, counts[mesh.rank])
    return str(error.value)


@pytest.mark.parametrize(
    "microbatches, counts, words",
    [
        (1, [(4,), (3,)], "the microbatches of the ranks have 4, 3 of rows"),
        (2, [(2, 2), (3, 1)], "have 2, unlike numbers of rows"),
        (1, [(2, 2), (2, 2)], "plan's microbatches=1, and the ranks had 2, 2 in this step. Set microbatches to"),
    ],
)
def test_a_loop_by_hand_whose_rows_are_not_known_is_refused_on_all_ranks(
    pool: Pool, microbatches: int, counts: list[tuple[int, ...]], words: str
) -> None:
    for message in pool.run(refused, 2, microbatches, counts):
        assert words in message and "engine.train_step(batch)" in message


class Masks(nn.Module):
    """Returns the masks of its dropouts, as a factor on a parameter."""

    def __init__(self, draw: Callable[[Tensor], Tensor] = partial(F.dropout, p=0.5)) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * self.draw(x)


def masks_of(
    mesh: zs.Mesh | None, model: nn.Module, x: Tensor, counts: tuple[int, ...], microbatches: int = 1
) -> list[Tensor]:
    """What this rank's microbatches of one step put out; `counts` are the ranks' rows of `x`."""
    found: list[Tensor] = []

    def loss(output: Tensor, _: Any) -> Tensor:
        found.append(output.detach())
        return output.float().sum()

    engine = zs.Engine(model, ADAM, zs.Plan(zero=0, rng="exact", microbatches=microbatches), mesh=mesh, loss=loss)
    engine.train_step(x.split(counts)[engine.rank])
    return found


def test_uneven_rows_are_numbered_by_their_counts(pool: Pool) -> None:
    x = torch.ones(9, 5)
    whole = masks_of(None, Masks(), x, (9,))[0]
    assert 0 < int((whole == 0).sum()) < 45 and set(whole.unique().tolist()) == {0.0, 2.0}
    answers = pool.run(masks_of, 3, Masks(), x, (2, 6, 1))
    assert torch.equal(torch.cat([parts[0] for parts in answers]), whole)


def test_the_draws_of_steps_seeds_modules_and_calls_are_independent() -> None:
    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Masks(), Masks()

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([self.a(x), self.b(x), self.a(x), F.dropout(x, 0.5), F.dropout(x, 0.5)])

    x = torch.ones(4, 64)
    found = []
    for seed in (0, 1):
        outputs: list[Tensor] = []
        plan = zs.Plan(rng="exact", seed=seed)
        engine = zs.Engine(Several(), ADAM, plan, loss=lambda output, _, to=outputs: to.append(output) or output.sum())  # type: ignore[func-returns-value]
        for _ in range(2):
            engine.train_step(x)
        found += [mask for output in outputs for mask in output.detach().bool()]
    assert len(found) == 20
    for n, one in enumerate(found):
        for other in found[:n]:
            assert 70 < int((one != other).sum()) < 186  # of 256, five standard deviations around a half


class Attention(nn.Module):
    """torch's own attention, with its weights asked for or not, sequence first or not."""

    def __init__(self, need_weights: bool, batch_first: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=batch_first)
        self.need_weights, self.batch_first = need_weights, batch_first

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.batch_first else x.transpose(0, 1)
        found = self.attention(x, x, x, need_weights=self.need_weights)[0]
        return found if self.batch_first else found.transpose(0, 1)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
def test_attentions_own_dropout_is_drawn_by_row(need_weights: bool, batch_first: bool) -> None:
    x = torch.randn(6, 5, 8)
    whole = masks_of(None, Attention(need_weights, batch_first), x, (6,))[0]
    model = Attention(need_weights, batch_first)
    assert (model.eval()(x) - whole).abs().max() > 0.01
    parts = masks_of(None, Attention(need_weights, batch_first), x, (6,), microbatches=3)
    torch.testing.assert_close(torch.cat(parts), whole)


class SharedBlock(nn.Module):
    """A layer and a dropout that all blocks share."""

    def __init__(self, dropout: nn.Dropout) -> None:
        super().__init__()
        self.layer, self.dropout = nn.Linear(6, 6), dropout

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.layer(x))


class Shared(nn.Module):
    """Blocks that share one dropout, and a dropout around them that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        dropout = nn.Dropout(0.2)
        self.embed, self.head, self.around = nn.Linear(6, 6), nn.Linear(6, 1), nn.Dropout(0.2)
        self.blocks = nn.ModuleList([SharedBlock(dropout) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.around(self.embed(x))
        for block in self.blocks:
            x = block(x)
        return self.head(F.dropout(self.around(x), 0.1)).square().mean()


def shared(mesh: zs.Mesh | None, plan: dict[str, Any]) -> list[float]:
    engine = zs.Engine(
        Shared(),
        ADAM,
        zs.Plan.from_dict({"rng": "exact", "microbatches": 2, **plan}),
        mesh=mesh,
        example=torch.ones(2, 6),
    )
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(3))
    return [float(engine.train_step(x).loss) for _ in range(3)]  # type: ignore[arg-type]


def test_a_stage_names_the_calls_of_shared_modules_as_one_process_does(pool: Pool) -> None:
    wanted = shared(None, {"zero": 0})
    for losses in pool.run(shared, 2, PIPED):
        assert losses == wanted


def gradients(make: Callable[[], nn.Module], forwards_first: bool) -> list[Tensor]:
    """Those of two microbatches by hand, whose backwards may come in reverse order."""
    model = make()
    engine = zs.Engine(model, partial(torch.optim.SGD, lr=1.0), zs.Plan(zero=0, rng="exact", microbatches=2))
    before = {name: value.clone() for name, value in engine.state_dict().items()}
    xs = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(4))
    if forwards_first:
        losses = [engine(xs[0]), engine(xs[1])]
        for loss in reversed(losses):
            engine.backward(loss)
    else:
        losses = [engine(x) for x in xs]
        (losses[1] + losses[0]).backward()
    engine.step()
    return [before[name] - value for name, value in engine.state_dict().items()]


class Looped(nn.Module):
    """One block called three times, recomputed or not, with a dropout in and after it."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.block, self.reentrant = (
            nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3), nn.Tanh(), nn.Dropout(0.3)),
            reentrant,
        )
        self.first = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(3):
            x = self.block(x) if self.reentrant is None else checkpoint(self.block, x, use_reentrant=self.reentrant)
            x = F.dropout(x, 0.1)
        return x.square().mean()


@pytest.mark.parametrize("forwards_first", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_calls_in_flight_are_recomputed_with_their_own_draws(reentrant: bool, forwards_first: bool) -> None:
    wanted = gradients(lambda: Looped(None), forwards_first)
    for found, gradient in zip(gradients(lambda: Looped(reentrant), forwards_first), wanted, strict=True):
        torch.testing.assert_close(found, gradient, rtol=0, atol=1e-7)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_hugging_face_model_that_recomputes_draws_as_one_that_does_not(attention: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    config._attn_implementation = attention
    found = []
    for recomputes, microbatches in ((False, 1), (True, 1), (True, 4)):
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(config)
        if recomputes:
            getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        engine = zs.Engine(model, ADAM, zs.Plan(zero=0, rng="exact", microbatches=microbatches))
        tokens = batch(0)["tokens"]
        results = [engine.train_step({"input_ids": tokens, "labels": tokens}) for _ in range(3)]
        found.append([float(result.loss) for result in results])  # type: ignore[arg-type]
    assert found[1] == found[0]
    assert found[2] == pytest.approx(found[0], rel=1e-6)


def test_torchs_own_streams_go_on_as_if_nothing_had_been_drawn() -> None:
    engine = zs.Engine(Looped(False), ADAM, zs.Plan(rng="exact"))
    x = torch.randn(4, 6)
    torch.manual_seed(11)
    wanted = torch.rand(3)
    torch.manual_seed(11)
    engine.train_step(x)
    assert torch.equal(torch.rand(3), wanted)


def test_forwards_that_are_not_trained_draw_from_torchs_streams() -> None:
    model = Masks()
    engine = zs.Engine(model, ADAM, zs.Plan(rng="exact"))
    x = torch.ones(4, 64)
    with torch.no_grad():
        assert not torch.equal(engine(x), engine(x))
    engine.eval()
    assert not torch.equal(engine(x), engine(x))  # F.dropout is not told of it
    engine.train()
    engine.backward(engine(x).sum())
    engine.step()
    generator = torch.Generator().manual_seed(1)
    own = zs.Engine(Masks(lambda x: x + torch.rand(x.shape, generator=generator)), ADAM, zs.Plan(rng="exact"))
    wanted = torch.rand(x.shape, generator=torch.Generator().manual_seed(1))
    assert torch.equal(own(x).detach() - 1, 1 + wanted - 1)


class Noises(nn.Module):
    """Draws in many ways, each of which has a row for each of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.rnn = nn.LSTM(4, 4, num_layers=2, dropout=0.4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[0]
        drawn = [
            F.dropout(x, 0.3), F.dropout1d(x, 0.3), F.alpha_dropout(x, 0.3), F.rrelu(-x, training=True),
            F.gumbel_softmax(x, dim=-1), torch.rand_like(x), torch.randn(n, 3, 4), torch.rand(n, 1, 1).expand_as(x),
            torch.empty_like(x).uniform_(-1, 1), torch.empty_like(x).normal_(), torch.bernoulli(x.sigmoid()),
            torch.randint(0, 5, (n, 3, 4)), torch.randint_like(x, 3), torch.normal(x, 2.0),
            torch.multinomial(x.sigmoid().flatten(0, 1), 4).view(n, 3, 4), self.rnn(x)[0],
            torch.distributions.Normal(x, 1.0).rsample(), torch.empty_like(x).random_(0, 9),
        ]  # fmt: skip
        return self.weight * torch.stack([each.to(x.dtype) for each in drawn], dim=1)


def test_every_kind_of_draw_has_its_rows_own_numbers() -> None:
    torch.manual_seed(3)
    x, state = torch.randn(6, 3, 4), Noises().state_dict()

    def model() -> Noises:
        made = Noises()
        made.load_state_dict(state)
        return made

    whole = masks_of(None, model(), x, (6,))[0]
    parts = torch.cat(masks_of(None, model(), x, (6,), microbatches=3))
    for number in range(whole.shape[1]):
        torch.testing.assert_close(parts[:, number], whole[:, number], msg=f"draw {number}")
        assert (whole[0, number] - whole[1, number]).abs().max() > 0, number


def test_draws_without_rows_are_the_same_in_every_microbatch() -> None:
    model = Masks(lambda x: x * torch.rand(()) + torch.rand(7).sum() + torch.randperm(5)[0])
    parts = masks_of(None, model, torch.ones(6, 2), (6,), microbatches=3)
    assert torch.equal(parts[0], parts[1]) and torch.equal(parts[0], parts[2])


@contextmanager
def fails(kind: type[Exception], *words: str) -> Iterator[None]:
    with pytest.raises(kind) as error:
        yield
    assert all(word in str(error.value) for word in (*words, "rng='exact'", "rng='fast'"))


def bare(x: Tensor) -> Tensor:
    """A function that draws, recomputed without a module."""
    return checkpoint(partial(F.dropout, p=0.5), x, use_reentrant=False)  # type: ignore[no-any-return]


def test_what_cannot_be_replaced_is_refused_by_name() -> None:
    x = torch.ones(4, 3)
    compiled = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
    compiled[1].compile(backend="eager")
    with fails(ModelError, "'1' is compiled"):
        zs.Engine(compiled, ADAM, zs.Plan(rng="exact"))
    late = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
    engine = zs.Engine(late, ADAM, zs.Plan(rng="exact"))
    late.compile(backend="eager")
    with fails(ModelError, "'the model itself' is compiled"):
        engine(x)
    with fails(PlanError, "Masks at 'the model itself'", "poisson"):
        zs.Engine(Masks(torch.poisson), ADAM, zs.Plan(rng="exact"))(x)
    with fails(PlanError, "recomputes a function that draws by itself", "a module"):
        zs.Engine(Masks(bare), ADAM, zs.Plan(rng="exact"))(x)


def test_a_recomputation_without_torchs_random_state_is_refused() -> None:
    block = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5))
    model = nn.Sequential(nn.Linear(6, 6), block)
    engine = zs.Engine(model, ADAM, zs.Plan(rng="exact"))
    plain = block.forward
    block.forward = lambda x: checkpoint(plain, x, use_reentrant=False, preserve_rng_state=False)  # type: ignore[method-assign]
    loss = engine(torch.ones(4, 6)).sum()
    with fails(PlanError, "'1.1'", "preserve_rng_state=True"):
        engine.backward(loss)


def test_attention_below_autograd_is_refused_with_its_dropout_and_not_without() -> None:
    def attend(x: Tensor, dropout: float) -> Tensor:
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return flash(x, x, x, dropout)[0]  # type: ignore[no-any-return]

    x = torch.ones(4, 2, 3, 8)
    zs.Engine(Masks(partial(attend, dropout=0.0)), ADAM, zs.Plan(rng="exact"))(x)
    with fails(PlanError, "_scaled_dot_product_flash_attention_for_cpu", "sdpa_kernel(SDPBackend.MATH)"):
        zs.Engine(Masks(partial(attend, dropout=0.1)), ADAM, zs.Plan(rng="exact"))(x)
