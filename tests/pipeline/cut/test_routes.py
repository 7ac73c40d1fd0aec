"""Values without a gradient go from one stage that reads them to the next, and never through one that does not."""

import copy
import unittest.mock
from collections import Counter
from typing import Any

import pytest
import torch
from engine.models import OPTIMIZERS
from nccl_rules import judge, recording
from pipeline.chains import in_parts, on_stages, whole
from plain_loop import PlainRun, follows_plain_loop, plain_loop
from pool import Pool
from torch import Tensor, nn
from torch.nn import functional as F

import zeroshard as zs
from zeroshard.comm.collectives import Comm, Purpose
from zeroshard.errors import BatchError, ModelError
from zeroshard.pipeline.cut.chain import Chain
from zeroshard.pipeline.stage import Stage
from zeroshard.schedule import Kind, Layout, PipelineSchedule
from zeroshard.schedule.lower import Skip

BLOCKS, MICROBATCHES, STEPS, BYTES = 6, 3, 2, 48  # of one row of six integers

Hop = tuple[int, int]  # the ranks that send and get a message


class Embed(nn.Module):
    """Returns integers of the batch beside the hidden states: those that count, and kinds of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(16, 8) * 0.1)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.table[tokens], (tokens > 3).long(), tokens % 3


class Block(nn.Module):
    """Adds an embedding of the kinds, if it gets them."""

    def __init__(self, kinds: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        if kinds:
            self.kinds = nn.Embedding(3, 8)

    def forward(self, hidden: Tensor, kinds: Tensor | None = None) -> Tensor:
        made: Tensor = hidden + self.inner(hidden).tanh()
        return made if kinds is None else made + self.kinds(kinds)


class Late(nn.Module):
    """The kinds are read by the blocks of `readers`, and what counts by the loss alone."""

    def __init__(self, readers: tuple[int, ...] = (1, 5)) -> None:
        super().__init__()
        self.embed, self.readers = Embed(), readers
        self.blocks = nn.ModuleList([Block(number in readers) for number in range(BLOCKS)])
        self.head = nn.Linear(8, 16)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        hidden, counts, kinds = self.embed(tokens)
        for number, block in enumerate(self.blocks):
            hidden = block(hidden, kinds) if number in self.readers else block(hidden)
        losses = F.cross_entropy(self.head(hidden).transpose(1, 2), labels, reduction="none")
        return (losses * counts).mean()


class LateWithSkip(Late):
    """The output of the first block goes to the loss too, with its gradient."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        hidden, counts, kinds = self.embed(tokens)
        first = hidden = self.blocks[0](hidden)
        for number, block in enumerate(self.blocks[1:], 1):
            hidden = block(hidden, kinds) if number in self.readers else block(hidden)
        losses = F.cross_entropy(self.head(hidden + first).transpose(1, 2), labels, reduction="none")
        return (losses * counts).mean()


def batch(seed: int, rows: int = MICROBATCHES) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(16, (rows, 6), generator=generator), torch.randint(16, (rows, 6), generator=generator)


def starts(*blocks: int) -> tuple[str, ...]:
    return tuple(f"blocks.{number}" for number in blocks)


# Stages, the plan, and the messages of values without a gradient of one microbatch: bytes by the ranks of both ends.
# The last pair is the way on which the gradient of a skip comes back.
CASES: dict[str, tuple[int, dict[str, Any], dict[Hop, int], Hop]] = {
    "gpipe": (3, {"schedule": "gpipe", "split": starts(2, 4)}, {(0, 2): 2 * BYTES}, (2, 0)),
    "1f1b": (4, {"schedule": "1f1b", "split": starts(1, 3, 5)}, {(0, 1): BYTES, (0, 3): BYTES, (1, 3): BYTES}, (3, 1)),
    "interleaved": (
        3,
        {"schedule": "interleaved", "virtual_stages": 2, "split": starts(1, 2, 3, 4, 5)},
        {(0, 1): BYTES, (0, 2): BYTES, (1, 2): BYTES},
        (2, 1),
    ),
    "zb-h1": (3, {"schedule": "zb-h1", "split": starts(2, 4)}, {(0, 2): 2 * BYTES}, (2, 0)),
    "pipedream": (3, {"schedule": "pipedream", "split": starts(2, 4)}, {(0, 2): 2 * BYTES}, (2, 0)),
}


