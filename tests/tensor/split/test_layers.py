"""Split layers beside the whole ones, the messages they take, and the order of their backward."""

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from split_models.split_decoder import LAYERS, SIZE, WIDTH, Decoder, batch, pair, part_of, split
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zeroshard as zs
from zeroshard.comm.collectives import Comm
from zeroshard.errors import ModelError
from zeroshard.parts.place import Axis, Partial
from zeroshard.tensor.split.collectives import Summing, TensorRanks
from zeroshard.tensor.split.layers import Input, Parameters
from zeroshard.traffic import Purpose


class Recomputed(nn.Module):
    """Recomputes a block in the backward."""

    def __init__(self, block: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.block, self.reentrant = block, reentrant

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.block, x, use_reentrant=self.reentrant)


def compare(
    mesh: zs.Mesh, kv_heads: int, sequence: bool, shares: bool, positions: int, recomputes: bool | None
) -> tuple[float, float, dict[str, tuple[int, int]]]:
    """The largest errors of the loss and of gradients in two passes, and calls and elements of the last, by purpose."""
    whole, model = pair(kv_heads)
    places, comm = split(mesh, model, sequence, shares)
    parameters = dict(model.named_parameters())
    if recomputes is not None:
        model.blocks = nn.ModuleList([Recomputed(block, recomputes) for block in model.blocks])
    tokens, labels = batch(positions)
    for _ in range(2):
        comm.reset()
        loss, wanted = model(tokens, labels), whole(tokens, labels)
        loss.backward()
        wanted.backward()
    counts = {str(purpose): (count.calls, count.elements) for purpose, count in comm.counts.items()}
    worst = 0.0
    for name, parameter in whole.named_parameters():
        part = parameters[name]
        assert part.grad is not None and parameter.grad is not None
        if isinstance(places.get(part), Partial):
            dist.all_reduce(part.grad, group=mesh.gathers)
        error = part.grad - part_of(parameter.grad, places.get(part))
        if not name.endswith("key.bias"):  # has no gradient but rounding
            worst = max(worst, float(error.norm() / parameter.grad.norm()))
    with torch.no_grad():
        evaluated = float(model(tokens, labels) - whole(tokens, labels))
    return max(abs(float(loss.detach() - wanted.detach())), abs(evaluated)), worst, counts


@pytest.mark.parametrize("positions", [8, 7])
@pytest.mark.parametrize("shares", [False, True], ids=["network", "shared"])
@pytest.mark.parametrize(
    "ranks, kv_heads, sequence", [(2, 2, False), (2, 1, True), (4, 4, True), (4, 2, True), (4, 1, False)]
)
def test_a_split_decoder_is_the_whole_one(
    pool: Pool, ranks: int, kv_heads: int, sequence: bool, shares: bool, positions: int
) -> None:
    for loss, gradient, counts in pool.run(compare, ranks, kv_heads, sequence, shares, positions, None):
        assert loss < 1e-6 and gradient < 2e-6
        elements, layers = 2 * positions * WIDTH, 2 * LAYERS  # of an activation; pairs of column and row layers
        sums, gathers = counts["sum activations"], counts.get("gather activations", (0, 0))
        copies = (kv_heads < ranks) * LAYERS * 2 * 2  # weight and bias of keys and of values
        copied = (kv_heads < ranks) * LAYERS * 2 * 2 * kv_heads * SIZE * (WIDTH + 1)
        assert sums[0] == 2 * layers + copies
        if sequence:
            assert gathers[0] == 3 * layers + 2  # before, again, of gradients; and of the stack, and its gradient
            assert sums[1] == 2 * layers * elements + copied and gathers[1] == (3 * layers + 2) * elements
        else:
            assert sums[1] == 2 * (2 * layers * elements) + copied and gathers == (0, 0)


@pytest.mark.parametrize("recomputes", [False, True], ids=["saved-tensors", "reentrant"])
@pytest.mark.parametrize("sequence", [False, True])
def test_blocks_may_be_recomputed(pool: Pool, sequence: bool, recomputes: bool) -> None:
    for loss, gradient, _ in pool.run(compare, 2, 1, sequence, False, 8, recomputes):
        assert loss < 1e-6 and gradient < 2e-6


