"""Small models in which something is awkward, and a plain single-process loop to compare with."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from plain_loop import PlainRun, plain_loop
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zeroshard as zs
from zeroshard.losses import linear_cross_entropy

OPTIMIZERS = {
    "adamw": partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1),
    "sgd": partial(torch.optim.SGD, lr=5e-2, momentum=0.9),
    "adagrad": partial(torch.optim.Adagrad, lr=5e-2),
}


class Block(nn.Module):
    """A residual MLP block, width D = 10 so that few rank counts divide it."""

    def __init__(self, width: int = 10, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, dtype=dtype)
        self.up = nn.Linear(width, 17, dtype=dtype)
        self.down = nn.Linear(17, width, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x.to(self.norm.weight.dtype))
        return x + self.down(torch.tanh(self.up(h))).to(x.dtype)


class Plain(nn.Module):
    """Embedding, blocks, head; returns the loss."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 10)
        self.blocks = nn.ModuleList([Block() for _ in range(blocks)])
        self.head = nn.Linear(10, 13, bias=False)

    def body(self, x: Tensor, step: int) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, tokens: Tensor, step: int = 0) -> Tensor:
        x = self.body(self.embed(tokens[:, :-1]), step)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), tokens[:, 1:].flatten())


class Tied(Plain):
    """The output head is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


class Frozen(Plain):
    """The embedding and parts of the middle block do not train."""

    def __init__(self) -> None:
        super().__init__()
        self.embed.requires_grad_(False)
        self.blocks[1].up.requires_grad_(False)
        self.blocks[2].requires_grad_(False)


class Sometimes(Plain):
    """The middle block is left out in every third step."""

    def body(self, x: Tensor, step: int) -> Tensor:
        for number, block in enumerate(self.blocks):
            if number != 1 or step % 3 != 2:
                x = block(x)
        return x


class Twice(Plain):
    """The first block is called twice in one forward."""

    def body(self, x: Tensor, step: int) -> Tensor:
        return self.blocks[0](self.blocks[2](self.blocks[1](self.blocks[0](x))))


class Nested(Plain):
    """A list of lists of blocks."""

    def __init__(self) -> None:
        super().__init__(0)
        self.stages = nn.ModuleList([nn.ModuleList([Block(), Block()]) for _ in range(2)])

    def body(self, x: Tensor, step: int) -> Tensor:
        for stage in self.stages:
            for block in stage:
                x = block(x)
        return x


class TwoDtypes(Plain):
    """One block in fp64."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = Block(dtype=torch.float64)


class Checkpointed(Plain):
    """Blocks are recomputed in the backward."""

    reentrant = False

    def body(self, x: Tensor, step: int) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class CheckpointedReentrant(Checkpointed):
    """The same by the older, re-entrant way, with a block used twice."""

    reentrant = True

    def body(self, x: Tensor, step: int) -> Tensor:
        return checkpoint(self.blocks[0], super().body(x, step), use_reentrant=True)


class CheckpointedInside(Plain):
    """Only a part of each block is recomputed."""

    def body(self, x: Tensor, step: int) -> Tensor:
        for block in self.blocks:
            x = x + checkpoint(block.down, torch.tanh(block.up(block.norm(x))), use_reentrant=False)
        return x


class Tiny(nn.Module):
    """Three parameters in all, fewer than four ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([0.5]))
        self.shift = nn.Parameter(torch.tensor([0.1, -0.2]))

    def forward(self, tokens: Tensor, step: int = 0) -> Tensor:
        return ((tokens.float() / 13 * self.scale + self.shift.sum()) ** 2).mean()


class Five(Plain):
    """Five blocks, for up to five pipeline stages."""

    def __init__(self) -> None:
        super().__init__(5)


class TiedFive(Five):
    """The same, and the output head is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


class Skipping(Five):
    """The results of the embedding and of the first block are added to the last block's."""

    def body(self, x: Tensor, step: int) -> Tensor:
        embedded, first = x, self.blocks[0](x)
        x = first
        for block in self.blocks[1:]:
            x = block(x)
        return x + first + embedded


class Framed(Five):
    """The model itself has parameters, and uses them before and after the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.full((self.embed.embedding_dim,), 0.1))
        self.gain = nn.Parameter(torch.full((self.embed.embedding_dim,), 0.9))

    def body(self, x: Tensor, step: int) -> Tensor:
        return super().body(x + self.position, step) * self.gain


class Deep(Plain):
    """Twelve blocks, for four stages of three chunks."""

    def __init__(self) -> None:
        super().__init__(12)
        torch.nn.init.normal_(self.embed.weight, std=0.1)  # so calm that rounding does not grow in twenty steps


class DeepTied(Deep):
    """The same, and the output head is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


class Dropped(Five):
    """Dropout before, between and after blocks."""

    def body(self, x: Tensor, step: int) -> Tensor:
        for block in self.blocks:
            x = F.dropout(block(F.dropout(x, 0.3)), 0.1)
        return x


