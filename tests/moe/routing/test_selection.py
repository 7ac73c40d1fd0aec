"""Which experts are chosen: ties, groups of experts, biases, and experts that choose tokens."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from zeroshard.errors import PlanError
from zeroshard.moe.routing.presets import router_of
from zeroshard.moe.routing.selection import ExpertChoice, GroupLimited, largest

WIDTH = 16


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 9999), st.integers(1, 6))
def test_of_equal_scores_the_lowest_expert_wins(seed: int, k: int) -> None:
    torch.manual_seed(seed)
    scores = torch.randint(0, 3, (20, 6)).float()
    before = scores.clone()
    expected = torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :k]
    assert torch.equal(largest(scores, k), expected) and torch.equal(scores, before)


@pytest.mark.parametrize("scale, experts, groups", [(2.5, 16, 8), (1.0, 32, 4)])
def test_deepseek_v3_is_that_of_hugging_face(scale: float, experts: int, groups: int) -> None:
    config = DeepseekV3Config(
        hidden_size=WIDTH,
        n_routed_experts=experts,
        num_experts_per_tok=4,
        n_group=groups,
        topk_group=2,
        routed_scaling_factor=scale,
    )
    theirs = DeepseekV3TopkRouter(config)
    ours = router_of("deepseek_v3", WIDTH, experts, k=4, selection=GroupLimited(groups, 2), scale=scale)
    torch.manual_seed(0)
    assert ours.bias is not None
    with torch.no_grad():
        ours.weight.normal_()
        ours.bias.normal_()
        theirs.weight.copy_(ours.weight)
        theirs.e_score_correction_bias.copy_(ours.bias)
    x = torch.randn(200, WIDTH)
    _, weights, indices = theirs(x)
    order = weights.argsort(-1, descending=True)
    routing = ours(x)
    own = routing.gates.argsort(-1, descending=True)
    assert torch.equal(routing.experts.gather(-1, own), indices.gather(-1, order))
    torch.testing.assert_close(routing.gates.gather(-1, own), weights.gather(-1, order), rtol=1e-6, atol=0)


def test_the_bias_moves_towards_the_even_load_and_gates_do_not_see_it() -> None:
    """Algorithm 1 of 2408.15664: b += u·sign(mean - n)."""
    router = router_of("mixtral", WIDTH, 4, bias_step=0.25)
    torch.manual_seed(0)
    x = torch.randn(50, WIDTH)
    assert router.bias is not None and router.bias.dtype == torch.float32
    before = router(x)
    router.update_bias(torch.tensor([10, 30, 20, 20]))
    router.update_bias(torch.tensor([10, 30, 30, 10]))
    assert router.bias.tolist() == [0.5, -0.5, -0.25, 0.25]
    router.bias.copy_(torch.tensor([9.0, 0, 0, 9.0]))
    after = router(x)
    assert after.experts.sort(-1).values.tolist() == [[0, 3]] * 50
    scores = (x @ router.weight.t()).softmax(-1)
    raw = scores.gather(-1, after.experts)
    torch.testing.assert_close(after.gates, raw / raw.sum(-1, keepdim=True))
    assert not torch.equal(before.experts, after.experts)
    assert "bias" in router.state_dict()


def test_a_bias_balances_what_is_skewed() -> None:
    torch.manual_seed(0)
    router = router_of("mixtral", WIDTH, 8, bias_step=1e-3)
    with torch.no_grad():
        router.weight.normal_(std=0.1)
    x = torch.randn(2000, WIDTH) + 0.5
    first = router(x).counts.double()
    for _ in range(300):
        router.update_bias(router(x).counts)
    last = router(x).counts.double()
    assert (first.max() / first.mean()).item() > 1.5
    assert (last.max() / last.mean()).item() < 1.05


def expert_choice(scores: Tensor, size: int, valid: Tensor, taken: float) -> set[tuple[int, int]]:
    """(token, expert) by loops: each expert sorts the tokens of each group."""
    found = set()
    tokens, experts = scores.shape
    for start in range(0, tokens, size):
        rows = range(start, min(start + size, tokens))
        for e in range(experts):
            order = sorted((t for t in rows if valid[t]), key=lambda t: (-scores[t, e].item(), t))
            found |= {(t, e) for t in order[: math.ceil(len(rows) * taken / experts)]}
    return found


@pytest.mark.parametrize("size, factor", [(40, 1.0), (12, 1.0), (40, 0.25)])
@pytest.mark.parametrize("padded", [False, True])
def test_experts_choose_their_best_tokens(size: int, factor: float, padded: bool) -> None:
    torch.manual_seed(0)
    router = router_of("expert_choice", WIDTH, 8, selection=ExpertChoice(causal=False, factor=factor), group=size)
    x, valid = torch.randn(40, WIDTH), torch.arange(40) % 5 > 0
    valid = valid if padded else torch.ones(40, dtype=torch.bool)
    routing = router(x, valid=valid if padded else None)
    scores = (x @ router.weight.detach().t()).softmax(-1)
    expected = expert_choice(scores, size, valid, 2 * factor)
    assert routing.kept is not None
    pairs = [(t, e) for t in range(40) for c, e in enumerate(routing.experts[t].tolist()) if routing.kept[t, c]]
    assert len(pairs) == len(set(pairs)) and set(pairs) == expected
    assert routing.choices == max(sum(t == token for t, _ in expected) for token in range(40))
    assert routing.counts.tolist() == [sum(e == expert for _, e in expected) for expert in range(8)]
    torch.testing.assert_close(routing.gates, scores.gather(-1, routing.experts))
    assert padded or routing.counts.unique().numel() == 1  # an even load without a loss


def test_equal_tokens_are_chosen_from_the_first() -> None:
    router = router_of("expert_choice", WIDTH, 4, selection=ExpertChoice(causal=False))
    kept = router(torch.ones(12, WIDTH)).kept
    assert kept is not None and kept.any(-1).tolist() == [True] * 6 + [False] * 6
    assert router(torch.ones(0, WIDTH)).experts.shape == (0, 1)


def test_expert_choice_warns_of_causal_models_and_says_how_not_to() -> None:
    with pytest.warns(UserWarning, match=r"leaks the future.*ExpertChoice\(causal=False\)"):
        router_of("expert_choice", WIDTH, 4)


@pytest.mark.parametrize(
    "experts, k, selection, message",
    [
        (8, 2, GroupLimited(8, 4), "8 groups for 8 experts.*selection=None"),
        (12, 2, GroupLimited(5, 4), "5 groups for 12 experts"),
        (16, 5, GroupLimited(8, 2), "5 experts of a token cannot come from 2 groups of 2; keep at least 3"),
    ],
)
def test_groups_that_cannot_be_are_refused(experts: int, k: int, selection: GroupLimited, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        router_of("deepseek_v3", WIDTH, experts, k=k, selection=selection)
    with pytest.raises(PlanError, match="keeps 3 of 2 groups"):
        GroupLimited(2, 3)
