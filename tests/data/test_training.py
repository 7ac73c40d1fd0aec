"""Data of the main job: which way it is read, held-out rows, and bad input in one sentence before the first step."""

import gzip
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool

from zeroshard.comm.collectives import Comm
from zeroshard.comm.mesh import Mesh
from zeroshard.data import training
from zeroshard.data.corpus import Batches, files_corpus
from zeroshard.data.training import DataOptions, StreamedData, TextInMemory, check_same, open_training
from zeroshard.errors import ConfigError, DataError


def records(path: Path, *rows: Any, count: int = 200) -> Path:
    texts = [json.dumps(row) for row in rows] or [json.dumps({"text": f"record {n}"}) for n in range(count)]
    content = "".join(f"{text}\n" for text in texts).encode()
    path.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)
    return path


def opened(*data: Path | str, **options: Any) -> Any:
    return open_training(DataOptions(data=data, **{"sequence": 16, **options}))


def test_small_text_is_read_into_memory_and_all_else_is_streamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "a.txt"
    text.write_text("some text\n" * 100)
    data = opened(text, seed=3)
    assert isinstance(data, TextInMemory) and not data.masked and data.state() is None
    corpus = files_corpus([text])
    expected = Batches(data.tokenizer.encode(corpus.train), 16, 3).rows(range(4), 1, 2)
    assert torch.equal(data.rows(range(4), 1, 2).tokens, expected) and data.facts()["train_bytes"] == 950
    data.load(None)
    assert isinstance(opened(f"{text}:2"), StreamedData)
    assert isinstance(opened(records(tmp_path / "b.jsonl.gz")), StreamedData)
    monkeypatch.setattr(training, "LARGE_TEXT", 100)
    large = opened(text)
    assert isinstance(large, StreamedData) and large.about.endswith(": text, 1 file, 1000 B, streamed")
    assert opened().name == "standard library"


def test_streamed_rows_go_on_from_a_state(tmp_path: Path) -> None:
    path = records(tmp_path / "a.jsonl")
    data, other = opened(path), opened(path)
    for step in range(5):
        data.rows(range(4 * step, 4 * step + 4))
    other.load(json.loads(json.dumps(data.state())))
    assert torch.equal(other.rows(range(20, 24), 1, 2).tokens, data.rows(range(20, 24)).tokens[1::2])
    assert data.facts()["digest"] == other.digest != opened(path, sequence=16, columns=["text"], seed=1, truncate=True)
    for each in (data, other):
        each.close()


def test_held_out_rows_are_shared_out_and_are_no_training_rows(tmp_path: Path) -> None:
    data = opened(records(tmp_path / "a.jsonl", count=400))
    alone = [row for rows in data.validation(2, 0, 1, 9) for row in rows.tokens.tolist()]
    shares = [[row for rows in data.validation(2, rank, 2, 9) for row in rows.tokens.tolist()] for rank in (0, 1)]
    assert len(alone) == 9 and alone[:8] == [row for pair in zip(*shares, strict=True) for row in pair]
    text = bytes(token for rows in data.validation(1, 0, 1, None) for token in rows.tokens[0, :-1].tolist()).decode()
    held_out = set(text.split("\n")[1:-1])
    trained = bytes(token for row in data.rows(range(300)).tokens[:, :-1].tolist() for token in row).decode()
    assert len(held_out) > 15 and not held_out & set(trained.split("\n"))
    with pytest.raises(DataError, match=r"is held out .* gives 0 rows of 16 tokens from .*, and each rank needs one"):
        next(iter(opened(records(tmp_path / "b.jsonl", count=20)).validation(1, 0, 1, 4)))
    data.close()


def test_bits_per_byte_are_those_of_the_first_documents(tmp_path: Path) -> None:
    data = opened(records(tmp_path / "a.jsonl", {"text": "abc"}, {"text": "abcd"}, count=2))
    assert data.bits_per_byte(math.log(2)) == pytest.approx(9 / 7)  # each document has a newline more
    pairs = [{"prompt": "ab", "completion": "c"}] * 40
    masked = opened(records(tmp_path / "b.jsonl", *pairs))
    assert masked.masked and masked.bits_per_byte(math.log(2)) == pytest.approx(2)  # "c" and a newline
    mixed = opened(f"{tmp_path / 'a.jsonl'}:1,{tmp_path / 'b.jsonl'}:3")
    assert mixed.facts()["shares"] == {str(tmp_path / "a.jsonl"): 0.25, str(tmp_path / "b.jsonl"): 0.75}
    rows = mixed.rows(range(16))
    assert rows.labels is not None and rows.labels.shape == rows.tokens.shape
    mixed.close()


