"""Compiled blocks: the numbers of the model as it is, under plans that gather, recompute, store and send."""

import copy
from typing import Any

import pytest
import torch
from jobs import error_of
from pool import Pool
from torch import nn

import zeroshard as zs
from zeroshard.units.compiling import compile_blocks
from zeroshard.units.forwards import layers_of


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 32), nn.Linear(32, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
        return y


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 1)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return nn.functional.mse_loss(self.last(x), y)


class Counting:
    """A backend that runs a graph as it is and counts graphs."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return graph.forward


def trained(mesh: zs.Mesh, compiled: bool, settings: dict[str, Any]) -> tuple[list[float], int, int]:
    """Losses of three steps, forwards that were computed again, and graphs."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, batch = Model(), (torch.randn(8, 8), torch.randn(8, 1))
    example = tuple(each[:4] for each in batch) if "pipeline_parallel" in settings else None
    plan = zs.Plan(**settings)
    engine = zs.Engine(model, lambda ps: torch.optim.AdamW(ps, lr=1e-2), plan, mesh=mesh, example=example)
    backend = Counting()
    if compiled:
        assert engine.compile(backend=backend, fullgraph=True) is engine
    losses = [engine.train_step(batch).loss for _ in range(3)]
    return [float("nan") if loss is None else float(loss) for loss in losses], engine.recomputed, backend.graphs


PLANS: list[dict[str, Any]] = [
    {"zero": 3},
    {"zero": 2, "recompute": "blocks"},
    {"zero": 3, "recompute": "sqrt", "offload": "activations"},
    {"zero": 3, "offload": "optimizer,parameters"},
    {"zero": 0, "precision": "bf16"},
    {"pipeline_parallel": 2, "microbatches": 2},
]


@pytest.mark.parametrize("settings", PLANS, ids=str)
def test_compiled_blocks_train_as_they_are(pool: Pool, settings: dict[str, Any]) -> None:
    plain, compiled = (pool.run(trained, 2, each, settings) for each in (False, True))
    for (losses, recomputed, _), (same, again, graphs) in zip(plain, compiled, strict=True):
        torch.testing.assert_close(torch.tensor(same), torch.tensor(losses), rtol=0, atol=0, equal_nan=True)
        assert again == recomputed and graphs > 0


IN_PLACE: list[dict[str, Any]] = [
    {"zero": 1},
    {"zero": 2, "offload": "optimizer"},  # new weights arrive during the forward
    {"zero": 3, "transport": "network"},
    {"zero": 3, "transport": "network", "offload": "optimizer,parameters"},
]


