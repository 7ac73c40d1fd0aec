"""The plan's formulas beside the measurements of the ledger and comm: `engine.memory()` and `engine.traffic()`."""

import itertools
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from math import ceil

from zeroshard.comm.collectives import Count, Purpose
from zeroshard.memory.ledger import MODEL_STATES, Category, Ledger
from zeroshard.parts.part import Parts
from zeroshard.parts.planned import Planned, Work
from zeroshard.planning.tables import MemoryRow, MemoryTable, TrafficRow, TrafficTable

TIERS = ("device", "host", "disk")


def memory_table(parts: Parts, ledger: Ledger, more: Iterable[Planned], capacity: int | None) -> MemoryTable:
    """The formula and the ledger, tier by tier and category by category; memory that ranks share counts in equal parts.

    Args:
        more: planned bytes besides those of the parts.
        capacity: bytes of the device, where the ledger has no budget.
    """
    planned: dict[tuple[str, Category], tuple[Fraction, Fraction]] = {
        (tier, category): (Fraction(0), Fraction(0)) for tier in TIERS for category in MODEL_STATES
    }
    for each in (*(each for part in parts.all for each in part.planned()), *more):
        nbytes, padding = planned[each.tier, each.category]
        planned[each.tier, each.category] = (nbytes + each.nbytes, padding + each.padding)
    rows = []
    for tier, category in itertools.product(TIERS, Category):
        account = ledger.account(category, tier)
        formula, extra = planned.get((tier, category), (None, None))
        if tier == "device" or formula or account.peak:
            rows.append(MemoryRow(str(category), tier, formula, extra, account.current, account.peak))
    return MemoryTable(rows, ledger.budgets.get("device", capacity))


def planned_bytes(parts: Parts, more: Iterable[Planned]) -> dict[Category, int]:
    """Bytes of model states on the device by the formula, with padding, by category; `more` as for `memory_table`."""
    found: dict[Category, Fraction] = {}
    for each in (*(each for part in parts.all for each in part.planned()), *more):
        if each.tier == "device":
            found[each.category] = found.get(each.category, Fraction(0)) + each.nbytes + each.padding
    return {category: ceil(nbytes) for category, nbytes in found.items()}


def traffic_table(
    parts: Parts, work_on: Callable[[int], Work], counts: Mapping[Purpose, Count], messages: Mapping[Purpose, int]
) -> TrafficTable:
    """The formula and comm's counts of the last step, purpose by purpose.

    Args:
        work_on: a unit in the step.
        messages: planned elements between pipeline stages.
    """
    planned = dict.fromkeys((Purpose.GATHER_PARAMETERS, Purpose.REDUCE_GRADIENTS, Purpose.GATHER_GRADIENTS), 0)
    planned |= messages
    for purpose, elements in (each for part in parts.all for each in part.wire(work_on(part.flat.unit.number))):
        planned[purpose] = planned.get(purpose, 0) + elements
    rows = []
    for purpose in Purpose:
        count = counts.get(purpose, Count())
        formula = planned.get(purpose, count.planned)
        if formula is not None or count.calls:
            row = TrafficRow(
                str(purpose),
                formula,
                measured_elements=count.elements,
                padding_elements=count.padding,
                measured_bytes=count.nbytes,
                sent_bytes=count.sent_nbytes,
                calls=count.calls,
                seconds=count.seconds,
            )
            rows.append(row)
    return TrafficTable(rows)
