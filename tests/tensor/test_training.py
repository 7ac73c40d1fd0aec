"""Models of every family whose layers are split train as in one process: losses, norms and weights in fp32 at 1e-5.

A sample; `make verify` goes through all families under all plans of tests/verification/zoo_jobs.py.
"""

from typing import Any

import pytest
from pool import Pool
from selection import by_default
from split_models.training import MODELS, Run, check, train

pytest.importorskip("transformers")
ODD = 13  # positions, which neither 2 nor 4 divides


def run(name: str, parts: int = 1, steps: int = 4, positions: int = ODD, **plan: Any) -> Run:
    """Steps of a model under a plan, which clips gradients and sets settings of groups by `group__name`."""
    settings = {"clip_norm": 0.5, **{key.replace("__", "."): value for key, value in plan.items()}}
    return Run(name, tuple(settings.items()), parts, steps, positions)


def check_all(pool: Pool, ranks: int, runs: list[Run], tolerance: float = 1e-5) -> None:
    """Train all of them in one call of the pool, and compare each with its plain loop."""
    answers = pool.run(train, ranks, runs)
    for number, each in enumerate(runs):
        check(each, [answer[number] for answer in answers], tolerance)


FAMILIES = [(2, True, 20), (2, False, 20), (4, True, 5), (4, False, 5)]  # ranks, sequence parallelism, steps


@pytest.mark.parametrize("case", by_default(FAMILIES, (4, False, 5)), ids=str)
def test_families(pool: Pool, case: tuple[int, bool, int], whole: bool) -> None:
    """OPT works on rows of all sequences together, which sequence parallelism must divide evenly."""
    ranks, sequence, steps = case
    runs = [
        run(
            name,
            steps=steps,
            positions=12 if name == "opt" and sequence else ODD,
            tensor_parallel=ranks,
            tensor_parallel__sequence=sequence,
        )
        for name in (MODELS if whole else ("llama-1", "t5"))
    ]
    check_all(pool, ranks, runs)


def test_one_rank_splits_nothing(pool: Pool) -> None:
    check_all(pool, 1, [run(name, tensor_parallel=1, microbatches=2, parts=2) for name in ("gpt", "llama-2", "t5")])


TWO = {"tensor_parallel": 2, "microbatches": 2}


def test_with_data_ranks(pool: Pool, whole: bool) -> None:
    """2 data ranks x 2 ranks that split layers, two microbatches each."""
    runs = [
        run("llama-1", 4, zero=1, reduce_every="step", **TWO),
        run("gpt", 4, zero=3, transport="network", offload="optimizer,parameters", **TWO),
        run("gpt", 4, zero=0, **TWO),
        run("falcon", 4, zero=2, transport="network", **TWO),
        run("t5", 4, zero=3, transport="network", **TWO),
        run("gpt2", 4, zero=3, transport="shared", loss_chunk=5, **TWO),
        run("llama-2", 4, zero=2, offload="optimizer", **TWO),
        run("bert", 4, zero=2, tensor_parallel__sequence=False, **TWO),
        run("gemma2", 4, zero=1, transport="network", overlap_gather=True, **TWO),
    ]
    check_all(pool, 4, runs if whole else runs[:2])


def test_with_stages(pool: Pool, whole: bool) -> None:
    """2 stages x 2 ranks that split layers; tests/tensor/test_stages.py has the schedules."""
    two = {"pipeline_parallel": 2, **TWO}
    runs = [
        run("falcon-groups", 2, pipeline_parallel__schedule="1f1b", loss_chunk=6, transport="network", **two),
        run("gpt2", 2, pipeline_parallel__schedule="gpipe", recompute="off", **two),
        run("llama-2", 2, pipeline_parallel__schedule="naive", recompute="blocks", **two),
        run("opt", 2, positions=12, pipeline_parallel__schedule="zb-h1", **two),
    ]
    check_all(pool, 4, runs if whole else runs[:1])


def test_in_half_precision(pool: Pool) -> None:
    """bf16 with fp32 master weights."""
    check_all(pool, 4, [run("gpt", 4, zero=2, precision="bf16", **TWO)], tolerance=2e-2)


def test_with_stages_and_data_ranks(wide_pool: Pool, whole: bool) -> None:
    """2 stages x 2 data ranks x 2 ranks that split layers: 8 processes, started once."""
    three = {"pipeline_parallel": 2, **TWO}
    runs = [
        run("gpt", 4, zero=2, pipeline_parallel__schedule="1f1b", offload="optimizer", **three),
        run("gpt", 4, zero=0, pipeline_parallel__schedule="gpipe", **three),
        run("gpt", 4, zero=1, pipeline_parallel__schedule="zb-h1", transport="network", **three),
        run("llama-2", 4, zero=3, pipeline_parallel__schedule="1f1b", transport="network", **three),
        run("llama-1", 4, zero=2, pipeline_parallel__schedule="zb-h1", recompute="blocks", **three),
        run("llama-tied", 4, zero=2, pipeline_parallel__schedule="interleaved", pipeline_parallel__virtual_stages=2,
            **three),
    ]  # fmt: skip
    check_all(wide_pool, 8, runs if whole else runs[:1])


def test_with_uneven_replicas(wide_pool: Pool, whole: bool) -> None:
    """A stage on two data ranks, the other on one, each of two ranks that split layers."""
    runs = [
        run("gpt2", 4, pipeline_parallel=2, pipeline_parallel__replicas=replicas, **{**TWO, "microbatches": 4})
        for replicas in ((2, 1), (1, 2))[: 2 if whole else 1]
    ]
    check_all(wide_pool, 6, runs)