def order(mesh: zs.Mesh, sequence: bool) -> tuple[list[str], list[tuple[int, ...]]]:
    """The order of a backward's operations on inputs and weights, and the shapes of activations that were saved."""
    _, model = pair()
    split(mesh, model, sequence, False)
    tokens, labels = batch(8)
    said: list[str] = []
    saved: list[tuple[int, ...]] = []
    with pytest.MonkeyPatch.context() as patch:

        def note(kind: Any, method: str, name: str) -> None:
            call = getattr(kind, method)

            def noted(self: Any, *args: Any) -> Any:
                said.append(name)
                return call(self, *args)

            patch.setattr(kind, method, noted)

        note(Input, "start_sum", "start")
        note(Input, "finish", "finish")
        note(Parameters, "gradients", "weight")

        def pack(tensor: Tensor) -> Tensor:
            if tensor.dim() == 3:
                saved.append(tuple(tensor.shape))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(tokens, labels)
        loss.backward()
    return said, saved


@pytest.mark.parametrize("sequence", [False, True])
def test_a_sum_runs_under_the_gradients_of_weights(pool: Pool, sequence: bool) -> None:
    for said, saved in pool.run(order, 2, sequence):
        block = ["start", "weight", "weight", "finish", "start", "weight", "weight", "weight", "finish"]
        assert said == block * LAYERS
        if sequence:  # gathered inputs are not kept: in blocks only own positions of what is WIDTH wide are
            whole = [shape for shape in saved if shape == (2, 8, WIDTH)]
            assert len(whole) <= 2, saved  # around the final norm


def scaled(block: Any, x: Tensor) -> Any:
    """Scales the features of each rank by one parameter that all ranks have."""
    y = block.between(x)
    return x + block.down(block.gate(y) * block.up(y) * block.scale)


def mixed(block: Any, x: Tensor) -> Any:
    """Lets a row-parallel layer read what depends on a whole activation past any column-parallel layer."""
    y = block.between(x)
    return x + block.down(block.gate(y) * y.mean())


def refused(mesh: zs.Mesh, kind: str) -> str:
    """The error of a first forward of a decoder that a table splits wrongly."""
    model: Any = Decoder()
    split(mesh, model, False, False)
    block = model.blocks[1]
    block.scale = nn.Parameter(torch.ones(()))
    block.forward = partial({"scaled": scaled, "mixed": mixed}[kind], block)
    try:
        model(*batch(8)).backward()
    except ModelError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "kind, words",
    [
        ("scaled", ["'blocks.1.scale'", "own features", "a part"]),
        ("mixed", ["'blocks.1'", "used as", "gradient would be wrong"]),
    ],
)
def test_gradients_that_would_be_wrong_are_refused(pool: Pool, kind: str, words: list[str]) -> None:
    for text in pool.run(refused, 2, kind):
        for word in words:
            assert word in text, text


def sums_of(mesh: zs.Mesh, shares: bool) -> tuple[list[float], Counter[str]]:
    """Sums, the largest, gathers and own rows of sums of uneven tensors; several under way at once."""
    comm = Comm(mesh)
    if shares:
        assert comm.share_operands() is None
    ranks = TensorRanks(Axis("tensor", (tuple(range(mesh.ranks)),), comm))
    comm.reset()
    x = [torch.arange(5.0) + 10 * mesh.rank + n for n in range(5)]
    under_way = [Summing(ranks, each, f"sum {n}", Purpose.SUM_ACTIVATIONS) for n, each in enumerate(x[:4])]
    found = [float(each.result().sum()) for each in under_way]
    found.append(float(ranks.maximum(x[4], "largest").sum()))
    start, stop = ranks.rows(7)
    rows = torch.arange(14.0).view(2, 7)
    whole = ranks.gather(rows[:, start:stop], 1, 7, "rows")
    found.append(float((whole - rows).abs().max()))
    own = ranks.scatter_sum(rows * (1 + mesh.rank), 1, "own rows")
    found.append(float((own - rows[:, start:stop] * sum(range(1, mesh.ranks + 1))).abs().sum()))
    meta = rows.to("meta")
    assert ranks.gather(meta[:, start:stop], 1, 7, "").shape == (2, 7) and ranks.sum(meta, "").is_meta
    assert ranks.scatter_sum(meta, 1, "").shape == (2, stop - start)
    return found, Counter({str(purpose): count.calls for purpose, count in comm.counts.items()})


@pytest.mark.parametrize("shares", [False, True], ids=["network", "shared"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_collectives_of_activations(pool: Pool, ranks: int, shares: bool) -> None:
    for found, calls in pool.run(sums_of, ranks, shares):
        sums = [sum(10 + 50 * rank + 5 * n for rank in range(ranks)) for n in range(4)]
        assert found == [*sums, 10 + 50 * (ranks - 1) + 20, 0.0, 0.0]
        assert calls["sum activations"] == 5 and calls["gather activations"] == 1 and calls["sum losses"] == 1
