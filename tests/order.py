"""Which test files several workers begin with: the longest first, so that all workers end together."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

LONGEST = (
    "train/test_main_job.py",
    "engine/test_random_plans.py",
    "pipeline/test_pipelines.py",
    "paper/test_plans.py",
    "cli/test_main.py",
    "test_scripts.py",
    "test_examples.py",
    "parts/test_splits_with_stages.py",
    "supervisor/test_supervisor.py",
    "recompute/test_recompute.py",
    "pipeline/test_early_reductions.py",
    "offload/test_offload.py",
    "promises/test_activations.py",
    "recompute/test_shards.py",
    "pipeline/cut/test_carried.py",
    "parts/test_pieces.py",
    "engine/test_combinations.py",
    "optim/slices/test_collective_spans.py",
    "promises/test_units_gathered.py",
    "comm/test_nccl_rules.py",
    "resilience/test_kills.py",
    "engine/test_models.py",
    "checkpoint/test_poison.py",
    "planner/search/test_search.py",
    "tensor/test_training.py",
    "interop/test_transformers.py",
    "recompute/auto/test_stored.py",
    "engine/test_habits.py",
    "engine/test_transports.py",
    "optim/test_whole_optimizers.py",
    "planner/predict/test_offload.py",
    "pipeline/test_state.py",
    "rng/test_exact.py",
    "recompute/auto/test_auto.py",
    "planner/predict/test_shallow.py",
    "planner/predict/test_rehearse.py",
    "checkpoint/test_commit.py",
    "recompute/test_recompute_split.py",
    "engine/test_faults.py",
    "engine/test_golden.py",
    "planner/predict/test_owned.py",
    "moe/test_parallel.py",
    "tensor/test_dropout_of_families.py",
    "pipeline/test_asynchronous.py",
    "units/test_initial_weights.py",
    "train/test_keeping.py",
    "parameter_server/test_failures.py",
    "engine/test_buffers.py",
    "train/test_plan_auto.py",
    "optim/test_optimizers.py",
    "comm/test_cut_links.py",
)


def place_of(root: Path) -> Callable[[Any], int]:
    """The key that sorts a file's tests before those of shorter files; the others stay where they are, behind."""
    places = {root / name: place for place, name in enumerate(LONGEST)}
    return lambda item: places.get(item.path, len(places))
