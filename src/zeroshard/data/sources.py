"""Sources: files of one kind, cut into blocks that are found without reading them, and the records of each block."""

import hashlib
import importlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, BinaryIO

from zeroshard.data.files import DataFiles, is_compressed, open_bytes
from zeroshard.errors import ConfigError, DataError

BLOCK = 1 << 20  # bytes of text or of lines in a block
FEWEST_BLOCKS, SMALLEST_BLOCK = 64, 1 << 10  # of a small source of text, whose blocks are its documents
ROWS = 1024  # rows of a block of a data set, and of a batch of parquet
EDGE = 1 << 16  # bytes at either end of a file in its digest
EVERY = 20  # one document in so many is held out

Record = bytes | Mapping[str, Any]  # a line, a text, or the columns of a row


@dataclass(frozen=True, slots=True)
class FileBlock:
    """A part of a source: bytes [start, stop) of a file, a row group of it, or rows of a data set.

    Attributes:
        number: among the blocks of its source.
        file: number of the file.
        stop: -1 for all of a compressed file, which has no known length.
    """

    number: int
    file: int
    start: int
    stop: int


class DocumentSource:
    """Documents of one path.

    Attributes:
        found: the files.
        name: as the user named it.
        blocks: in the order of the files.
        digest: sha256 over names, sizes and ends of the files, wherever they lie.
        only: the columns that are read; None for all.
    """

    only: list[str] | None = None

    def __init__(self, found: DataFiles) -> None:
        """Look at the files without reading them."""
        self.found, self.name = found, str(found.root)
        self.blocks = tuple(FileBlock(number, *place) for number, place in enumerate(self._places()))
        if not self.blocks:
            raise DataError(f"no text was found in {found.root}; name files or folders of UTF-8 text or of records")
        self.digest = _digest(found)

    def records(self, block: FileBlock) -> Iterator[tuple[int, Record]]:
        """The place of each document in its file (byte or row), and its record."""
        raise NotImplementedError

    def columns(self, block: FileBlock, place: int, record: Record) -> Mapping[str, Any] | str:
        """The columns of a record, or its text where it has none.

        Raises:
            DataError: it cannot be read.
        """
        raise NotImplementedError

    def where(self, block: FileBlock, place: int) -> str:
        """The file and line or row of a document, for an error."""
        return f"{self.found.files[block.file]}, row {place + 1}"

    def split(self, block: FileBlock, held_out: bool | None) -> Iterator[tuple[int, Record]]:
        """The documents of a block that are held out, each twentieth; or all others; or with None all."""
        for ordinal, (place, record) in enumerate(self.records(block)):
            if held_out is None or ((7 * block.number + ordinal) % EVERY == EVERY - 1) == held_out:
                yield place, record

    def beginning(self, count: int | None) -> Iterator[tuple[Mapping[str, Any] | str, Callable[[], str]]]:
        """The first `count` documents or all, each with a function that names its place."""
        documents = ((block, *found) for block in self.blocks for found in self.records(block))
        for block, place, record in islice(documents, count):
            yield self.columns(block, place, record), partial(self.where, block, place)

    def in_order(self) -> Sequence[FileBlock]:
        """Blocks to read once from the first to the last, which cut documents as seldom as can be."""
        return self.blocks

    def _places(self) -> Iterator[tuple[int, int, int]]:
        """(file, start, stop) of every block."""
        raise NotImplementedError


