"""`zeroshard profile` as a person calls it, and what the other commands make of its file."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from zeroshard.cli import profile as profile_command
from zeroshard.cli.main import main
from zeroshard.pipeline.partition.profile import Profile

QUICK = ("--sequence", "8", "--rows", "2", "--repeats", "1", "--device", "cpu")
LLAMA = {"model_type": "llama", "vocab_size": 300, "hidden_size": 16, "intermediate_size": 32}
LLAMA |= {"num_hidden_layers": 3, "num_attention_heads": 2, "max_position_embeddings": 32}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    main(["profile", *words, *QUICK])
    return capsys.readouterr().out


def names(profile: Profile) -> list[str]:
    return [layer.name for layer in profile.layers]


def test_the_file_and_the_table_say_the_same(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = run(capsys)
    profile = Profile.load(Path("profile.json"))
    assert (profile.model, profile.microbatch_rows) == ("tiny at 8 tokens", 2)
    assert names(profile) == ["prefix", *(f"blocks.{n}" for n in range(5)), "suffix"]
    hidden = 2 * 8 * 128 * 4
    assert [layer.activation_bytes for layer in profile.layers] == [hidden] * 6 + [4]
    block = (12 * 128 * 128 + 2 * 128) * 4
    assert [layer.parameter_bytes for layer in profile.layers] == [256 * 128 * 4, *[block] * 5, (256 + 1) * 128 * 4]
    assert all(layer.forward_seconds > 0 and layer.backward_seconds > 0 for layer in profile.layers)
    assert len({layer.saved_bytes for layer in profile.layers[1:-1]}) == 1
    assert f"1 thread, torch {torch.__version__}" in profile.machine
    rows = [line.split() for line in shown.splitlines()]
    assert max(len(line) for line in shown.splitlines()) <= 80
    first = profile.layers[1]
    times = [f"{1e3 * first.forward_seconds:,.3f}", f"{1e3 * first.backward_seconds:,.3f}"]
    assert ["blocks.0", *times, "8.00", "KiB", f"{first.saved_bytes / 1024:.2f}", "KiB", "769.00", "KiB"] in rows
    total = next(row for row in rows if row and row[0] == "all")
    assert total[1] == f"{1e3 * sum(layer.forward_seconds for layer in profile.layers):,.3f}"
    assert total[-2:] == ["4.01", "MiB"]
    assert "tiny at 8 tokens, 2 rows per microbatch, on " in " ".join(shown.split())
    assert "Wrote profile.json. Next steps:" in shown
    assert "  zeroshard simulate --profile profile.json --stages 4\n" in shown
    assert "  zeroshard partition --profile profile.json --devices 4 --link-gbps 10\n" in shown


def test_what_it_says_to_do_next_works(capsys: pytest.CaptureFixture[str]) -> None:
    shown = run(capsys, "--out", "a profile.json")
    commands = [line.split() for line in shown.splitlines() if line.startswith("  zeroshard")]
    assert [command[1] for command in commands] == ["simulate", "partition"]
    Path("a profile.json").rename("profile.json")
    for _, command, *_ in commands:
        extra = {"simulate": ("--stages", "4"), "partition": ("--devices", "4", "--link-gbps", "10")}[command]
        main([command, "--profile", "profile.json", *extra, "--json"])
        facts = json.loads(capsys.readouterr().out)
        assert facts["step_seconds" if command == "simulate" else "seconds_per_microbatch"] > 0


def test_json_is_what_the_file_holds(capsys: pytest.CaptureFixture[str]) -> None:
    shown = run(capsys, "--json", "--dropout", "0.1", "--out", "other.json")
    assert json.loads(shown) == json.loads(Path("other.json").read_text())
    assert not Path("profile.json").exists()


def test_dropout_keeps_its_masks(capsys: pytest.CaptureFixture[str]) -> None:
    saved = []
    for words in ((), ("--dropout", "0.1")):
        run(capsys, *words)
        saved.append(Profile.load(Path("profile.json")).layers[0].saved_bytes)
    assert saved[0] == 2 * 9 * 8  # the tokens
    assert saved[1] > saved[0]


def test_a_hugging_face_model(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    Path("config.json").write_text(json.dumps(LLAMA))
    shown = run(capsys, "--model", "config.json")
    profile = Profile.load(Path("profile.json"))
    assert profile.model == "config.json at 8 tokens"
    assert names(profile) == ["prefix", *(f"model.layers.{n}" for n in range(3)), "suffix"]
    assert profile.layers[0].parameter_bytes == 300 * 16 * 4
    assert "model.layers.2" in shown


def test_fewer_layers_than_four_have_as_many_stages(tmp_path: Path) -> None:
    (layer, *_) = Profile.load(_small(tmp_path)).layers
    short = Profile("m", "h", 1, (layer, layer))
    assert profile_command.next_steps(short, Path("p"))[0] == "zeroshard simulate --profile p --stages 2"


def _small(folder: Path) -> Path:
    path = folder / "small.json"
    main(["profile", *QUICK, "--out", str(path)])
    return path


def test_threads_are_one_unless_the_environment_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(profile_command, "run_profile", lambda argv, threads: asked.append(threads))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    main(["profile"])
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    main(["profile"])
    assert asked == [1, None]


def test_threads_are_set_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        profile_command.run_profile([*QUICK, "--json"], threads=2)
        assert ", 2 threads, torch " in json.loads(capsys.readouterr().out)["machine"]
    finally:
        torch.set_num_threads(1)


def test_the_processor_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = tmp_path / "cpuinfo"
    facts.write_text("processor\t: 0\nmodel name\t: A Fine CPU: 9000\nflags\t: x\n\nmodel name\t: Another\n")
    monkeypatch.setattr(profile_command, "CPU_FACTS", facts)
    assert profile_command.machine(torch.device("cpu")) == f"A Fine CPU: 9000, 1 thread, torch {torch.__version__}"
    for text in ("processor\t: 0\n", None):
        facts.unlink() if text is None else facts.write_text(text)
        named = profile_command.machine(torch.device("cpu"))
        assert named.startswith(tuple(filter(None, (os.uname().machine, "x86", "arm", "AMD", "Intel"))))


WRONG = [
    (("--rows", "0"), "rows is 0; it must be 1 or more"),
    (("--sequence", "0"), "sequence is 0; it must be 1 or more"),
    (("--repeats", "-1"), "repeats is -1; it must be 1 or more"),
    (("--dropout", "1.5"), "dropout is 1.5; it must be between 0 and 1"),
    (("--out", "nowhere/profile.json"), "nowhere/profile.json cannot be written; name a file in a folder that exists"),
    (("--out", "."), ". cannot be written; name a file"),
    (("--device", "tpu"), "--device is 'tpu'; it must be auto, cpu, or the type"),
    (("--model", "tinny"), "--model tinny names no model; did you mean tiny?"),
    (("--model", "nowhere/config.json"), "--model names nowhere/config.json, which does not exist"),
    (("--tokenizer", "nowhere.json"), "nowhere.json"),
    (("--modle", "tiny"), "--modle"),
]


@pytest.mark.parametrize("words, said", WRONG)
def test_what_is_wrong_is_said_and_exits_with_2(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["profile", *words])
    assert ended.value.code == 2
    captured = capsys.readouterr()
    assert said in " ".join((captured.out + captured.err).replace("│", " ").split())
    assert list(Path().iterdir()) == []


def test_a_gpu_that_is_not_there(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        main(["profile", "--device", "cuda"])
    assert ended.value.code == 2
    assert "PlanError: --device cuda needs a GPU, and PyTorch sees none of that type" in capsys.readouterr().err


def test_a_model_that_cannot_be_cut(capsys: pytest.CaptureFixture[str]) -> None:
    """Reformer's blocks run inside of an autograd function of its own, without a graph."""
    pytest.importorskip("transformers")
    sizes = {"vocab_size": 300, "hidden_size": 32, "feed_forward_size": 48, "num_attention_heads": 4}
    sizes |= {"attention_head_size": 8, "attn_layers": ["local", "local"], "axial_pos_embds": False}
    kind = {"model_type": "reformer", "is_decoder": True, "local_attn_chunk_length": 16, "num_buckets": 2}
    Path("config.json").write_text(json.dumps(kind | sizes))
    with pytest.raises(SystemExit) as ended:
        main(["profile", "--model", "config.json", *QUICK])
    assert ended.value.code == 2
    assert "which hide from a stage what its backward needs" in " ".join(capsys.readouterr().err.split())
