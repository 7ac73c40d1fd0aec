"""Cross entropy of a split vocabulary beside torch's of whole logits: values, gradients, messages and widths."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pool import Pool, WorkerError
from split_models.vocabularies import Ranks, Widths, close, seeded
from torch import Tensor

import zeroshard as zs
from zeroshard.errors import BatchError
from zeroshard.losses import OutputLayer, linear_cross_entropy
from zeroshard.losses.row_gradients import CrossEntropy
from zeroshard.tensor.split.cross_entropy import vocabulary_cross_entropy

ROWS, WIDTH = 23, 16
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "ignored": {"ignore_index": 3},
    "smoothed": {"label_smoothing": 0.1},
    "z-loss": {"z_loss": 1e-2},
    "capped": {"scale": 0.5, "softcap": 5.0},
    "all": {"reduction": "sum", "label_smoothing": 0.2, "z_loss": 1e-3, "scale": -1.5, "softcap": 9.0},
}
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
SIZES = [(2, 257), (4, 257), (2, 64), (4, 5)]


def whole_loss(logits: Tensor, labels: Tensor, options: dict[str, Any]) -> Tensor:
    """torch's loss of logits [N, V], at least in fp32."""
    settings = dict(options)
    z_loss, scale, cap = settings.pop("z_loss", 0.0), settings.pop("scale", 1.0), settings.pop("softcap", None)
    z = logits.to(torch.promote_types(logits.dtype, torch.float32)) * scale
    if cap is not None:
        z = cap * torch.tanh(z / cap)
    loss = F.cross_entropy(z, labels, **settings)
    if z_loss:
        counted = labels != settings.get("ignore_index", -100)
        squares = z_loss * z.logsumexp(-1)[counted].square()
        loss = loss + (squares.sum() if settings.get("reduction") == "sum" else squares.sum() / counted.sum())
    return loss


