"""Rows hold every token of the documents once, in their order, and examples stay whole."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zeroshard.data.columns import IGNORED, Encoder
from zeroshard.data.files import find
from zeroshard.data.order import DocumentOrder, DocumentPosition
from zeroshard.data.packing import RowPosition, WholeExamples, WrappedRows
from zeroshard.data.sources import open_source
from zeroshard.data.tokenizer import ByteTokenizer
from zeroshard.errors import DataError


def order_of(folder: Path, rows: list[dict[str, Any]], held_out: bool = False) -> DocumentOrder:
    path = folder / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = open_source(find(path))
    return DocumentOrder(source, Encoder(source, ByteTokenizer(), ()), seed=3, held_out=held_out)


def stream_of(order: DocumentOrder, count: int) -> list[int]:
    """The first tokens of all documents one after the other."""
    tokens: list[int] = []
    for _, example, _ in order.examples(DocumentPosition()):
        tokens += example.tokens.tolist()
        if len(tokens) >= count:
            return tokens[:count]
    return tokens


def test_text_wraps_from_row_to_row_and_each_token_is_predicted_once(tmp_path: Path) -> None:
    order = order_of(tmp_path, [{"text": f"{n} " + "x" * (n % 37)} for n in range(40)])
    tokens = stream_of(order, 3001)  # several epochs
    rows, begins = WrappedRows(order, 10, RowPosition()), []
    for first in range(0, 3000, 10):
        begins.append(rows.position)
        row = rows.next()
        assert row is not None and row.tokens.tolist() == tokens[first : first + 11]
    assert begins[-1].epoch > 2
    for number in (0, 1, 57, 299):  # each position is enough to go on
        again = WrappedRows(order, 10, begins[number]).next()
        assert again is not None and again.tokens.tolist() == tokens[10 * number : 10 * number + 11]


def test_documents_that_are_held_out_end(tmp_path: Path) -> None:
    texts = [{"text": f"document {n}"} for n in range(100)]
    order = order_of(tmp_path, texts, held_out=True)
    tokens = stream_of(order, 10**9)
    rows = WrappedRows(order, 16, RowPosition())
    found = []
    while (row := rows.next()) is not None:
        found.append(row.tokens.tolist())
    assert found == [tokens[first : first + 17] for first in range(0, len(tokens) - 16, 16)]
    assert bytes(tokens).count(b"document") == 5


def pairs(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"p{n}" + "p" * (n % 5), "completion": f"c{n}" * (1 + n % 3)} for n in range(count)]


def test_examples_stay_whole_and_only_completions_have_labels(tmp_path: Path) -> None:
    order = order_of(tmp_path, pairs(60))
    rows, begins = WholeExamples(order, 24, RowPosition(), padding=0), []
    expected = order.examples(DocumentPosition())
    for _ in range(80):
        begins.append(rows.position)
        row = rows.next()
        assert row is not None and row.labels is not None
        assert row.tokens.shape == row.labels.shape == (25,)
        used = 0
        while row.tokens[used]:  # no example has the padding's token
            _, example, _ = next(expected)
            stop = used + len(example.tokens)
            assert np.array_equal(row.tokens[used:stop], example.tokens)
            assert np.array_equal(row.labels[used + 1 : stop], example.labels[1:]) and row.labels[used] == IGNORED
            used = stop
        assert (row.labels[used:] == IGNORED).all() and (row.labels[:24] != IGNORED).any()
    again = WholeExamples(order, 24, begins[-1], padding=0).next()
    assert again is not None and row is not None and np.array_equal(again.tokens, row.tokens)


def test_the_last_row_of_examples_that_are_held_out_is_filled_up(tmp_path: Path) -> None:
    rows = WholeExamples(order_of(tmp_path, pairs(60), held_out=True), 1000, RowPosition(), padding=0)
    row = rows.next()
    assert row is not None and bytes(row.tokens[row.tokens > 0].tolist()).count(b"\n") == 3
    assert rows.next() is None


def test_long_examples_are_refused_or_cut(tmp_path: Path) -> None:
    order = order_of(tmp_path, [{"prompt": "p" * 8, "completion": "c" * 30}] * 3)
    with pytest.raises(
        DataError,
        match=r"line \d is an example of 39 tokens and a row has 16; .* or train with sequence 39",
    ):
        WholeExamples(order, 16, RowPosition(), padding=0).next()
    row = WholeExamples(order, 16, RowPosition(), padding=0, truncate=True).next()
    assert row is not None and row.tokens.tolist() == [112] * 8 + [99] * 8 + [0]
    with pytest.raises(DataError, match="no example has a label in its first 8 tokens"):
        WholeExamples(order, 8, RowPosition(), padding=0, truncate=True).next()
