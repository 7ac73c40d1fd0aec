"""Families of transformers with their layers split among two ranks, beside a plain loop: split, whole, or refused.

    python benchmarks/tensor_families.py [--families NAME ...] [--no-sequence] [--json [FILE]]

Each tiny model is trained for three steps by SGD on two ranks with `tensor_parallel=2`, and whole in one process; one
that is refused under sequence parallelism, without it. Losses, the gradients of the first step and the weights after
the last one must be equal up to 1e-5 of the largest. The table has the share of parameters in layers that stay whole,
norms and biases apart, with the reasons; "split" are models of which only routers and embeddings of positions or of
types stay whole. The exit status is 1 if anything differed or failed without a reason.

With `--json` figures and table are kept as FILE and beside it with the ending .md, by default
benchmarks/results/tensor-families-DATE.json.
"""

import argparse
import copy
import importlib
import json
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "src")]

import families  # noqa: E402
import torch  # noqa: E402
from ranks import circumstances  # noqa: E402
from torch import nn  # noqa: E402
from transformers.utils import logging  # noqa: E402

import zeroshard as zs  # noqa: E402
from zeroshard.tensor.find.explain import explain  # noqa: E402
from zeroshard.tensor.find.found import FoundLayers, Style  # noqa: E402
from zeroshard.tensor.find.layers import find  # noqa: E402

RANKS, STEPS, RATE, TOLERANCE = 2, 3, 0.02, 1e-5
LOOKED_UP = ("not of the vocabulary",)  # positions and types of tokens, of which a rank reads the rows that it needs
REFUSALS = (zs.PlanError, zs.ModelError, zs.BatchError)


def trained(mesh: zs.Mesh, name: str, sequence: bool) -> dict[str, Any]:
    """The result of one family, on one of the ranks."""
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    model = families.build(name)
    plain = copy.deepcopy(model)
    policy = zs.TensorParallel(RANKS, sequence=sequence)
    row: dict[str, Any] = {"class": type(model).__name__, "parameters": sum(p.numel() for p in model.parameters())}
    try:
        row |= split(model, find(model, RANKS, policy))
        engine = zs.Engine(model, lambda ps: torch.optim.SGD(ps, lr=RATE), zs.Plan(tensor_parallel=policy), mesh=mesh)
        row |= compared(engine, plain)
    except REFUSALS as error:
        if sequence and "sequence=False" in str(error):
            return trained(mesh, name, False) | {"why": str(error)}
        return row | {"verdict": "refused", "why": str(error)}
    except Exception as error:
        return row | {"verdict": "failed", "why": f"{type(error).__name__}: {error}"}
    worst = max(row["losses"], row["gradients"], row["weights"])
    layers = [reason for reason in row["reasons"] if reason not in LOOKED_UP and "Router is no" not in reason]
    return row | {"verdict": "differs" if not worst <= TOLERANCE else "partly" if layers else "split"}


def split(model: nn.Module, found: FoundLayers) -> dict[str, Any]:
    """The share of parameters in whole layers, norms and biases apart, with their reasons; and stacks."""
    modules = dict(model.named_modules())
    seen: set[nn.Parameter] = set()
    whole = 0
    for layer in sorted(found.layers, key=lambda layer: layer.style is Style.WHOLE):
        own = [p for p in modules[layer.name].parameters(recurse=False) if p not in seen and p.dim() > 1]
        seen |= {*own}
        whole += sum(p.numel() for p in own) if layer.style is Style.WHOLE else 0
    reasons: dict[str, list[str]] = {}
    for row in explain(model, found, RANKS):
        first = modules.get(row.name.replace("*", "0")) or next(m for n, m in modules.items() if alike(n, row.name))
        if row.style.startswith("whole") and any(p.dim() > 1 for p in first.parameters(recurse=False)):
            reasons.setdefault(row.reason, []).append(f"{row.name} ({row.kind})")
    total = sum(p.numel() for p in model.parameters())
    return {"whole": whole / total, "reasons": reasons, "sequences": [why for _, why in found.whole_sequences]}


def alike(path: str, pattern: str) -> bool:
    """Whether a path is that of a pattern with `*` for numbers."""
    parts, wanted = path.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(w in ("*", p) for p, w in zip(parts, wanted, strict=True))


