"""What is remembered of operations on tensors without values is what torch itself says of them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from planner.rehearsed import task
from selection import by_default
from torch import nn

import zeroshard as zs
from zeroshard.doctor.hardware import Machines
from zeroshard.planner.predict import torch_internals as private
from zeroshard.planner.predict.memory_tracker import Tracker
from zeroshard.planner.predict.rehearse import rehearse
from zeroshard.planner.predict.torch_internals import Results, fakes, ones

PAIR = Machines.of("A100-80", 2)


PLANS: list[dict[str, Any]] = [
    {"zero": 3, "precision": "bf16"},
    {"zero": 0, "pipeline_parallel": 2, "microbatches": 2, "recompute": "blocks"},
]


@pytest.mark.parametrize("plan", by_default(PLANS, PLANS[0]), ids=str)
def test_a_rehearsal_is_the_same_with_remembered_results(plan: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    remembered = [rehearse(task(), zs.Plan.from_dict(plan), 0, 2, 6, PAIR) for _ in range(2)]
    with monkeypatch.context() as patch:
        patch.setattr(private, "_remembers", lambda func: False)
        asked = rehearse(task(), zs.Plan.from_dict(plan), 0, 2, 6, PAIR)
    for one in remembered:
        assert replace(one, pipeline=None) == replace(asked, pipeline=None)


ON_PARTS: list[Any] = [  # each on several parts of one tensor, the results of which differ in their places alone
    (torch.ops.aten.add.Tensor, 1),
    (torch.ops.aten.zero_.default,),
    (torch.ops.aten.transpose.int, 0, 1),
    (torch.ops.aten.slice.Tensor, 0, 1, 2),
    (torch.ops.aten.as_strided.default, [2], [1]),
    (torch.ops.aten.as_strided.default, [2], [1], 3),
    (torch.ops.aten.view.dtype, torch.int16),
]


def operations(run: Callable[..., Any], x: torch.Tensor, numbers: torch.Tensor) -> list[torch.Tensor | None]:
    aten = torch.ops.aten
    calls: list[tuple[Any, Any]] = [
        (aten.add.Tensor, (x, 1)),
        (aten.add.Tensor, (numbers, 1)),
        (aten.add.Tensor, (numbers, 1.0)),
        (aten.mul_.Tensor, (x, x)),
        (aten.transpose.int, (x, 0, 1)),
        (aten.split.Tensor, (x, 2)),
        (aten.slice.Tensor, (x, 0, 1, 3)),
        (aten.native_layer_norm.default, (x, [6], None, None, 1e-5)),
        (aten._foreach_add.List, ([x, x], [x, x])),
        (aten._foreach_mul_.Scalar, ([x], 2.0)),
        (aten.expand.default, (x[:1], [4, 6])),
        (aten.arange.default, (5,)),
        *((func, (part, *more)) for func, *more in ON_PARTS for part in (x[:2], x[2:], x[1:3])),
    ]
    made: list[torch.Tensor | None] = []
    for func, args in calls:
        result = run(func, args)
        made += [*result] if isinstance(result, (tuple, list)) else [result]
    return made


def looks(made: list[torch.Tensor | None], given: torch.Tensor) -> list[Any]:
    """All that a tensor without values says of itself."""
    base = given.untyped_storage()._cdata
    return [
        one
        if one is None
        else (one.shape, one.stride(), one.dtype, one.device, one.storage_offset(), one is given,
              one.untyped_storage()._cdata == base, one.untyped_storage().nbytes())
        for one in made
    ]  # fmt: skip


def test_shapes_strides_and_memory_are_those_of_torch() -> None:
    with fakes() as mode:
        results = Results(mode)
        x, numbers = torch.zeros(4, 6), torch.zeros(3, dtype=torch.long)
        found = []
        for run in (lambda func, args: func(*args), *[lambda func, args: results.of(func, func, args, {})] * 2):
            found.append(looks(operations(run, x, numbers), x))
    assert found[0] == found[1] == found[2]


def test_modules_convert_their_parameters() -> None:
    """Torch swaps no parameter that its mode remembers, as those of the first operation on a shape."""
    for convert, dtype in ((torch.nn.Module.bfloat16, torch.bfloat16), (torch.nn.Module.double, torch.float64)):
        with fakes() as mode, Tracker(results=Results(mode)):
            layer = convert(torch.nn.Linear(37, 41))
            assert [isinstance(p, torch.nn.Parameter) and p.dtype for p in layer.parameters()] == [dtype, dtype]


def test_draws_between_bounds_end() -> None:
    """torch draws again until no value is beyond the bounds."""
    with fakes():
        weight = torch.empty(8, 4)
        assert nn.init.trunc_normal_(weight, std=0.02) is weight
        nn.init.trunc_normal_(weight, std=1.0, a=2.0, b=3.0)
    real = nn.init.trunc_normal_(torch.zeros(64), a=-1.0, b=1.0)
    assert real.any() and real.abs().max() <= 1


def test_operations_in_given_memory_return_it_and_resize_it_as_torch_does() -> None:
    """The second call of each is remembered; one that must resize its output runs each time."""
    aten = torch.ops.aten
    with fakes() as mode:
        results, x = Results(mode), torch.ones(4, 6)
        ran: list[Any] = []

        def counted(func: Any) -> Callable[..., Any]:
            return lambda *args, **kwargs: (ran.append(func), func(*args, **kwargs))[1]

        for func, args, name in (
            (aten.mul.out, (x, x), "out"),
            (aten.mm.out, (x, x.mT), "out"),
            (aten.silu_backward.grad_input, (x, x), "grad_input"),
        ):
            shape = func(*args, **{name: torch.empty(0)}).shape
            for fresh in (True, False):
                into = torch.empty(shape)
                before = len(ran)
                assert results.of(func, counted(func), args, {name: into}) is into
                assert (len(ran) > before) is fresh and into.shape == shape
            for _ in range(2):
                into, before = torch.empty(0), len(ran)
                assert results.of(func, counted(func), args, {name: into}) is into
                assert into.shape == shape and len(ran) > before


def test_ones_keep_their_values_after_a_rehearsal_without_values() -> None:
    for integers in (False, True):
        with fakes(integers) as mode, Tracker(answers=True, results=Results(mode)):
            torch.ones(())  # its result without values is remembered
            found = ones(2, 3).to(torch.bfloat16)
    assert torch.equal(found.constant, torch.ones(2, 3, dtype=torch.bfloat16))  # type: ignore[attr-defined]
