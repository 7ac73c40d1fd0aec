"""The suite's own selection."""

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from choose import Run, slow_without_lines
from selection import covering, listed, selected

PRODUCT = [{"a": a, "b": b} for a, b in itertools.product("pqr", range(5))]


def test_each_value_is_covered_by_as_many_cases_as_the_longest_parameter_has() -> None:
    places = covering(PRODUCT)
    assert len(places) == 5 and places == sorted(places)
    for name in ("a", "b"):
        assert {PRODUCT[place][name] for place in places} == {case[name] for case in PRODUCT}
    assert covering([]) == []


class Item(SimpleNamespace):
    """A test of a set, as pytest's are."""

    __hash__ = object.__hash__


def item(name: str, case: dict[str, Any], *fixtures: str, whole: bool = False) -> Item:
    markers = [SimpleNamespace(args=(key, ()), kwargs={}) for key in case]
    return Item(
        nodeid=f"{name}[{case}]",
        fixturenames=fixtures,
        callspec=SimpleNamespace(params=case),
        iter_markers=lambda kind: markers,
        get_closest_marker=lambda kind: whole or None,
    )


def test_values_inside_of_a_tuple_a_mapping_or_a_record_are_values_too() -> None:
    pairs = [item("pairs", {"case": (a, {"b": b, "same": 0})}, "pool") for a, b in itertools.product("pqr", range(5))]
    assert len(selected(pairs)) == 5
    unlike = [item("unlike", {"case": (a, object())}, "pool") for a in "pppp"]
    assert selected(unlike) == set(unlike)


def test_only_products_on_several_ranks_are_thinned_out() -> None:
    several = [item("several", case, "pool") for case in PRODUCT]
    alone = [item("alone", case) for case in PRODUCT]
    single = [item("single", {"b": b}, "pool") for b in range(5)]
    larger = item("larger", {}, whole=True)
    found = selected([*several, *alone, *single, larger])
    assert len(found.intersection(several)) == 5
    assert found.issuperset([*alone, *single]) and larger not in found


def test_slow_tests_are_left_out_where_nothing_is_named() -> None:
    tests = [item(name, {}) for name in "ab"]
    assert selected(tests) == set(tests)
    assert selected(tests, left_out={"a[{}]"}) == {tests[1]}


def test_slow_tests_stay_that_run_lines_of_their_own() -> None:
    runs = {"a::quick": Run(0.5, 0b11), "a::one": Run(2, 0b101), "a::each[a]": Run(3, 0b100)}
    runs |= {
        "a::each[b]": Run(5, 0b1100),
        "a::each[c]": Run(6, 0b1000),
        "b::fastest": Run(2, 0b1),
        "b::slow": Run(3, 0b1),
        "tests/promises/test_wire.py::fastest": Run(2, 0b1),
        "tests/promises/test_wire.py::slow": Run(3, 0b1),
    }
    assert slow_without_lines(runs) == {"a::each[a]", "a::each[c]", "b::slow"}


def test_those_that_are_left_out_exist() -> None:
    tests = [name.partition("[")[0].split("::") for name in listed()]
    sources = {file: (Path(__file__).parents[1] / file).read_text() for file, *_ in tests}
    assert tests and all(f"def {function}(" in sources[file] for file, *_, function in tests)
