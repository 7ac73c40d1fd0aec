"""Imports and other makers of many lasting objects, without garbage collections, which find nothing among these.

They take a fifth of the time in which torch is imported.
"""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Inside, no garbage is collected; all objects at the end count as old, as if they had survived some."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled and gc.get_freeze_count() == 0:
            gc.freeze()
            gc.unfreeze()  # into the oldest generation, where only a full collection looks through it
        if enabled:
            gc.enable()


@contextlib.contextmanager
def kept_imports() -> Iterator[None]:
    """Import inside without collections, and exclude the objects that exist at the end from later ones (`gc.freeze`).

    For processes of our own: modules live as long as the process, and pages that no collection writes stay shared by
    the processes that are forked.
    """
    with uncollected():
        try:
            yield
        finally:
            gc.freeze()
