"""Models made at random in which blocks and the code around them pass values in odd ways.

A number seeds a program: steps of code around the blocks, and calls of blocks of several kinds. It is drawn when the
model is built, so that every run of the model takes the same way.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH, PLACES, WORDS = 6, 4, 11


class State:
    """Values of one forward: the stream, tensors with and without a gradient, and losses."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.kept, self.losses = x, [x], list[Tensor]()
        self.masks: list[Tensor] = [torch.ones(x.shape[:2], dtype=torch.bool)]
        self.numbers: list[Tensor] = [torch.arange(PLACES).expand(x.shape[:2])]
        self.scale: float = 1.0


class Named(NamedTuple):
    x: Tensor
    side: Tensor
    mask: Tensor


@dataclass
class Record:
    x: Tensor
    side: Tensor
    count: int
    nothing: None = None


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        made: Tensor = gradient * 3 * x**2
        return made


class Block(nn.Module):
    """The plain kind; others take and return more."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def change(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.inner(self.norm(x)).tanh()
        return y

    def forward(self, x: Tensor) -> Any:
        return self.change(x)

    def call(self, state: State, pick: int) -> None:
        state.x = self(state.x)


class Skips(Block):
    """A tuple with a skip of another width, and an empty tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.side = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Any:
        x = self.change(x)
        return (), x, (F.pad(self.side(x), (0, WIDTH - 2)), None)

    def call(self, state: State, pick: int) -> None:
        _, state.x, (skip, _) = self(state.x)
        state.kept.append(skip)


class ByName(Block):
    """Keyword arguments alone, a dictionary of results, among them a loss."""

    def forward(self, *, skip: Tensor, x: Tensor, scale: float) -> Any:  # type: ignore[override]
        x = self.change(x + skip * scale)
        return {"loss": x.square().mean(), "x": x}

    def call(self, state: State, pick: int) -> None:
        made = self(skip=state.kept[pick % len(state.kept)], x=state.x, scale=0.5)
        state.x = made["x"]
        state.losses.append(made["loss"])


class Masks(Block):
    """A NamedTuple with a mask that is computed from values."""

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        x = self.change(x) * mask[..., None]
        return Named(x, x[..., :1] * 2, (x.detach().mean(-1) > -0.1) | mask)

    def call(self, state: State, pick: int) -> None:
        made = self(state.x, state.masks[pick % len(state.masks)])
        state.x, mask = made.x, made.mask
        state.masks.append(mask)
        state.kept.append(made.side.expand_as(made.x))


class Numbers(Block):
    """A dataclass, with whole numbers of two kinds; reads others."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(PLACES + 1, WIDTH)

    def forward(self, x: Tensor, numbers: Tensor) -> Any:
        x = self.change(x + self.table(numbers))
        return Record(x, x.argmax(-1) % PLACES, x.shape[1])

    def call(self, state: State, pick: int) -> None:
        made = self(state.x, state.numbers[pick % len(state.numbers)])
        state.x = made.x * (made.count / PLACES)
        state.numbers.append(made.side)


class Attends(Block):
    """Reads one of the values that are kept, which may be of an early layer."""

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None = None) -> Any:
        scores = self.inner(x) @ memory.mT
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, :], -10.0)
        return x + scores.softmax(-1) @ memory

    def call(self, state: State, pick: int) -> None:
        mask = state.masks[pick % len(state.masks)] if pick % 2 else None
        state.x = self(state.x, state.kept[pick % len(state.kept)], mask=mask)


class Wide(Block):
    """Computes in fp64, and returns a side value in it."""

    def __init__(self) -> None:
        super().__init__()
        self.double()

    def forward(self, x: Tensor) -> Any:
        y = self.change(x.double())
        return y.to(x.dtype), y

    def call(self, state: State, pick: int) -> None:
        state.x, wide = self(state.x)
        state.kept.append(wide.to(state.x.dtype)) if pick % 2 else state.losses.append(wide.square().mean().float())


class Recomputed(Block):
    """A part of it is recomputed, or all of it."""

    def forward(self, x: Tensor) -> Any:
        y: Tensor = checkpoint(self.change, x, use_reentrant=False)
        return y

    def call(self, state: State, pick: int) -> None:
        state.x = checkpoint(self.__call__, state.x, use_reentrant=False) if pick % 2 else self(state.x)


class Normed(Block):
    """Buffers that each microbatch changes."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(PLACES)

    def forward(self, x: Tensor) -> Any:
        y: Tensor = self.batch_norm(self.change(x))
        return y


class Owned(Block):
    """An autograd function of its own, a write in place, and its result twice."""

    def forward(self, x: Tensor) -> Any:
        y = Cube.apply(self.inner(self.norm(x)).tanh())  # type: ignore[no-untyped-call]
        y += x
        return [y, y]

    def call(self, state: State, pick: int) -> None:
        state.x, again = self(state.x)
        state.kept.append(again)


class Frozen(Block):
    """Some of its weights do not train."""

    def __init__(self) -> None:
        super().__init__()
        self.inner.requires_grad_(False)


class Twice(Block):
    """Runs two times, the second time on a value that is kept."""

    def call(self, state: State, pick: int) -> None:
        state.x = self(self(state.x) + state.kept[pick % len(state.kept)])


KINDS = (Block, Skips, ByName, Masks, Numbers, Attends, Wide, Recomputed, Normed, Owned, Frozen, Twice)
Around = Callable[["OddModel", State, int], None]


