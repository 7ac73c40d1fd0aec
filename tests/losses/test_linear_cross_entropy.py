"""The loss without logits: values, gradients and memory beside torch's cross entropy of torch's linear layer."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from zeroshard.errors import BatchError, ModelError, PlanError
from zeroshard.losses import OutputLayer, linear_cross_entropy
from zeroshard.losses.linear_cross_entropy import default_chunk
from zeroshard.planner.predict.memory_tracker import Tracker

ROWS, WIDTH, VOCABULARY = 37, 16, 101
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "ignored": {"ignore_index": 3},
    "smoothed": {"label_smoothing": 0.1},
    "z-loss": {"z_loss": 1e-2},
    "bias": {"bias": True},
    "capped": {"scale": 0.5, "softcap": 5.0},
    "all": {"reduction": "sum", "label_smoothing": 0.2, "z_loss": 1e-3, "bias": True, "scale": -1.5, "softcap": 9.0},
}
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}  # of the largest


def plainly(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, options: dict[str, Any], like: torch.dtype
) -> Tensor:
    """The same loss from whole logits, in fp32 or above."""
    settings = dict(options)
    z_loss, scale, cap = settings.pop("z_loss", 0.0), settings.pop("scale", 1.0), settings.pop("softcap", None)
    settings.pop("bias", None)
    z = F.linear(hidden, weight, bias).flatten(0, -2).to(torch.promote_types(like, torch.float32)) * scale
    if cap is not None:
        z = cap * torch.tanh(z / cap)
    targets = labels.flatten()
    loss = F.cross_entropy(z, targets, **settings)
    if z_loss:
        counted = targets != settings.get("ignore_index", -100)
        squares = z_loss * z.logsumexp(-1)[counted].square().sum()
        loss = loss + (squares if settings.get("reduction") == "sum" else squares / counted.sum())
    return loss


def chunked(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, options: dict[str, Any], chunk: int | None
) -> Tensor:
    settings = {k: v for k, v in options.items() if k not in ("bias", "scale", "softcap")}
    layer = OutputLayer(weight, bias, options.get("scale", 1.0), options.get("softcap"))
    return linear_cross_entropy(hidden, layer, labels, chunk=chunk, **settings)


def drawn(dtype: torch.dtype, options: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Hidden states [2, N, D], a weight, a bias, and labels of which some do not count."""
    hidden = torch.randn(2, ROWS, WIDTH).to(dtype).requires_grad_()
    weight = (0.3 * torch.randn(VOCABULARY, WIDTH)).to(dtype).requires_grad_()
    bias = torch.randn(VOCABULARY).to(dtype).requires_grad_() if options.get("bias") else None
    labels = torch.randint(VOCABULARY, (2, ROWS))
    labels[0, :9] = options.get("ignore_index", -100)
    return hidden, weight, bias, labels


def close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    assert found.dtype == expected.dtype and found.shape == expected.shape
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("chunk", [1, 10, 1000, None])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_loss_and_gradients_are_those_of_whole_logits(
    dtype: torch.dtype, options: dict[str, Any], chunk: int | None
) -> None:
    hidden, weight, bias, labels = drawn(dtype, options)
    inputs = [tensor for tensor in (hidden, weight, bias) if tensor is not None]
    expected = plainly(hidden, weight, bias, labels, options, dtype)
    found = chunked(hidden, weight, bias, labels, options, chunk)
    assert found.shape == () and found.dtype is torch.promote_types(dtype, torch.float32)
    close(found.detach(), expected.detach(), TOLERANCE[dtype])
    gradients = torch.autograd.grad(0.5 * found, inputs), torch.autograd.grad(0.5 * expected, inputs)
    for ours, theirs in zip(*gradients, strict=True):
        close(ours, theirs, TOLERANCE[dtype])


def test_in_16_bits_the_gradient_of_the_weight_is_nearer_to_fp32_than_a_sum_in_16_bits() -> None:
    torch.manual_seed(1)
    hidden, weight = torch.randn(2048, WIDTH), 0.1 * torch.randn(7, WIDTH)
    labels = torch.randint(7, (2048,))
    gradients = {}
    for dtype in (torch.float32, torch.bfloat16):
        given = weight.to(dtype, copy=True).requires_grad_()
        linear_cross_entropy(hidden.to(dtype), given, labels, reduction="sum", chunk=16).backward()
        assert given.grad is not None
        gradients[dtype] = given.grad.float()
    added = torch.zeros(7, WIDTH, dtype=torch.bfloat16)
    weight.requires_grad_()
    for rows in range(0, 2048, 16):
        logits = F.linear(hidden[rows : rows + 16], weight)
        loss = F.cross_entropy(logits, labels[rows : rows + 16], reduction="sum")
        added += torch.autograd.grad(loss, weight)[0].bfloat16()
    errors = [(g - gradients[torch.float32]).norm().item() for g in (gradients[torch.bfloat16], added.float())]
    assert errors[0] < 0.5 * errors[1]


