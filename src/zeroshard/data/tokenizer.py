"""Text to tokens and back: raw bytes by default, or a Hugging Face `tokenizer.json`."""

import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from zeroshard.errors import ConfigError

_PIECE = 1 << 20  # bytes


class Tokenizer(Protocol):
    """The interface of a tokenizer."""

    @property
    def vocabulary(self) -> int:
        """Number of distinct tokens; every token is below it."""

    def encode(self, text: bytes) -> Tensor:
        """Tokens of `text`: [n], uint8 when a token is a byte, int32 otherwise."""

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of `tokens`; invalid bytes become U+FFFD."""

    def bytes_per_token(self, tokens: Tensor, raw: bytes) -> float:
        """Mean length in bytes of the tokens of `raw`: bits per token divided by it are bits per byte."""


class ByteTokenizer:
    """Every byte is a token."""

    vocabulary = 256

    def encode(self, text: bytes) -> Tensor:
        """[len(text)] uint8."""
        # A bytearray is a copy that torch may own; torch warns about sharing read-only bytes.
        return torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)

    def decode(self, tokens: Sequence[int]) -> str:
        """The bytes as UTF-8; invalid ones become U+FFFD."""
        return bytes(tokens).decode("utf-8", errors="replace")

    def bytes_per_token(self, tokens: Tensor, raw: bytes) -> float:
        """Always 1."""
        return 1.0


class JsonTokenizer:
    """A `tokenizer.json`, read by the optional package `tokenizers`."""

    def __init__(self, path: Path) -> None:
        """`path`: the file, or a folder that holds a `tokenizer.json`.

        Raises:
            ConfigError: the package is not installed, or the file is missing or no tokenizer.
        """
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise ConfigError(
                f'tokenizer names {file}, which does not exist; give "bytes" or the path of a tokenizer.json'
            )
        try:
            package = importlib.import_module("tokenizers")
        except ImportError as error:
            raise ConfigError(
                f"reading {file} needs the package tokenizers, which is not installed; "
                f'run pip install "zeroshard[hf]", or use the tokenizer "bytes"'
            ) from error
        try:
            self._tokenizer: Any = package.Tokenizer.from_file(str(file))
        except Exception as error:  # the package raises plain Exception for a file it cannot parse
            raise ConfigError(f"{file} is not a valid tokenizer.json ({error}); save the tokenizer again") from error
        self.vocabulary = int(max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)) + 1

    def encode(self, text: bytes) -> Tensor:
        """[n] int32, without special tokens; bytes that are not UTF-8 become U+FFFD first."""
        tokens = [self._encode_piece(piece) for piece in _pieces(text.decode("utf-8", errors="replace"))]
        return torch.cat(tokens) if tokens else torch.empty(0, dtype=torch.int32)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text, without special tokens."""
        return str(self._tokenizer.decode(list(tokens)))

    def bytes_per_token(self, tokens: Tensor, raw: bytes) -> float:
        """len(raw) / len(tokens); `tokens` [n] are those of `raw`."""
        return len(raw) / max(len(tokens), 1)

    def _encode_piece(self, piece: str) -> Tensor:
        return torch.tensor(self._tokenizer.encode(piece, add_special_tokens=False).ids, dtype=torch.int32)


def load_tokenizer(spec: str) -> Tokenizer:
    """The tokenizer named by `spec`: "bytes", or the path of a `tokenizer.json` or of its folder.

    Raises:
        ConfigError: see `JsonTokenizer`.
    """
    return ByteTokenizer() if spec == "bytes" else JsonTokenizer(Path(spec))


def _pieces(text: str) -> Iterator[str]:
    """`text` cut after line ends, since encoding it whole takes some hundred bytes of memory for every token."""
    start = 0
    while start < len(text):
        newline = text.find("\n", start + _PIECE)
        end = len(text) if newline < 0 else newline + 1
        yield text[start:end]
        start = end
