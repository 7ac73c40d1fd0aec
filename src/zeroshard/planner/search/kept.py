"""A search whose result is kept on the disk: the same question needs no rehearsal again."""

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from zeroshard.comm.mesh import user_cache
from zeroshard.doctor.hardware import Machines
from zeroshard.doctor.profile import default_path
from zeroshard.errors import ZeroshardError
from zeroshard.plan import Plan
from zeroshard.planner.predict.rehearse import TrainingTask
from zeroshard.planner.predict.result import Found
from zeroshard.planner.search.answers import key_of, read_answer, write_answer
from zeroshard.planner.search.search import Say, search


def search_once(
    task: TrainingTask,
    machines: Machines,
    base: Plan,
    top: int = 5,
    say: Say = lambda text: None,
    last_resorts: bool = False,
    first: Callable[[Found], None] = lambda found: None,
    fresh: bool = False,
) -> Found:
    """The result of `search`, or the kept one of the same task, machines, settings and versions.

    Args:
        fresh: search in any case.
    """
    path = _path_of(task, machines, base, last_resorts)
    kept = None if path is None or fresh else _read(path, top)
    if kept is not None:
        say("found in the answer of an earlier search")
        return kept
    found = search(task, machines, base, top, say=say, last_resorts=last_resorts, first=first)
    if path is not None:
        write_answer(path, found.as_dict())
    return found


def _path_of(task: TrainingTask, machines: Machines, base: Plan, last_resorts: bool) -> Path | None:
    """The file of the answer; None for a task without an identity."""
    if not task.identity:
        return None
    plain = {one.name: getattr(task, one.name) for one in dataclasses.fields(task)}
    facts = {name: value for name, value in plain.items() if isinstance(value, (str, int, type(None)))}
    question = (facts, sorted(task.others or ()), machines, base.as_dict(), last_resorts)
    return default_path({"XDG_CACHE_HOME": user_cache()}).parent / "plans" / f"search-{key_of(question)}.json"


def _read(path: Path, top: int) -> Found | None:
    """The kept result with so many plans of the best; None without one, or with one that is damaged."""
    stored = read_answer(path)
    try:
        found = None if stored is None else Found.from_dict(stored)
    except (KeyError, TypeError, ValueError, AttributeError, ZeroshardError):
        return None
    if found is None:
        return None
    plans = (*found.best, *found.others)
    return replace(found, best=plans[:top], others=plans[top:], kept=True)
