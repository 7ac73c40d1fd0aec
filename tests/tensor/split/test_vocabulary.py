"""Embeddings and output layers in parts beside whole ones: rows, gradients, messages, copies, and what is refused."""

import copy
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pool import Pool
from split_models.vocabularies import Ranks, Widths, close, seeded, split
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.errors import ModelError
from zeroshard.losses import OutputLayer, linear_cross_entropy
from zeroshard.losses.causal_models import set_loss_chunk
from zeroshard.tensor.split.logits import ShardedLogits
from zeroshard.train.gpt import GPT
from zeroshard.train.sizes import GPTConfig

WIDTH = 12


class Scaled(nn.Embedding):
    """As the embeddings of Gemma."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.embedding_dim**0.5


class Plus(nn.Embedding):
    """Looks its weight up by itself, with other arguments' names."""

    def forward(self, numbers: Tensor, offset: int = 0) -> Tensor:
        return 2 * F.embedding(input=(numbers + offset) % self.num_embeddings, weight=self.weight, padding_idx=3)


class Own(nn.Embedding):
    def forward(self, numbers: Tensor) -> Tensor:
        return self.weight[numbers.clamp(max=0)]


def pair(whole: nn.Embedding, ranks: Ranks) -> nn.Embedding:
    parts = copy.deepcopy(whole)
    split(nn.ModuleDict({"embedding": parts}), ranks, ["embedding"], [])
    return parts


def embeddings(mesh: zs.Mesh, rows: int) -> None:
    ranks = Ranks(mesh)
    seeded(5)
    kinds: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
        (nn.Embedding, {}, {}),
        (nn.Embedding, {"padding_idx": 3}, {}),
        (nn.Embedding, {"padding_idx": -1}, {}),
        (Scaled, {"padding_idx": 0}, {}),
        (Plus, {"padding_idx": 3}, {"offset": 2}),
    ]
    for kind, options, more in kinds:
        whole = kind(rows, WIDTH, **options)
        parts = pair(whole, ranks)
        assert type(parts) is kind and parts.num_embeddings == rows
        numbers = torch.arange(2 * rows).view(2, rows) % rows
        weight = torch.randn(2, rows, WIDTH)
        expected, found = whole(numbers, **more), parts(numbers, **more)
        assert torch.equal(found, expected)  # one rank's rows and zeros add up exactly
        assert ranks.sent() == {"SUM_ACTIVATIONS": (1, 2 * rows * WIDTH)}
        for output in (expected, found):
            (output * weight).sum().backward()
        assert ranks.sent() == {}  # the backward needs no message
        assert parts.weight.grad is not None and whole.weight.grad is not None
        assert torch.equal(parts.weight.grad, ranks.part(whole.weight.grad))
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                assert torch.equal(parts(numbers[0], **more), whole(numbers[0], **more))
        ranks.sent()
        on_meta = copy.deepcopy(parts).to("meta")
        assert on_meta(numbers.to("meta"), **more).shape == (2, rows, WIDTH)
        assert ranks.sent() == {}


@pytest.mark.parametrize("ranks, rows", [(2, 257), (4, 257), (4, 5), (3, 9)])
def test_an_embedding_in_parts_is_the_whole_one(pool: Pool, ranks: int, rows: int) -> None:
    pool.run(embeddings, ranks, rows)


def bad_embeddings(mesh: zs.Mesh) -> None:
    ranks = Ranks(mesh)
    for options in ({"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}):
        (option,) = options
        with pytest.raises(ModelError, match=rf"embedding is an embedding with {option}=.*embedding=whole"):
            pair(nn.Embedding(8, 2, **options), ranks)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=r"is a Own, whose forward does not give its weight .* to embedding, so that"):
        pair(Own(8, 2), ranks)(torch.tensor([1]))
    for number in (-1, 8):
        with pytest.raises(IndexError, match="out of range"):
            pair(nn.Embedding(8, 2), ranks)(torch.tensor([number]))


def test_embeddings_that_need_all_rows_are_refused(pool: Pool) -> None:
    pool.run(bad_embeddings, 2)


class Model(nn.Module):
    """Embedding, a layer, and an output layer."""

    def __init__(self, rows: int, head: nn.Linear, tied: bool) -> None:
        super().__init__()
        self.embedding, self.middle, self.head = nn.Embedding(rows, WIDTH), nn.Linear(WIDTH, WIDTH), head
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, numbers: Tensor) -> Any:
        return self.head(torch.tanh(self.middle(self.embedding(numbers))))


