"""Models with several tensors between blocks: the parts together are the model, wherever it is cut."""

import copy
import gc
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.models import OPTIMIZERS, Plain, batch, build
from nccl_rules import Record, judge, recording
from pipeline.chains import Outcome, Run, call, in_parts, on_stages, whole
from plain_loop import PlainRun, follows_plain_loop, plain_loop
from pool import Pool
from selection import by_default
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

import zeroshard as zs
from zeroshard.errors import BatchError, CommError, ModelError
from zeroshard.pipeline.cut.carried import Carried
from zeroshard.pipeline.cut.chain import Chain
from zeroshard.pipeline.cut.origins import ReturnedValue


def tokens(rows: int) -> tuple[Tensor, int]:
    return batch(rows, 0, 1, rows), 0


def equal(one: Outcome, other: Outcome) -> None:
    torch.testing.assert_close(one[0], other[0])
    assert one[1].keys() == other[1].keys()
    torch.testing.assert_close(one[1], other[1], rtol=1e-5, atol=1e-6)


def check_all_cuts(model: nn.Module, examples: tuple[Any, Any], run: Run = call) -> Chain:
    """Every boundary alone, and all at once, in one process and on stages with the weights of their layers alone."""
    example, other = examples
    cut = copy.deepcopy(model)
    chain = Chain(cut, lambda: run(cut, example))
    expected = whole(model, other, run)
    layers = len(chain.layers)
    for firsts in [*([0, first] for first in range(1, layers - 1)), list(range(layers - 1))]:
        equal(in_parts(chain, other, cut, firsts, run), expected)
        equal(on_stages(model, example, other, firsts, run), expected)
    return chain


class Skip(Plain):
    """A skip connection around a block."""

    def body(self, x: Tensor, step: int) -> Tensor:
        return self.blocks[2](x + self.blocks[1](self.blocks[0](x)))


class AroundEach(Plain):
    """The residual of each block is outside of it, the last one's too, in place."""

    def body(self, x: Tensor, step: int) -> Tensor:
        x = x * 2
        for block in self.blocks:
            y = block(x) * 1.5
            y += x
            x = y
        return x


class Pair(nn.Module):
    """Returns two tensors, nested."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.side = nn.Linear(10, 10), nn.Linear(10, 3)

    def forward(self, x: Tensor, side: Tensor | None = None) -> dict[str, Any]:
        x = self.inner(x).tanh()
        return {"x": x, "more": (self.side(x) if side is None else self.side(x) * side, x)}


class Nested(Plain):
    """Dictionaries with tuples between the blocks; the loss reads one tensor of each."""

    def __init__(self) -> None:
        super().__init__(0)
        self.blocks = nn.ModuleList([Pair() for _ in range(3)])

    def forward(self, tokens: Tensor, step: int = 0) -> Tensor:
        x, side, sides = self.embed(tokens), None, []
        for block in self.blocks:
            made = block(x, side=side)
            x, side = made["x"], made["more"][0]
            sides.append(side)
        loss: Tensor = self.head(x).square().mean() + torch.stack(sides).square().sum()
        return loss


class Far(Plain):
    """The embedding goes to the loss, and a table made with parameters to every block, as in T5."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 10)

    def forward(self, tokens: Tensor, step: int = 0) -> Tensor:
        x = first = self.embed(tokens)
        table = self.table(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x + table)
        return (self.head(x) - self.head(first)).square().mean()


def tied_far() -> nn.Module:
    model = Far()
    model.head.weight = model.embed.weight
    return model


class Tap(Plain):
    """The loss takes in a weight of the first block, and its output."""

    def body(self, x: Tensor, step: int) -> Tensor:
        first = self.blocks[0](x)
        return self.blocks[2](self.blocks[1](first)) * self.blocks[0].up.weight.square().mean() + first