def engine_of(kind: type[Late], name: str, mesh: zs.Mesh) -> zs.Engine:
    torch.manual_seed(0)
    _, pipeline, _, _ = CASES[name]
    plan = zs.Plan(
        pipeline_parallel=zs.Pipeline(mesh.ranks, **pipeline),
        microbatches=MICROBATCHES,
        recompute="blocks" if name == "gpipe" else "off",
    )
    return zs.Engine(kind(), OPTIMIZERS["sgd"], plan, example=batch(99, 1), mesh=mesh)


def train(mesh: zs.Mesh, kind: type[Late], name: str) -> dict[str, Any]:
    """Losses, weights, an evaluation, and the messages of bytes that this rank sends and gets, counted in `Comm`."""
    sent, got = Counter[Hop](), Counter[Hop]()
    send, receive = Comm.send, Comm.receive

    def count_sent(comm: Comm, tensor: Tensor, peer: int, purpose: Purpose, label: str) -> Any:
        if tensor.dtype is torch.uint8:
            sent[mesh.rank, peer] += tensor.nbytes
        return send(comm, tensor, peer, purpose, label)

    def count_got(comm: Comm, into: Tensor, peer: int, purpose: Purpose, label: str) -> Any:
        if into.dtype is torch.uint8:
            got[peer, mesh.rank] += into.nbytes
        return receive(comm, into, peer, purpose, label)

    engine = engine_of(kind, name, mesh)
    patched = unittest.mock.patch.multiple(Comm, send=count_sent, receive=count_got)
    with patched:
        losses = [float(engine.train_step(batch(step)).loss or 0) for step in range(STEPS)]
        engine.flush()
    planned = [row for row in engine.traffic() if row.planned_elements is not None]
    with torch.no_grad():
        output = float(engine(*batch(7, 1)))
    assert engine.pipeline is not None
    back = [action for action in engine.pipeline.step(mesh.rank) if action.kind is Kind.SEND_BACKWARD]
    return {
        "losses": losses,
        "weights": engine.state_dict(),
        "output": output,
        "sent": sent,
        "got": got,
        "unplanned": [row for row in planned if row.planned_elements != row.measured_elements],
        "back": {(mesh.rank, action.peer) for action in back},
    }


def plainly(kind: type[Late]) -> PlainRun:
    torch.manual_seed(0)
    steps = [
        list(zip(tokens.split(1), labels.split(1), strict=True)) for tokens, labels in (batch(s) for s in range(STEPS))
    ]
    return plain_loop(kind(), OPTIMIZERS["sgd"], steps, lambda model, part: model(*part))


@pytest.mark.parametrize("kind", [Late, LateWithSkip])
@pytest.mark.parametrize("name", CASES)
def test_stages_that_do_not_read_a_value_do_not_get_it(pool: Pool, kind: type[Late], name: str) -> None:
    stages, _, messages, skip = CASES[name]
    answers = pool.run(train, stages, kind, name)
    expected = {hop: nbytes * MICROBATCHES * STEPS for hop, nbytes in messages.items()}
    assert sum((each["sent"] for each in answers), Counter()) == expected
    assert sum((each["got"] for each in answers), Counter()) == expected
    back = {(rank, rank - 1) for rank in range(1, stages)}
    back |= {(0, stages - 1)} if name == "interleaved" else set()
    back |= {skip} if kind is LateWithSkip else set()
    assert set().union(*(each["back"] for each in answers)) == back
    if name == "pipedream":
        return
    assert [each["unplanned"] for each in answers] == [[]] * stages
    wanted = plainly(kind)
    follows_plain_loop([(each["losses"], each["weights"]) for each in answers], wanted)
    model = kind()
    model.load_state_dict(wanted.weights)
    expected_output = model(*batch(7, 1)).item()
    assert [each["output"] for each in answers] == pytest.approx([expected_output] * stages, rel=1e-5)


