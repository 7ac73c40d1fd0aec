"""Where training text comes from, and which windows of it each step and rank sees."""

import hashlib
import zipfile
from pathlib import Path

import pytest
import torch

from zeroshard.data import corpus as corpus_module
from zeroshard.data.corpus import Batches, files_corpus, standard_library_corpus, validation_windows
from zeroshard.errors import DataError


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def by_hash(name: str) -> bool:
    return int(hashlib.sha256(name.encode()).hexdigest()[:16], 16) % 100 < 5


def test_standard_library_is_megabytes_of_python_without_tests(whole: bool) -> None:
    corpus = standard_library_corpus()
    assert corpus.name == "standard library"
    assert corpus.files > 300
    assert len(corpus.train) > 5_000_000
    assert 0.02 < len(corpus.validation) / len(corpus.train) < 0.10
    assert b"def dataclass(" in corpus.train + corpus.validation
    assert b"class IdleTest" not in corpus.train
    assert not whole or corpus == standard_library_corpus()


def test_without_sources_of_the_library_torch_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = write(tmp_path / "torch", {f"part{i}.py": b"import torch  # %d\n" % i for i in range(100)})
    (tmp_path / "stdlib").mkdir()
    with zipfile.ZipFile(tmp_path / "stdlib" / "python311.zip", "w") as archive:
        archive.writestr("os.py", "")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path / name))
    monkeypatch.setattr(torch, "__file__", str(package / "__init__.py"))
    corpus = standard_library_corpus()
    assert (corpus.name, corpus.files) == ("torch sources", 100)


def test_many_files_are_split_by_the_hash_of_their_names(tmp_path: Path) -> None:
    files = {f"folder/{i:03}.txt": b"text of file %03d\n" % i for i in range(200)}
    corpus = files_corpus([write(tmp_path, files)])
    assert corpus.files == 200
    assert corpus.train == b"".join(files[name] for name in sorted(files) if not by_hash(name))
    assert corpus.validation == b"".join(files[name] for name in sorted(files) if by_hash(name))


def test_the_digest_is_of_names_and_bytes_wherever_the_files_lie(tmp_path: Path) -> None:
    files = {f"{i}.txt": b"text of file %d\n" % i for i in range(100)}
    first = files_corpus([write(tmp_path / "first", files)])
    other = files_corpus([write(tmp_path / "other", dict(reversed(files.items())))])
    changed = files_corpus([write(tmp_path / "changed", {**files, "7.txt": b"text of file 8!\n"})])
    renamed = files_corpus([write(tmp_path / "renamed", {f"_{name}": data for name, data in files.items()})])
    assert first.digest == other.digest
    assert len({first.digest, changed.digest, renamed.digest}) == 3


