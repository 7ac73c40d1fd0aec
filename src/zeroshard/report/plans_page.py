"""All plans of a search on one page: a chart of memory against time, a table to sort, and each plan by itself."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zeroshard.errors import ReportError
from zeroshard.planner.predict.result import Found, Prediction, Refusal
from zeroshard.planner.search.text import alike, changes, looked_at, named, seconds, short, why_first
from zeroshard.report.page import compose
from zeroshard.report.plan_page import plan_memory, plan_tables, plan_timeline, remarks
from zeroshard.report.plans_chart import PlanPoint, plans_chart
from zeroshard.report.tables import Cell
from zeroshard.text import DASH, format_bytes, format_exact

MOST_ACTIONS = 4000  # of a timeline that is drawn
SAME = "unchanged"
COLUMNS = ("fits", "peak", "host", "step", "tokens/s", "MFU", "h per 10⁹ tokens", "results")


@dataclass(frozen=True, slots=True)
class ListedPlan:
    """A plan of the page.

    Attributes:
        options: the command that trains under it; empty where there is none.
        python: the plan as an expression.
        flops_share: model FLOPs utilization; None if it is not known.
        why: the reason and the way out, if it does not fit.
    """

    prediction: Prediction
    options: str
    python: str
    flops_share: float | None = None
    why: str = ""

    @property
    def name(self) -> str:
        """The plan in a few words."""
        p = self.prediction
        return f"{named(p)}, {p.batch} row{'s' * (p.batch > 1)}"

    @property
    def hours(self) -> float | None:
        """Hours per billion tokens."""
        rate = self.prediction.tokens_per_second
        return 1e9 / rate / 3600 if rate else None

    @property
    def results(self) -> str:
        """Whether training gets the numbers of an unlimited device."""
        return ", ".join(changes(self.prediction)) or SAME

    @property
    def style(self) -> str:
        """The kind of its point in the chart."""
        return "unfit" if not self.prediction.fits else "fits" if self.results == SAME else "changed"


def write_plans(path: Path, plans: Sequence[ListedPlan], found: Found, title: str, notes: Sequence[str] = ()) -> None:
    """Write the page.

    Raises:
        ReportError: a file that cannot be written.
    """
    try:
        path.write_bytes(plans_page(plans, found, title, notes).encode(errors="replace"))
    except OSError as error:
        raise ReportError(f"{path} cannot be written ({error.strerror}); name a file that can be written.") from error


def plans_page(plans: Sequence[ListedPlan], found: Found, title: str, notes: Sequence[str] = ()) -> str:
    """The page as text.

    Args:
        plans: those of the search that were rehearsed, the recommended one first; the numbers on the page follow them.
        notes: further remarks for the reader, a sentence each.
    """
    fitting = [plan for plan in plans if plan.prediction.fits]
    first = "plan-1" if fitting else None
    looked = f"{looked_at(found)}."
    points = [
        PlanPoint(f"plan-{n}", f"Plan {n}, {one.name}", one.style, one.prediction.seconds, one.prediction.peak_bytes)
        for n, one in enumerate(plans, 1)
    ]
    room = (1 - plans[0].prediction.margin) * plans[0].prediction.capacity_bytes if plans else 0.0
    return compose(
        "plans.html.j2",
        ("charts.js", "tables.js", "plans.js"),
        title=title,
        versions="",
        facts=_facts(fitting[0]) if fitting else (),
        notes=(*_answer(found), *notes, looked),
        chart_of=plans_chart(points, room, first) if plans else None,
        columns=COLUMNS,
        rows=[(f"plan-{n}", n, one, _cells(one)) for n, one in enumerate(plans, 1)],
        sections=[_section(n, one) for n, one in enumerate(plans, 1)],
        refused=[_refused(group) for group in alike([one for one in found.refused if one.prediction is None])],
    )


def _answer(found: Found) -> tuple[str, ...]:
    if found.best:
        return (why_first(found.best),)
    return ("No plan fits.", *(f"A way: {way}" for way in found.ways))


def _facts(plan: ListedPlan) -> tuple[tuple[str, str], ...]:
    p = plan.prediction
    facts = (
        (f"Peak, on rank {p.rank}", format_bytes(p.peak_bytes)),
        ("Device, for tensors", format_bytes(p.capacity_bytes)),
        ("Step", seconds(p.seconds)),
        ("Tokens per second", format_exact(round(p.tokens_per_second))),
        ("MFU", _share(plan.flops_share)),
        ("Hours per 10⁹ tokens", _hours(plan.hours)),
        ("Host memory of a node", _size(p.host_needed_bytes)),
        ("Disk of a rank", _size(p.disk_bytes)),
        ("Results", plan.results),
    )
    return tuple((name, text) for name, text in facts if text != DASH)


def _cells(plan: ListedPlan) -> tuple[Cell, ...]:
    p = plan.prediction
    return (
        Cell("yes" if p.fits else "no", value=0 if p.fits else 1),
        Cell(format_bytes(p.peak_bytes), value=p.peak_bytes),
        Cell(_size(p.host_needed_bytes), value=p.host_needed_bytes),
        Cell(seconds(p.seconds), value=p.seconds),
        Cell(format_exact(round(p.tokens_per_second)), value=p.tokens_per_second),
        Cell(_share(plan.flops_share), value=plan.flops_share),
        Cell(_hours(plan.hours), value=plan.hours),
        Cell(plan.results),
    )


def _section(number: int, plan: ListedPlan) -> dict[str, object]:
    p = plan.prediction
    actions = sum(map(len, p.spans))
    drawn = actions <= MOST_ACTIONS
    cut = () if drawn else (f"The timeline has {format_exact(actions)} actions, too many to be drawn on this page.",)
    few = () if p.events or not p.phases else (f"`--explain {number}` rehearses every block, for the curve in a step.",)
    return {
        "id": f"plan-{number}",
        "title": f"Plan {number}: {plan.name}",
        "why": plan.why,
        "facts": _facts(plan),
        "lines": [(name, text) for name, text in (("Command", plan.options), ("Python", plan.python)) if text],
        "memory": plan_memory(p),
        "over": "Memory over one step" if p.events else "Memory by phase of the step",
        "timeline": plan_timeline(p, "") if drawn else None,
        "tables": plan_tables(p),
        "remarks": (*remarks(p), *cut, *(few if number <= 5 else ())),
    }


def _refused(group: Sequence[Refusal]) -> tuple[str, int, str, str]:
    """The first plan of some that are refused alike, their number, the reason and the way out."""
    first = group[0]
    return short(first.plan), len(group), first.why, first.way_out


def _size(nbytes: int) -> str:
    return format_bytes(nbytes) if nbytes else DASH


def _share(share: float | None) -> str:
    return DASH if share is None else f"{share:.0%}" if share >= 0.1 else f"{share:.1%}"


def _hours(hours: float | None) -> str:
    if hours is None:
        return DASH
    return f"{hours:,.0f}" if hours >= 100 else f"{hours:.1f}" if hours >= 1 else f"{hours:.2g}"
