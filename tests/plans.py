"""Settings of plans, for tests."""

from collections.abc import Iterable
from typing import Any

from zeroshard import Plan
from zeroshard.parts.settings import flat


def settings_of(plan: Plan, names: Iterable[str]) -> dict[str, Any]:
    """Settings by names such as "offload.disk"; the first setting of a group by the group's name."""
    every = dict(flat(plan.as_dict()))
    firsts = {"pipeline_parallel": "stages", "offload": "parts", "loss_scale": "value"}
    return {name: every[f"{name}.{firsts[name]}" if name in firsts else name] for name in names}