class UNet(nn.Module):
    """Skips in the order of a stack, over tensors of other shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Conv2d(a, b, 3, 2, 1) for a, b in ((3, 4), (4, 6), (6, 8))])
        self.up = nn.ModuleList([nn.ConvTranspose2d(a, b, 4, 2, 1) for a, b in ((8, 6), (12, 4), (8, 3))])

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for down in self.down:
            x = F.silu(down(x))
            skips.append(x)
        skips.pop()
        for up in self.up:
            x = up(x)
            x = torch.cat((x, skips.pop()), 1) if skips else x
        return x.square().mean()


class EncoderDecoder(nn.Module):
    """The encoder's output, normed, enters each block of the decoder; both share an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 8)
        self.encoder = nn.ModuleList([nn.TransformerEncoderLayer(8, 2, 12, 0.1, batch_first=True) for _ in range(2)])
        self.norm = nn.LayerNorm(8)
        self.decoder = nn.ModuleList([nn.TransformerDecoderLayer(8, 2, 12, 0.1, batch_first=True) for _ in range(2)])
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, tokens: Tensor, step: int = 0) -> Tensor:
        memory = self.embed(tokens)
        for block in self.encoder:
            memory = block(memory)
        memory = self.norm(memory) * self.scale
        x = self.embed(tokens.flip(1))
        for block in self.decoder:
            x = block(x, memory)
        return F.cross_entropy((x @ self.embed(torch.arange(13)).T).flatten(0, 1), tokens.flatten())


class Towers(nn.Module):
    """Two towers and a contrastive loss with a parameter of the model's own, as in CLIP."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.other = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.temperature = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        one, other = x, x.flip(1)
        for block in self.one:
            one = block(one).relu()
        for block in self.other:
            other = block(other).relu()
        logits = F.normalize(one, dim=-1) @ F.normalize(other, dim=-1).T * self.temperature.exp()
        return F.cross_entropy(logits, torch.arange(len(x))) + F.cross_entropy(logits.T, torch.arange(len(x)))


class Written(Plain):
    """Code around the blocks writes into rows and slices of their outputs."""

    def body(self, x: Tensor, step: int) -> Tensor:
        kept = torch.zeros_like(x)
        for number, block in enumerate(self.blocks):
            x = block(x)
            kept[:, number] = x[:, 0]
            x = x.clone()
            x[:, 1] *= 0.5
        return x + kept


class Routed(nn.Module):
    """A block whose router's logits leave by a hook, as transformers takes them out."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.inner = nn.Linear(10, 4), nn.Linear(10, 10)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.inner(x) * self.router(x).softmax(-1).amax(-1, keepdim=True)
        return y


class Dispatching(Routed):
    """Asks which tokens go where, which the meta device does not know."""

    def forward(self, x: Tensor) -> Tensor:
        y, chosen = super().forward(x), self.router.weight.sum() > 0
        return y + chosen.nonzero().sum()


