"""On which data an update depends is found whatever the numbers of the trial: by thresholds, counts and names too."""

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.errors import OptimizerError
from zeroshard.optim import layout_of

Make = Callable[..., torch.optim.Optimizer]
HIGH = 200.0  # a threshold that no gradient of a trial with usual numbers reaches


class Own(torch.optim.Optimizer):
    """A user's optimizer: gradient descent with `ready` before it and `change` for one parameter."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2, **options: Any) -> None:
        super().__init__(params, {"lr": lr, "count": 0, **options})

    def ready(self, gradients: list[Tensor]) -> None:
        """What is done with all gradients first."""

    def change(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        return p.grad  # type: ignore[return-value]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        members = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.ready([p.grad for p in members])
        for group in self.param_groups:
            group["count"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * self.change(p, group))


class ClipsAll(Own):
    def ready(self, gradients: list[Tensor]) -> None:
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        torch._foreach_mul_(gradients, torch.clamp(HIGH / norm, max=1.0))


class ClipsByPython(Own):
    def ready(self, gradients: list[Tensor]) -> None:
        norm = math.sqrt(sum(float(g.norm()) ** 2 for g in gradients))
        if norm > HIGH:
            torch._foreach_mul_(gradients, HIGH / norm)


class ClipsByNumpy(Own):
    def ready(self, gradients: list[Tensor]) -> None:
        if max(np.abs(g.numpy()).max() for g in gradients) > HIGH:
            torch._foreach_mul_(gradients, 0.5)


class SkipsAll(Own):
    """Leaves a step out where any gradient is not finite."""

    def ready(self, gradients: list[Tensor]) -> None:
        if not all(bool(g.isfinite().all()) for g in gradients):
            torch._foreach_zero_(gradients)


class ClipsLate(Own):
    """Clips from step 100 on."""

    def ready(self, gradients: list[Tensor]) -> None:
        if self.param_groups[0]["count"] >= 100:
            torch._foreach_div_(gradients, torch.stack([g.norm() for g in gradients]).norm())


class Estimates(Own):
    """A rate that all parameters share, from numbers of all, of which only a large one counts (2306.06101)."""

    def ready(self, gradients: list[Tensor]) -> None:
        total = sum(g.abs().sum().item() for g in gradients)
        for group in self.param_groups:
            group["lr"] = max(group["lr"], total * 1e-9)


class Anchored(Own):
    """Draws all parameters to the mean of the first, if that is far away."""

    def change(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        far = self.param_groups[0]["params"][0].mean()
        return p.grad + torch.where(far.abs() > HIGH, far, 0.0)  # type: ignore[no-any-return]


class RareSum(Own):
    """A tensor of the group holds a sum over all gradients."""

    def ready(self, gradients: list[Tensor]) -> None:
        total = sum((g.sum() for g in gradients), torch.zeros(()))
        self.param_groups[0].setdefault("total", torch.zeros(())).add_(total)


BETWEEN: list[type[Own]] = [
    ClipsAll, ClipsByPython, ClipsByNumpy, SkipsAll, ClipsLate, Estimates, Anchored, RareSum
]  # fmt: skip


class ClipsEach(Own):
    """The norm of each parameter alone, above a threshold."""

    def ready(self, gradients: list[Tensor]) -> None:
        for g in gradients:
            g.mul_(torch.clamp(HIGH / g.norm(), max=1.0))


class ClipsEachByPython(Own):
    def ready(self, gradients: list[Tensor]) -> None:
        for g in gradients:
            if g.norm() > HIGH:
                g.mul_(HIGH / g.norm())


class ClipsEachStacked(Own):
    """As `ClipsEach`, with the norms in one tensor."""

    def ready(self, gradients: list[Tensor]) -> None:
        norms = torch.stack(torch._foreach_norm(gradients))
        torch._foreach_mul_(gradients, torch.clamp(HIGH / norms, max=1.0).unbind())


class FirstRow(Own):
    """The first row in another way, if it is large."""

    def change(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        gradient = p.grad.clone()  # type: ignore[union-attr]
        gradient[0].clamp_(max=HIGH)
        return gradient


class Orthogonal(Own):
    """Products of matrices, from step 10 on."""

    def change(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        late = p.dim() == 2 and group["count"] >= 10
        return p.grad @ p.grad.mT @ p.grad if late else p.grad  # type: ignore[union-attr,return-value]


class ByDimensions(Own):
    """Halves the update of tensors with three dimensions, of which a trial has none."""

    def change(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        return p.grad * (0.5 if p.dim() == 3 else 1.0)  # type: ignore[operator]


WHOLE: list[type[Own]] = [ClipsEach, ClipsEachByPython, ClipsEachStacked, FirstRow, Orthogonal, ByDimensions]


class Lion(Own):
    """Elementwise: signs, a momentum, masks and a count."""

    def change(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        state, g = self.state[p], p.grad
        if not state:
            state["momentum"], state["step"] = torch.zeros_like(p), torch.tensor(0.0)
        state["step"] += 1
        update = state["momentum"].mul(0.9).add(g, alpha=0.1).sign()
        update[update < 0] = -1.0
        state["momentum"].lerp_(g, 0.01)
        return update.where(g != 0, torch.zeros_like(g)) / (1 - 0.5 ** state["step"].item())  # type: ignore[union-attr]


class Foreach(Own):
    """Elementwise by operations on lists."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            members = [p for p in group["params"] if p.grad is not None]
            updates = torch._foreach_abs([p.grad for p in members])
            torch._foreach_sqrt_(updates)
            torch._foreach_add_(members, updates, alpha=-group["lr"])