def in_place(mesh: zs.Mesh, when: str, settings: dict[str, Any]) -> tuple[list[float], list[int], list[int]]:
    """Losses of three steps, graphs after each, and calls of hooks of the user, inside and outside of the blocks."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, batch, backend, called = Model(), (torch.randn(8, 8), torch.randn(8, 1)), Counting(), [0, 0]

    def compile_blocks_in_place() -> None:
        for block in model.blocks:
            block.compile(backend=backend, fullgraph=True)

    def count(where: int) -> None:
        called[where] += 1

    if when == "before":
        compile_blocks_in_place()
    engine = zs.Engine(model, lambda ps: torch.optim.AdamW(ps, lr=1e-2), zs.Plan.from_dict(settings), mesh=mesh)
    if when == "after":
        compile_blocks_in_place()
    model.last.register_forward_hook(lambda *_: count(0))
    model.register_forward_pre_hook(lambda *_: count(1))
    losses, graphs = [], []
    for _ in range(3):
        losses.append(float(engine.train_step(batch).loss))  # type: ignore[arg-type]
        graphs.append(backend.graphs)
    return losses, graphs, called


@pytest.mark.parametrize("settings", IN_PLACE, ids=str)
@pytest.mark.parametrize("when", ["before", "after"])
def test_blocks_compiled_in_place_are_one_graph_each(pool: Pool, when: str, settings: dict[str, Any]) -> None:
    """All blocks share one graph, which no gather and no wait breaks, and no step makes another one."""
    plain, compiled = (pool.run(in_place, 2, each, settings) for each in ("never", when))
    assert [(graphs, called) for _, graphs, called in compiled] == [([1, 1, 1], [3, 3])] * 2
    assert [losses for losses, *_ in compiled] == [losses for losses, *_ in plain]


@pytest.mark.parametrize("zero", [0, 2])
def test_a_whole_model_compiled_in_place_is_one_graph(zero: int) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, backend, batch = Model(), Counting(), (torch.randn(8, 8), torch.randn(8, 1))
    plain = copy.deepcopy(model)
    engine = zs.Engine(model, lambda ps: torch.optim.SGD(ps, lr=0.1), zs.Plan(zero=zero))
    engine.model.compile(backend=backend, fullgraph=True)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(3):
        loss = plain(*batch)
        torch.testing.assert_close(engine.train_step(batch).loss, loss.detach())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert backend.graphs == 1


def test_a_copy_of_a_model_compiled_in_place_is_plain() -> None:
    model = nn.Sequential(Block(), Block())
    model[0].compile(backend="eager")
    engine = zs.Engine(model, lambda ps: torch.optim.SGD(ps, lr=0.1))
    with engine.gathered():
        twin = copy.deepcopy(engine.model)
    assert twin.get_submodule("0")._compiled_call_impl is None
    twin.compile(backend="eager", mode=None)
    assert type(twin._compiled_call_impl) is type(torch.compile(lambda x: x, backend="eager"))


def test_a_step_after_an_error_in_a_block_compiled_in_place(pool: Pool) -> None:
    for errors in pool.run(fails_once, 2):
        assert "TorchRuntimeError" in errors[0] and errors[1] == "nothing"


def fails_once(mesh: zs.Mesh) -> list[str]:
    """The errors of a batch of a wrong width, and of a right one after it."""
    torch._dynamo.reset()
    model = nn.Sequential(Block(), Block())
    plan = zs.Plan(zero=3, transport="network")
    engine = zs.Engine(model, lambda ps: torch.optim.SGD(ps, lr=0.1), plan, mesh=mesh, loss=lambda out, _: out.mean())
    for block in model:
        block.compile(backend="eager", fullgraph=True)
    return [error_of(lambda x=x: engine.train_step(x)) for x in (torch.ones(2, 8), torch.ones(2, 16))]


@pytest.mark.parametrize("options", [{"mode": "reduce-overhead"}, {"mode": "max-autotune"}, {"backend": "cudagraphs"}])
@pytest.mark.parametrize("path", ["", "0", "1.up"])
def test_cuda_graphs_are_refused_by_name_in_place(path: str, options: dict[str, Any]) -> None:
    engine = engine_of()
    with pytest.raises(zs.PlanError, match=f"{next(iter(options.values()))}.*records CUDA graphs"):
        engine.model.get_submodule(path).compile(**options)


@pytest.mark.filterwarnings("ignore")  # of inductor, about torch's own calls
@pytest.mark.parametrize("zero", [0, 3])
def test_cuda_graphs_are_refused_by_name_before_and_around_the_engine(zero: int) -> None:
    block = Block()
    block.compile(mode="reduce-overhead")
    for blocks in ([Block(), block], [torch.compile(Block(), mode="max-autotune"), Block()]):
        with pytest.raises(zs.PlanError, match=r"with which '[01]' is compiled.* records CUDA graphs.*'default'"):
            zs.Engine(nn.Sequential(*blocks), lambda ps: torch.optim.SGD(ps, lr=0.1), zs.Plan(zero=zero))
    engine = engine_of(zero=zero)
    for call in (torch.compile(engine.model, mode="reduce-overhead"), torch.compile(engine, mode="max-autotune")):
        with pytest.raises(zs.PlanError, match=r"'reduce-overhead'.* around the engine's model records CUDA graphs"):
            call(torch.ones(2, 16))
    x = torch.ones(2, 16)
    assert torch.compile(engine.model, backend="eager")(x).equal(engine(x))


@pytest.mark.whole
@pytest.mark.filterwarnings("ignore")  # of inductor, about torch's own calls
@pytest.mark.parametrize("settings", PLANS[:2], ids=str)
def test_inductor_takes_whole_blocks(settings: dict[str, Any]) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(3)))
    plain = copy.deepcopy(model)
    engine = zs.Engine(model, lambda ps: torch.optim.SGD(ps, lr=0.1), zs.Plan(**settings))
    engine.compile(fullgraph=True)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for rows in (4, 4, 6):
        x = torch.randn(rows, 16)
        loss, same = engine(x).square().mean(), plain(x).square().mean()
        torch.testing.assert_close(loss, same)
        engine.backward(loss)
        engine.step()
        optimizer.zero_grad()
        same.backward()
        optimizer.step()


def engine_of(**settings: Any) -> zs.Engine:
    model = nn.Sequential(Block(), Block())
    return zs.Engine(model, lambda ps: torch.optim.SGD(ps, lr=0.1), zs.Plan(**settings))


def test_the_layers_of_a_block_name_its_graph() -> None:
    engine = engine_of(recompute="blocks")
    engine.compile(backend="eager")
    assert engine.layers_of(engine.model[0]) == ("segment", "graph", "own")  # type: ignore[index]
    assert engine.layers_of(engine.model) == ("own",)


def test_a_copy_of_a_compiled_block_runs_its_own_weights() -> None:
    block = Block()
    compile_blocks([block], {"backend": "eager"})
    twin = copy.deepcopy(block)
    with torch.no_grad():
        twin.down.weight.zero_()
        twin.down.bias.zero_()
    x = torch.randn(2, 16)
    assert twin(x).equal(x) and not block(x).equal(x)
    assert layers_of(block) == ("graph", "own")


@pytest.mark.parametrize(
    ("settings", "options", "words"),
    [
        ({}, {"mode": "reduce-overhead"}, "mode='reduce-overhead' records CUDA graphs"),
        ({}, {"backend": "cudagraphs"}, "backend='cudagraphs' records CUDA graphs"),
        ({}, {"options": {"triton.cudagraphs": True}}, "cudagraphs.* records CUDA graphs"),
        ({"rng": "exact"}, {}, "rng='exact' replaces random draws"),
        ({"activations": zs.Activations(compress=("binarize",))}, {}, "activations.compress=.* replaces saved"),
    ],
)
def test_options_and_plans_that_do_not_go_with_graphs_are_refused(
    settings: dict[str, Any], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(zs.PlanError, match=words):
        engine_of(**settings).compile(**options)


def test_blocks_are_compiled_once() -> None:
    engine = engine_of()
    engine.compile(backend="eager")
    with pytest.raises(zs.PlanError, match="A block of class Block is compiled already"):
        engine.compile(backend="eager")
