"""The command line: `zeroshard train | run | launch | checkpoint | export | plan | verify | simulate | ...`."""

import contextlib
import difflib
import importlib
import os
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from zeroshard.errors import ConfigError, NonFiniteError, ZeroshardError
from zeroshard.text import wrapped
from zeroshard.train.option_tree import Positional
from zeroshard.version import __version__

if TYPE_CHECKING:
    from zeroshard.cli.plan_options import PlanOptions
    from zeroshard.doctor.hardware import Machines
    from zeroshard.train.config import TrainConfig

USAGE = """zeroshard trains PyTorch models that do not fit: on many devices or on one.

  zeroshard train       train a language model (the main job); --ranks N starts N processes here
  zeroshard run         supervise a job on this machine: restart it after a failure, name the culprit, stop cleanly
  zeroshard launch      print the files that run a job on a SLURM or Kubernetes cluster
  zeroshard checkpoint  list (ls), verify, describe (info) or compare (diff) checkpoints
  zeroshard export      write a checkpoint's weights as safetensors under the model's own names
  zeroshard generate    print text that the model of a run folder generates
  zeroshard evaluate    measure loss, perplexity and bits per byte of the model of a run folder
  zeroshard plan        which plans fit and how long a step takes, before anything runs
  zeroshard verify      train a few steps under a plan and in one process, and name the module that differs
  zeroshard doctor      check this machine's set-up, and measure what it can do for the planner
  zeroshard reproduce   compute published numbers again: published, ours, how
  zeroshard simulate    time, bubble and memory of a pipeline schedule, with its timeline as a picture and a trace
  zeroshard report      draw the report of a run folder again
  zeroshard compare     lay several runs over one another, in a table and on one page
  zeroshard profile     measure the layers of a model on this machine: time, activations, parameters
  zeroshard partition   split a profiled model into stages and replicas for a cluster
  zeroshard completion  print the script with which bash, zsh or fish completes these commands and their options

zeroshard COMMAND --help lists the options of a command, those of a first run where there are many, and --help-all
lists all; zeroshard --version says the version."""

