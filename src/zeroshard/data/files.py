"""Kinds of files with text: plain or compressed text, JSON records, parquet, and folders of Hugging Face data sets.

A file is recognised by its name and its first bytes before any of it is read as text.
"""

import bz2
import gzip
import importlib
import io
import lzma
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

from zeroshard.errors import DataError

Kind = Literal["text", "records", "parquet", "dataset"]
RECORDS = (".jsonl", ".ndjson")  # a JSON record on every line
COMPRESSED = {  # by suffix, the beginning of such a file
    ".gz": rb"\x1f\x8b", ".xz": rb"\xfd7zXZ\0", ".bz2": rb"BZh[1-9]1AY&", ".zst": rb"\x28\xb5\x2f\xfd"
}  # fmt: skip
TABLES = (".csv", ".tsv")
ARCHIVES = (".zip", ".tar", ".tgz", ".7z", ".rar")
PARQUET_MAGIC, ARROW_MAGICS = b"PAR1", (b"ARROW1", b"\xff\xff\xff\xff")
INFO, STATE, SPLITS = "dataset_info.json", "state.json", "dataset_dict.json"  # files that save_to_disk writes
OF_MODELS = ("*.safetensors", "*.bin", "tokenizer.json", "tokenizer.model")  # files beside a model's config.json
NO_DATA = {".md", ".json", ".yaml", ".yml", ".py", ".lock", ".rst"}  # of files that lie beside records
NAMES = {"text": "text", "records": "JSON records", "parquet": "parquet", "dataset": "a Hugging Face data set"}


@dataclass(frozen=True, slots=True)
class DataFiles:
    """The files of one path, all of one kind, in order of their names; the folder itself for a data set.

    Attributes:
        root: the path as given, below which the files lie.
    """

    root: Path
    kind: Kind
    files: tuple[Path, ...]

    @property
    def compressed(self) -> bool:
        """Whether a file is compressed."""
        return any(is_compressed(file) for file in self.files)

    @property
    def nbytes(self) -> int:
        """Bytes on the disk."""
        files = self.root.rglob("*.arrow") if self.kind == "dataset" else self.files
        return sum(file.stat().st_size for file in files)


def find(path: Path) -> DataFiles:
    """The files at `path`: one file, a folder of files of one kind (hidden ones skipped), or a folder of a data set.

    Raises:
        DataError: there is nothing, files of different kinds, an empty file, or a format that is not read.
    """
    if path.is_file():
        kind = _kind(path)
        if kind != "text" and path.stat().st_size == 0:
            raise DataError(f"{path} is empty; leave it out, or write it again")
        return DataFiles(path, kind, (path,))
    if not path.is_dir():
        if re.match(r"\w+:/", str(path)):
            raise DataError(f"data names {path}, an address, and files are read alone; download it first")
        raise DataError(f"data names {path}, which does not exist; give an existing file or folder of text")
    if (path / "config.json").is_file() and any(next(path.glob(pattern), None) for pattern in OF_MODELS):
        raise DataError(f"{path} is the folder of a model, which has no text to train on; give it as the model")
    if (path / SPLITS).is_file():
        if (path / "train").is_dir():
            return find(path / "train")
        splits = ", ".join(sorted(part.name for part in path.iterdir() if part.is_dir()))
        raise DataError(f"{path} is a data set with the splits {splits} and none named train; give the folder of one")
    if (path / STATE).is_file() and (path / INFO).is_file():
        return DataFiles(path, "dataset", (path,))
    return _folder(path)


def _folder(path: Path) -> DataFiles:
    """The files of a folder that is no data set."""
    inside = (file for file in path.rglob("*") if not any(part[0] == "." for part in file.relative_to(path).parts))
    files = sorted(file for file in inside if file.is_file())
    for file in files:
        if file.name in (INFO, STATE, SPLITS):
            whole = file.name == STATE or (file.parent / STATE).is_file()
            way_out = f"give {file.parent} itself" if whole else "write it with save_to_disk, and give that folder"
            raise DataError(f"{path} holds {file.relative_to(path)}, a file of a Hugging Face data set; {way_out}")
    kinds: dict[Kind, list[Path]] = {}
    for file in files:
        kinds.setdefault(_kind(file, named=False), []).append(file)
    records = [kind for kind in ("records", "parquet") if kind in kinds]
    text = [file for file in kinds.get("text", []) if not (records and _suffix(file) in NO_DATA)]
    if len(records) + bool(text) > 1:
        first = [file.relative_to(path) for file in ([kinds[kind][0] for kind in records] + text)[:2]]
        raise DataError(
            f"{path} holds files of different kinds, such as {first[0]} and {first[1]}; put each kind into a folder of "
            f"its own, and name both"
        )
    kind: Kind = cast(Kind, records[0]) if records else "text"
    chosen = kinds[kind] if records else text
    empty = next((file for file in chosen if kind != "text" and file.stat().st_size == 0), None)
    if empty is not None:
        raise DataError(f"{empty} is empty; remove it, or write it again")
    return DataFiles(path, kind, tuple(chosen))


