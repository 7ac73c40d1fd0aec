"""Models that nobody has described: what their structure shows, and what stays whole because it is not certain."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from split_models.small_models import Branch, Stack
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from zeroshard.errors import PlanError
from zeroshard.tensor.find.found import FoundLayer, FoundLayers, Segment, Style, check_splits
from zeroshard.tensor.find.layers import find
from zeroshard.tensor.find.layout import every
from zeroshard.tensor.policy import TensorParallel

WIDTH, HEADS, SIZE = 16, 4, 6  # heads that are not as wide together as the stream


def found_in(model: nn.Module, ranks: int = 2) -> tuple[FoundLayers, dict[str, FoundLayer]]:
    found = find(model, ranks, TensorParallel(ranks))
    return found, {every(layer.name): layer for layer in found.layers}


def shapes(layer: FoundLayer) -> tuple[str, list[tuple[int, int]]]:
    return layer.style.value, [(segment.size, segment.parts) for segment in layer.segments]


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Heads [B, T, H, d] -> [B, T, H·d], causal."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return mixed.transpose(1, 2).flatten(2)


class Separate(nn.Module):
    """Queries, keys and values of layers of their own."""

    def __init__(self, kv_heads: int = HEADS, qk_norm: Callable[[], nn.Module] = nn.Identity) -> None:
        super().__init__()
        self.n_head, self.head_dim, self.n_kv_heads = HEADS, SIZE, kv_heads
        self.wq = nn.Linear(WIDTH, HEADS * SIZE)
        self.wk, self.wv = (nn.Linear(WIDTH, kv_heads * SIZE, bias=False) for _ in range(2))
        self.wo = nn.Linear(HEADS * SIZE, WIDTH)
        self.norm = qk_norm()

    def heads(self, x: Tensor, heads: int) -> Tensor:
        return x.view(*x.shape[:2], heads, self.head_dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.wq(x), self.wk(x), self.wv(x)
        q = self.norm(self.heads(q, self.n_head))
        output: Tensor = self.wo(attend(q, self.heads(k, self.n_kv_heads), self.heads(v, self.n_kv_heads)))
        return output


class Fused(Separate):
    """Queries, keys and values of one layer, in some order."""

    def __init__(self, order: str, kv_heads: int = HEADS) -> None:
        super().__init__(kv_heads)
        del self.wq, self.wk, self.wv
        self.qkv, self.order = nn.Linear(WIDTH, (HEADS + 2 * kv_heads) * SIZE), order

    def forward(self, x: Tensor) -> Tensor:
        y, h, k, d = self.qkv(x), self.n_head, self.n_kv_heads, self.head_dim
        if self.order == "parts":
            heads = [self.heads(each, n) for each, n in zip(y.split([h * d, k * d, k * d], -1), (h, k, k), strict=True)]
        elif self.order == "groups":
            groups = y.view(*x.shape[:2], k, h // k + 2, d)
            heads = [each.flatten(2, 3) for each in groups.split([h // k, 1, 1], 3)]
        else:  # each feature of all heads together
            heads = list(y.view(*x.shape[:2], 3, d, h).transpose(-1, -2).unbind(2))
        output: Tensor = self.wo(attend(*heads))
        return output


class Nano(nn.Module):
    """As in small examples: heads of width // heads features, where the width is that of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.n_head, self.n_embd = 4, WIDTH
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        heads = [
            each.view(batch, time, self.n_head, width // self.n_head) for each in self.c_attn(x).split(self.n_embd, 2)
        ]
        output: Tensor = self.c_proj(attend(*heads))
        return output


class Wide(Nano):
    """It reads the features of all heads from an attribute that is named as the width."""

    def forward(self, x: Tensor) -> Tensor:
        heads = [each.view(*x.shape[:2], self.n_head, -1) for each in self.c_attn(x).split(self.n_embd, 2)]
        output: Tensor = self.c_proj(attend(*heads))
        return output


class FeedForward(nn.Module):
    """Layers that widen, something between, and one that comes back."""

    def __init__(self, between: Callable[[Tensor], Tensor], parts: int = 1) -> None:
        super().__init__()
        self.first, self.last, self.between = nn.Linear(WIDTH, parts * 32), nn.Linear(32, WIDTH), between

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self.first(x)))  # type: ignore[no-any-return]


