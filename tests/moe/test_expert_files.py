"""Experts in files: exports that transformers loads bit for bit, and weights that are read in either form."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from safetensors.torch import load_file, save_file
from selection import by_default
from torch import Tensor

import zeroshard as zs
from zeroshard.checkpoint.boxes import Box, BoxValues
from zeroshard.checkpoint.expert_names import MIXTRAL, USUAL, StackedTensors, in_files
from zeroshard.cli.main import main
from zeroshard.errors import CheckpointError

pytest.importorskip("transformers")
from moe.families import FAMILIES, seeded, words

SPLIT = {"mixtral": "block_sparse_moe.experts.3.w3.weight", "olmoe": "mlp.experts.3.up_proj.weight"}


def save(family: str, path: Path) -> Any:
    """The checkpoint of a model that was not trained; the model."""
    model = seeded(family)
    zs.Engine(model, torch.optim.SGD, zs.Plan(), mesh=zs.Mesh()).save(str(path), wait=True)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_exports_have_the_names_of_the_family_and_load_bit_for_bit(family: str, tmp_path: Path) -> None:
    model = save(family, tmp_path / "c")
    main(["export", str(tmp_path / "c"), "--out", str(tmp_path / "ours")])
    expected = seeded(family)
    expected.save_pretrained(tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / each / "model.safetensors") for each in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert family not in SPLIT or any(name.endswith(SPLIT[family]) for name in ours)
    loaded, facts = type(model).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not facts["missing_keys"] and not facts["unexpected_keys"] and not facts["mismatched_keys"]
    assert all(torch.equal(values, expected.state_dict()[name]) for name, values in loaded.state_dict().items())


@pytest.mark.parametrize("form", ["ours", "theirs", "stacked"])
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_read_in_either_form(family: str, form: str, tmp_path: Path) -> None:
    model = seeded(family)
    if form == "ours":
        save(family, tmp_path / "files")
    elif form == "theirs":
        model.save_pretrained(tmp_path / "files", max_shard_size="4KB")
    else:
        (tmp_path / "files").mkdir()
        tensors = {name: values.clone() for name, values in model.state_dict().items()}
        save_file(tensors, tmp_path / "files" / "model.safetensors")
    torch.manual_seed(1)
    other = FAMILIES[family]()
    engine = zs.Engine(other, torch.optim.SGD, zs.Plan(), mesh=zs.Mesh())
    engine.load_weights(tmp_path / "files")
    state, expected = engine.state_dict(), model.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(values, expected[name]) for name, values in state.items())


def train_and_save(mesh: zs.Mesh, family: str, zero: int, path: str) -> dict[str, Tensor]:
    """Weights after a step with experts on two ranks, which are saved."""
    plan = zs.Plan(zero=zero, expert_parallel=2)
    engine = zs.Engine(seeded(family, experts=6), torch.optim.AdamW, plan, mesh=mesh)
    engine.train_step(words(mesh.rank))
    engine.save(path, wait=True)
    return engine.state_dict()


def load_elsewhere(mesh: zs.Mesh, family: str, zero: int, path: str) -> dict[str, Tensor]:
    """Weights that were read from files with experts on two ranks."""
    torch.manual_seed(mesh.rank)
    plan = zs.Plan(zero=zero, expert_parallel=2)
    engine = zs.Engine(FAMILIES[family](experts=6), torch.optim.AdamW, plan, mesh=mesh)
    engine.load_weights(path)
    return engine.state_dict()


STAGES = {"mixtral": 0, "deepseek_v3": 3, "gpt_oss": 2, "switch_transformers": 3}  # of ZeRO


@pytest.mark.parametrize("family", by_default(STAGES, "mixtral", "switch_transformers"))
def test_experts_of_several_ranks_are_exported_and_read(pool: Pool, family: str, tmp_path: Path) -> None:
    zero = STAGES[family]
    state = pool.run(train_and_save, 2, family, zero, str(tmp_path / "c"))[0]
    main(["export", str(tmp_path / "c"), "--out", str(tmp_path / "w")])
    model, facts = type(FAMILIES[family]()).from_pretrained(tmp_path / "w", output_loading_info=True)  # type: ignore[attr-defined]
    assert not facts["missing_keys"] and not facts["unexpected_keys"] and not facts["mismatched_keys"]
    assert all(torch.equal(values, state[name]) for name, values in model.state_dict().items())
    for found in pool.run(load_elsewhere, 2, family, 3 - zero, str(tmp_path / "w")):
        assert all(torch.equal(values, state[name]) for name, values in found.items())


@pytest.mark.parametrize("damage", ["missing", "last", "unknown", "shape"])
def test_names_of_experts_must_be_complete(damage: str, tmp_path: Path) -> None:
    model = seeded("mixtral")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.block_sparse_moe.experts.2.w1.weight"
    message = f"lacks '{name}', and holds other weights of these 4 experts"
    if damage == "missing":
        del tensors[name]
    elif damage == "last":
        message = "'model.layers.1.mlp.experts.down_proj' is"
        for part in ("w1", "w2", "w3"):
            del tensors[f"model.layers.1.block_sparse_moe.experts.3.{part}.weight"]
        message = "experts.(down|gate_up)_proj"
    elif damage == "unknown":
        tensors["model.layers.1.block_sparse_moe.experts.2.w4.weight"] = tensors[name].clone()
        message = "experts.2.w4.weight"
    else:
        tensors[name] = tensors[name][:-1].clone()
        message = "experts need two dimensions and one shape"
    save_file(tensors, tmp_path / "model.safetensors")
    engine = zs.Engine(FAMILIES["mixtral"](), torch.optim.SGD, zs.Plan(), mesh=zs.Mesh())
    with pytest.raises(CheckpointError, match=message):
        engine.load_weights(tmp_path)


class Held:
    """Tensors in memory, which count the elements that are read."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors, self.read = tensors, 0
        self.shapes = {name: tuple(values.shape) for name, values in tensors.items()}

    def fill(self, name: str, targets: list[BoxValues]) -> None:
        """Fill boxes."""
        for box, values in targets:
            values.copy_(self.tensors[name][box.slices(Box.whole(self.shapes[name]))])
            self.read += values.numel()

    def whole(self, name: str) -> Tensor:
        """All of a tensor."""
        return self.tensors[name].flatten()


