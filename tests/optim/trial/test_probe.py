"""Elementwise optimizers are recognised by trying them; all others are refused with the way out."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from zeroshard.errors import OptimizerError
from zeroshard.optim import StateLayout, check_elementwise, fresh_state

o = torch.optim
Make = Callable[[Iterable[Any]], torch.optim.Optimizer]
ACCEPTED: dict[str, tuple[Make, int, int]] = {  # bytes of state per element in fp32, and in scalars per tensor
    "Adadelta": (o.Adadelta, 8, 4),
    "Adagrad": (o.Adagrad, 4, 4),
    "Adagrad initial": (partial(o.Adagrad, initial_accumulator_value=0.5, lr_decay=0.1), 4, 4),
    "Adam": (o.Adam, 8, 4),
    "Adam amsgrad": (partial(o.Adam, amsgrad=True, weight_decay=0.1), 12, 4),
    "AdamW": (o.AdamW, 8, 4),
    "AdamW foreach": (partial(o.AdamW, foreach=True), 8, 4),
    "AdamW fused": (partial(o.AdamW, fused=True), 8, 4),
    "AdamW tensor lr": (partial(o.AdamW, lr=torch.tensor(1e-3)), 8, 4),
    "Adamax": (o.Adamax, 8, 4),
    "ASGD": (o.ASGD, 4, 12),
    "NAdam": (o.NAdam, 8, 8),
    "RAdam": (o.RAdam, 8, 4),
    "RMSprop": (o.RMSprop, 4, 4),
    "RMSprop centered": (partial(o.RMSprop, centered=True, momentum=0.9), 12, 4),
    "Rprop": (o.Rprop, 8, 4),
    "SGD": (partial(o.SGD, lr=0.1), 0, 0),
    "SGD momentum": (partial(o.SGD, lr=0.1, momentum=0.9, nesterov=True), 4, 0),
}
REFUSED: dict[str, tuple[Make, str]] = {
    "Adafactor": (o.Adafactor, "whole tensors"),
    "LBFGS": (o.LBFGS, "closure"),
    "Muon": (o.Muon, "2D"),
    "SparseAdam": (o.SparseAdam, "[Ss]parse"),
}


class Own(torch.optim.Optimizer):
    """A user's optimizer: subclasses write `change`."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    def change(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * self.change(p, group))


