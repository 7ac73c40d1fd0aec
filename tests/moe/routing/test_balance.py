"""Losses of routers: 1 where balanced, E where collapsed, whatever the experts, the choices and the padding."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from zeroshard.moe.routing.balance import Losses, balance_loss, z_loss
from zeroshard.moe.routing.presets import PRESETS, router_of
from zeroshard.moe.routing.record import TokenGroups
from zeroshard.moe.routing.router import Router

WIDTH, EXPERTS = 16, 16


def even(experts: int, choices: int, rounds: int) -> tuple[Tensor, Tensor]:
    """Logits of tokens that choose each expert equally often, with equal mean probabilities."""
    rows = [[float(10 * (choices - i) if i < choices else 0) for i in range(experts)]] * (experts * rounds)
    logits = torch.stack([torch.tensor(row).roll(t) for t, row in enumerate(rows)])
    return logits.softmax(-1), logits.topk(choices).indices


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.integers(4, 12), st.integers(1, 3), st.booleans())
def test_an_even_load_has_the_loss_1(choices: int, experts: int, rounds: int, grouped: bool) -> None:
    probabilities, chosen = even(experts, choices, rounds)
    groups = TokenGroups(len(chosen), experts if grouped else len(chosen))
    for counted in (chosen, chosen[:, :1]):
        assert balance_loss(probabilities, counted, groups).item() == pytest.approx(1, rel=1e-5)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 12), st.integers(1, 30), st.integers(1, 9))
def test_one_expert_with_all_tokens_has_the_loss_e(experts: int, tokens: int, size: int) -> None:
    probabilities = torch.zeros(tokens, experts)
    probabilities[:, experts // 2] = 1
    chosen = torch.full((tokens, 1), experts // 2)
    loss = balance_loss(probabilities, chosen, TokenGroups(tokens, size))
    assert loss.item() == pytest.approx(experts, rel=1e-5)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 9999), st.integers(1, 40), st.integers(1, 7), st.integers(1, 3))
def test_padding_changes_no_loss(seed: int, tokens: int, size: int, choices: int) -> None:
    """Padded groups lose their padding, and are compared with the loops over what is left."""
    torch.manual_seed(seed)
    logits = torch.randn(tokens, EXPERTS)
    probabilities, chosen = logits.softmax(-1), logits.topk(choices).indices
    valid = torch.rand(tokens) < 0.6
    groups = TokenGroups(tokens, size, valid)
    total = 0.0
    for start in range(0, tokens, size):
        rows = [t for t in range(start, min(start + size, tokens)) if valid[t]]
        if rows:
            counts = torch.bincount(chosen[rows].flatten(), minlength=EXPERTS)
            means = probabilities[rows].mean(0)
            total += len(rows) * EXPERTS * (counts / counts.sum() * means).sum().item()
    count = int(valid.sum())
    assert balance_loss(probabilities, chosen, groups).item() == pytest.approx(total / max(1, count), rel=1e-4)
    squares = logits[valid].logsumexp(-1).square()
    assert z_loss(logits, groups).item() == pytest.approx(squares.sum().item() / max(1, count), rel=1e-4)


TRAINED = [name for name in PRESETS if name not in ("expert_choice", "shazeer2017", "tensor2tensor")]


@pytest.mark.parametrize("name", TRAINED)
def test_padding_reaches_nothing_of_any_preset(name: str) -> None:
    """The routing of the other tokens is the same as without padding, but for capacities, which follow shapes."""
    torch.manual_seed(0)
    changes = {"noise": None, "second": None}
    router = router_of(name, WIDTH, EXPERTS, capacity=math.inf, **changes)
    x, valid = torch.randn(60, WIDTH), torch.arange(60) % 4 > 0
    routing, alone = router(x, valid=valid, group=60), router(x[valid], group=45)
    assert torch.equal(routing.experts[valid], alone.experts)
    torch.testing.assert_close(routing.gates[valid], alone.gates)
    assert torch.equal(routing.counts, alone.counts)
    assert routing.kept is not None and torch.equal(routing.kept.all(-1), valid) and alone.kept is None
    assert routing.losses.keys() == alone.losses.keys() and routing.losses
    for loss, other in zip(routing.losses.values(), alone.losses.values(), strict=True):
        torch.testing.assert_close(loss, other)
    torch.testing.assert_close(routing.entropy, alone.entropy)


def test_padding_takes_no_place() -> None:
    router = router_of("switch", WIDTH, EXPERTS, capacity=0.5, noise=None)
    x = torch.randn(1, WIDTH).expand(64, -1)
    routing = router(x, valid=torch.arange(64) % 2 > 0)
    assert routing.kept is not None and routing.kept.flatten().nonzero().flatten().tolist() == [1, 3]


@pytest.mark.parametrize("name", [*TRAINED, "shazeer2017", "hierarchical"])
@pytest.mark.parametrize("tokens, valid", [(0, None), (6, torch.zeros(6, dtype=torch.bool))])
def test_no_token_at_all_has_finite_losses_with_gradients(name: str, tokens: int, valid: Tensor | None) -> None:
    router = router_of(name, WIDTH, EXPERTS)
    x = torch.randn(tokens, WIDTH, requires_grad=True)
    routing = router(x, valid=valid)
    assert not routing.counts.any() and routing.penalty is not None and routing.entropy is not None
    (routing.penalty + routing.gates.sum()).backward()
    assert router.weight.grad is not None and router.weight.grad.isfinite().all()
    assert routing.penalty.item() == 0 and routing.entropy.item() == 0


def parts_and_whole(losses: Losses) -> tuple[list[Tensor], Tensor, Router]:
    """The losses of four microbatches, the first two of them skewed, and that of all their tokens."""
    torch.manual_seed(0)
    router = router_of("switch", WIDTH, EXPERTS, noise=None, losses=losses)
    x = torch.randn(4, 50, WIDTH)
    x[:2] += torch.linspace(0, 2, WIDTH)
    whole = router(x.flatten(0, 1)).losses["balance"]
    counts = router.eval()(x.flatten(0, 1)).counts
    router.train().summed = lambda own: counts
    return [router(part).losses["balance"] for part in x], whole, router


def test_the_mean_over_microbatches_is_the_loss_of_the_global_batch() -> None:
    """Bitwise the same tokens cut differently: only the scope "global" does not see the cut."""
    parts, whole, _ = parts_and_whole(Losses(balance=1.0, scope="global"))
    torch.testing.assert_close(torch.stack(parts).mean(), whole)
    cut, whole, _ = parts_and_whole(Losses(balance=1.0))
    assert abs(torch.stack(cut).mean().item() - whole.item()) > 1e-3


def test_counts_are_summed_in_training_alone_and_for_the_global_scope_alone() -> None:
    asked: list[Tensor] = []

    def summed(own: Tensor) -> Tensor:
        asked.append(own)
        return own

    counting: Callable[[Tensor], Tensor] = summed
    for scope, training, times in (("global", True, 1), ("global", False, 0), ("microbatch", True, 0)):
        asked.clear()
        router = router_of("mixtral", WIDTH, EXPERTS, losses=Losses(balance=1.0, scope=scope)).train(training)
        router.summed = counting
        routing = router(torch.randn(9, WIDTH))
        assert len(asked) == times and (not asked or torch.equal(asked[0], routing.counts))


def test_losses_of_no_weight_are_not_there() -> None:
    router = router_of("switch", WIDTH, EXPERTS, losses=Losses())
    routing = router(torch.randn(9, WIDTH))
    assert not routing.losses and routing.penalty is None


def test_layers_that_collapse_onto_different_experts_are_not_balanced() -> None:
    """Counts and probabilities summed over layers before their product, as elsewhere, would make this 1."""
    routers = [router_of("switch", 4, 4, noise=None, losses=Losses(balance=1.0)) for _ in range(4)]
    for n, router in enumerate(routers):
        with torch.no_grad():
            router.weight.copy_(torch.eye(4)[n].unsqueeze(-1) * 20)
    losses = [router(torch.ones(32, 4)).losses["balance"].item() for router in routers]
    assert losses == pytest.approx([4.0] * 4, rel=1e-4)


def test_deepseek_v3_counts_the_highest_scores_whatever_the_bias_chose() -> None:
    """2412.19437, eq. 17 to 20, sequence by sequence, token by token."""
    torch.manual_seed(0)
    sequence, chosen = 5, PRESETS["deepseek_v3"].choices
    router = router_of("deepseek_v3", WIDTH, 32)
    torch.nn.init.normal_(router.weight)
    router.bias.normal_()
    x = torch.randn(3 * sequence, WIDTH)
    routing = router(x, None, sequence)
    losses = []
    for own in x.split(sequence):
        f, p = torch.zeros(32), torch.zeros(32)
        for token in own:
            s = (router.weight @ token).sigmoid()
            f[s.topk(chosen).indices] += 32 / (chosen * sequence)
            p += s / s.sum() / sequence
        losses.append(1e-4 * (f * p).sum())
    torch.testing.assert_close(routing.losses["balance"], torch.stack(losses).mean())
    scores = (x @ router.weight.T).sigmoid()
    assert not torch.equal(routing.experts.sort(-1).values, scores.topk(chosen).indices.sort(-1).values)