BAD: dict[str, tuple[Callable[[Path], Any], type[Exception], str]] = {  # by name: data or options, and the error
    "missing": (lambda at: at / "no.jsonl", DataError, "no.jsonl, which does not exist"),
    "empty": (lambda at: records(at / "a.jsonl", count=0), DataError, r"a\.jsonl is empty"),
    "blank lines": (lambda at: blank(at / "a.jsonl"), DataError, r"a\.jsonl holds no record"),
    "a line that does not parse": (lambda at: broken(at / "a.jsonl"), DataError, r"a\.jsonl, line 2 is no JSON record"),
    "no usual column": (lambda at: records(at / "a.jsonl", {"x": "y"}), DataError, "none of the usual columns"),
    "no such column": (
        lambda at: {"data": (records(at / "a.jsonl"),), "columns": ("body",)},
        DataError,
        "has no column 'body'; its columns are text",
    ),
    "columns of text": (
        lambda at: {"data": (write_text(at / "a.txt"),), "columns": ("text",)},
        ConfigError,
        "columns has no effect on text",
    ),
    "a chat without a template": (
        lambda at: records(at / "a.jsonl", {"messages": [{"role": "user", "content": "x"}]}),
        ConfigError,
        "has no chat template",
    ),
    "a tokenizer that is missing": (
        lambda at: {"data": (records(at / "a.jsonl"),), "tokenizer": str(at / "none")},
        ConfigError,
        "none, which does not exist",
    ),
    "metadata of a data set": (lambda at: metadata(at / "set"), DataError, "holds dataset_info.json"),
    "a wrong weight": (lambda at: f"{records(at / 'a.jsonl')}:x", DataError, "a weight is a number above 0"),
    "one document": (lambda at: records(at / "a.jsonl", {"text": ""}), DataError, "holds no document with text"),
}


def blank(path: Path) -> Path:
    path.write_text("\n \n")
    return path


def broken(path: Path) -> Path:
    path.write_text('{"text": "x"}\n{"text": \n')
    return path


def write_text(path: Path) -> Path:
    path.write_text("text")
    return path


def metadata(folder: Path) -> Path:
    folder.mkdir()
    (folder / "dataset_info.json").write_text('{"features": {"text": {"dtype": "string"}}}')
    return folder


@pytest.mark.parametrize("name", BAD)
def test_bad_input_gives_one_sentence_before_the_first_step(name: str, tmp_path: Path) -> None:
    make, kind, message = BAD[name]
    made = make(tmp_path)
    given = made if isinstance(made, dict) else {"data": (made,)}
    with pytest.raises(kind, match=message) as refused:
        open_training(DataOptions(**{"sequence": 16, **given})).rows(range(4))
    assert "\n" not in str(refused.value)


def digests_of(mesh: Mesh, paths: list[str]) -> str:
    data = opened(paths[mesh.rank % len(paths)])
    try:
        check_same(Comm(mesh), data)
    except DataError as error:
        return str(error)
    return ""


def test_ranks_with_other_data_are_refused_on_every_rank(tmp_path: Path, pool: Pool) -> None:
    for folder, rows in (("one", 30), ("two", 31)):
        (tmp_path / folder).mkdir()
        records(tmp_path / folder / "a.jsonl", count=rows)
    paths = [str(tmp_path / folder / "a.jsonl") for folder in ("one", "two")]
    assert pool.run(digests_of, 2, paths[:1]) == ["", ""]
    for answer in pool.run(digests_of, 2, paths):
        assert "rank 1 read other data than rank 0" in answer and "copy the same files" in answer


def test_options_are_those_of_one_record() -> None:
    options = DataOptions(sequence=8)
    assert replace(options, seed=1).seed == 1 and options.tokenizer == "bytes"
