"""Sentences about settings in the words of the command line, where errors of the package name settings as Python does.

`zero=3` becomes `--zero 3`, `Offload('optimizer', disk=...)` becomes `--offload optimizer --offload.disk ...`, and the
name of a setting its option: as it was typed, where it has several names. Names that are words of English, such as
`steps`, are taken for options only as the subject of a sentence ("steps is 0") or after a verb ("set steps to").
"""

import ast
import re
import shlex
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from zeroshard.plan import GROUPS
from zeroshard.train.option_tree import options_of

VALUE = r"'[^']*'|\"[^\"]*\"|\([^()]*\)|\[[^\[\]]*\]|\{[^{}]*\}|-?\d[\d.]*\d(?:e[+-]?\d+)?|-?\d|\.\.\.|[A-Za-z][\w-]*"
CLASSES = {"Plan": "", **{kind.__name__: name for name, kind in GROUPS.items()}}
CALL = re.compile(rf"(?:\b\w+=)?(?:\bzs\.)?\b({'|'.join(CLASSES)})(?=\()")
IS, TO = r"is|has|names|gives|needs|must", r"to|out|a multiple|or"
PHRASES = (  # pattern in an error, its text on the command line, an option that must exist
    (r"start a multiple of (\d+) ranks", r"start a multiple of \1 ranks (RANKS \1)", "ranks"),
    (r"needs (\d+) ranks and there are \d+; start as many", r"\g<0> (RANKS \1)", "ranks"),
    (r"Put zs\.moe\.MoE into it, or let zs\.moe\.replace_ffn\(model\) do so", "Let --experts N make some", "experts"),
    (r"Put zs\.moe\.MoE into it, or let .* do so", "Give a model that has some (--model mine.py:function)", "batch_of"),
    (r"Leave the mixtures out, or put zs\.moe\.MoE into the model", "Leave --experts out", "experts"),
    (r"\bevery=(\d+) is", r"--experts-every \1 is", "experts_every"),
    (r"\bset every to\b", "set --experts-every to", "experts_every"),
    (r", or pass a Router", "", "router"),
    (r"a table of paths and styles, such as \{.*?\}, or a list such as \[(.*?)\]", r"such as \1", "tensor_parallel"),
)
VERBS = r"[Ss]et|[Ll]eave|[Mm]ake|[Rr]aise|[Ll]ower|[Cc]orrect"


def in_options(text: str, cls: Any, argv: Sequence[str]) -> str:
    """A message in terms of the options of a command.

    Args:
        cls: the class of its options.
        argv: the words of the command; a message about a file that `--config` names stays as it is.
    """
    files = [after for word, after in pairwise(argv) if word == "--config"]
    if any(text.startswith(file) for file in files):
        return text
    names = _names(cls, argv)
    flags = {o.path[-1]: o.flags[0] for o in options_of(cls) if o.group and o.hint is bool}  # by the name in the group
    for said, instead, option in PHRASES:
        text = re.sub(said, instead.replace("RANKS", names.get("ranks", "")), text) if option in names else text
    text = _without_calls(text, names, flags)

    def assigned(found: re.Match[str]) -> str:
        name, value = found.group(1), _literal(found.group(2))
        known = flags.get(name) if isinstance(value, bool) and name in flags else names.get(name)
        return found.group() if known is None else _written(known, value)

    text = re.sub(rf"(?<![\w.'\"-])((?:[a-z_]\w*\.)?[a-z_]\w*)=({VALUE})", assigned, text)
    long = sorted((name for name in names if "_" in name or "." in name), key=len, reverse=True)
    short = [name for name in names if name not in long]
    if long:
        text = re.sub(rf"(?<![\w.'\"/-])({_any(long)})(?![\w=('-]|\.\w)", lambda found: names[found.group(1)], text)
    if short:
        subject = rf"((?:^|[.;:,] |\b(?:and|or) )(?:both )?)({_any(short)})(?= (?:{IS})\b)"
        text = re.sub(subject, lambda found: found.group(1) + names[found.group(2)], text)
        verb = rf"\b((?:{VERBS}) )({_any(short)})(?= (?:{TO})\b)"
        text = re.sub(verb, lambda found: found.group(1) + names[found.group(2)], text)
    return text


def _any(names: Sequence[str]) -> str:
    return "|".join(map(re.escape, names))


def _names(cls: Any, argv: Sequence[str]) -> dict[str, str]:
    """The option of each setting by its names: the full one, and that in its group where no other has it."""
    typed = {word.partition("=")[0] for word in argv if word.startswith("--")}
    found, inner = {}, {}
    for option in options_of(cls):
        field = option.path[-1]
        flag = next((flag for flag in option.flags[1:] if flag in typed and option.hint is not bool), None)
        found[option.name] = flag = flag or f"--{option.name.replace('_', '-')}"
        if option.group:
            found[f"{option.group}.{field}"] = flag
            inner[field] = "" if field in inner else flag
    return {name: option for name, option in inner.items() if option} | found


def _without_calls(text: str, names: Mapping[str, str], flags: Mapping[str, str]) -> str:
    """A text with options in the place of calls of the settings' classes."""
    while found := CALL.search(text):
        end = next((at for at in range(found.end(), len(text) + 1) if _parsed(text[found.start(1) : at])), None)
        call = None if end is None else _parsed(text[found.start(1) : end])
        name = CLASSES[found.group(1)]
        settings = [(f"{name}.{each.arg}".strip("."), each) for each in (call.keywords if call else ())]
        if call is None or not {setting for setting, _ in settings} <= names.keys() or (name and name not in names):
            return text
        words = [_written(names[name], _literal(ast.unparse(value))) for value in call.args[:1]]
        for setting, each in settings:
            value = _literal(ast.unparse(each.value))
            words.append(_written(names[setting], (value is ... and each.arg in flags) or value))
        text = text[: found.start()] + " ".join(words) + text[end:]
    return text


def _parsed(code: str) -> ast.Call | None:
    try:
        found = ast.parse(code, mode="eval").body
    except SyntaxError:
        return None
    return found if isinstance(found, ast.Call) else None


def _literal(code: str) -> Any:
    """A value from its literal; text that is no literal, such as a word, is returned as it is."""
    try:
        return ast.literal_eval(code)
    except (SyntaxError, ValueError):
        return code


def _written(option: str, value: Any) -> str:
    """An option with its value, as typed."""
    if value is True:
        return option
    if value is ...:
        return f"{option} VALUE"
    if value is False:
        group, _, name = option.removeprefix("--").rpartition(".")
        return f"--{group}.no-{name}" if group else f"--no-{name}"
    if isinstance(value, Mapping):
        value = [f"{key}={each}" for key, each in value.items()]
    values = value if isinstance(value, (tuple, list)) else [value]
    return " ".join([option, *(shlex.quote(str(each)) for each in values)])
