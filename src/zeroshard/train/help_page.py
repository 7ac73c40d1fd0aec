"""The help of a command: the options of a dataclass in boxes, each with its type, meaning and default.

Where the class names the options of a first run, `--help` shows these alone, and `--help-all` shows all.
"""

import dataclasses
import inspect
from collections.abc import Iterable
from typing import Any

from rich.box import ROUNDED
from rich.console import Console, Group
from rich.padding import Padding
from rich.panel import Panel
from rich.text import Text

from zeroshard.train.option_tree import Option, options_of
from zeroshard.train.option_values import default_text, kind_of

WIDEST = 120  # columns of a readable line
CONFIG = "--config FILE reads options from a TOML file first; the command line overrides them."


def help_page(cls: Any, config: Any, prog: str, whole: bool) -> str:
    """The help of the command `prog`, as wide as the terminal.

    Args:
        cls: class of its options.
        config: an instance with the defaults; None for those of the class.
        whole: every option, in boxes; otherwise those of a first run.
    """
    options, first = options_of(cls, config), getattr(cls, "FIRST", None)
    shown = options if whole or first is None else [dataclasses.replace(o, box="") for o in options if o.name in first]
    places = [o.name.upper() if o.required else f"[{o.name.upper()}]" for o in shown if not o.flags]
    console = Console(highlight=False, markup=False)
    console.width = min(console.width, WIDEST)
    with console.capture() as page:
        console.print(f"usage: {' '.join((prog, '[OPTIONS]', *places))}\n")
        for paragraph in (*inspect.cleandoc(cls.__doc__ or "").split("\n\n"), CONFIG):
            console.print(" ".join(paragraph.split()), end="\n\n")
        for title in dict.fromkeys(option.box for option in shown):
            console.print(option_box(title or "options", [option for option in shown if option.box == title]))
        if len(shown) < len(options):
            console.print(f"These are the options of a first run; {prog} --help-all shows all {len(options)}.")
    return "".join(f"{line.rstrip()}\n" for line in page.get().splitlines())


def option_box(title: str, options: Iterable[Option]) -> Panel:
    """A box of options, each with its meaning below."""
    lines: list[Text | Padding] = []
    for option in options:
        kind = option.name.upper() if not option.flags else "" if option.hint is bool else kind_of(option.hint)
        lines.append(Text.assemble((", ".join(option.flags), "bold"), " " * bool(option.flags), (kind, "cyan")))
        about, default = Text(option.about), default_text(option.default)
        if option.required:
            about.append(" (required)", "red")
        elif default:
            about.append(f" (default: {default})", "dim")
        lines.append(Padding(about, (0, 0, 0, 6)))
    return Panel(Group(*lines), title=title, title_align="left", box=ROUNDED, border_style="dim")
