"""The order of documents: a pure function of seed, epoch and source, at any position of which reading can begin.

[Note: the order of documents] An epoch takes the blocks of a source in a shuffled order, `GROUP` at a time. Documents
of a group are shuffled among themselves, in chunks of `CHUNK` bytes, because a compressed file is one block of any
length. So a position is four integers, a first batch reads one group, and nothing of the size of the data is kept.
"""

import hashlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch

from zeroshard.data.columns import Encoder, Example
from zeroshard.data.sources import DocumentSource, FileBlock, Record
from zeroshard.errors import DataError

Where = Callable[[], str]  # names the place of a document

GROUP = 4  # blocks that are shuffled together
CHUNK = 8 << 20  # bytes of documents that are shuffled among themselves
ROW_BYTES = 512  # counted for a row of columns
ENCODED = 64  # documents that are tokenized together


class DocumentPosition(NamedTuple):
    """The position of a document in the order of one reader: all integers count from 0."""

    epoch: int = 0
    group: int = 0
    chunk: int = 0
    document: int = 0


class DocumentOrder:
    """The documents of one part of a source, encoded, in their order over all epochs.

    Args:
        part: this reader's among `parts`, which take different blocks of each epoch.
        held_out: whether to read the documents that are held out for validation, once, or all others, without end; None
            reads all once, in the order of the files.
    """

    def __init__(
        self,
        source: DocumentSource,
        encoder: Encoder,
        seed: int,
        part: int = 0,
        parts: int = 1,
        held_out: bool | None = False,
    ) -> None:
        self.source, self.encoder, self.held_out = source, encoder, held_out
        self._seed, self._part, self._parts = f"{seed} {source.digest}", part, parts

    def examples(self, begin: DocumentPosition) -> Iterator[tuple[DocumentPosition, Example, Where]]:
        """Documents from a position on, without end, or for one epoch of those that are held out.

        Yields:
            the position; the tokens; and a function that names the place, for errors.

        Raises:
            DataError: a document that cannot be read, or an epoch without any.
        """
        epoch, group, chunk, document = begin
        found = begin != (epoch, 0, 0, 0)
        while True:
            blocks = self._blocks(epoch)
            for number in range(group, -(-len(blocks) // GROUP)):
                for at, documents in enumerate(self._chunks(blocks[number * GROUP : (number + 1) * GROUP])):
                    if at >= chunk:
                        place = DocumentPosition(epoch, number, at, document)
                        for example in self._encoded(place, documents):
                            found = True
                            yield example
                        document = 0
                chunk = 0
            if self.held_out is not False:
                return
            if not found:
                raise DataError(
                    f"{self.source.name} holds no document with text beside one in twenty, which is held out for "
                    f"validation; add more"
                )
            epoch, group = epoch + 1, 0

    def _blocks(self, epoch: int) -> list[FileBlock]:
        """The blocks of this part in an epoch, in the order in which they are read."""
        if self.held_out is None:
            return list(self.source.in_order())
        order = _shuffled(len(self.source.blocks), f"{self._seed} blocks {epoch}")
        return [self.source.blocks[number] for number in order[self._part :: self._parts]]

    def _chunks(self, blocks: list[FileBlock]) -> Iterator[list[tuple[FileBlock, int, Record]]]:
        """The documents of a group of blocks, in chunks."""
        documents: list[tuple[FileBlock, int, Record]] = []
        nbytes = 0
        for block in blocks:
            for place, record in self.source.split(block, self.held_out):
                documents.append((block, place, record))
                nbytes += len(record) if isinstance(record, bytes) else ROW_BYTES
                if nbytes >= CHUNK:
                    yield documents
                    documents, nbytes = [], 0
        if documents:
            yield documents

    def _encoded(
        self, begin: DocumentPosition, documents: list[tuple[FileBlock, int, Record]]
    ) -> Iterator[tuple[DocumentPosition, Example, Where]]:
        """The documents of a chunk in shuffled order, from a position in it on; empty ones are left out."""
        key = f"{self._seed} documents {self._part} {self._parts} {begin[:3]}"
        order = list(range(len(documents))) if self.held_out is None else _shuffled(len(documents), key)
        for first in range(begin.document, len(order), ENCODED):
            chosen = [documents[number] for number in order[first : first + ENCODED]]
            columns = [
                (self.source.columns(block, place, record), partial(self.source.where, block, place))
                for block, place, record in chosen
            ]
            for number, (example, (_, where)) in enumerate(zip(self.encoder.encode(columns), columns, strict=True)):
                if len(example.tokens):
                    yield begin._replace(document=first + number), example, where


def _shuffled(count: int, key: str) -> list[int]:
    """The numbers below `count`, in an order that the key decides."""
    digest = hashlib.sha256(key.encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    order: list[int] = torch.randperm(count, generator=generator).tolist()
    return order
