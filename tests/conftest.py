"""Fixtures for all tests."""

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent))

import pytest
import short_timings  # noqa: F401
import torch
from order import place_of
from plain_adam import adam_as_in_engines
from pool import Pool, free_port
from selection import listed, selected

torch.set_num_threads(1)
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # hundreds of processes would compile the package anew,
sys.dont_write_bytecode = False  # and this one its tests
adam_as_in_engines()
_POOL = Pool()
_WIDE = Pool(8, (6, 8), apart=0)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--whole`."""
    parser.addoption(
        "--whole", action="store_true", help="run all tests and cases, not a selection (tests/selection.py)"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Name the markers of the selection."""
    config.addinivalue_line("markers", "whole: shows once more, or at a larger size, what other tests show")
    config.addinivalue_line("markers", "thinned: of the product of parameters each value of each is enough")


def tests_are_named(config: pytest.Config) -> bool:
    """Whether files, folders or words of tests are given; xdist gives its workers the folder of all tests."""
    given = config.args_source is pytest.Config.ArgsSource.ARGS or bool(config.option.keyword)
    return bool(getattr(config, "workerinput", {}).get("named", given))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker of xdist whether tests are named."""
    node.workerinput["named"] = tests_are_named(node.config)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave tests out by the selection; where several processes share the tests, the longest files come first."""
    if not config.option.whole and not any("::" in word for word in config.args):
        kept = selected(items, left_out=() if tests_are_named(config) else listed())
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]
    if hasattr(config, "workerinput"):
        items.sort(key=place_of(Path(__file__).parent))


def pytest_collection_finish() -> None:
    """Leave torch and the tests themselves out of garbage collections."""
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def settled() -> None:
    """Leave what the tests of earlier files imported and made out of garbage collections, in which it takes most time.

    A `gc.collect()` inside of a test takes half a second where torch, transformers and rich are looked through.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """The one pool of worker processes."""
    yield _POOL
    _POOL.stop()


@pytest.fixture(scope="module")
def wide_pool() -> Iterator[Pool]:
    """Eight workers, for the few tests that need more than four ranks."""
    yield _WIDE
    _WIDE.stop()


@pytest.fixture(scope="session")
def whole(pytestconfig: pytest.Config) -> bool:
    """Whether all cases are asked for."""
    return bool(pytestconfig.option.whole)


@pytest.fixture
def port() -> Iterator[int]:
    """A port of 127.0.0.1 for the store of a job."""
    with free_port() as found:
        yield found


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test starts from the same random numbers."""
    torch.manual_seed(0)
