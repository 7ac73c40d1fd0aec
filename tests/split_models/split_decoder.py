"""A small decoder whose layers are split by a table written by hand, apart from what `find_layers` finds."""

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zeroshard as zs
from zeroshard.comm.collectives import Comm
from zeroshard.parts.place import Axis, Partial, Split
from zeroshard.tensor.find.found import AttentionSizes, FoundLayer, FoundLayers, Segment, Style
from zeroshard.tensor.policy import TensorParallel
from zeroshard.tensor.split import technique

WIDTH, HEADS, SIZE, INNER, LAYERS, VOCABULARY = 16, 4, 4, 24, 2, 11


class Attention(nn.Module):
    """Grouped-query attention with normed queries, biases, and projections of its own names."""

    def __init__(self, kv_heads: int) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, HEADS * SIZE)
        self.key = nn.Linear(WIDTH, kv_heads * SIZE)
        self.value = nn.Linear(WIDTH, kv_heads * SIZE)
        self.norm = nn.LayerNorm(SIZE)
        self.output = nn.Linear(HEADS * SIZE, WIDTH)

    def forward(self, hidden_states: Tensor) -> Tensor:
        shape = (*hidden_states.shape[:2], -1, SIZE)
        query, key, value = (
            each(hidden_states).view(shape).transpose(1, 2) for each in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(self.norm(query), key, value, is_causal=True, enable_gqa=True)
        return self.output(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and a gated MLP, the latter in the block itself."""

    def __init__(self, kv_heads: int) -> None:
        super().__init__()
        self.before, self.attention = nn.LayerNorm(WIDTH), Attention(kv_heads)
        self.between = nn.LayerNorm(WIDTH)
        self.gate, self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(hidden_states=self.before(x))
        y = self.between(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    """Returns its loss."""

    def __init__(self, kv_heads: int = 2) -> None:
        super().__init__()
        self.kv_heads = kv_heads
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(kv_heads) for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def by_hand(model: Any, ranks: int) -> FoundLayers:
    """How the decoder's layers are split."""
    kv = Segment(model.kv_heads * SIZE, min(model.kv_heads, ranks))
    columns = {"query": Segment(HEADS * SIZE, ranks), "key": kv, "value": kv,
               "gate": Segment(INNER, ranks), "up": Segment(INNER, ranks)}  # fmt: skip
    rows = {"output": (HEADS * SIZE, ("query", "key", "value")), "down": (INNER, ("gate", "up"))}
    layers = []
    for path, module in model.named_modules():
        holder, _, name = path.rpartition(".")
        if name in columns:
            layers.append(FoundLayer(path, Style.COLUMN, (columns[name],), ""))
        elif name in rows:
            inputs, before = rows[name]
            names = tuple(f"{holder}.{each}" for each in before)
            layers.append(FoundLayer(path, Style.ROW, (Segment(inputs, ranks),), "", columns=names))
        elif module._parameters:
            layers.append(FoundLayer(path, Style.WHOLE, (), "", partial=path.endswith("attention.norm")))
    attentions = tuple(AttentionSizes(f"blocks.{n}.attention", {}) for n in range(LAYERS))
    return FoundLayers(tuple(layers), attentions, (tuple(f"blocks.{n}" for n in range(LAYERS)),))


def split(mesh: zs.Mesh, model: nn.Module, sequence: bool, shares: bool) -> tuple[Mapping[Any, Split | Partial], Comm]:
    """Split a model over all ranks; the places of its parameters."""
    comm = Comm(mesh)
    axis = Axis("tensor", (tuple(range(mesh.ranks)),), comm)
    policy = TensorParallel(mesh.ranks, sequence=sequence)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(technique, "find", lambda model, ranks, policy: by_hand(model, ranks))
        places = technique.TensorTechnique(policy, "shared" if shares else "network").cut(model, {"tensor": axis})
    comm.reset()
    return places, comm


def batch(positions: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels [2, T]."""
    tokens = torch.randint(VOCABULARY, (2, 2, positions), generator=torch.Generator().manual_seed(positions))
    return tokens[0], tokens[1]


def pair(kv_heads: int = 2) -> tuple[Decoder, Decoder]:
    """Two equal decoders."""
    torch.manual_seed(0)
    whole = Decoder(kv_heads)
    return whole, copy.deepcopy(whole)


def part_of(tensor: Tensor, place: Split | Partial | None) -> Tensor:
    """This rank's part of a whole tensor."""
    if not isinstance(place, Split):
        return tensor
    pieces = [tensor.narrow(place.dimension, p.start, p.stop - p.start) for p in place.pieces]
    return torch.cat(pieces, place.dimension)
