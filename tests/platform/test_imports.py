"""Imports run without collections; what was there before them is never looked through again, what comes later is."""

import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator

import pytest

from zeroshard.platform.imports import kept_imports, uncollected

PROGRAM = """
import gc
from zeroshard.platform.imports import kept_imports

begun = []
gc.callbacks.append(lambda phase, _: begun.append(phase))
with kept_imports():
    import decimal, email.message, http.client, xml.dom.minidom
    inside = len(begun)
    assert not gc.isenabled()
assert inside == 0 and gc.isenabled() and gc.get_freeze_count() > 1000
"""


LAZY = """
import gc, sys
import zeroshard as zs

class Observer:
    found = []

    def find_spec(self, name, path=None, target=None):
        self.found.append(gc.isenabled())

sys.meta_path.insert(0, Observer())
zs.Engine
assert "torch._dynamo" in sys.modules, "which the first optimizer would import"
assert len(Observer.found) > 1000 and not any(Observer.found)
assert gc.isenabled() and gc.get_freeze_count() == 0
assert len(gc.get_objects(generation=1)) < 10_000 < len(gc.get_objects(generation=2)), "no collection went through all"
"""


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    """Begin with nothing frozen, and end as the session is: with all frozen."""
    gc.unfreeze()
    yield
    gc.freeze()


class Ring:
    """An object that only a collection frees."""

    def __init__(self) -> None:
        self.itself = self


@pytest.mark.parametrize("program", [PROGRAM, LAZY], ids=["kept", "lazy"])
def test_imports_run_without_collections(program: str) -> None:
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.parametrize("enabled", [True, False])
def test_later_objects_are_collected_and_the_switch_is_as_before(enabled: bool) -> None:
    try:
        gc.enable() if enabled else gc.disable()
        with pytest.raises(ImportError), kept_imports():
            raise ImportError
        assert gc.isenabled() is enabled
        seen = weakref.ref(Ring())
        gc.collect()
        assert seen() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("frozen", [False, True])
def test_garbage_of_imports_is_collected_later_and_what_a_user_froze_stays_so(frozen: bool) -> None:
    if frozen:
        gc.freeze()
    before = gc.get_freeze_count()
    with uncollected():
        seen = weakref.ref(Ring())
    assert gc.isenabled() and (before > 0) is frozen
    assert before - 100 < gc.get_freeze_count() <= before  # other threads may release some that were frozen
    gc.collect()
    assert seen() is None
