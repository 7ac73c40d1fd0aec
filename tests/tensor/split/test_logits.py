"""What losses do with logits that ranks have in parts: on the parts, gathered, or refused; values and gradients."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pool import Pool
from split_models.vocabularies import Ranks, Widths, close, seeded
from torch import Tensor

import zeroshard as zs
from zeroshard.errors import PlanError
from zeroshard.tensor.split.logits import ShardedLogits

V, D = 37, 8
BATCH, TIME = 3, 6


def given(ranks: Ranks) -> tuple[Tensor, Tensor, ShardedLogits, Tensor, Tensor]:
    """Hidden states, logits of all classes and in parts, the local part before them, and labels."""
    seeded(11)
    raw = torch.randn(BATCH, TIME, V)
    labels = torch.randint(V, (BATCH, TIME))
    labels[0, :2] = -100
    whole, local = raw.clone().requires_grad_(), ranks.part(raw, -1).requires_grad_()
    classes = ranks.vocabulary(V)
    KEPT.append(classes)
    return whole, whole * 1, ShardedLogits(local * 1, classes.itself), local, labels


KEPT: list[Any] = []
TEMPERATURES = torch.tensor([2.0, 3.0, 0.5]).view(BATCH, 1, 1)
LOSSES: dict[str, Callable[[Any, Tensor], Any]] = {
    "view": lambda z, y: F.cross_entropy(z.view(-1, V), y.view(-1)),
    "view by size": lambda z, y: F.cross_entropy(z.view(-1, z.size(-1)), y.view(-1)),
    "reshape": lambda z, y: F.cross_entropy(z.reshape((BATCH * TIME, -1)), y.reshape(-1)),
    "flatten": lambda z, y: F.cross_entropy(z.flatten(0, 1), y.flatten()),
    "flatten to -2": lambda z, y: F.cross_entropy(torch.flatten(z, 0, -2), y.flatten()),
    "shifted": lambda z, y: F.cross_entropy(z[..., :-1, :].contiguous().view(-1, V), y[..., 1:].reshape(-1)),
    "shifted, short": lambda z, y: F.cross_entropy(z[:, :-1].reshape(-1, V), y[:, 1:].reshape(-1)),
    "float": lambda z, y: F.cross_entropy(z.float().view(-1, V), y.view(-1)),
    "to": lambda z, y: F.cross_entropy(z.to(torch.float64).view(-1, V), y.view(-1)).float(),
    "transpose": lambda z, y: F.cross_entropy(z.transpose(1, 2), y),
    "mT": lambda z, y: F.cross_entropy(z.mT, y),
    "permute": lambda z, y: F.cross_entropy(torch.permute(z, (0, 2, 1)), y, reduction="none").sum(),
    "counted rows": lambda z, y: F.cross_entropy(z[y != -100], y[y != -100]),
    "chosen rows": lambda z, y: F.cross_entropy(z[:, torch.tensor([0, 2])].flatten(0, 1), y[:, [0, 2]].flatten()),
    "one row": lambda z, y: F.cross_entropy(z[1, 2], y[1, 2]),
    "row by row": lambda z, y: torch.stack([F.cross_entropy(a, b) for a, b in zip(z, y, strict=True)]).sum(),
    "all classes": lambda z, y: F.cross_entropy(z[..., :V].view(-1, V), y.view(-1)),
    "module": lambda z, y: torch.nn.CrossEntropyLoss(ignore_index=5)(z.view(-1, V), y.clamp(min=0).view(-1)),
    "smoothed": lambda z, y: F.cross_entropy(z.view(-1, V), y.view(-1), label_smoothing=0.1),
    "sum": lambda z, y: F.cross_entropy(z.view(-1, V), y.view(-1), reduction="sum") / 7,
    "none": lambda z, y: (F.cross_entropy(z.view(-1, V), y.view(-1), reduction="none") * torch.arange(18)).sum(),
    "factor": lambda z, y: F.cross_entropy((2 * z / 0.7).view(-1, V), y.view(-1)),
    "cap": lambda z, y: F.cross_entropy((torch.tanh(z / 3.0) * 3.0).view(-1, V), y.view(-1)),
    "temperature": lambda z, y: F.cross_entropy((z / TEMPERATURES).view(-1, V), y.view(-1)),
    "bias": lambda z, y: F.cross_entropy((z + torch.linspace(-1, 1, V)).view(-1, V), y.view(-1)),
    "bias first": lambda z, y: F.cross_entropy((torch.linspace(-1, 1, V) + z).view(-1, V), y.view(-1)),
    "masked": lambda z, y: F.cross_entropy(z.masked_fill(torch.arange(V) == 40, -9.0).view(-1, V), y.view(-1)),
    "logarithms": lambda z, y: F.nll_loss(F.log_softmax(z, dim=-1).view(-1, V), y.view(-1)),
    "logarithms, fp64": lambda z, y: F.nll_loss(z.view(-1, V).log_softmax(-1, dtype=torch.float64), y.view(-1)).float(),
    "two": lambda z, y: F.cross_entropy((z + z.clone()).view(-1, V), y.view(-1)),
}  # fmt: skip
GATHERED: dict[str, Callable[[Any, Tensor], Any]] = {
    "softmax": lambda z, y: z.softmax(-1).square().sum(),
    "logarithms of labels": lambda z, y: z.log_softmax(-1).gather(-1, y.clamp(min=0)[..., None]).sum(),
    "classes cut off": lambda z, y: F.cross_entropy(z[..., : V - 1].reshape(-1, V - 1), y.clamp(max=V - 2).view(-1)),
    "weights of classes": lambda z, y: F.cross_entropy(z.view(-1, V), y.view(-1), weight=torch.linspace(1, 2, V)),
    "soft labels": lambda z, y: F.cross_entropy(z.view(-1, V), torch.full((18, V), 1 / V)),
    "other view": lambda z, y: z.view(-1).square().sum(),
    "operators": lambda z, y: ((1 - z) ** 2 + abs(-z) @ torch.ones(V, 1)).sum(),
    "function": lambda z, y: torch.logsumexp(z, -1).square().sum(),
    "keyword": lambda z, y: torch.logsumexp(input=z, dim=-1).square().sum(),
    "of several": lambda z, y: torch.stack([z[0], z[1]]).exp().sum(),
    "comparison": lambda z, y: (z * (z > 0)).sum(),
    "class dimension": lambda z, y: F.cross_entropy(z, torch.full((BATCH, V), 1)),
}


def losses(mesh: zs.Mesh, gathered: bool) -> None:
    ranks = Ranks(mesh)
    for name, loss in (GATHERED if gathered else LOSSES).items():
        raw, whole, logits, local, labels = given(ranks)
        expected = loss(whole, labels)
        expected.backward()
        with warnings.catch_warnings(record=True) as warned, Widths(V) as wide:
            warnings.simplefilter("always")
            found = loss(logits, labels)
            assert torch.is_tensor(found)
            found.backward()
        close(found.detach(), expected.detach())
        assert raw.grad is not None and local.grad is not None
        torch.testing.assert_close(local.grad, ranks.part(raw.grad, -1), rtol=1e-5, atol=1e-7, msg=name)
        sent = ranks.sent()
        if gathered:
            parts = 2 if name in ("operators", "of several", "comparison") else 1
            assert sent["GATHER_ACTIVATIONS"][0] == parts, name
            assert [w for w in warned if f"All {V} logits of head are gathered on each of" in str(w.message)], name
        else:
            assert set(sent) == {"SUM_LOSSES"} and not warned, (name, sent)
            made = {operation for operation in wide.found if "linspace" not in operation and "arange" not in operation}
            assert name in ("bias", "bias first", "masked") or not made, (name, made)


@pytest.mark.parametrize("ranks", [2, 4])
def test_losses_on_parts_are_those_of_the_whole(pool: Pool, ranks: int) -> None:
    pool.run(losses, ranks, False)


@pytest.mark.parametrize("ranks", [2, 4])
def test_anything_else_gathers_and_warns(pool: Pool, ranks: int) -> None:
    pool.run(losses, ranks, True)


def operands(mesh: zs.Mesh) -> None:
    """Parameters that all ranks have whole get whole gradients; a bias of the classes of a rank, its own."""
    ranks = Ranks(mesh)
    scale, bias, each = torch.tensor(2.0), torch.linspace(-1, 1, V), torch.ones(BATCH, 1, 1)
    _, whole, logits, _, labels = given(ranks)
    theirs = [one.clone().requires_grad_() for one in (scale, bias, each)]
    F.cross_entropy((whole * theirs[0] + theirs[1] - theirs[2]).mT, labels).backward()
    ours = [one.clone().requires_grad_() for one in (scale, bias, each)]
    F.cross_entropy((logits * ours[0] + ours[1] - ours[2]).mT, labels).backward()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-7)
    split = ranks.part(bias).requires_grad_()
    _, _, logits, _, labels = given(ranks)
    F.cross_entropy((logits * scale + split - each).mT, labels).backward()
    assert split.grad is not None and theirs[1].grad is not None
    torch.testing.assert_close(split.grad, ranks.part(theirs[1].grad), rtol=1e-5, atol=1e-7)


def test_operands_get_their_gradients(pool: Pool) -> None:
    pool.run(operands, 2)


def facts(mesh: zs.Mesh) -> None:
    ranks = Ranks(mesh)
    _, whole, logits, _, _ = given(ranks)
    assert logits.shape == whole.shape and logits.size() == whole.shape and logits.size(-1) == V
    assert logits.dim() == logits.ndim == 3 and logits.numel() == whole.numel() and len(logits) == BATCH
    assert logits.dtype is torch.float32 and logits.device == whole.device and logits.requires_grad
    assert logits.is_floating_point() and not logits.detach().requires_grad
    assert ranks.sent() == {}
    assert "shape=(3, 6, 37)" in repr(logits)
    transposed = logits.transpose(0, 2)
    assert transposed.shape == (V, TIME, BATCH) and torch.equal(transposed.whole(), whole.transpose(0, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(logits.whole(), whole)  # asked for by name, and so without a warning
        assert torch.equal(logits.argmax(-1), whole.argmax(-1))
        assert torch.equal(logits.argmax(dim=-1, keepdim=True), whole.argmax(-1, keepdim=True))
        assert torch.equal(torch.argmax(transposed, 0), whole.transpose(0, 2).argmax(0))
        with torch.no_grad():
            assert torch.equal(logits.softmax(-1), whole.softmax(-1))
    once = ranks.sent()["GATHER_ACTIVATIONS"][0]
    assert once == 2  # those of `logits` are kept
    assert logits.whole().requires_grad and logits.log_softmax(-1).whole().requires_grad
    assert torch.equal(logits.log_softmax(-1).whole(), whole.log_softmax(-1))
    equal = ShardedLogits(torch.zeros(2, ranks.part(torch.zeros(V)).numel()), KEPT[-1].itself)
    assert torch.equal(equal.argmax(-1), torch.zeros(2, V).argmax(-1))


@pytest.mark.parametrize("ranks", [2, 4])
def test_facts_and_the_likeliest_class(pool: Pool, ranks: int) -> None:
    pool.run(facts, ranks)


def read_without_gradients(mesh: zs.Mesh) -> None:
    ranks = Ranks(mesh)
    _, _, logits, local, _ = given(ranks)
    with torch.no_grad():
        logits.softmax(-1)
    with pytest.warns(UserWarning, match=r"gathered on each of 2 ranks for 'exp'.*call logits.whole\(\) to say"):
        logits.exp().sum().backward()
    assert local.grad is not None
    torch.testing.assert_close(local.grad, local.detach().exp())


def test_logits_read_without_gradients_are_gathered_again_for_them(pool: Pool) -> None:
    pool.run(read_without_gradients, 2)


def writes(mesh: zs.Mesh) -> None:
    _, _, logits, _, _ = given(Ranks(mesh))
    with pytest.raises(PlanError, match=r"cannot be written in place \(div_\).*logits = logits.masked_fill"):
        logits.div_(2)
    with pytest.raises(PlanError, match=r"in place \(__setitem__\)"):
        logits[0] = 1
    with pytest.raises(PlanError, match=r"in place \(relu_\)"):
        torch.relu_(logits)


def test_writing_in_place_is_refused(pool: Pool) -> None:
    pool.run(writes, 2)
