"""Prints `combines.md`: which parts of a plan combine, as `Plan` itself says when it is made.

python docs/combines.py > docs/combines.md
"""

import textwrap
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
NAMES = {
    "groups": "Groups of ranks (HSDP)",
    "shared": "Shared memory between ranks",
    "overlap": "Gathers during the next forward",
    "bf16": "Mixed precision in bf16",
    "fp16": "Mixed precision in fp16, with loss scaling",
    "each": "Gradient accumulation, reduced in each microbatch",
    "1f1b": "A pipeline under 1F1B",
    "interleaved": "A pipeline under interleaved 1F1B",
    "zb-h1": "A pipeline under ZB-H1 (zero bubble)",
    "uneven": "A pipeline with uneven replicas",
    "pipedream": "A pipeline under PipeDream, without a flush",
    "2bw": "A pipeline under PipeDream-2BW, without a flush",
    "tensor": "Tensor parallelism with sequence parallelism",
    "heads": "Tensor parallelism without sequence parallelism",
    "experts": "Expert parallelism (MoE)",
    "levels": "Expert parallelism in two levels",
    "states": "CPU offload of optimizer states",
    "streamed": "CPU offload of states and parameters",
    "activations": "CPU offload of activations",
    "late": "CPU offload with delayed updates",
}
HEAD = """# Which settings combine?

Find the first setting below; its section answers for each other setting whether both work in one plan, and under
which ZeRO stages. Where the answer is no, `zs.Plan(...)` raises a `PlanError` with the reason that stands here, before
anything runs. `docs/combines.py` prints this page from the plans themselves, and a test compares the two.

An optimizer that needs whole tensors (Adafactor, Muon, 8-bit Adam, Shampoo, ...) combines with every setting, but not
with 8-bit or 16-bit `offload.moments`, which are for Adam; see [optimizers](optimizers.md#under-slices). Each answer is
about two settings; a plan with more of them is checked as a whole.
"""
MATRIX = """
## The matrix

The ZeRO stages under which two settings combine; a dash means none. An empty cell right of the diagonal means that both
set the same field; the diagonal has each setting on its own. Scroll it sideways in a narrow window.
"""
SAID = """
| Word | Settings |
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
    said = refusals(name, other) if name != other else refusals(name)
    if said is None:
        return "", ""
    allowed = [str(zero) for zero, words in said.items() if not words]
    alone = [zero for zero, words in (refusals(other) or {}).items() if not words]
    both = [zero for zero in alone if not (refusals(name) or {}).get(zero)]
    return " ".join(allowed) or "-", "" if allowed else said[(both or alone)[0]]


def answer(name: str, other: str) -> str:
    """Whether two parts combine, in words; empty where both set the same field."""
    cell, reason = cell_of(name, other)
    if cell == "":
        return ""
    if cell == "-":
        return f"No. {reason}"
    alone = cell_of(name, name)[0]
    under = "ZeRO stage " + cell if " " not in cell else "ZeRO stages " + ", ".join(cell.split())
    if cell == "0 1 2 3":
        return "Yes, under every stage"
    return f"Yes, under {under}" + (", as on its own" if cell == alone else "")


def section(name: str) -> list[str]:
    """The questions about a part, those with one answer in one row."""
    fields = ", ".join(f"`{key}={value!r}`" for key, value in PARTS[name].items())
    lines = ["", f"## {NAMES[name]}", "", *textwrap.wrap(f"Does {fields} work together with ...?", 118), ""]
    answers: dict[str, list[str]] = {}
    for other in PARTS:
        if other != name and (said := answer(name, other)):
            answers.setdefault(said, []).append(f"{NAMES[other]} (`{other}`)")
    for said, others in sorted(answers.items(), key=lambda row: row[0].startswith("No")):
        verdict, _, reason = said.partition(". ")
        if len(others) == 1:
            text = f"... {others[0]}? **{verdict.rstrip('.')}.** {reason}"
        else:
            text = f"**{verdict.rstrip('.')}**, together with each of these. {reason}"
        lines += textwrap.wrap(
            text.rstrip(), 118, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False
        )
        lines += [f"  - {one}" for one in others if len(others) > 1]
    return lines


def page() -> str:
    """The page."""
    lines = [HEAD.rstrip("\n")]
    for name in PARTS:
        lines += section(name)
    lines += [MATRIX, "| | " + " | ".join(PARTS) + " |", "|---" * (len(PARTS) + 1) + "|"]
    for row, name in enumerate(PARTS):
        cells = [""] * row + [cell_of(name, other)[0] for other in list(PARTS)[row:]]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines.append(SAID.rstrip("\n"))
    lines += [f"| {name} | {NAMES[name]} |" for name in PARTS]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
