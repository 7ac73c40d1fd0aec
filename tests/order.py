"""Which test files several workers begin with: the longest first, so that all workers end together."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

LONGEST = (
    "resilience/test_kills.py",
    "engine/test_pipelines.py",
    "engine/test_offload.py",
    "supervisor/test_supervisor.py",
    "engine/test_combinations.py",
    "train/test_main_job.py",
    "planner/predict/test_shallow.py",
    "test_examples.py",
    "engine/test_faults.py",
    "comm/test_cut_links.py",
    "engine/test_random_plans.py",
    "engine/test_golden.py",
    "engine/test_parity.py",
    "engine/test_loss_contract.py",
    "planner/predict/test_rehearse.py",
    "verification/test_zoo.py",
    "cli/test_main.py",
    "tensor/test_training.py",
    "tensor/test_whole_optimizers.py",
    "planner/search/test_search.py",
    "moe/test_parallel.py",
    "train/test_keeping.py",
    "engine/test_splits_with_stages.py",
    "interop/test_lightning.py",
)


def place_of(root: Path) -> Callable[[Any], int]:
    """The key that sorts a file's tests before those of shorter files; the others stay where they are, behind."""
    places = {root / name: place for place, name in enumerate(LONGEST)}
    return lambda item: places.get(item.path, len(places))
