"""The interface of torch.optim, for each optimizer that steps over whole tensors."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from optim.equations import gradients_of, run, take_steps, weights_of
from torch import nn

from zeroshard import optim
from zeroshard.optim.algorithms.tensor_optimizer import as_matrices, matrix_shape
from zeroshard.planner.predict.torch_internals import fakes

KINDS: dict[str, Callable[..., Any]] = {
    "Adafactor": optim.Adafactor,
    "Adafactor momentum": partial(optim.Adafactor, beta1=0.9, lr=1e-2),
    "SM3": optim.SM3,
    "SM3 16-bit momentum": partial(optim.SM3, momentum_dtype=torch.bfloat16),
    "LAMB": optim.LAMB,
    "Muon": optim.Muon,
    "AdamW8bit": optim.AdamW8bit,
    "Adam8bit": partial(optim.Adam8bit, min_8bit_size=20, block_size=8),
    "Shampoo": optim.Shampoo,
    "Shampoo momentum": partial(optim.Shampoo, momentum=0.9, beta2=0.9, interval=2, max_side=5),
    "SOAP": partial(optim.SOAP, interval=2),
}
SHAPES: list[tuple[int, ...]] = [(6, 4), (3, 5, 4), (4, 3, 2, 2), (9,), (1,), ()]
every = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)


@every
@dtypes
def test_steps_are_finite_and_move_every_parameter(make: Callable[..., Any], dtype: torch.dtype) -> None:
    weights, wide = weights_of(SHAPES, dtype), dtype in (torch.float32, torch.float64)
    for before, after in zip(weights, run(make, weights, gradients_of(SHAPES, 3)), strict=True):
        assert after.isfinite().all() and after.dtype == dtype
        assert not wide or not torch.equal(before, after)  # rounding may hide small steps in 16 bits


@every
@dtypes
def test_a_run_that_is_saved_and_loaded_goes_on_as_it_was(make: Callable[..., Any], dtype: torch.dtype) -> None:
    gradients = gradients_of(SHAPES, 6)
    whole = run(make, weights_of(SHAPES, dtype), gradients)
    parameters = [nn.Parameter(w) for w in weights_of(SHAPES, dtype)]
    first = make(parameters)
    take_steps(first, parameters, gradients[:3])
    saved = copy.deepcopy(first.state_dict())
    later = [nn.Parameter(p.detach().clone()) for p in parameters]
    second = make(later)
    for state in saved["state"].values():
        state["step"] = int(state["step"]) if dtype == torch.float64 else state["step"]
    second.load_state_dict(saved)
    for a, b in zip(parameters, later, strict=True):
        assert {k: v.dtype for k, v in first.state[a].items()} == {k: v.dtype for k, v in second.state[b].items()}
        assert all(first.state[a][key].data_ptr() != second.state[b][key].data_ptr() for key in first.state[a])
    take_steps(second, later, gradients[3:])
    assert all(map(torch.equal, [p.detach() for p in later], whole))


@every
def test_a_parameter_without_gradient_is_left_and_empty_ones_are_no_error(make: Callable[..., Any]) -> None:
    parameters = [nn.Parameter(w) for w in weights_of([(4, 3), (4, 3), (0, 3), (0,)])]
    before = parameters[1].detach().clone()
    optimizer = make(parameters)
    for n in (0, 2, 3):
        parameters[n].grad = torch.ones_like(parameters[n])
    optimizer.step()
    assert torch.equal(parameters[1], before) and parameters[1] not in optimizer.state
    assert set(map(id, optimizer.state)) == {id(parameters[0])}


@every
def test_gradients_of_zero_move_nothing_but_by_decay(make: Callable[..., Any]) -> None:
    weights = weights_of(SHAPES)
    zeros = [[torch.zeros(shape) for shape in SHAPES]] * 2
    for before, after in zip(weights, run(lambda ps: make(ps, weight_decay=0.0), weights, zeros), strict=True):
        assert torch.equal(before, after)


@every
def test_the_layout_of_weights_and_gradients_does_not_matter(make: Callable[..., Any]) -> None:
    shapes: list[tuple[int, ...]] = [(6, 4), (4, 3, 2, 2), (3, 5, 4)]
    weights, gradients = weights_of(shapes), gradients_of(shapes, 5)

    def turned(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)

    parameters = [nn.Parameter(turned(w)) for w in weights]
    optimizer = make(parameters)
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = turned(gradient.float())
        optimizer.step()
    assert not any(p.is_contiguous() for p in parameters)
    torch.testing.assert_close([p.detach() for p in parameters], run(make, weights, gradients), rtol=1e-5, atol=1e-6)


@every
def test_a_gradient_is_not_written_to(make: Callable[..., Any]) -> None:
    parameters = [nn.Parameter(w) for w in weights_of(SHAPES)]
    optimizer, gradients = make(parameters), gradients_of(SHAPES, 1)
    take_steps(optimizer, parameters, gradients)
    assert all(
        torch.equal(p.grad, g.float()) for p, g in zip(parameters, gradients[0], strict=True) if p.grad is not None
    )


@every
def test_schedules_and_parameter_groups_set_the_learning_rate(make: Callable[..., Any]) -> None:
    weights, gradients = weights_of([(6, 4), (6, 4)]), gradients_of([(6, 4), (6, 4)], 4)
    parameters = [nn.Parameter(w.clone()) for w in weights]
    optimizer = make([{"params": parameters[:1], "lr": 0.1}, {"params": parameters[1:], "lr": 0.0}])
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    for step in gradients:
        take_steps(optimizer, parameters, [step])
        schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.025)
    assert torch.equal(parameters[1], weights[1]) and not torch.equal(parameters[0], weights[0])


@every
def test_a_closure_gives_the_loss(make: Callable[..., Any]) -> None:
    layer = nn.Linear(3, 2)
    optimizer = make(layer.parameters(), lr=1e-3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = layer(torch.ones(4, 3)).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    first = optimizer.step(closure)
    assert first.requires_grad and optimizer.step(closure) < first


@every
def test_sparse_gradients_and_complex_weights_are_refused(make: Callable[..., Any]) -> None:
    table = nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse"):
        make(table.parameters()).step()
    parameter = nn.Parameter(torch.ones(3, 2, dtype=torch.complex64))
    parameter.grad = torch.ones_like(parameter)
    with pytest.raises(RuntimeError, match="complex"):
        make([parameter]).step()


@every
def test_a_rehearsal_without_values_makes_states_of_the_same_sizes(make: Callable[..., Any]) -> None:
    parameters = [nn.Parameter(w) for w in weights_of(SHAPES)]
    optimizer = make(parameters)
    take_steps(optimizer, parameters, gradients_of(SHAPES, 2))
    with fakes():
        without = [nn.Parameter(torch.empty(shape)) for shape in SHAPES]
        rehearsed = make(without)
        for _ in range(2):
            for parameter in without:
                parameter.grad = torch.empty_like(parameter)
            rehearsed.step()
    for real, fake in zip(parameters, without, strict=True):
        sizes = [
            {k: (v.shape, v.dtype) for k, v in states.items()}
            for states in (optimizer.state[real], rehearsed.state[fake])
        ]
        assert sizes[0] == sizes[1]
    take_steps(optimizer, parameters, gradients_of(SHAPES, 1))  # and leaves nothing behind for real ones


@every
def test_a_step_without_memory_makes_states_of_the_same_sizes(make: Callable[..., Any]) -> None:
    shapes = [*SHAPES, (70, 64)]  # the last is large enough for 8 bits
    parameters = [nn.Parameter(w) for w in weights_of(shapes)]
    optimizer = make(parameters)
    take_steps(optimizer, parameters, gradients_of(shapes, 1))
    without = [nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes]
    other = make(without)
    for parameter in without:
        parameter.grad = torch.empty_like(parameter)
    other.step()
    for real, empty in zip(parameters, without, strict=True):
        both = (optimizer.state[real], other.state[empty])
        sizes = [{key: (value.shape, value.dtype) for key, value in states.items()} for states in both]
        assert sizes[0] == sizes[1] and all(v.is_meta for k, v in other.state[empty].items() if k != "step")


@every
def test_a_learning_rate_may_be_a_tensor(make: Callable[..., Any]) -> None:
    weights, gradients = weights_of(SHAPES), gradients_of(SHAPES, 3)
    as_tensor = run(lambda ps: make(ps, lr=torch.tensor(0.01)), weights, gradients)
    torch.testing.assert_close(as_tensor, run(lambda ps: make(ps, lr=0.01), weights, gradients), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "options", "named"),
    [
        *((kind, {"lr": -1.0}, "lr is -1.0") for kind in ("Adafactor", "SM3", "LAMB", "Muon", "AdamW8bit", "SOAP")),
        ("Adafactor", {"decay_rate": 0.8}, "decay_rate is 0.8"),
        ("Adafactor", {"beta1": 1.0}, "beta1"),
        ("SM3", {"momentum": 1.0}, "momentum"),
        ("SM3", {"momentum_dtype": torch.int8}, "momentum_dtype"),
        ("LAMB", {"bounds": (2.0, 1.0)}, "bounds"),
        ("Adam8bit", {"block_size": 48}, "block_size is 48"),
        ("Shampoo", {"interval": 0}, "interval"),
        ("Muon", {"adjust_lr_fn": "adam"}, "match_rms_adamw"),
    ],
)
def test_options_out_of_range_are_refused(kind: str, options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        getattr(optim, kind)([nn.Parameter(torch.ones(2, 2))], **options)


def test_what_is_a_matrix() -> None:
    size = torch.Size
    assert matrix_shape(size([6, 4]), None) == (1, 6, 4)
    assert matrix_shape(size([3, 6, 4]), None) == (3, 6, 4)
    assert matrix_shape(size([3, 6, 4]), 0) == (1, 3, 24)
    assert matrix_shape(size([8, 3, 2, 2]), None) == (1, 8, 12)
    assert matrix_shape(size([8, 3, 2, 2]), 2) == (24, 2, 2)
    assert matrix_shape(size([5]), None) == (1, 5) and matrix_shape(size([]), None) == (1, 1)
    assert matrix_shape(size([3, 5]), 1) == (3, 5) and matrix_shape(size([0, 5]), None) == (1, 0, 5)
    assert as_matrices(torch.zeros(2, 0, 3), None).shape == (2, 0, 3)
    with pytest.raises(ValueError, match="batch_dims is 3"):
        matrix_shape(size([6, 4]), 3)
