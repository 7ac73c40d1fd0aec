"""Weights of other programs: which files are read, which rows of them, and what is refused unread."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.faults import read_box
from safetensors.torch import save_file

from zeroshard.checkpoint import Box, Notes, TensorPiece, WeightFiles, WriteOrder, shard_file, write
from zeroshard.checkpoint import weights as module
from zeroshard.comm.mesh import Mesh
from zeroshard.errors import CheckpointError

INDEX = "model.safetensors.index.json"
WEIGHTS = {
    "body.up": torch.arange(60.0).view(5, 4, 3),
    "body.norm": torch.arange(7.0).to(torch.bfloat16),
    "body.scale": torch.tensor(2.5),
    "body.none": torch.empty(0, 3),
    "head": torch.randn(4, 6, generator=torch.Generator().manual_seed(0)),
}
NAMES = list(WEIGHTS)


def sharded(folder: Path, weights: dict[str, torch.Tensor] = WEIGHTS) -> Path:
    """A folder with an index and two files."""
    folder.mkdir(exist_ok=True)
    half = len(weights) // 2
    files = {"a-1.safetensors": list(weights)[:half], "a-2.safetensors": list(weights)[half:]}
    for file, names in files.items():
        save_file({name: weights[name] for name in names}, folder / file)
    where = {name: file for file, names in files.items() for name in names}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


def single(folder: Path, weights: dict[str, torch.Tensor] = WEIGHTS) -> Path:
    """A folder with one file."""
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("form", ["file", "other file", "folder", "index", "sharded"])
def test_all_forms_are_read(form: str, tmp_path: Path) -> None:
    path = sharded(tmp_path / "w") if form in ("index", "sharded") else single(tmp_path / "w")
    if form == "other file":
        (path / "model.safetensors").rename(path / "other.safetensors")
    path = {"file": path / "model.safetensors", "index": path / INDEX}.get(form, path)
    files = WeightFiles(path, {})
    files.fit(NAMES, {})
    assert sorted(files.names("weight")) == sorted(NAMES)
    for name, values in WEIGHTS.items():
        assert files.shape(f"weight:{name}") == tuple(values.shape)
        flat = values.reshape(-1)
        for start in range(flat.numel() + 1):
            for stop in range(start, flat.numel() + 1, 1 + 4 * (form != "file")):
                into = torch.full((stop - start,), -1.0)
                read_box(files, f"weight:{name}", into, start)
                assert torch.equal(into, flat[start:stop].float())
        assert torch.equal(files.whole(f"buffer:{name}"), flat)
        assert files.whole(f"buffer:{name}").dtype == values.dtype
    with pytest.raises(CheckpointError, match=r"holds 'body.up\[0:5,0:4,0:3\]', and \[0:6,0:4,0:3\] was asked for"):
        read_box(files, "weight:body.up", torch.empty(72), box=Box.whole((6, 4, 3)))
    with pytest.raises(CheckpointError, match="holds no tensor 'weight:tail'"):
        read_box(files, "weight:tail", torch.empty(1))


def test_rows_outside_of_the_range_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage(monkeypatch)
    files = WeightFiles(single(tmp_path / "w"), {})
    size, before = WEIGHTS["body.up"].element_size(), files._files.bytes_read
    into = torch.empty(20)
    read_box(files, "weight:body.up", into, 13)  # begins and ends in the middle of a row of three
    assert torch.equal(into, torch.arange(13.0, 33.0))
    assert files._files.bytes_read - before == size * 21  # the row in which it begins is read whole


def stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convert two rows of `body.up` at once."""
    for each in (module, shard_file):
        monkeypatch.setattr(each, "STAGING", 2 * 8 * 12)