def test_sums_over_rows_do_not_leave_the_range_of_fp16() -> None:
    hidden, weight = torch.full((1024, WIDTH), 100.0), torch.zeros(5, WIDTH)
    labels = torch.ones(1024, dtype=torch.long)  # of one class: 1024 rows of up to -80 add up to 82,000
    gradients = []
    for dtype in (torch.float32, torch.float16):
        given = weight.to(dtype, copy=True).requires_grad_()
        linear_cross_entropy(hidden.to(dtype), given, labels, chunk=1024).backward()
        assert given.grad is not None
        gradients.append(given.grad.float())
    torch.testing.assert_close(gradients[1], gradients[0], rtol=2e-3, atol=0)


@pytest.mark.parametrize("needs", list(itertools.product([True, False], repeat=3)))
def test_what_needs_no_gradient_gets_none_and_changes_no_other(needs: tuple[bool, bool, bool]) -> None:
    hidden, weight, bias, labels = drawn(torch.float32, {"bias": True})
    assert bias is not None
    expected = torch.autograd.grad(chunked(hidden, weight, bias, labels, {}, 10), (hidden, weight, bias))
    inputs = [t.detach().requires_grad_(need) for t, need in zip((hidden, weight, bias), needs, strict=True)]
    loss = chunked(*inputs, labels, {}, 10)  # type: ignore[call-arg]
    assert loss.requires_grad == any(needs)
    if any(needs):
        loss.backward()
    for given, gradient, need in zip(inputs, expected, needs, strict=True):
        assert torch.equal(given.grad, gradient) if need and given.grad is not None else given.grad is None


def test_without_gradients_there_is_one_product_and_nothing_is_kept() -> None:
    hidden, weight, bias, labels = drawn(torch.float32, {})
    expected = chunked(hidden, weight, bias, labels, {}, 10)
    with torch.no_grad(), tracking(hidden, weight, labels) as tracker:
        found = chunked(hidden, weight, bias, labels, {}, 10)
    assert torch.equal(found, expected) and not found.requires_grad
    assert tracker.peak.nbytes - given_nbytes(hidden, weight, labels) < 10 * VOCABULARY * 4 + 1000 < weight.nbytes


@pytest.mark.parametrize("reduction, expected", [("mean", float("nan")), ("sum", 0.0)])
@pytest.mark.parametrize("rows", [0, 5])
def test_rows_that_do_not_count_give_nothing(reduction: str, expected: float, rows: int) -> None:
    hidden, weight = torch.randn(rows, WIDTH, requires_grad=True), torch.randn(VOCABULARY, WIDTH, requires_grad=True)
    labels = torch.full((rows,), -100)
    loss = linear_cross_entropy(hidden, weight, labels, reduction=reduction, chunk=2)
    theirs = F.cross_entropy(F.linear(hidden, weight), labels, reduction=reduction)
    assert torch.equal(loss.isnan(), theirs.isnan()) and loss.isnan().item() == (expected != expected)
    loss.nan_to_num(0.0).backward() if reduction == "sum" else loss.backward()
    for given in (hidden, weight):
        assert given.grad is not None and not given.grad.any()


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_gives_the_same_bits(reentrant: bool) -> None:
    hidden, weight, bias, labels = drawn(torch.float32, {})
    expected = torch.autograd.grad(chunked(2 * hidden, weight, bias, labels, {}, 10), (hidden, weight))
    call = lambda h, w: chunked(2 * h, w, None, labels, {}, 10)  # noqa: E731
    checkpoint(call, hidden, weight, use_reentrant=reentrant).backward()
    assert all(torch.equal(t.grad, e) for t, e in zip((hidden, weight), expected, strict=True) if t.grad is not None)
    assert hidden.grad is not None and weight.grad is not None


def test_a_repetition_gives_the_same_bits_and_gradients_add_up() -> None:
    hidden, weight, _, labels = drawn(torch.float32, {})
    losses = [linear_cross_entropy(hidden, weight, labels, chunk=10) for _ in range(2)]
    assert torch.equal(*losses)
    one = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels, chunk=10), weight)[0]
    sum(losses).backward()  # type: ignore[union-attr]
    assert weight.grad is not None and torch.equal(weight.grad, 2 * one)