def skip(model: "OddModel", state: State, pick: int) -> None:
    state.x = state.x + state.kept[pick % len(state.kept)]


def stash(model: "OddModel", state: State, pick: int) -> None:
    state.kept.append(state.x * 0.7)


def concatenate(model: "OddModel", state: State, pick: int) -> None:
    both = torch.cat((state.x, state.kept[pick % len(state.kept)]), -1)
    state.x = both[..., ::2] + both.unflatten(-1, (2, WIDTH)).mean(-2)


def write(model: "OddModel", state: State, pick: int) -> None:
    state.x = state.x.clone()
    state.x[:, pick % PLACES] *= 0.5


def write_kept(model: "OddModel", state: State, pick: int) -> None:
    made = torch.zeros_like(state.x)
    made[:, pick % PLACES] = state.x[:, 0]
    state.kept.append(made)


def straight_through(model: "OddModel", state: State, pick: int) -> None:
    state.x = state.x + (state.x.round() - state.x).detach()


def target(model: "OddModel", state: State, pick: int) -> None:
    with torch.no_grad():
        wanted = F.normalize(state.kept[pick % len(state.kept)], dim=-1)
    state.losses.append((state.x - wanted).square().mean())


def normalise(model: "OddModel", state: State, pick: int) -> None:
    state.x = model.between(state.x)


def gain(model: "OddModel", state: State, pick: int) -> None:
    state.x = state.x * model.gain


def early_head(model: "OddModel", state: State, pick: int) -> None:
    state.losses.append(model.head(state.x).square().mean())


def again(model: "OddModel", state: State, pick: int) -> None:
    """Begins a second tower on the same words."""
    state.kept.append(state.x)
    state.x = model.embed(model.tokens.flip(1))


def mask_of_values(model: "OddModel", state: State, pick: int) -> None:
    state.masks.append(state.x.sum(-1) > -1)


def where(model: "OddModel", state: State, pick: int) -> None:
    mask = state.masks[pick % len(state.masks)]
    state.x = torch.where(mask[..., None], state.x, state.kept[pick % len(state.kept)])


def gather(model: "OddModel", state: State, pick: int) -> None:
    places = state.numbers[pick % len(state.numbers)]
    state.x = state.x + state.x.gather(1, places[..., None].expand_as(state.x))


def chosen(model: "OddModel", state: State, pick: int) -> None:
    values, places = state.x.max(-1)
    state.kept.append(values[..., None].expand_as(state.x))
    state.numbers.append(places % PLACES)


def pieces(model: "OddModel", state: State, pick: int) -> None:
    first, second, third = state.x.chunk(3, -1)
    state.kept.append(torch.cat((third, first, second), -1))
    state.x = state.x - second.repeat(1, 1, 3) * 0.1


def written_twice(model: "OddModel", state: State, pick: int) -> None:
    both = torch.stack((state.x, state.kept[pick % len(state.kept)]))
    both[0] += 1
    state.x = both[0]
    state.kept.append(both[1].relu_())


def attribute_of_shape(model: "OddModel", state: State, pick: int) -> None:
    state.x = state.x if len(state.x) > 10**6 else state.x / 1.1


AROUND: tuple[Around, ...] = (
    *(skip, stash, concatenate, write, write_kept, straight_through, target, normalise, gain, early_head, again),
    *(mask_of_values, where, gather, chosen, pieces, written_twice, attribute_of_shape),
)


class OddModel(nn.Module):
    """The model of a seed.

    Attributes:
        program: the steps: what is done and a number that picks a value for it.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        torch.manual_seed(seed)
        kinds = draw.choices(draw.sample(KINDS, 5), k=draw.randint(6, 8))
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList([kind() for kind in kinds])
        self.between, self.gain = nn.LayerNorm(WIDTH), nn.Parameter(torch.tensor(0.9))
        self.program: list[tuple[Around | int, int]] = []
        for number in range(len(kinds)):
            for _ in range(draw.choice((0, 1, 1, 2))):
                self.program.append((draw.choice(AROUND), draw.randrange(1000)))
            self.program.append((number, draw.randrange(1000)))
        self.program.append((draw.choice(AROUND), draw.randrange(1000)))
        alike = [self.blocks[n] for n, kind in enumerate(kinds) if kind not in (Wide, Frozen)]
        if draw.random() < 0.4 and len(alike) > 1:
            one, other = draw.sample(alike, 2)
            other.inner.weight = one.inner.weight
        if draw.random() < 0.3:
            self.head.weight = self.embed.weight

    @property
    def units(self) -> list[str]:
        return [f"blocks.{number}" for number, _ in enumerate(self.blocks)]

    def __str__(self) -> str:
        steps = (
            f"{type(self.blocks[step]).__name__}({pick})" if isinstance(step, int) else f"{step.__name__}({pick})"
            for step, pick in self.program
        )
        return " ".join(steps)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        self.tokens = tokens
        state = State(self.embed(tokens))
        for step, pick in self.program:
            if isinstance(step, int):
                self.blocks[step].call(state, pick)
            else:
                step(self, state, pick)
        loss = F.cross_entropy(self.head(state.x).flatten(0, 1), labels.flatten())
        for each in state.losses:
            loss = loss + each * 0.3
        return loss


def batch(seed: int, rows: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(WORDS, (rows, PLACES), generator=made) for _ in range(2))  # type: ignore[return-value]
