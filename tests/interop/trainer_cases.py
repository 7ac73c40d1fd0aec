"""The trainers and plans of test_transformers.py, by name, without the packages that have the trainers."""

import random
from typing import Any

NAMES = ("trainer", "seq2seq", "sft", "dpo", "reward", "sft lora", "dpo lora")
PLANS: dict[str, dict[str, Any]] = {
    "zero 0": {"zero": 0},
    "zero 1": {"zero": 1},
    "zero 2": {"zero": 2},
    "zero 3": {"zero": 3},
    "offload": {"zero": 3, "offload": "optimizer,parameters"},
}
HABITS = (  # further trainers, data and arguments, a few steps of each
    *("streamed", "assistant only", "packed", "padding free", "model init", "without labels", "kto", "grpo", "rloo"),
)
HABITS_DEFAULT = ("streamed", "assistant only", "without labels", "grpo")
DEFAULT = {"trainer": "zero 3", "seq2seq": "zero 3", "sft": "zero 3", "dpo": "zero 2", "reward": "offload"}


def steps_of(trainer: str) -> int:
    """The steps of a run of this trainer."""
    return 5 if trainer in HABITS else 20


def stops_of(trainer: str) -> list[int]:
    """Five of the twelve steps, by which a run of this trainer is stopped."""
    return random.Random(trainer).sample(range(4, 12), 5)
