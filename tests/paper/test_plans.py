"""Every kind of plan on a device of paper: no findings, equal launches on all ranks, and known waits of the host."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from paper.device import DEVICE, Paper
from paper.plans import PLANS, RANKS
from paper.record import disagreements
from paper.runs import batch, model, run
from pool import Pool

import zeroshard as zs

WAITS: dict[str, tuple[int, ...]] = {
    "zero 2, microbatches, clipped": (1,),
    "zero 3, loss in chunks": (1,),
    "optimizer on the host": (4,),
    "optimizer on the host, clipped": (5,),
    "half of the optimizer on the host": (3,),
    "without guesses": (4,),
    "guesses in bf16": (4,),
    "delayed update": (4,),
    "delayed update of half": (3,),
    "parameters on the host": (6,),
    "parameters on the host, bf16": (6,),
    "activations on the host": (1,),
    "everything on the host": (6,),
    "states on disk": (4,),
    "everything on disk": (6,),
    "moments of 8 bits on the host": (4,),
    "blocks, zero=3": (1,),
    "sqrt": (1,),
    "selective": (1,),
    "auto": (1,),
    "arena": (1,),
    "inputs of blocks on the host": (1,),
    "compressed activations": (9,),
    "exact random numbers": (1,),
    "zero 0": (1, 1),
    "zero 1": (1, 1),
    "zero 2": (1, 1),
    "zero 3": (3, 3),
    "overlapped gather": (1, 1),
    "zero 2, two microbatches": (1, 1),
    "zero 3, blocks": (3, 3),
    "optimizer on the host, two ranks": (4, 4),
    "optimizer on the host, zero 3": (6, 6),
    "everything on the host, two ranks": (6, 6),
    "tensor parallel": (2, 2),
    "tensor parallel, zero 3, selective": (4, 4),
    "naive": (2, 3),
    "gpipe": (2, 3),
    "1f1b": (2, 3),
    "zb-h1": (2, 3),
    "interleaved": (2, 3),
    "pipedream": (4, 4),
    "2bw": (1, 1),
    "stages, arena": (2, 3),
    "stages, optimizer on the host": (5, 6),
    "experts": (7, 4),
    "experts, zero 3": (9, 6),
    "users": (3, 3),
    "users, on the host": (6, 6),
    "groups of two": (4, 4, 4, 4),
    "experts on two machines": (7, 4, 4, 4),
    "stages and tensor parallel": (2, 2, 3, 3),
    "stages and tensor parallel, whole sequences": (2, 2, 3, 3),
    "by hand, clipped by value": (6,),
    "a block left out, bf16": (4,),
    "skipped step": (2,),
    "a copy after a copy": (1,),
    "model that outlives its engine": (4,),
    "messages as large as tied weights": (2, 3),
    "tensor parallel, loss in chunks": (2, 2),
    "inputs of blocks divided": (2, 2),
    "tensor parallel, muon": (2, 2),
    "tensor parallel, adafactor": (2, 2),
    "stages, experts, blocks": (57, 18),
    "under a profiler": (1, 1),
    "experts with buffers": (7, 4),
    "losses over the global batch": (7, 4),
    "adafactor of cut matrices": (1, 1, 1, 1),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_has_no_findings(pool: Pool, name: str) -> None:
    ranks = RANKS[name]
    answers = pool.run(run, ranks, PLANS[name]) if ranks > 1 else [run(zs.Mesh(), PLANS[name])]
    findings = [finding for answer in answers for finding in answer.findings]
    assert not findings, "\n".join(findings)
    assert not list(disagreements([answer.launches for answer in answers]))
    assert all(math.isfinite(loss) or math.isnan(loss) for answer in answers for loss in answer.losses)
    waits = tuple(sum(answer.waits.values()) for answer in answers)
    assert waits == WAITS[name], [answer.waits for answer in answers]


MAKERS: dict[str, Any] = {
    "adafactor": partial(zs.optim.Adafactor, lr=1e-3),
    "sm3": partial(zs.optim.SM3, lr=1e-2),
    "8 bits": partial(zs.optim.AdamW8bit, lr=1e-3, min_8bit_size=16),
    "muon": partial(zs.optim.Muon, lr=1e-3),
    "shampoo": partial(zs.optim.Shampoo, lr=1e-3),
    "soap": partial(zs.optim.SOAP, lr=1e-3),
}


@pytest.mark.parametrize("name", MAKERS)
def test_states_of_a_checkpoint_are_loaded_onto_the_device(name: str, tmp_path: Path) -> None:
    with Paper() as paper:
        mesh, losses = replace(zs.Mesh(), device=DEVICE), []
        for resumed in (False, True):
            engine = zs.Engine(model(), MAKERS[name], zs.Plan(zero=2), mesh=mesh)
            if resumed:
                engine.load(tmp_path / "saved")
            else:
                engine.train_step(batch(0))
                engine.save(tmp_path / "saved", wait=True)
            losses.append(float(engine.train_step(batch(1)).loss))
            losses.append(float(engine.train_step(batch(2)).loss))
    assert losses[:2] == losses[2:]
    assert not paper.record.findings, "\n".join(map(str, paper.record.findings))
