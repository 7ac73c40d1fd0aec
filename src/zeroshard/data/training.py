"""Training data of the main job: small text in memory, and all else streamed from the disk, behind one interface."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from zeroshard.comm.collectives import Comm
from zeroshard.data.corpus import Batches, Corpus, files_corpus, standard_library_corpus, validation_windows
from zeroshard.data.files import find, named_kinds, parse_sources
from zeroshard.data.loader import Loader, TokenRows, check_columns, open_data, stacked
from zeroshard.data.readers import DataMixture, RowReader
from zeroshard.data.tokenizer import Tokenizer, load_tokenizer
from zeroshard.errors import DataError
from zeroshard.text import format_bytes

LARGE_TEXT = 256 << 20  # bytes of text that is not read into memory
SAMPLED = 16  # documents of each source by which bytes per token are estimated


@dataclass(frozen=True, slots=True, kw_only=True)
class DataOptions:
    """The options of the data: paths with weights, tokenizer, tokens of a row, seed of the order, columns, and cuts."""

    data: Sequence[Path | str] = ()
    tokenizer: str = "bytes"
    sequence: int
    seed: int = 0
    columns: Sequence[str] = ()
    truncate: bool = False


class TrainingData(Protocol):
    """Rows to train on, by their numbers, and rows that are held out.

    Attributes:
        name: of the data, as the user gave it.
        digest: of names, content and split, wherever the files lie.
        masked: whether some tokens are not learned, so that ranks and microbatches have different counts.
    """

    name: str
    digest: str
    tokenizer: Tokenizer
    masked: bool

    @property
    def about(self) -> str:
        """The data in words, with their size."""

    def facts(self) -> dict[str, Any]:
        """The data in a run's summary."""

    def bits_per_byte(self, nats_per_token: float) -> float:
        """Loss in bits per byte of text."""

    def rows(self, samples: Sequence[int], rank: int = 0, ranks: int = 1) -> TokenRows:
        """The rows of a data rank in the global batch of `samples`: [len(samples) / ranks, sequence + 1]."""

    def validation(self, batch: int, rank: int, ranks: int, limit: int | None) -> Iterator[TokenRows]:
        """Batches of rows that are held out, equally many for each rank; `limit` rows in all."""

    def state(self) -> dict[str, Any] | None:
        """This rank's part of the position, or None where the number of the sample says it all."""

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Go on from a `state`, merged from those of all ranks of the earlier run."""


def open_training(options: DataOptions) -> TrainingData:
    """The training data of the main job; without paths the standard library's source.

    Raises:
        DataError, ConfigError: data or a tokenizer that is missing or does not fit, or too little text.
    """
    named = parse_sources(options.data)
    found = [find(path) for path, _ in named]
    if not found:
        return TextInMemory(standard_library_corpus(), options)
    check_columns(found, options.columns)
    plain = all(each.kind == "text" and not each.compressed for each in found)
    small = plain and sum(each.nbytes for each in found) < LARGE_TEXT
    if small and all(weight is None for _, weight in named):
        return TextInMemory(files_corpus([path for path, _ in named]), options)
    tokenizer = load_tokenizer(options.tokenizer)
    mixture = open_data(
        options.data,
        tokenizer,
        sequence=options.sequence,
        seed=options.seed,
        columns=options.columns,
        truncate=options.truncate,
    )
    return StreamedData(mixture)


def check_same(comm: Comm, data: TrainingData) -> None:
    """Refuse ranks with different data; a collective call.

    Raises:
        DataError: on every rank, with those that differ.
    """
    digests = comm.agree_on(data.digest, "data of every rank")
    others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if others:
        raise DataError(
            f"rank{'s' * (len(others) > 1)} {', '.join(map(str, others))} read other data than rank 0 (digests "
            f"{digests[others[0]][:12]} and {digests[0][:12]}) under the name {data.name}; copy the same files to "
            f"every machine"
        )


class TextInMemory:
    """A corpus as tokens in memory; each sample is a function of its number."""

    masked = False

    def __init__(self, corpus: Corpus, options: DataOptions) -> None:
        """Tokenize the corpus."""
        self.tokenizer = load_tokenizer(options.tokenizer)
        self.name, self.digest, self._corpus, self._sequence = corpus.name, corpus.digest, corpus, options.sequence
        self._batches = Batches(self.tokenizer.encode(corpus.train), options.sequence, options.seed)
        self._held_out = self.tokenizer.encode(corpus.validation)
        self._bytes_per_token = self.tokenizer.bytes_per_token(self._held_out, corpus.validation)

    @property
    def about(self) -> str:
        """Name, files and bytes, and files of a folder that are left out."""
        files, left_out = self._corpus.files, self._corpus.left_out
        rest = f"; {len(left_out)} left out, not UTF-8 text, such as {left_out[0]}" if left_out else ""
        return f"{self.name}, {_files(files)}, {format_bytes(len(self._corpus.train))} to train on{rest}"

    def facts(self) -> dict[str, Any]:
        """Name, files, bytes and digest."""
        corpus = self._corpus
        nbytes = {"train_bytes": len(corpus.train), "validation_bytes": len(corpus.validation)}
        return {"name": corpus.name, "files": corpus.files, **nbytes, "digest": corpus.digest}

    def bits_per_byte(self, nats_per_token: float) -> float:
        """Loss in bits per byte of the validation text."""
        return nats_per_token / math.log(2) / self._bytes_per_token

    def rows(self, samples: Sequence[int], rank: int = 0, ranks: int = 1) -> TokenRows:
        """Windows of the text."""
        return TokenRows(self._batches.rows(samples, rank, ranks))

    def validation(self, batch: int, rank: int, ranks: int, limit: int | None) -> Iterator[TokenRows]:
        """Windows of the validation text."""
        return map(TokenRows, validation_windows(self._held_out, self._sequence, batch, rank, ranks, limit))

    def state(self) -> None:
        """None: the number of the sample says it all."""

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Nothing to load."""