class SignSGD(Own):
    """Elementwise, without a state."""

    def change(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        return p.grad.sign()


class Lamb(Own):
    """Layer-wise: the length of the update depends on the norms of whole tensors."""

    def change(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        state = self.state[p]
        state["m"] = state.get("m", torch.zeros_like(p)).lerp(p.grad, 0.1)
        return state["m"] * p.norm() / state["m"].norm()


class RowWise(Own):
    """One accumulator for each row, as for embeddings."""

    def change(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        state = self.state[p]
        state["rows"] = state.get("rows", 0) + p.grad.square().mean(-1, keepdim=True)
        return p.grad / state["rows"].sqrt()


class OneCounter(Own):
    """Bias correction by a counter, a tensor of the group, which moves with every call of step."""

    def change(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        return p.grad / (1 - 0.9 ** group["calls"])

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group.setdefault("calls", torch.zeros(())).add_(1)
        super().step()


class LargeWhole(Own):
    """Elementwise on tensors below a size, as 8-bit states are."""

    def change(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        return p.grad / p.grad.norm() if p.numel() >= 4096 else p.grad


class LongSides(Own):
    """Elementwise unless both sides are long, as where rows and columns stand for matrices."""

    def change(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        return p.grad / p.grad.norm() if p.dim() == 2 and min(p.shape) >= 128 else p.grad


class DecayMatrices(Own):
    """Treats matrices and vectors differently, so it must see true shapes."""

    def change(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        return p.grad + 0.1 * p if p.dim() > 1 else p.grad


class ByGroup(Own):
    """Elementwise or layer-wise, as a key of the group says (such as Muon with Adam for the rest)."""

    def change(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        return p.grad / p.grad.norm() if group["whole"] else p.grad


class Noisy(Own):
    """Breaks on slices with an error of its own."""

    def change(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        return p.grad * torch.zeros(6, 4)


OWN_REFUSED = [Lamb, RowWise, OneCounter, LargeWhole, LongSides, DecayMatrices, Noisy]


def parameter() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(4, 3))


def test_every_optimizer_of_torch_is_in_a_table() -> None:
    everyone = {name for name, kind in vars(o).items() if isinstance(kind, type) and issubclass(kind, o.Optimizer)}
    assert everyone - {"Optimizer"} == {name.split()[0] for name in (*ACCEPTED, *REFUSED)}


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted(name: str) -> None:
    make, per_element, scalars = ACCEPTED[name]
    assert check_elementwise(make([parameter()])) == StateLayout(per_element, scalars)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    make, reason = REFUSED[name]
    with pytest.raises(OptimizerError, match=f"^{name}.*{reason}") as error:
        check_elementwise(make([parameter()]))
    assert "use AdamW" in str(error.value)


def test_a_users_elementwise_optimizer_is_accepted() -> None:
    assert check_elementwise(SignSGD([parameter()])) == StateLayout(0, 0)


@pytest.mark.parametrize("lr", [0.01, 0.0])
@pytest.mark.parametrize("kind", OWN_REFUSED)
def test_a_users_other_optimizers_are_refused(kind: type[Own], lr: float) -> None:
    """Also while a warm-up holds the rate at 0, where no update would differ."""
    with pytest.raises(OptimizerError, match=f"^{kind.__name__} .*use AdamW"):
        check_elementwise(kind([parameter()], lr=lr))


class Counter(Own):
    """Bias correction by a number of the group."""

    def change(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        return p.grad / (1 - 0.9 ** group["calls"])

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["calls"] = group.get("calls", 0) + 1
        super().step()


class NeedsState(Own):
    """Makes states in its constructor by an argument that is not among its defaults."""

    def __init__(self, params: Any, scale: float, lr: float = 0.01) -> None:
        super().__init__(params, lr)
        for p in self.param_groups[0]["params"]:
            self.state[p]["sum"] = torch.full_like(p, scale)

    def change(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        return p.grad * self.state[p]["sum"]


def test_calls_of_one_step_count_once() -> None:
    assert check_elementwise(Counter([parameter()])) == StateLayout(0, 0)


def test_a_constructor_whose_states_cannot_be_made_again_is_refused() -> None:
    with pytest.raises(OptimizerError, match="NeedsState makes states in its constructor, which takes 'scale'"):
        check_elementwise(NeedsState([parameter()], 2.0))


def test_a_rate_of_zero_loses_no_states() -> None:
    optimizer = o.AdamW([parameter()], lr=0.0)
    assert check_elementwise(optimizer) == StateLayout(8, 4)
    assert optimizer.param_groups[0]["lr"] == 0.0


@pytest.mark.parametrize("wholes", [(True, False), (False, True), (False, False, True)])
def test_every_group_is_tried(wholes: tuple[bool, ...]) -> None:
    optimizer = ByGroup([{"params": [parameter()], "whole": whole} for whole in wholes])
    with pytest.raises(OptimizerError, match="ByGroup gives other results"):
        check_elementwise(optimizer)


def test_keys_of_a_group_reach_the_trial() -> None:
    assert check_elementwise(ByGroup([{"params": [parameter()], "whole": False}])) == StateLayout(0, 0)


@pytest.mark.parametrize("grad", [True, False])
def test_the_users_optimizer_is_untouched(grad: bool) -> None:
    p = parameter()
    before, optimizer = p.detach().clone(), o.AdamW([p], lr=0.1)
    random, groups = torch.get_rng_state(), [dict(group) for group in optimizer.param_groups]
    with torch.set_grad_enabled(grad):
        check_elementwise(optimizer)
        assert torch.is_grad_enabled() is grad
    assert torch.equal(p, before) and p.grad is None and not optimizer.state
    assert torch.equal(torch.get_rng_state(), random) and optimizer.param_groups == groups


def test_fresh_state_is_the_constructors() -> None:
    adagrad = o.Adagrad([parameter()], initial_accumulator_value=0.25)
    span = torch.nn.Parameter(torch.zeros(7))
    state = fresh_state(adagrad, adagrad.param_groups[0], span)
    assert state["sum"].tolist() == [0.25] * 7 and state["step"].item() == 0
    adam = o.AdamW([parameter()])
    assert fresh_state(adam, adam.param_groups[0], span) == {}


def test_fresh_state_follows_the_group() -> None:
    groups = [{"params": [parameter()]}, {"params": [parameter()], "initial_accumulator_value": 2.0}]
    adagrad = o.Adagrad(groups, initial_accumulator_value=1.0)
    span = torch.nn.Parameter(torch.zeros(2))
    values = [fresh_state(adagrad, group, span)["sum"].tolist() for group in adagrad.param_groups]
    assert values == [adagrad.state[group["params"][0]]["sum"].flatten()[:2].tolist() for group in adagrad.param_groups]
