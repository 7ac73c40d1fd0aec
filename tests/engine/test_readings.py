"""What an engine and its tables say of themselves, and the words that users of `nn.Module` try first."""

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from engine.models import batch, build
from pool import Pool
from torch import nn

import zeroshard as zs

SGD = partial(torch.optim.SGD, lr=0.1)


def reading(mesh: zs.Mesh, zero: int) -> Any:
    """An engine in words before and after a step, and its tables."""
    engine = zs.Engine(build("TiedFive"), SGD, zs.Plan(zero=zero), mesh=mesh)
    before = repr(engine)
    engine.train_step((batch(0, mesh.rank, mesh.ranks), 0))
    place = engine.rank, engine.ranks, str(engine.device)
    return before, repr(engine), place, repr(engine.memory()), str(engine.traffic())


@pytest.mark.parametrize("zero", [0, 3])
def test_an_engine_and_its_tables_can_be_read(pool: Pool, zero: int) -> None:
    numel = sum(parameter.numel() for parameter in build("TiedFive").parameters())
    for rank, (before, after, place, memory, traffic) in enumerate(pool.run(reading, 2, zero)):
        head = f"Engine of TiedFive ({numel:,} parameters)\n  {zs.Plan(zero=zero)!r}\n  rank {rank} of 2 on cpu, "
        assert (before, after) == (head + "0 steps", head + "1 steps")
        assert place == (rank, 2, "cpu")
        assert memory.startswith("bytes on this rank\ncategory") and "\noptimizer states" in memory
        assert traffic.startswith("on the wire in the last step\npurpose") and "\nreduce gradients" in traffic


def stage(mesh: zs.Mesh) -> str:
    """An engine of one stage in words."""
    plan = zs.Plan(pipeline_parallel=zs.Pipeline(2, balance="parameters"), microbatches=2)
    return repr(zs.Engine(build("TiedFive"), SGD, plan, mesh=mesh, example=(batch(0, 0, 1, 2), 0)))


def test_parameters_of_all_stages_are_counted(pool: Pool) -> None:
    numel = sum(parameter.numel() for parameter in build("TiedFive").parameters())
    assert all(f"({numel:,} parameters)" in text for text in pool.run(stage, 2))


def layers(mesh: zs.Mesh) -> Any:
    """The layers of an output layer and of blocks, on the first stage of two that recompute."""
    pipeline = zs.Pipeline(2, balance="parameters", schedule="zb-h1")
    plan = zs.Plan(pipeline_parallel=pipeline, microbatches=2)
    engine = zs.Engine(build("Plain"), SGD, plan, mesh=mesh, example=(batch(0, 0, 1, 2), 0))
    model: Any = engine.model
    return [engine.layers_of(module) for module in (model, model.embed, model.blocks[0], model.head)]


def test_layers_of_a_modules_forward(pool: Pool) -> None:
    assert pool.run(layers, 2)[0] == [("own",), ("gate", "own"), ("gate", "own"), ("gate", "deferred", "own")]
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    engine = zs.Engine(model, SGD, zs.Plan(recompute="blocks"), mesh=zs.Mesh())
    assert engine.layers_of(model) == ("own",) and engine.layers_of(model[1]) == ("segment", "own")
    with pytest.raises(zs.PlanError, match=r"was given a Linear of elsewhere\. Pass engine\.model"):
        engine.layers_of(nn.Linear(2, 2))
    with pytest.raises(zs.PlanError, match="was given '0'"):
        engine.layers_of("0")  # type: ignore[arg-type]


def test_training_and_evaluation_mode_are_the_models() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    engine = zs.Engine(model, SGD, mesh=zs.Mesh())
    assert engine.training and engine.eval() is engine
    assert not engine.training and not model[1].training
    x = torch.ones(4, 2)
    assert torch.equal(engine(x), engine(x))
    assert engine.train() is engine and engine.training and model[1].training
    assert not engine.train(False).training


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_engine_is_not_copied_but_its_model_is(copied: Callable[[Any], Any]) -> None:
    model = nn.Linear(2, 1)
    engine = zs.Engine(model, SGD)
    with pytest.raises(zs.PlanError, match=r"to be copied or pickled, .* take engine.state_dict\(\) or copy.deepcopy"):
        copied(engine)
    assert torch.equal(copy.deepcopy(model).weight, model.weight)
