"""Fixtures for all tests."""

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent))

import pytest
import torch
from order import place_of
from plain_adam import adam_as_in_engines
from pool import Pool, free_port

torch.set_num_threads(1)
adam_as_in_engines()
_POOL = Pool()
_WIDE = Pool(8, (6, 8), apart=False)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where several processes share the tests, the longest files come first."""
    if hasattr(config, "workerinput"):
        items.sort(key=place_of(Path(__file__).parent))


def pytest_collection_finish() -> None:
    """Leave torch and the tests themselves out of garbage collections."""
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


@pytest.fixture
def port() -> Iterator[int]:
    """A port of 127.0.0.1 for the store of a job."""
    with free_port() as found:
        yield found


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test starts from the same random numbers."""
    torch.manual_seed(0)
