"""Chat templates, in the dialect of Jinja that tokenizers of transformers have; they run in a sandbox."""

import datetime
import json
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from zeroshard.errors import ConfigError, DataError


class GenerationTag(Extension):
    """The tag `generation` around answers, whose content is written as it is."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The statements inside of the tag."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled chat template."""

    def __init__(self, template: Any) -> None:
        self._template = template

    def render(self, **variables: Any) -> str:
        """The text of a conversation.

        Raises:
            DataError: the template refuses it. TemplateError: it fails.
        """
        return str(self._template.render(tools=None, documents=None, **variables))


def compiled(source: str, name: str) -> ChatTemplate:
    """A chat template from its source.

    Raises:
        ConfigError: it is no valid template.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _as_json
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
    try:
        return ChatTemplate(environment.from_string(source))
    except TemplateError as error:
        raise ConfigError(f"the chat template of {name} is not valid ({error}); save the tokenizer again") from error


def _refuse(message: str) -> NoReturn:
    raise DataError(message)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _as_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)
