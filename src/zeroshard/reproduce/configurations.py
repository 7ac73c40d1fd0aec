"""Configurations C1 to C5 of the ZeRO paper (Rajbhandari et al., 1910.02054, section 10.5): ZeRO-DP with ZeRO-R.

All have constant-size buffers (C_B), recomputation of each block, and tensor parallelism over 16 ranks.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

from zeroshard.plan import Plan
from zeroshard.planner.search.largest import Family, Largest, largest
from zeroshard.reproduce.claim import Claim, Reading, Say
from zeroshard.reproduce.zero import PAPER, devices, mixed
from zeroshard.train.family import gpt_family

DEVICES, TENSOR_RANKS, ROWS, TOKENS = 400, 16, 16, 1024
CONFIGURATIONS: dict[str, tuple[str, int, dict[str, Any], str]] = {  # description, ZeRO stage, settings, published
    "C1": ("P_os", 1, {}, "40"),
    "C2": ("P_os, P_a", 1, {"activations.partition": True}, "60"),
    "C3": ("P_os+g", 2, {}, ""),
    "C4": ("P_os+g, P_a", 2, {"activations.partition": True}, "140"),
    "C5": ("P_os+g, P_a+cpu", 2, {"activations.partition": True, "offload": "activations"}, "150"),
}
WITHIN = 0.25  # ours is a model of what was measured


def configuration(name: str, tensor_ranks: int = TENSOR_RANKS) -> Plan:
    """The plan of a configuration; none keeps sums, as P_a cannot."""
    _, zero, settings, _ = CONFIGURATIONS[name]
    alike = {
        "tensor_parallel": {"ranks": tensor_ranks, "sequence": False},
        "recompute": "blocks",
        "activations.save_sums": False,
    }
    return mixed(zero).with_settings(alike | settings)


def largest_of(name: str, say: Say, family: Family, count: int = DEVICES, rows: int = ROWS) -> Largest:
    """The largest model of a family whose whole step fits under a configuration, on `count` V100s."""
    return largest(family, configuration(name), devices(count), rows, "step", say)


def configurations(say: Say, names: tuple[str, ...] = tuple(CONFIGURATIONS)) -> Iterator[Reading]:
    """The largest model under each configuration."""
    for name in names:
        what, _, _, published = CONFIGURATIONS[name]
        found = largest_of(name, partial(_saying, say, name), gpt_family(TOKENS))
        assert found.limit is not None and found.member is not None and found.beyond is not None
        note = f"between {found.member.name} and {found.beyond.name}"
        yield Reading(f"{name}: {what}", published, found.limit / 10**9, note=note, within=WITHIN)


def _saying(say: Say, before: str, text: str) -> None:
    say(f"{before}: {text}")


CONFIGURATION = (
    Claim(
        "zero-configurations",
        "largest model under configurations C1 to C5, 400 devices of 32 GB, MP = 16",
        f"{PAPER}, figure 6 (section 10.5); C3 has no number there",
        "10^9 parameters",
        "The largest GPT of the family of `zeroshard plan --largest` whose whole step fits is found, at 16 rows of "
        "1024 tokens for each of 25 data ranks; it and the next one are rehearsed whole, and ours is where the line "
        "between the two reaches the memory for tensors. All five recompute each block, with its sums over ranks, and "
        "have buffers of constant size. M_D, memory set aside for checkpoints, is left out: it fights fragmentation, "
        "of which a rehearsal has none. The paper's numbers are of runs, ours of a rehearsal.",
        configurations,
    ),
)