class ScheduleFree(Own):
    """Elementwise, in training mode alone (2405.15682)."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, train_mode=False)

    def train(self) -> None:
        for group in self.param_groups:
            group["train_mode"] = True

    def change(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        assert group["train_mode"], "train() first"
        z = self.state[p].setdefault("z", p.clone())
        z.sub_(group["lr"] * p.grad)
        return (p - z) / group["count"]


ELEMENTWISE: list[type[Own]] = [Lion, Foreach, ScheduleFree]


def model() -> nn.Module:
    return nn.Sequential(nn.Conv1d(3, 4, 2), nn.Linear(3, 4))


@pytest.mark.parametrize("kind", BETWEEN)
def test_parameters_that_depend_on_each_other_are_refused(kind: type[Own]) -> None:
    with pytest.raises(OptimizerError, match=f"{kind.__name__} depend on each other.*clip_norm"):
        layout_of(kind(model().parameters()))


@pytest.mark.parametrize("kind", WHOLE)
def test_elements_that_depend_on_each_other_are_updated_whole(kind: type[Own]) -> None:
    whole = layout_of(kind(model().parameters())).whole
    assert whole is not None and whole.startswith(f"{kind.__name__} needs whole tensors")


@pytest.mark.parametrize("kind", ELEMENTWISE)
def test_elementwise_optimizers_run_on_slices(kind: type[Own]) -> None:
    assert layout_of(kind(model().parameters())).whole is None


class ByGroups(Own):
    """Scales the second group by a norm of the first, above a threshold."""

    def ready(self, gradients: list[Tensor]) -> None:
        if len(self.param_groups) == 2:
            norm = self.param_groups[0]["params"][0].grad.norm()
            for p in self.param_groups[1]["params"]:
                p.grad.mul_(torch.clamp(HIGH / norm, max=1.0))


def test_groups_that_depend_on_each_other_are_refused() -> None:
    first, second = model()
    groups = [{"params": first.parameters()}, {"params": second.parameters()}]
    with pytest.raises(OptimizerError, match="depend on each other"):
        layout_of(ByGroups(groups))


class ByName(Own):
    """Goes by the names of the parameters."""

    def change(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        names = dict(zip(group["params"], group.get("param_names", ()), strict=False))
        return p.grad * (0.0 if names.get(p) == "1.bias" else 1.0)  # type: ignore[operator]


class ByMark(Own):
    """Goes by an attribute of the parameters."""

    def change(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        return p.grad * getattr(p, "rate", 1.0)  # type: ignore[no-any-return]


class ByObject(Own):
    """Keeps some of the parameters in a table."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params)
        self.rates = {id(self.param_groups[0]["params"][0]): 0.5}

    def change(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        return p.grad * self.rates.get(id(p), 1.0)  # type: ignore[operator]


def marked() -> nn.Module:
    found = model()
    found[1].bias.rate = 0.1  # type: ignore[index]
    return found


BY_NAME: list[tuple[Make, str]] = [
    (lambda: ByName(model().named_parameters()), "ByName reads the names of the parameters"),
    (lambda: ByMark(marked().parameters()), "ByMark reads the attribute 'rate'"),
    (lambda: ByObject(model().parameters()), "ByObject keeps parameters of the model in its attribute 'rates'"),
]


@pytest.mark.parametrize("make, reason", BY_NAME, ids=[reason.split()[0] for _, reason in BY_NAME])
def test_what_slices_do_not_have_is_refused_by_name(make: Make, reason: str) -> None:
    with pytest.raises(OptimizerError, match=f"{reason}.*a group of their own"):
        layout_of(make())


def test_a_number_that_comes_with_the_first_step_does_no_harm() -> None:
    assert layout_of(Later(model().parameters())).whole is None


def test_names_that_are_not_read_do_no_harm() -> None:
    assert layout_of(Lion(model().named_parameters())).whole is None
    assert layout_of(ByMark(model().parameters())).whole is None


class ByPairs(Own):
    """Its constructor takes pairs of a name and a parameter, and makes a group of each."""

    def __init__(self, named_parameters: Iterable[tuple[str, nn.Parameter]], lr: float = 1e-2) -> None:
        super().__init__([{"params": [p], "name": name} for name, p in named_parameters], lr)

    def change(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        return p.grad / p.grad.norm() if "bias" in group["name"] else p.grad  # type: ignore[union-attr,return-value]


def test_a_constructor_of_names_is_not_called_again() -> None:
    whole = layout_of(ByPairs(model().named_parameters())).whole
    assert whole is not None and "ByPairs gives other results on flat slices" in whole


class Fails(Own):
    """Needs what its constructor did."""

    def change(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        raise KeyError("heads")


class Heads(Own):
    """Takes rows of heads together, so that it runs on few shapes."""

    def change(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        return p.grad.view(-1, 32).mean(1, keepdim=True).expand(-1, 32).reshape(p.shape)  # type: ignore[union-attr]


class Later(Own):
    """Has a number in the place of None from its first step on."""

    left: int | None = None

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params)
        self.left = None

    def ready(self, gradients: list[Tensor]) -> None:
        self.left = len(gradients) if self.left is None else self.left


class NeedsClosure(Own):
    def step(self, closure: Any) -> None:  # type: ignore[override]
        closure()


@pytest.mark.parametrize(
    "kind, advice", [(Fails, "with what its step needs"), (Heads, r"tensors \(6, 4\)"), (NeedsClosure, "needs none")]
)
def test_the_way_out_is_that_of_the_error(kind: type[Own], advice: str) -> None:
    with pytest.raises(OptimizerError, match=f"{kind.__name__} does not run.*{advice}") as error:
        layout_of(kind(model().parameters()))
    assert ("closure" in str(error.value)) == (kind is NeedsClosure)


def test_a_threshold_beyond_the_trial_ends_as_the_plain_loop() -> None:
    """Offloaded and alone: the engine's weights are those of the plain loop where one clips above a threshold."""
    torch.manual_seed(0)
    plain, sliced = nn.Linear(4, 4), nn.Linear(4, 4)
    sliced.load_state_dict(plain.state_dict())
    make = partial(ClipsEachByPython, lr=1e-3)
    engine = zs.Engine(sliced, make, zs.Plan(zero=2, offload="optimizer"), mesh=zs.Mesh())
    optimizer = make(plain.parameters())
    x = 1e3 * torch.randn(8, 4)
    for _ in range(2):
        engine.backward(engine(x).square().mean())
        engine.step()
        optimizer.zero_grad()
        plain(x).square().mean().backward()
        optimizer.step()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(engine.state_dict()[name], value)
