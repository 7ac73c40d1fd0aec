"""Claims of Megatron-LM about messages of the ranks that split a layer (Shoeybi et al., 1909.08053)."""

from collections.abc import Iterator

from zeroshard.plan import Plan
from zeroshard.planner.predict.rehearse import rehearse
from zeroshard.reproduce.claim import Claim, Reading, Say
from zeroshard.tensor.policy import TensorParallel
from zeroshard.traffic import Purpose
from zeroshard.train.family import gpt_task
from zeroshard.train.gpt import GPTConfig

RANKS, LAYERS, TOKENS, WIDTH = (2, 8), (2, 3), 16, 128


def collectives(say: Say) -> Iterator[Reading]:
    """All-reduces of activations and their gradients in a block: those of a model with one block more."""
    for ranks in RANKS:
        say(f"{ranks} ranks")
        few, more = (_calls(ranks, layers) for layers in LAYERS)
        yield Reading(f"{ranks} ranks: forward and backward", "4", float(more - few), exact=True)


def _calls(ranks: int, layers: int) -> int:
    plan = Plan(tensor_parallel=TensorParallel(ranks, sequence=False), transport="network")
    task = gpt_task(GPTConfig(vocabulary=1024, context=TOKENS, width=WIDTH, heads=8, layers=layers))
    _, _, calls = rehearse(task, plan, 0, ranks, 1).wire[Purpose.SUM_ACTIVATIONS]
    return int(calls)


MEGATRON = (
    Claim(
        "megatron-collectives",
        "all-reduces of a transformer block",
        "Megatron-LM, Shoeybi et al., 1909.08053, section 3",
        "all-reduces",
        "The engine is rehearsed with sequence parallelism off, and comm counts what it sends: two in the forward of a "
        "block, and two in its backward.",
        collectives,
    ),
)
