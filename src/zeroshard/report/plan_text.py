"""The planner's results on a terminal: tables of plans, of refusals and of one plan, and pictures in characters."""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Literal

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from zeroshard.memory.ledger import MODEL_STATES
from zeroshard.planner.predict.result import Prediction, Refusal, Span
from zeroshard.planner.search.largest import Largest
from zeroshard.planner.search.text import MODES, TIME_MODES, alike, categories, found_by, named, seconds, shares, short
from zeroshard.report.plain_table import plain_table
from zeroshard.report.timeline_figure import NAMES
from zeroshard.schedule.actions import Kind
from zeroshard.tensor.find.explain import ExplainedLayer
from zeroshard.text import format_bytes

HEADS = {
    "parameters": "params",
    "gradients": "grads",
    "master weights": "master\nweights",
    "optimizer states": "optim.\nstates",
    "activations": "activ.",
    "buffers": "buf-\nfers",
    "temporaries": "tempo-\nraries",
}
COLOURS = ("blue", "cyan", "magenta", "yellow", "green", "red", "white", "bright_black")
SHADES = "█▓▒░#=+-"  # without colours
PARTS = " ▁▂▃▄▅▆▇█"  # of one row, in eighths
KIND_COLOURS = {
    Kind.FORWARD: "white on blue",
    Kind.BACKWARD: "black on green",
    Kind.INPUT_GRADIENT: "black on green",
    Kind.WEIGHT_GRADIENT: "black on bright_green",
    Kind.UPDATE: "black on yellow",
    Kind.REDUCE: "black on magenta",
}
EDGE = "▔"
MEMORY_ROWS, TIMELINE_ROWS, PLANS_NAMED, BAR = 12, 16, 3, 30
WAITS = "* host memory has no room for whole copies of checkpoints: training waits while the rest is written"
NEAR = 1.5  # times the peak: limit of a drawn capacity
JOINED = "model states"
NARROW = 80  # columns of a terminal below which tables leave columns out


def plans_table(predictions: Sequence[Prediction], width: int, title: str = "Plans, best first") -> RenderableType:
    """The plans, best first: peak memory and time of each, then its bytes by category.

    Args:
        width: columns of the terminal; 80 are enough for all, and 60 for most.
    """
    return Group(_overview(predictions, title, width < NARROW), _memory(predictions, width < NARROW))


def _overview(predictions: Sequence[Prediction], title: str, narrow: bool) -> Table:
    unit, unit_name = _unit(predictions)
    capacities = {p.capacity_bytes for p in predictions}
    of = f"\nof {_amount(capacities.pop() / unit)}" if len(capacities) == 1 else ""
    caption = "rows: of one step, on one rank or one replica of all stages"
    if of:
        caption += f"\n{of.strip()}: {unit_name} of a device that tensors can use; context and libraries take the rest"
    if any(p.fits and p.waits_for_checkpoints for p in predictions):
        caption += f"\n{WAITS}"
    table = plain_table(title, caption=caption)
    table.add_column("", justify="right", style="bold")
    table.add_column("plan", ratio=1)
    table.add_column("fits")
    for head in (f"peak {unit_name}{of}", "step", "tokens/s"):
        table.add_column(head, justify="right", no_wrap=True)
    if not narrow:
        table.add_column("bound by", no_wrap=True)
        table.add_column("timed by")
    for number, p in enumerate(predictions, 1):
        table.add_row(
            str(number),
            f"{named(p)}, {p.batch} row{'s' * (p.batch > 1)}",
            ("yes*" if p.waits_for_checkpoints else "yes") if p.fits else Text("no", "red"),
            _amount(p.peak_bytes / unit),
            seconds(p.seconds),
            f"{p.tokens_per_second:,.0f}",
            *(() if narrow else (p.bound, found_by(p.time_mode))),
        )
    return table


