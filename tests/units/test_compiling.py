"""Compiled blocks: the numbers of the model as it is, under plans that gather, recompute, store and send."""

import copy
from typing import Any

import pytest
import torch
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