def test_heads_of_an_unknown_class_are_split() -> None:
    found, layers = found_in(Stack(lambda: Separate(kv_heads=2)), 4)
    assert shapes(layers["blocks.*.inner.wq"]) == ("column", [(24, 4)])
    assert shapes(layers["blocks.*.inner.wk"]) == shapes(layers["blocks.*.inner.wv"]) == ("column", [(12, 2)])
    assert shapes(layers["blocks.*.inner.wo"]) == ("row", [(24, 4)])
    assert [each.sizes for each in found.attentions] == [{"n_head": 1, "n_kv_heads": 1}] * 2
    assert found.blocks == (("blocks.0", "blocks.1"),)


@pytest.mark.parametrize(
    "order, kv_heads, ranks, expected",
    [
        ("parts", 4, 2, [(24, 2), (24, 2), (24, 2)]),
        ("parts", 2, 4, [(24, 4), (12, 2), (12, 2)]),
        ("groups", 4, 2, [(72, 2)]),
        ("groups", 2, 2, [(48, 2)]),
        ("groups", 2, 4, [(12, 2), (6, 1), (6, 1), (12, 2), (6, 1), (6, 1)]),
    ],
)
def test_the_order_of_a_fused_projection_is_found_by_trial(
    order: str, kv_heads: int, ranks: int, expected: list[tuple[int, int]]
) -> None:
    _, layers = found_in(Stack(lambda: Fused(order, kv_heads)), ranks)
    assert shapes(layers["blocks.*.inner.qkv"]) == ("column", expected)


def test_another_order_stays_whole() -> None:
    found, layers = found_in(Stack(lambda: Fused("features")))
    assert not found.splits
    assert layers["blocks.*.inner.qkv"].reason == (
        "attention of Fused: its forward makes something else of the features of one rank"
    )
    with pytest.raises(
        PlanError, match=r"splits nothing of Stack.*attention of Fused: its forward makes something else"
    ):
        check_splits(found, "Stack", 2)


def test_heads_of_a_width_that_is_read_off_the_input() -> None:
    """Their module gets a view of as many features as a rank's heads have."""
    found, layers = found_in(Stack(Nano))
    assert shapes(layers["blocks.*.inner.c_attn"]) == ("column", [(16, 2)] * 3)
    assert all(each.narrow and each.sizes == {"n_head": 2, "n_embd": 8} for each in found.attentions)


def test_a_width_that_means_all_heads_is_found_by_trial() -> None:
    found, layers = found_in(Stack(Wide))
    assert shapes(layers["blocks.*.inner.c_attn"]) == ("column", [(16, 2)] * 3)
    assert [each.sizes for each in found.attentions] == [{"n_head": 2, "n_embd": 8}] * 2


class OverHeads(nn.Module):
    """A norm over the features of all heads, with weights or without."""

    def __init__(self, weights: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HEADS * SIZE, elementwise_affine=weights)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(2)
        normed = self.norm(flat) if self.norm.elementwise_affine else F.layer_norm(flat, flat.shape[-1:])
        return normed.view(x.shape)  # type: ignore[no-any-return]


def test_a_norm_over_all_heads_gathers_their_features() -> None:
    found, layers = found_in(Stack(lambda: Separate(qk_norm=lambda: OverHeads(True))))
    norm = layers["blocks.*.inner.norm.norm"]
    assert norm.gathers and norm.partial and norm.segments == (Segment(24, 2),) and found.splits
    found, layers = found_in(Stack(lambda: Separate(qk_norm=lambda: OverHeads(False))))
    assert not found.splits and "attention of Separate" in layers["blocks.*.inner.wq"].reason


def test_a_norm_of_each_head_has_a_part_of_its_gradient() -> None:
    found, layers = found_in(Stack(lambda: Separate(qk_norm=lambda: nn.LayerNorm(SIZE))))
    assert layers["blocks.*.inner.norm"].partial and layers["blocks.*.inner.wq"].style is Style.COLUMN
    assert not layers["blocks.*.norm"].partial and found.whole_sequences == ()


def test_layers_beside_the_heads_need_whole_sequences() -> None:
    """A norm before the projections, in the module that gets the rows of all ranks, would be counted several times."""

    class Normed(Separate):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.before(x))  # type: ignore[no-any-return]

    def make() -> nn.Module:
        module = Normed()
        module.before = nn.LayerNorm(WIDTH)
        return module

    found, layers = found_in(Stack(make))
    assert layers["blocks.*.inner.wq"].style is Style.COLUMN and not layers["blocks.*.inner.before"].partial
    assert found.blocks == ()
    assert found.whole_sequences == (
        ("blocks", "blocks.0: inner.before is part of a module with attention, and not of its heads"),
    )