class RouterLoss(Plain):
    kind = Routed

    def __init__(self) -> None:
        super().__init__(0)
        self.blocks = nn.ModuleList([self.kind() for _ in range(3)])
        self.logits: list[Tensor] = []
        for block in self.blocks:
            block.router.register_forward_hook(self._take)

    def __deepcopy__(self, memo: Any) -> "RouterLoss":
        new = type(self)()
        new.load_state_dict(self.state_dict())
        return new

    def _take(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.logits.append(output)

    def forward(self, tokens: Tensor, step: int = 0) -> Tensor:
        self.logits.clear()
        loss = super().forward(tokens, step)
        logits = torch.cat([each.flatten(0, -2) for each in self.logits])
        chosen = F.one_hot(logits.argmax(-1), 4).float().mean(0)
        self.logits.clear()
        return loss + (logits.softmax(-1).mean(0) * chosen).sum()


class DispatchedLoss(RouterLoss):
    kind = Dispatching


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


class Stash(nn.Module):
    """Every other one returns a skip, the others None; with an autograd function of its own, and writes in place."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.inner, self.number = nn.Linear(10, 10), number

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        x = Doubled.apply(self.inner(x))  # type: ignore[no-untyped-call]
        skip = x + 1 if self.number % 2 == 0 else None
        return x.tanh_(), skip


class Sometimes(Plain):
    """A skip to a block after the next, as torchgpipe's tests have it: stashed, and None where there is none."""

    def __init__(self) -> None:
        super().__init__(0)
        self.blocks = nn.ModuleList([Stash(number) for number in range(4)])

    def body(self, x: Tensor, step: int) -> Tensor:
        x, first = self.blocks[0](x)
        x, none = self.blocks[1](x)
        x, third = self.blocks[2](x)
        assert first is not None and none is None and third is not None
        x, none = self.blocks[3](x + first)
        return x * third


class Supervised(Plain):
    """A head and a loss after each block (deep supervision), and one that predicts two tokens ahead."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(10, 13) for _ in self.blocks])

    def forward(self, tokens: Tensor, step: int = 0) -> Tensor:
        x, losses = self.embed(tokens), []
        for ahead, (block, head) in enumerate(zip(self.blocks, self.heads, strict=True)):
            x = block(x)
            losses.append(F.cross_entropy(head(x)[:, : 3 - ahead].flatten(0, 1), tokens[:, ahead:3].flatten()))
        return torch.stack(losses).sum() + self.head(x).square().mean()


@dataclass
class Found:
    x: Tensor
    side: Tensor
    nothing: None = None


class Finds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.side = nn.Linear(10, 10), nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Found:
        y = self.inner(x).tanh()
        return Found(y, self.side(x))


class Dataclasses(Plain):
    """Blocks return dataclasses, whose tensors go on to the end."""

    def __init__(self) -> None:
        super().__init__(0)
        self.blocks = nn.ModuleList([Finds() for _ in range(4)])

    def body(self, x: Tensor, step: int) -> Tensor:
        first = self.blocks[0](x)
        second = self.blocks[1](first.x)
        third = self.blocks[2](second.x)
        return self.blocks[3](third.x + second.x).x + first.side.sum() + third.side.mean()


def images(rows: int) -> tuple[Tensor]:
    return (torch.randn(rows, 3, 16, 16),)


def vectors(rows: int) -> tuple[Tensor]:
    return (torch.randn(rows, 8),)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any]]] = {
    "skip": (Skip, tokens),
    "around-each": (AroundEach, tokens),
    "nested": (Nested, tokens),
    "far": (Far, tokens),
    "tap": (Tap, tokens),
    "tied-far": (tied_far, tokens),
    "u-net": (UNet, images),
    "encoder-decoder": (EncoderDecoder, tokens),
    "towers": (Towers, vectors),
    "written": (Written, tokens),
    "router-loss": (RouterLoss, tokens),
    "sometimes": (Sometimes, tokens),
    "supervised": (Supervised, tokens),
    "dataclasses": (Dataclasses, tokens),
    "twice": (lambda: build("Twice"), tokens),
    "checkpointed": (lambda: build("Checkpointed"), tokens),
}


@pytest.mark.parametrize("name", MODELS)
def test_parts_of_models_with_several_tensors_between_blocks(name: str) -> None:
    kind, data = MODELS[name]
    torch.manual_seed(1)
    chain = check_all_cuts(kind(), (data(2), data(3)))
    assert chain.carried.needed


def test_results_taken_out_of_blocks_that_need_values() -> None:
    """Their shapes are those of the example."""
    assert check_all_cuts(DispatchedLoss(), (tokens(2), tokens(2))).carried.needed


class InDict(nn.Module):
    """As nanoGPT has it: embeddings, blocks and a norm in one ModuleDict, and an output layer with tied weights."""

    def __init__(self) -> None:
        super().__init__()
        layers = nn.ModuleList([nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True) for _ in range(3)])
        made = {"wte": nn.Embedding(13, 8), "wpe": nn.Embedding(6, 8), "h": layers, "ln_f": nn.LayerNorm(8)}
        self.transformer, self.lm_head = nn.ModuleDict(made), nn.Linear(8, 13, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, tokens: Tensor, step: int = 0) -> Tensor:
        x = self.transformer.wte(tokens) + self.transformer.wpe(torch.arange(tokens.shape[1]))
        for block in self.transformer.h:
            x = block(x)
        return F.cross_entropy(self.lm_head(self.transformer.ln_f(x)).flatten(0, 1), tokens.flatten())


def test_embeddings_beside_a_list_of_blocks_are_no_blocks() -> None:
    chain = check_all_cuts(InDict(), (tokens(2), tokens(3)))
    assert [layer.name for layer in chain.layers[1:-1]] == [f"transformer.h.{number}" for number in range(3)]


class Kept(nn.Module):
    """A block that keeps a tensor as an attribute, which a later block reads."""

    def __init__(self, earlier: "Kept | None" = None) -> None:
        super().__init__()
        self.inner = nn.Linear(10, 10)
        self.found = [] if earlier is None else earlier.found

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        self.found.append(x * 2)
        return x + sum(self.found[:-1])


class Attribute(Plain):
    def __init__(self) -> None:
        super().__init__(0)
        blocks = [Kept()]
        blocks += [Kept(blocks[0]) for _ in range(2)]
        self.blocks = nn.ModuleList(blocks)

    def forward(self, tokens: Tensor, step: int = 0) -> Tensor:
        self.blocks[0].found.clear()
        x = self.embed(tokens)
        loss: Tensor = (self.head(self.body(x, step)) - self.head(x)).square().mean()
        return loss


class Unseen(Skip):
    """A function of autograd's own around the blocks, in a model with a skip."""

    def body(self, x: Tensor, step: int) -> Tensor:
        return super().body(Doubled.apply(x), step)  # type: ignore[no-untyped-call]


REFUSED: list[tuple[type[nn.Module], str]] = [
    (Attribute, "'blocks.1' uses something made with 'blocks.0.inner.weight' that does not come through the layers"),
    (Unseen, "'blocks.1' reads a tensor of shape [2, 5, 10] that was made with parameters by code which torch's "
     "functions do not show"),
]  # fmt: skip


@pytest.mark.parametrize("kind, said", REFUSED)
def test_values_that_no_message_brings_are_refused(kind: type[nn.Module], said: str) -> None:
    model = kind()
    with pytest.raises(ModelError) as refused:
        Chain(model, lambda: model(*tokens(2)))
    assert said in str(refused.value)


class Twins(nn.Module):
    """Returns its result twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(10, 10)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.inner(x).tanh()
        return x, x


class Repeated(Plain):
    def __init__(self) -> None:
        super().__init__(0)
        self.blocks = nn.ModuleList([Twins() for _ in range(3)])

    def body(self, x: Tensor, step: int) -> Tensor:
        kept = []
        for block in self.blocks:
            x, again = block(x)
            kept.append(again)
        return x + sum(kept)


def test_a_tensor_that_is_returned_twice_is_sent_once() -> None:
    model = Repeated()
    chain = check_all_cuts(model, (tokens(2), tokens(3)))
    assert [len(chain.carried.at(layer)) for layer in range(1, 5)] == [1, 1, 2, 3]


STEPS = 2
SETTINGS: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "gpipe": {"pipeline_parallel.schedule": "gpipe", "recompute": "blocks"},
    "interleaved": {"pipeline_parallel.schedule": "interleaved", "pipeline_parallel.virtual_stages": 2},
    "zb-h1": {"pipeline_parallel.schedule": "zb-h1"},
    "naive": {"pipeline_parallel.schedule": "naive"},
}


def data_of(name: str, seed: int, rows: int) -> Any:
    torch.manual_seed(seed)
    return MODELS[name][1](rows)


def halves(given: Any) -> list[Any]:
    first, *rest = given
    return [(part, *rest) for part in first.tensor_split(2)]


def plainly(name: str) -> PlainRun:
    torch.manual_seed(1)
    model = without_dropout(MODELS[name][0]())
    parts = [halves(data_of(name, step, 4)) for step in range(STEPS)]
    return plain_loop(model, OPTIMIZERS["sgd"], parts, lambda model, part: model(*part))


def without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, (nn.Dropout, nn.MultiheadAttention)):
            setattr(module, "p" if isinstance(module, nn.Dropout) else "dropout", 0.0)
    return model


def train(mesh: zs.Mesh, name: str, stages: int, settings: dict[str, Any]) -> tuple[list[float], dict[str, Any], float]:
    torch.manual_seed(1)
    chosen = {"pipeline_parallel": stages, "pipeline_parallel.balance": "parameters", "microbatches": 2} | settings
    model, example = without_dropout(MODELS[name][0]()), data_of(name, 9, 2)
    engine = zs.Engine(model, OPTIMIZERS["sgd"], zs.Plan.from_dict(chosen), mesh=mesh, example=example)
    losses = [float(engine.train_step(data_of(name, step, 4)).loss) for step in range(STEPS)]
    planned = [row for row in engine.traffic() if row.planned_elements is not None]
    assert [row for row in planned if row.planned_elements != row.measured_elements] == []
    with torch.no_grad():
        output = engine(*data_of(name, 7, 2))
    return losses, engine.state_dict(), float(output)


def all_models(mesh: zs.Mesh, settings: dict[str, Any], names: list[str]) -> dict[str, Any]:
    return {name: train(mesh, name, mesh.ranks, settings) for name in names}


@pytest.mark.parametrize("setting", SETTINGS)
def test_stages_train_as_in_one_process(pool: Pool, setting: str) -> None:
    """Losses, weights and evaluations of every model; `gpipe` recomputes its chunks."""
    names = [*MODELS] if setting != "interleaved" else ["u-net", "encoder-decoder", "towers", "twice"]
    answers = pool.run(all_models, 2, SETTINGS[setting], names)
    for name in names:
        wanted = plainly(name)
        follows_plain_loop([each[name][:2] for each in answers], wanted)
        model = MODELS[name][0]()
        model.load_state_dict(wanted.weights)
        expected = without_dropout(model)(*data_of(name, 7, 2)).item()
        assert [each[name][2] for each in answers] == pytest.approx([expected] * 2, rel=1e-5)


@pytest.mark.parametrize("stages, chunks", [(2, 4), (3, 3), (3, 6), (4, 8)])
def test_each_stage_gets_a_value_once(stages: int, chunks: int) -> None:
    """Of every set of readers: each has the value from a chunk that has it, over as few messages as can be."""
    key = ReturnedValue("block", 0, 0)
    for own in range(chunks):
        for readers in (r for n in range(1, 5) for r in itertools.combinations(range(own + 1, chunks), n)):
            carried = Carried({key: (own, readers)}, needed=True)
            far = carried.route(range(chunks + 1), stages)
            hops = {
                (source, target) for target, sources in carried.into.items() for source in sources if sources[source]
            }
            if not carried.into:  # it goes to the next chunks alone
                assert readers == tuple(range(own + 1, own + 1 + len(readers)))
                continue
            holds = {own}
            for source, target in sorted(hops, key=lambda hop: hop[1]):
                assert source in holds and target not in holds
                holds.add(target)
            assert holds >= {*readers}
            sent = [(a, b) for a, b in hops if (b - a) % stages]
            assert len(sent) == len({reader % stages for reader in readers} - {own % stages})
            assert all(b - a < stages for a, b in sent)
            assert far == sorted(hop for hop in sent if hop[1] > hop[0] + 1)


@pytest.mark.parametrize("ranks, setting", [(4, "1f1b"), (3, "interleaved"), (3, "gpipe"), (4, "zb-h1"), (3, "naive")])
def test_values_pass_over_stages(pool: Pool, ranks: int, setting: str) -> None:
    """Losses, weights and evaluations where values go from a stage to a distant one; three stages of two chunks too."""
    names = [
        name for name in ("u-net", "far", "sometimes", "supervised") if setting != "interleaved" or name == "u-net"
    ]
    names = [name for name in names if ranks < 4 or name in ("u-net", "sometimes")]
    more = {"microbatches": 3} if setting == "interleaved" else {}
    answers = pool.run(all_models, ranks, SETTINGS[setting] | more, names)
    for name in names:
        follows_plain_loop([each[name][:2] for each in answers], plainly(name))


def recorded(mesh: zs.Mesh, stages: int, settings: dict[str, Any]) -> Record:
    with recording(mesh) as (own, recorder):
        train(own, "u-net", stages, settings)
        return recorder.close()


@pytest.mark.parametrize("ranks, setting", [(4, "1f1b"), (3, "interleaved")])
def test_nccl_would_take_messages_that_pass_over_stages(pool: Pool, ranks: int, setting: str) -> None:
    more = {"microbatches": 3} if setting == "interleaved" else {"microbatches": 4}
    assert judge(pool.run(recorded, ranks, ranks, SETTINGS[setting] | more)) == []


class Unlike(Plain):
    """Takes another way in every other step."""

    def __init__(self) -> None:
        super().__init__(4)

    def body(self, x: Tensor, step: int) -> Tensor:
        first = self.blocks[0](x)
        x = self.blocks[2](self.blocks[1](first))
        x = x + first if step % 2 else x
        return self.blocks[3](x) + first


def other_ways(mesh: zs.Mesh, steps: list[int]) -> str:
    """The error of examples with other steps on each rank, or else of training with one step."""
    plan = zs.Plan(microbatches=2, pipeline_parallel=zs.Pipeline(3, split=("blocks.2", "blocks.3")))
    try:
        engine = zs.Engine(Unlike(), OPTIMIZERS["sgd"], plan, mesh=mesh, example=(tokens(2)[0], steps[mesh.rank]))
        engine.train_step((tokens(4)[0], 1))
    except (ModelError, BatchError, CommError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_ranks_whose_examples_take_other_ways_are_refused_at_once(pool: Pool) -> None:
    for said in pool.run(other_ways, 3, [0, 0, 1]):
        assert "ModelError: The forwards of the example differ between ranks. From layer to layer rank 0 hands" in said
        assert "rank 2, result 0 of call 0 of 'add after 3 blocks' in layer 3" in said


def test_values_that_no_layer_read_in_the_example_are_refused() -> None:
    model = Unlike()
    chain = Chain(model, lambda: model(tokens(2)[0], 0))
    assert chain.carried.route([0, 3, 4, 6], 3) == [(0, 2)]
    hidden = chain.run(0, 3, lambda: model(tokens(2)[0], 0))
    assert len(hidden) == 2 * 2 * 5 * 10  # for the next chunk, and for the last
    said = r"after 3 blocks reads the result of 'blocks\.0', which it does not read in the example"
    with pytest.raises(BatchError, match=said):
        chain.run(3, 4, lambda: model(tokens(2)[0], 1), hidden[:100])
    chain.run(3, 4, lambda: model(tokens(2)[0], 0), hidden[:100])


class Outside(nn.Module):
    """Layers with their residuals outside of the blocks, or inside."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 10)
        self.blocks = nn.ModuleList([Residual(inside) for _ in range(4)])
        self.inside = inside

    def forward(self, tokens: Tensor, step: int = 0) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x) if self.inside else x + block(x)
        return x.square().mean()