def drawn(vocabulary: int, dtype: torch.dtype, options: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight and bias, and labels of which some do not count; the same on all ranks."""
    seeded(7)
    hidden = torch.randn(ROWS, WIDTH).to(dtype).requires_grad_()
    weight = (0.3 * torch.randn(vocabulary, WIDTH)).to(dtype).requires_grad_()
    bias = torch.randn(vocabulary).to(dtype).requires_grad_()
    labels = torch.randint(vocabulary, (ROWS,))
    labels[2:7] = options.get("ignore_index", -100)
    return hidden, weight, bias, labels


def losses_of_logits(mesh: zs.Mesh, vocabulary: int, dtype: torch.dtype) -> None:
    ranks = Ranks(mesh)
    classes = ranks.vocabulary(vocabulary)
    for name, options in OPTIONS.items():
        hidden, weight, bias, labels = drawn(vocabulary, dtype, options)
        logits = F.linear(hidden, weight, bias).detach().requires_grad_()
        expected = whole_loss(logits, labels, options)
        given = torch.linspace(1, 2, ROWS) if name == "none" else torch.tensor(0.5)
        given = given.to(expected.dtype)
        expected.backward(given)
        assert logits.grad is not None
        local = ranks.part(logits, 1).requires_grad_()
        settings = {k: v for k, v in options.items() if k != "reduction"}
        found = vocabulary_cross_entropy(
            local, labels, classes, CrossEntropy(**settings), options.get("reduction", "mean")
        )
        assert found.dtype is torch.promote_types(dtype, torch.float32)
        close(found.detach(), expected.detach(), TOLERANCE[dtype])
        assert ranks.sent() == {"SUM_LOSSES": (2, 3 * ROWS)}
        found.backward(given, retain_graph=True)
        assert ranks.sent() == {}
        assert local.grad is not None
        own = ranks.part(logits.grad, 1)
        largest = logits.grad.double().abs().max()
        if own.numel():
            assert (local.grad.double() - own.double()).abs().max() <= TOLERANCE[dtype] * largest, name
        once = local.grad.clone()
        found.backward(given)
        assert torch.equal(local.grad, 2 * once)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("ranks, vocabulary", SIZES)
def test_loss_and_gradients_are_those_of_whole_logits(
    pool: Pool, ranks: int, vocabulary: int, dtype: torch.dtype
) -> None:
    pool.run(losses_of_logits, ranks, vocabulary, dtype)


def chunked_losses(mesh: zs.Mesh, vocabulary: int, dtype: torch.dtype, chunk: int | None) -> list[float]:
    ranks, losses = Ranks(mesh), []
    chunks = -(-ROWS // (chunk or ROWS))
    for name, options in OPTIONS.items():
        if name == "none":
            continue
        hidden, weight, bias, labels = drawn(vocabulary, dtype, options)
        expected = whole_loss(F.linear(hidden, weight, bias), labels, options)
        expected.backward(torch.tensor(0.5, dtype=expected.dtype))
        own = [hidden.detach().clone().requires_grad_()]
        own += [ranks.part(one).requires_grad_() for one in (weight, bias)]
        settings = {k: v for k, v in options.items() if k not in ("scale", "softcap")}
        cap = options.get("scale", 1.0), options.get("softcap")
        layer = OutputLayer(own[1], own[2], *cap, ranks.vocabulary(vocabulary))
        found = linear_cross_entropy(own[0], layer, labels, chunk=chunk, **settings)
        assert ranks.sent() == {"SUM_LOSSES": (2 * chunks, 3 * ROWS), "SUM_ACTIVATIONS": (chunks, ROWS * WIDTH)}
        close(found.detach(), expected.detach(), TOLERANCE[dtype])
        losses.append(found.item())
        (0.5 * found).backward()
        assert ranks.sent() == {}
        for part, whole in zip(own, (hidden, weight, bias), strict=True):
            assert part.grad is not None and whole.grad is not None and part.grad.dtype is dtype
            theirs = whole.grad if whole is hidden else ranks.part(whole.grad)
            largest = whole.grad.double().abs().max()
            if theirs.numel():
                assert (part.grad.double() - theirs.double()).abs().max() <= TOLERANCE[dtype] * largest, name
    return losses


@pytest.mark.parametrize("chunk", [5, None])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("ranks, vocabulary", SIZES)
def test_the_chunked_loss_is_that_of_whole_logits(
    pool: Pool, ranks: int, vocabulary: int, dtype: torch.dtype, chunk: int | None
) -> None:
    first, *others = pool.run(chunked_losses, ranks, vocabulary, dtype, chunk)
    assert all(losses == first for losses in others)  # bit for bit


def without_gradients(mesh: zs.Mesh) -> Any:
    ranks = Ranks(mesh)
    hidden, weight, _, labels = drawn(257, torch.float32, {})
    layer = OutputLayer(ranks.part(weight), vocabulary=ranks.vocabulary(257))
    with torch.no_grad():
        loss = linear_cross_entropy(hidden, layer, labels, chunk=5)
    return loss.requires_grad, ranks.sent()


def test_without_gradients_no_gradient_is_sent(pool: Pool) -> None:
    assert pool.run(without_gradients, 2) == [(False, {"SUM_LOSSES": (10, 3 * ROWS)})] * 2


def widths(mesh: zs.Mesh) -> set[str]:
    ranks = Ranks(mesh)
    hidden, weight, bias, labels = drawn(257, torch.float32, {})
    options = {"label_smoothing": 0.1, "z_loss": 0.1}
    own = [ranks.part(one).requires_grad_() for one in (weight, bias)]
    classes = ranks.vocabulary(257)
    with Widths(257) as found:
        layer = OutputLayer(*own, 1.5, 3.0, classes)
        linear_cross_entropy(hidden, layer, labels, chunk=5, **options).backward()
        logits = F.linear(hidden, *own)
        vocabulary_cross_entropy(logits, labels, classes, CrossEntropy(**options)).backward()
    return found.found


@pytest.mark.parametrize("ranks", [2, 4])
def test_no_tensor_is_as_wide_as_the_vocabulary(pool: Pool, ranks: int) -> None:
    assert pool.run(widths, ranks) == [set()] * ranks


def impossible_classes(mesh: zs.Mesh) -> None:
    """Classes of probability 0: a whole rank's, the largest of another, and a label."""
    ranks = Ranks(mesh)
    seeded(3)
    logits = torch.randn(4, 9)
    start, stop = ranks.rows(9, 1)
    logits[:, start:stop] = -torch.inf
    logits[1, 0] = -torch.inf
    labels = torch.tensor([0, 1, 2, start])
    for smoothing in (0.0, 0.1):
        whole = logits.clone().requires_grad_()
        expected = F.cross_entropy(whole, labels, reduction="none", label_smoothing=smoothing)
        local = ranks.part(logits, 1).requires_grad_()
        terms = CrossEntropy(label_smoothing=smoothing)
        found = vocabulary_cross_entropy(local, labels, ranks.vocabulary(9), terms, "none")
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
        if not smoothing:
            found[:3].sum().backward()
            expected[:3].sum().backward()
            assert local.grad is not None and whole.grad is not None
            torch.testing.assert_close(local.grad, ranks.part(whole.grad, 1), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("ranks", [2, 3])
def test_classes_of_probability_0(pool: Pool, ranks: int) -> None:
    pool.run(impossible_classes, ranks)


def no_row_counts(mesh: zs.Mesh) -> None:
    ranks = Ranks(mesh)
    hidden, weight, _, _ = drawn(9, torch.float32, {})
    labels = torch.full((ROWS,), -100)
    for reduction in ("mean", "sum"):
        hidden.grad, own = None, ranks.part(weight).requires_grad_()
        layer = OutputLayer(own, vocabulary=ranks.vocabulary(9))
        local = F.linear(hidden.detach(), own)
        losses = [
            linear_cross_entropy(hidden, layer, labels, reduction=reduction),
            vocabulary_cross_entropy(local, labels, ranks.vocabulary(9), CrossEntropy(), reduction),
        ]
        for loss in losses:
            assert loss.isnan() if reduction == "mean" else loss == 0
            loss.backward()
        assert own.grad is not None and not own.grad.any()
        assert hidden.grad is not None and not hidden.grad.any()


def test_rows_that_do_not_count_give_nothing(pool: Pool) -> None:
    pool.run(no_row_counts, 2)


def wrong_label(mesh: zs.Mesh, label: int) -> None:
    ranks = Ranks(mesh)
    labels = torch.tensor([1, label])
    vocabulary_cross_entropy(torch.zeros(2, 4), labels, ranks.vocabulary(8), CrossEntropy())


@pytest.mark.parametrize("label", [-1, 8])
def test_labels_of_no_class_are_refused_on_all_ranks(pool: Pool, label: int) -> None:
    with pytest.raises(WorkerError, match="out of bounds") as raised:
        pool.run(wrong_label, 2, label)
    assert len(raised.value.errors) == 2


def second_derivative(mesh: zs.Mesh) -> None:
    local = torch.randn(2, 4, requires_grad=True)
    loss = vocabulary_cross_entropy(local, torch.tensor([1, 2]), Ranks(mesh).vocabulary(8), CrossEntropy())
    with pytest.raises(BatchError, match=r"create_graph=True.*logits.whole\(\)"):
        torch.autograd.grad(loss, local, create_graph=True)


def test_a_second_derivative_is_refused(pool: Pool) -> None:
    pool.run(second_derivative, 2)
