"""Options of the main job, in files of earlier versions."""

from pathlib import Path

import pytest

from zeroshard.errors import ConfigError
from zeroshard.train.config import TrainConfig
from zeroshard.train.toml_config import dump_toml, load_toml


def test_a_run_folder_of_an_earlier_version_loads(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text('model = "tiny"\nbatch = 8\n[plan]\nstages = 2\nmicrobatches = 4\n')
    stored = load_toml(path, TrainConfig)
    assert (stored.batch_per_rank, stored.plan.pipeline.stages) == (8, 2)
    dump_toml(stored, path)
    assert "\nbatch_per_rank = 8\n" in path.read_text() and load_toml(path, TrainConfig) == stored
    path.write_text("batch = 8\n")
    with pytest.raises(ConfigError, match="unknown option batch"):
        load_toml(path, TrainConfig)
    path.write_text("batch = 8\nbatch_per_rank = 4\n[plan]\nzero = 1\n")
    with pytest.raises(ConfigError, match="unknown option batch;"):
        load_toml(path, TrainConfig)
