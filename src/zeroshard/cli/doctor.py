"""`zeroshard doctor`: problems of this machine's set-up, and its measured rates."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from zeroshard.cli.early_options import DoctorOptions
from zeroshard.doctor.checkup import Finding, Level, findings_of
from zeroshard.doctor.facts import Facts, gather_facts
from zeroshard.doctor.measure import Effort, measure
from zeroshard.doctor.profile import PAIR, MachineProfile, Timing, default_path
from zeroshard.report.plain_table import plain_table
from zeroshard.text import format_bytes

COLOURS = {"ok": "green", "warning": "yellow", "error": "bold red"}
WIDTHS = (len("warning"), len("measuring network"))  # equal in both tables of findings
PROBLEMS = {
    "network": "See the findings on network and hostname; on a busy machine, try again later.",
    "shared": "Ranks of this machine send instead; see the finding on shared memory.",
    "disk": "Name a folder that can be written to: --disk PATH.",
}


def run_doctor(argv: Sequence[str], environment: Mapping[str, str], effort: Effort = Effort()) -> None:
    """Print the findings, measure, and write the profile; exits with 1 if a finding is an error.

    Args:
        environment: the process's variables.
        effort: extent of the measurements.

    Raises:
        ConfigError: options that do not combine, or a path that is no folder.
        DataError: the profile cannot be written.
    """
    from zeroshard.train.options import parse

    options = parse(DoctorOptions, argv, "zeroshard doctor")
    facts = gather_facts(environment, options.disk)
    findings = findings_of(facts)
    console = Console(highlight=False)
    if not options.json:
        _print_findings(console, findings)
    profile, out = None, options.out or default_path(environment)
    if not options.quick:
        with Console(stderr=True).status("Measuring") as status:
            threads = _threads(facts)
            profile = measure(effort, facts, threads, lambda name: status.update(f"Measuring {name}"))
        measured = list(_unmeasured(profile))
        findings += measured
        profile.save(out)
        if not options.json:
            _print_findings(console, measured)
            _print_profile(console, profile)
            console.print(f"\nWrote {out}", markup=False, soft_wrap=True)
    if options.json:
        content = {"findings": [asdict(finding) for finding in findings], "profile": profile and profile.as_dict()}
        print(json.dumps(content | {"written": profile and str(out)}, indent=1, allow_nan=False))
    if any(finding.level == "error" for finding in findings):
        sys.exit(1)


def _threads(facts: Facts) -> int:
    """Threads of each process: OMP_NUM_THREADS, or each rank's part of the cores."""
    given = facts.variables.get("OMP_NUM_THREADS", "")
    return int(given) if given.isdecimal() and int(given) else max(1, facts.usable_cores // PAIR)


def _unmeasured(profile: MachineProfile) -> Iterator[Finding]:
    for name, found in profile.problems.items():
        level: Level = "error" if name == "network" else "warning"
        yield Finding(f"measuring {name}", level, found, way_out=PROBLEMS[name])


def _print_findings(console: Console, findings: Sequence[Finding]) -> None:
    """Print the findings; warnings and errors with the need and the way out."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for width in WIDTHS:
        table.add_column(no_wrap=True, min_width=width)
    table.add_column(overflow="fold")
    for finding in findings:
        lines = [escape(finding.found)]
        if finding.level != "ok":
            advice = {"needed": finding.needed, "way out": finding.way_out}
            lines += [f"[dim]{name}:[/dim] {escape(text)}" for name, text in advice.items() if text]
        level = f"[{COLOURS[finding.level]}]{finding.level}[/]"
        table.add_row(level, escape(finding.subject), "\n".join(lines))
    console.print(table)


def _print_profile(console: Console, profile: MachineProfile) -> None:
    console.print(_rates(profile))
    sizes = next((rows for operations in profile.collectives.values() for rows in operations.values()), ())
    if sizes:
        console.print(_collectives(profile, [row.nbytes for row in sizes]))


def _rates(profile: MachineProfile) -> Table:
    threads = f"{profile.threads} thread{'s' * (profile.threads > 1)}"
    title = f"{profile.machine}, {threads} per process, torch {profile.torch}"
    table = plain_table(title, [""], ["one process", f"each of {PAIR}"])
    beside = profile.beside
    for dtype, rate in profile.matrix_flops.items():
        other = _flops(beside.matrix) if beside and dtype == "fp32" else ""
        table.add_row(f"matrix products, {dtype}", _flops(rate), other)
    table.add_row("memory, copied", _rate(profile.memory_bandwidth), _rate(beside.memory if beside else None))
    table.add_row("one small operation", f"{1e6 * profile.op_seconds:,.1f} µs")
    if profile.kind != "cpu":
        table.add_row("host to GPU", _rate(profile.host_up))
        table.add_row("GPU to host", _rate(profile.host_down))
    table.add_row("disk, written and synced", _rate(profile.disk_write))
    table.add_row("disk, read", _rate(profile.disk_read))
    table.add_row("host memory, available", format_bytes(profile.host_memory))
    return table


def _collectives(profile: MachineProfile, sizes: Sequence[int]) -> Table:
    signal = ""
    if profile.signal is not None:
        signal = f" A signal through shared memory takes {_milliseconds(profile.signal)} ms."
    table = plain_table(
        f"Collectives between {PAIR} processes: ms, and in brackets ms of CPU time, by the bytes that each sends",
        right=["sent"],
        caption=f"An exchange includes the sum of the copies.{signal}",
    )
    columns: list[tuple[Timing, ...]] = []
    for transport, operations in profile.collectives.items():
        for operation, rows in operations.items():
            table.add_column(f"{transport}\n{operation}", justify="right", no_wrap=True)
            columns.append(rows)
    for number, nbytes in enumerate(sizes):
        table.add_row(format_bytes(nbytes).replace(".00", ""), *(_milliseconds(rows[number]) for rows in columns))
    return table


def _flops(rate: float) -> str:
    return f"{rate / 1e12:,.1f} TFLOP/s" if rate >= 1e13 else f"{rate / 1e9:,.1f} GFLOP/s"


def _rate(rate: float | None) -> str:
    return "" if rate is None else f"{rate / 1e9:,.2f} GB/s"


def _milliseconds(timing: Timing) -> str:
    """Wall time, and CPU time in brackets."""
    wall, cpu = (
        f"{ms:.{2 if ms < 9.995 else 1 if ms < 99.95 else 0}f}" for ms in (1e3 * timing.wall, 1e3 * timing.cpu)
    )
    return f"{wall} ({cpu})"
