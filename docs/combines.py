"""Prints `combines.md`: which parts of a plan combine, as `Plan` itself says when it is made.

python docs/combines.py > docs/combines.md
"""

from typing import Any

import zeroshard as zs
from zeroshard.errors import PlanError

PIPELINE = {"pipeline_parallel": 2, "microbatches": 4}
PARTS: dict[str, dict[str, Any]] = {
    "groups": {"shard_group": 2},
    "shared": {"transport": "shared"},
    "overlap": {"overlap_gather": True},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "each": {"reduce_every": "microbatch", "microbatches": 4},
    "1f1b": {**PIPELINE, "pipeline_parallel.schedule": "1f1b"},
    "interleaved": {
        **PIPELINE,
        "pipeline_parallel.schedule": "interleaved",
        "pipeline_parallel.virtual_stages": 2,
    },
    "zb-h1": {**PIPELINE, "pipeline_parallel.schedule": "zb-h1"},
    "uneven": {**PIPELINE, "pipeline_parallel.replicas": (2, 1)},
    "pipedream": {**PIPELINE, "pipeline_parallel.schedule": "pipedream"},
    "2bw": {**PIPELINE, "pipeline_parallel.schedule": "2bw"},
    "tensor": {"tensor_parallel": 2},
    "heads": {"tensor_parallel": 2, "tensor_parallel.sequence": False},
    "experts": {"expert_parallel": 2},
    "levels": {"expert_parallel": 2, "expert_parallel.two_level": True},
    "states": {"offload": "optimizer"},
    "streamed": {"offload": "optimizer,parameters"},
    "activations": {"offload": "activations"},
    "late": {"offload": "optimizer", "offload.delayed_update": True},
}
HEAD = """# What combines

This page says which parts of a plan combine, and why others do not. Each cell lists the ZeRO stages under which two
parts combine; a dash means none. An empty cell right of the diagonal means that both parts set the same field; the
diagonal has each part on its own. A combination without a stage is refused when the plan is made, with the reason in
the last table. `docs/combines.py` prints this page from the plans themselves.

An optimizer that needs whole tensors (Adafactor, Muon, 8-bit Adam, Shampoo, ...) combines with every part, but not with
8-bit or 16-bit `offload.moments`, which are for Adam; see [optimizers](optimizers.md#under-slices).
"""
SAID = """
| Word | Part of the plan |
|---|---|
"""


def options(*names: str) -> dict[str, Any] | None:
    """The fields of a plan with these parts; None where both say something else of a field."""
    found: dict[str, Any] = {}
    for name in names:
        for field, value in PARTS[name].items():
            if field == "offload" and field in found:
                value = ",".join(dict.fromkeys([*found[field].split(","), *value.split(",")]))
            elif found.get(field, value) != value:
                return None
            found[field] = value
    return found


def refusals(*names: str) -> dict[int, str] | None:
    """What is said under each ZeRO stage, nothing where parts combine; None if both say something of a field."""
    fields, said = options(*names), dict.fromkeys(range(4), "")
    if fields is None:
        return None
    for zero in said:
        try:
            zs.Plan.from_dict({"zero": zero, **fields})  # type: ignore[arg-type]
        except PlanError as error:
            said[zero] = str(error)
    return said


def cell_of(name: str, other: str) -> tuple[str, str]:
    """The ZeRO stages under which two parts combine, and where there are none what is said."""
    said = refusals(name, other)
    if said is None:
        return "", ""
    allowed = [str(zero) for zero, words in said.items() if not words]
    alone = [zero for zero, words in (refusals(other) or {}).items() if not words]
    both = [zero for zero in alone if not (refusals(name) or {}).get(zero)]
    return " ".join(allowed) or "-", "" if allowed else said[(both or alone)[0]]


def page() -> str:
    """The page."""
    lines = [HEAD, "| | " + " | ".join(PARTS) + " |", "|---" * (len(PARTS) + 1) + "|"]
    refused: dict[str, list[str]] = {}
    for row, name in enumerate(PARTS):
        cells = [""] * row
        for other in list(PARTS)[row:]:
            cell, said = cell_of(name, other)
            cells.append(cell)
            if said:
                refused.setdefault(said, []).append(f"{name} and {other}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    fields = {
        name: ", ".join(f"`{key}={value!r}`" for key, value in part.items()) for name, part in PARTS.items()
    }
    lines.append(SAID.rstrip("\n"))
    lines += [f"| {name} | {text} |" for name, text in fields.items()]
    lines += ["", "## Reasons", ""]
    lines += ["| Refused | Because |", "|---|---|"]
    lines += [f"| {', '.join(pairs)} | {said} |" for said, pairs in refused.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
