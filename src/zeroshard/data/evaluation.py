"""Data to evaluate a model on: every document once, in the order of the files."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from zeroshard.data.loader import TokenRows, open_data, stacked
from zeroshard.data.readers import RowReader
from zeroshard.data.tokenizer import Tokenizer
from zeroshard.errors import DataError


class EvaluationData:
    """All rows of paths of text and records; of a mixture, one source after the other.

    Args:
        data, columns, truncate: as `zeroshard.data.loader.open_data` takes them.
        sequence: tokens of a row.

    Raises:
        DataError, ConfigError: data that cannot be used.

    Attributes:
        rows: read so far.
        tokens: of text that were read so far, separators included.
    """

    def __init__(
        self,
        data: Sequence[Path | str],
        tokenizer: Tokenizer,
        sequence: int,
        columns: Sequence[str] = (),
        truncate: bool = False,
    ) -> None:
        self._data = open_data(data, tokenizer, sequence=sequence, columns=columns, truncate=truncate)
        self.rows = self.tokens = 0

    def batches(self, size: int, limit: int | None = None) -> Iterator[TokenRows]:
        """Batches [up to `size`, sequence + 1]; of the first `limit` rows, or of all.

        Raises:
            DataError: a document that cannot be used, or none with text.
        """
        rows = islice(self._each_row(), limit)
        while batch := list(islice(rows, size)):
            yield batch[0] if len(batch) == 1 else TokenRows.joined(batch)
        if not self.rows:
            names = ", ".join(each.source.name for each in self._data.sources)
            raise DataError(
                f"{names} holds no document with a token to predict behind its first one, or, where prompts are not "
                f"learned, none in the {self._data.sequence} tokens of a row; give other data"
            )

    def nbytes(self) -> int | None:
        """Bytes of all text; None where some tokens have no label, so that bits per byte mean nothing."""
        if any(each.encoder.whole for each in self._data.sources):
            return None
        found = 0
        for each in self._data.sources:
            documents = each.source.beginning(None)
            while batch := list(islice(documents, 64)):
                found += each.encoder.nbytes(batch)
        return found

    def _each_row(self) -> Iterator[TokenRows]:
        for each in self._data.sources:
            reader, first = RowReader(replace(self._data, sources=(each,)), 0, held_out=None), True
            while (example := reader.next()) is not None:
                self.rows += 1
                known = len(example.tokens) if example.labels is None else int((example.labels >= 0).sum())
                self.tokens += known - (0 if first else 1)  # the first token of a row is the last of the one before
                first = False
                yield stacked([example])
