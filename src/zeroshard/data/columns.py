"""Columns of a record as tokens: plain text, messages through a chat template, or a prompt with its completion."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from zeroshard.data.sources import DocumentSource
from zeroshard.data.tokenizer import Tokenizer
from zeroshard.errors import ConfigError, DataError

Form = Literal["text", "messages", "completion"]
IGNORED = -100  # the label of a token that is not learned, as torch's cross entropy has it
USUAL: tuple[tuple[str, ...], ...] = (("text",), ("content",), ("messages",), ("prompt", "completion"))

Array = npt.NDArray[np.integer[Any]]  # uint8 where a token is a byte
Columns = Mapping[str, Any] | str


@dataclass(frozen=True, slots=True)
class Example:
    """The tokens of a document, [n], and its labels, [n] or None where each token is its own label."""

    tokens: Array
    labels: Array | None = None

    @property
    def labelled(self) -> int:
        """Number of tokens with a label."""
        return len(self.tokens) if self.labels is None else int((self.labels != IGNORED).sum())


def columns_of(source: DocumentSource, given: Sequence[str]) -> tuple[Form, tuple[str, ...]]:
    """The form of a source, and its columns: those named, or else usual ones, by its first document.

    Raises:
        ConfigError: more than two columns, or columns of text without any. DataError: a column that is missing, or
            of a type that is no text.
    """
    if len(given) > 2:
        raise ConfigError(
            f"columns names {', '.join(given)}; give one for text or messages, or two for prompt and completion"
        )
    document = next(source.beginning(1), None)
    if document is None:
        raise DataError(f"{source.name} holds no record; give a file that does")
    first, where = document[0], document[1]()
    if isinstance(first, str):
        return "text", ()
    choices = [tuple(given)] if given else USUAL
    names = next((names for names in choices if all(name in first for name in names)), None)
    there = ", ".join(first) or "none"
    if names is None and given:
        missing = next(name for name in given if name not in first)
        raise DataError(f"{where} has no column {missing!r}; its columns are {there}: set columns to one of them")
    if names is None:
        usual = ", ".join(" and ".join(names) for names in USUAL)
        raise DataError(f"{where} has none of the usual columns ({usual}) but {there}; set columns to one of them")
    if len(names) == 2:
        return "completion", names
    value = first[names[0]]
    if isinstance(value, str):
        return "text", names
    if isinstance(value, list) and all(isinstance(each, Mapping) and "role" in each for each in value):
        return "messages", names
    others = ", ".join(name for name in first if name != names[0])
    raise DataError(
        f"{where} holds {_kind(value)} in the column {names[0]!r}, which is neither text nor a list of "
        f"messages with roles; correct or remove it{f', or set columns to another of {others}' if others else ''}"
    )


class Encoder:
    """Documents of one source as tokens, each with the end of a text behind it.

    Attributes:
        names: of the columns; none for files of text.
        whole: whether a document stays in one row, as examples of a conversation do.
    """

    def __init__(self, source: DocumentSource, tokenizer: Tokenizer, columns: Sequence[str]) -> None:
        """Decide the form by the first document.

        Raises:
            ConfigError: a tokenizer without a chat template, or without padding where rows need it. DataError: see
                `columns_of`.
        """
        form, names = columns_of(source, columns)
        self.form, self.names, self._source, self._tokenizer = form, names, source, tokenizer
        self.whole = form != "text"
        source.only = list(names) or None
        self._end = np.asarray(tokenizer.end, dtype=np.int32)
        self._newline = tokenizer.decode(tokenizer.end) == "\n"
        if self.whole and tokenizer.padding is None:
            raise ConfigError(
                f"rows of {source.name} are filled up with padding, and the tokenizer {tokenizer.name} has no padding "
                f'token; add "pad_token" or "eos_token" to its tokenizer_config.json'
            )
        if form == "messages" and not tokenizer.chats:
            raise ConfigError(
                f"{source.name} holds messages, and the tokenizer {tokenizer.name} has no chat template; add "
                f"chat_template.jinja to its folder, or give data with a column of text"
            )

    def encode(self, documents: Sequence[tuple[Columns, Callable[[], str]]]) -> list[Example]:
        """The examples of several documents, each given with a function that names its place.

        Raises:
            DataError: a column is missing or no text, or a conversation does not fit the chat template.
        """
        if self.form == "completion":
            return self._completions(documents)
        texts = [self._text(document, where) for document, where in documents]
        if self.form == "messages":
            return [Example(row, row) for row in self._tokenizer.encode_all(texts)]  # its template writes the ends
        if self._newline:  # an end that is text is cheaper to add to the text
            texts = [text + "\n" if text and text[-1] != "\n" else text for text in texts]
            return list(map(Example, self._tokenizer.encode_all(texts)))
        return [Example(self._ended(row) if len(row) else row) for row in self._tokenizer.encode_all(texts)]

    def nbytes(self, documents: Sequence[tuple[Columns, Callable[[], str]]]) -> int:
        """Bytes of the text of documents, without prompts, whose tokens have no label."""
        if self.form == "completion":
            texts = [self._column(self.names[1], *document) for document in documents]
        else:
            texts = [self._text(*document) for document in documents]
        return sum(len(text.encode(errors="replace")) for text in texts)

    def _completions(self, documents: Sequence[tuple[Columns, Callable[[], str]]]) -> list[Example]:
        prompts, answers = (
            self._tokenizer.encode_all([self._column(name, *document) for document in documents]) for name in self.names
        )
        examples = []
        for prompt, answer in zip(prompts, map(self._ended, answers), strict=True):
            masked = np.full(len(prompt), IGNORED, dtype=np.int32)
            examples.append(Example(np.concatenate((prompt, answer)), np.concatenate((masked, answer))))
        return examples

    def _ended(self, tokens: Array) -> Array:
        """The tokens with the end of a text, where they do not have it."""
        count = len(self._end)
        if count and len(tokens) >= count and (tokens[-count:] == self._end).all():
            return tokens
        return np.concatenate((tokens, self._end.astype(tokens.dtype)))

    def _text(self, document: Columns, where: Callable[[], str]) -> str:
        if isinstance(document, str):
            return document
        if self.form == "text":
            return self._column(self.names[0], document, where)
        messages = document.get(self.names[0])
        if not isinstance(messages, list) or not messages:
            raise DataError(
                f"{where()} holds no messages in the column {self.names[0]!r}; give it a list of messages or remove it"
            )
        try:
            return self._tokenizer.chat(messages)
        except Exception as error:  # of the template, which may raise anything
            raise DataError(
                f"{where()} does not fit the chat template of {self._tokenizer.name} ({error}); correct its messages"
            ) from error

    def _column(self, name: str, document: Columns, where: Callable[[], str]) -> str:
        assert not isinstance(document, str)
        text = document.get(name)
        if isinstance(text, str):
            return text
        if name not in document:
            raise DataError(f"{where()} has no column {name!r}; add it there, or set columns to another")
        raise DataError(
            f"{where()} holds {_kind(text)} in the column {name!r} and text is needed; correct or remove it"
        )


def _kind(value: Any) -> str:
    """The type of a value that is no text, as an error names it."""
    return "null" if value is None else f"a value of type {type(value).__name__}"
