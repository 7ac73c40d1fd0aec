"""What an engine is given by mistake, and what it says to that."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from pool import Pool
from torch import nn

import zeroshard as zs
from zeroshard.errors import BatchError, ModelError, OptimizerError, PlanError

MODEL = nn.Linear(4, 1)
ADAM = torch.optim.AdamW(MODEL.parameters())
PLAN = zs.Plan(zero=1)
SGD = partial(torch.optim.SGD, lr=0.1)
WRONG: list[tuple[tuple[Any, ...], type[Exception], str]] = [
    ((MODEL, SGD, {"zero": 2}), PlanError, r"The plan is \{'zero': 2\} \(dict\).*write zs\.Plan\(zero=2\)"),
    ((MODEL, SGD, {"zero_optimization": {"stage": 2}}), PlanError, r"read by zs\.from_deepspeed\(config\)"),
    ((MODEL, SGD, "auto"), PlanError, r"The plan is 'auto' \(str\).*zs\.Plan\.auto\(model, batch, optimizer\)"),
    ((MODEL, SGD, 2), PlanError, r"The plan is 2 \(int\).*zs\.Plan\(zero=2\)"),
    ((MODEL, PLAN, ADAM), OptimizerError, r"The optimizer is a Plan\..*the second argument here is the plan"),
    ((ADAM, MODEL), ModelError, r"The model is a AdamW\..*the first argument here is the optimizer"),
    ((MODEL, MODEL), OptimizerError, r"The optimizer is a Linear\..*the second argument here is the model"),
    ((MODEL, None), OptimizerError, r"The optimizer is None \(NoneType\)\. Engine\(model, optimizer, plan\) takes"),
    ((MODEL, "adamw"), OptimizerError, r"'adamw' \(str\).*partial\(torch\.optim\.AdamW, lr=1e-3\)"),
    ((MODEL, "sgd"), OptimizerError, r"partial\(torch\.optim\.SGD, lr=1e-3\)"),
    ((lambda x: x, SGD), ModelError, r"The model is .*nn\.Module"),
]


@pytest.mark.parametrize("arguments, kind, message", WRONG)
def test_an_argument_of_another_kind(arguments: tuple[Any, ...], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        zs.Engine(*arguments, mesh=zs.Mesh())


OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"mesh": 2}, r"The mesh is 2 \(int\), and it must be a mesh of zs\.init_mesh\(\)"),
    ({"loss": "mse"}, r"loss is 'mse' \(str\), and it must be a function; write for example loss=lambda output, batch"),
    ({"initialise": True}, r"initialise is True \(bool\), and it must be a function; .*reset_parameters"),
]


@pytest.mark.parametrize("options, message", OPTIONS)
def test_an_option_of_another_kind(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        zs.Engine(MODEL, SGD, **{"mesh": zs.Mesh(), **options})


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, SGD, lambda ps: torch.optim.SGD(ps, lr=0.1)])
def test_arguments_of_the_right_kinds(optimizer: Any) -> None:
    model = nn.Linear(4, 1)
    before = model.weight.detach().clone()
    engine = zs.Engine(model, optimizer, mesh=zs.Mesh())
    engine.backward(engine(torch.ones(2, 4)).mean())
    assert not engine.step().skipped
    assert type(engine.optimizer) in (torch.optim.AdamW, torch.optim.SGD)
    assert not torch.equal(model.weight, before)


def steps_without_backward(mesh: zs.Mesh, zero: int) -> list[str]:
    """What a rank hears of steps in which no rank, the other, both, and again no rank had a backward."""
    torch.manual_seed(0)
    engine = zs.Engine(nn.Linear(4, 1), SGD, zs.Plan(zero=zero), mesh=mesh)
    heard = []
    for working in (set[int](), {0}, {0, 1}, set[int]()):
        try:
            with engine.no_sync():  # so that the step reduces, where ranks differ
                if mesh.rank in working:
                    engine.backward(engine(torch.ones(2, 4)).mean())
            heard.append(str(engine.step().step))
        except PlanError as error:
            heard.append(str(error))
    return heard


@pytest.mark.parametrize("zero", [0, 2])
def test_a_step_without_any_backward_is_refused_on_every_rank(pool: Pool, zero: int) -> None:
    for heard in pool.run(steps_without_backward, 2, zero):
        assert heard[0].startswith("engine.step() number 1 found no gradient on any rank")
        assert heard[1:3] == ["1", "2"]
        assert heard[3].startswith("engine.step() number 3 found no gradient on any rank")


def test_a_second_step_without_a_backward_leaves_the_weights() -> None:
    model = nn.Linear(4, 1)
    engine = zs.Engine(model, SGD, mesh=zs.Mesh())
    engine.backward(engine(torch.ones(2, 4)).mean())
    engine.step()
    before = model.weight.detach().clone()
    with pytest.raises(PlanError, match=r"Call engine\.backward\(loss\)"):
        engine.step()
    assert torch.equal(model.weight, before)
    engine.backward(engine(torch.ones(2, 4)).mean())
    assert engine.step().step == 2


LOSSES: list[tuple[Callable[[torch.Tensor], Any], str]] = [
    (lambda output: (output.mean(), 1), r"The loss is a tuple; a backward needs a scalar tensor"),
    (lambda output: output.flatten(), r"The loss is of shape \[2\]; a backward needs a scalar tensor"),
    (lambda output: output.mean().detach(), r"The loss is a tensor that requires no gradient; .*with gradients on"),
]


@pytest.mark.parametrize("loss, message", LOSSES)
def test_a_loss_of_another_kind(loss: Callable[[torch.Tensor], Any], message: str) -> None:
    engine = zs.Engine(nn.Linear(4, 1), SGD, mesh=zs.Mesh())
    with pytest.raises(BatchError, match=message):
        engine.backward(loss(engine(torch.ones(2, 4))))
