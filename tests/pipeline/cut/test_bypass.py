"""Values without a gradient that bypass the activation: those of one process on all stages, or a refusal."""

import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from pipeline.chains import in_parts, whole
from pool import Pool
from torch import Tensor, nn
from torch.nn import functional as F

import zeroshard as zs
from zeroshard.errors import BatchError, ModelError
from zeroshard.pipeline.cut.bypass import Bypass, SentValues
from zeroshard.pipeline.cut.chain import Chain
from zeroshard.schedule import Layout, PipelineSchedule

SCHEDULES: list[tuple[str, int, str]] = [
    ("naive", 1, "off"),
    ("gpipe", 1, "schedule"),
    ("1f1b", 1, "off"),
    ("1f1b", 1, "blocks"),
    ("interleaved", 2, "off"),
    ("interleaved", 2, "blocks"),
    ("zb-h1", 1, "off"),
    ("pipedream", 1, "off"),
    ("2bw", 1, "blocks"),
]


@dataclass(frozen=True)
class Patches:
    """What an embedding returns: all kinds of values beside the hidden states."""

    hidden: Tensor
    inside: Tensor
    ids: Tensor
    weights: Tensor
    count: int
    lengths: list[int]


class Embedding(nn.Module):
    """Values of the batch that are made here or, for comparison, around the model's blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 8) * 0.1)

    def forward(self, tokens: Tensor) -> Patches:
        return Patches(self.weight[tokens], **beside(tokens))


def beside(tokens: Tensor) -> dict[str, Any]:
    inside = tokens > 3
    lengths = inside.sum(1)
    return {
        "inside": inside,
        "ids": tokens % 3,
        "weights": torch.where(inside, 1.0, 0.5),
        "count": int(lengths.sum()),
        "lengths": lengths.tolist(),
    }


class Block(nn.Module):
    """Hands its mask on, changed."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.kinds = nn.Linear(8, 8), nn.Embedding(3, 8)

    def forward(self, hidden: Tensor, inside: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        made = torch.tanh(self.inner(hidden) + self.kinds(ids))
        return hidden + made * inside[..., None], inside | (ids == 1)


class Masked(nn.Module):
    """Reads every value in blocks, between them, in conditions and in the loss; `crosses` says where they are made."""

    def __init__(self, crosses: bool, blocks: int = 4) -> None:
        super().__init__()
        self.crosses = crosses
        self.embed = Embedding()
        self.blocks = nn.ModuleList([Block() for _ in range(blocks)])
        self.head = nn.Linear(8, 16)

    def forward(self, tokens: Tensor, labels: Tensor) -> Any:
        patches = self.embed(tokens)
        hidden = patches.hidden
        made = patches if self.crosses else Patches(hidden, **beside(tokens))
        inside = made.inside
        for number, block in enumerate(self.blocks):
            hidden, handed_on = block(hidden, inside, made.ids)
            inside = handed_on if self.crosses else inside | (made.ids == 1)
            if number == 2 and made.ids.sum() % 2 == 0:
                hidden = hidden * 1.5
        long = torch.arange(tokens.shape[1])[None] < torch.tensor(made.lengths)[:, None]
        losses = F.cross_entropy(self.head(hidden).transpose(1, 2), labels, reduction="none")
        loss = (losses * made.weights * inside * long).sum() / made.count
        return {"loss": loss, "inside": inside, "count": made.count}


def data(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(16, (4, 6), generator=generator), torch.randint(16, (4, 6), generator=generator)


def one_row(seed: int) -> tuple[Tensor, Tensor]:
    tokens, labels = data(seed)
    return tokens[:1], labels[:1]


def build(model: nn.Module, mesh: zs.Mesh, **settings: Any) -> zs.Engine:
    make = partial(torch.optim.SGD, lr=0.1)
    pipeline = {"balance": "parameters"} | settings.pop("pipeline", {})
    plan = zs.Plan(pipeline_parallel=zs.Pipeline(mesh.ranks, **pipeline), microbatches=4, **settings)
    return zs.Engine(model, make, plan, example=one_row(99), mesh=mesh)


def train(mesh: zs.Mesh, crosses: bool, schedule: str, virtual: int, recompute: str) -> tuple[Any, ...]:
    torch.manual_seed(0)
    pipeline = {"schedule": schedule, "virtual_stages": virtual}
    engine = build(Masked(crosses), mesh, recompute=recompute, pipeline=pipeline)
    losses = [engine.train_step(data(seed)).loss for seed in range(3)]
    if not engine.plan.streams:
        planned = [row for row in engine.traffic() if row.planned_elements is not None]
        assert [row for row in planned if row.planned_elements != row.measured_elements] == []
    with torch.no_grad():
        output = engine(*one_row(5))
    return losses, output, engine.state_dict()


def every_schedule(mesh: zs.Mesh) -> list[tuple[Any, Any]]:
    return [(train(mesh, True, *each), train(mesh, False, *each)) for each in SCHEDULES]


def plainly() -> tuple[list[Tensor], Any, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Masked(crosses=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for seed in range(3):
        optimizer.zero_grad()
        tokens, labels = data(seed)
        means = [model(tokens[n : n + 1], labels[n : n + 1])["loss"] / 4 for n in range(4)]
        torch.stack(means).sum().backward()
        losses.append(sum(mean.detach() for mean in means))
        optimizer.step()
    with torch.no_grad():
        return losses, model(*one_row(5)), model.state_dict()


def test_values_beside_the_activation_are_those_of_one_process(pool: Pool) -> None:
    losses, output, weights = plainly()
    answers = pool.run(every_schedule, 2)
    for each, *ranks in zip(SCHEDULES, *answers, strict=True):
        for crossing, made_from_batch in ranks:
            assert str(crossing) == str(made_from_batch), each  # losses and weights, under any schedule
            for name, value in crossing[2].items():
                assert torch.equal(value, made_from_batch[2][name]), (each, name)
            if each[0] in ("pipedream", "2bw"):
                continue
            torch.testing.assert_close(torch.stack(crossing[0]), torch.stack(losses))
            torch.testing.assert_close(crossing[1], output)
            torch.testing.assert_close(dict(crossing[2]), dict(weights))


class Unruly(nn.Module):
    """An embedding whose values beside the hidden states other stages cannot have."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.weight = nn.Parameter(torch.randn(16, 8) * 0.1)
        self.mask: Any = None

    def forward(self, tokens: Tensor) -> tuple[Tensor, Any]:
        hidden, mask = self.weight[tokens], tokens > 3
        if self.kind == "aside":
            self.mask = mask
            return hidden, None
        if self.kind == "object":
            return hidden, Holder(mask)
        if self.kind == "longer":
            return hidden, [mask] * (int(tokens[0, 0]) + 1)
        if self.kind == "wider":
            return hidden, mask[:, : int(tokens[0, 0])]
        return hidden, mask


class Holder:
    def __init__(self, mask: Tensor) -> None:
        self.mask = mask


class Reader(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed, self.kind = Unruly(kind), kind
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.head = nn.Linear(8, 16)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        hidden, mask = self.embed(tokens)
        for number, block in enumerate(self.blocks):
            hidden = block(hidden)
            if self.kind == "early" and number == 0:  # where the value crosses no boundary yet
                hidden = hidden * mask[..., None]
        mask = self.embed.mask if self.kind == "aside" else mask.mask if self.kind == "object" else mask
        mask = mask[0] if self.kind == "longer" else mask
        losses = F.cross_entropy(self.head(hidden).transpose(1, 2), labels, reduction="none")
        if self.kind in ("unread", "early") and tokens[0, 0] == 1:
            return losses.mean()
        return losses.mean() + mask.sum()


def ones(value: int) -> tuple[Tensor, Tensor]:
    return torch.full((1, 6), value), torch.ones(1, 6, dtype=torch.int64)


REFUSED: dict[str, list[str]] = {
    "aside": ["'suffix' reads a tensor that 'embed' made on an earlier stage and did not return", "Return it"],
    "object": ["'embed' returns a Holder with tensors inside", "a tuple, a dict or a dataclass"],
    "longer": ["'embed' returns 5 values and 3 in the example", "one tensor"],
    "wider": ["'embed' returns [1, 3] torch.bool", "expects [1, 1] torch.bool", "Pad it"],
    "early": ["what 'embed' returned besides the activation, which none read in the example", "example=..."],
    "unread": ["what 'embed' returned besides the activation, which none read in the example", "example=..."],
}


def pass_on(model: nn.Module) -> None:
    """Cut after one block; hand on what the first part makes of another microbatch, and run the second part."""
    chain = Chain(model, lambda: model(*ones(1)))
    chain.crossing.refuse_asides([2], [layer.name for layer in chain.layers])
    bypass, expected = Bypass(), Bypass()
    hidden = chain.run(0, 2, lambda: model(*ones(3)), bypass=bypass)
    chain.run_standing_in(2, 2, lambda: model(*ones(1)), expected)
    chain.route([0, 2, 4], PipelineSchedule("gpipe", Layout.equal(2), 1))
    for groups in chain.crossing.routes.values():
        SentValues.of(groups, expected.known).pack(bypass.known, hidden.device)
    chain.run(2, 4, lambda: model(*ones(3)), hidden.detach())


@pytest.mark.parametrize("kind", list(REFUSED))
def test_what_cannot_be_sent_is_refused_by_name(kind: str) -> None:
    with pytest.raises((ModelError, BatchError)) as error:
        pass_on(Reader(kind))
    assert [part for part in REFUSED[kind] if part not in str(error.value)] == []


def test_nothing_is_sent_for_values_that_no_later_layer_reads() -> None:
    model = Reader("unread")
    assert Chain(model, lambda: model(*ones(1))).crossing.groups == []


class Same(nn.Module):
    """Returns its result twice, and a mask with a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, hidden: Tensor) -> Any:
        made, mask = self.inner(hidden), hidden[..., 0] > 0
        return made, made, mask, mask[:1]


class ReadsFirst(nn.Module):
    """The code around the blocks reads the first of equal results, and a mask before the next block only."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Same() for _ in range(3)])

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        first, _, inside, _ = self.blocks[0](hidden)
        positive = first.sum(-1) > 0
        second, _, own, _ = self.blocks[1](first)
        third, *_ = self.blocks[2](second * own[..., None])
        return (third * (positive | (inside & mask))[..., None]).square().sum()


def test_masks_are_read_at_once_and_one_result_is_returned_several_times() -> None:
    torch.manual_seed(0)
    model, batch = ReadsFirst(), (torch.randn(5, 6, 8), torch.ones(5, 6, dtype=torch.bool))
    cut = copy.deepcopy(model)
    chain = Chain(cut, lambda: cut(torch.randn(2, 6, 8), torch.ones(2, 6, dtype=torch.bool)))
    for firsts in ([0, 2], [0, 3], [0, 2, 3]):
        loss, gradients = in_parts(chain, batch, cut, firsts)
        expected = whole(model, batch)
        torch.testing.assert_close(loss, expected[0])
        torch.testing.assert_close(gradients, expected[1])
