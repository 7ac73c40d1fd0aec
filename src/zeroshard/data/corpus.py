"""Training text: the sources of its bytes, and the windows of each step."""

import hashlib
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from zeroshard.errors import DataError

VALIDATION_PERCENT = 5
SPLIT_BY_FILE_FROM = 20  # with fewer files, a split by file would often leave one side empty
_NO_PROSE = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "lib2to3"}
_NO_PROSE |= {"idlelib", "turtledemo", "__pycache__"}


@dataclass(frozen=True)
class Corpus:
    """A text in two parts; `digest` (sha256, hex) identifies names, bytes and split, wherever the files lie.

    Attributes:
        left_out: names of the files in a folder that are not UTF-8 text.
    """

    name: str
    files: int
    train: bytes
    validation: bytes
    digest: str
    left_out: tuple[str, ...] = ()


def standard_library_corpus() -> Corpus:
    """The `.py` sources of the running interpreter's standard library, split by file.

    An interpreter without sources (zipped, frozen) falls back to torch's own; `name` says which was read.

    Raises:
        DataError: neither has sources.
    """
    library = _python_sources(Path(sysconfig.get_path("stdlib")))
    if library:
        return _split_by_file("standard library", library)
    sources = _python_sources(Path(torch.__file__).parent)
    if not sources:
        raise DataError(
            "neither the standard library nor torch has .py sources here; name text files of your own as the data"
        )
    return _split_by_file("torch sources", sources)


def files_corpus(paths: Sequence[Path]) -> Corpus:
    """The user's text files, and the readable ones in the user's folders (recursively, hidden ones skipped).

    With 20 files or more the split is by file; with fewer, the last 5 % of each file is validation.

    Raises:
        DataError: a path is missing, a named file is not UTF-8, or there is too little text to split.
    """
    found = [file for path in paths for file in _read_path(path)]
    files = _distinct(file for file in found if _is_text(file[1]))
    name = ", ".join(str(path) for path in paths)
    if not files:
        raise DataError(f"no text was found in {name or 'an empty list of paths'}; name files or folders of UTF-8 text")
    corpus = _split_by_file(name, files) if len(files) >= SPLIT_BY_FILE_FROM else _split_each(name, files)
    return replace(corpus, left_out=tuple(file for file, data in sorted(found) if not _is_text(data)))