def compared(engine: Any, plain: Any) -> dict[str, Any]:
    """How far losses, gradients and weights are from those of a plain loop, relative to the largest."""
    optimizer = torch.optim.SGD(plain.parameters(), lr=RATE)
    far: dict[str, Any] = {"losses": 0.0}
    for step in range(STEPS):
        batch = families.batch(plain, step)
        expected, found = plain(**batch).loss, engine(**batch).loss
        before = families.weights_of(plain)
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.backward(found)
        engine.step()
        far["losses"] = max(
            far["losses"], families.distance(float(expected) - float(found)) / max(1.0, abs(float(expected)))
        )
        if step in (0, STEPS - 1):
            worst, error, moved, largest = families.furthest(engine.state_dict(), plain, before)
            kind, scale = ("gradients", max(RATE, moved)) if step == 0 else ("weights", max(1.0, largest))
            far |= {kind: error / scale, f"worst of {kind}": worst}
    return far


def run(names: Sequence[str], sequence: bool) -> dict[str, Any]:
    """Train, and print a line for each family."""
    from pool import Pool, WorkerError

    began, rows, pool = time.monotonic(), dict[str, Any](), Pool(RANKS, (RANKS,))
    target = importlib.import_module(Path(__file__).stem).trained  # the workers import it by this name
    for name in names:
        try:
            rows[name] = pool.run(target, RANKS, name, sequence)[0]
        except (WorkerError, AssertionError) as error:
            pool.stop()
            rows[name] = {"verdict": "failed", "why": str(error).strip().splitlines()[-1]}
        row = rows[name]
        figures = ", ".join(f"{each} {row[each]:.0e}" for each in ("losses", "gradients", "weights") if each in row)
        share = f"{100 * row['whole']:.0f} % whole" if "whole" in row else ""
        print(f"{name:<24} {row['verdict']:<8} {share:<12} {figures}", flush=True)
        for reason, paths in row.get("reasons", {}).items():
            print(f"    {', '.join(paths)}: {reason}", flush=True)
        if "why" in row:
            print(f"    {row['why']}", flush=True)
    pool.stop()
    counts = dict(Counter(row["verdict"] for row in rows.values()))
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    return {"families": rows, "counts": counts, "seconds": round(time.monotonic() - began)}


def markdown(kept: Mapping[str, Any]) -> str:
    """The table as it is kept."""
    lines = [
        f"{kept['cpu']}, {kept['cores']} cores, {kept['date']}; {kept['seconds']} s; torch {kept['torch']}, "
        f"transformers {kept['transformers']}; two ranks, sequence parallelism {'on' if kept['sequence'] else 'off'}.",
        "",
        ", ".join(f"{count} {verdict}" for verdict, count in kept["counts"].items()) + ".",
        "",
        "| Family | Verdict | Whole, of parameters | Losses | Gradients | Weights | Why |",
        "|---|---|---:|---:|---:|---:|---|",
    ]
    for name, row in kept["families"].items():
        figures = (f"{row[each]:.0e}" if each in row else "–" for each in ("losses", "gradients", "weights"))
        whole = f"{100 * row['whole']:.0f} %" if "whole" in row else "–"
        why = [
            f"{paths[0]}{f' and {len(paths) - 1} more' if len(paths) > 1 else ''}: {reason}"
            for reason, paths in row.get("reasons", {}).items()
        ]
        text = "; ".join([*why, *([row["why"]] if "why" in row else [])]).replace("|", "/").replace("\n", " ")
        lines.append(f"| {name} | {row['verdict']} | {whole} | {' | '.join(figures)} | {text} |")
    lines += ["", "Left out:", ""]
    lines += [f"- {name}: {why}" for name, why in families.LEFT_OUT.items()]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run and keep."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--families", nargs="+", metavar="NAME", default=families.names())
    parser.add_argument("--no-sequence", action="store_true", help="without sequence parallelism")
    parser.add_argument("--json", nargs="?", const="", metavar="FILE", help="keep figures and table")
    options = parser.parse_args()
    kept = run(options.families, not options.no_sequence)
    if options.json is not None:
        import transformers

        today = datetime.now(UTC).date().isoformat()
        kept |= circumstances() | {"date": today, "sequence": not options.no_sequence, "torch": torch.__version__}
        kept |= {"transformers": transformers.__version__}
        path = Path(options.json) if options.json else RESULTS / f"tensor-families-{today}.json"
        path.write_text(json.dumps(kept, indent=1) + "\n")
        path.with_suffix(".md").write_text(markdown(kept))
    return int(bool(kept["counts"].keys() & {"differs", "failed"}))


if __name__ == "__main__":
    sys.exit(main())
