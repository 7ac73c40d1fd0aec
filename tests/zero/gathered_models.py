"""Models of unlike build, to see in all of them what a stage keeps gathered. No class here knows of zeroshard."""

from collections.abc import Callable
from functools import partial

import torch
from engine.models import Attending
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

WIDTH, WORDS = 8, 13


class Pre(nn.Module):
    """A block that ends its backward with its norm."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, bias=bias)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH, bias=bias), nn.Linear(2 * WIDTH, WIDTH, bias=bias)

    def inner(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x))


class Post(Pre):
    """A block that ends its backward with a matrix."""

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.inner(x))


class Parallel(Pre):
    """Two branches behind one norm."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.inner(h) + self.mix(h)


class Spare(Pre):
    """A block that leaves some of its parameters out."""

    def __init__(self) -> None:
        super().__init__()
        self.spare, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(WIDTH))


class Adapted(Pre):
    """Frozen, with two small matrices that are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.a, self.b = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def inner(self, x: Tensor) -> Tensor:
        return super().inner(x) + self.b(self.a(x))


class Mixed(Pre):
    """Each token goes to one of two experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 2, bias=False)
        self.other = nn.Linear(WIDTH, WIDTH)

    def inner(self, x: Tensor) -> Tensor:
        share = self.router(x).softmax(-1)
        return share[..., :1] * super().inner(x) + share[..., 1:] * self.other(x)


class Several(Pre):
    """It returns its input beside its output."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, skip = pair
        return super().forward(x) + 0.1 * skip, x


class Language(nn.Module):
    """Embedding, blocks, norm and head; returns the loss."""

    def __init__(self, block: Callable[[], nn.Module] = Pre, blocks: int = 5) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([block() for _ in range(blocks)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.body(self.embed(tokens[:, :-1])))
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), tokens[:, 1:].flatten())


class Tied(Language):
    """The output layer is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


class Adapters(Language):
    """Only the adapters are trained."""

    def __init__(self, block: Callable[[], nn.Module] = Adapted) -> None:
        super().__init__(block)
        for part in (self.embed, self.norm, self.head):
            part.requires_grad_(False)


class Around(Language):
    """The blocks are called by a checkpoint."""

    reentrant = False

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class AroundReentrant(Around):
    """By the older way."""

    reentrant = True


class Cycled(Language):
    """The blocks are gone through twice."""

    def body(self, x: Tensor) -> Tensor:
        return super().body(super().body(x))


class Doubled(Language):
    """Each block is called twice before the next."""

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(block(x))
        return x


class Pairs(Language):
    """Each block takes and returns two tensors."""

    def __init__(self) -> None:
        super().__init__(Several)

    def body(self, x: Tensor) -> Tensor:
        pair = x, x
        for block in self.blocks:
            pair = block(pair)
        return pair[0]


class Towers(Language):
    """Blocks side by side, whose input has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embed.requires_grad_(False)

    def body(self, x: Tensor) -> Tensor:
        return torch.stack([block(x) for block in self.blocks]).sum(0)


class AdaptedTowers(Adapters):
    """The same with adapters."""

    def body(self, x: Tensor) -> Tensor:
        return torch.stack([block(x) for block in self.blocks]).sum(0)


class Cross(Pre):
    """A block that also reads what an encoder made."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x = x + F.scaled_dot_product_attention(x, self.key(memory), self.value(memory))
        return super().forward(x)


class Translation(Language):
    """An encoder and a decoder."""

    def __init__(self) -> None:
        super().__init__(Cross, 5)
        self.encoder = nn.ModuleList([Pre() for _ in range(4)])

    def body(self, x: Tensor) -> Tensor:
        memory = x
        for block in self.encoder:
            memory = block(memory)
        for block in self.blocks:
            x = block(x, memory)
        return x


class Residual(nn.Module):
    """A block of convolutions and batch norms."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(4, 4, 3, padding=1), nn.Conv1d(4, 4, 3, padding=1)
        self.before, self.between = nn.BatchNorm1d(4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.relu(self.between(self.first(F.relu(self.before(x))))))


class Convolution(nn.Module):
    """A stem, blocks of convolutions, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Conv1d(1, 4, 3), nn.Sequential(*[Residual() for _ in range(5)])
        self.head = nn.Linear(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.blocks(self.stem(tokens[:, None].float()))
        return self.head(x.mean(-1)).square().mean()


class Segments(Language):
    """Blocks two by two in a checkpoint."""

    def __init__(self) -> None:
        super().__init__(blocks=8)

    def body(self, x: Tensor) -> Tensor:
        return checkpoint_sequential(list(self.blocks), 4, x, use_reentrant=False)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "pre-norm": Language,
    "twelve blocks": partial(Language, blocks=12),
    "post-norm": partial(Language, Post),
    "parallel": partial(Language, Parallel),
    "no bias": partial(Language, partial(Pre, bias=False)),
    "tied": Tied,
    "spare": partial(Language, Spare),
    "mixture": partial(Language, Mixed),
    "adapters": Adapters,
    "pairs": Pairs,
    "checkpoint": Around,
    "re-entrant": AroundReentrant,
    "cycled": Cycled,
    "doubled": Doubled,
    "towers": Towers,
    "adapted towers": AdaptedTowers,
    "encoder-decoder": Translation,
    "convolution": Convolution,
    "segments": Segments,
    "attending": Attending,
}
