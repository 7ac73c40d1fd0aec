"""A loop of accelerate on two ranks with an engine, or on one without, for test_accelerate.py."""

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from interop.regression import Regression, batches
from jobs import error_of
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import zeroshard as zs
from zeroshard.interop.accelerate import ZeroshardAccelerator

SETTINGS = {"gradient_accumulation_steps": 2, "step_scheduler_with_optimizer": False}


def loop(accelerator: Accelerator, epochs: range, folder: Path | None = None) -> dict[str, Any]:
    """Train with accumulation, clipping and a schedule; go on from `folder`, and save into it in the end."""
    model = Regression()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
    loader = DataLoader(TensorDataset(*batches()), 8 // accelerator.num_processes)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    if epochs.start and folder is not None:
        accelerator.load_state(str(folder))
    losses: list[float] = []
    norms: list[float] = []
    for _ in epochs:
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(accelerator.clip_grad_norm_(model.parameters(), 1.0).item())
                optimizer.step()
                if accelerator.sync_gradients:
                    schedule.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather_for_metrics(loss.detach().reshape(1)).mean().item())
    if folder is not None:
        for _ in range(2):  # the second takes the place of the first
            accelerator.save_state(str(folder))
    return {"losses": losses, "norms": norms, "weights": accelerator.get_state_dict(model)}


def refusals() -> list[str]:
    """Errors of calls that cannot work."""

    def prepared(*given: Any, plan: zs.Plan | None = None) -> Any:
        return ZeroshardAccelerator(plan).prepare(*given)

    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    free = ZeroshardAccelerator(zs.Plan(zero=1))
    ready = ZeroshardAccelerator(zs.Plan(zero=1))
    ready.prepare(model, optimizer)
    return [
        error_of(lambda: prepared(other)),
        error_of(lambda: prepared(other, nn.Linear(2, 2), optimizer)),
        error_of(lambda: prepared(other, optimizer, optimizer)),
        error_of(lambda: free.save_state("nowhere")),
        error_of(lambda: free.backward(torch.ones(1).sum())),
        error_of(lambda: ready.clip_grad_norm_(list(model.parameters())[:1], 1.0)),
        error_of(lambda: ready.backward(torch.ones(1).sum(), retain_graph=True)),
        error_of(lambda: ready.load_state(None)),
        error_of(lambda: ZeroshardAccelerator(zs.Plan(microbatches=2))),
    ]


def main(folder: Path, whole: bool) -> None:
    """All runs, one after the other; rank 0 writes their records."""
    found: dict[str, Any] = {}
    for zero in range(4) if whole else (0, 3):
        accelerator = ZeroshardAccelerator(zs.Plan(zero=zero), **SETTINGS)
        found[f"zero {zero}"] = loop(accelerator, range(3))
    first = loop(ZeroshardAccelerator(zs.Plan(zero=2), **SETTINGS), range(1), folder / "saved")
    again = loop(ZeroshardAccelerator(zs.Plan(zero=3), **SETTINGS), range(1, 3), folder / "saved")
    found["resumed"] = {**again, "losses": first["losses"] + again["losses"], "norms": first["norms"] + again["norms"]}
    found["files"] = sorted(path.name for path in (folder / "saved").iterdir())
    model = Regression()
    engine = zs.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), zs.Plan(zero=1))
    adopting = ZeroshardAccelerator(zs.Plan(zero=1))
    adopting.prepare(engine)
    adopting.backward(engine(torch.ones(2, 4)).square().mean())
    adopting.save_model(model, str(folder / "model"))
    found["model"] = sorted(path.name for path in (folder / "model").iterdir())
    found["adopted"] = engine.step().grad_norm > 0
    found["errors"] = refusals()
    if accelerator.is_main_process:
        torch.save(found, folder / "found.pt")
    accelerator.wait_for_everyone()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]), "--whole" in sys.argv)
