"""Prints `settings.md`: every setting of `Plan` by subject, from the classes themselves.

python docs/settings.py > docs/settings.md
"""

import ast
import dataclasses
import inspect
import textwrap
from itertools import pairwise
from typing import Any

import zeroshard as zs

SUBJECTS = {
    "Memory": ("zero", "shard_group", "activations", "recompute", "offload", "loss_chunk", "device_memory"),
    "Axes: stages, split layers, experts": ("pipeline_parallel", "tensor_parallel", "expert_parallel"),
    "Precision": ("precision", "fp32_modules", "loss_scale", "reduce_dtype", "nonfinite"),
    "The step": ("microbatches", "reduce_every", "clip_norm"),
    "Communication": ("transport", "strict", "overlap_gather", "timeout"),
    "The model": ("units", "ignored", "seed", "rng"),
}
GROUPS: dict[str, type[Any]] = {
    "activations": zs.Activations,
    "offload": zs.Offload,
    "pipeline_parallel": zs.Pipeline,
    "tensor_parallel": zs.TensorParallel,
    "expert_parallel": zs.ExpertParallel,
    "loss_scale": zs.LossScale,
}
HEAD = """# Settings of Plan

A `Plan` is one frozen object that decides how a model is trained. Every setting has a default; a wrong value, or two
settings that do not combine, raise a `PlanError` that names the way out, when the plan is made
([which settings combine?](combines.md)). `docs/settings.py` prints this page from the classes themselves.

These are all settings at their defaults:
"""
TAIL = """
Several settings of one technique are a group. `pipeline_parallel=4` is short for `zs.Pipeline(4)`, `offload="optimizer"`
for `zs.Offload("optimizer")`, and `loss_scale=128.0` for `zs.LossScale(128.0)`. In messages, in files and on the command
line a setting of a group has a dot in its name: `zeroshard train --offload optimizer --offload.disk scratch`.

| Call | Result |
|---|---|
| `dataclasses.replace(plan, zero=3)` | the same plan with another setting |
| `plan.as_dict()`, `zs.Plan.from_dict(settings)` | plain values, with dotted names for groups, and back |
| `zs.Plan.auto(model, batch, optimizer=...)` | [the fastest plan that fits](auto_plan.md) |
"""


def abouts(kind: type[Any]) -> dict[str, str]:
    """Docstrings of the fields of a class, each in one line."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for field, text in pairwise(tree.body):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
        ):
            found[ast.unparse(field.target)] = " ".join(str(text.value.value).split())
    return found


def rows(kind: type[Any], names: tuple[str, ...], group: str = "") -> list[str]:
    """A row for each of some settings: its name, its default, and its docstring."""
    said, fields = abouts(kind), {field.name: field for field in dataclasses.fields(kind)}
    lines = []
    for name in names:
        default = fields[name].default
        shown = "required" if default is dataclasses.MISSING else f"`{default!r}`"
        text = said[name].replace("|", "\\\\|")
        lines.append(f"| `{group}{name}` | {shown} | {text} |")
    return lines


def page() -> str:
    """The page. Raises if a setting has no subject."""
    every = [field.name for field in dataclasses.fields(zs.Plan)]
    placed = [name for names in SUBJECTS.values() for name in names]
    assert sorted(every) == sorted(placed), f"{set(every) ^ set(placed)} have no subject"
    plan = dataclasses.fields(zs.Plan)
    arguments = "".join(f"    {field.name}={field.default!r},\n" for field in plan).replace("'", '"')
    lines = [HEAD, f"```python\nimport zeroshard as zs\n\nzs.Plan(\n{arguments})\n```", TAIL.rstrip("\n")]
    for subject, names in SUBJECTS.items():
        lines += [
            "",
            f"## {subject}",
            "",
            "| Setting | Default | Meaning |",
            "|---|---|---|",
            *rows(zs.Plan, names),
        ]
        for name in names:
            if name in GROUPS:
                inner = tuple(field.name for field in dataclasses.fields(GROUPS[name]))
                lines += ["", f"`zs.{GROUPS[name].__name__}`, the group of `{name}`:", ""]
                lines += [
                    "| Setting | Default | Meaning |",
                    "|---|---|---|",
                    *rows(GROUPS[name], inner, f"{name}."),
                ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
