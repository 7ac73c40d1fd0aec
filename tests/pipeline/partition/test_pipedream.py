"""The partitioner against every split there is, and against what the paper reports of VGG-16."""

import dataclasses
import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest

from zeroshard.errors import PlanError
from zeroshard.pipeline.partition.cluster import Cluster, Level
from zeroshard.pipeline.partition.pipedream import OBJECTIVES, Partition, Shape, partition
from zeroshard.pipeline.partition.profile import LayerCost

# A split of layers over a component: its stages in order, each (first, last, copies, split of one copy over a part).
# A device splits nothing further: None.
Split = tuple[tuple[int, int, int, Any], ...] | None


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to write `total` as a sum of so many positive whole numbers."""
    for bars in itertools.combinations(range(1, total), parts - 1):
        yield tuple(b - a for a, b in itertools.pairwise((0, *bars, total)))


def splits(first: int, last: int, counts: tuple[int, ...]) -> Iterator[Split]:
    """All splits of layers over a component with so many parts at each level, innermost first."""
    if not counts:
        yield None
        return
    for stages in range(1, min(last - first + 1, counts[-1]) + 1):
        for lengths in compositions(last - first + 1, stages):
            starts = list(itertools.accumulate(lengths, initial=first))
            spans = [(start, stop - 1) for start, stop in itertools.pairwise(starts)]
            for copies in compositions(counts[-1], stages):
                for inside in itertools.product(*(list(splits(*span, counts[:-1])) for span in spans)):
                    yield tuple((*span, n, part) for span, n, part in zip(spans, copies, inside, strict=True))


def compute(layers: list[LayerCost], first: int, last: int) -> float:
    return sum(y.forward_seconds + y.backward_seconds for y in layers[first : last + 1])


def weights(layers: list[LayerCost], first: int, last: int) -> int:
    return sum(y.parameter_bytes for y in layers[first : last + 1])


def paper_seconds(layers: list[LayerCost], split: Split, levels: tuple[Level, ...], span: tuple[int, int]) -> float:
    if split is None:
        return compute(layers, *span)
    bandwidth = levels[-1].bandwidth
    times = [2 * layers[first - 1].activation_bytes / bandwidth for first, _, _, _ in split[1:]]
    for first, last, m, inside in split:
        inner = paper_seconds(layers, inside, levels[:-1], (first, last))
        times.append(max(inner, 2 * (m - 1) * weights(layers, first, last) / bandwidth) / m)
    return max(times)


def released_seconds(layers: list[LayerCost], split: Split, levels: tuple[Level, ...], span: tuple[int, int]) -> float:
    if split is None:
        return compute(layers, *span)
    bandwidth = levels[-1].bandwidth
    times = []
    for place, (first, last, m, inside) in enumerate(split):
        exchange = 4 * (m - 1) * weights(layers, first, last) / (bandwidth * m)
        if place == 0 and len(levels) > 1:
            exchange /= levels[-2].count
        times.append((released_seconds(layers, inside, levels[:-1], (first, last)) + exchange) / m)
        if place > 0:
            times.append(2 * layers[first - 1].activation_bytes / (bandwidth * m))
            if last < len(layers) - 1:
                times.append(2 * layers[last].activation_bytes / (bandwidth * m))
    return max(times)


SECONDS = {"paper": paper_seconds, "released": released_seconds}


def flat(split: Split, span: tuple[int, int], copies: int = 1) -> list[tuple[int, int, int]]:
    """(first, last, replicas) of every stage."""
    if split is None:
        return [(*span, copies)]
    return [stage for first, last, n, inside in split for stage in flat(inside, (first, last), copies * n)]


def memories(layers: list[LayerCost], stages: list[tuple[int, int, int]], state_copies: float) -> list[float]:
    """Bytes of one device of each stage."""
    found = []
    for place, (first, last, replicas) in enumerate(stages):
        after = sum(r for _, _, r in stages[place:])
        versions = after // replicas + (after % replicas > 0)
        held = weights(layers, first, last)
        saved = sum(y.saved_bytes for y in layers[first : last + 1])
        found.append(versions * (held + saved) + state_copies * held)
    return found


def is_straight(split: Split) -> bool:
    return split is None or all(n == 1 and is_straight(inside) for _, _, n, inside in split)


def is_data_parallel(split: Split) -> bool:
    return split is None or (len(split) == 1 and is_data_parallel(split[0][3]))


OF_SHAPE = {"any": lambda split: True, "straight": is_straight, "data parallel": is_data_parallel}


def instance(rng: random.Random, counts: tuple[int, ...], most: int) -> tuple[list[LayerCost], Cluster]:
    """Layers whose compute, weights and messages matter alike: which of them binds changes from draw to draw."""

    def size(scale: float) -> int:
        return 0 if rng.random() < 0.1 else round(scale * 10 ** rng.uniform(-1, 1))

    layers = [
        LayerCost(
            f"layer{n}",
            0.0 if rng.random() < 0.05 else 10 ** rng.uniform(-3, -1),
            10 ** rng.uniform(-3, -1),
            size(2e7),
            size(3e7),
            size(1e7),
        )
        for n in range(rng.randint(1, most))
    ]
    bandwidths = sorted((10 ** rng.uniform(8, 10) for _ in counts), reverse=rng.random() < 0.8)
    return layers, Cluster(tuple(Level(*level) for level in zip(counts, bandwidths, strict=True)))


CLUSTERS = [
    *(((n,), 8) for n in (1, 2, 3, 4)),
    *((counts, 8) for counts in ((2, 2), (2, 1), (1, 3), (4, 1), (1, 4))),
    *((counts, 5) for counts in ((3, 2), (2, 3), (3, 3), (2, 2, 2))),
]


def check(found: Partition, layers: list[LayerCost], every: list[Any], state_copies: float) -> None:
    """The split found is one of those that there are, costs what it says, and says what it keeps."""
    stages = [(s.first, s.last, s.replicas) for s in found.stages]
    same = [seconds for seconds, flattened, _ in every if flattened == stages]
    assert same and min(same) == pytest.approx(found.seconds, rel=1e-9)
    kept = memories(layers, stages, state_copies)
    assert [s.memory_bytes for s in found.stages] == pytest.approx(kept, rel=1e-12)
    assert found.memory_bytes == max(s.memory_bytes for s in found.stages)
    slowest = max(max(s.seconds, s.send_seconds) for s in found.stages)
    assert slowest == pytest.approx(found.seconds, rel=1e-9)
    assert found.stages[-1].send_seconds == 0


@pytest.mark.parametrize("objective", list(SECONDS))
@pytest.mark.parametrize("counts, most", CLUSTERS)
def test_equals_brute_force_with_and_without_a_memory_limit(counts: tuple[int, ...], most: int, objective: str) -> None:
    rng = random.Random(f"{counts}")
    for _ in range(16):
        layers, cluster = instance(rng, counts, most)
        state_copies = rng.choice((0, 0, 3))
        span = (0, len(layers) - 1)
        every = []
        for split in splits(*span, counts):
            stages = flat(split, span)
            seconds = SECONDS[objective](layers, split, cluster.levels, span)
            every.append((seconds, stages, max(memories(layers, stages, state_copies))))
        check(free := partition(layers, cluster, objective, None, state_copies), layers, every, state_copies)
        assert free.seconds == pytest.approx(min(seconds for seconds, _, _ in every), rel=1e-9)
        needs = sorted({need for _, _, need in every})
        for limit in {needs[0], rng.choice(needs), rng.choice(needs[: len(needs) // 2 + 1])}:
            if limit < 1:
                continue
            best = min(seconds for seconds, _, need in every if need <= limit)
            tight = partition(layers, cluster, objective, int(limit), state_copies)
            check(tight, layers, every, state_copies)
            assert tight.seconds == pytest.approx(best, rel=1e-9)
            assert tight.memory_bytes <= limit
        if needs[0] > 8192:
            with pytest.raises(PlanError, match=r", 4\.00 KiB more\. Use"):
                partition(layers, cluster, objective, int(needs[0]) - 4096, state_copies)


@pytest.mark.parametrize("objective", list(SECONDS))
@pytest.mark.parametrize("shape", ["straight", "data parallel"])
@pytest.mark.parametrize("counts", [(2,), (4,), (2, 2), (1, 3)])
def test_shapes_equal_brute_force(counts: tuple[int, ...], shape: Shape, objective: str) -> None:
    rng = random.Random(7)
    compared = 0
    for _ in range(8):
        layers, cluster = instance(rng, counts, 8)
        span = (0, len(layers) - 1)
        fitting = [
            SECONDS[objective](layers, split, cluster.levels, span)
            for split in splits(*span, counts)
            if OF_SHAPE[shape](split)
        ]
        if not fitting:
            with pytest.raises(PlanError, match="without replicas"):
                partition(layers, cluster, objective, shape=shape)
            continue
        compared += 1
        found = partition(layers, cluster, objective, shape=shape)
        assert found.seconds == pytest.approx(min(fitting), rel=1e-9)
        assert set(found.replicas) == {1} if shape == "straight" else found.replicas == (cluster.devices,)
    assert compared >= 4


def test_the_splits_of_the_brute_force_are_all_there_are() -> None:
    """By hand: Σ C(7, p-1)·C(3, p-1) on four devices; of two machines with two each, one has a split for each layer."""
    assert len(list(splits(0, 7, (4,)))) == 1 + 7 * 3 + 21 * 3 + 35
    assert len(list(splits(0, 7, (2, 2)))) == 8 + sum(a * (8 - a) for a in range(1, 8))


def vgg16(images: int = 64, flops: float = 4e12) -> list[LayerCost]:
    """VGG-16 by its shapes at 224 x 224 in fp32; a pooling belongs to the convolution before it.

    Backward is twice forward; the default speed is that of the paper's generation of GPUs.
    """
    layers, channels, side = [], 3, 224

    def add(name: str, macs: int, output: int, saved: int, parameters: int) -> None:
        forward = 2 * macs * images / flops
        layers.append(LayerCost(name, forward, 2 * forward, 4 * images * output, 4 * images * saved, 4 * parameters))

    for block, (width, count) in enumerate(((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)), 1):
        for n in range(1, count + 1):
            kernel, saved = 9 * channels * width, width * side * side
            add(f"conv{block}_{n}", kernel * side**2, saved // (4 if n == count else 1), saved, kernel + width)
            channels = width
        side //= 2
    features = channels * side * side
    for n, width in enumerate((4096, 4096, 1000), 6):
        add(f"fc{n}", features * width, width, width, features * width + width)
        features = width
    return layers


def test_vgg16_has_its_published_size() -> None:
    layers = vgg16(images=1, flops=2)
    assert weights(layers, 0, 15) == 4 * 138_357_544
    assert weights(layers, 13, 15) > 0.89 * weights(layers, 0, 15)
    assert sum(y.forward_seconds for y in layers) == pytest.approx(15.47e9, rel=1e-3)


@pytest.mark.parametrize("workers", [4, 8, 16])
def test_vgg16_gets_replicated_convolutions_and_one_dense_stage(workers: int) -> None:
    """The paper reports 15-1 on 16 workers."""
    layers, cluster = vgg16(), Cluster.flat(workers, 10e9 / 8)
    found = partition(layers, cluster)
    assert found.replicas == (workers - 1, 1)
    assert all(y.name.startswith("conv") for y in layers[: found.stages[0].last + 1])
    assert found.throughput > 1.1 * partition(layers, cluster, shape="data parallel").throughput
    assert found.throughput > 1.1 * partition(layers, cluster, shape="straight").throughput


@pytest.mark.parametrize("workers", [4, 8, 16])
@pytest.mark.parametrize("flops", [4e12, 7e12, 12e12])
@pytest.mark.parametrize("objective", list(SECONDS))
def test_vgg16_at_other_speeds(objective: str, flops: float, workers: int) -> None:
    layers = vgg16(flops=flops)
    found = partition(layers, Cluster.flat(workers, 10e9 / 8), objective)
    assert found.stages[-1].first <= 13 and found.replicas[-1] == 1  # all three dense layers
    assert max(found.replicas[:-1]) > 1


def transformer(blocks: int = 12) -> list[LayerCost]:
    """Equal blocks: 30 ms, 50 MB of weights, messages of 8 MB."""
    return [LayerCost(f"block{n}", 0.01, 0.02, 8 * 10**6, 10**8, 5 * 10**7) for n in range(blocks)]


@pytest.mark.parametrize("objective", list(SECONDS))
def test_a_uniform_transformer_is_data_parallel_or_straight_as_the_links_are(objective: str) -> None:
    fast = partition(transformer(7), Cluster.flat(4, 1e12), objective)
    slow = partition(transformer(12), Cluster.flat(4, 1e9), objective)
    assert fast.replicas == (4,)
    assert [(s.first, s.last, s.replicas) for s in slow.stages] == [(3 * n, 3 * n + 2, 1) for n in range(4)]
    assert [s.versions for s in slow.stages] == [4, 3, 2, 1]
    assert slow.seconds == pytest.approx(0.09)


def test_memory_turns_data_parallel_into_stages() -> None:
    """Of 12 blocks, one copy holds 1.8 GB; three of them, with the four versions of a first stage, as much."""
    cluster = Cluster.flat(4, 1e12)
    assert partition(transformer(), cluster, memory=1_800_000_000).replicas == (4,)
    found = partition(transformer(), cluster, memory=1_799_999_999)
    assert len(found.stages) > 1
    assert found.memory_bytes <= 1_799_999_999
    assert found == partition(transformer(), Cluster.flat(4, 1e12, 1_799_999_999))


def test_the_levels_of_a_cluster_bind_where_they_are() -> None:
    """Machines with fast links inside and slow ones between them: replicas inside, stages between."""
    found = partition(transformer(), Cluster((Level(4, 1e12), Level(2, 1e9))))
    assert found.replicas == (4, 4)
    assert found.stages[0].last == 5
    assert found.seconds == pytest.approx(6 * 0.03 / 4)


@pytest.mark.parametrize("objective", list(SECONDS))
def test_more_bandwidth_is_never_slower(objective: str) -> None:
    rng = random.Random(5)
    changed = 0
    for _ in range(40):
        layers, cluster = instance(rng, rng.choice(((4,), (2, 2), (3, 2))), 8)
        before = partition(layers, cluster, objective).seconds
        for k, level in enumerate(cluster.levels):
            faster = list(cluster.levels)
            faster[k] = Level(level.count, level.bandwidth * rng.uniform(1, 4))
            after = partition(layers, Cluster(tuple(faster)), objective).seconds
            assert after <= before * (1 + 1e-9)
            changed += after < before * (1 - 1e-9)
    assert changed > 10


def test_fifty_layers_on_sixteen_workers() -> None:
    """Big enough that a slower algorithm than O(N³m²) would not end; the levels agree where the links are alike."""
    layers = [dataclasses.replace(y, forward_seconds=0.001 * (1 + n % 7)) for n, y in enumerate(transformer(50))]
    one = partition(layers, Cluster.flat(16, 1e10), memory=4 * 10**9)
    two = partition(layers, Cluster((Level(4, 1e10), Level(4, 1e10))), memory=4 * 10**9)
    assert sum(one.replicas) == sum(two.replicas) == 16
    assert one.seconds >= compute(layers, 0, 49) / 16
    assert max(one.memory_bytes, two.memory_bytes) <= 4 * 10**9


def test_throughput_is_one_over_the_seconds() -> None:
    found = partition(transformer(4), Cluster.flat(1, 1.0))
    assert found.throughput == pytest.approx(1 / 0.12)
    free = [LayerCost("nothing", 0, 0, 0, 0, 0)]
    assert partition(free, Cluster.flat(1, 1.0)).throughput == float("inf")


@pytest.mark.parametrize(
    "change, said",
    [
        ({"layers": []}, "no layers"),
        ({"objective": "best"}, "no objective 'best'; choose one of paper, released"),
        ({"shape": "round"}, "no shape 'round'; choose one of any, straight, data parallel"),
        ({"layers": transformer(3), "shape": "straight"}, "3 layers cannot make 4 stages"),
        ({"layers": [LayerCost("bad", -1.0, 0, 0, 0, 0)]}, "bad has forward_seconds = -1.0"),
        ({"layers": [LayerCost("bad", 0, float("nan"), 0, 0, 0)]}, "bad has backward_seconds = nan"),
        ({"memory": 100_000_000}, "12 layers over 4 devices fits into 95.37 MiB per device: the leanest needs"),
    ],
)
def test_what_cannot_be_split_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError) as caught:
        partition(**{"layers": transformer(), "cluster": Cluster.flat(4, 1e9)} | change)
    assert said in str(caught.value)


def test_every_objective_has_its_brute_force() -> None:
    assert list(OBJECTIVES) == list(SECONDS)
