"""Folders of Hugging Face whose configuration names code beside it."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD

import zeroshard as zs
from zeroshard.cli.main import main
from zeroshard.errors import ModelError

transformers = pytest.importorskip("transformers")


CODE = """
import torch
from torch import nn
from transformers import PreTrainedModel, PretrainedConfig


class OwnConfig(PretrainedConfig):
    model_type = "own_code"

    def __init__(self, width=4, **kwargs):
        self.width = width
        super().__init__(**kwargs)


class OwnModel(PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.layer = nn.Linear(config.width, config.width)
        self.post_init()

    def forward(self, x):
        return self.layer(x).square().mean()
"""


def test_a_folder_with_code_of_its_own_takes_the_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code in the folder is not run; it goes along into an export."""
    (tmp_path / "own_code.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    own: Any = importlib.import_module("own_code")
    own.OwnModel(own.OwnConfig()).save_pretrained(folder := tmp_path / "model")
    (folder / "own_code.py").write_text(CODE)
    table = json.loads((folder / "config.json").read_text())
    table["auto_map"] = {"AutoConfig": "own_code.OwnConfig", "AutoModel": "own_code.OwnModel"}
    (folder / "config.json").write_text(json.dumps(table))
    with pytest.raises(ModelError, match="code of its own, which is not run; import the class of the model from it"):
        zs.from_pretrained(folder, SGD)
    engine = zs.from_pretrained(folder, SGD, model=own.OwnModel)
    engine.train_step(torch.ones(2, 4))
    engine.export(tmp_path / "out")
    assert (tmp_path / "out" / "own_code.py").read_text() == CODE
    again = own.OwnModel.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(again[name], value) for name, value in engine.state_dict().items())
    transformers.AutoConfig.register("own_code", own.OwnConfig)
    transformers.AutoModel.register(own.OwnConfig, own.OwnModel)
    assert type(zs.from_pretrained(folder, SGD).model) is own.OwnModel


def test_a_plan_of_it_names_the_way_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = {"model_type": "other_code", "auto_map": {"AutoConfig": "other_code.OtherConfig"}}
    (tmp_path / "config.json").write_text(json.dumps(table))
    with pytest.raises(SystemExit):
        main(["plan", "--model", str(tmp_path / "config.json"), "--gpu", "H100-80"])
    assert "names code of its own, which is not run; import it in code of yours" in capsys.readouterr().err