def test_few_files_each_give_their_last_twentieth(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": bytes(range(100)), "b.txt": b"x" * 199 + b"\n"})
    corpus = files_corpus([tmp_path / "b.txt", tmp_path / "a.txt"])
    assert corpus.train == bytes(range(95)) + b"\n" + b"x" * 190
    assert corpus.validation == bytes(range(95, 100)) + b"\n" + b"x" * 9 + b"\n"


def test_a_newline_parts_files_only_where_one_is_missing() -> None:
    assert corpus_module._join([b"a", b"b\n", b"c"]) == b"a\nb\nc"


def test_folders_are_read_without_hidden_binary_empty_and_repeated_files(tmp_path: Path) -> None:
    files = {"a.txt": b"first text, long enough", "sub/.git/b.txt": b"hidden", ".c": b"hidden", "d.bin": b"\xff\xfe"}
    write(tmp_path, {**files, "e.txt": b"", "z/copy.txt": files["a.txt"]})
    corpus = files_corpus([tmp_path])
    assert corpus.files == 1 and corpus.left_out == ("d.bin",)
    assert corpus.train + corpus.validation == files["a.txt"]


def test_unusable_paths_are_named(tmp_path: Path) -> None:
    write(tmp_path, {"binary.txt": b"\xff\xfe", "short.txt": b"ab", "empty/e.txt": b""})
    with pytest.raises(DataError, match=r"missing\.txt, which does not exist"):
        files_corpus([tmp_path / "missing.txt"])
    with pytest.raises(DataError, match=r"binary\.txt is not UTF-8"):
        files_corpus([tmp_path / "binary.txt"])
    with pytest.raises(DataError, match="no text was found"):
        files_corpus([tmp_path / "empty"])
    with pytest.raises(DataError, match="2 bytes for training and 0 for validation"):
        files_corpus([tmp_path / "short.txt"])


@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
def test_ranks_share_out_one_global_batch(ranks: int) -> None:
    tokens = torch.randint(256, (1000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    whole = Batches(tokens, sequence=7, seed=3)
    parts = Batches(tokens, sequence=7, seed=3)
    for step in (0, 40, 41, 5):  # across epochs, and not in order: no state is needed to resume
        samples = range(6 * step, 6 * step + 6)
        rows = [parts.rows(samples, rank, ranks) for rank in range(ranks)]
        expected = whole.rows(samples)
        assert expected.shape == (6, 8)
        assert expected.dtype == torch.int64
        assert torch.equal(torch.cat(rows), expected)


def test_an_epoch_visits_every_window_once() -> None:
    tokens = torch.arange(503, dtype=torch.int32)
    batches = Batches(tokens, sequence=10, seed=1)
    assert batches.windows_per_epoch == 49
    offsets = set()
    for epoch in range(5):
        steps = range(epoch * 49, (epoch + 1) * 49, 7)  # 7 steps of 7 windows
        windows = torch.cat([batches.rows(range(first, first + 7)) for first in steps])
        starts = sorted(windows[:, 0].tolist())
        assert starts == list(range(starts[0], starts[0] + 490, 10))
        assert 0 <= starts[0] < 10
        assert windows[:, 0].tolist() != starts
        assert torch.equal(windows - windows[:, :1], torch.arange(11).expand(49, 11))
        offsets.add(starts[0])
    assert len(offsets) > 1


def test_the_seed_changes_the_order() -> None:
    tokens = torch.arange(1000, dtype=torch.int32)
    first, second = (Batches(tokens, 10, seed).rows(range(20)) for seed in (0, 1))
    assert not torch.equal(first, second)


def test_the_order_is_the_one_that_earlier_runs_saw() -> None:
    batches = Batches(torch.arange(1003, dtype=torch.int32), 10, seed=3)
    assert batches.rows(range(96, 104))[:, 0].tolist() == [546, 616, 266, 600, 560, 40, 820, 90]  # over an epoch's end
    assert batches.rows(range(8), 1, 2)[:, 0].tolist() == batches.rows(range(4, 8))[:, 0].tolist()


def test_every_offset_fits_in_the_shortest_text() -> None:
    tokens = torch.arange(20, dtype=torch.int32)
    starts = {int(Batches(tokens, 10, seed).rows([0])[0, 0]) for seed in range(200)}
    assert starts == set(range(10))


def test_too_little_text_is_counted_in_tokens() -> None:
    with pytest.raises(DataError, match="has 19 tokens and a sequence of 10 needs at least 20"):
        Batches(torch.zeros(19, dtype=torch.uint8), 10, 0)
    batches = Batches(torch.zeros(49, dtype=torch.uint8), 10, 0)
    assert batches.rows([0, 1, 2], 2, 3).shape == (1, 11)
    with pytest.raises(DataError, match="has 49 tokens and a global batch of 4 windows needs at least 50"):
        batches.rows(range(4), 0, 2)
    with pytest.raises(DataError, match="a global batch of 3 samples does not divide among 2 data ranks"):
        batches.rows(range(3), 0, 2)


def test_validation_covers_the_text_in_equal_shares() -> None:
    tokens = torch.arange(101, dtype=torch.int32)
    alone = torch.cat(list(validation_windows(tokens, 10, 4, 0, 1)))
    assert torch.equal(alone[:, 0], torch.arange(0, 100, 10))
    assert torch.equal(alone[:, -1], torch.arange(10, 101, 10))
    shares = [list(validation_windows(tokens, 10, 2, rank, 3)) for rank in range(3)]
    assert [[len(batch) for batch in share] for share in shares] == [[2, 1]] * 3
    together = torch.cat([batch for share in shares for batch in share])
    assert torch.equal(together.sort(dim=0).values, alone[:9])


def test_a_limit_spreads_the_windows_over_the_text() -> None:
    tokens = torch.arange(101, dtype=torch.int32)
    (batch,) = validation_windows(tokens, 10, 8, 0, 1, limit=5)
    assert batch[:, 0].tolist() == [0, 20, 40, 60, 80]
    with pytest.raises(DataError, match="101 tokens, room for 10 windows of 10, of which 2 are used, and 3 ranks"):
        validation_windows(tokens, 10, 8, 0, 3, limit=2)
