"""The loader: this rank's rows of each global batch, made ahead of their use, with a state of a few integers."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from zeroshard.data.columns import Array, Encoder, Example
from zeroshard.data.files import DataFiles, find, named_kinds, parse_sources
from zeroshard.data.prefetch import Prefetch
from zeroshard.data.readers import DataMixture, MixedSource, RowReader, State
from zeroshard.data.sources import open_source
from zeroshard.data.tokenizer import Tokenizer, load_tokenizer
from zeroshard.errors import ConfigError, DataError

DEPTH = 4  # batches that are made ahead


class TokenRows(NamedTuple):
    """Rows of tokens.

    Attributes:
        tokens: [B, T + 1] int64.
        labels: likewise, with -100 where a token is not learned; None where each token is its own label.
    """

    tokens: Tensor
    labels: Tensor | None = None

    @classmethod
    def joined(cls, rows: "Sequence[TokenRows]") -> "TokenRows":
        """Rows one after the other; labels where some have them."""
        tokens = torch.cat([each.tokens for each in rows])
        if all(each.labels is None for each in rows):
            return cls(tokens)
        return cls(tokens, torch.cat([each.tokens if each.labels is None else each.labels for each in rows]))

    def to(self, device: torch.device) -> "TokenRows":
        """The rows on a device."""
        return TokenRows(self.tokens.to(device), None if self.labels is None else self.labels.to(device))


def open_data(
    data: str | Path | Sequence[str | Path],
    tokenizer: str | Tokenizer = "bytes",
    *,
    sequence: int,
    seed: int = 0,
    columns: Sequence[str] = (),
    truncate: bool = False,
) -> DataMixture:
    """Text and records on disk as a mixture of rows, whose first documents are looked at.

    Args:
        data: paths of text, .jsonl, .parquet, compressed files, or data sets that `save_to_disk` wrote; several with
            weights in one text, "web.jsonl:3,notes/". Without weights, sources count by their bytes on disk.
        tokenizer: "bytes", or the path of a tokenizer.json or of its folder.
        sequence: tokens of a row that a model predicts.
        seed: of the order of documents.
        columns: the column of text or of messages, or those of prompt and completion; by default the usual ones.
        truncate: cut examples of messages and completions that are longer than a row, instead of refusing them.

    Raises:
        DataError, ConfigError: data or a tokenizer that cannot be used.
    """
    named = parse_sources([data] if isinstance(data, str | Path) else data)
    if not named:
        raise DataError("data names no file; give the paths of text, .jsonl, .parquet or data sets")
    if sequence < 1:
        raise ConfigError(f"sequence is {sequence}; it must be 1 or more.")
    known = load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
    found = [(find(path), weight) for path, weight in named]
    check_columns([each for each, _ in found], columns)
    weighted = any(weight is not None for _, weight in found)
    mixed = []
    for each, weight in found:
        source = open_source(each)
        share = (weight or 1.0) if weighted else float(max(1, each.nbytes))
        mixed.append(MixedSource(source, Encoder(source, known, () if each.kind == "text" else columns), share))
    return DataMixture(tuple(mixed), known, sequence, seed, truncate)


def check_columns(found: Sequence[DataFiles], columns: Sequence[str]) -> None:
    """Refuse columns where all is text.

    Raises:
        ConfigError: with the kinds that were found.
    """
    if columns and all(each.kind == "text" for each in found):
        raise ConfigError(f"columns has no effect on {named_kinds(found)}; leave it out, or give records")


@dataclass(frozen=True, slots=True)
class _Batch:
    """A batch that was made: the states of this rank's readers behind it, and its rows."""

    readers: Mapping[int, State]
    rows: TokenRows


