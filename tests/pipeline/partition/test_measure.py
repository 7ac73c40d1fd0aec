"""What a layer costs: bytes as counted by hand, times that are medians, and a model that is left as it was."""

from typing import Any

import pytest
import torch
from pipeline.chains import Frame, classify, patches, pictures, vgg
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from zeroshard.pipeline.cut.chain import Chain
from zeroshard.pipeline.partition.measure import measure
from zeroshard.pipeline.partition.profile import LayerCost
from zeroshard.train.gpt import GPT
from zeroshard.train.sizes import GPTConfig

CPU = torch.device("cpu")
ROWS, SMALL = 5, GPTConfig(vocabulary=11, context=6, width=8, heads=2, layers=3)


class Linears(nn.Module):
    """4 -> 6, two blocks 6 -> 6, 6 -> 2, and the mean of squares."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6, dtype=dtype)
        self.blocks = nn.ModuleList([nn.Linear(6, 6, dtype=dtype) for _ in range(2)])
        self.last = nn.Linear(6, 2, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x).square().mean()


def on(device: str, kind: type[nn.Module], *args: Any) -> nn.Module:
    with torch.device(device):
        return kind(*args)


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_of_linear_layers_by_hand(device: str, dtype: torch.dtype) -> None:
    model = on(device, Linears, dtype)
    x = torch.randn(ROWS, 4, dtype=dtype)
    chain = Chain(model, lambda: model(x.to(device)))
    costs = measure(model, chain, lambda: model(x), CPU, repeats=2)
    n = dtype.itemsize
    hidden = ROWS * 6 * n
    assert [cost.name for cost in costs] == ["prefix", "blocks.0", "blocks.1", "suffix"]
    assert [cost.activation_bytes for cost in costs] == [hidden, hidden, hidden, n]
    # each keeps its input for the weight's gradient; the square keeps what it squares
    assert [cost.saved_bytes for cost in costs] == [ROWS * 4 * n, hidden, hidden, hidden + ROWS * 2 * n]
    assert [cost.parameter_bytes for cost in costs] == [30 * n, 42 * n, 42 * n, 14 * n]
    assert all(cost.forward_seconds > 0 and cost.backward_seconds > 0 for cost in costs)


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_frozen_layer_keeps_less(device: str) -> None:
    model = on(device, Linears)
    model.blocks[0].requires_grad_(False)  # type: ignore[index,operator]
    x = torch.randn(ROWS, 4)
    costs = measure(model, Chain(model, lambda: model(x.to(device))), lambda: model(x), CPU, repeats=1)
    assert [cost.saved_bytes for cost in costs[1:3]] == [0, ROWS * 6 * 4]
    assert costs[1].parameter_bytes == costs[2].parameter_bytes


def test_a_tied_weight_counts_at_both_uses_and_in_neither_is_it_an_activation() -> None:
    model = on("meta", GPT, SMALL)
    tokens = torch.zeros(2, 6, dtype=torch.long)
    chain = Chain(model, lambda: model(tokens.to("meta"), tokens.to("meta")))
    costs = measure(model, chain, lambda: model(tokens, tokens), CPU, repeats=1)
    assert [costs[0].parameter_bytes, costs[-1].parameter_bytes] == [11 * 8 * 4, (11 * 8 + 8) * 4]
    assert costs[0].saved_bytes == tokens.nbytes
    assert costs[0].activation_bytes == 2 * 6 * 8 * 4
    assert len({(cost.activation_bytes, cost.saved_bytes, cost.parameter_bytes) for cost in costs[1:4]}) == 1


def test_only_the_weights_of_one_layer_are_in_memory() -> None:
    model = on("meta", GPT, SMALL)
    tokens = torch.zeros(2, 6, dtype=torch.long)
    chain = Chain(model, lambda: model(tokens.to("meta"), tokens.to("meta")))
    seen: list[set[str]] = []

    def forward() -> Any:
        seen.append({name for name, parameter in model.named_parameters() if not parameter.is_meta})
        return model(tokens, tokens)

    measure(model, chain, forward, CPU, repeats=1)
    layers = [set(layer.parameters) for layer in chain.layers]
    assert all(any(names <= layer for layer in layers) for names in seen)
    assert all(layer in seen for layer in layers)


def test_a_frame_with_parameters_of_its_own_on_meta() -> None:
    model = on("meta", Frame)
    inputs = patches(2)
    example = tuple(tensor.to("meta") for tensor in inputs)
    chain = Chain(model, lambda: model(*example))
    costs = measure(model, chain, lambda: model(*inputs), CPU, repeats=1)
    assert [cost.parameter_bytes for cost in costs] == [(30 + 36) * 4, 42 * 4, (42 + 12 + 1) * 4, 42 * 4, (12 + 21) * 4]
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_the_model_is_left_as_it_was(device: str) -> None:
    model = on(device, vgg, False)  # type: ignore[arg-type]
    images, labels = pictures(4)
    chain = Chain(model, lambda: classify(model, (images.to(device), labels.to(device))))
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    values = {name: tensor.detach().clone() for name, tensor in state.items()}
    random = torch.get_rng_state()
    costs = measure(model, chain, lambda: classify(model, (images, labels)), CPU, repeats=2)
    after = dict(model.named_parameters()) | dict(model.named_buffers())
    assert all(after[name] is tensor for name, tensor in state.items())
    assert device == "meta" or all(torch.equal(after[name], value) for name, value in values.items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), random)
    assert [cost.name for cost in costs][1] == "features.0"


class Routed(nn.Module):
    """A block that multiplies each row by the number that an earlier block returned for it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.seen = nn.Linear(6, 6), list[Any]()

    def forward(self, x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        self.seen += [] if rows.is_meta else [rows.tolist()]
        return self.inner(x) * rows[:, None], rows + 1


@pytest.mark.parametrize(("device", "known"), [("meta", [0] * ROWS), ("cpu", [2, 3, 4, 5, 6])])
def test_a_block_that_reads_numbers_which_an_earlier_block_returned(device: str, known: list[int]) -> None:
    """They are those of the example; zeros where the example was on meta."""
    model: Any = on(device, Linears)
    model.blocks = nn.ModuleList(on(device, Routed) for _ in range(2))

    def run(x: Tensor) -> Tensor:
        hidden, rows = model.first(x), torch.arange(1, len(x) + 1, device=x.device)
        for block in model.blocks:
            hidden, rows = block(hidden, rows)
        output: Tensor = model.last(hidden).square().mean()
        return output

    x = torch.randn(ROWS, 4)
    chain = Chain(model, lambda: run(x.to(device)))
    model.blocks[1].seen.clear()
    costs = measure(model, chain, lambda: run(x), CPU, repeats=1)
    assert model.blocks[1].seen == [known, known]
    assert costs[1].saved_bytes == ROWS * (6 * 4 + 8)  # the input, and the numbers


class Again(nn.Linear):
    """A layer that is computed again in its backward, by the older way of torch."""

    def forward(self, x: Tensor) -> Tensor:
        recomputed: Tensor = checkpoint(super().forward, x, use_reentrant=True)
        return recomputed


def test_a_block_with_a_re_entrant_checkpoint_inside() -> None:
    model = Linears()
    model.blocks = nn.ModuleList([Again(6, 6) for _ in range(2)])
    x = torch.ones(ROWS, 4)
    costs = measure(model, Chain(model, lambda: model(x), ["Again"]), lambda: model(x), CPU)
    assert all(cost.backward_seconds > 0 for cost in costs[1:])
    assert all(parameter.grad is None for parameter in model.parameters())


class Clock:
    """Each reading is later than the one before by the next of the given seconds."""

    def __init__(self, seconds: list[float]) -> None:
        self.seconds, self.now = seconds, 0.0

    def perf_counter(self) -> float:
        self.now += self.seconds.pop(0)
        return self.now


def test_times_are_medians_after_a_warm_up() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    x = torch.randn(2, 3)
    chain = Chain(model, lambda: F.mse_loss(model(x), x))
    warm_up = [0.0, 99.0, 99.0]
    runs = [0.0, 1.0, 30.0, 0.0, 5.0, 10.0, 0.0, 2.0, 20.0]
    clock = Clock([*warm_up, *runs] * 3)
    costs = measure(model, chain, lambda: F.mse_loss(model(x), x), CPU, repeats=3, now=clock.perf_counter)
    assert [(cost.forward_seconds, cost.backward_seconds) for cost in costs] == [(2.0, 20.0)] * 3


def test_a_layer_with_nothing_to_learn() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(6, 2))
    x = torch.randn(ROWS, 2, 3)
    costs = measure(model, Chain(model, lambda: model(x).sum()), lambda: model(x).sum(), CPU, repeats=1)
    empty = LayerCost("prefix", costs[0].forward_seconds, costs[0].backward_seconds, x.nbytes, 0, 0)
    assert costs[0] == empty
    assert (costs[1].activation_bytes, costs[1].saved_bytes, costs[1].parameter_bytes) == (x.nbytes, 0, 0)