def recorded(mesh: zs.Mesh, name: str) -> Any:
    with recording(mesh) as (own, recorder):
        train(own, Late, name)
        return recorder.close()


@pytest.mark.parametrize("name", ["1f1b", "interleaved"])
def test_nccl_would_take_values_that_pass_over_stages(pool: Pool, name: str) -> None:
    assert judge(pool.run(recorded, CASES[name][0], name)) == []


class HandsOn(Block):
    """Returns the kinds as they came, or changed."""

    changes = False

    def forward(self, hidden: Tensor, kinds: Tensor) -> Any:
        return super().forward(hidden, kinds if hasattr(self, "kinds") else None), (
            kinds + 1
        ) % 3 if self.changes else kinds


class Handing(Late):
    """Each block takes the kinds and returns them, and the last one reads them."""

    def __init__(self) -> None:
        super().__init__((5,))
        self.blocks = nn.ModuleList([HandsOn(number == 5) for number in range(BLOCKS)])

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        hidden, counts, kinds = self.embed(tokens)
        for block in self.blocks:
            hidden, kinds = block(hidden, kinds)
        losses = F.cross_entropy(self.head(hidden).transpose(1, 2), labels, reduction="none")
        return (losses * counts).mean()


def named(chain: Chain) -> dict[Skip, list[tuple[int, ...]]]:
    """The values in each message, as leaves of what modules return."""
    routes = chain.crossing.routes
    return {hop: [tuple(source.leaf for source in group) for group in groups] for hop, groups in routes.items()}


def test_a_module_that_returns_a_value_as_it_came_has_it() -> None:
    """Every boundary has the kinds once, under as many names as blocks have returned them."""
    model = Handing()
    chain = Chain(model, lambda: model(*batch(1, 1)))
    chain.route([0, 3, 5, 8], PipelineSchedule("gpipe", Layout.equal(3), 1))
    assert named(chain) == {Skip(0, 1): [(1, 1, 2)], Skip(1, 2): [(1, 1, 1, 1, 2)], Skip(0, 2): [(1,)]}


def test_one_value_that_came_in_two_messages_goes_on_in_one() -> None:
    """Six chunks on three stages: what chunk 0 made stays on its stage for chunk 3, which gets later names too."""
    torch.manual_seed(0)
    model = Handing()
    cut = copy.deepcopy(model)
    chain = Chain(cut, lambda: cut(*batch(1, 1)))
    found = in_parts(chain, batch(2), cut, [0, 2, 3, 4, 5, 6], stages=3)
    torch.testing.assert_close(found, whole(model, batch(2)))
    groups = named(chain)
    assert groups[Skip(0, 3)] == [(1, 2)] and groups[Skip(2, 3)] == [(1, 1)]
    assert all(len(found) == 1 for hop, found in groups.items() if hop.target == hop.source + 1)


def test_a_block_that_returns_another_value_than_in_the_example_is_refused() -> None:
    model = Handing()
    chain = Chain(model, lambda: model(*batch(1, 1)))
    with unittest.mock.patch.object(HandsOn, "changes", True), pytest.raises(BatchError, match="must be alike"):
        in_parts(chain, batch(2), model, [0, 3, 5])