def halves(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def neighbours(x: Tensor) -> Tensor:
    return F.silu(x[..., ::2]) * x[..., 1::2]


@pytest.mark.parametrize(
    "between, parts, expected",
    [
        (F.gelu, 1, [(32, 2)]),
        (halves, 2, [(32, 2), (32, 2)]),
        (neighbours, 2, [(64, 2)]),
        (lambda x: torch.softmax(x, -1), 1, None),
        (lambda x: F.layer_norm(x, x.shape[-1:]), 1, None),
        (lambda x: x.cumsum(-1), 1, None),
        (lambda x: x.flip(-1), 1, None),
    ],
)
def test_feed_forward_layers_of_an_unknown_class(
    between: Callable[[Tensor], Tensor], parts: int, expected: list[tuple[int, int]] | None
) -> None:
    found, layers = found_in(Stack(lambda: FeedForward(between, parts)))
    if expected is None:
        assert not found.splits
        assert layers["blocks.*.inner.first"].reason.startswith("feed-forward layers of FeedForward: its forward ")
    else:
        assert shapes(layers["blocks.*.inner.first"]) == ("column", expected)
        assert shapes(layers["blocks.*.inner.last"]) == ("row", [(32, 2)])
        assert found.blocks == ()  # no attention says which dimension is that of positions


def test_a_learned_activation_has_a_part_of_its_gradient() -> None:
    _, layers = found_in(Stack(lambda: FeedForward(nn.PReLU())))
    assert layers["blocks.*.inner.between"].partial and layers["blocks.*.inner.first"].style is Style.COLUMN
    _, layers = found_in(Stack(lambda: FeedForward(nn.PReLU(32))))  # a number for each feature
    assert layers["blocks.*.inner.first"].style is Style.WHOLE


def test_feed_forward_layers_whose_output_is_used_elsewhere_stay_whole() -> None:
    class Leaky(FeedForward):
        def forward(self, x: Tensor) -> Tensor:
            inner = torch.relu(self.first(x))
            return self.last(inner) + inner.mean(-1, keepdim=True)  # type: ignore[no-any-return]

    found, layers = found_in(Stack(lambda: Leaky(F.relu)))
    assert not found.splits
    assert (
        layers["blocks.*.inner.last"].reason
        == "feed-forward layers of Leaky: its output needs the features of all ranks"
    )


def test_a_forward_that_cannot_be_tried_stays_whole() -> None:
    class Choosy(Separate):
        def forward(self, x: Tensor, scale: Any) -> Tensor:
            return super().forward(x * scale["x"])

    found, layers = found_in(Stack(Choosy))
    assert not found.splits
    assert layers["blocks.*.inner.wq"].reason == (
        "attention of Choosy: its forward cannot be tried (TypeError: 'NoneType' object is not subscriptable)"
    )


def test_pairs_in_a_sequence_of_modules() -> None:
    net = nn.Sequential(
        *(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 10), nn.Tanh(), nn.Dropout(0.1), nn.Linear(10, 6), nn.GELU()),
        *(nn.Linear(6, 3), nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)),
    )
    _, layers = found_in(net)
    styles = {layer.name: layer.style.value for layer in layers.values()} | {
        layer.name: layer.style.value for layer in find(net, 2, TensorParallel(2)).layers
    }
    expected = {"0": "column", "2": "row", "5": "column", "7": "row", "8": "whole", "9": "whole", "10": "whole"}
    assert styles == expected
    odd = {layer.name: layer for layer in find(nn.Sequential(nn.Linear(4, 7), nn.ReLU(), nn.Linear(7, 4)), 2,
                                               TensorParallel(2)).layers}  # fmt: skip
    assert odd["0"].style is Style.WHOLE and "has 7 inner features, and tensor_parallel=2 does not" in odd["0"].reason


def test_feed_forward_layers_inside_blocks_may_be_sequences() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH))

    _, layers = found_in(Stack(make))
    assert shapes(layers["blocks.*.inner.*"]) in (("column", [(24, 2)]), ("row", [(24, 2)]))


