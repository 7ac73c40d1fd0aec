"""One rank of the main job: from its environment to its exit code.

When a rank fails, it announces its error to the others before it exits. The first rank to fail prints its error; the
others, whose collectives break a moment later, print nothing, so that the cause is the last thing on the screen.
"""

import contextlib
import os
import shlex
import signal
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.table import Table
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from zeroshard.comm.collectives import Comm
from zeroshard.comm.heartbeat import write_failure
from zeroshard.comm.mesh import Mesh, announce_failure, init_mesh
from zeroshard.errors import (
    CommError,
    ConfigError,
    DataError,
    ModelError,
    OptimizerError,
    PlanError,
    Stopped,
    ZeroshardError,
)
from zeroshard.report import write_report
from zeroshard.supervisor.fork_server import die_with
from zeroshard.text import format_bytes
from zeroshard.train.config import TrainConfig
from zeroshard.train.option_names import in_options
from zeroshard.train.run import run

MOST_LAYERS = 8  # most layers of a rank whose names are all printed
WRONG_INPUT = (ConfigError, DataError, ModelError, OptimizerError, PlanError)
STOPPED = 75  # exit code, EX_TEMPFAIL of sysexits.h: restart to continue
INTERRUPTED = 128 + signal.SIGINT  # exit code after Ctrl-C, as in shells


def run_rank(config: TrainConfig, again: str) -> None:
    """Train on this rank, print the results, and exit.

    Exit codes: 0 done, 1 failed, 2 wrong input, 75 stopped on request after saving, 130 stopped by Ctrl-C.

    Args:
        again: the command that resumes a run after a stop.
    """
    mesh: Mesh | None = None
    if "TORCHELASTIC_RUN_ID" in os.environ and "ZEROSHARD_HEARTBEAT" not in os.environ:
        die_with(os.getppid(), signal.SIGTERM)  # save and exit when torchrun dies
    try:
        mesh = init_mesh(config.plan.timeout, None if config.device == "auto" else config.device)
        done = run(config, mesh, again=again)
        if done is not None:
            present(*done, config)
        Comm(mesh).agree(b"\0", "end of the run")
    except BaseException as error:
        leave(error, mesh)
    _flush()
    os._exit(0)  # all is written; a normal exit would wait for peers, see _leave in mesh.py


def present(summary: dict[str, Any], folder: Path, config: TrainConfig) -> None:
    """Draw the report of a finished run and print its summary, with its tables if they are asked for.

    The run is complete and saved, so failures here do not make it fail.
    """
    try:
        try:
            report = write_report(folder)
        finally:
            _print_summary(summary, Console(highlight=False), config.tables)
        print(f"report     {report}")
        if config.checkpoint:
            words = shlex.join(["zeroshard", "generate", str(folder), "--prompt", config.prompt])
            print(f"next       {words}")
        sys.stdout.flush()
    except BrokenPipeError:
        return
    except Exception as error:
        with contextlib.suppress(BrokenPipeError):
            print(
                f"run folder {folder}\n"
                f"zeroshard: warning: the run is complete, and its report failed ({type(error).__name__}: {error}); "
                f"try again with: zeroshard report {shlex.quote(str(folder))}",
                flush=True,
            )


def leave(error: BaseException, mesh: Mesh | None) -> None:
    """Print the error, once for all ranks, and end this process at once."""
    if isinstance(error, Stopped):
        _stop(error, mesh)
    if isinstance(error, KeyboardInterrupt | BrokenPipeError):
        _break_off(error, mesh)
    first, code = _is_first(error, mesh), 2 if isinstance(error, WRONG_INPUT) else 1
    if "ZEROSHARD_HEARTBEAT" in os.environ:
        write_failure(Path(os.environ["ZEROSHARD_HEARTBEAT"]), error, first, code, _in_options(error))
    if first:
        if isinstance(error, ZeroshardError):
            print(f"zeroshard: {type(error).__name__}: {_in_options(error)}", file=sys.stderr)
        else:
            traceback.print_exception(error)
        if "TORCHELASTIC_ERROR_FILE" in os.environ and not isinstance(error, ZeroshardError):
            handler = get_error_handler()
            handler.initialize()
            handler.record_exception(error)
    _flush()
    os._exit(code)  # a normal exit would wait for peers that are gone


def _in_options(error: BaseException) -> str:
    """The message, in options of the command that started this rank; a launcher has its own for the ranks."""
    launched = "WORLD_SIZE" in os.environ and not any(word.startswith("--ranks") for word in sys.argv)
    return in_options(str(error), TrainConfig, [*sys.argv, *(["--nproc-per-node"] if launched else [])])


def _stop(stopped: Stopped, mesh: Mesh | None) -> NoReturn:
    """Exit after a request to stop, once all ranks arrive: a running rank would see a broken connection."""
    if mesh is not None:
        with contextlib.suppress(CommError):
            Comm(mesh).agree(b"\0", "end of the run")
    if mesh is None or mesh.rank == 0:
        print(f"zeroshard: {stopped}", file=sys.stderr)
    _flush()
    supervised = mesh is not None and mesh.heartbeat is not None  # the supervisor has the signal
    os._exit(INTERRUPTED if stopped.signal == signal.SIGINT and not supervised else STOPPED)


