"""Claims of the ZeRO-Offload paper (Ren et al., 2101.06840) about memory, traffic and the largest model.

M is the number of parameters; the optimizer is mixed-precision Adam, 16 bytes of model states per parameter.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from fractions import Fraction

import torch

from zeroshard.doctor.hardware import Machines
from zeroshard.memory.ledger import MODEL_STATES, Category
from zeroshard.plan import Plan
from zeroshard.planner.predict.predict import predict
from zeroshard.planner.predict.rehearse import Rehearsed, TrainingTask, rehearse
from zeroshard.reproduce.claim import Claim, Reading, Say
from zeroshard.text import format_bytes
from zeroshard.train.family import gpt_parameters, gpt_task
from zeroshard.train.sizes import GPTConfig

PAPER = "ZeRO-Offload, Ren et al., 2101.06840"
MIXED = Plan(zero=0, precision="fp16", transport="network")
OFFLOADED = replace(MIXED, zero=2, offload="optimizer")
SMALL = GPTConfig(vocabulary=1024, context=8, width=256, heads=4, layers=4)
LARGE = GPTConfig(vocabulary=50257, context=1024, width=4096, heads=32, layers=65)  # 13.3 B, the paper's table 3
BASELINE = GPTConfig(vocabulary=50257, context=1024, width=2048, heads=16, layers=26)  # 1.4 B
SIZES = (  # name, shape, rows, plan, and the paper's result
    ("13 B with offload", LARGE, 4, replace(OFFLOADED, offload="optimizer,activations"), "fits"),
    ("13 B without", LARGE, 4, MIXED, "does not fit"),
    ("1.4 B without", BASELINE, 1, MIXED, "fits"),
)


def memory(say: Say) -> Iterator[Reading]:
    """Bytes of model states per parameter on the device, by the states on the host."""
    whole, offloaded = (_rehearsed(plan).states for plan in (MIXED, OFFLOADED))
    update = whole[Category.MASTER_WEIGHTS] + whole[Category.OPTIMIZER_STATES]
    held = {
        "nothing offloaded": ("16", _states(whole)),
        "gradients": ("14", _states(whole) - whole[Category.GRADIENTS]),
        "update": ("4", _states(whole) - update),
        "gradients and update": ("2", _states(offloaded)),
    }
    for what, (published, nbytes) in held.items():
        ours = Fraction(nbytes, _parameters(SMALL))
        yield Reading(what, published, ours, exact=True, note=f"{float(16 / ours):.3g} times less than 16")


def wire(say: Say) -> Iterator[Reading]:
    """Bytes per parameter copied between device and host in a step."""
    moved = {purpose: nbytes for purpose, (_, nbytes, _) in _rehearsed(OFFLOADED).wire.items() if nbytes}
    parts = ", ".join(f"{purpose} {Fraction(nbytes, _parameters(SMALL))}" for purpose, nbytes in moved.items())
    yield Reading("a step", "4", Fraction(sum(moved.values()), _parameters(SMALL)), exact=True, note=parts)


def one_device(say: Say) -> Iterator[Reading]:
    """Whether a whole step fits into one V100 with 32 GB."""
    machine = Machines.of("V100-32", 1)
    for what, config, rows, plan, published in SIZES:
        say(what)
        found = predict(_task(config), plan, machine, rows)
        need = f"{format_bytes(found.peak_bytes)} of {format_bytes(found.capacity_bytes)}"
        kept = sum(found.host.values())
        host = f", and {format_bytes(kept)} of host memory" if kept else ""
        size = f"{_parameters(config) / 1e9:.1f} B, {rows} row{'s' * (rows > 1)}"
        yield Reading(what, published, "fits" if found.fits else "does not fit", note=f"{size}: {need}{host}")


def _rehearsed(plan: Plan) -> Rehearsed:
    return rehearse(_task(SMALL), plan, 0, 1, 1)


def _task(config: GPTConfig) -> TrainingTask:
    """A task with the plain AdamW, which the host Adam can replace."""
    return replace(gpt_task(config), optimizer=torch.optim.AdamW)


def _parameters(config: GPTConfig) -> int:
    return gpt_parameters(config.width, config.layers, config.vocabulary)


def _states(held: Mapping[str, int]) -> int:
    return sum(held[category] for category in MODEL_STATES)


_REHEARSED = "The engine is rehearsed on one device on tensors without values, fp16 with one microbatch"
OFFLOAD = (
    Claim(
        "offload-memory",
        "model states on the device, by what is offloaded: 16M, 14M, 4M and 2M bytes",
        f"{PAPER}, section 3, the table of offload strategies (1x, 1.14x, 4x and 8x)",
        "bytes per parameter",
        f"{_REHEARSED}, without offload and with all of it; the ledger is read after a step. The two strategies "
        "between, which the paper rejects and no plan offers, are the first ledger less the categories that would go.",
        memory,
    ),
    Claim(
        "offload-wire",
        "bytes between device and host per step: 4M",
        f"{PAPER}, section 3, the least that any strategy with the update on the host moves",
        "bytes per parameter",
        f"{_REHEARSED}, and the link counts what it copies.",
        wire,
    ),
    Claim(
        "offload-one-device",
        "13 B parameters train on one device of 32 GB, and 1.4 B without offload",
        f"{PAPER}, abstract; sizes of table 3",
        "of one step",
        "The peak of a whole step is predicted for a V100 of 32 GiB, with 1 GiB of it for the context and 3 % free. "
        "Activations are kept on the host too, in the place of the recomputation that the paper used. Four and five "
        "layers are rehearsed; every further one adds as much as the fifth.",
        one_device,
    ),
)
