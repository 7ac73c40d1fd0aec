"""One global order of rows: shuffled, the same for any number of ranks, and resumed to the sample."""

import json
import random
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from zeroshard.data import packing, sources
from zeroshard.data.columns import IGNORED
from zeroshard.data.loader import Loader, open_data
from zeroshard.data.readers import DataMixture
from zeroshard.errors import ConfigError, DataError

Batch = list[tuple[int, ...]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three files of 1,200 records in all, and a small one."""
    path, draw = tmp_path_factory.mktemp("records"), random.Random(0)
    for name in "abc":
        rows = ({"text": f"{name}{n} " + "x" * draw.randrange(60)} for n in range(400))
        (path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "other").mkdir()
    (path / "other" / "z.jsonl").write_text("".join('{"text": "%s"}\n' % ("z" * (n % 30)) for n in range(200)))
    return path


def opened(folder: Path, **options: Any) -> DataMixture:
    return open_data([folder / f"{name}.jsonl" for name in "abc"], sequence=16, **options)


def batches(data: DataMixture, ranks: int, count: int, state: Any = None, rows: int = 8) -> tuple[list[Batch], Any]:
    """Global batches as sets of rows, and the merged state behind them, as JSON keeps it."""
    loaders = [Loader(data, batch=rows // ranks, rank=rank, ranks=ranks) for rank in range(ranks)]
    if state is not None:
        for loader in loaders:
            loader.load_state_dict(json.loads(state))
    found = []
    for _ in range(count):
        each = [next(loader)["input_ids"] for loader in loaders]
        assert all(tokens.shape == (rows // ranks, 16) for tokens in each)
        found.append(sorted(tuple(row) for tokens in each for row in tokens.tolist()))
    merged = Loader.merged([loader.state_dict() for loader in loaders])
    for loader in loaders:
        loader.close()
    return found, json.dumps(merged)


@pytest.mark.parametrize("block", [1 << 20, 128], ids=["one reader", "several readers"])
def test_a_killed_run_goes_on_with_the_same_samples_on_other_ranks(
    block: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At random moments, from 1 rank to 2, to 4 and back, each time from the state of the one before."""
    monkeypatch.setattr(sources, "BLOCK", block)
    monkeypatch.setattr(packing, "BUFFER", 1 << 9)  # a few rows: each loader would read all documents at once
    data = opened(folder)
    assert data.readers == (1 if block > 128 else 8)
    whole, _ = batches(data, 1, 60)
    draw = random.Random(block)
    for _ in range(3):
        found: list[Batch] = []
        state = None
        for ranks in (1, 2, 4, 1, 2):
            more, state = batches(data, ranks, draw.randrange(1, 12), state)
            found += more
            batches(data, ranks, 3, state)  # lost with the rank that was killed
        assert found == whole[: len(found)]
    assert len(json.loads(state or "")["readers"]) <= data.readers


def test_a_rank_reads_only_its_readers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "BLOCK", 128)
    for ranks in (2, 4):
        loader = Loader(opened(folder), batch=8 // ranks, rank=1, ranks=ranks)
        next(loader)
        numbers = [number for number, *_ in loader.state_dict()["readers"]]
        assert numbers == list(range(1, 8, ranks))
        loader.close()


def test_batches_of_another_size_go_on_at_the_same_sample(folder: Path) -> None:
    data = opened(folder)
    first, state = batches(data, 1, 5, rows=4)
    rest, _ = batches(data, 2, 5, state, rows=6)
    whole, _ = batches(data, 1, 50, rows=1)
    assert Counter(row for batch in whole for row in batch) == Counter(row for b in first + rest for row in b)


def test_an_epoch_has_each_document_once_in_a_shuffled_order(folder: Path) -> None:
    data = open_data(folder / "b.jsonl", sequence=16)
    loader = Loader(data)
    text = bytes(token for _ in range(2200) for token in next(loader)["input_ids"][0].tolist()).decode()
    loader.close()
    seen = [line.split(" ")[0] for line in text.split("\n")[:-1]]
    first, second = seen[:380], seen[380:760]
    assert set(first) == set(second) and len(set(first)) == 380  # one in twenty of 400 is held out
    assert first != second and sorted(first, key=lambda name: int(name[1:])) not in (first, second)
    other = batches(opened(folder, seed=1), 1, 1)[0]
    assert other != batches(opened(folder), 1, 1)[0]


def test_weights_are_shares_of_rows(folder: Path) -> None:
    data = open_data(f"{folder / 'a.jsonl'}:3,{folder / 'other'}", sequence=16)
    loader = Loader(data)
    count = sum(bool((next(loader)["input_ids"] == ord("z")).any()) for _ in range(800))
    loader.close()
    assert 160 < count < 240
    by_size = open_data(f"{folder / 'a.jsonl'},{folder / 'other'}", sequence=16)
    assert [each.weight for each in by_size.sources] == [each.source.found.nbytes for each in by_size.sources]


def test_rows_may_be_left_out_and_asked_for_again(folder: Path) -> None:
    """As after a rollback: back to the state that was loaded, without some samples."""
    data = opened(folder)
    loader = Loader(data)
    rows = [loader.rows([number]).tokens for number in range(30)]
    state = loader.state_dict()
    assert torch.equal(loader.rows([30, 31, 35, 36]).tokens[2:], Loader(data).rows([35, 36]).tokens)
    assert torch.equal(loader.rows([3, 4]).tokens, torch.cat(rows[3:5]))
    other = Loader(data)
    other.load_state_dict(state)
    later = other.rows([31, 32]).tokens
    assert torch.equal(other.rows([30, 31]).tokens[1], later[0])
    assert torch.equal(other.rows([2]).tokens, rows[2])


def test_completions_give_labels(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"q": "ab", "a": "cd"}\n' * 30)
    (tmp_path / "b.jsonl").write_text('{"q": "xy", "a": "z"}\n' * 30)
    data = open_data(tmp_path, sequence=10, columns=("q", "a"))
    batch = next(Loader(data, batch=4))
    assert batch["input_ids"].shape == batch["labels"].shape == (4, 10)
    learned = batch["labels"] != IGNORED
    assert torch.equal(batch["labels"][learned], batch["input_ids"][learned])
    assert set(bytes(batch["labels"][learned].tolist())) == set(b"cdz\n")


def test_a_state_of_other_data_is_refused(folder: Path) -> None:
    state = Loader(opened(folder)).state_dict()
    for other in (opened(folder, seed=1), open_data(folder / "a.jsonl", sequence=16)):
        with pytest.raises(DataError, match=r"The state is one of the data .*; give the same data, tokenizer"):
            Loader(other).load_state_dict(state)


def test_wrong_arguments_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="sequence is 0"):
        open_data(folder / "a.jsonl", sequence=0)
    with pytest.raises(DataError, match="data names no file"):
        open_data([], sequence=1)
    for wrong in ({"batch": 0}, {"rank": 2, "ranks": 2}):
        with pytest.raises(ConfigError, match="batch is 1 or more, and rank below ranks"):
            Loader(opened(folder), **wrong)
    with pytest.raises(DataError, match="a global batch of 3 samples does not divide among 2 data ranks"):
        Loader(opened(folder), ranks=2).rows([0, 1, 2])


def test_an_error_in_the_thread_comes_with_its_batch(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "abcdefgh"}\n' * 30 + "{\n")
    loader = Loader(open_data(path, sequence=4))
    with pytest.raises(DataError, match=r"a\.jsonl, line 31 is no JSON record"):
        list(islice(loader, 200))
    with pytest.raises(DataError, match=r"a\.jsonl, line 31 is no JSON record"):  # and not a wait for ever
        list(islice(loader, 200))
