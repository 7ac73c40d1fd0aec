"""What all routers share: refusals, determinism, what they leave alone, and how much they hold."""

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zeroshard.errors import BatchError, PlanError
from zeroshard.moe.routing.balance import Losses
from zeroshard.moe.routing.gating import Noise, SecondChoice
from zeroshard.moe.routing.presets import PRESETS, router_of
from zeroshard.moe.routing.selection import ExpertChoice

WIDTH, EXPERTS = 16, 16
NAMES = [name for name in PRESETS if name != "expert_choice"] + ["hierarchical"]


@pytest.mark.parametrize("name", NAMES)
def test_a_seed_decides_training_and_evaluation_needs_none(name: str) -> None:
    torch.manual_seed(0)
    router, x = router_of(name, WIDTH, EXPERTS), torch.randn(50, WIDTH)
    before, found = x.clone(), []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        found.append(router(x, group=10))
    assert torch.equal(found[0].experts, found[1].experts) and torch.equal(found[0].gates, found[1].gates)
    assert torch.equal(x, before)
    router.eval()
    first = router(x, group=10)
    torch.manual_seed(7)
    state = torch.get_rng_state()
    again = router(x, group=10)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first.experts, again.experts) and torch.equal(first.gates, again.gates)
    assert not first.losses


@pytest.mark.parametrize("name", NAMES)
def test_the_record_keeps_its_promises(name: str) -> None:
    torch.manual_seed(0)
    router = router_of(name, WIDTH, EXPERTS)
    routing = router(torch.randn(50, WIDTH), group=10)
    k = router.gating.choices
    assert routing.experts.shape == routing.gates.shape == (50, k) and routing.choices == k
    assert routing.experts.dtype == routing.counts.dtype == torch.int64
    assert routing.gates.dtype == torch.float32 and routing.gates.requires_grad
    assert torch.equal(routing.counts, torch.bincount(routing.experts.flatten(), minlength=EXPERTS))
    assert all(len(set(row)) == k for row in routing.experts.tolist())
    assert routing.entropy is not None and 0 <= routing.entropy.item() <= math.log(EXPERTS) + 1e-5
    assert not routing.entropy.requires_grad
    assert set(routing.losses) == {
        name for name in ("balance", "z", "importance", "load") if getattr(router.gating.losses, name)
    }
    assert all(loss.shape == () and loss.dtype == torch.float32 for loss in routing.losses.values())


@pytest.mark.parametrize("name", NAMES)
def test_the_task_reaches_the_weights(name: str) -> None:
    """The gradient of a gate that weighs an output; with one normalised choice it would be 0."""
    torch.manual_seed(0)
    router = router_of(name, WIDTH, EXPERTS)
    routing = router(torch.randn(50, WIDTH))
    (routing.gates[:, 0] * torch.randn(50)).sum().backward()
    assert router.weight.grad is not None and router.weight.grad.norm().item() > 1e-3


class Largest(TorchDispatchMode):
    """The elements of the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        found = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self.numel = max([self.numel, *found])
        return out


@pytest.mark.parametrize("name", [*NAMES, "expert_choice"])
def test_no_tensor_has_an_element_for_each_token_expert_and_place(name: str) -> None:
    changes = {"selection": ExpertChoice(causal=False)} if name == "expert_choice" else {}
    router = router_of(name, WIDTH, EXPERTS, **changes)
    x = torch.randn(200, WIDTH)
    with Largest() as largest:
        routing = router(x, group=50)
        (routing.gates.sum() + sum(routing.losses.values())).backward()
    assert 200 * EXPERTS <= largest.numel <= 200 * max(EXPERTS, WIDTH)


@pytest.mark.parametrize("name", NAMES)
def test_weights_on_the_meta_device_get_their_values_later(name: str) -> None:
    router = router_of(name, WIDTH, EXPERTS)
    with torch.device("meta"):
        late = router_of(name, WIDTH, EXPERTS)
        shapes = late(torch.randn(20, WIDTH), group=5)
    assert shapes.gates.shape == shapes.experts.shape == (20, router.gating.choices)
    late.to_empty(device="cpu")
    for each in (router, late):
        torch.manual_seed(1)
        each.reset_parameters()
    states = zip(router.state_dict().values(), late.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in states)


def test_fp64_stays_fp64_and_its_gradient_is_that_of_differences() -> None:
    router = router_of("st_moe", 4, 6, second=None).double()
    torch.manual_seed(0)
    x = torch.randn(9, 4, dtype=torch.float64, requires_grad=True)

    def outputs(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        routing = torch.func.functional_call(router, {"weight": weight}, (x,))
        return (routing.gates, *routing.losses.values())

    assert router(x).gates.dtype == torch.float64
    assert torch.autograd.gradcheck(outputs, (x, router.weight.detach().requires_grad_()))


@pytest.mark.parametrize(
    "name, changes, message",
    [
        ("mixtral", {"k": 1}, r"One choice with normalise='before' makes every gate 1.*normalise='none'"),
        ("switch", {"init": "zero"}, r"Zero weights make all logits equal.*Noise\('learned'\)"),
        ("shazeer2017", {"noise": None}, "Zero weights make all logits equal"),
        ("switch", {"losses": Losses(load=0.1)}, r"losses.load is 0.1, and the noise is 'jitter'"),
        ("gshard", {"k": 3}, "second is about the second of two choices, and there are 3"),
        ("switch", {"noise": Noise("gumbel")}, "Gumbel noise is about the second of two choices"),
        ("switch", {"selection": ExpertChoice()}, "capacity, second and bias_step have no use"),
        ("mixtral", {"selection": ExpertChoice()}, "ExpertChoice is balanced by itself"),
        ("switch", {"k": 17}, "17 experts of a token are more than the 16 there are"),
        ("swich", {}, "router='swich' is no router.*Did you mean 'switch'"),
        ("hierarchical", {"capacity": 1.0}, "a router of two levels has no limit"),
        ("switch", {"capacity": 0}, "math.inf"),
        ("switch", {"score": "tanh"}, "score is 'tanh'"),
        ("switch", {"bias_step": -1}, "bias_step is -1"),
        ("switch", {"group": 0}, "group is 0"),
        ("switch", {"second": SecondChoice()}, "second is about"),
    ],
)
def test_settings_that_do_not_combine_are_refused(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        router_of(name, WIDTH, EXPERTS, **changes)


def test_shapes_that_do_not_fit_are_refused() -> None:
    router = router_of("switch", WIDTH, EXPERTS)
    with pytest.raises(BatchError, match=r"width 16 got a tensor of shape \[2, 3, 16\].*Flatten"):
        router(torch.randn(2, 3, 16))
    with pytest.raises(BatchError, match=r"valid is \[3\] of torch.int64; it must be \[4\] of torch.bool"):
        router(torch.randn(4, 16), valid=torch.ones(3, dtype=torch.int64))


def test_a_router_is_a_module_that_prints_its_settings() -> None:
    text = repr(nn.Sequential(router_of("switch", WIDTH, EXPERTS)))
    assert "Router(16, 16, Gating(choices=1, score='softmax'" in text
