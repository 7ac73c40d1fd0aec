"""Rows of tokens from documents: text wraps from row to row, and examples with labels stay whole."""

from collections import deque
from typing import NamedTuple

import numpy as np

from zeroshard.data.columns import IGNORED, Array, Example
from zeroshard.data.order import DocumentOrder, DocumentPosition, Where
from zeroshard.errors import DataError


class RowPosition(NamedTuple):
    """Position of the next row: a document, and the number of its tokens that earlier rows have predicted from."""

    epoch: int = 0
    group: int = 0
    chunk: int = 0
    document: int = 0
    offset: int = 0


class WrappedRows:
    """Rows of `sequence + 1` tokens of text; the last token of a row is only a target, and the first of the next.

    Attributes:
        position: of the next row.
    """

    def __init__(self, order: DocumentOrder, sequence: int, begin: RowPosition, tail: bool = False) -> None:
        """`tail`: give the last tokens of documents that end as a row with labels, filled up with zeros."""
        self.position, self._sequence, self._tail = begin, sequence, tail
        self._examples = order.examples(DocumentPosition(*begin[:4]))
        self._pending: deque[tuple[DocumentPosition, Array]] = deque()
        self._length = -begin.offset  # tokens that are pending from the position on

    def next(self) -> Example | None:
        """The next row: tokens [sequence + 1] without labels; None at the end of documents that are held out."""
        wanted = self._sequence + 1
        while self._length < wanted:
            found = next(self._examples, None)
            if found is None:
                return self._rest()
            position, example, _ = found
            self._pending.append((position, example.tokens))
            self._length += len(example.tokens)
        begin = offset = self.position.offset
        tokens = np.concatenate([tokens for _, tokens in self._pending])[begin : begin + wanted]
        offset += self._sequence
        self._length -= self._sequence
        while offset >= len(self._pending[0][1]):
            offset -= len(self._pending.popleft()[1])
        self.position = RowPosition(*self._pending[0][0], offset)
        return Example(tokens)

    def _rest(self) -> Example | None:
        """The tokens that do not fill a row, once."""
        if not self._tail or self._length < 2:
            return None
        rest = np.concatenate([tokens for _, tokens in self._pending])[self.position.offset :]
        tokens = np.zeros(self._sequence + 1, dtype=np.int32)
        labels = np.full(self._sequence + 1, IGNORED, dtype=np.int32)
        tokens[: len(rest)] = labels[: len(rest)] = rest
        self._pending.clear()
        self._length = 0
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
                f"{where()} is an example of {count} tokens and a row has {most}; raise sequence to {count} or more, "
                f"cut long examples with truncate, or remove it"
            )
        assert example.labels is not None
        return Example(example.tokens[:most], example.labels[:most])
