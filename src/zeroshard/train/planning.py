"""The plan of a run before it begins: the fastest that fits, a resumed run's, or the given plan, with a prediction.

Rank 0 plans for all ranks.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from zeroshard.comm.mesh import Mesh
from zeroshard.engine.techniques import data_ranks_of
from zeroshard.errors import ConfigError
from zeroshard.plan import SEARCHED, SEARCHED_UNLESS_GIVEN, Plan
from zeroshard.planner.predict.predict import predict
from zeroshard.planner.predict.result import Prediction
from zeroshard.planner.search.auto import best_plans, on_rank_zero, refuse_chosen, why
from zeroshard.planner.search.search import Say, search
from zeroshard.planner.search.text import describe, short
from zeroshard.planner.search.this_machine import local_machines
from zeroshard.planning.settings import flat
from zeroshard.train.config import TrainConfig
from zeroshard.train.folder import SAME, unfinished
from zeroshard.train.option_names import in_options
from zeroshard.train.task import language_task
from zeroshard.train.toml_config import load_toml

SPINNER = 3  # columns of a spinner and of the spaces around it


def beside_spinner(text: str, width: int) -> Text:
    """A text that fits into one line of a terminal behind a spinner, which would wrap a longer one."""
    line = Text(text)
    line.truncate(width - SPINNER, overflow="ellipsis")
    return line


@dataclass(frozen=True)
class Outlook:
    """The prediction of a run, before it begins.

    Attributes:
        prediction: of its plan; None if none was asked for.
        rates: source of the rates behind the predicted time.
    """

    prediction: Prediction | None = None
    rates: str = ""


def plan_ahead(config: TrainConfig, mesh: Mesh, profile: Path | None = None) -> tuple[TrainConfig, Outlook]:
    """The options, with the plan filled in under `--plan auto`, and the prediction of the plan; a collective call.

    Rank 0 prints the plan and the reason for it.

    Args:
        profile: file of this machine's rates, written by `zeroshard doctor`.

    Raises:
        PlanError: no plan fits, with the way out; or an option that a search chooses was given.
        ConfigError, ModelError: options or a model that no run can have.
    """
    if config.planning == "given" and not config.predict:
        return config, Outlook()
    if config.planning == "auto":
        refuse_chosen(config.plan)
    if mesh.rank == 0:
        plans = "every plan" if config.planning == "auto" else "this plan"
        _tell([f"rehearsing {plans} before the run begins"])
    with Console(stderr=True, quiet=mesh.rank != 0).status("Planning") as status:

        def show(text: str) -> None:
            status.update(beside_spinner(f"Planning: {text}", status.console.width))

        answer = on_rank_zero(mesh, partial(_answer, config, mesh, profile), "planning", show)
    if mesh.rank == 0:
        _tell([in_options(line, TrainConfig, sys.argv) for line in answer["lines"]])
    predicted = None if answer["prediction"] is None else Prediction.from_dict(answer["prediction"])
    if config.planning == "auto":
        plan = replace(Plan.from_dict(answer["plan"]), transport=config.plan.transport)
        batch = _rows(config, mesh) // data_ranks_of(plan, mesh.ranks)
        config = replace(config, planning="given", plan=plan, batch_per_rank=batch)
    return config, Outlook(predicted, answer["rates"])


def _tell(lines: Sequence[str]) -> None:
    for line in lines:
        print(f"zeroshard: {line}", flush=True)


def _rows(config: TrainConfig, mesh: Mesh) -> int:
    """Rows of one step, over all data ranks."""
    if config.planning == "auto":
        return config.batch_per_rank * mesh.ranks
    return config.batch_per_rank * data_ranks_of(config.plan, mesh.ranks)


def _answer(config: TrainConfig, mesh: Mesh, profile: Path | None, say: Say) -> dict[str, Any]:
    """On rank 0: the plan, its prediction, and the lines to print."""
    kept = _kept(config, mesh) if config.planning == "auto" else None
    if kept is not None and not config.predict:
        folder, plan = kept
        line = f"going on with the plan of {folder}, which is not chosen anew: {short(plan, mesh.ranks)}"
        return {"plan": plan.as_dict(), "prediction": None, "rates": "", "lines": [line]}
    machines = local_machines(mesh.ranks, mesh.device.type, profile)
    task = language_task(config, _rows(config, mesh))
    if config.planning == "auto" and kept is None:
        found = best_plans(task, machines, config.plan, say)
        best, lines = found.best[0], why(found)
    else:
        plan = config.plan if kept is None else kept[1]
        rows = task.rows // data_ranks_of(plan, mesh.ranks)
        found = search(task, machines, plan, plans=[(plan, rows)], say=say)
        best = found.best[0] if found.best else predict(task, plan, machines, rows)
        lines = [*describe(best), *(f"warning: {refusal.why} {refusal.way_out}" for refusal in found.refused)]
    return {"plan": best.plan.as_dict(), "prediction": best.as_dict(), "rates": machines.device.source, "lines": lines}


def _kept(config: TrainConfig, mesh: Mesh) -> tuple[Path, Plan] | None:
    """The run to resume, and its plan with the options of this start; None if its ranks or rows differ."""
    folder = unfinished(config)
    if folder is None and isinstance(config.resume, Path):
        folder = next((path for path in (config.resume, *config.resume.parents) if (path / SAME).is_file()), None)
    if folder is None:
        return None
    try:
        before = load_toml(folder / "config.toml", TrainConfig)
        ranks = json.loads((folder / SAME).read_text()).get("ranks")
    except (ConfigError, OSError, ValueError):
        return None
    if ranks != mesh.ranks or before.batch_per_rank * data_ranks_of(before.plan, ranks) != _rows(config, mesh):
        return None
    chosen, given, usual = (dict(flat(plan.as_dict())) for plan in (before.plan, config.plan, Plan()))
    open_ones = [name for name in SEARCHED_UNLESS_GIVEN if given[name] == usual[name]]
    return folder, config.plan.with_settings({name: chosen[name] for name in (*SEARCHED, *open_ones)})
