"""Rows of tokens from documents: text wraps from row to row, and examples with labels stay whole."""

from bisect import bisect_right
from typing import NamedTuple

import numpy as np

from zeroshard.data.columns import IGNORED, Array, Example
from zeroshard.data.order import DocumentOrder, DocumentPosition, Where
from zeroshard.errors import DataError

BUFFER = 1 << 15  # tokens of text that are laid one after the other


class RowPosition(NamedTuple):
    """Position of the next row: a document, and the number of its tokens that earlier rows have predicted from."""

    epoch: int = 0
    group: int = 0
    chunk: int = 0
    document: int = 0
    offset: int = 0


class WrappedRows:
    """Rows of `sequence + 1` tokens of text; the last token of a row is only a target, and the first of the next."""

    def __init__(self, order: DocumentOrder, sequence: int, begin: RowPosition, tail: bool = False) -> None:
        """`tail`: give the last tokens of documents that end as a row with labels, filled up with zeros."""
        self._begin, self._sequence, self._tail = begin, sequence, tail
        self._examples = order.examples(DocumentPosition(*begin[:4]))
        self._buffer: Array = np.empty(0, dtype=np.uint8)  # documents one after the other
        self._at = 0  # the first token of the next row in it
        self._starts: list[int] = []  # of the documents in it; below 0 where a beginning is no longer there
        self._documents: list[DocumentPosition] = []

    @property
    def position(self) -> RowPosition:
        """The position of the next row."""
        if not self._starts:
            return self._begin
        number = bisect_right(self._starts, self._at) - 1
        return RowPosition(*self._documents[number], self._at - self._starts[number])

    def next(self) -> Example | None:
        """The next row: tokens [sequence + 1] without labels; None at the end of documents that are held out."""
        stop = self._at + self._sequence + 1
        if stop > len(self._buffer):
            self._fill()
            stop = self._sequence + 1
            if stop > len(self._buffer):
                return self._rest()
        row = self._buffer[self._at : stop]
        self._at += self._sequence
        return Example(row)

    def _fill(self) -> None:
        """Drop the tokens before the next row, and read documents for some rows."""
        first = max(0, bisect_right(self._starts, self._at) - 1)
        self._documents = self._documents[first:]
        skipped = 0 if self._starts else self._begin.offset
        self._starts = [start - self._at for start in self._starts[first:]]
        parts, length = [self._buffer[self._at :]], len(self._buffer) - self._at
        while length < max(BUFFER, self._sequence + 1) and (found := next(self._examples, None)) is not None:
            position, example, _ = found
            self._documents.append(position)
            self._starts.append(length - skipped)
            parts.append(example.tokens[skipped:])
            length += len(parts[-1])
            skipped = 0
        self._buffer, self._at = np.concatenate(parts[not len(parts[0]) and len(parts) > 1 :]), 0

    def _rest(self) -> Example | None:
        """The tokens that do not fill a row, once."""
        rest, self._buffer = self._buffer, self._buffer[:0]
        if not self._tail or len(rest) < 2:
            return None
        tokens = np.zeros(self._sequence + 1, dtype=np.int32)
        labels = np.full(self._sequence + 1, IGNORED, dtype=np.int32)
        tokens[: len(rest)] = labels[: len(rest)] = rest
        return Example(tokens, labels)


class WholeExamples:
    """Rows of as many whole examples as fit into `sequence` tokens, filled up with padding to `sequence + 1`.

    Labels of padding, and of the first token of an example, are ignored.

    Attributes:
        position: of the next row.
    """

    def __init__(
        self, order: DocumentOrder, sequence: int, begin: RowPosition, padding: int, truncate: bool = False
    ) -> None:
        """`truncate`: cut examples that are longer than a row, instead of refusing them."""
        self.position, self._sequence, self._padding, self._truncate = begin, sequence, padding, truncate
        self._examples = order.examples(DocumentPosition(*begin[:4]))
        self._pending: tuple[DocumentPosition, Example] | None = None

    def next(self) -> Example | None:
        """The next row: tokens and labels [sequence + 1]; None at the end of documents that are held out.

        Raises:
            DataError: an example is longer than a row, or none has a label in it.
        """
        row = np.full(self._sequence + 1, self._padding, dtype=np.int32)
        labels = np.full(self._sequence + 1, IGNORED, dtype=np.int32)
        used = 0
        while (found := self._pending or self._fitting()) is not None:
            position, example = self._pending = found
            stop = used + len(example.tokens)
            if stop > self._sequence:
                self.position = RowPosition(*position)
                break
            row[used:stop] = example.tokens
            assert example.labels is not None
            labels[used + 1 : stop] = example.labels[1:]
            used, self._pending = stop, None
        return Example(row, labels) if used else None

    def _fitting(self) -> tuple[DocumentPosition, Example] | None:
        """The next example that has a label, which fits into a row; None without another."""
        for position, example, where in self._examples:
            cut = self._cut(example, where)
            assert cut.labels is not None
            if (cut.labels[1:] != IGNORED).any():
                return position, cut
            if position.epoch > self.position.epoch + 1:
                raise DataError(
                    f"no example has a label in its first {self._sequence} tokens, {where()} among them; raise sequence"
                )
        return None

    def _cut(self, example: Example, where: Where) -> Example:
        count, most = len(example.tokens), self._sequence
        if count <= most:
            return example
        if not self._truncate:
            raise DataError(
                f"{where()} is an example of {count} tokens and a row has {most}; set truncate to cut long examples, "
                f"remove it, or train with sequence {count} or more"
            )
        assert example.labels is not None
        return Example(example.tokens[:most], example.labels[:most])