@dataclass(slots=True)
class _HeldOut:
    """Rows that are held out, read as far as they were asked for."""

    reader: RowReader
    rows: list[TokenRows] = field(default_factory=list)
    ended: bool = False

    def first(self, limit: int | None) -> list[TokenRows]:
        """The first `limit` rows, or all."""
        while not self.ended and (limit is None or len(self.rows) < limit):
            example = self.reader.next()
            self.ended = example is None
            if example is not None:
                self.rows.append(stacked([example]))
        return self.rows[:limit]


class StreamedData:
    """A mixture that is streamed from the disk; one document in twenty is held out."""

    def __init__(self, mixture: DataMixture) -> None:
        self._mixture, self.digest, self.tokenizer = mixture, mixture.digest, mixture.tokenizer
        self.name = ", ".join(each.source.name for each in mixture.sources)
        self.masked = any(each.encoder.whole for each in mixture.sources)
        self._loader: tuple[tuple[int, int], Loader] | None = None  # of a data rank, by rank and ranks
        self._loaded: Mapping[str, Any] | None = None
        self._held_out = _HeldOut(RowReader(mixture, 0, held_out=True))
        self._bytes_per_token = self._estimated_bytes_per_token()

    @property
    def about(self) -> str:
        """Names, kinds, files and bytes."""
        facts = self.facts()
        return f"{self.name}: {facts['kind']}, {_files(facts['files'])}, {format_bytes(facts['bytes'])}, streamed"

    def facts(self) -> dict[str, Any]:
        """Name, kinds, files, bytes on the disk and digest; of a mixture, the share of each source."""
        found = [each.source.found for each in self._mixture.sources]
        total = sum(each.weight for each in self._mixture.sources)
        shares = {each.source.name: round(each.weight / total, 4) for each in self._mixture.sources}
        nbytes = sum(each.nbytes for each in found)
        sizes = {"files": sum(len(each.files) for each in found), "bytes": nbytes}
        mixed = {"shares": shares} if len(shares) > 1 else {}
        return {"name": self.name, "kind": named_kinds(found), **sizes, **mixed, "digest": self.digest}

    def bits_per_byte(self, nats_per_token: float) -> float:
        """Loss in bits per byte, by the bytes per token of the first documents, without prompts."""
        return nats_per_token / math.log(2) / self._bytes_per_token

    def rows(self, samples: Sequence[int], rank: int = 0, ranks: int = 1) -> TokenRows:
        """Rows of the global batch, made ahead in a thread.

        Raises:
            DataError: a document cannot be used, or samples do not divide among ranks.
        """
        if self._loader is None or self._loader[0] != (rank, ranks):
            self.close()
            loader = Loader(self._mixture, rank=rank, ranks=ranks)
            if self._loaded is not None:
                loader.load_state_dict(self._loaded)
            self._loader = (rank, ranks), loader
        return self._loader[1].rows(samples)

    def validation(self, batch: int, rank: int, ranks: int, limit: int | None) -> Iterator[TokenRows]:
        """The first rows that are held out.

        Raises:
            DataError: fewer rows than ranks.
        """
        rows = self._held_out.first(limit)
        if len(rows) < ranks:
            raise DataError(
                f"one document in twenty is held out for validation, which gives {len(rows)} rows of "
                f"{self._mixture.sequence} tokens from {self.name}, and each rank needs one ({ranks} in all); give "
                f"more documents or shorten the sequence"
            )
        mine = rows[: len(rows) - len(rows) % ranks][rank::ranks]
        return (TokenRows.joined(mine[first : first + batch]) for first in range(0, len(mine), batch))

    def state(self) -> dict[str, Any] | None:
        """The state of the loader."""
        return None if self._loader is None else self._loader[1].state_dict()

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Go on from a state, merged from those of all ranks of the earlier run.

        Raises:
            DataError: a state of other data.
        """
        if state is not None:
            self._loaded = state
            self.close()

    def close(self) -> None:
        """End the thread that reads ahead."""
        if self._loader is not None:
            self._loader[1].close()
            self._loader = None

    def _estimated_bytes_per_token(self) -> float:
        nbytes = tokens = 0
        for mixed in self._mixture.sources:
            documents = list(mixed.source.beginning(SAMPLED))
            nbytes += mixed.encoder.nbytes(documents)
            tokens += sum(example.labelled for example in mixed.encoder.encode(documents))
        return nbytes / max(tokens, 1) if nbytes else 1.0


def _files(count: int) -> str:
    return f"{count} file{'s' * (count != 1)}"
