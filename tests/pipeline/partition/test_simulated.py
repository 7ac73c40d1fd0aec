"""Splits under the simulator: by hand where a stage binds, and never slower than those of the published models."""

import random

import pytest
from pipeline.partition.test_pipedream import instance, transformer

from zeroshard.errors import PlanError
from zeroshard.pipeline.partition.cluster import Cluster, Level
from zeroshard.pipeline.partition.pipedream import OBJECTIVES, Partition, PartitionStage, partition
from zeroshard.pipeline.partition.profile import LayerCost
from zeroshard.pipeline.partition.simulated import fastest, timed

LAYERS = [LayerCost("a", 0.1, 0.2, 0, 0, 10**8), LayerCost("b", 0.05, 0.1, 0, 0, 0)]


def split(*stages: tuple[int, int, int]) -> Partition:
    return Partition(tuple(PartitionStage(*stage, 0.0, 0.0, 0.0) for stage in stages), 0.0, "by hand")


def test_an_exchange_is_added_to_the_stage_that_binds() -> None:
    """Two replicas: 0.3 s and 2 (2-1)/2 of 100 MB at 1 GB/s, every second microbatch each."""
    cluster = Cluster.flat(3, 1e9)
    assert timed(LAYERS, split((0, 0, 2), (1, 1, 1)), cluster).seconds == pytest.approx((0.3 + 0.1) / 2)
    assert timed(LAYERS, split((0, 1, 3)), cluster).seconds == pytest.approx((0.45 + 2 * 2 / 3 * 0.1) / 3)
    assert timed(LAYERS, split((0, 0, 1), (1, 1, 2)), cluster).seconds == pytest.approx(0.3)


def test_messages_that_are_longer_than_computation_bind() -> None:
    layers = [LayerCost("a", 0.01, 0.02, 10**8, 0, 0), LayerCost("b", 0.01, 0.02, 0, 0, 0)]
    found = timed(layers, split((0, 0, 1), (1, 1, 1)), Cluster.flat(2, 1e9))
    assert found.seconds >= 0.1  # 0.1 s there, and as long back
    assert found.stages[0].send_seconds == pytest.approx(0.2)


def test_links_are_those_between_the_devices_of_a_stage() -> None:
    """Two machines of two devices: replicas in one machine exchange fast, four of them as slowly as the slow link."""
    cluster = Cluster((Level(2, 1e10), Level(2, 1e8)))
    inside = timed(LAYERS, split((0, 0, 2), (1, 1, 2)), cluster)
    assert inside.stages[0].sync_seconds == pytest.approx(0.01 / 2)
    assert timed(LAYERS, split((0, 1, 4)), cluster).stages[0].sync_seconds == pytest.approx(2 * 3 / 4 / 4)


def test_no_split_of_a_published_model_is_faster() -> None:
    rng = random.Random(3)
    better = dict.fromkeys(OBJECTIVES, 0)
    for _ in range(25):
        layers, cluster = instance(rng, (4,), 6)
        found = fastest(layers, cluster)
        for name in OBJECTIVES:
            other = timed(layers, partition(layers, cluster, name), cluster).seconds
            assert found.seconds <= other
            better[name] += found.seconds < 0.99 * other
    assert all(better.values())  # each of the two is beaten somewhere


def test_what_does_not_fit_is_refused_as_without_simulation() -> None:
    with pytest.raises(PlanError, match="No split of the 12 layers"):
        fastest(transformer(), Cluster.flat(4, 1e9), memory=1000)
    least = fastest(transformer(), Cluster.flat(4, 1e12), memory=1_799_999_999)
    assert least.memory_bytes <= 1_799_999_999


def test_many_devices_are_not_simulated_for_ever() -> None:
    layers = transformer(24)
    found = timed(layers, split((0, 10, 31), (11, 20, 29), (21, 23, 4)), Cluster.flat(64, 1e12))
    slowest = max(stage.seconds for stage in found.stages)
    assert found.seconds == pytest.approx(slowest)