class Residual(nn.Module):
    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.inner, self.inside = nn.Linear(10, 10), inside

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x).tanh()
        return x + y if self.inside else y


CONTINUED: list[tuple[int, dict[str, Any]]] = [
    (2, {"pipeline_parallel.schedule": "pipedream"}),
    (2, {"pipeline_parallel.schedule": "2bw"}),
    (4, {"zero": 1}),
    (4, {"zero": 2, "precision": "bf16", "transport": "network"}),
    (4, {"zero": 3, "pipeline_parallel.schedule": "gpipe", "recompute": "blocks"}),
    (2, {"recompute": "sqrt"}),
]


def both_ways(mesh: zs.Mesh, settings: dict[str, Any]) -> list[list[float]]:
    losses = []
    for inside in (True, False):
        torch.manual_seed(1)
        chosen = {"pipeline_parallel": 2, "pipeline_parallel.split": ("blocks.2",), "microbatches": 2} | settings
        engine = zs.Engine(
            Outside(inside), OPTIMIZERS["sgd"], zs.Plan.from_dict(chosen), mesh=mesh, example=data_of("skip", 9, 2)
        )
        found = [engine.train_step(data_of("skip", step, 4)).loss for step in range(STEPS)]
        losses.append([-1.0 if loss is None else float(loss) for loss in found])
    return losses


