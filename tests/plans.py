"""Settings of plans, for tests."""

from collections.abc import Iterable
from typing import Any

from zeroshard import Plan
from zeroshard.parts.settings import flat


def settings_of(plan: Plan, names: Iterable[str]) -> dict[str, Any]:
    """Settings by names such as "offload.disk"; those of groups by the group's name where they have a short form."""
    every = dict(flat(plan.as_dict()))
    return {name: every[name] if name in every else getattr(plan, name) for name in names}
