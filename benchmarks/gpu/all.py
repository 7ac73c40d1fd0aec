"""Everything for a short loan of one GPU, in slices, in the order in which the time should be spent: `make gpu`.

    python benchmarks/gpu/all.py [--list] [--slice NAME] [--again] [--budget SECONDS] [--cpu] [--out FOLDER]

Correctness comes first, then the rates that the planner needs, then speed and offload, then what can be computed or
repeated elsewhere. See slices.py for the files, and METHOD.md for the meaning of each figure.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))
from slices import Slice, main

PEERS = "local,ddp,fsdp2,deepspeed2,deepspeed3,zero0,zero2,zero3"
PEERS_TOY = "--sizes 1M --tokens 8 --precisions fp32 --rounds 1 --steps 1 --engines local,zero0"
SLICES = (
    Slice(
        name="parity",
        question="Does every kind of engine follow a plain loop on this GPU?",
        script="gpu/suite.py",
        words="--whole --json KEPT",
        toy="--cpu --json KEPT",
        expected=100,
    ),
    Slice(
        name="machine",
        question="Which rates does the doctor measure, beside those that the planner assumes?",
        script="gpu/machine.py",
        words="--profile FOLDER/profile.json --json KEPT",
        toy="--toy --profile FOLDER/profile.json --json KEPT",
        expected=30,
    ),
    Slice(
        name="speed",
        question="Which part of a plain loop's speed has one rank, and does its peak match?",
        script="gpu/single.py",
        words="--models gpt2-xl --rounds 1 --engines loop,zero0,zero2,zero3 --json KEPT",
        toy="--cpu --models gpt2-try --rounds 1 --steps 1 --engines loop,zero3 --json KEPT",
        expected=110,
        card_gb=65,
        needs="transformers",
    ),
    Slice(
        name="offload-7B",
        question="Which part of its speed keeps a model of 7 billion parameters with states on the host?",
        script="gpu/offload.py",
        words="--models 7B --tokens 16384 --steps 4 --engines memory,optimizer --json KEPT",
        toy="--cpu --steps 1 --engines optimizer,parameters --json KEPT",
        expected=150,
        card_gb=30,
    ),
    Slice(
        name="offload-13B",
        question="Does a model of 13 billion parameters train, with part of its states on the host?",
        script="gpu/offload.py",
        words="--models 13B --tokens 8192 --steps 3 --engines share --json KEPT",
        toy=None,
        expected=180,
        card_gb=60,
    ),
    Slice(
        name="offload-largest",
        question="Does the largest model train that fits by the planner?",
        script="gpu/offload.py",
        words="--planned --tokens 4096 --steps 2 --engines share --json KEPT",
        toy="--cpu --planned --tokens 8 --steps 1 --engines share --json KEPT",
        expected=220,
        card_gb=60,
    ),
    Slice(
        name="predicted",
        question="How far are the planner's peaks and step times from those of the slices above?",
        script="gpu/predicted.py",
        words="FOLDER --json KEPT",
        toy="FOLDER --first 1 --json KEPT",
        expected=60,
        cards=0,
    ),
    Slice(
        name="peers",
        question="How fast are FSDP2 and DeepSpeed on the same model, batch and GPU?",
        script="peers.py",
        words=f"--device cuda --ranks 1 --sizes 350M --tokens 8192 --precisions bf16 --rounds 1 --steps 10 "
        f"--engines {PEERS} --missing --json KEPT",
        toy=f"--ranks 1 {PEERS_TOY} --missing --json KEPT",
        expected=120,
        card_gb=20,
    ),
    Slice(
        name="peers-offload",
        question="How fast is DeepSpeed with states on the host, beside ours?",
        script="gpu/offload.py",
        words="--models 1.4B --tokens 16384 --steps 4 --engines optimizer,deepspeed --json KEPT",
        toy=None,
        expected=100,
        card_gb=20,
        needs="deepspeed",
    ),
    Slice(
        name="speed-7B",
        question="The same as speed, for a model of 7 billion parameters?",
        script="gpu/single.py",
        words="--models llama-7b --rounds 1 --steps 6 --engines loop,zero2 --json KEPT",
        toy=None,
        expected=120,
        card_gb=135,
        needs="transformers",
    ),
)


def slices(facts: dict[str, Any], cpu: bool) -> tuple[Slice, ...]:
    """The slices; the machine decides only which of them can run."""
    return SLICES


if __name__ == "__main__":
    sys.exit(main(__doc__, "gpu", "One GPU", slices))
