"""A small training script whose rank 1 does something wrong in step 5: culprit.py FOLDER FAULT."""

import os
import sys
import threading
import time
from functools import partial
from pathlib import Path

import torch
from torch import nn

import zeroshard as zs

STEP = 5


def spin_for_ever() -> None:
    """An endless loop."""
    while True:
        pass


def wait_for_a_lock() -> None:
    """A lock that is never released."""
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def do_wrong(fault: str, engine: zs.Engine, x: torch.Tensor) -> torch.Tensor:
    """Make rank 1's fault before a step; returns the batch of the step."""
    match fault:
        case "raise":
            raise ValueError("bad luck")
        case "exit":
            os._exit(3)
        case "leave":
            os._exit(0)
        case "loop":
            spin_for_ever()
        case "lock":
            wait_for_a_lock()
        case "mismatch":
            engine.state_dict()
        case "nan":
            return x * float("nan")
        case "shape":
            return x[:, :, :3]
    return x


def main() -> None:
    """Train until the fault ends it."""
    folder, fault = Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    stages = 2 if fault == "shape" else 1
    plan = zs.Plan(
        zero=0 if stages == 2 else 3, pipeline_parallel=zs.Pipeline(stages, balance="parameters"), transport="network"
    )
    layers = [layer for _ in range(4) for layer in (nn.LayerNorm(4), nn.Linear(4, 4))]
    model, example = nn.Sequential(*layers), (torch.randn(2, 3, 4),) if stages == 2 else None
    loss = lambda output, batch: output.square().mean()  # noqa: E731
    engine = zs.Engine(model, partial(torch.optim.AdamW, lr=1e-2), plan, loss=loss, example=example)
    for step in range(1, 10_000):
        x = torch.randn(2, 4, 4)
        if engine.mesh.rank == 1 and step == STEP:
            (folder / "fault").write_text(str(time.monotonic()))
            x = do_wrong(fault, engine, x)
        engine.train_step((x,))


if __name__ == "__main__":
    main()