class Shapes(Late):
    """Code after the third block asks for shape, dtype and device of the kinds, or reads them in later microbatches."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.reads = reads

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        hidden, counts, kinds = self.embed(tokens)
        for number, block in enumerate(self.blocks):
            hidden = block(hidden, kinds) if number in self.readers else block(hidden)
            if number == 2:
                ones = torch.ones_like(kinds) + kinds.new_zeros(()) + torch.zeros(6, dtype=torch.int64).expand_as(kinds)
                hidden = hidden * (kinds.to(kinds.device) if self.reads and len(tokens) > 1 else ones)[..., None]
                kinds = kinds.to(kinds.device, torch.int64).contiguous()
        losses = F.cross_entropy(self.head(hidden).transpose(1, 2), labels, reduction="none")
        return (losses * counts).mean()


@pytest.mark.parametrize("reads", [False, True])
def test_a_stage_without_a_value_knows_its_shape_and_refuses_to_read_it(reads: bool) -> None:
    torch.manual_seed(0)
    model = Shapes(reads)
    if reads:
        with pytest.raises(ModelError, match="what 'embed' returned besides the activation, which none read"):
            on_stages(model, batch(1, 1), batch(2), [0, 3, 5])
        return
    torch.testing.assert_close(on_stages(model, batch(1, 1), batch(2), [0, 3, 5]), whole(model, batch(2)))


class Counted(Late):
    """The loss is divided by a number that follows from the values of what counts, and from no other result of them."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        hidden, counts, _ = self.embed(tokens)
        keep = counts > 0
        found = {
            "index": lambda: len(hidden[keep]),
            "select": lambda: len(hidden.masked_select(keep[..., None])),
            "nonzero": lambda: len(keep.nonzero()),
            "equal": lambda: 2 if torch.equal(keep, torch.ones_like(keep)) else 3,
            "item": lambda: keep.sum().item(),
        }[self.way]()
        for block in self.blocks:
            hidden = block(hidden)
        loss: Tensor = self.head(hidden).square().sum()
        return loss / (found + 1)


@pytest.mark.parametrize("way", ["index", "select", "nonzero", "equal", "item"])
def test_values_that_decide_shapes_or_conditions_go_to_all_later_stages(way: str) -> None:
    torch.manual_seed(0)
    model = Counted(way)
    cut = copy.deepcopy(model)
    chain = Chain(cut, lambda: cut(*batch(1, 1)))
    torch.testing.assert_close(in_parts(chain, batch(2), cut, [0, 3, 5]), whole(model, batch(2)))
    assert named(chain) == {Skip(0, 1): [(1,)], Skip(1, 2): [(1,)]}


def test_an_index_of_numbers_decides_no_shape() -> None:
    class Indexed(Late):
        def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
            hidden, _, kinds = self.embed(tokens)
            hidden = hidden * torch.arange(3.0)[kinds][..., None]
            for block in self.blocks:
                hidden = block(hidden)
            return self.head(hidden).square().mean()

    model = Indexed()
    assert Chain(model, lambda: model(*batch(1, 1))).crossing.groups == []


def one_microbatch(mesh: zs.Mesh, kind: type[Late]) -> tuple[list[Skip], list[Skip]]:
    """The messages of values without a gradient, and those that pass over stages; raises if the schedule blocks."""
    torch.manual_seed(0)
    plan = zs.Plan(pipeline_parallel=zs.Pipeline(mesh.ranks, schedule="pipedream", split=starts(2, 4)), microbatches=1)
    engine = zs.Engine(kind(), OPTIMIZERS["sgd"], plan, example=batch(99, 1), mesh=mesh)
    for step in range(STEPS):
        engine.train_step(batch(step, 1))
    engine.flush()
    assert engine.pipeline is not None and isinstance(engine._stage, Stage)
    return sorted(engine._stage.chain.crossing.routes), [*engine.pipeline.skips]


@pytest.mark.parametrize("kind", [Late, LateWithSkip])
def test_a_stream_of_one_microbatch_passes_values_on(pool: Pool, kind: type[Late]) -> None:
    """A message over a stage would block: its receive is posted in the step of its microbatch."""
    assert pool.run(one_microbatch, 3, kind) == [([Skip(0, 1), Skip(1, 2)], [])] * 3
