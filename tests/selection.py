"""Which tests run: a selection by default, all of them with `--whole`.

Left out by default are tests and cases marked `whole`, which show at a larger size or once more what others show; and
products: of a test on several ranks with more than one parameter, or marked `thinned`, each value of each parameter
stays, in as few cases as a greedy choice finds; the values in a tuple, a mapping or a record count as parameters. A
test that is named by its id runs as it is.

Where no file or folder is named, the slow tests of `left_out.txt` are left out too: those that run no line of the
package that the others do not run, as `choose.py` measured. They may show combinations of lines that no other shows.
"""

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

LEFT_OUT = Path(__file__).with_name("left_out.txt")  # written by choose.py
POOLS = {"pool", "wide_pool"}  # fixtures of tests on several ranks
PLAIN = (str, int, float, type(None))  # values that are compared; others are told apart by identity
Case = Mapping[str, Hashable]


def covering(cases: Sequence[Case]) -> list[int]:
    """The places of some cases that have each value of each parameter, in order."""
    left = {value for case in cases for value in case.items()}
    chosen: list[int] = []
    while left:
        best = max(range(len(cases)), key=lambda place: len(left & cases[place].items()))  # the first of equals
        chosen.append(best)
        left -= cases[best].items()
    return sorted(chosen)


def by_default(cases: Iterable[Any], *shown: Any) -> list[Any]:
    """Cases for `parametrize`, of which only those shown run by default.

    Raises:
        ValueError: one of those is no case.
    """
    each = list(cases)
    if unknown := [case for case in shown if case not in each]:
        raise ValueError(f"{unknown} are no cases; those are {each}.")
    marks = [() if case in shown else (pytest.mark.whole,) for case in each]
    return [pytest.param(case, marks=mark) for case, mark in zip(each, marks, strict=True)]


def listed() -> frozenset[str]:
    """The ids in `left_out.txt`."""
    return frozenset(LEFT_OUT.read_text().splitlines())


def selected(items: Iterable[pytest.Item], left_out: Collection[str] = ()) -> set[pytest.Item]:
    """The tests that run by default, without those of some ids."""
    kept: set[pytest.Item] = set()
    products: defaultdict[str, list[tuple[pytest.Item, Case]]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("whole"):
            continue
        several = POOLS.intersection(getattr(item, "fixturenames", ())) or item.get_closest_marker("thinned")
        if several and len(case := _case_of(item)) > 1:
            products[item.nodeid.partition("[")[0]].append((item, case))
        else:
            kept.add(item)
    for product in products.values():
        kept |= {product[place][0] for place in covering([case for _, case in product])}
    return {item for item in kept if item.nodeid not in left_out}


def _case_of(item: pytest.Item) -> Case:
    """The values of a test's parameters by name; of a tuple, a mapping or a record, the values in it."""
    parameters: dict[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
    return dict(pair for name, value in parameters.items() for pair in _values_in(name, value))


def _values_in(name: str, value: Any) -> Iterator[tuple[str, Hashable]]:
    parts: list[tuple[Any, Any]] = []
    if isinstance(value, tuple):
        parts = list(enumerate(value))
    elif isinstance(value, Mapping):
        parts = list(value.items())
    elif is_dataclass(value) and not isinstance(value, type):
        parts = [(field.name, getattr(value, field.name)) for field in fields(value)]
    for key, part in parts:
        yield from _values_in(f"{name}.{key}", part)
    if not parts:
        yield name, value if isinstance(value, PLAIN) else id(value)
