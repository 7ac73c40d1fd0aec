"""Files are recognised by name and first bytes, and refused in one sentence before any of them is read as text."""

import gzip
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from zeroshard.data.files import find, open_bytes, parse_sources
from zeroshard.errors import DataError

LINE = '{"text": "one"}\n'


def write(folder: Path, **files: str | bytes) -> Path:
    """A folder of files, whose names have two underscores for a dot."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        path = folder / name.replace("__", ".")
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def nested(folder: Path) -> Path:
    write(folder / "set", dataset_info__json="{}", state__json="{}")
    return write(folder, readme__txt="text")


def splits(folder: Path) -> Path:
    (folder / "dev").mkdir()
    return write(folder, dataset_dict__json="{}")


BAD: dict[str, tuple[Callable[[Path], Path], str]] = {  # by name: the path, and its error
    "missing": (lambda folder: folder / "no", r"data names .*no, which does not exist; give an existing file"),
    "an address": (lambda _: Path("https://a.b/c.jsonl"), r"data names https:/a.b/c.jsonl, an address, .*download it"),
    "a model": (
        lambda folder: write(folder, config__json="{}", tokenizer__json="{}"),
        r"is the folder of a model, which has no text to train on; give it as the model",
    ),
    "empty records": (lambda folder: write(folder, a__jsonl="") / "a.jsonl", r"a\.jsonl is empty; leave it out"),
    "an empty file among others": (lambda folder: write(folder, a__jsonl=LINE, b__jsonl=""), r"b\.jsonl is empty"),
    "an empty parquet": (lambda folder: write(folder, a__parquet=b""), r"a\.parquet is empty"),
    "a data set below": (nested, r"holds set/dataset_info\.json, a file of a Hugging Face data set; give .*set itself"),
    "information without data": (
        lambda folder: write(folder, dataset_info__json="{}", a__txt="x"),
        r"holds dataset_info\.json, a file of a Hugging Face data set; write it with save_to_disk",
    ),
    "splits without train": (splits, r"is a data set with the splits dev and none named train"),
    "arrow": (lambda folder: write(folder, a__arrow=b"x") / "a.arrow", r"a\.arrow is Arrow, not text; give the folder"),
    "arrow in a folder": (lambda folder: write(folder, a__txt="x", b__bin=b"\xff\xff\xff\xff\0\0"), r"b\.bin is Arrow"),
    "parquet as text": (
        lambda folder: write(folder, a__txt=b"PAR1\0\0") / "a.txt",
        r"a\.txt is parquet under another name; rename it to a\.parquet",
    ),
    "arrow as records": (
        lambda folder: write(folder, a__jsonl=b"ARROW1\0\0") / "a.jsonl",
        r"a\.jsonl is Arrow, not text",
    ),
    "parquet as records": (
        lambda folder: write(folder, a__jsonl=b"PAR1\0\0") / "a.jsonl",
        r"a\.jsonl is parquet under another name; rename it to a\.parquet",
    ),
    "an archive": (
        lambda folder: write(folder, a__tar__gz=gzip.compress(b"x")) / "a.tar.gz",
        r"a\.tar\.gz is an archive of files; unpack it, and give the folder",
    ),
    "gzip under another name": (
        lambda folder: write(folder, a__jsonl=gzip.compress(LINE.encode())) / "a.jsonl",
        r"a\.jsonl is compressed, and its name does not say so; rename it to a\.jsonl\.gz",
    ),
    "a table": (
        lambda folder: write(folder, a__csv="text\none\n") / "a.csv",
        r"a\.csv is a table, .*write it as parquet",
    ),
    "one JSON document": (lambda folder: write(folder, a__json="[]") / "a.json", r"JSON records in one document"),
    "two kinds": (
        lambda folder: write(folder, a__jsonl=LINE, b__txt="text"),
        r"holds files of different kinds, such as a\.jsonl and b\.txt; put each kind into a folder",
    ),
    "two kinds of records": (
        lambda folder: write(folder, a__jsonl=LINE, b__parquet=b"PAR1"),
        r"different kinds, such as a\.jsonl and b\.parquet",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_files_that_are_not_read_are_refused_in_one_sentence(name: str, tmp_path: Path) -> None:
    make, message = BAD[name]
    with pytest.raises(DataError, match=message) as refused:
        find(make(tmp_path))
    assert "\n" not in str(refused.value)


def test_folders_are_of_the_kind_of_their_files(tmp_path: Path) -> None:
    records = write(tmp_path / "r", README__md="about", a__jsonl=LINE, b__jsonl__gz=gzip.compress(LINE.encode()))
    found = find(records)
    assert (found.kind, [file.name for file in found.files]) == ("records", ["a.jsonl", "b.jsonl.gz"])
    assert found.compressed and found.nbytes == sum(file.stat().st_size for file in found.files)
    write(records / ".cache", c__jsonl="")
    assert find(records) == found  # hidden files are skipped
    assert find(write(tmp_path / "t", a__txt="x", b__json="[1]", c__md="")).kind == "text"
    assert find(write(tmp_path / "d" / "train", dataset_info__json="{}", state__json="{}")).kind == "dataset"
    write(tmp_path / "d", dataset_dict__json="{}")
    assert find(tmp_path / "d").root == tmp_path / "d" / "train"


def test_words_are_paths_with_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse_sources(["a.jsonl:3,b", "c:0.5"]) == [(Path("a.jsonl"), 3.0), (Path("b"), None), (Path("c"), 0.5)]
    (tmp_path / "x,y:2").write_text("")
    assert parse_sources(["x,y:2", Path("z")]) == [(Path("x,y:2"), None), (Path("z"), None)]
    for wrong in ("a:b", "a:0", "a:-1", "a:inf", "a:nan", "a:"):
        with pytest.raises(DataError, match="a weight is a number above 0, such as a:2"):
            parse_sources([wrong])
    for wrong in ("", ",", "a,", "a,,b"):
        with pytest.raises(DataError, match="in which a path is empty; give paths with commas"):
            parse_sources([wrong])
    with pytest.raises(DataError, match=r"data names https://example.org/a.jsonl, an address; download it"):
        parse_sources(["https://example.org/a.jsonl"])
    with pytest.raises(DataError, match="data names a twice; name it once, with a weight"):
        parse_sources(["a,b:2", "a"])


def test_zstandard_needs_an_interpreter_or_a_package_that_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("compression.zstd", "zstandard"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(DataError, match=r"needs Python 3\.14 or the package zstandard"):
        open_bytes(write(tmp_path, a__jsonl__zst=b"x") / "a.jsonl.zst")