class LossHead(nn.Linear):
    """As docs/losses.md has it, with logits where there are no labels."""

    loss_chunk: int | None = None

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        if labels is None:
            return super().forward(x)
        return linear_cross_entropy(x, self.weight, labels, chunk=self.loss_chunk)


class FullHead(nn.Linear):
    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        layer = OutputLayer(self.weight, self.bias, softcap=3.0)
        return linear_cross_entropy(x, layer, labels if labels is not None else torch.zeros(len(x), dtype=torch.long))


class NormedHead(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return F.linear(x, F.normalize(self.weight))


class Doubled(nn.Linear):
    """Makes logits by itself."""

    def forward(self, input: Tensor) -> Any:
        return 2 * F.linear(input, weight=self.weight, bias=self.bias)


def models(mesh: zs.Mesh, rows: int) -> None:
    ranks = Ranks(mesh)
    numbers = torch.arange(40).view(4, 10) % rows
    labels = numbers.roll(1, 1).clone()
    labels[0, :3] = -100
    for kind, bias, tied in [(nn.Linear, True, False), (nn.Linear, False, True), (Doubled, True, True)]:
        seeded(3)
        whole = Model(rows, kind(WIDTH, rows, bias=bias), tied)
        parts = copy.deepcopy(whole)
        split(parts, ranks, ["embedding"], ["head"])
        assert (parts.head.weight is parts.embedding.weight) == tied
        expected = F.cross_entropy(whole(numbers).view(-1, rows), labels.view(-1))
        expected.backward()
        with Widths(rows) as wide:
            found = F.cross_entropy(parts(numbers).view(-1, rows), labels.view(-1))
            found.backward()
        assert not wide.found
        assert ranks.sent() == {"SUM_ACTIVATIONS": (2, 2 * 40 * WIDTH), "SUM_LOSSES": (2, 3 * 40)}
        close(found.detach(), expected.detach())
        compare(whole, parts, ranks)
        logits = parts.eval()(numbers)
        assert isinstance(logits, ShardedLogits)  # gradients are on
        with torch.no_grad():
            assert isinstance(parts.train()(numbers), ShardedLogits)  # a stage that is recomputed
            gathered = parts.eval()(numbers)
            assert type(gathered) is Tensor
            torch.testing.assert_close(gathered, whole(numbers))
        with torch.inference_mode():
            assert torch.equal(parts(numbers), gathered)
        ranks.sent()


def compare(whole: nn.Module, parts: nn.Module, ranks: Ranks) -> None:
    """Gradients of all parameters."""
    for (name, theirs), (other, ours) in zip(whole.named_parameters(), parts.named_parameters(), strict=True):
        assert name == other and ours.grad is not None and theirs.grad is not None, name
        expected = theirs.grad if ours.shape == theirs.shape else ranks.part(theirs.grad)
        largest = theirs.grad.abs().max().item()
        assert ours.grad.shape == expected.shape
        if expected.numel():
            assert (ours.grad - expected).abs().max().item() <= 1e-6 * largest, name


@pytest.mark.parametrize("ranks, rows", [(2, 257), (4, 257), (4, 5)])
def test_a_model_with_a_loss_of_its_own(pool: Pool, ranks: int, rows: int) -> None:
    pool.run(models, ranks, rows)


def heads(mesh: zs.Mesh) -> None:
    ranks, rows = Ranks(mesh), 257
    for kind in (LossHead, FullHead):
        seeded(4)
        whole = nn.ModuleDict({"head": kind(WIDTH, rows)})
        x, labels = torch.randn(30, WIDTH), torch.arange(30) * 8
        parts = copy.deepcopy(whole)
        if kind is LossHead:
            set_loss_chunk(parts, 7)
        split(parts, ranks, [], ["head"])
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        expected, found = whole["head"](inputs[0], labels), parts["head"](inputs[1], labels)
        expected.backward()
        found.backward()
        chunks = 5 if kind is LossHead else 1
        assert ranks.sent() == {"SUM_LOSSES": (2 * chunks, 90), "SUM_ACTIVATIONS": (chunks, 30 * WIDTH)}
        close(found.detach(), expected.detach())
        torch.testing.assert_close(inputs[1].grad, inputs[0].grad, rtol=1e-5, atol=1e-8)
        if kind is LossHead:
            whole["head"].bias.grad = parts["head"].bias.grad = None
            assert parts["head"](x).shape == (30, rows)
        else:
            compare(whole, parts, ranks)
    parts = nn.ModuleDict({"head": NormedHead(WIDTH, rows)})
    split(parts, ranks, [], ["head"])
    with pytest.raises(ModelError, match=r"head is a NormedHead, .* as they are to linear or linear_cross_entropy"):
        parts["head"](x)


def test_heads_that_make_the_loss(pool: Pool) -> None:
    pool.run(heads, 2)


def built_in(mesh: zs.Mesh, chunk: int | None) -> None:
    ranks = Ranks(mesh)
    seeded(8)
    whole = GPT(GPTConfig(vocabulary=257, context=16, width=WIDTH, heads=2, layers=1))
    numbers = torch.randint(257, (3, 11))
    parts = copy.deepcopy(whole)
    set_loss_chunk(parts, chunk)
    split(parts, ranks, ["embedding"], ["head"])
    whole(numbers, numbers.roll(1)).backward()
    with Widths(257) as wide:
        parts(numbers, numbers.roll(1)).backward()
    assert not wide.found
    compare(whole, parts, ranks)
    chunks = -(-33 // (chunk or 33))
    assert ranks.sent() == {"SUM_LOSSES": (2 * chunks, 99), "SUM_ACTIVATIONS": (1 + chunks, 2 * 33 * WIDTH)}
    with torch.no_grad():
        torch.testing.assert_close(parts.eval()(numbers), whole(numbers))


@pytest.mark.parametrize("chunk", [None, 8])
def test_the_built_in_model(pool: Pool, chunk: int | None) -> None:
    pool.run(built_in, 2, chunk)


def copies(mesh: zs.Mesh) -> None:
    ranks, rows = Ranks(mesh), 9
    seeded(2)
    whole = Model(rows, nn.Linear(WIDTH, rows), tied=False)
    parts = copy.deepcopy(whole)
    split(parts, ranks, ["embedding"], ["head"])
    copied = copy.deepcopy(parts)
    with torch.no_grad():
        for parameter in parts.parameters():
            parameter.zero_()  # which a copy must not see
    numbers = torch.arange(rows)
    torch.testing.assert_close(copied(numbers).whole(), whole(numbers))
    file = io.BytesIO()
    torch.save(copied, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert torch.equal(loaded.head.weight, ranks.part(whole.head.weight))
    with pytest.raises(ModelError, match=r"embedding has the rows \d to \d of 9 and was loaded without the ranks"):
        loaded(numbers)
    with pytest.raises(ModelError, match="head has the rows"):
        loaded.head(torch.zeros(1, WIDTH))


def test_copies_work_with_the_same_ranks_and_files_say_what_they_lack(pool: Pool) -> None:
    pool.run(copies, 2)


def frozen(mesh: zs.Mesh) -> None:
    ranks, rows = Ranks(mesh), 9
    seeded(2)
    whole = Model(rows, nn.Linear(WIDTH, rows), tied=True)
    whole.head.weight.requires_grad_(False)
    parts = copy.deepcopy(whole)
    split(parts, ranks, ["embedding"], ["head"])
    numbers = torch.arange(rows)
    for model in (whole, parts):
        F.cross_entropy(model(numbers), numbers).backward()
    assert parts.head.weight.grad is None
    for name in ("middle.weight", "head.bias"):
        theirs, ours = (model.get_parameter(name).grad for model in (whole, parts))
        assert theirs is not None and ours is not None
        torch.testing.assert_close(ours, theirs if name[0] == "m" else ranks.part(theirs), rtol=1e-5, atol=1e-7)


def test_a_frozen_vocabulary(pool: Pool) -> None:
    pool.run(frozen, 2)


def autocast(mesh: zs.Mesh) -> None:
    ranks, rows = Ranks(mesh), 257
    seeded(2)
    whole = Model(rows, nn.Linear(WIDTH, rows), tied=True)
    parts = copy.deepcopy(whole)
    split(parts, ranks, ["embedding"], ["head"])
    numbers = torch.arange(rows)
    losses = []
    for model in (whole, parts):
        with torch.autocast("cpu", torch.bfloat16):
            losses.append(F.cross_entropy(model(numbers), numbers))
        losses[-1].backward()
    close(losses[1].detach(), losses[0].detach(), 1e-4)
    for theirs, ours in zip(whole.parameters(), parts.parameters(), strict=True):
        assert theirs.grad is not None and ours.grad is not None and ours.grad.dtype is torch.float32
        close(ours.grad, theirs.grad if ours.shape == theirs.shape else ranks.part(theirs.grad), 2e-2)


def test_under_autocast(pool: Pool) -> None:
    pool.run(autocast, 2)