@pytest.mark.parametrize("form", ["file", "checkpoint"])
def test_a_box_of_a_tensor(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A range of the columns that a rank has, whatever the file is."""
    stage(monkeypatch)
    values = WEIGHTS["body.up"]
    path = single(tmp_path / "w")
    if form == "checkpoint":
        facts = {"step": 1, "optimizer": {}, "extra": {}}
        order = WriteOrder(
            tmp_path / "c", "t", [TensorPiece.whole("weight:body.up", values)], facts, lambda every: every[0]
        )
        write(order, Mesh(), Notes(Mesh(), "t"))
        path = tmp_path / "c"
    files, columns = WeightFiles(path, {}), Box((1, 1, 0), (4, 2, 3))
    wanted = values[1:, 1:3].reshape(-1)
    for start in range(25):
        for stop in range(start, 25):
            into = torch.empty(stop - start)
            read_box(files, "weight:body.up", into, start, columns)
            assert torch.equal(into, wanted[start:stop])
    with pytest.raises(CheckpointError, match=r"\[1:6,1:3,0:3\]"):
        read_box(files, "weight:body.up", torch.empty(30), 0, Box((1, 1, 0), (5, 2, 3)))


def test_tied_names(tmp_path: Path) -> None:
    tied = {"head.weight": "embed.weight"}
    table = torch.arange(6.0).view(3, 2)
    for number, held in enumerate((["embed.weight"], ["head.weight"], ["embed.weight", "head.weight"])):
        files = WeightFiles(single(tmp_path / str(number), {name: table.clone() for name in held}), tied)
        files.fit(["embed.weight"], {})
        assert files.names("weight") == ["embed.weight"]
        into = torch.empty(3)
        read_box(files, "weight:embed.weight", into, 2)
        assert into.tolist() == [2, 3, 4]
    save_file({"embed.weight": table, "head.weight": table + (table == 4)}, tmp_path / "2" / "model.safetensors")
    files = WeightFiles(tmp_path / "2", tied)
    read_box(files, "weight:embed.weight", torch.empty(3), 1)
    with pytest.raises(CheckpointError, match=r"other values under 'head.weight' than under 'embed.weight'"):
        read_box(files, "weight:embed.weight", torch.empty(3), 2)
    save_file({"embed.weight": table, "head.weight": table[:2].clone()}, tmp_path / "2" / "model.safetensors")
    with pytest.raises(CheckpointError, match="in two shapes"):
        WeightFiles(tmp_path / "2", tied)


def named(prefix: str, *names: str) -> dict[str, torch.Tensor]:
    return {prefix + name: torch.full((2,), float(sum(map(ord, name)))) for name in names}


@pytest.mark.parametrize(
    "here, there",
    [
        (named("model.", "a", "b.c", "d"), named("", "a", "b.c", "d")),
        (named("", "a", "b.c", "d"), named("module._orig_mod.", "a", "b.c", "d")),
        (named("m.", "a", "b") | named("", "head"), named("", "a", "b", "head")),
        (named("", "a", "b", "head"), named("m.", "a", "b") | named("", "head")),
        (named("", "a.w", "w"), named("", "a.w", "w")),
    ],
)
def test_a_prefix_more_or_less(here: dict[str, Any], there: dict[str, Any], tmp_path: Path) -> None:
    files = WeightFiles(single(tmp_path / "w", there), {})
    files.fit(here, {})
    assert set(files.names("weight")) == set(here)
    for name, values in here.items():
        into = torch.empty(2)
        read_box(files, f"weight:{name}", into)
        assert torch.equal(into, values)


def test_a_prefix_that_is_not_clear_is_refused(tmp_path: Path) -> None:
    files = WeightFiles(single(tmp_path / "w", named("", "w")), {"y.w": "x.w"})
    with pytest.raises(CheckpointError, match="more than one prefix"):
        files.fit(["x.w"], {})


def test_missing_and_strange_names_are_listed(tmp_path: Path) -> None:
    files = WeightFiles(single(tmp_path / "w", named("", *"abcdefgh")), {})
    with pytest.raises(CheckpointError) as caught:
        files.fit(["a", "y", "z"], {})
    assert "lacks 'y', 'z' and holds 'b', 'c', 'd', 'e', 'f' and 2 more, which the model does not" in str(caught.value)
    with pytest.raises(CheckpointError, match=r"lacks 'z'; it holds 'a', 'b'.* and 3 more\. Build"):
        files.fit([*"abcdefgh", "z"], {})
    files.fit(["a"], {}, ["^[b-f]$", "[gh]"])
    assert files.names("weight") == ["a"]


def test_buffers_are_no_parameters(tmp_path: Path) -> None:
    files = WeightFiles(single(tmp_path / "w", named("net.", "a", "mean", "mask")), {})
    files.fit(["a"], {"mean": (2,), "mask": None, "absent": (9,)})
    assert files.names("weight") == ["a"]
    assert sorted(files.names("buffer")) == ["mask", "mean"]
    assert files.shape("buffer:absent") is None
    assert torch.equal(files.whole("buffer:mean"), named("", "mean")["mean"])
    with pytest.raises(CheckpointError, match=r"'mean' is \(2,\) there and \(3,\) here"):
        files.fit(["a"], {"mean": (3,), "mask": None})


class Touched:
    """Says so when it is unpickled."""

    def __reduce__(self) -> Any:
        return pytest.fail, ("a pickle was opened",)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.PTH", "model.safetensors"])
def test_pickles_are_not_opened(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(pickle.dumps(Touched()))
    way_out = "cannot be read" if name.endswith("safetensors") else "pickle, .* write its weights with safetensors"
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(CheckpointError, match=way_out):
            WeightFiles(path, {})


@pytest.mark.parametrize(
    "file",
    ["../a-1.safetensors", "/a-1.safetensors", "b/a.safetensors", "b\\a.safetensors", ".safetensors", "a.bin", 3],
)
def test_an_index_names_files_in_its_folder_only(file: Any, tmp_path: Path) -> None:
    folder = sharded(tmp_path / "w")
    sharded(tmp_path)
    table = json.loads((folder / INDEX).read_text())
    table["weight_map"]["body.up"] = file
    (folder / INDEX).write_text(json.dumps(table))
    with pytest.raises(CheckpointError, match="no name of a safetensors file in its folder"):
        WeightFiles(folder, {})


@pytest.mark.parametrize(
    "text, part",
    [
        ("{", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
        ("\xff", "weight_map|cannot be read"),
        ("[]", "weight_map"),
        ('{"weight_map": []}', "weight_map"),
        ('{"weight_map": {"body.up": "a-3.safetensors"}}', "a-3.safetensors cannot be read"),
        ('{"weight_map": {"body.up": "a-2.safetensors"}}', "lacks 'body.up', which"),
    ],
)
def test_a_wrong_index_is_refused(text: str, part: str, tmp_path: Path) -> None:
    (sharded(tmp_path) / INDEX).write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError, match=part):
        WeightFiles(tmp_path, {})


def test_what_is_no_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        WeightFiles(tmp_path / "nowhere", {})
    with pytest.raises(CheckpointError, match="has no safetensors file"):
        WeightFiles(tmp_path, {})
    (tmp_path / "a.txt").touch()
    with pytest.raises(CheckpointError, match="no safetensors file by its name"):
        WeightFiles(tmp_path / "a.txt", {})
    for name in ("a", "b"):
        save_file({name: torch.zeros(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(CheckpointError, match=f"2 safetensors files and no {INDEX}"):
        WeightFiles(tmp_path, {})
    (tmp_path / "model.safetensors").write_bytes((single(tmp_path / "w") / "model.safetensors").read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"model.safetensors is cut short"):
        WeightFiles(tmp_path, {})


def test_quantized_weights_are_refused(tmp_path: Path) -> None:
    files = WeightFiles(single(tmp_path / "w", {"a": torch.ones(3, dtype=torch.int8)}), {})
    with pytest.raises(CheckpointError, match=r"'a' as torch.int8 and the model has torch.float32"):
        read_box(files, "weight:a", torch.empty(3))