@pytest.mark.parametrize("ranks, settings", CONTINUED)
def test_residuals_outside_of_blocks_are_those_inside(pool: Pool, ranks: int, settings: dict[str, Any]) -> None:
    """Under schedules that never flush, with replicas at every stage of ZeRO, and with recomputation."""
    for inside, outside in pool.run(both_ways, ranks, settings):
        assert inside == pytest.approx(outside, rel=1e-5)


PLANS: list[tuple[int, dict[str, Any]]] = [
    (3, {"pipeline_parallel": 3, "pipeline_parallel.balance": "parameters", "microbatches": 2}),
    (2, {"pipeline_parallel": 2, "pipeline_parallel.schedule": "zb-h1", "microbatches": 2}),
    (2, {"zero": 3}),
    (1, {"microbatches": 2}),
]


def goes_on(mesh: zs.Mesh, name: str, number: int, folder: Path) -> tuple[float, dict[str, Any]]:
    """One step under the plan of a number, from the checkpoint of the plan before."""
    plan, given = zs.Plan.from_dict(PLANS[number][1]), data_of(name, number, 4)
    torch.manual_seed(1)
    model = without_dropout(MODELS[name][0]())
    engine = zs.Engine(model, OPTIMIZERS["adamw"], plan, mesh=mesh, example=data_of(name, 9, 2))
    if number:
        engine.load(folder / str(number - 1))
    loss = float(engine.train_step(given if plan.microbatches > 1 else halves(given)[mesh.rank]).loss)  # type: ignore[arg-type]
    engine.save(folder / str(number), wait=True)
    return loss, engine.state_dict()


