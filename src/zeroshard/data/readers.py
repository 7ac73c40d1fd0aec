"""Readers: the rows of a mixture of sources, dealt to a fixed number of readers that any number of ranks share.

[Note: the global order of rows] Row k of a run is row k // R of reader k % R, of R readers. R follows from the data
alone, so global batches are the same on any number of ranks. A rank takes every n-th row of a batch, of n data ranks;
where n divides R, it needs some of the readers, and reads and tokenizes only their part of the data.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from zeroshard.data.columns import Encoder, Example
from zeroshard.data.order import DocumentOrder
from zeroshard.data.packing import RowPosition, WholeExamples, WrappedRows
from zeroshard.data.sources import DocumentSource
from zeroshard.data.tokenizer import Tokenizer

MOST_READERS = 32
BLOCKS_EACH = 16  # blocks of each reader, at least, so that readers have about equal parts of an epoch


@dataclass(frozen=True, slots=True)
class MixedSource:
    """One source of a mixture: its documents, and its share of the rows, a number above 0 of any scale."""

    source: DocumentSource
    encoder: Encoder
    weight: float


@dataclass(frozen=True, slots=True)
class DataMixture:
    """Sources with their shares, and the shape of their rows.

    Attributes:
        sequence: tokens of a row that are predicted.
        truncate: whether examples longer than a row are cut.
    """

    sources: tuple[MixedSource, ...]
    tokenizer: Tokenizer
    sequence: int
    seed: int = 0
    truncate: bool = False

    @property
    def readers(self) -> int:
        """The number of readers: a power of two."""
        fewest = min(len(each.source.blocks) for each in self.sources) // BLOCKS_EACH
        return 1 << min(MOST_READERS, max(1, fewest)).bit_length() - 1

    @property
    def digest(self) -> str:
        """sha256 over all that decides the rows but the seed and their length, wherever the files lie."""
        tokenizer = (self.tokenizer.vocabulary, tuple(self.tokenizer.end), self.tokenizer.padding)
        sources = [(each.source.digest, each.weight, each.encoder.names) for each in self.sources]
        return hashlib.sha256(str((sources, tokenizer, self.truncate, self.readers)).encode()).hexdigest()


State = Sequence[int]  # number of rows, then the position in each source


class RowReader:
    """The rows of one reader in their order, each from one source of the mixture.

    Attributes:
        row: number of the next row.
    """

    def __init__(self, mixture: DataMixture, number: int, state: State = (), held_out: bool | None = False) -> None:
        """`state`: of an earlier reader of the same number; none for the beginning. `held_out`: see `DocumentOrder`."""
        self._mixture, self._key = mixture, f"{mixture.seed} {number}"
        self.row = state[0] if state else 0
        count, width = len(mixture.sources), len(RowPosition())
        self._packers = []
        for place in range(count):
            begin = RowPosition(*state[1 + place * width : 1 + (place + 1) * width])
            self._packers.append(self._packer(mixture.sources[place], number, begin, held_out))
        total = sum(each.weight for each in mixture.sources)
        self._shares = list(accumulate(each.weight / total for each in mixture.sources))

    def _packer(
        self, mixed: MixedSource, number: int, begin: RowPosition, held_out: bool | None
    ) -> WrappedRows | WholeExamples:
        mixture = self._mixture
        readers = mixture.readers if held_out is False else 1
        order = DocumentOrder(mixed.source, mixed.encoder, mixture.seed, number, readers, held_out)
        if not mixed.encoder.whole:
            return WrappedRows(order, mixture.sequence, begin, tail=held_out is None)
        padding = mixture.tokenizer.padding
        assert padding is not None  # the encoder has checked it
        return WholeExamples(order, mixture.sequence, begin, padding, mixture.truncate)

    def state(self) -> list[int]:
        """A few integers, with which another reader goes on."""
        return [self.row, *(number for packer in self._packers for number in packer.position)]

    def next(self) -> Example | None:
        """The next row: tokens [sequence + 1], and labels where a source has some; None at the end of held-out ones."""
        packer = self._packers[self._choice()]
        self.row += 1
        return packer.next()

    def _choice(self) -> int:
        """The source of the next row, drawn by shares from a number that depends on seed, reader and row."""
        if len(self._packers) == 1:
            return 0
        digest = hashlib.sha256(f"{self._key} {self.row}".encode()).digest()
        drawn = int.from_bytes(digest[:7], "big") / (1 << 56)
        return next((place for place, share in enumerate(self._shares) if drawn < share), len(self._shares) - 1)