@pytest.mark.parametrize("family", [MIXTRAL, USUAL])
def test_boxes_of_stacks_read_their_elements_alone(family: Any) -> None:
    stack = torch.arange(4 * 6 * 5.0).view(4, 6, 5)
    gate = torch.arange(3.0)
    model = {"a.mlp.experts.gate_up_proj": stack, "a.mlp.gate.weight": gate, "a.mlp.experts.down_proj": stack.mT}
    files = {}
    for name, values in model.items():
        for part in in_files(name, tuple(values.shape), family):
            flat = values.flatten()[part.start :][: torch.Size(part.shape).numel()]
            files[part.name] = flat.view(part.shape)
    assert f"a.{family.block}.gate.weight" in files and len(files) == 13
    held = Held(files)
    tensors = StackedTensors(held, "files")
    assert tensors.shapes == {name: tuple(values.shape) for name, values in model.items()}
    assert all(torch.equal(tensors.whole(name), values.flatten()) for name, values in model.items())
    box = Box((1, 2, 1), (2, 3, 4))
    values = torch.zeros(box.shape)
    tensors.fill("a.mlp.experts.gate_up_proj", [BoxValues(box, values)])
    assert torch.equal(values, stack[1:3, 2:5, 1:5]) and held.read == values.numel()
    with pytest.raises(CheckpointError, match="was asked for"):
        tensors.fill("a.mlp.experts.gate_up_proj", [BoxValues(Box((3, 0, 0), (2, 6, 5)), torch.zeros(2, 6, 5))])
