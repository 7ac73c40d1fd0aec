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
DEFAULT = {"trainer": "zero 3", "seq2seq": "zero 3", "sft": "zero 3", "dpo": "zero 2", "reward": "offload"}


def stops_of(trainer: str) -> list[int]:
    """Five of the twelve steps, by which a run of this trainer is stopped."""
    return random.Random(trainer).sample(range(4, 12), 5)