def _memory(predictions: Sequence[Prediction], narrow: bool) -> Table:
    unit, unit_name = _unit(predictions)
    table = plain_table(f"{unit_name} at that peak, on the rank that needs most")
    table.add_column("", justify="right", style="bold")
    memories = [_joined(p.memory) if narrow else p.memory for p in predictions]
    known = dict.fromkeys((JOINED, *categories(predictions)))
    held = [c for c in known if any(memory.get(c) for memory in memories)]
    for head in (*(() if narrow else ("rank",)), *(HEADS.get(c, c) for c in held), "all"):
        table.add_column(head, justify="right", no_wrap=True)
    if not narrow:
        table.add_column("found by")
    for number, (p, memory) in enumerate(zip(predictions, memories, strict=True), 1):
        cells = (_amount(nbytes / unit) for nbytes in (*(memory.get(c, 0) for c in held), p.peak_bytes))
        table.add_row(str(number), *cells) if narrow else table.add_row(
            str(number), str(p.rank), *cells, found_by(p.mode)
        )
    return table


def _joined(memory: Mapping[str, int]) -> dict[str, int]:
    """Bytes by category, with those of all model states as one."""
    states = sum(nbytes for name, nbytes in memory.items() if name in MODEL_STATES)
    return {JOINED: states} | {name: nbytes for name, nbytes in memory.items() if name not in MODEL_STATES}


def _unit(predictions: Sequence[Prediction]) -> tuple[int, str]:
    """The unit for the bytes of these plans, and its name."""
    return (2**30, "GiB") if max(p.peak_bytes for p in predictions) >= 2**30 else (2**20, "MiB")


def _amount(number: float) -> str:
    return "\N{EN DASH}" if not number else f"{number:,.{0 if number >= 1000 else 1 if number >= 100 else 2}f}"


def refusals_table(refused: Sequence[Refusal], ranks: int, looked_at: int) -> RenderableType:
    """Refused plans, with the reason and the way out; similar ones in one row."""
    of_all = f" of {looked_at}" if looked_at > len(refused) else ""  # some are refused unseen
    table = plain_table(f"Refused: {len(refused)}{of_all} plans")
    table.leading = 1
    table.add_column("plans", ratio=2)
    table.add_column("why, and the way out", ratio=5)
    for group in alike(refused):
        names = list(dict.fromkeys(short(refusal.plan, ranks) for refusal in group))
        more = f"\nand {len(names) - PLANS_NAMED} more" if len(names) > PLANS_NAMED else ""
        first = group[0]
        about = "For the first: " if len(group) > 1 and len({r.why + r.way_out for r in group}) > 1 else ""
        table.add_row("\n".join(names[:PLANS_NAMED]) + more, f"{about}{first.why} {first.way_out}")
    return table


