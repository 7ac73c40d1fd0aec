"""Claims of the ZeRO paper (Rajbhandari et al., 1910.02054, version 3) about memory and traffic.

GB are 10^9 bytes. The paper's optimizer is mixed-precision Adam: 2 + 2 + 12 bytes per parameter.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any

from zeroshard.doctor.hardware import Machines
from zeroshard.plan import Plan
from zeroshard.planner.predict.rehearse import TrainingTask, rehearse
from zeroshard.planner.search.largest import Family, Largest, largest, state_bytes_of, states_along
from zeroshard.reproduce.claim import Claim, Reading, Say
from zeroshard.train.family import gpt_family, gpt_parameters, gpt_task
from zeroshard.train.sizes import GPTConfig

PAPER = "ZeRO, Rajbhandari et al., 1910.02054v3"
GB = 10**9
STAGES = ("baseline", "P_os", "P_os+g", "P_os+g+p")  # the paper's names of ZeRO stages 0 to 3
TOKENS = 8  # of a row: states and traffic do not depend on it
SHAPES = {"7.5B": (7_500_000_000, 4096, 32, 36), "128B": (128 * GB, 12288, 96, 70), "1T": (1000 * GB, 25600, 160, 127)}
RANKS = (1, 4, 16, 64, 256, 1024)
TABLE_1 = {
    "7.5B": ("120 120 120", "52.5 41.3 30", "35.6 21.6 7.5", "31.4 16.6 1.88", "30.4 15.4 0.47", "30.1 15.1 0.12"),
    "128B": ("2048 2048 2048", "896 704 512", "608 368 128", "536 284 32", "518 263 8", "513 257 2"),
    "1T": (
        *("16000 16000 16000", "7000 5500 4000", "4750 2875 1000"),
        *("4187 2218 250", "4046 2054 62.5", "4011 2013 15.6"),
    ),
}
FIGURE_1 = ("120", "31.4", "16.6", "1.9")
TABLE_2 = ("2", "7.6", "14.4", "128")
TABLE_2_MP = {  # by tensor ranks; on 64 of them in each slice group
    2: ("4", "15.2", "28.8", "256"),
    4: ("8", "30.4", "57.6", "500"),
    8: ("16", "60.8", "115.2", "1000"),
    16: ("32", "121.6", "230.4", "2000"),
}
OF_ROUNDED = 0.03  # the table multiplies rounded numbers, and prints 0.5 T, 1 T and 2 T
VOLUME = ("2", "2", "2", "3")
GROWTH = (1, 4, 16, 64)


def sized(size: str) -> Callable[[int], TrainingTask]:
    """Models of a size of table 1, by number of layers; the vocabulary is chosen for the parameters at full depth."""
    parameters, width, heads, layers = SHAPES[size]
    vocabulary = math.ceil((parameters - gpt_parameters(width, layers, 0)) / width)
    return lambda depth: gpt_task(GPTConfig(vocabulary, TOKENS, width, heads, depth))


def mixed(zero: int) -> Plan:
    """The paper's plan: fp16 with fp32 master weights, one microbatch."""
    return Plan(zero=zero, precision="fp16", transport="network")  # type: ignore[arg-type]


def devices(count: int) -> Machines:
    """`count` V100s, whose 32 GB the paper counts as 32·10^9 bytes."""
    machines = Machines.of("V100-32", count)
    return replace(machines, device=replace(machines.device, memory_bytes=32 * GB))


def table_1(say: Say, sizes: tuple[str, ...] = tuple(TABLE_1)) -> Iterator[Reading]:
    """Model states per device, for each size, number of ranks and stage."""
    for size in sizes:
        task_of, layers = sized(size), SHAPES[size][3]
        for ranks, row in zip(RANKS, TABLE_1[size], strict=True):
            for zero, published in enumerate(row.split(), 1):
                what = f"{size}, N = {ranks}, {STAGES[zero]}"
                say(what)
                yield Reading(what, published, states_along(task_of, mixed(zero), ranks, layers) / GB)


def figure_1(say: Say) -> Iterator[Reading]:
    """Model states per device at 7.5 B parameters on 64 devices, from whole rehearsals."""
    whole = sized("7.5B")(SHAPES["7.5B"][3])
    for zero, published in enumerate(FIGURE_1):
        say(STAGES[zero])
        yield Reading(STAGES[zero], published, state_bytes_of(whole, mixed(zero), 64) / GB)


def table_2(say: Say, stages: tuple[int, ...] = (0, 1, 2, 3)) -> Iterator[Reading]:
    """The largest model whose states fit into 32 GB on 64 devices."""
    for zero in stages:
        found = _largest(zero, 64, say)
        yield Reading(STAGES[zero], TABLE_2[zero], _limit(found) / GB, note=_between(found))


def table_2_with_tensor_ranks(say: Say, sizes: tuple[int, ...] = tuple(TABLE_2_MP)) -> Iterator[Reading]:
    """The same where 2 to 16 ranks split each layer, on 64 times as many devices."""
    for size in sizes:
        for zero, published in enumerate(TABLE_2_MP[size]):
            what = f"MP = {size}, {STAGES[zero]}"
            plan = mixed(zero).with_settings({"tensor_parallel": size})
            found = largest(gpt_family(TOKENS), plan, devices(64 * size), 1, "states", partial(_saying, say, what))
            yield Reading(what, published, _limit(found) / GB, note=_between(found), within=OF_ROUNDED)


