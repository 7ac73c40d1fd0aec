"""Shapes of models by their configurations alone, against published numbers and the built-in model itself."""

import json
from pathlib import Path

import pytest
import torch
from planner.questions import MODELS, PUBLISHED

from zeroshard.errors import ModelError
from zeroshard.train.gpt import GPT
from zeroshard.train.model_shape import shape_of, stated_dtype
from zeroshard.train.sizes import SIZES


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_the_published_ones(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS[name]))
    shape = shape_of(str(tmp_path))
    assert shape is not None
    assert (shape.parameters / 1e9, shape.used / 1e9) == pytest.approx(PUBLISHED[name], rel=0.02)
    assert stated_dtype(str(tmp_path)) == "bfloat16"


@pytest.mark.parametrize("name", ["tiny", "gpt2"])
def test_built_in_sizes_have_the_parameters_of_the_model(name: str) -> None:
    with torch.device("meta"):
        model = GPT(SIZES[name])
    shape = shape_of(name)
    assert shape is not None and stated_dtype(name) is None
    assert shape.parameters == shape.used == sum(parameter.numel() for parameter in model.parameters())


def test_unknown_families_have_no_shape_and_files_without_a_table_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**MODELS["llama-7b"], "model_type": "another"}))
    assert shape_of(str(file)) is None
    file.write_text(json.dumps({"model_type": "llama"}))
    assert shape_of(str(file)) is None
    file.write_text("[1]")
    with pytest.raises(ModelError, match=r"holds a list; a config.json holds a table"):
        shape_of(str(file))
    file.write_text("{")
    with pytest.raises(ModelError, match=r"cannot be read as JSON"):
        shape_of(str(file))