def _break_off(error: BaseException, mesh: Mesh | None) -> NoReturn:
    """Exit at once without a traceback, after a second Ctrl-C or when the reader of the output has gone."""
    if _is_first(error, mesh) and isinstance(error, KeyboardInterrupt):
        print("zeroshard: interrupted; nothing was saved after the last checkpoint, if there is one", file=sys.stderr)
    _flush()
    os._exit(INTERRUPTED if isinstance(error, KeyboardInterrupt) else 128 + signal.SIGPIPE)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BrokenPipeError):
            stream.flush()


def _is_first(error: BaseException, mesh: Mesh | None) -> bool:
    """Whether this rank is the first to fail; without a mesh all ranks meet the same error, and rank 0 counts."""
    if mesh is None:
        return os.environ.get("RANK", "0") == "0"
    try:
        return announce_failure(mesh, error)
    except Exception:  # the store is gone with the launcher; print rather twice than never
        return True


def _print_summary(summary: dict[str, Any], console: Console, tables: bool) -> None:
    plan = summary["plan"]
    pipeline = plan["pipeline_parallel"]
    stages = f"{pipeline['stages']} stages ({pipeline['schedule']}), " if pipeline["stages"] > 1 else ""
    if summary["sample"]:
        console.rule("sample")
        console.print(summary["sample"], markup=False)
        console.rule()
    if tables:
        for rank, layers in enumerate(summary["layers"] if stages else ()):
            shown = layers if len(layers) <= MOST_LAYERS else [*layers[:3], "...", layers[-1]]
            console.print(f"rank {rank:<5} {', '.join(shown)}", soft_wrap=True, markup=False)
        if summary["shares_memory"] and plan["zero"]:
            console.print(
                "The ranks share memory: parameters are there once, each rank counts its part, none are sent."
            )
        console.print(_memory_table(summary["memory"], summary["rank"]))
        console.print(_traffic_table(summary["traffic"]))
    skipped = f", {summary['skipped']} skipped" if summary["skipped"] else ""
    lines = {
        "run": f"{summary['title']}: {summary['parameters']:,} parameters, zero {plan['zero']}, {stages}"
        f"{_count(summary['world_size'], 'rank')}, {_count(summary['steps'], 'step')} in {summary['seconds']:.0f} s"
        f"{skipped}",
        "train": f"{summary['train_bits_per_byte']:.3f} bits per byte (mean of the last 50 steps)",
        "validation": f"{summary['validation_bits_per_byte']:.3f} bits per byte on held-out text",
        "speed": _speed(summary["speed"]),
        "memory": _memory(summary),
    }
    for name, line in lines.items():
        if line:
            console.print(f"{name:<10} {line}", soft_wrap=True, markup=False)


def _memory(summary: dict[str, Any]) -> str:
    """The peak of the ledger in the recorded step with its largest category, and the process's resident memory."""
    resident = f"{format_bytes(summary['rss_bytes'])} resident in the process of rank {summary['rank']}"
    if summary["peak_bytes"] is None:
        return resident
    rows = [row for row in summary["memory"] if row["tier"] == "device"]
    largest = max(rows, key=lambda row: row["peak_bytes"])
    most = f"{largest['category']} up to {format_bytes(largest['peak_bytes'])}"
    return f"peak {format_bytes(summary['peak_bytes'])} by the ledger ({most}); {resident}"


def _speed(speed: dict[str, float | None]) -> str:
    """Median tokens per second, model FLOPs and their share of the peak rate, as far as they are known."""
    tokens, flops, mfu, causal = (speed[key] for key in ("tokens_per_s", "tflops_per_rank", "mfu", "mfu_causal"))
    if tokens is None or not tokens > 0:
        return ""
    parts = [f"{tokens:,.0f} tokens/s ({speed['tokens_per_s_per_rank']:,.0f} per rank)"]
    parts += [] if flops is None else [f"{flops:.3g} model TFLOP/s per rank"]
    parts += [] if mfu is None or causal is None else [f"MFU {mfu:.1%} ({causal:.1%} with causal attention)"]
    return ", ".join(parts)


def _memory_table(rows: list[dict[str, Any]], rank: int) -> Table:
    table = Table(title=f"bytes per rank (rank {rank})", title_justify="left")
    for column in ("category", "planned by the formula", "padding", "measured by the ledger", "peak"):
        table.add_column(column, justify="left" if column == "category" else "right")
    for row in rows:
        planned = [None if row[k] is None else f"{row[k]:,.0f}" for k in ("planned_bytes", "padding_bytes")]
        measured = (f"{row['measured_bytes']:,}", format_bytes(row["peak_bytes"]))
        name = row["category"] if row["tier"] == "device" else f"{row['category']}, {row['tier']}"
        table.add_row(name, *(text or "-" for text in planned), *measured)
    return table


def _traffic_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(
        title="on the wire per step (elements by the paper's count; bytes that this rank sent)", title_justify="left"
    )
    for column in ("purpose", "elements by the formula", "elements measured", "padding", "bytes sent", "calls"):
        table.add_column(column, justify="left" if column == "purpose" else "right")
    for row in rows:
        planned = "-" if row["planned_elements"] is None else f"{row['planned_elements']:,}"
        measured = (f"{row[k]:,}" for k in ("measured_elements", "padding_elements", "sent_bytes", "calls"))
        table.add_row(row["purpose"], planned, *measured)
    return table


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'s' * (number != 1)}"
