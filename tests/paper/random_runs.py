"""Randomly drawn plans on a device of paper."""

import gc
from dataclasses import dataclass, replace
from unittest.mock import patch

from engine import random_runs
from engine.models import batch
from engine.random_plans import Case
from paper.device import DEVICE, Paper
from torch import Tensor

import zeroshard as zs


@dataclass(frozen=True)
class OnPaper:
    """What one rank saw of a case.

    Attributes:
        findings: as text.
        launches: of each communicator, in order.
        refused: by the engine, the class and message of its error; or "".
    """

    findings: list[str]
    launches: dict[str, list[str]]
    refused: str


def on_paper(mesh: zs.Mesh, case: Case, folder: str) -> OnPaper:
    """Carry out a case as on one of the CPU, once."""
    gc.collect()
    rows, once = patch.object(random_runs, "batch", _on_device), patch.object(random_runs, "comparable", lambda _: True)
    with Paper() as paper, rows, once:
        (answer,) = random_runs.perform(replace(mesh, device=DEVICE), [case], folder)
        refused = f"{answer['refused']}: {answer['message']}" if "refused" in answer else ""
        del answer
    return OnPaper([str(finding) for finding in paper.record.findings], paper.record.launches, refused)


def _on_device(*args: int) -> Tensor:
    return batch(*args).to(DEVICE)
