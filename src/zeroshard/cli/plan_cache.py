"""Answers of `zeroshard plan` on the disk: the same question about the same model and machines needs no search again.

Read without torch. An answer is the text that the command printed, with the files that it wrote.
"""

import dataclasses
import io
import os
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, TextIO

from zeroshard.cli.plan_options import PlanOptions
from zeroshard.doctor.hardware import Machines
from zeroshard.planner.search.answers import key_of, read_answer, write_answer
from zeroshard.train.model_shape import configuration

Answer = Callable[[PlanOptions, Machines | None], None]


def answered(options: PlanOptions, machines: Machines | None, folder: Path, answer: Answer) -> None:
    """Print the answer on the disk, or the one of `answer`, and keep it.

    Args:
        folder: of the answers.
        answer: prints the answer, and raises `SystemExit` where no plan fits.
    """
    if machines is None or not _keeps(options, machines):
        answer(options, machines)
        return
    path = folder / f"{_key(options, machines)}.json"
    kept = None if options.fresh else read_answer(path)
    if kept is None:
        kept = _ask(options, machines, answer)
        write_answer(path, kept)
    else:
        sys.stdout.write(kept["printed"])
        print("This answer is from an earlier search; --fresh searches again.", file=sys.stderr)
        for name, text in kept["files"].items():
            Path(name).write_text(text, encoding="utf-8")
    if kept["code"]:
        sys.exit(kept["code"])


def _keeps(options: PlanOptions, machines: Machines) -> bool:
    """Whether an answer depends on nothing but its key: no code of the user, no measurement, no pictures."""
    return not (options.own or machines.local or options.explain)


def _key(options: PlanOptions, machines: Machines) -> str:
    terminal = sys.stdout.isatty()
    width = os.get_terminal_size(sys.stdout.fileno()).columns if terminal else 0
    asked = {**dataclasses.asdict(options), "fresh": False}
    model = None if options.largest else configuration(options.model)
    return key_of((asked, model, machines, width))


def _ask(options: PlanOptions, machines: Machines, answer: Answer) -> dict[str, Any]:
    code: Any = 0
    printed = _Copied(sys.stdout)
    with redirect_stdout(printed):
        try:
            answer(options, machines)
        except SystemExit as ended:
            code = ended.code
    files = {str(path): path.read_text(encoding="utf-8") for path in options.files if path.exists()}
    return {"printed": printed.text.getvalue(), "files": files, "code": code}


class _Copied(io.TextIOBase):
    """A stream that keeps a copy of the text."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self.text = stream, io.StringIO()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Of the stream."""
        return str(self._stream.encoding)

    def write(self, text: str) -> int:
        """Write and keep a text."""
        self.text.write(text)
        return self._stream.write(text)

    def flush(self) -> None:
        """Flush the stream."""
        self._stream.flush()

    def isatty(self) -> bool:
        """Whether the stream is a terminal."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """Of the stream."""
        return self._stream.fileno()