def volume(say: Say) -> Iterator[Reading]:
    """Elements per parameter that a rank sends in a step, counted by comm."""
    config = GPTConfig(vocabulary=1024, context=TOKENS, width=256, heads=4, layers=4)
    task, parameters = gpt_task(config), gpt_parameters(256, 4, 1024)
    for zero, published in enumerate(VOLUME):
        say(STAGES[zero])
        wire = rehearse(task, mixed(zero), 0, 64, 1).wire
        purposes = {purpose: elements for purpose, (elements, _, _) in wire.items() if elements}
        parts = ", ".join(f"{purpose} {Fraction(n, parameters)}" for purpose, n in purposes.items())
        ours = Fraction(sum(purposes.values()), parameters)
        yield Reading(STAGES[zero], published, ours, exact=True, note=parts)


def growth(say: Say, ranks: tuple[int, ...] = GROWTH) -> Iterator[Reading]:
    """The largest model under stage 3, in units of the largest on one device."""
    alone = None
    for count in ranks:
        found = _largest(3, count, partial(_saying, say, f"N = {count}"))
        alone = alone or _limit(found)
        yield Reading(f"N = {count}", f"{count}.00", _limit(found) / alone, note=_between(found))


def _largest(zero: int, ranks: int, say: Say) -> Largest:
    return largest(gpt_family(TOKENS), mixed(zero), devices(ranks), 1, "states", partial(_saying, say, STAGES[zero]))


def _saying(say: Say, before: str, text: str) -> None:
    say(f"{before}: {text}")


def _limit(found: Largest) -> float:
    assert found.limit is not None
    return found.limit


def _between(found: Largest) -> str:
    assert found.member is not None and found.beyond is not None
    return f"between {found.member.name} and {found.beyond.name}"


_LEDGER = "The engine is rehearsed at that number of ranks on tensors without values; its ledger is read after a step."
_VOCABULARY = "The model has a width of PTD-P (2104.04473, table 1) and a vocabulary that makes up the parameters."
_LIMIT = (
    "The largest GPT of the family of `zeroshard plan --largest` whose states fit is found, it and the next one "
    "rehearsed whole; ours is where the line between the two reaches 32 GB."
)
ZERO = (
    Claim(
        "zero-figure-1",
        "model states per device, 7.5 B parameters on 64 devices",
        f"{PAPER}, figure 1 (page 3)",
        "GB",
        f"{_LEDGER} {_VOCABULARY} All layers are rehearsed.",
        figure_1,
    ),
    Claim(
        "zero-table-1",
        "model states per device, 7.5 B to 1 T parameters on 1 to 1024 devices",
        f"{PAPER}, table 1 (section 5.4)",
        "GB",
        f"{_LEDGER} {_VOCABULARY} Two and three layers are rehearsed; states grow by the same bytes with every layer.",
        table_1,
    ),
    Claim(
        "zero-table-2",
        "largest model by its states, 32 GB, 64 devices, no model parallelism",
        f"{PAPER}, table 2 (section 5.4), row MP = 1, columns of the theoretical maximum",
        "10^9 parameters",
        f"{_LEDGER} {_LIMIT}",
        table_2,
    ),
    Claim(
        "zero-table-2-mp",
        "largest model by its states, 32 GB, 128 to 1024 devices, with model parallelism",
        f"{PAPER}, table 2 (section 5.4), rows MP = 2 to 16, columns of the theoretical maximum",
        "10^9 parameters",
        f"{_LEDGER} {_LIMIT} Model parallelism is tensor parallelism.",
        table_2_with_tensor_ranks,
    ),
    Claim(
        "zero-volume",
        "elements on the wire per parameter and step",
        f"{PAPER}, sections 7.1 and 7.2",
        "elements per parameter",
        "The engine is rehearsed as one of 64 ranks, fp16 with one microbatch, and comm counts what it sends.",
        volume,
    ),
    Claim(
        "zero-growth",
        "the largest model under stage 3 grows with the number of devices",
        f"{PAPER}, section 5.3: states of every device are divided by N",
        "times the largest on one device",
        f"By the paper it grows N times. {_LEDGER} {_LIMIT}",
        growth,
    ),
)


# Configurations C1 to C5 of section 10.5: ZeRO-DP with ZeRO-R. All have constant-size buffers (C_B), recomputation of
# each block, and tensor parallelism over 16 ranks.
DEVICES, TENSOR_RANKS, ROWS, CONTEXT = 400, 16, 16, 1024
CONFIGURATIONS: dict[str, tuple[str, int, dict[str, Any], str]] = {  # description, ZeRO stage, settings, published
    "C1": ("P_os", 1, {}, "40"),
    "C2": ("P_os, P_a", 1, {"activations.partition": True}, "60"),
    "C3": ("P_os+g", 2, {}, ""),
    "C4": ("P_os+g, P_a", 2, {"activations.partition": True}, "140"),
    "C5": ("P_os+g, P_a+cpu", 2, {"activations.partition": True, "offload": "activations"}, "150"),
}
WITHIN = 0.25  # relative tolerance of a measured size


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
        found = largest_of(name, partial(_saying, say, name), gpt_family(CONTEXT))
        yield Reading(f"{name}: {what}", published, _limit(found) / GB, note=_between(found), within=WITHIN)


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