class Convolutional(nn.Module):
    """A small network of convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten())
        self.classes = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.classes(self.layers(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "make, layer, reason",
    [
        (Convolutional, "layers.0", "Conv2d is no linear layer"),
        (Convolutional, "classes",
         "no layer was found that makes what it reads, or reads what it makes, feature by feature"),
        (lambda: nn.TransformerEncoderLayer(16, 2), "linear1",
         "it holds nn.MultiheadAttention, and reads weights of its layers itself"),
        (lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, batch_first=True), 2), "layers.1.self_attn",
         "nn.MultiheadAttention hands its weights to one function, which has all heads"),
        (lambda: nn.TransformerDecoderLayer(16, 2), "multihead_attn.out_proj",
         "nn.MultiheadAttention hands its weights to one function, which has all heads"),
        (lambda: nn.LSTM(4, 4), "", "a recurrent layer has no order in which its features could be split"),
        (lambda: Stack(lambda: nn.Embedding(8, 8)), "blocks.0.inner",
         "not known to be of a vocabulary; layers can name it 'embedding'"),
    ],
)  # fmt: skip
def test_whole_models_say_why(make: Callable[[], nn.Module], layer: str, reason: str) -> None:
    model = make().to("meta")
    found = find(model, 2, TensorParallel(2))
    assert not found.splits and found.attentions == () and found.blocks == ()
    assert {each.name: each.reason for each in found.layers}[layer] == reason
    with pytest.raises(PlanError, match=f"tensor_parallel=2 splits nothing of {type(model).__name__}"):
        check_splits(found, type(model).__name__, 2)


class Odd(nn.Linear):
    """A linear layer that does something else too."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sort(-1).values


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda _: Odd(WIDTH, 32), "Odd has a forward of its own"),
        (parametrizations.weight_norm, "this ParametrizedLinear computes its weight from other parameters"),
    ],
)
def test_linear_layers_that_are_not_plain_stay_whole(change: Callable[[nn.Module], nn.Module], reason: str) -> None:
    def make() -> nn.Module:
        module = FeedForward(F.relu)
        module.first = change(module.first)
        return module

    found, layers = found_in(Stack(make))
    assert not found.splits
    assert any(layer.reason.startswith(reason) for layer in layers.values())


class Mean(Branch):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x.mean(1, keepdim=True)


class Shifted(Branch):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + F.pad(x, (0, 0, 1, 0))[:, :-1]


class Placed(Branch):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.places = nn.Buffer(torch.zeros(64, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.arange(x.shape[1], dtype=x.dtype)[:, None]


class Convolved(Branch):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)


class Told(Branch):
    def forward(self, x: Tensor, told: Any) -> Tensor:
        return super().forward(x) * told["x"]


@pytest.mark.parametrize(
    "block, reason",
    [
        (Branch, ""),
        (Mean, "it mixes positions outside of attention"),
        (Shifted, "it mixes positions outside of attention"),
        (Placed, "it does not treat all positions alike"),
        (Convolved, "conv (Conv1d) may mix positions, and is whole"),
        (Told, "its forward cannot be tried (TypeError: 'NoneType' object is not subscriptable)"),
    ],
)
def test_blocks_that_do_not_work_on_positions_apart(block: type[Branch], reason: str) -> None:
    model = Stack(Separate, block)
    found, _ = found_in(model)
    assert found.splits
    assert found.whole_sequences == ((("blocks", f"blocks.0: {reason}"),) if reason else ())
    assert found.blocks == (() if reason else (("blocks.0", "blocks.1"),))
    off = find(model, 2, TensorParallel(2, sequence=False))
    assert off.blocks == (("blocks.0", "blocks.1"),) and off.whole_sequences == ()
    assert off.layers == found.layers


def test_attention_that_is_whole_needs_whole_sequences() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.split, self.whole = Separate(), Fused("features")

        def forward(self, x: Tensor) -> Tensor:
            return self.split(x) + self.whole(x)  # type: ignore[no-any-return]

    found, layers = found_in(Stack(Both))
    assert layers["blocks.*.inner.split.wq"].style is Style.COLUMN
    assert found.whole_sequences == (("blocks", "blocks.0: it mixes positions outside of attention"),)


def test_a_parameter_of_layers_that_are_split_differently() -> None:
    def tied(same: bool) -> nn.Module:
        model = Stack(lambda: FeedForward(F.relu))
        a, b = (block.inner for block in model.blocks)
        b.first.weight = a.first.weight
        if not same:
            model.whole = nn.Linear(WIDTH, 32)
            model.whole.weight = a.first.weight
        return model

    found, _ = found_in(tied(same=True))
    assert found.splits
    with pytest.raises(
        PlanError, match=r"'blocks.0.inner.first' and 'whole' share the parameter 'weight'.*Leave both whole"
    ):
        found_in(tied(same=False))
    model = Stack(lambda: FeedForward(F.relu))
    for inner in (block.inner for block in model.blocks):
        inner.first, inner.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        inner.last.weight = inner.first.weight
    with pytest.raises(PlanError, match=r"one is split \(column\) in another way than the other \(row\)"):
        found_in(model)