@pytest.mark.parametrize("name", by_default(["u-net", "tied-far", "router-loss", "supervised", "twice"], "u-net"))
def test_a_checkpoint_goes_on_under_other_plans(pool: Pool, name: str, tmp_path: Path) -> None:
    """Three stages, two stages, slices on two ranks and one process go on from each other as a plain loop does."""
    steps = [halves(data_of(name, number, 4)) for number, _ in enumerate(PLANS)]
    torch.manual_seed(1)
    model = without_dropout(MODELS[name][0]())
    wanted = plain_loop(model, OPTIMIZERS["adamw"], steps, lambda model, part: model(*part))
    *several, _ = PLANS
    answers = [pool.run(goes_on, ranks, name, number, tmp_path) for number, (ranks, _) in enumerate(several)]
    loss, weights = goes_on(zs.Mesh(), name, len(several), tmp_path)
    losses = [sum(each[0] for each in ranks) / len(ranks) for ranks in answers]
    assert [*losses, loss] == pytest.approx(wanted.losses, rel=1e-5)
    torch.testing.assert_close(weights, wanted.weights, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["far", "router-loss", "plain"])
def test_nothing_of_the_example_stays_in_memory(name: str) -> None:
    """Counted with Python's collector off: no cycle holds results of the forward that found the layers."""
    model = build("Plain") if name == "plain" else MODELS[name][0]()
    made: list[StorageWeakRef] = []
    handles = [
        module.register_forward_hook(lambda module, args, output: made.append(StorageWeakRef(output.untyped_storage())))
        for module in model.modules()
        if not list(module.children())
    ]
    gc.collect()
    gc.disable()
    try:
        chain = Chain(model, lambda: model(*tokens(2)))
    finally:
        gc.enable()
    for handle in handles:
        handle.remove()
    assert len(made) > len(chain.layers) and all(storage.expired() for storage in made)
