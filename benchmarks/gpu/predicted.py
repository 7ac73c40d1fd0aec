"""The planner's peaks and step times beside those that `single.py` and `offload.py` measured. It needs no GPU.

    python benchmarks/gpu/predicted.py FOLDER [--gpu NAME] [--json FILE]

FOLDER is that of the slices: NAME.figures.json holds the rows, and profile.json, where it is there, the rates that the
doctor measured. Times are predicted twice: from the planner's description of the GPU (`--gpu`, or the nearest by the
name that the rows hold), and from the measured rates. The bar is 3 % of a peak; times have none.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
import offload
import single
from ranks import circumstances, keep

BAR = 0.03
FAILURE = 200  # characters of why a row cannot be predicted
Row = dict[str, Any]


def measured(folder: Path) -> Iterator[tuple[str, Row]]:
    """The script and the row of every launch that has figures."""
    for file in sorted(folder.glob("*.figures.json")):
        found = json.loads(file.read_text())
        script = "offload" if file.name.startswith("offload") else "single" if file.name.startswith("speed") else ""
        for row in found.get("rows", ()) if script else ():
            if row["engine"] not in ("loop", "probe", "deepspeed"):
                yield script, {"device": found.get("device"), **row}


def task_and_plan(script: str, row: Row) -> tuple[Any, Any, int]:
    """The job, the plan and the rows of a step, as the script ran them."""
    import torch

    import zeroshard as zs
    from zeroshard.planner.predict.rehearse import TrainingTask

    if script == "single":
        return single.task_of(row["model"]), single.plan_of(row["engine"]), single.MODELS[row["model"]][0]
    time_length = min(offload.CONTEXT, row["tokens"])
    rows = row["tokens"] // time_length

    def batch(count: int) -> Any:
        drawn = torch.randint(offload.VOCABULARY, (count, time_length))
        return drawn, drawn

    build = partial(offload.make_model, row["model"], row.get("layers"))
    task = TrainingTask(build, batch, partial(torch.optim.AdamW, lr=1e-5), rows, time_length)
    settings: Row = {"precision": "bf16", **offload.ENGINES[row["engine"]]}
    if "offload.fraction" in row["settings"]:
        settings["offload.fraction"] = float(row["settings"]["offload.fraction"])
    return task, zs.Plan.from_dict(settings), rows


def machines_of(row: Row, folder: Path, name: str | None) -> dict[str, Any]:
    """Descriptions of the machine by where their rates are from."""
    from zeroshard.doctor.hardware import Machines
    from zeroshard.doctor.profile import MachineProfile
    from zeroshard.planner.search.this_machine import local_machines, nearest_preset

    found: dict[str, Any] = {}
    known = name or nearest_preset(row["device"] or "", 2**40)
    if known is not None:
        found["described"] = Machines.of(known, 1)
    elif row["device"] == "cpu":
        found["described"] = local_machines(1, "cpu")
    if (folder / "profile.json").exists():
        profile = MachineProfile.load(folder / "profile.json")
        if profile.machine == row["device"] or row["device"] == "cpu":
            found["doctor's rates"] = profile.machines(1)
    return {source: replace(machines, host_memory=None) for source, machines in found.items()}


def compare(script: str, row: Row, folder: Path, name: str | None) -> Row:
    """A measured row with the planner's figures, from each description of the machine."""
    from zeroshard.planner.predict.predict import predict

    task, plan, rows = task_and_plan(script, row)
    peak = row.get("peak_bytes", row.get("device_peak"))
    compared: Row = {name: row.get(name) for name in ("model", "engine", "layers", "tokens", "step_s")}
    compared |= {"peak_bytes": peak, "predicted": {}}
    for source, machines in machines_of(row, folder, name).items():
        found = predict(task, plan, machines, rows)
        compared["predicted"][source] = {
            "peak_bytes": found.peak_bytes,
            "step_s": found.seconds,
            "peak_error": found.peak_bytes / peak - 1 if peak else None,
            "step_error": found.seconds / row["step_s"] - 1,
            "causes": dict(found.causes),
        }
    return compared


def shown(row: Row) -> str:
    """A line for people."""
    peak = "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**30:.2f} GiB"
    parts = [f"{row['model']} {row['engine']}, {row['tokens']} tokens: peak {peak}, step {row['step_s']:.3f} s"]
    for source, found in row["predicted"].items():
        error = found["peak_error"]
        verdict = "" if error is None else f" ({100 * error:+.1f} % {'pass' if abs(error) <= BAR else 'FAIL'})"
        parts.append(f"{source}: {found['peak_bytes'] / 2**30:.2f} GiB{verdict}, {found['step_s']:.3f} s "
                     f"({100 * found['step_error']:+.1f} %)")  # fmt: skip
    return "\n    ".join(parts)


def main() -> None:
    """Predict, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gpu", help="one of the planner's devices")
    parser.add_argument("--first", type=int, help="only so many rows")
    parser.add_argument("--json")
    options = parser.parse_args()
    kept: Row = {**circumstances(), "rows": [], "failed": []}
    for script, row in list(measured(options.folder))[: options.first]:
        try:
            kept["rows"].append(compare(script, row, options.folder, options.gpu))
            print(shown(kept["rows"][-1]), flush=True)
        except Exception as error:  # the other rows have predictions all the same
            why = f"{type(error).__name__}: {error}"[:FAILURE]
            kept["failed"].append({"model": row["model"], "engine": row["engine"], "why": why})
            print(f"{row['model']} {row['engine']}: no prediction: {why}", flush=True)
        keep(kept, options.json)
    if not kept["rows"] and not kept["failed"]:
        print("there are no figures to compare with: run the slices of speed and offload first")
    keep(kept, options.json)
    sys.exit(bool(kept["failed"]))


if __name__ == "__main__":
    main()
