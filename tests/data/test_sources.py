"""Blocks of sources: every document in exactly one, whatever its file looks like, and errors with file and line."""

import bz2
import gzip
import json
import lzma
import sys
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroshard.data import sources
from zeroshard.data.files import find
from zeroshard.data.sources import DocumentSource, open_source
from zeroshard.errors import ConfigError, DataError


def documents(source: DocumentSource) -> list[Any]:
    """Every document, block after block."""
    return [source.columns(block, place, record) for block in source.blocks for place, record in source.records(block)]


@given(st.lists(st.text(max_size=20), max_size=30), st.integers(1, 60), st.sampled_from(["\n", "\r\n"]), st.booleans())
@settings(max_examples=20, derandomize=True, deadline=None)
def test_each_line_belongs_to_one_block(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], size: int, end: str, ended: bool
) -> None:
    """Against json.loads of the lines, with blank lines among them."""
    lines = [json.dumps({"text": text}) for text in texts]
    content = end.join([*lines[:3], "", *lines[3:]]) + end * ended
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    path.write_bytes(content.encode() or b"\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "BLOCK", size)
        source = open_source(find(path))
        assert documents(source) == [{"text": text} for text in texts]
        held_out = [record for block in source.blocks for _, record in source.split(block, True)]
        others = [record for block in source.blocks for _, record in source.split(block, False)]
    assert sorted(held_out + others) == sorted(r for b in source.blocks for _, r in source.records(b))


def test_one_document_in_twenty_is_held_out(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "{n}"}}\n' for n in range(2000)))
    source = open_source(find(tmp_path / "a.jsonl"))
    assert sum(1 for block in source.blocks for _ in source.split(block, True)) == 100


def test_text_is_cut_at_ends_of_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "SMALLEST_BLOCK", 100)
    text = "".join(f"line {n} of größe\n" for n in range(200))
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.txt").write_text("short")
    source = open_source(find(tmp_path))
    found = documents(source)
    assert "".join(found) == text + "short" and len(found) > 20
    assert all(part.endswith("\n") for part in found[:-1])
    (tmp_path / "c.txt").write_bytes(b"good\n\xff\xfe")
    with pytest.raises(DataError, match=r"c\.txt is not UTF-8 text, which training needs \(byte 5\)"):
        documents(open_source(find(tmp_path)))


class Stand:
    """The package zstandard, whose decompressor unpacks gzip here."""

    def decompressobj(self) -> Any:
        return zlib.decompressobj(31)


def test_frames_of_zstandard_are_read(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    rows = [{"text": f"row {n}"} for n in range(300)]
    lines, path = [json.dumps(row).encode() + b"\n" for row in rows], tmp_path / "a.jsonl.zst"
    whole = b"".join(zstandard.compress(b"".join(lines[first : first + 100])) for first in (0, 100, 200))
    path.write_bytes(whole)
    assert documents(open_source(find(path))) == rows
    for damaged in (whole[:-20], whole + b"more", b"no frame at all"):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"a\.jsonl\.zst cannot be unpacked \(.+\); compress it again"):
            documents(open_source(find(path)))


def test_compressed_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "BLOCK", 1000)
    rows = [{"text": f"row {n}"} for n in range(300)]
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    monkeypatch.setitem(sys.modules, "zstandard", SimpleNamespace(ZstdDecompressor=Stand))
    for suffix, pack in (("gz", gzip.compress), ("xz", lzma.compress), ("bz2", bz2.compress), ("zst", gzip.compress)):
        path = tmp_path / f"a.jsonl.{suffix}"
        path.write_bytes(pack(content))
        assert documents(open_source(find(path))) == rows
        path.write_bytes(pack(content[:999]) + pack(content[999:]))  # as parallel compressors write it
        assert documents(open_source(find(path))) == rows
        path.write_bytes(pack(content)[:-20])
        with pytest.raises(DataError, match=r"a\.jsonl\.\w+ cannot be unpacked"):
            documents(open_source(find(path)))
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(content))
    found = documents(open_source(find(path)))
    assert "".join(found).encode() == content and len(found) > 5


