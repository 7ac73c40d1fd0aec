"""Tokens and bytes, there and back."""

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zeroshard.data import tokenizer as tokenizer_module
from zeroshard.data.tokenizer import ByteTokenizer, JsonTokenizer, load_tokenizer
from zeroshard.errors import ConfigError

TEXT = "def größe(x):\n    return x  # ½\n"


@pytest.fixture
def tokenizer_file(tmp_path: Path) -> Path:
    """A byte-level BPE with a few merges, trained on the spot."""
    tokenizers = pytest.importorskip("tokenizers")
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        [TEXT] * 4, tokenizers.trainers.BpeTrainer(vocab_size=270, initial_alphabet=alphabet, show_progress=False)
    )
    path = tmp_path / "tokenizer.json"
    bpe.save(str(path))
    return path


@given(st.binary())
def test_every_byte_is_a_token(text: bytes) -> None:
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode(text)
    assert tokens.dtype == torch.uint8
    assert tokens.tolist() == list(text)
    assert tokenizer.decode(tokens.tolist()) == text.decode("utf-8", errors="replace")
    assert tokenizer.bytes_per_token(tokens, text) == 1.0


def test_a_tokenizer_file_gives_back_its_text(tokenizer_file: Path) -> None:
    tokenizer = load_tokenizer(str(tokenizer_file))
    raw = TEXT.encode()
    tokens = tokenizer.encode(raw)
    assert tokens.dtype == torch.int32
    assert int(tokens.max()) < tokenizer.vocabulary == 270
    assert len(tokens) < len(raw)
    assert tokenizer.decode(tokens.tolist()) == TEXT
    assert tokenizer.bytes_per_token(tokens, raw) == len(raw) / len(tokens)
    assert tokenizer.encode(b"").shape == (0,)
    whole, half = tokenizer.encode_all(["a ?", "a \ud83d"])  # half of a pair, as JSON may hold
    assert half.tolist() == whole.tolist()


def test_a_folder_stands_for_the_tokenizer_in_it(tokenizer_file: Path) -> None:
    assert load_tokenizer(str(tokenizer_file.parent)).vocabulary == 270


def test_long_text_is_encoded_piece_by_piece(tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = JsonTokenizer(tokenizer_file)
    text = TEXT * 20
    monkeypatch.setattr(tokenizer_module, "_PIECE", 40)
    pieces = list(tokenizer_module._pieces(text))
    assert len(pieces) > 5
    assert "".join(pieces) == text
    assert all(piece.endswith("\n") for piece in pieces)
    assert tokenizer.decode(tokenizer.encode(text.encode()).tolist()) == text


def test_bytes_need_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert load_tokenizer("bytes").vocabulary == 256


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match=r"package tokenizers.*zeroshard\[hf\]"):
        load_tokenizer(str(tmp_path))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'none\.json, which does not exist; give "bytes"'):
        load_tokenizer(str(tmp_path / "none.json"))


def test_an_invalid_file_is_named(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json is not a valid"):
        load_tokenizer(str(tmp_path))


def test_tokens_of_a_larger_vocabulary_than_that_of_bytes_are_no_text() -> None:
    """As a model with more tokens may generate."""
    assert ByteTokenizer().decode([*b"ab", 256, 399, *b"c"]) == "ab\ufffd\ufffdc"