class TextFiles(DocumentSource):
    """Files of text: a document is a file, or a part of a long one, cut at the end of a line."""

    def records(self, block: FileBlock) -> Iterator[tuple[int, Record]]:
        """The text of the block."""
        file = self.found.files[block.file]
        with open_bytes(file) as opened:
            if block.stop < 0:
                yield from _pieces(_readable(opened, file))
                return
            start, data = _whole_lines(opened, block.start, block.stop)
        if data:
            yield start, data

    def columns(self, block: FileBlock, place: int, record: Record) -> Mapping[str, Any] | str:
        """The text."""
        assert isinstance(record, bytes)
        try:
            return record.decode("utf-8")
        except UnicodeDecodeError as error:
            file = self.found.files[block.file]
            raise DataError(
                f"{file} is not UTF-8 text, which training needs (byte {place + error.start}); convert it or leave it "
                f"out"
            ) from error

    def where(self, block: FileBlock, place: int) -> str:
        """The file and byte."""
        return f"{self.found.files[block.file]}, byte {place}"

    def in_order(self) -> Sequence[FileBlock]:
        """Blocks of `BLOCK` bytes, also of a small source."""
        return [FileBlock(number, *place) for number, place in enumerate(_byte_ranges(self.found.files, BLOCK))]

    def _places(self) -> Iterator[tuple[int, int, int]]:
        size = min(BLOCK, max(SMALLEST_BLOCK, self.found.nbytes // FEWEST_BLOCKS))
        return _byte_ranges(self.found.files, size)


class RecordFiles(DocumentSource):
    """Files with a JSON record on every line; a line belongs to the block in which it begins."""

    def records(self, block: FileBlock) -> Iterator[tuple[int, Record]]:
        """The lines of the block that are not blank, not yet parsed."""
        file = self.found.files[block.file]
        with open_bytes(file) as opened:
            if block.stop < 0:
                place, lines = 0, _readable(opened, file)
            else:
                place, data = _whole_lines(opened, block.start, block.stop)
                lines = iter(data.splitlines(keepends=True) if b"\r" not in data else _lines(data))
            for line in lines:
                if not line.isspace():
                    yield place, line
                place += len(line)

    def columns(self, block: FileBlock, place: int, record: Record) -> Mapping[str, Any] | str:
        """The parsed record."""
        assert isinstance(record, bytes)
        try:
            parsed = json.loads(record, object_pairs_hook=None if place else partial(self._checked, block))
        except DataError:
            raise
        except (ValueError, RecursionError) as error:
            shown = record[:40].decode("utf-8", errors="replace").strip()
            raise DataError(
                f"{self.where(block, place)} is no JSON record ({error}): {shown!r}; correct or remove the line"
            ) from error
        if not isinstance(parsed, dict):
            raise DataError(
                f"{self.where(block, place)} holds a {type(parsed).__name__} and a record is a JSON object, such as "
                f'{{"text": "..."}}; correct or remove the line'
            )
        return parsed

    def _checked(self, block: FileBlock, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """The columns of the first line of a file, whose names the other lines repeat."""
        _check_names([name for name, _ in pairs], self.where(block, 0))
        return dict(pairs)

    def where(self, block: FileBlock, place: int) -> str:
        """The file and line, counted now."""
        file, line = self.found.files[block.file], 1
        with open_bytes(file) as opened:
            while place > 0 and (data := opened.read(min(place, BLOCK))):
                line += data.count(b"\n")
                place -= len(data)
        return f"{file}, line {line}"

    def _places(self) -> Iterator[tuple[int, int, int]]:
        return _byte_ranges(self.found.files, BLOCK)


class ParquetFiles(DocumentSource):
    """Parquet files, a block for each row group; read by pyarrow."""

    def __init__(self, found: DataFiles) -> None:
        self._parquet: Any = _package("pyarrow.parquet", found.root)
        super().__init__(found)

    def records(self, block: FileBlock) -> Iterator[tuple[int, Record]]:
        """The rows of the row group."""
        place, path = 0, self.found.files[block.file]
        with self._open(path) as file:
            batches = file.iter_batches(ROWS, row_groups=[block.start], columns=self.only)
            while rows := _rows_of(batches, f"row group {block.start} of {path}"):
                yield from enumerate(rows, place)
                place += len(rows)

    def columns(self, block: FileBlock, place: int, record: Record) -> Mapping[str, Any] | str:
        """The row."""
        assert not isinstance(record, bytes)
        return record

    def where(self, block: FileBlock, place: int) -> str:
        """The file, row group and row."""
        return f"{self.found.files[block.file]}, row group {block.start}, row {place + 1}"

    def _open(self, file: Path) -> Any:
        try:
            return self._parquet.ParquetFile(file)
        except Exception as error:  # pyarrow's own errors, and those of the system
            raise DataError(f"{file} is not valid parquet ({error}); write it again or leave it out") from error

    def _places(self) -> Iterator[tuple[int, int, int]]:
        for number, path in enumerate(self.found.files):
            with self._open(path) as file:
                groups, names = range(file.metadata.num_row_groups), file.schema_arrow.names
            _check_names(names, path)
            yield from ((number, group, group + 1) for group in groups)


class DatasetFolder(DocumentSource):
    """A folder that `datasets.Dataset.save_to_disk` wrote, a block for each 1,024 rows; read by datasets."""

    def __init__(self, found: DataFiles) -> None:
        package: Any = _package("datasets", found.root)
        try:
            self._rows: Any = package.load_from_disk(str(found.root)).with_format("arrow")
        except Exception as error:  # whatever the package raises for a damaged folder
            raise DataError(f"{found.root} is not a whole data set ({error}); save it again") from error
        super().__init__(found)

    def records(self, block: FileBlock) -> Iterator[tuple[int, Record]]:
        """The rows of the block."""
        rows = self._rows[block.start : block.stop]
        return enumerate((rows if self.only is None else rows.select(self.only)).to_pylist(), block.start)

    def columns(self, block: FileBlock, place: int, record: Record) -> Mapping[str, Any] | str:
        """The row."""
        assert not isinstance(record, bytes)
        return record

    def _places(self) -> Iterator[tuple[int, int, int]]:
        count = len(self._rows)
        return ((0, start, min(start + ROWS, count)) for start in range(0, count, ROWS))


def _rows_of(batches: Iterator[Any], where: str) -> list[Any]:
    """The rows of the next batch of parquet; none at the end.

    Raises:
        DataError: it is damaged.
    """
    try:
        return next((rows for batch in batches if (rows := batch.to_pylist())), [])
    except Exception as error:  # pyarrow's own errors, and those of the system
        shown = str(error).partition("\n")[0]
        raise DataError(f"{where} cannot be read ({shown}); write the file again or leave it out") from error


def _check_names(names: Sequence[str], where: object) -> None:
    """Refuse two columns of one name, of which a row of columns would keep the last.

    Raises:
        DataError: with the name.
    """
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise DataError(f"{where} has two columns with the name {twice!r}; rename or remove one of them")


def open_source(found: DataFiles) -> DocumentSource:
    """The source of files that were found.

    Raises:
        ConfigError: a package is not installed. DataError: files that cannot be read, or none.
    """
    kinds = {"text": TextFiles, "records": RecordFiles, "parquet": ParquetFiles, "dataset": DatasetFolder}
    return kinds[found.kind](found)


def _package(name: str, path: Path) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise ConfigError(
            f"reading {path} needs the package {package}, which is not installed; "
            f'run pip install "zeroshard[data]", or write the records to a .jsonl file'
        ) from error


def _byte_ranges(files: Sequence[Path], size: int) -> Iterator[tuple[int, int, int]]:
    """(file, start, stop) of the blocks of files, of about equal sizes in each; compressed files are whole."""
    for number, file in enumerate(files):
        nbytes = file.stat().st_size
        if is_compressed(file):
            yield number, 0, -1
        elif nbytes:
            count = max(1, round(nbytes / size))
            cuts = [nbytes * cut // count for cut in range(count + 1)]
            yield from ((number, start, stop) for start, stop in pairwise(cuts))


def _whole_lines(file: BinaryIO, start: int, stop: int) -> tuple[int, bytes]:
    """The lines that begin in bytes [start, stop), with the place of the first."""
    file.seek(max(start - 1, 0))
    data = file.read(stop - max(start - 1, 0))
    if start:
        cut = data.find(b"\n") + 1
        start, data = start - 1 + cut, data[cut:] if cut else b""
    if data and not data.endswith(b"\n"):
        data += file.readline()
    return start, data


def _lines(data: bytes) -> list[bytes]:
    """Lines that end at line feeds alone."""
    lines = [line + b"\n" for line in data.split(b"\n")]
    lines[-1] = lines[-1][:-1]
    return lines if lines[-1] else lines[:-1]


def _readable(file: BinaryIO, path: Path) -> Iterator[bytes]:
    """The lines of a compressed file.

    Raises:
        DataError: it is damaged.
    """
    try:
        yield from file
    except Exception as error:  # of the packages that unpack, which have errors of their own
        raise DataError(f"{path} cannot be unpacked ({error}); compress it again or leave it out") from error


def _pieces(lines: Iterator[bytes]) -> Iterator[tuple[int, bytes]]:
    """Parts of about the size of a block, with their places."""
    place, piece = 0, bytearray()
    for line in lines:
        piece += line
        if len(piece) >= BLOCK:
            yield place, bytes(piece)
            place += len(piece)
            piece.clear()
    if piece:
        yield place, bytes(piece)


def _digest(found: DataFiles) -> str:
    digest = hashlib.sha256(found.kind.encode())
    files = sorted(found.root.iterdir()) if found.kind == "dataset" else found.files
    for file in files:
        size = file.stat().st_size
        name = file.relative_to(found.root).as_posix() if file != found.root else file.name
        digest.update(f"\0{name}\0{size}\0".encode())
        with file.open("rb") as opened:
            digest.update(opened.read(EDGE))
            if size > EDGE:
                opened.seek(max(EDGE, size - EDGE))
                digest.update(opened.read(EDGE))
    return digest.hexdigest()