def test_under_autocast_the_products_are_in_its_dtype() -> None:
    hidden, weight, _, labels = drawn(torch.float32, {})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, labels, chunk=10)
        expected = F.cross_entropy(F.linear(hidden, weight).flatten(0, 1).float(), labels.flatten())
    assert loss.dtype is torch.float32 and torch.equal(loss, expected)
    loss.backward()
    assert weight.grad is not None and weight.grad.dtype is torch.float32


def test_a_second_backward_and_a_second_derivative_are_refused() -> None:
    hidden, weight, _, labels = drawn(torch.float32, {})
    loss = linear_cross_entropy(hidden, weight, labels)
    with pytest.raises(BatchError, match=r"create_graph=True.*cross_entropy of the logits"):
        torch.autograd.grad(loss, hidden, create_graph=True)
    loss = linear_cross_entropy(hidden, weight, labels)
    loss.backward(retain_graph=True)
    with pytest.raises(BatchError, match=r"second backward.*Call it again for each backward"):
        loss.backward()


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"label_smoothing": 1.5}, PlanError, r"label_smoothing is 1.5; it must be a number from 0 to 1"),
    ({"z_loss": -1.0}, PlanError, r"z_loss is -1.0"),
    ({"reduction": "none"}, PlanError, r"reduction is 'none'; it must be 'mean' or 'sum'"),
    ({"chunk": 0}, PlanError, r"chunk is 0"),
    ({"weight": OutputLayer(torch.zeros(5, 4), softcap=0.0)}, PlanError, r"softcap is 0.0"),
    ({"weight": torch.zeros(5, 3)}, ModelError, r"weight \(5, 3\); they must be \[..., D\] and \[V, D\]"),
    ({"weight": torch.zeros(5, 4).half()}, ModelError, r"hidden is torch.float32 and weight torch.float16"),
    ({"weight": OutputLayer(torch.zeros(5, 4), torch.zeros(4))}, ModelError, r"bias has shape \(4,\)"),
    ({"labels": torch.zeros(2, dtype=torch.long)}, ModelError, r"of shape \(2,\); they must be torch.int64"),
    ({"labels": torch.zeros(3)}, ModelError, r"labels are torch.float32"),
    ({"labels": torch.full((3,), 5)}, RuntimeError, r"out of bounds"),
]


@pytest.mark.parametrize("change, kind, said", WRONG)
def test_what_does_not_fit_is_refused(change: dict[str, Any], kind: type[Exception], said: str) -> None:
    given = {"hidden": torch.zeros(3, 4), "weight": torch.zeros(5, 4), "labels": torch.zeros(3, dtype=torch.long)}
    with pytest.raises(kind, match=said):
        linear_cross_entropy(**{**given, **change})


@contextmanager
def tracking(*given: Tensor) -> Iterator[Tracker]:
    """Count memory, with these tensors there from the start."""
    with Tracker() as tracker:
        for tensor in given:
            tracker.see(tensor)
        tracker.start_again()
        yield tracker


def given_nbytes(*tensors: Tensor) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def peak(rows: int, vocabulary: int, chunk: int | None, dtype: torch.dtype = torch.float32) -> int:
    """The highest that memory stands above inputs and gradients, in a forward and a backward."""
    hidden = torch.randn(rows, WIDTH).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, WIDTH).to(dtype).requires_grad_()
    labels = torch.randint(vocabulary, (rows,))
    with tracking(hidden, weight, labels) as tracker:
        linear_cross_entropy(hidden, weight, labels, chunk=chunk).backward()
    assert hidden.grad is not None and weight.grad is not None
    return tracker.peak.nbytes - given_nbytes(hidden, weight, labels, hidden.grad, weight.grad)


@pytest.mark.parametrize("chunk", [8, 64])
def test_memory_does_not_grow_with_the_rows(chunk: int) -> None:
    peaks = [peak(rows, 2000, chunk) for rows in (128, 512, 2048)]
    logits = chunk * 2000 * 4
    assert all(logits <= one <= 1.01 * logits + 64 * chunk + 4096 for one in peaks)
    assert peaks[2] - peaks[0] <= (2048 - 128) // chunk * 24  # the sum and the count of each chunk


def test_two_per_cent_of_the_logits_are_enough() -> None:
    assert peak(8192, 1000, 128) <= 0.02 * 8192 * 1000 * 4


def test_a_chunk_is_1024_rows_or_more_where_they_are_short() -> None:
    assert [default_chunk(vocabulary) for vocabulary in (256, 32_768, 50_257, 256_000)] == [65_536, 1024, 1024, 1024]
