"""The suite's own selection."""

import itertools
from types import SimpleNamespace
from typing import Any

from selection import covering, selected

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