def _split_each(name: str, files: list[tuple[str, bytes]]) -> Corpus:
    cuts = [len(data) - len(data) * VALIDATION_PERCENT // 100 for _, data in files]
    train = [(file, data[:cut]) for (file, data), cut in zip(files, cuts, strict=True)]
    validation = [(file, data[cut:]) for (file, data), cut in zip(files, cuts, strict=True)]
    return _corpus(name, len(files), train, validation)


def _read_path(path: Path) -> list[tuple[str, bytes]]:
    """(relative name, bytes) of one named file of text, or of every file below a folder."""
    if path.is_file():
        data = path.read_bytes()
        if not _is_text(data):
            raise DataError(f"{path} is not UTF-8 text, which training needs; convert it or leave it out")
        return [(path.name, data)]
    if not path.is_dir():
        raise DataError(f"data names {path}, which does not exist; give an existing file or folder of text")
    inside = ((file, file.relative_to(path)) for file in path.rglob("*"))
    visible = ((file, name) for file, name in inside if not any(part.startswith(".") for part in name.parts))
    files = [(file, name) for file, name in visible if file.is_file()]
    return [(name.as_posix(), file.read_bytes()) for file, name in files]


def _is_text(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _python_sources(root: Path) -> list[tuple[str, bytes]]:
    names = ((path, path.relative_to(root)) for path in root.rglob("*.py"))
    return _distinct((name.as_posix(), path.read_bytes()) for path, name in names if not _NO_PROSE & set(name.parts))


def _distinct(files: Iterable[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
    """The files in order of name, without empty ones and without a second copy of the same bytes."""
    first: dict[bytes, tuple[str, bytes]] = {}
    for name, data in sorted(files):
        if data:
            first.setdefault(data, (name, data))
    return list(first.values())


def _split_by_file(name: str, files: list[tuple[str, bytes]]) -> Corpus:
    held_out = [entry for entry in files if _is_validation(entry[0])]
    train = [entry for entry in files if not _is_validation(entry[0])]
    return _corpus(name, len(files), train, held_out)


def _is_validation(name: str) -> bool:
    # A hash of the name, so that adding or removing a file leaves the split of the others.
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % 100 < VALIDATION_PERCENT


def _corpus(name: str, files: int, train: list[tuple[str, bytes]], validation: list[tuple[str, bytes]]) -> Corpus:
    digest = hashlib.sha256()
    for side, part in (("train", train), ("validation", validation)):
        for file, data in part:
            digest.update(f"{side}\0{file}\0{len(data)}\0".encode() + data)
    text, held_out = _join(data for _, data in train), _join(data for _, data in validation)
    if not (text and held_out):
        sizes = f"{len(text)} bytes for training and {len(held_out)} for validation"
        raise DataError(f"{name} leaves {sizes}, and each needs at least one; add more text")
    return Corpus(name, files, text, held_out, digest.hexdigest())


def _join(parts: Iterable[bytes]) -> bytes:
    """All parts in one text; a part that does not end its last line gets a newline before the next part."""
    text = bytearray()
    for part in parts:
        if text and not text.endswith(b"\n"):
            text += b"\n"
        text += part
    return bytes(text)


class Batches:
    """Windows of `sequence + 1` tokens, as a pure function of the seed and the number of the sample.

    An epoch visits non-overlapping windows in a shuffled order, from an offset of its own; the last token of a
    window is only a target there and is the first input of the next, so every token is predicted once per epoch.
    """

    def __init__(self, tokens: Tensor, sequence: int, seed: int) -> None:
        """`tokens`: [n], uint8 or int32. Raises `DataError` when not even two windows fit in."""
        # One window fewer than n allows, so that every offset below `sequence` leaves room for the same number.
        self.windows_per_epoch = len(tokens) // sequence - 1
        if self.windows_per_epoch < 1:
            raise DataError(
                f"the training text has {len(tokens)} tokens and a sequence of {sequence} needs at least "
                f"{2 * sequence}; add text or shorten the sequence"
            )
        self._tokens = tokens
        self._sequence = sequence
        self._seed = seed
        self._epoch = -1
        self._starts = torch.empty(0, dtype=torch.int64)

    def rows(self, samples: Sequence[int], data_rank: int = 0, data_ranks: int = 1) -> Tensor:
        """Rows of `data_rank` in the global batch of `samples`: [len(samples) / data_ranks, sequence + 1] int64.

        A sample is a window, counted from the start of the run over all epochs. The global batch does not depend on how
        it is cut over the data ranks.

        Raises:
            DataError: one global batch needs more windows than an epoch has, or does not divide among the data ranks.
        """
        if len(samples) > self.windows_per_epoch:
            raise DataError(
                f"the training text has {len(self._tokens)} tokens and a global batch of {len(samples)} windows needs "
                f"at least {(len(samples) + 1) * self._sequence}; add text, or shorten the sequence or the batch"
            )
        size, left = divmod(len(samples), data_ranks)
        if left:
            raise DataError(f"a global batch of {len(samples)} samples does not divide among {data_ranks} data ranks")
        starts = [self._start(sample) for sample in samples[data_rank * size : (data_rank + 1) * size]]
        return _windows(self._tokens, torch.tensor(starts), self._sequence)

    def _start(self, sample: int) -> int:
        """Index of a sample's first token."""
        epoch, position = divmod(sample, self.windows_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._starts = epoch, self._shuffled(epoch)
        return int(self._starts[position])

    def _shuffled(self, epoch: int) -> Tensor:
        """Starts of all windows of an epoch, in the order of their visit: [windows_per_epoch] int64."""
        key = hashlib.sha256(f"{self._seed} {epoch}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "big") >> 1)
        offset = torch.randint(self._sequence, (1,), generator=generator)
        return offset + self._sequence * torch.randperm(self.windows_per_epoch, generator=generator)


def validation_windows(
    tokens: Tensor, sequence: int, batch: int, rank: int, ranks: int, limit: int | None = None
) -> Iterator[Tensor]:
    """Fixed non-overlapping windows of `tokens` [n]: batches [up to `batch`, sequence + 1] int64 for this rank.

    `limit` windows in all, spread evenly over the text (None: all of them). Every rank gets equally many batches of
    equal sizes, because ranks that share parameters must run the same forwards; at most `ranks - 1` windows are left
    out for that. Only the last batch may be smaller, so weigh batches by their rows.

    Raises:
        DataError: fewer windows than ranks.
    """
    available = (len(tokens) - 1) // sequence
    wanted = available if limit is None else min(limit, available)
    if wanted < ranks:
        raise DataError(
            f"the validation text has {len(tokens)} tokens, room for {max(available, 0)} windows of {sequence}, of "
            f"which {wanted} are used, and {ranks} ranks need one each; add text, shorten the sequence or raise the "
            f"limit"
        )
    starts = torch.arange(wanted) * available // wanted * sequence
    mine = starts[: wanted - wanted % ranks][rank::ranks]
    return (_windows(tokens, mine[row : row + batch], sequence) for row in range(0, len(mine), batch))


def _windows(tokens: Tensor, starts: Tensor, sequence: int) -> Tensor:
    """`sequence + 1` tokens from each start: [len(starts), sequence + 1] int64."""
    return tokens[starts[:, None] + torch.arange(sequence + 1)].long()