class Thrifty(Five):
    """The same, and each block recomputes its own middle in the backward."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.forward = partial(self._thrifty, block)

    @staticmethod
    def _thrifty(block: Block, x: Tensor) -> Tensor:
        return x + checkpoint(lambda x: block.down(torch.tanh(block.up(block.norm(x)))), x, use_reentrant=False)


class Head(nn.Linear):
    """An output layer that makes the loss by chunks."""

    loss_chunk: int | None = None

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return linear_cross_entropy(x, self.weight, targets, chunk=self.loss_chunk)


class Chunked(Five):
    """A loss that never holds the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.head = Head(10, 13, bias=False)

    def forward(self, tokens: Tensor, step: int = 0) -> Tensor:
        return self.head(self.body(self.embed(tokens[:, :-1]), step), tokens[:, 1:])


class ChunkedTied(Chunked):
    """The same, and the output head is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


class Attention(nn.Module):
    """Causal attention, with four heads of queries and two of keys and values."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = 4, width // 4
        self.query, self.output = nn.Linear(width, width), nn.Linear(width, width)
        self.value = nn.Linear(width, width // 2)
        self.key = nn.Linear(width, width // 2, bias=False)  # the gradient of a bias would be rounding of zero

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        output: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return output


class AttentionBlock(Block):
    """A block of width 8 with attention."""

    def __init__(self) -> None:
        super().__init__(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.before, self.attention = nn.LayerNorm(8), Attention(8)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.attention(self.before(x)))


class Attending(Plain):
    """Five blocks of layers that two and four ranks can split."""

    def __init__(self) -> None:
        super().__init__(0)
        self.embed, self.head = nn.Embedding(13, 8), nn.Linear(8, 13, bias=False)
        self.blocks.extend(AttentionBlock() for _ in range(5))


class AttendingTied(Attending):
    """The same, and the output head is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


class MixtureBlock(AttentionBlock):
    """A block whose second half is a mixture of five experts, so that few numbers of ranks divide them.

    The penalty is a mean over tokens, whatever the microbatches that these come in.
    """

    def __init__(self, expert: Any) -> None:
        super().__init__()
        del self.up, self.down
        router = zs.moe.router_of("mixtral", 8, 5, losses=zs.moe.Losses(z=0.1), init_scale=1.0)
        shared = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 8))
        self.mixture = zs.moe.MoE(8, 12, 5, router, expert=expert, shared=shared)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before(x))
        return x + self.mixture(self.norm(x.to(self.norm.weight.dtype))).to(x.dtype)


class Mixing(Attending):
    """Two of the blocks have experts: stacked ones, and modules."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = MixtureBlock(zs.moe.FeedForward(activation="gelu", gated=True, bias=True))
        self.blocks[3] = MixtureBlock(Dense)


class MixingTied(Mixing):
    """The same; the output head is the embedding, and some weights of experts do not train."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight
        self.blocks[1].mixture.experts.up.requires_grad_(False)
        self.blocks[3].mixture.experts.networks[2].requires_grad_(False)


class Dense(nn.Module):
    """An expert."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(8, 7), nn.Linear(7, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.into(x)))


class Spiked(Five):
    """Where a row begins with token 12, infinity goes back into the embedding, and nowhere else."""

    def forward(self, tokens: Tensor, step: int = 0) -> Tensor:
        x = _Spike.apply(self.embed(tokens[:, :-1]), bool((tokens[:, 0] == 12).any()))
        x = self.body(x, step)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), tokens[:, 1:].flatten())


class _Spike(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, spiked: bool) -> Tensor:
        ctx.spiked = spiked
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return (gradients[0] * float("inf") if ctx.spiked else gradients[0]), None


MODELS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        Plain,
        Tied,
        Frozen,
        Sometimes,
        Twice,
        Nested,
        TwoDtypes,
        Checkpointed,
        CheckpointedReentrant,
        CheckpointedInside,
        Tiny,
    )
}
LONGER: dict[str, Any] = {
    kind.__name__: kind
    for kind in (Five, TiedFive, Framed, Chunked, ChunkedTied, Deep, DeepTied, Dropped, Thrifty, Spiked)
}  # for pipelines
SKIPPING: dict[str, Any] = {"Skipping": Skipping}  # whose values pass over stages
SPLIT: dict[str, Any] = {kind.__name__: kind for kind in (Attending, AttendingTied)}  # by tensor parallelism
MIXED: dict[str, Any] = {kind.__name__: kind for kind in (Mixing, MixingTied)}  # and by expert parallelism


def build(name: str, seed: int = 0) -> nn.Module:
    """A model with the same weights every time."""
    torch.manual_seed(seed)
    model: nn.Module = {**MODELS, **LONGER, **SKIPPING, **SPLIT, **MIXED}[name]()
    return model


def batch(step: int, rank: int, ranks: int, rows: int = 8) -> Tensor:
    """Rank `rank`'s part of the global batch [rows, 6] of a step."""
    generator = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(13, (rows, 6), generator=generator)
    return tokens.chunk(ranks)[rank]


def plain(name: str, optimizer: str, rows: Sequence[int], clip: float | None = None) -> PlainRun:
    """A plain loop on global batches, one step for each of the numbers of rows."""
    steps = [[(batch(step, 0, 1, count), step)] for step, count in enumerate(rows)]
    return plain_loop(build(name), OPTIMIZERS[optimizer], steps, lambda model, part: model(*part), clip)