def test_a_line_that_does_not_parse_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n\n{"text": "two"\n[1]\n')
    source = open_source(find(path))
    (block,) = source.blocks
    lines = dict(source.records(block))
    wrong, other = list(lines)[1:]
    with pytest.raises(
        DataError, match=r"a\.jsonl, line 3 is no JSON record .*'{\"text\": \"two\"'; correct or remove"
    ):
        source.columns(block, wrong, lines[wrong])
    with pytest.raises(DataError, match=r"a\.jsonl, line 4 holds a list and a record is a JSON object"):
        source.columns(block, other, lines[other])
    with pytest.raises(DataError, match=r"line 1 is no JSON record .*recursion"):
        source.columns(block, 0, b'{"text": ' + b"[" * 100_000)


def test_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one", "id": 1, "text": "two"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl, line 1 has two columns with the name 'text'; rename or remove"):
        documents(open_source(find(tmp_path / "a.jsonl")))
    parquet, pa = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    parquet.write_table(pa.table([["one"], ["two"]], names=["text", "text"]), tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"b\.parquet has two columns with the name 'text'"):
        open_source(find(tmp_path / "b.parquet"))


def test_parquet_is_read_by_row_groups(tmp_path: Path) -> None:
    parquet, pa = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    rows = [{"text": f"row {n}", "number": n} for n in range(2500)]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=1200)
    source = open_source(find(tmp_path))
    assert len(source.blocks) == 3 and documents(source) == rows
    assert source.where(source.blocks[1], 4).endswith("a.parquet, row group 1, row 5")
    source.only = ["text"]
    assert documents(source) == [{"text": row["text"]} for row in rows]
    data = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(data[:100] + bytes(2000) + data[2100:])
    with pytest.raises(DataError, match=r"row group 0 of .*a\.parquet cannot be read \(.*\); write the file again"):
        documents(open_source(find(tmp_path)))
    (tmp_path / "a.parquet").write_bytes(b"PAR1 damaged")
    with pytest.raises(DataError, match=r"a\.parquet is not valid parquet"):
        open_source(find(tmp_path))


def test_data_sets_of_hugging_face_are_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"text": f"row {n}", "number": n} for n in range(1500)]
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "set"))
    source = open_source(find(tmp_path / "set"))
    assert len(source.blocks) == 2 and documents(source) == rows
    source.only = ["text"]
    assert documents(source)[-1] == {"text": "row 1499"}
    assert source.where(source.blocks[1], 1030).endswith("set, row 1031")
    (tmp_path / "set" / "state.json").write_text("{}")
    with pytest.raises(DataError, match="set is not a whole data set"):
        open_source(find(tmp_path / "set"))


def test_the_extra_of_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    (tmp_path / "set").mkdir()
    for name in ("state.json", "dataset_info.json"):
        (tmp_path / "set" / name).write_text("{}")
    for package, path in (("pyarrow", "a.parquet"), ("datasets", "set")):
        for module in (package, f"{package}.parquet"):
            monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(ConfigError, match=rf"needs the package {package}, .*zeroshard\[data\]"):
            open_source(find(tmp_path / path))


def test_the_digest_is_of_names_and_content_wherever_the_files_lie(tmp_path: Path) -> None:
    digests = []
    for folder, name, text in (("a", "x", "one"), ("b", "x", "one"), ("c", "y", "one"), ("d", "x", "two")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{name}.jsonl").write_text(f'{{"text": "{text}"}}\n')
        digests.append(open_source(find(tmp_path / folder)).digest)
    assert digests[0] == digests[1] and len(set(digests)) == 3


def test_a_source_without_any_byte_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(DataError, match="no text was found in"):
        open_source(find(tmp_path))