COMMANDS = {  # the function of each, which is imported when it runs
    "train": "zeroshard.cli.main:_train",
    "run": "zeroshard.cli.main:_run",
    "launch": "zeroshard.cli.launch:run_launch",
    "checkpoint": "zeroshard.cli.checkpoint:run_checkpoint",
    "export": "zeroshard.cli.export:run_export",
    "generate": "zeroshard.cli.generate:run_generate",
    "evaluate": "zeroshard.cli.evaluate:run_evaluate",
    "plan": "zeroshard.cli.main:_plan",
    "verify": "zeroshard.cli.verify:run_verify",
    "doctor": "zeroshard.cli.doctor:run_doctor",
    "reproduce": "zeroshard.cli.reproduce:run_reproduce",
    "simulate": "zeroshard.cli.simulate:run_simulate",
    "report": "zeroshard.cli.main:_report",
    "compare": "zeroshard.cli.compare:run_compare",
    "profile": "zeroshard.cli.profile:run_profile",
    "partition": "zeroshard.cli.partition:run_partition",
    "completion": "zeroshard.cli.main:_completion",
}
OPTIONS = {  # option classes whose names replace settings in error messages
    "train": "zeroshard.train.config:TrainConfig",
    "verify": "zeroshard.cli.early_options:VerificationOptions",
    "generate": "zeroshard.cli.generate:GenerateOptions",
    "evaluate": "zeroshard.cli.evaluate:EvaluateOptions",
    "simulate": "zeroshard.cli.simulate:SimulateOptions",
    "plan": "zeroshard.cli.plan_options:PlanOptions",
    "partition": "zeroshard.cli.partition:PartitionOptions",
    "profile": "zeroshard.cli.early_options:ProfileOptions",
    "doctor": "zeroshard.cli.early_options:DoctorOptions",
    "run": "zeroshard.cli.run:RunOptions",
    "export": "zeroshard.cli.early_options:ExportOptions",
    "reproduce": "zeroshard.cli.early_options:ReproduceOptions",
    "report": "zeroshard.cli.main:ReportOptions",
    "compare": "zeroshard.cli.compare:CompareOptions",
    "completion": "zeroshard.cli.completion:CompletionOptions",
}
COLUMNS = 120  # of the list of commands without a terminal
# commands whose modules load torch when they are imported
LOADS_TORCH = ("checkpoint", "export", "verify", "profile", "doctor", "reproduce")
WITH_MODEL = ("train", "plan", "verify", "profile")
AGAIN = "ZEROSHARD_AGAIN"  # variable with the command that resumes a run, for the started ranks


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Draw the report of a run folder again."""

    run: Positional[Path]
    """The run folder that `zeroshard train` named."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command.

    Exit codes: 0 done; 1 failed on the way; 2 wrong options or data; 75 stopped on request; 130 stopped by Ctrl-C; 141
    when the reader of the output has gone, as in `zeroshard train --help | head -1`.
    """
    try:
        try:
            _command(list(sys.argv[1:] if argv is None else argv))
        finally:
            sys.stdout.flush()  # while it can still be caught
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    except KeyboardInterrupt:
        print("zeroshard: interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


def _command(argv: list[str]) -> None:
    if not argv or argv[0] in ("-h", "--help", "--help-all"):
        print(wrapped(USAGE, shutil.get_terminal_size((COLUMNS, 0)).columns))
        sys.exit(0 if argv else 2)
    _refuse_bytes(argv)
    if argv[0] == "--version":
        print(__version__)
        return
    if argv[0] not in COMMANDS:
        near = difflib.get_close_matches(argv[0], COMMANDS, n=1)
        way_out = f"did you mean {near[0]}? The" if near else "the"
        _fail(ConfigError(f"There is no command {argv[0]!r}; {way_out} commands are {', '.join(COMMANDS)}."))
    try:
        _check_model(argv)
        _read_early(argv)
        _named(COMMANDS[argv[0]])(argv[1:], **_surroundings(argv[0]))
    except ZeroshardError as error:
        _fail(error, argv)


def _refuse_bytes(argv: Sequence[str]) -> None:
    """Refuse words that the encoding of file names does not have, so that no file with such a name can be written."""
    for word in argv:
        if any("\udc80" <= character <= "\udcff" for character in word):
            shown = os.fsencode(word).decode(errors="replace")
            _fail(
                ConfigError(
                    f"{shown!r} has bytes that are not {sys.getfilesystemencoding()}, the encoding of this locale; set "
                    f"PYTHONUTF8=1, or write the name in that encoding."
                )
            )


def _check_model(argv: Sequence[str]) -> None:
    """Refuse a `--model` that names nothing, before the command loads torch.

    Raises:
        ModelError: as `model_named`.
    """
    words: list[str | None] = list(argv[1 : argv.index("--")] if "--" in argv else argv[1:])
    if argv[0] not in WITH_MODEL or any(word in ("-h", "--help", "--help-all") for word in words):
        return
    for word, following in pairwise([*words, None]):
        option, equals, value = (word or "").partition("=")
        if option == "--model" and (equals or following is not None):
            from zeroshard.train.named_models import model_named

            model_named(value if equals else following or "")


def _read_early(argv: Sequence[str]) -> None:
    """Refuse wrong options of a command whose module loads torch, before it does."""
    if argv[0] in LOADS_TORCH:
        from zeroshard.cli.early_options import read_early

        read_early(argv)


def _surroundings(command: str) -> dict[str, Any]:
    """Further arguments of a command, from the environment."""
    if command == "doctor":
        return {"environment": dict(os.environ)}
    return {"threads": None if "OMP_NUM_THREADS" in os.environ else 1} if command == "profile" else {}


def _train(argv: list[str]) -> None:
    threads, launched = os.environ.get("OMP_NUM_THREADS"), os.environ.get("WORLD_SIZE")
    with _ended_by_interrupt():
        config = _train_options(argv)
        from zeroshard.train.early_checks import refuse_early

        refuse_early(config, int(launched or config.ranks or 1))
        from zeroshard.cli.run import program, resuming, run_ranks

    if config.ranks is not None and launched is None:
        os.environ[AGAIN] = resuming([*program(), "train"], argv, threads)
        run_ranks(config.ranks, argv)
        return
    if config.ranks is not None and str(config.ranks) != launched:
        raise ConfigError(
            f"ranks is {config.ranks} and torchrun started {launched} processes; leave out one of the two."
        )
    again = os.environ.get(AGAIN) if launched else resuming([*program(), "train"], argv, threads)
    if again is None and os.environ.get("LOCAL_WORLD_SIZE") == launched:  # torchrun's ranks, all on this machine
        ranks = [] if config.ranks else ["--ranks", str(launched)]
        again = resuming([*program(), "train"], [*argv, *ranks], threads)
    _train_rank(config, again or "the same command on every node and --resume auto")


@contextlib.contextmanager
def _ended_by_interrupt() -> Iterator[None]:
    """Let Ctrl-C end the process at once inside, where modules are loaded; torch swallows a KeyboardInterrupt there."""

    def end(number: int, frame: FrameType | None) -> None:
        os.write(2, b"zeroshard: interrupted before anything began\n")
        os._exit(128 + number)

    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # another handler is set, and stays
        return
    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _train_options(argv: list[str]) -> "TrainConfig":
    """The options, parsed without loading torch, which the process that starts the ranks does not use."""
    from zeroshard.train.config import TrainConfig
    from zeroshard.train.options import parse

    with open(os.devnull, "w") as null, contextlib.ExitStack() as stack:
        if os.environ.get("RANK", "0") != "0":  # all ranks parse the same options; only rank 0 prints
            stack.enter_context(contextlib.redirect_stdout(null))
            stack.enter_context(contextlib.redirect_stderr(null))
        return parse(TrainConfig, argv, "zeroshard train")


def _train_rank(config: "TrainConfig", again: str) -> None:
    """Train as one rank, and exit; this loads torch."""
    from zeroshard.platform.imports import kept_imports

    with _ended_by_interrupt(), kept_imports():
        from zeroshard.cli.rank import run_rank
    run_rank(config, again)


def _plan(argv: list[str]) -> None:
    from zeroshard.cli.plan_cache import answered
    from zeroshard.cli.plan_options import read_question
    from zeroshard.doctor.profile import default_path

    answered(*read_question(argv, os.environ), default_path(os.environ).parent / "plans", _search_plans)


def _search_plans(options: "PlanOptions", machines: "Machines | None") -> None:
    from zeroshard.cli.plan_first import print_first_table

    if machines is not None:
        print_first_table(options, machines)
    from zeroshard.cli.plan import run_plan  # which loads torch

    run_plan(options, machines)


def _report(argv: list[str]) -> None:
    from zeroshard.report import write_report
    from zeroshard.train.options import parse

    print(write_report(parse(ReportOptions, argv, "zeroshard report").run))


def _completion(argv: list[str]) -> None:
    from zeroshard.cli.completion import run_completion

    run_completion(
        argv, lambda: {command: _named(OPTIONS[command]) if command in OPTIONS else None for command in COMMANDS}
    )


def _run(argv: list[str]) -> None:
    from zeroshard.cli.run import program, resuming, run_supervised

    cut = argv.index("--") + 1 if "--" in argv else len(argv)
    if argv[cut : cut + 1] == ["train"]:
        from zeroshard.train.early_checks import refuse_early

        try:
            refuse_early(_train_options(argv[cut + 1 :]))
        except ZeroshardError as error:
            _fail(error, argv[cut:])
    os.environ[AGAIN] = resuming([*program(), "run", *argv[:cut]], argv[cut:], os.environ.get("OMP_NUM_THREADS"))
    run_supervised(argv)


def _named(path: str) -> Any:
    """The object that "module:name" names."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def _fail(error: ZeroshardError, argv: Sequence[str] = ("",)) -> NoReturn:
    """Print the error, on rank 0 alone since all ranks meet the same, and exit with a non-zero code."""
    if os.environ.get("RANK", "0") == "0":
        said = str(error)
        if argv[0] in OPTIONS:
            from zeroshard.train.option_names import in_options

            said = in_options(said, _named(OPTIONS[argv[0]]), argv)
        print(f"zeroshard: {type(error).__name__}: {said}", file=sys.stderr)
    sys.exit(1 if isinstance(error, NonFiniteError) else 2)
