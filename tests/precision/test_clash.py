"""Modules that cannot compute in 16 bits are named when the engine is made, others when dtypes meet in a forward."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import zeroshard as zs
from zeroshard.errors import ModelError, PlanError


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


IMAGE = torch.arange(2 * 4 * 3 * 3).view(2, 4, 3, 3) / 10
ROWS = torch.arange(32).view(8, 4) / 10


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize(
    "module, x, buffer, named",
    [
        (lambda: nn.BatchNorm1d(4), ROWS, "1.running_mean", "BatchNorm1d"),
        (lambda: nn.BatchNorm2d(4), IMAGE, "1.running_mean", "BatchNorm2d"),
        (lambda: parametrizations.spectral_norm(nn.Linear(4, 4)), ROWS, r"1\.parametrizations\.weight\.0\._u", "1"),
        (lambda: parametrizations.orthogonal(nn.Linear(4, 4)), ROWS, r"1\.parametrizations\.weight\.0\.base", "1"),
        (lambda: nn.utils.spectral_norm(nn.Linear(4, 4)), ROWS, "1.weight_u", "1"),
    ],
)
def test_kernels_that_take_one_dtype(precision: Any, module: Any, x: Tensor, buffer: str, named: str) -> None:
    first = nn.Linear(4, 4) if x.dim() == 2 else nn.Conv2d(4, 4, 1)
    message = rf"of '{buffer}' .* is float32, .*Plan\(fp32_modules=\('ReLU', '{named}'\)\)"
    with pytest.raises(PlanError, match=message):
        zs.Engine(nn.Sequential(first, module(), nn.ReLU()), sgd, zs.Plan(precision=precision, fp32_modules=("ReLU",)))
    model = nn.Sequential(first, module())
    engine = zs.Engine(
        model, sgd, zs.Plan(precision=precision, fp32_modules=(named,), loss_scale="off", nonfinite="skip")
    )
    for _ in range(2):
        engine.backward(engine(x).float().square().mean())
        assert 0 < engine.step().grad_norm < float("inf")
    with torch.no_grad():
        assert model.eval()(x).isfinite().all()


@pytest.mark.parametrize(
    "norm, x",
    [
        (nn.BatchNorm1d(4, affine=False), ROWS),
        (nn.BatchNorm1d(4, track_running_stats=False), ROWS),
        (nn.BatchNorm1d(4).bfloat16(), ROWS),
        (nn.InstanceNorm2d(4, affine=True, track_running_stats=True), IMAGE),
        (nn.GroupNorm(2, 4), IMAGE),
    ],
)
def test_norms_that_need_nothing(norm: nn.Module, x: Tensor) -> None:
    first = nn.Linear(4, 4) if x.dim() == 2 else nn.Conv2d(4, 4, 1)
    engine = zs.Engine(nn.Sequential(first, norm), sgd, zs.Plan(precision="bf16"))
    before = first.weight.detach().clone()
    engine.backward((engine(x).float() * torch.randn(x.shape)).sum())  # which a norm does not hide
    engine.step()
    assert first.weight.isfinite().all()
    assert not torch.equal(first.weight, before)


class Noisy(nn.Module):
    """Adds fp32 noise in the forward, which the next module meets."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn(x.shape)
        hidden = self.a(x) + noise
        return self.b(hidden).mean()


class Recurrent(nn.Module):
    """Starts an LSTM from an fp32 state, of which oneDNN says nothing at all."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x[:, None], (torch.zeros(1, 1, 4), torch.zeros(1, 1, 4)))[0].mean()


class Masked(nn.Module):
    """Multiplies by an fp32 buffer in its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.a = nn.Linear(4, 4)
        self.register_buffer("table", torch.ones(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(self.inner.a(x), self.table).mean()


CASES = [
    (Noisy, r"Linear at 'b' \(float32: input; bfloat16: weight, bias\)", "b"),
    (Recurrent, r"LSTM at 'lstm' \(.*float32: hx", "lstm"),
    (Masked, r"the forward of Masked \(bfloat16: x; float32: table\)", None),
]


@pytest.mark.parametrize("model, found, kept", CASES)
@pytest.mark.parametrize("train", ["call", "train_step"])
def test_dtypes_that_meet_in_a_forward(model: Any, found: str, kept: str | None, train: str) -> None:
    engine = zs.Engine(model(), sgd, zs.Plan(precision="bf16"))
    run = engine.train_step if train == "train_step" else engine
    ways = r".*Cast it in the model" + (rf".*Plan\(fp32_modules=\('{kept}',\)\)" if kept else "")
    with pytest.raises(ModelError, match=f"Tensors of different dtypes met in {found}{ways}") as caught:
        run(ROWS)
    assert isinstance(caught.value.__cause__, RuntimeError)
    if kept:
        zs.Engine(model(), sgd, zs.Plan(precision="bf16", fp32_modules=(kept,))).train_step(ROWS)


def test_a_call_of_the_model_itself_has_a_note() -> None:
    model = Noisy()
    zs.Engine(model, sgd, zs.Plan(precision="bf16"))
    with pytest.raises(RuntimeError, match="same dtype") as caught:
        model(ROWS)
    assert "met in Linear at 'b'" in caught.value.__notes__[0]


def test_a_model_in_16_bits_whose_inputs_are_not() -> None:
    engine = zs.Engine(Noisy().bfloat16(), sgd, zs.Plan())
    with pytest.raises(ModelError, match=r"Linear at 'a' .*precision='fp32' casts nothing.*precision='bf16'"):
        engine(ROWS)


def test_other_errors_are_left_as_they_are() -> None:
    engine = zs.Engine(Noisy(), sgd, zs.Plan(precision="bf16"))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        engine(torch.ones(2, 5))
    assert not isinstance(caught.value, ModelError) and not hasattr(caught.value, "__notes__")