def _kind(file: Path, named: bool = True) -> Kind:
    """The kind of a file.

    Args:
        named: whether the user named this file, and not a folder around it.

    Raises:
        DataError: it has a known format that is not text and is not read.
    """
    suffix, first = _suffix(file), _first_bytes(file)
    packed = next((end for end, begin in COMPRESSED.items() if re.match(begin, first)), None)
    if packed is not None and not is_compressed(file) and suffix not in ARCHIVES:
        raise DataError(f"{file} is compressed, and its name does not say so; rename it to {file.name}{packed}")
    if suffix in RECORDS and not first.startswith((PARQUET_MAGIC, *ARROW_MAGICS)):
        return "records"
    if suffix == ".parquet" and not is_compressed(file):
        return "parquet"
    if suffix == ".parquet" or first.startswith(PARQUET_MAGIC):
        raise DataError(f"{file} is parquet under another name; rename it to {plain_name(file).stem}.parquet, unpacked")
    if suffix == ".arrow" or first.startswith(ARROW_MAGICS):
        raise DataError(
            f"{file} is Arrow, not text; give the folder that datasets.save_to_disk wrote, or write it as parquet"
        )
    if suffix in ARCHIVES and named:
        raise DataError(f"{file} is an archive of files; unpack it, and give the folder")
    if suffix in TABLES and named:
        raise DataError(
            f"{file} is a table, and a model would learn its commas instead of its text; write it as parquet, or a "
            f"record on each line of a .jsonl file, as Dataset.from_csv and Dataset.to_json do"
        )
    if suffix == ".json" and named:
        raise DataError(
            f"{file} holds JSON records in one document, and a model would learn their syntax instead of their text; "
            f"write a record on each line of a .jsonl file, as Dataset.to_json does"
        )
    return "text"


def plain_name(file: Path) -> Path:
    """The name of a file without the suffix of its compression."""
    return file.with_suffix("") if is_compressed(file) else file


def _suffix(file: Path) -> str:
    """The suffix of a file's plain name, in small letters."""
    return plain_name(file).suffix.lower()


def is_compressed(file: Path) -> bool:
    """Whether a file is compressed, by its name."""
    return file.suffix.lower() in COMPRESSED


def _first_bytes(file: Path) -> bytes:
    try:
        with file.open("rb") as opened:
            return opened.read(8)
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error.strerror}); make it readable or leave it out") from error


def open_bytes(file: Path) -> BinaryIO:
    """Open a file for its bytes, uncompressed.

    Raises:
        DataError: Zstandard is not read by this interpreter.
    """
    suffix = file.suffix.lower()
    if suffix == ".gz":
        return cast(BinaryIO, gzip.open(file, "rb"))
    if suffix == ".xz":
        return cast(BinaryIO, lzma.open(file, "rb"))
    if suffix == ".bz2":
        return cast(BinaryIO, bz2.open(file, "rb"))
    return _open_zst(file) if suffix == ".zst" else file.open("rb")


def _open_zst(file: Path) -> BinaryIO:
    try:  # of Python 3.14
        opened: BinaryIO = importlib.import_module("compression.zstd").open(file, "rb")
    except ImportError:
        pass
    else:
        return opened
    try:
        package: Any = importlib.import_module("zstandard")
    except ImportError as error:
        raise DataError(
            f"reading {file} needs Python 3.14 or the package zstandard, and neither is there; "
            f"run pip install zstandard, or compress it as .gz or .xz"
        ) from error
    return cast(BinaryIO, io.BufferedReader(_Frames(file.open("rb"), package.ZstdDecompressor())))


class _Frames(io.RawIOBase):
    """The bytes of all Zstandard frames of a file, of which the package's own reader ends behind the first."""

    def __init__(self, file: BinaryIO, decompressor: Any) -> None:
        self._file, self._make, self._frame = file, decompressor.decompressobj, None
        self._packed = self._bytes = b""

    def readable(self) -> bool:
        """Always true."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill a part of the buffer; 0 at the end.

        Raises:
            EOFError: the file ends within a frame.
        """
        while not self._bytes:
            packed = self._packed or self._file.read(io.DEFAULT_BUFFER_SIZE)
            if not packed and self._frame is not None:
                raise EOFError("the file ends before its last frame does")
            if not packed:
                return 0
            frame = self._frame or self._make()
            self._bytes, self._packed = frame.decompress(packed), frame.unused_data
            self._frame = None if frame.eof else frame
        count = min(len(buffer), len(self._bytes))
        buffer[:count], self._bytes = self._bytes[:count], self._bytes[count:]
        return count

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        super().close()


def named_kinds(found: Iterable[DataFiles]) -> str:
    """The kinds of several paths, for a text."""
    return " and ".join(dict.fromkeys(NAMES[each.kind] for each in found))


def parse_sources(named: Sequence[Path | str]) -> list[tuple[Path, float | None]]:
    """The paths with their weights in texts such as "web.jsonl:3,notes/"; None for a path without a weight.

    A word that is an existing path is that path, whatever its name contains.

    Raises:
        DataError: a weight that is not a number above 0, or a path that is given twice.
    """
    found: list[tuple[Path, float | None]] = []
    for word in map(str, named):
        for piece in [word] if word and Path(word).exists() else word.split(","):
            if not piece:
                raise DataError(f"data is {word!r}, in which a path is empty; give paths with commas between them")
            if ":/" in piece:
                raise DataError(f"data names {piece}, an address; download it, and give the path of the file")
            path, colon, weight = piece.rpartition(":")
            if not colon or Path(piece).exists():
                found.append((Path(piece), None))
                continue
            try:
                value = float(weight)
            except ValueError:
                value = 0.0
            if not 0 < value < float("inf"):
                raise DataError(
                    f"data gives {path} the weight {weight!r}; a weight is a number above 0, such as {path}:2"
                )
            found.append((Path(path), value))
    paths = [path for path, _ in found]
    twice = next((path for path in paths if paths.count(path) > 1), None)
    if twice is not None:
        raise DataError(f"data names {twice} twice; name it once, with a weight, such as {twice}:2")
    return found
