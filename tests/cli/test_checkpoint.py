"""`zeroshard checkpoint`: what it says of good checkpoints and of bad ones, in tables and in JSON."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.saved import Normed, damage, engine, save_again, save_run
from pool import Pool

import zeroshard as zs
from zeroshard.cli.main import main

STEP_2 = "checkpoints/step-00000002"


@pytest.fixture(scope="module")
def saved(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`runs/a` of two ranks, and `again`, its last state saved by one."""
    folder = tmp_path_factory.mktemp("saved")
    pool.run(save_run, 2, str(folder / "runs" / "a"))
    save_again(folder / "runs" / "a" / STEP_2, folder / "again")
    return folder


@pytest.fixture
def here(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of them, which is the current folder."""
    shutil.copytree(saved, tmp_path / "w")
    monkeypatch.chdir(tmp_path / "w")
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path / "w"


def said(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    """What is printed; no line is longer than a terminal's, unless it is a sentence."""
    if code:
        with pytest.raises(SystemExit) as stopped:
            main(["checkpoint", *words])
        assert stopped.value.code == code
    else:
        main(["checkpoint", *words])
    captured = capsys.readouterr()
    return captured.err if code == 2 else captured.out


def facts(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> Any:
    return json.loads(said(capsys, *words, "--json", code=code))


def flip(file: Path, offset: int) -> None:
    content = bytearray(file.read_bytes())
    content[offset] ^= 1
    file.write_bytes(bytes(content))


def test_ls(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path("runs/a/checkpoints")
    shutil.copytree(folder / "step-00000002", folder / "step-00000003")
    flip(folder / "step-00000003" / "MANIFEST.json", 40)
    shutil.copytree(folder / "step-00000001", folder / "step-00000001.bad")
    (folder / "step-00000004.tmp-18c2").mkdir()
    (folder / "step-00000004.tmp-18c2" / "rank-00000-of-00002.safetensors").write_bytes(b"12345")
    found = facts(capsys, "ls")
    assert [(line["step"], line["state"]) for line in found] == [
        (1, "whole"),
        (1, "put aside"),
        (2, "whole"),
        (3, "damaged"),
        (4, "left over"),
    ]
    assert found == [{**line, "age": pytest.approx(line["age"], abs=60)} for line in facts(capsys, "ls", "runs/a")]
    assert found[2]["nbytes"] == sum(file.stat().st_size for file in (folder / "step-00000002").iterdir())
    assert found[4]["nbytes"] == 5
    assert (found[0]["ranks"], found[0]["plan"], found[0]["problem"]) == (2, "zero 3, fp32", None)
    assert "step-00000003/MANIFEST.json is " in found[3]["problem"]
    assert found[0]["age"] >= 0
    out = said(capsys, "ls", "runs/a/checkpoints")
    assert max(len(line) for line in out.splitlines() if "MANIFEST" not in line) <= 80
    assert "step-00000004.tmp-18c2" in out
    rows = [line.split() for line in out.splitlines() if line.startswith("step-")]
    assert [row[-1] for row in rows] == ["whole", "aside", "whole", "damaged", "over"]
    assert "step-00000003/MANIFEST.json is " in out
    assert [line["path"] for line in facts(capsys, "ls", "again")] == ["again"]


def test_ls_without_checkpoints(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("empty").mkdir()
    assert said(capsys, "ls", "empty") == "There is no checkpoint in empty.\n"
    assert facts(capsys, "ls", "empty") == []
    assert "nowhere is no folder" in said(capsys, "ls", "nowhere", code=2)


def test_verify(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "step-00000002 is whole: step 2, 2 files, " in said(capsys, "verify", "runs/a")
    assert facts(capsys, "verify", "runs/a")["problems"] == []
    step = Path("runs/a") / STEP_2
    manifest = json.loads((step / "MANIFEST.json").read_text())
    for number, file in enumerate(sorted(step.glob("*.safetensors"))):
        flip(file, -1 - number)
    out = said(capsys, "verify", "runs/a", code=1)
    assert out.count("is damaged in '") == 2
    assert "step-00000002 is damaged: 2 problems." in out
    found = facts(capsys, "verify", str(step), code=1)
    assert (found["step"], found["files"], found["tensors"]) == (2, 2, len(manifest["tensors"]))
    for file, problem in zip(sorted(manifest["files"]), sorted(found["problems"]), strict=True):
        assert file in problem and any(f"'{name}'" in problem for name in manifest["tensors"])
    (step / sorted(manifest["files"])[0]).unlink()
    assert any("No such file" in problem for problem in facts(capsys, "verify", "runs/a", code=1)["problems"])
    (step / "MANIFEST.json").write_text("{")
    (problem,) = facts(capsys, "verify", "runs/a", code=1)["problems"]
    assert "MANIFEST.json is damaged" in problem


def test_info(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = facts(capsys, "info", "runs/a")
    model = Normed()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert found["parameters"] == parameters
    assert (found["fp32_and_adam_nbytes"], found["half_nbytes"]) == (12 * parameters, 2 * parameters)
    kinds = {kind: row["nbytes"] for kind, row in found["kinds"].items()}
    assert kinds["weight"] == 4 * parameters
    assert kinds["exp_avg"] == kinds["exp_avg_sq"] == 4 * trained
    assert kinds["buffer"] == 2 * sum(b.nbytes for name, b in model.named_buffers() if name != "mask")  # both ranks'
    assert sum(kinds.values()) == sum(row["nbytes"] for row in found["tensors"]) < found["nbytes"]
    rows = {row["name"]: row for row in found["tensors"]}
    embed = {"name": "weight:embed.weight", "shape": [13, 10], "dtype": "float32", "nbytes": 520}
    assert rows["weight:embed.weight"].items() >= embed.items()
    assert 1 <= rows["weight:embed.weight"]["chunks"] <= 4  # whole rows and a part of one, of each rank
    assert found["facts"]["extra"] == {"seen": 2}
    out = said(capsys, "info", "runs/a")
    assert max(map(len, out.splitlines()[2:-1])) <= 80
    for part in (
        "weight:embed.weight",
        "13x10",
        "AdamW, 1 group",
        f"12Ψ (fp32 and both states of Adam) is {12 * parameters / 1024:.2f} KiB",
    ):
        assert part in out


def test_diff_across_plans(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = facts(capsys, "diff", "runs/a", "again")
    assert found["equal"]
    assert (found["facts"], found["only_a"], found["only_b"], found["different"]) == ({}, [], [], {})
    assert found["layout"]["ranks"] == [2, 1]
    assert found["layout"]["plan.zero"] == [3, 0]
    assert found["layout"]["rng:torch"] == ["2 copies", "1 copies"]
    kinds = facts(capsys, "info", "again")["kinds"]
    assert found["same"] == sum(row["tensors"] for kind, row in kinds.items() if kind != "rng")
    out = said(capsys, "diff", "runs/a", "again")
    assert f"They hold the same state; {found['same']} tensors equal to the last bit." in out
    assert "plan.zero" in out


def test_diff_of_two_steps(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = facts(capsys, "diff", "runs/a/checkpoints/step-00000001", "again", code=1)
    assert not found["equal"]
    assert found["facts"]["step"] == [1, 2]
    assert found["facts"]["extra.seen"] == [1, 2]
    one, two = engine(zs.Mesh()), engine(zs.Mesh())
    one.load("runs/a/checkpoints/step-00000001")
    two.load("again")
    expected = {}
    for name, values in one.state_dict().items():
        if not torch.equal(values, two.state_dict()[name]) and name != "head.weight":
            expected[name] = (values.double() - two.state_dict()[name].double()).abs().max().item()
    named = {name.partition(":")[2]: row for name, row in found["different"].items() if name[:3] in ("wei", "buf")}
    assert {name: row["largest"] for name, row in named.items()} == expected
    assert len(expected) > 3
    assert "weight:up.weight" not in found["different"]  # frozen
    out = said(capsys, "diff", "runs/a/checkpoints/step-00000001", "again", code=1)
    assert max(map(len, out.splitlines()[2:])) <= 80
    assert "They hold different states" in out


def test_diff_of_other_models(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Normed()
    del model.norm, model.up.bias
    model.up.bias = None
    model.head.weight = model.embed.weight = torch.nn.Parameter(torch.ones(2, 2))
    zs.Engine(model, torch.optim.SGD, zs.Plan(), mesh=zs.Mesh()).save("other", wait=True)
    found = facts(capsys, "diff", "again", "other", code=1)
    assert found["different"]["weight:embed.weight"] == {"a": "float32 13x10", "b": "float32 2x2", "largest": None}
    assert "weight:norm.bias" in found["only_a"] and found["only_b"] == []
    assert "weight:norm.bias is in b only." in said(capsys, "diff", "other", "again", code=1)


def test_blocks_are_compared_one_by_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = []
    for number in range(2):
        model = torch.nn.Linear(1100, 1000, bias=False)  # more than a block
        with torch.no_grad():
            model.weight.fill_(1.0)
            model.weight[-1, -1] += 0.25 * number
            model.weight[0, 0] = float("inf")
        paths.append(str(tmp_path / str(number)))
        zs.Engine(model, torch.optim.SGD, zs.Plan(), mesh=zs.Mesh()).save(paths[-1], wait=True)
    assert facts(capsys, "diff", *paths, code=1)["different"]["weight:weight"]["largest"] == 0.25


@pytest.mark.parametrize(
    "words, part",
    [
        ([], "the action is missing"),
        (["list"], "there is no action 'list'"),
        (["verify", "nowhere"], "nowhere is no checkpoint: there is no such folder"),
        (["info", "runs"], "runs is no checkpoint: the folder has no MANIFEST.json"),
        (["diff", "again", "nowhere"], "nowhere is no checkpoint"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(
    words: list[str], part: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = said(capsys, *words, code=2)
    assert part in message
    assert message.count("\n") == 1


@pytest.mark.parametrize("words", [["verify"], ["diff", "again"], ["info", "again", "--wrong"]])
def test_wrong_options_are_refused(words: list[str], here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said(capsys, *words, code=2)


def test_damage_that_diff_and_info_meet_is_named(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = damage(Path("again"))
    assert f"{file} is damaged in 'weight:" in said(capsys, "diff", "runs/a", "again", code=2)
    flip(Path("again/MANIFEST.json"), 30)
    assert "MANIFEST.json is " in said(capsys, "info", "again", code=2)


def test_help_names_the_actions(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        said(capsys, "--help")
    out = capsys.readouterr().out
    assert left.value.code == 0 and all(f"\n  {action} " in out for action in ("ls", "verify", "info", "diff"))
