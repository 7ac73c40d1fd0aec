"""Shapes of models by their configurations alone, against published numbers and the built-in model itself."""

import json
from pathlib import Path

import pytest
import torch
from planner.questions import MODELS, PUBLISHED

from zeroshard.errors import ModelError
from zeroshard.train.gpt import GPT
from zeroshard.train.model_shape import row_length, shape_of, stated_dtype
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


def test_rows_are_no_longer_than_a_model_has_positions(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**MODELS["llama-7b"], "max_position_embeddings": 128}))
    assert row_length(str(tmp_path), None, 1024) == 128
    assert row_length(str(tmp_path), 64, 1024) == 64
    with pytest.raises(ModelError, match="has 128 positions and a row 129 tokens; set sequence to 128 or less"):
        row_length(str(tmp_path), 129, 1024)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    assert (row_length(str(tmp_path), None, 1024), row_length(str(tmp_path), 4096, 1024)) == (1024, 4096)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "xlnet", "max_position_embeddings": -1}))
    assert (row_length(str(tmp_path), None, 1024), row_length(str(tmp_path), 4096, 1024)) == (1024, 4096)
    assert (row_length("tiny", None, 1), row_length("tiny", 32, 1)) == (SIZES["tiny"].context, 32)
