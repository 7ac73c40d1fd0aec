"""Unknown settings of a plan, as users of other libraries type them."""

import dataclasses
import inspect
import pickle
from typing import Any

import pytest

import zeroshard as zs
from zeroshard.planning.foreign_names import MEANT

FIELDS = {field.name for field in dataclasses.fields(zs.Plan)}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tensor": 2}, "Plan has no setting 'tensor'; write tensor_parallel=2."),
        ({"pp": 2}, "Plan has no setting 'pp'; write pipeline_parallel=2."),
        ({"gradient_accumulation_steps": 4}, "write microbatches=4, which cuts the batch of train_step"),
        ({"stage": 3}, "write zero=3."),
        ({"fp16": True}, 'write precision="fp16".'),
        ({"lr": 1e-3}, "it belongs to the optimizer: zs.Engine(model, functools.partial(torch.optim.AdamW, lr=...)"),
        ({"max_grad_norm": 1.0}, "write clip_norm=1.0."),
        ({"zerro": 3}, "write zero=3."),
        ({"tensor_paralel_size": 3}, "'tensor_parallel_size' is none either: write tensor_parallel=3."),
        ({"flux": 3}, "those that it has are zero, "),
    ],
)
def test_the_setting_that_is_meant_is_named(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(zs.PlanError) as error:
        zs.Plan(**settings)
    assert words in str(error.value)
    with pytest.raises(zs.PlanError):
        dataclasses.replace(zs.Plan(), **settings)


def test_advice_names_settings_that_there_are_for_names_that_there_are_not() -> None:
    assert not MEANT.keys() & FIELDS
    for advice in MEANT.values():
        for written in advice.partition("write ")[2:]:
            assert not written or written.partition("=")[0] in FIELDS


def test_the_signature_of_a_plan_and_its_copies_stay() -> None:
    assert set(inspect.signature(zs.Plan).parameters) == FIELDS
    plan = zs.Plan(zero=3, microbatches=2)
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert dataclasses.replace(plan, zero=2) == zs.Plan(zero=2, microbatches=2)
