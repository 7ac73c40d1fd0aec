"""The keys of `zeroshard plan --json` are those of the tables in docs/plan.md, with values of the types given there."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from predictions import AT_PEAK, GIB, later, piped, prediction, refusal

from zeroshard.cli.plan_json import as_json
from zeroshard.cli.plan_options import PlanOptions
from zeroshard.doctor.hardware import Machines
from zeroshard.plan import Plan
from zeroshard.planner.predict.result import Found, Prediction, Refusal
from zeroshard.train.family import gpt_task
from zeroshard.train.sizes import GPTConfig

MACHINES = Machines.of("A100-80", 8)
TASK = gpt_task(GPTConfig(vocabulary=64, context=32, width=64, heads=4, layers=2))
LARGE = prediction(Plan(), memory={"activations": 30 * GIB}, phases={"forward": AT_PEAK})
SMALLER = replace(later(prediction(Plan(zero=1)), 2), optimizer="adamw8bit", events=())
REFUSED = (refusal(Plan(zero=1), "80 GiB"), Refusal(LARGE.plan, 4, "It needs more.", "Buy more.", LARGE))
FOUND = Found((prediction(), later(piped(), 1)), REFUSED, 42, 3.2, (), (SMALLER,))
TYPES = {"text": str, "number": (int, float), "boolean": bool, "list": list, "object": dict, "null": type(None)}


def answer(found: Found, **options: Any) -> dict[str, Any]:
    """The answer as a program reads it."""
    asked = PlanOptions(gpu="A100-80", gpus=8, **options)
    content: dict[str, Any] = json.loads(json.dumps(as_json(found, TASK, MACHINES, asked, [], None), allow_nan=False))
    return content


def documented() -> Iterator[dict[str, list[str]]]:
    """The tables of keys, in the order of the page: of the whole, of `refused`, and of `plans`."""
    page = (Path(__file__).parents[2] / "docs" / "plan.md").read_text()
    section = page.partition("## JSON for programs")[2].partition("\n## ")[0]
    for table in section.split("| Key | Value | Meaning |")[1:]:
        yield {
            key: kinds.split(" or ") for key, kinds in re.findall(r"^\| `(\w+)` \| ([a-z ]+) \|", table, re.MULTILINE)
        }


def check(content: dict[str, Any], table: dict[str, list[str]]) -> None:
    """Raise unless the keys are those of the table, and each value is of a type given there."""
    assert [*content] == [*table]
    for key, value in content.items():
        fits = any(isinstance(value, TYPES[kind]) for kind in table[key])  # type: ignore[arg-type]
        assert fits and (not isinstance(value, bool) or table[key] == ["boolean"]), (key, value)


def test_keys_and_types_are_those_of_the_page() -> None:
    whole, refused, plan = documented()
    none = answer(Found((), REFUSED, 3, 1.0, ("a way",)))
    for content in (answer(FOUND), none):
        check(content, whole)
        for one in content["refused"]:
            check(one, refused)
        for one in [
            *content["plans"],
            *content["others"],
            *filter(None, (r["prediction"] for r in content["refused"])),
        ]:
            check(one, plan)
    assert none["plans"] == [] and none["why_first"] is None and none["ways"] == ["a way"]
    assert answer(FOUND)["devices"] == {
        "name": "A100-80",
        "kind": "cuda",
        "count": 8,
        "per_node": 8,
        "memory_bytes": 80 * GIB,
        "host_memory_bytes": None,
    }


def test_plans_keep_their_order_and_their_numbers() -> None:
    content = answer(FOUND)
    assert [one["seconds"] for one in content["plans"]] == [one.seconds for one in FOUND.best]
    assert [one["changes"] for one in (*content["plans"], *content["others"])] == [[], [], ["adamw8bit"]]
    first, staged = content["plans"]
    assert first["peak_bytes"] == 15 * GIB and 0 < first["model_flops_share"] < 1
    assert first["hours_per_billion_tokens"] == 1e9 / FOUND.best[0].tokens_per_second / 3600
    assert first["options"].startswith("zeroshard train --model tiny") and first["python"].startswith("zs.Plan(")
    assert first["memory_over_step"][2]["bytes"] == AT_PEAK and staged["timeline"][0][0][0] == "F0.0@0"
    assert content["refused"][0]["prediction"] is None
    assert (
        content["refused"][1]["prediction"]["peak_bytes"] == 30 * GIB
        and not content["refused"][1]["prediction"]["fits"]
    )
    assert Prediction.from_dict(staged) == FOUND.best[1]
    assert answer(FOUND, model="mine.py:Net")["plans"][0]["options"] is None