class Loader:
    """This rank's batches of a mixture, in one global order, without end.

    Documents are shuffled, streamed from the disk and tokenized ahead in a thread, and packed into rows. Each batch is
    a mapping with `input_ids` and `labels`, [batch, sequence] each. The state goes on under any number of ranks, to the
    sample; `zs.Checkpoints(engine, folder, loader=loader)` keeps it::

        data = open_data("web.parquet", "tokenizer/", sequence=512)
        loader = Loader(data, batch=8, rank=engine.data_rank, ranks=engine.data_ranks)
        for batch in loader:
            engine.train_step(batch)

    Args:
        batch: rows of this rank in a batch; global batches are equal where batch times ranks is.

    Raises:
        ConfigError: a batch or rank that does not exist.
    """

    def __init__(self, data: DataMixture, *, batch: int = 1, rank: int = 0, ranks: int = 1) -> None:
        if batch < 1 or not 0 <= rank < ranks:
            raise ConfigError(f"batch={batch} of rank {rank} among {ranks}; batch is 1 or more, and rank below ranks")
        self._data, self._batch, self._rank, self._ranks = data, batch, rank, ranks
        self._position = 0
        self._readers: Mapping[int, State] = {}  # states at the position; a reader without one is at its first row
        self._begin: tuple[int, Mapping[int, State]] = (0, {})  # the position that was loaded, to which rewinds go back
        self._ahead: tuple[list[int], Prefetch[_Batch]] | None = None  # the samples of the next batch, and its makers

    @property
    def position(self) -> int:
        """The number of the next global sample: all before it were given to a rank, or left out."""
        return self._position

    def __iter__(self) -> "Loader":
        """The loader goes on from its position."""
        return self

    def __next__(self) -> dict[str, Tensor]:
        """The next batch."""
        count = self._batch * self._ranks
        rows = self.rows(range(self._position, self._position + count))
        labels = rows.tokens if rows.labels is None else rows.labels
        return {"input_ids": rows.tokens[:, :-1], "labels": labels[:, :-1]}

    def rows(self, samples: Sequence[int]) -> TokenRows:
        """This rank's rows of the global batch of `samples`, which ascend: [len(samples) / ranks, sequence + 1].

        Raises:
            DataError: samples do not divide among the ranks, or a document cannot be used.
        """
        wanted = list(samples)
        if len(wanted) % self._ranks:
            raise DataError(f"a global batch of {len(wanted)} samples does not divide among {self._ranks} data ranks")
        if self._ahead is None or self._ahead[0] != wanted:
            self._restart(wanted)
        assert self._ahead is not None
        try:
            batch = self._ahead[1].next()
        except BaseException:
            self.close()  # its thread has ended; asked again, another meets the same document
            raise
        following = [sample + wanted[-1] + 1 - wanted[0] for sample in wanted]
        self._ahead = following if _consecutive(wanted) else [], self._ahead[1]
        self._position, self._readers = wanted[-1] + 1, batch.readers
        return batch.rows

    def state_dict(self) -> dict[str, Any]:
        """The position and the states of this rank's readers, a few integers, in plain JSON values."""
        readers = [[number, *state] for number, state in sorted(self._readers.items())]
        return {"position": self._position, "data": self._identity(), "readers": readers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state: of this rank, or `merged` of the states of all.

        Raises:
            DataError: it is the state of other data, or of rows of another length.
        """
        if state.get("data") != self._identity():
            raise DataError(
                f"The state is one of the data {state.get('data')}, and this loader reads {self._identity()}; give the "
                f"same data, tokenizer, sequence, columns and seed, or begin anew"
            )
        self.close()
        self._position = int(state["position"])
        self._readers = {number: numbers for number, *numbers in state["readers"]}
        self._begin = self._position, self._readers

    @staticmethod
    def merged(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The states of all ranks as one, with which any number of ranks go on."""
        newest: dict[int, list[int]] = {}
        for number, *state in (reader for each in states for reader in each["readers"]):
            if number not in newest or state[0] > newest[number][0]:
                newest[number] = state
        return {**states[0], "readers": [[number, *state] for number, state in sorted(newest.items())]}

    def close(self) -> None:
        """End the thread that reads ahead; the next batch starts another."""
        if self._ahead is not None:
            self._ahead[1].stop()
            self._ahead = None

    def _identity(self) -> str:
        """The data and its order, as text."""
        return f"{self._data.digest[:16]}, sequence {self._data.sequence}, seed {self._data.seed}"

    def _restart(self, wanted: list[int]) -> None:
        """Begin to make batches at other samples than those expected."""
        self.close()
        readers = self._readers
        if wanted[0] < self._position:
            readers = self._begin[1] if wanted[0] >= self._begin[0] else {}
        making = partial(_batches, self._data, dict(readers), wanted, self._rank, self._ranks)
        self._ahead = wanted, Prefetch(making, DEPTH)


def _batches(
    data: DataMixture, states: dict[int, State], samples: list[int], rank: int, ranks: int
) -> Iterator[_Batch]:
    """A rank's batches from `samples` on: those of the same number that follow, where they are consecutive."""
    readers: dict[int, RowReader] = {}
    count, follow = data.readers, _consecutive(samples)
    while True:
        rows = []
        for sample in samples[rank::ranks]:
            row, number = divmod(sample, count)
            reader = readers.get(number) or RowReader(data, number, states.get(number, ()))
            readers[number] = reader
            assert reader.row <= row, (reader.row, row)
            while reader.row < row:
                reader.next()  # of another rank, or left out
            example = reader.next()
            assert example is not None
            rows.append(example)
        numbers = {sample % count for sample in samples[rank::ranks]}
        states = {**states, **{number: readers[number].state() for number in numbers}}
        yield _Batch(states, stacked(rows))
        if not follow:
            return
        samples = [sample + len(samples) for sample in samples]


def _consecutive(samples: Sequence[int]) -> bool:
    """Whether samples follow each other without a gap."""
    return len(samples) == samples[-1] + 1 - samples[0]


def stacked(examples: Sequence[Example]) -> TokenRows:
    """Rows from examples of equal length; labels where one of them has some."""
    tokens = _stacked([example.tokens for example in examples])
    if all(example.labels is None for example in examples):
        return TokenRows(tokens)
    labels = [example.tokens if example.labels is None else example.labels for example in examples]
    return TokenRows(tokens, _stacked(labels))


def _stacked(rows: Sequence[Array]) -> Tensor:
    """Rows of equal length as one int64 tensor, converted as they are copied."""
    stacked = np.empty((len(rows), len(rows[0])), dtype=np.int64)
    for number, row in enumerate(rows):
        stacked[number] = row
    return torch.from_numpy(stacked)
