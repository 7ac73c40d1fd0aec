"""The command `zeroshard completion`: a script with which a shell completes commands, options and their values."""

import shlex
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin

from zeroshard.train.option_tree import Positional, options_of
from zeroshard.train.options import parse

Shell = Literal["bash", "zsh", "fish"]
ALWAYS = ("--help", "--help-all", "--config")

BASH = """_zeroshard() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}" command="${{COMP_WORDS[1]}}"
    local words=""
    if [ "$COMP_CWORD" -eq 1 ]; then
        words={commands}
    else
        case "$command $previous" in
{values}
            *)
                case "$command" in
{options}
                esac
                ;;
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$current"))
    [ "${{#COMPREPLY[@]}}" -gt 0 ] || COMPREPLY=($(compgen -f -- "$current"))
}}
complete -o filenames -F _zeroshard zeroshard
"""


@dataclass(frozen=True, kw_only=True)
class CompletionOptions:
    """Print a script with which a shell completes commands, options and their values.

    Write it where the shell looks for such scripts: `zeroshard completion bash >
    ~/.local/share/bash-completion/completions/zeroshard`, `zeroshard completion zsh > "${fpath[1]}/_zeroshard"`, or
    `zeroshard completion fish > ~/.config/fish/completions/zeroshard.fish`.
    """

    shell: Positional[Shell]
    """bash, zsh or fish."""


def run_completion(argv: Sequence[str], classes: Callable[[], Mapping[str, Any]]) -> None:
    """Print the script of the shell that the options name.

    Args:
        classes: called for the class of options of each command; None for those with several.
    """
    shell = parse(CompletionOptions, argv, "zeroshard completion").shell
    from zeroshard.cli.early_options import CHECKPOINT
    from zeroshard.cli.launch import CLUSTERS

    several: dict[str, Mapping[str, Any]] = {"checkpoint": CHECKPOINT, "launch": CLUSTERS}
    commands = {name: [kind] if kind else list(several[name].values()) for name, kind in classes().items()}
    following = {**{name: " ".join(kinds) for name, kinds in several.items()}, "completion": " ".join(get_args(Shell))}
    if shell == "fish":
        print("\n".join(_fish(commands, following)))
        return
    options, values = [], []
    for command, kinds in commands.items():
        named = dict(_options(kinds))
        every = " ".join([*following.get(command, "").split(), *named, *ALWAYS])
        options.append(f"                    {command}) words={shlex.quote(every)} ;;")
        for flag, choices in named.items():
            if choices:
                values.append(
                    f"            {shlex.quote(f'{command} {flag}')}) words={shlex.quote(' '.join(choices))} ;;"
                )
    script = BASH.format(
        commands=shlex.quote(" ".join([*commands, "--help", "--version"])),
        options="\n".join(options),
        values="\n".join(values),
    )
    begin = "#compdef zeroshard\nautoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else ""
    print(begin + script, end="")


def _options(kinds: Sequence[Any]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The flags of all options with the values that each may have; no values where they are not listed."""
    for kind in kinds:
        for option in options_of(kind):
            for flag in option.flags:
                yield flag, tuple(map(str, _choices(option.hint)))


def _choices(hint: Any) -> tuple[Any, ...]:
    """The values of a `Literal`, alone or in a union."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    if get_origin(hint) in (Union, types.UnionType):
        return tuple(value for part in get_args(hint) for value in _choices(part))
    return ()


def _fish(commands: Mapping[str, Sequence[Any]], following: Mapping[str, str]) -> Iterator[str]:
    """The lines of fish's script."""
    first = "complete -c zeroshard -n __fish_use_subcommand"
    yield f"{first} -f -a {shlex.quote(' '.join(commands))}"
    yield f"{first} -l help -l version"
    for command, kinds in commands.items():
        seen = f"complete -c zeroshard -n '__fish_seen_subcommand_from {command}'"
        if command in following:
            yield f"{seen} -a {shlex.quote(following[command])}"
        for flag, choices in [*_options(kinds), *((flag, ()) for flag in ALWAYS)]:
            values = f" -x -a {shlex.quote(' '.join(choices))}" if choices else ""
            kind = "-s" if len(flag.lstrip("-")) == 1 else "-l"
            yield f"{seen} {kind} {flag.lstrip('-')}{values}"
