"""`zeroshard verify` as a person calls it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from zeroshard.cli.main import main

ONE = ("--ranks", "1", "--steps", "1")
MODULE = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))

    def forward(self, x, y):
        return self.layers(x)


def batch(rows):
    return {"x": torch.randn(rows, 4), "y": torch.arange(rows) % 3}


def loss(output, batch):
    return nn.functional.cross_entropy(output, batch["y"])


def padded(output, batch):
    return nn.functional.cross_entropy(output, batch["y"], ignore_index=1)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


class Odd(Net):
    def forward(self, x, y):
        return super().forward(x, y) * (1 + (len(x) < 4))
"""


@pytest.fixture(autouse=True)
def _inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    main(["verify", *arguments])
    return capsys.readouterr().out


def test_a_built_in_size_is_narrowed_and_equal(capsys: pytest.CaptureFixture[str]) -> None:
    shown = run(capsys, "--model", "gpt2-xl", "--zero", "3", "--microbatches", "2", *ONE)
    assert "The run under the plan is that of the plain loop in one process." in shown
    assert "narrowed: width 1600 -> 32, heads 25 -> 2, layers 48 -> 4" in shown


def test_a_model_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    Path("verified_net.py").write_text(MODULE)
    words = ["--batch-of", "verified_net.py:batch", "--loss-of", "verified_net:loss", "--microbatches", "2", *ONE]
    found = json.loads(run(capsys, "--model", "verified_net.py:Net", "--json", *words[2:]))
    assert found["ok"] and found["first"] is None and found["notes"] == []
    assert {row["what"] for row in found["table"]} >= {"losses", "gradients", "updates"}
    words += ["--optimizer-of", "verified_net:sgd", "--rows", "4"]
    assert "rows of a batch act on each other" in run(capsys, "--model", "verified_net:Odd", *words)
    words[words.index("verified_net:loss")] = "verified_net:padded"
    with pytest.raises(SystemExit) as ended:
        run(capsys, "--model", "verified_net:Net", *words)
    shown = " ".join(capsys.readouterr().out.split())
    assert ended.value.code == 1 and "First difference in step 0: whole batch module padded" in shown
    assert "in the whole batch they count 0.667, 1.33 times" in shown


def test_a_difference_is_exit_code_1(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from zeroshard.step.decision import Decision

    decide = Decision.decide
    doubled = lambda self, agreed, refuse: decide(self, replace(agreed, norm=2 * agreed.norm), refuse)  # noqa: E731
    monkeypatch.setattr(Decision, "decide", doubled)
    with pytest.raises(SystemExit) as ended:
        run(capsys, *ONE)
    shown = capsys.readouterr().out
    assert ended.value.code == 1 and "First difference in step 0: gradient norm" in shown
    assert "it is 2 times the norm of the gradients" in shown


@pytest.mark.parametrize("words, message", [
    (("--model", "net:Net"), "name a function that makes them: --batch-of net:batch"),
    (("--model", "lone.py"), "name a function that makes them: --batch-of lone.py:batch"),
    (("--model", "net.py:Nett"), "net.py has no attribute 'Nett'; did you mean Net? It defines Net"),
    (("--model", "tiny", "--batch-of", "net:batch"), "tiny makes its own; leave it out"),
    (("--rows", "0"), "rows is 0; it must be 1 or more"),
    (("--model", "nowhere"), "--model nowhere names no model"),
    (("--batch", "8"), "use --rows, the rows of one step over all ranks"),
    (("--pp", "2", "--pipeline-parallel.schedule", "2bw", "--microbatches", "2"), "--pipeline-parallel.schedule 1f1b"),
])  # fmt: skip
def test_mistakes(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str) -> None:
    for name in ("net.py", "lone.py"):
        Path(name).write_text("from torch import nn\n\nclass Net(nn.Module): ...\n")
    with pytest.raises(SystemExit) as ended:
        run(capsys, *words)
    assert ended.value.code == 2 and message in capsys.readouterr().err
