"""Everything about several GPUs over NCCL, in slices: `make gpus`. None of it has ever run on GPUs.

    python benchmarks/gpu/several.py [--list] [--slice NAME] [--again] [--budget SECONDS] [--cpu] [--out FOLDER]

For 2, 4 and 8 ranks, as far as there are GPUs: each collective's result and rate, every plan of docs/combines.md beside
a run in one process, the share of communication that computation hides, the peers' engines, and one rank that is killed
or hangs. See slices.py for the files, and docs/gpus.md for what to do with them.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))
from slices import Slice, main

WORLDS = (2, 4, 8)
MACHINE = Slice(
    name="machine",
    question="Which rates does the doctor measure, and how are the GPUs connected?",
    script="gpu/machine.py",
    words="--profile FOLDER/profile.json --json KEPT",
    toy="--toy --profile FOLDER/profile.json --json KEPT",
    expected=60,
    cards=2,
)
PEERS = "ddp,ddp-zro,fsdp2,deepspeed2,deepspeed3,zero1,zero2,zero3"


def links(ranks: int) -> Slice:
    """Of the collectives."""
    return Slice(
        name=f"links-{ranks}",
        question=f"Is each collective of {ranks} ranks right, and which part of the link does it use?",
        script="gpu/links.py",
        words=f"--ranks {ranks} --json KEPT",
        toy=f"--ranks {ranks} --device cpu --largest 65536 --json KEPT",
        expected=60,
        cards=ranks,
    )


def parity(ranks: int) -> Slice:
    """Of all plans; it goes on where an earlier call ended."""
    return Slice(
        name=f"parity-{ranks}",
        question=f"Does every plan of docs/combines.md on {ranks} ranks agree with a run in one process?",
        script="gpu/parity.py",
        words=f"--ranks {ranks} --json KEPT",
        toy=f"--ranks {ranks} --device cpu --alone --sample 40 --json KEPT",
        expected=60,
        cards=ranks,
    )


def overlap(ranks: int) -> Slice:
    """Of hidden communication."""
    return Slice(
        name=f"overlap-{ranks}",
        question=f"Which share of the communication of {ranks} ranks is hidden by computation?",
        script="gpu/overlap.py",
        words=f"--ranks {ranks} --json KEPT",
        toy=f"--ranks {ranks} --device cpu --toy --json KEPT",
        expected=150,
        cards=ranks,
        card_gb=20,
    )


def peers(ranks: int) -> Slice:
    """Of other libraries."""
    common = f"--ranks {ranks} --rounds 1 --missing --json KEPT"
    return Slice(
        name=f"peers-{ranks}",
        question=f"How fast are DDP, FSDP2 and DeepSpeed on the same {ranks} GPUs?",
        script="peers.py",
        words=f"{common} --device cuda --sizes 1.3B --tokens 8192 --precisions bf16 --steps 10 --engines {PEERS}",
        toy=f"{common} --sizes 1M --tokens 8 --precisions fp32 --steps 1 --engines ddp,zero3",
        expected=200,
        cards=ranks,
        card_gb=35,
    )


def faults(ranks: int) -> Slice:
    """Of ranks that fail."""
    return Slice(
        name=f"faults-{ranks}",
        question=f"Are a killed and a hanging rank of {ranks} named in time?",
        script="gpu/faults.py",
        words=f"--ranks {ranks} --json KEPT",
        toy=f"--ranks {ranks} --device cpu --timeout 3 --json KEPT",
        expected=200,
        cards=ranks,
    )


def slices(facts: dict[str, Any], cpu: bool) -> tuple[Slice, ...]:
    """The slices for the GPUs of a machine; without GPUs, those of two ranks."""
    worlds = [ranks for ranks in WORLDS if ranks <= len(facts["cards"])] or [WORLDS[0]]

    def every() -> Iterator[Slice]:
        yield MACHINE
        for make in (links, parity, overlap, faults, peers):
            yield from (make(ranks) for ranks in worlds)

    return tuple(every())


if __name__ == "__main__":
    sys.exit(main(__doc__, "gpus", "Several GPUs", slices))