def sizes_table(found: Sequence[Largest], width: int) -> Table:
    """The largest member of a family under each plan, its memory, and the next member, which does not fit.

    Args:
        width: columns of the terminal; names of sizes are broken where they are few.
    """
    table = plain_table("Largest model under each plan")
    table.add_column("plan", ratio=1)
    table.add_column("what fits")
    table.add_column("largest", no_wrap=width >= NARROW)
    for head in ("needs GiB", "of"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("too large", no_wrap=width >= NARROW)
    for largest in found:
        member, room = largest.member, _amount(largest.room_bytes / 2**30)
        table.add_row(
            short(largest.plan, largest.ranks),
            largest.counts,
            member.name if member else "none",
            _amount(member.needed_bytes / 2**30) if member else "",
            room,
            largest.beyond.name if largest.beyond else "",
        )
    return table


def sizes_lines(found: Sequence[Largest]) -> list[str]:
    """Explanations of the columns of `sizes_table`, and the method of the numbers."""
    predictions = [f.member.prediction for f in found if f.member and f.member.prediction]
    return [
        "Names: parameters, then layers x width; the next size has a layer more, or is the smallest of the next width.",
        "states: model states alone must fit all of the memory, as ZeRO's table 2 counts.",
        "step: a whole step must fit the memory that tensors can use, with a margin left free.",
        *(f"Memory, {found_by(mode)}: {MODES[mode]}." for mode in dict.fromkeys(p.mode for p in predictions)),
    ]


def modes_lines(predictions: Sequence[Prediction], source: str) -> list[str]:
    """The methods of the numbers, a line each, and the source of the rates."""
    memory = dict.fromkeys(p.mode for p in predictions)
    time = dict.fromkeys(p.time_mode for p in predictions)
    return [
        *(f"Memory, {found_by(mode)}: {MODES[mode]}." for mode in memory),
        *(f"Time, {found_by(mode)}: {TIME_MODES[mode]}." for mode in time),
        *([f"Rates: {source.rstrip('.')}."] if source else []),
        *dict.fromkeys(note for p in predictions for note in p.notes),
    ]


def memory_picture(p: Prediction, width: int, colour: bool) -> Text:
    """Memory over one step as stacked columns of characters, with the capacity as a line where it is near.

    Args:
        p: a prediction with events.
        width: columns of characters for all.
        colour: distinguish categories by colours, and draw eighths of a row; else by shades.
    """
    held = categories([p])
    looks = {c: ("█" if colour else SHADES[i % 8], COLOURS[i % 8]) for i, c in enumerate(held)}
    highest = max(sum(event.nbytes.values()) for event in p.events)
    top = float(max(highest, p.capacity_bytes) if p.capacity_bytes < NEAR * highest else highest)
    each = top / MEMORY_ROWS
    limit = int((top - p.capacity_bytes) / each) if p.capacity_bytes <= top else None
    labels = [format_bytes(top - row * each) if row % 3 == 0 else "" for row in range(MEMORY_ROWS)]
    margin = max(map(len, labels))
    columns = _columns(p, width - margin - 2)
    out = Text(no_wrap=True)
    for row, label in enumerate(labels):
        out.append(f"{label:>{margin}} {EDGE if label else ' '}", "dim")
        for column in columns:
            cell = _cell(column, top - (row + 1) * each, each, looks, colour)
            out.append(*cell or (EDGE if row == limit else " ", "dim"))
        out.append("\n")
    out.append(f"{'0 B':>{margin}} {EDGE * (len(columns) + 1)}\n", "dim")
    took = seconds(p.events[-1].t - p.events[0].t)
    out.append(f"{'0':>{margin + 3}}{took:>{len(columns) - 1}}\n", "dim")
    indent = " " * (margin + 2)
    for category in reversed(held):
        most = max(event.nbytes.get(category, 0) for event in p.events)
        if most:
            out.append(indent).append(looks[category][0] * 2, looks[category][1])
            out.append(f" {category}, up to {format_bytes(most)}\n")
    if limit is not None:
        out.append(f"{indent}{EDGE * 2} capacity of the device for tensors, {format_bytes(p.capacity_bytes)}\n")
    return out


def _columns(p: Prediction, count: int) -> list[Mapping[str, int]]:
    """Bytes by category at the peak of each of `count` equal parts of the step."""
    start, end = p.events[0].t, p.events[-1].t
    times = [event.t for event in p.events]
    columns: list[Mapping[str, int]] = []
    for i in range(count):
        first, last = (start + (end - start) * j / count for j in (i, i + 1))
        held = p.events[max(bisect_right(times, first) - 1, 0) : max(bisect_right(times, last), 1)]
        columns.append(max((event.nbytes for event in held), key=lambda nbytes: sum(nbytes.values())))
    return columns


def _cell(
    column: Mapping[str, int], low: float, each: float, looks: Mapping[str, tuple[str, str]], colour: bool
) -> tuple[str, str] | None:
    """Character and style of the cell from `low` to `low + each` bytes, by the category in the middle of its fill."""
    share = min((sum(column.values()) - low) / each, 1.0)
    if share <= 0 or (not colour and share < 0.5):
        return None
    heights = accumulate(column.get(category, 0) for category in looks)
    glyph, style = next(
        look for height, look in zip(heights, looks.values(), strict=True) if height > low + share * each / 2
    )
    return (PARTS[max(1, round(share * 8))] if colour and share < 1 else glyph), style


def timeline_picture(spans: Sequence[Sequence[Span]], width: int) -> Text:
    """The actions of each rank over time, as characters: the kind's letter, and the microbatch if it fits."""
    drawn = [[s for s in row if s[0].kind in NAMES and s[2] > s[1]] for row in spans]
    start = min((row[0][1] for row in drawn if row), default=0.0)
    end = max((stop for row in drawn for _, _, stop in row), default=1.0)
    label = max(8, len(f"rank {len(drawn) - 1} "))
    scale = (width - label) / ((end - start) or 1.0)
    out = Text(no_wrap=True)
    for rank, row in enumerate(drawn[:TIMELINE_ROWS]):
        out.append(f"{f'rank {rank}':<{label}}", "dim")
        at = 0
        for action, begin, stop in row:
            first, last = (round((time - start) * scale) for time in (begin, stop))
            out.append("·" * max(0, first - at), "dim")
            first = max(first, at)
            number = "" if action.microbatch is None else str(action.microbatch)
            room = max(0, last - first)
            out.append(f"{action.kind[0]}{number}".ljust(room, "─")[:room], KIND_COLOURS[action.kind])
            at = max(at, last)
        out.append("·" * (width - label - at) + "\n", "dim")
    if len(drawn) > TIMELINE_ROWS:
        out.append(f"and {len(drawn) - TIMELINE_ROWS} more ranks; the picture in the file has all\n", "dim")
    kinds = dict.fromkeys(action.kind for row in drawn for action, _, _ in row)
    legend = [f"{kind[0]} {name}" for kind, name in NAMES.items() if kind in kinds]
    out.append(f"{' ' * label}0{seconds(end - start):>{width - label - 1}}\n", "dim")
    out.append(f"{' ' * label}{', '.join(legend)}; then the microbatch; · idle\n")
    return out


def causes_table(p: Prediction) -> Table:
    """The time of the step by cause."""
    return _bars("Time of one step by cause", {c: p.causes[c] for c in shares(p)}, seconds)


def wire_table(p: Prediction) -> Table:
    """Bytes that the rank sends and receives in one step, by purpose."""
    return _bars("On the wire in one step, on this rank", dict(p.wire_bytes), format_bytes)


def layers_table(rows: Sequence[ExplainedLayer], ranks: int) -> Table:
    """The split of each module with parameters over the tensor ranks, and why other modules are not split."""
    table = plain_table(f"Layers on {ranks} ranks of tensor parallelism")
    table.leading = 1
    table.add_column("module", ratio=3, overflow="fold")
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("class", ratio=1, overflow="fold")
    table.add_column("split by", no_wrap=True)
    table.add_column("each rank has", justify="right", no_wrap=True)
    table.add_column("why", ratio=4)
    for row in rows:
        split, count = Text(row.style, "" if row.part else "dim"), f"{row.count}x" if row.count > 1 else ""
        table.add_row(row.name, count, row.kind, split, row.part, row.reason)
    return table


def _bars(title: str, values: Mapping[str, float], format_value: Callable[[float], str]) -> Table:
    table = plain_table(title)
    table.show_header = False
    sides: tuple[Literal["left", "right"], ...] = ("left", "right", "right")
    for justify in sides:
        table.add_column(justify=justify, no_wrap=True)
    table.add_column(no_wrap=True, overflow="crop")
    whole = sum(values.values())
    for name, value in values.items():
        if value:
            table.add_row(
                name, format_value(value), f"{value / whole:.0%}", Text("█" * round(BAR * value / whole), "blue")
            )
    table.add_row("all", format_value(whole), style="bold")
    return table
