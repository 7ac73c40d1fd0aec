"""The model of a run folder, evaluated and generating, against plain loops over its weights."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from zeroshard.checkpoint import Reader, find_checkpoint
from zeroshard.comm.mesh import Mesh
from zeroshard.data.columns import IGNORED
from zeroshard.errors import CheckpointError, ConfigError, DataError
from zeroshard.train.config import TrainConfig
from zeroshard.train.early_checks import check_checkpoint
from zeroshard.train.options import parse
from zeroshard.train.run import run as run_job
from zeroshard.train.trained import Trained, load_trained

SHORT = ["--sequence", "16", "--batch-per-rank", "2", "--validation-rows", "2", "--sample-tokens", "0", "--steps", "3"]
CPU = torch.device("cpu")


def trained_in(folder: Path, *words: str) -> tuple[dict[str, Any], Path]:
    """A short run on records, with its summary."""
    rows = [{"text": f"record {n} {n * n}", "prompt": f"q{n}", "completion": f"a{n * n}"} for n in range(300)]
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("--data", str(folder / "a.jsonl"), *SHORT, "--out", str(folder / "runs"), *words)
    done = run_job(parse(TrainConfig, words, "train"), Mesh())
    assert done is not None
    return done


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """A run of the built-in model."""
    return trained_in(tmp_path_factory.mktemp("own"))


def test_the_rows_that_the_run_held_out_have_its_loss(own: tuple[dict[str, Any], Path]) -> None:
    summary, folder = own
    found = load_trained(folder, CPU).evaluate(batch=3)
    assert found["bits_per_byte"] == pytest.approx(summary["validation_bits_per_byte"], rel=1e-5)
    assert (found["rows"], found["tokens"], found["step"]) == (8, 128, 3)
    again = load_trained(folder / "checkpoints" / "step-00000003", CPU).evaluate(rows=2)
    assert again["rows"] == 2 and again["perplexity"] == pytest.approx(math.exp(again["loss"]))


def test_a_text_is_read_to_its_last_token(own: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    """Against windows of the text through the module, the last one shorter."""
    trained = load_trained(own[1], CPU)
    text = "ein größerer Text, dessen letztes Fenster kürzer ist\n"
    (tmp_path / "a.txt").write_text(text)
    found = trained.evaluate((tmp_path / "a.txt",), batch=2)
    tokens, total = torch.tensor(list(text.encode())), 0.0
    for first in range(0, len(tokens) - 1, 16):
        window = tokens[None, first : first + 17]
        logits = trained.built.logits(trained.built.module, window[:, :-1])
        total += float(F.cross_entropy(logits[0], window[0, 1:], reduction="sum").detach())
    assert found["tokens"] == len(tokens) - 1
    assert found["loss"] == pytest.approx(total / (len(tokens) - 1), rel=1e-5)
    assert found["bits_per_byte"] == pytest.approx(found["loss"] / math.log(2), rel=1e-5)


def test_completions_are_measured_without_their_prompts(own: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    trained = load_trained(own[1], CPU)
    (tmp_path / "a.jsonl").write_text('{"q": "ab", "a": "cde"}\n')
    found = trained.evaluate((tmp_path / "a.jsonl",), ("q", "a"))
    logits = trained.built.logits(trained.built.module, torch.tensor([list(b"abcde")]))
    expected = F.cross_entropy(logits[0, 1:], torch.tensor(list(b"cde\n")))
    assert found["loss"] == pytest.approx(float(expected.detach()), rel=1e-5)
    assert (found["tokens"], found["bits_per_byte"]) == (4, None)


def test_text_is_generated_as_a_plain_loop_does(own: tuple[dict[str, Any], Path]) -> None:
    trained = load_trained(own[1], CPU)
    tokens = list(b"record")
    for _ in range(20):
        logits = trained.built.logits(trained.built.module, torch.tensor([tokens[-16:]]))
        tokens.append(int(logits[0, -1].argmax()))
    assert trained.generate("record", 20, temperature=0) == bytes(tokens[6:]).decode(errors="replace")
    drawn = [trained.generate("record", 20, 1.0, seed=seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    with pytest.raises(ConfigError, match="the tokenizer bytes has no chat template"):
        trained.generate("record", 1, 0.0, chat=True)


def test_a_model_of_transformers_with_a_tokenizer(tmp_path: Path) -> None:
    """Its weights under the names of the checkpoint, against transformers' own model; a text ends at its end."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = {name: number for number, name in enumerate(["</s>", "record", *map(str, range(90))])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>", "chat_template": "{{messages[0].content}}"}')
    sizes = {"vocab_size": 92, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", **sizes}))
    words_of = ["--model", str(tmp_path / "config.json"), "--columns", "prompt", "text"]
    summary, folder = trained_in(tmp_path, *words_of)
    trained = load_trained(folder, CPU)
    assert trained.evaluate()["bits_per_byte"] == pytest.approx(summary["validation_bits_per_byte"], rel=1e-5)
    reader, model = Reader(find_checkpoint(folder)), transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    for name, parameter in model.named_parameters():
        parameter.data.copy_(reader.whole(f"weight:{name}").view(parameter.shape))
    (tmp_path / "b.jsonl").write_text('{"text": "record 3 9 1 0 4"}\n')
    ids = torch.tensor([[1, 5, 11, 3, 2, 6, 0, *[0] * 9]])
    labels = torch.where(torch.arange(16) < 7, ids, IGNORED)
    expected = float(model.eval()(input_ids=ids, labels=labels).loss.detach())
    found = trained.evaluate((tmp_path / "b.jsonl",), ("text",))
    assert found["loss"] == pytest.approx(expected, rel=1e-5) and found["tokens"] == 6
    assert "</s>" not in trained.generate("record", 30, 1.0, chat=True)


def test_what_is_no_run_is_refused(own: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    def load(path: Path) -> Trained:
        return load_trained(path, CPU)

    with pytest.raises(ConfigError, match=r"run names .*no, which is no folder"):
        load(tmp_path / "no")
    with pytest.raises(ConfigError, match=r"has no config\.toml, so it is no run folder"):
        load(tmp_path)
    with pytest.raises(ConfigError, match=rf"so it is no run folder; give {own[1]}, the newest run inside"):
        load(own[1].parent)
    with pytest.raises(CheckpointError, match=rf"is no checkpoint: .*Give {own[1]}, the newest run inside"):
        check_checkpoint(own[1].parent)
    config = (own[1] / "config.toml").read_text()
    (tmp_path / "config.toml").write_text(config)
    with pytest.raises(CheckpointError, match="holds no checkpoint to take weights from"):
        load(tmp_path)
    (tmp_path / "config.toml").write_text(config.replace('model = "tiny"', 'model = "small"'))
    (tmp_path / "checkpoints").symlink_to(own[1] / "checkpoints")
    with pytest.raises(CheckpointError, match=r"is one of another model: \S+ (is not there|has the shape)"):
        load(tmp_path)
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(DataError, match="holds no document with a token to predict"):
        load_trained(own[1], CPU).evaluate((tmp_path / "a.jsonl",))
