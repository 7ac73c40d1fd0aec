"""Text to tokens and back: raw bytes by default, or a Hugging Face `tokenizer.json` with the settings beside it."""

import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from zeroshard.data.chat_template import compiled
from zeroshard.errors import ConfigError

_PIECE = 1 << 20  # bytes
SETTINGS, TEMPLATE = "tokenizer_config.json", "chat_template.jinja"  # beside a tokenizer.json
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")  # of texts, in vocabularies without settings
NEWLINE = b"\n"

Array = npt.NDArray[np.integer[Any]]


class Tokenizer(Protocol):
    """The interface of a tokenizer."""

    @property
    def vocabulary(self) -> int:
        """Number of distinct tokens; every token is below it."""

    @property
    def name(self) -> str:
        """As the user named it."""

    @property
    def end(self) -> Sequence[int]:
        """Tokens behind each document: the end of a text, or a newline where there is no such token."""

    @property
    def padding(self) -> int | None:
        """The token that fills up rows, or None without one."""

    @property
    def chats(self) -> bool:
        """Whether there is a chat template."""

    def encode(self, text: bytes) -> Tensor:
        """Tokens of `text`: [n], uint8 when a token is a byte, int32 otherwise."""

    def encode_all(self, texts: Sequence[str]) -> list[Array]:
        """Tokens of each text: [n], uint8 when a token is a byte, int32 otherwise."""

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of `tokens`; invalid bytes become U+FFFD."""

    def bytes_per_token(self, tokens: Tensor, raw: bytes) -> float:
        """Mean length in bytes of the tokens of `raw`: bits per token divided by it are bits per byte."""

    def chat(self, messages: Sequence[Mapping[str, Any]], reply: bool = False) -> str:
        """The text of a conversation; with `reply` also the beginning of the next answer."""


INVALID = 0xFF  # a byte that is in no UTF-8 text


class ByteTokenizer:
    """Every byte is a token."""

    vocabulary, name = 256, "bytes"
    end: Sequence[int] = (NEWLINE[0],)
    padding: int | None = 0
    chats = False

    def encode(self, text: bytes) -> Tensor:
        """[len(text)] uint8."""
        # A bytearray is a copy that torch may own; torch warns about sharing read-only bytes.
        return torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)

    def encode_all(self, texts: Sequence[str]) -> list[Array]:
        """The bytes of each text, [n] uint8."""
        return [np.frombuffer(text.encode(errors="replace"), dtype=np.uint8) for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        """The bytes as UTF-8; invalid ones and tokens of a larger vocabulary become U+FFFD."""
        return bytes(min(token, INVALID) for token in tokens).decode("utf-8", errors="replace")

    def bytes_per_token(self, tokens: Tensor, raw: bytes) -> float:
        """Always 1."""
        return 1.0

    def chat(self, messages: Sequence[Mapping[str, Any]], reply: bool = False) -> str:
        """Bytes have no chat template: always a `ConfigError`."""
        raise ConfigError("the tokenizer bytes has no chat template; give a tokenizer that has one")


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
        self._tokenizer.no_truncation()  # a file may keep those of another use
        self._tokenizer.no_padding()
        self.name, self._folder = str(path), file.parent
        self.vocabulary = int(max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)) + 1

    @cached_property
    def end(self) -> Sequence[int]:
        """The end of a text by the settings, or by its usual names; else a newline."""
        names = [self._special("eos_token"), *ENDS]
        tokens = (self._tokenizer.token_to_id(name) for name in names if name)
        end = next((token for token in tokens if token is not None), None)
        return self.encode(NEWLINE).tolist() if end is None else (end,)

    @cached_property
    def padding(self) -> int | None:
        """The token of padding by the settings, or else the end of a text; None without either."""
        for name in ("pad_token", "eos_token"):
            token = self._special(name)
            number = None if token is None else self._tokenizer.token_to_id(token)
            if number is not None:
                return int(number)
        return None

    @property
    def chats(self) -> bool:
        """Whether the settings have a chat template, or a file beside them."""
        return self._chat_source is not None

    def encode(self, text: bytes) -> Tensor:
        """[n] int32, without special tokens; bytes that are not UTF-8 become U+FFFD first."""
        tokens = [self._encode_piece(piece) for piece in _pieces(text.decode("utf-8", errors="replace"))]
        return torch.cat(tokens) if tokens else torch.empty(0, dtype=torch.int32)

    def encode_all(self, texts: Sequence[str]) -> list[Array]:
        """[n] int32 of each text, without tokens that the text does not have; on several threads."""
        try:
            encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        except (TypeError, UnicodeEncodeError):  # halves of surrogate pairs, which JSON may hold and UTF-8 does not
            whole = [text.encode(errors="replace").decode() for text in texts]
            encoded = self._tokenizer.encode_batch_fast(whole, add_special_tokens=False)
        return [np.array(each.ids, dtype=np.int32) for each in encoded]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text, without special tokens."""
        return str(self._tokenizer.decode(list(tokens)))

    def bytes_per_token(self, tokens: Tensor, raw: bytes) -> float:
        """len(raw) / len(tokens); `tokens` [n] are those of `raw`."""
        return len(raw) / max(len(tokens), 1)

    def chat(self, messages: Sequence[Mapping[str, Any]], reply: bool = False) -> str:
        """The text that the chat template makes of a conversation.

        Raises:
            ConfigError: there is none, or it is no valid template.
        """
        if self._chat_source is None:
            raise ConfigError(f"the tokenizer {self.name} has no chat template; add {TEMPLATE} to its folder")
        tokens = {name: token for name in self._settings if name.endswith("_token") and (token := self._special(name))}
        return str(self._compiled.render(messages=messages, add_generation_prompt=reply, **tokens))

    @cached_property
    def _settings(self) -> Mapping[str, Any]:
        """The settings beside the file; empty without them."""
        file = self._folder / SETTINGS
        try:
            settings = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        except ValueError as error:
            raise ConfigError(f"{file} is not valid JSON ({error}); save the tokenizer again") from error
        return settings if isinstance(settings, dict) else {}

    @cached_property
    def _chat_source(self) -> str | None:
        """The source of the chat template."""
        file = self._folder / TEMPLATE
        if file.is_file():
            return file.read_text(encoding="utf-8")
        found = self._settings.get("chat_template")
        if isinstance(found, list):  # several, by name
            found = next((each["template"] for each in found if each.get("name") == "default"), None)
        return found if isinstance(found, str) else None

    @cached_property
    def _compiled(self) -> Any:
        """The compiled chat template."""
        assert self._chat_source is not None
        return compiled(self._chat_source, self.name)

    def _special(self, name: str) -> str | None:
        """The text of a special token in the settings, which keep it as text or as a table."""
        found = self._settings.get(name)
        found = found.get("content") if isinstance(found, dict) else found
        return found if isinstance(found, str) else None

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
