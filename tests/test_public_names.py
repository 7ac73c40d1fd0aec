"""The public face: which names there are, that the reference lists what pages use, and that all of it is explained."""

import ast
import importlib.util
import inspect
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from test_docs import PAGES, ROOT, blocks, lookup, zeroshard_names
from torch import nn

import zeroshard as zs
from zeroshard import errors

API = (ROOT / "docs" / "api.md").read_text()
LISTED = re.findall(r"^\.\. auto(?:class|function):: ([\w.]+)", API, re.MULTILINE)
EXTRAS = {"zeroshard.interop.lightning": "lightning"}  # modules that need an extra
ERRORS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]


def found(dotted: str) -> Any:
    """The object of a dotted name; skips the test if its module needs an extra that is not installed."""
    for module, needed in EXTRAS.items():
        if dotted.startswith(module) and importlib.util.find_spec(needed) is None:
            pytest.skip(f"{module} needs {needed}")
    return lookup(dotted)


def members(kind: type) -> Iterator[tuple[str, object]]:
    """The public methods and properties that a class of the package has, inherited ones of the package included."""
    for name in dir(kind):
        home = next((base for base in kind.__mro__ if name in vars(base)), kind)
        value = vars(home).get(name)
        ours = home.__module__.startswith("zeroshard")
        if ours and not name.startswith("_") and isinstance(value, (property, classmethod, staticmethod)):
            yield name, getattr(value, "__func__", value)
        elif ours and not name.startswith("_") and inspect.isfunction(value):
            yield name, value


def used() -> list[str]:
    """The classes and functions of the package that code on the pages and in the examples imports or calls."""
    trees = [ast.parse(code) for page in PAGES for code in blocks(page, "python")]
    trees += [ast.parse(path.read_text()) for path in sorted((ROOT / "examples").rglob("*.py"))]
    return sorted({name for tree in trees for name in zeroshard_names(tree)} - {"zeroshard"})


def test_dir_shows_public_names_only() -> None:
    values = {name: getattr(zs, name) for name in dir(zs)}
    modules = {name for name, value in values.items() if isinstance(value, ModuleType)}
    assert set(values) == {*zs.__all__, *modules}
    assert all(f"`zs.{module}`" in API and any(f"zeroshard.{module}." in name for name in LISTED) for module in modules)
    assert {f"zeroshard.optim.{name}" for name in dir(zs.optim)} <= {*LISTED}
    assert [name for name in values if name.startswith("_")] == ["__version__"]


def test_dir_of_an_engine_shows_the_names_of_the_reference() -> None:
    engine = zs.Engine(nn.Linear(2, 2), lambda ps: torch.optim.SGD(ps, lr=0.1), zs.Plan(), mesh=zs.Mesh())
    attributes = re.findall(r"^ +(\w+): ", (zs.Engine.__doc__ or "").partition("Attributes:\n")[2], re.MULTILINE)
    (excluded,) = re.findall(r"zeroshard\.Engine\n(?:   :.*\n)*?   :exclude-members: (.*)\n", API)
    described = {name for name, _ in members(zs.Engine)} - set(excluded.split(", "))
    assert {name for name in dir(engine) if not name.startswith("_")} == {*attributes, *described}
    assert "__call__" in dir(engine)


def test_every_exception_is_a_public_name() -> None:
    assert len(ERRORS) > 10
    for kind in ERRORS:
        assert kind.__name__ in zs.__all__ and getattr(zs, kind.__name__) is kind


def test_every_public_name_is_in_the_reference() -> None:
    assert ".. automodule:: zeroshard.errors\n   :members:" in API
    rest = set(zs.__all__) - {kind.__name__ for kind in ERRORS} - {"__version__"}
    assert rest <= {name.removeprefix("zeroshard.") for name in LISTED}


@pytest.mark.parametrize("name", LISTED)
def test_the_reference_lists_what_exists_and_is_explained(name: str) -> None:
    value = found(name)
    assert inspect.isclass(value) or inspect.isfunction(value)
    assert inspect.getdoc(value)
    for member, method in members(value) if inspect.isclass(value) else ():
        assert inspect.getdoc(method), f"{name}.{member} has no docstring"


@pytest.mark.parametrize("name", used())
def test_names_that_pages_use_are_in_the_reference(name: str) -> None:
    value = found(name)
    if isinstance(value, ModuleType):
        return
    owner = found(name.rpartition(".")[0])
    listed = [lookup(other) for other in LISTED if not any(other.startswith(module) for module in EXTRAS)]
    listed += ERRORS
    listed += [found(other) for other in LISTED if name == other]
    assert value in listed or owner in listed, f"{name} is used and not listed in docs/api.md"
