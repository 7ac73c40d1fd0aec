"""Graphs of layers: the partitioner against every split of small ones, and orders, chains and files of profiles."""

import dataclasses
import itertools
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from zeroshard.errors import PlanError
from zeroshard.pipeline.partition import states
from zeroshard.pipeline.partition.cluster import Cluster, Level
from zeroshard.pipeline.partition.graph import GraphProfile, LayerGraph
from zeroshard.pipeline.partition.pipedream import OBJECTIVES, Partition, least_memory, partition
from zeroshard.pipeline.partition.profile import LayerCost
from zeroshard.pipeline.partition.reading import read_profile
from zeroshard.pipeline.partition.simulated import fastest, leanest

# A split of layers over a component: its stages in order, each (layers, copies, split of one copy over a part).
Split = tuple[tuple[frozenset[int], int, Any], ...] | None


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    for bars in itertools.combinations(range(1, total), parts - 1):
        yield tuple(b - a for a, b in itertools.pairwise((0, *bars, total)))


def splits(graph: LayerGraph, layers: frozenset[int], counts: tuple[int, ...]) -> Iterator[Split]:
    """All ways to give each layer a stage, such that no edge goes to an earlier one, and each stage its copies."""
    if not counts:
        yield None
        return
    members = sorted(layers)
    for stages in range(1, min(len(members), counts[-1]) + 1):
        for numbers in itertools.product(range(stages), repeat=len(members)):
            at = dict(zip(members, numbers, strict=True))
            if len(set(numbers)) < stages or any(at[a] > at[b] for a, b in graph.edges if a in at and b in at):
                continue
            parts = [frozenset(n for n in members if at[n] == stage) for stage in range(stages)]
            for copies in compositions(counts[-1], stages):
                for inside in itertools.product(*(list(splits(graph, part, counts[:-1])) for part in parts)):
                    yield tuple(zip(parts, copies, inside, strict=True))


def crossing(graph: LayerGraph, before: frozenset[int]) -> int:
    """Bytes of the outputs that layers behind a cut read of those before it."""
    read = {a for a, b in graph.edges if a in before and b not in before}
    return sum(graph.layers[n].activation_bytes for n in read)


def seconds(
    graph: LayerGraph,
    split: Split,
    levels: tuple[Level, ...],
    layers: frozenset[int],
    before: frozenset[int],
    name: str,
) -> float:
    """Of the slowest stage or message, by the formulas of `partition`'s docstring."""
    if split is None:
        return sum(graph.layers[n].forward_seconds + graph.layers[n].backward_seconds for n in layers)
    bandwidth, times = levels[-1].bandwidth, []
    for place, (part, m, inside) in enumerate(split):
        inner = seconds(graph, inside, levels[:-1], part, before, name)
        weights = sum(graph.layers[n].parameter_bytes for n in part)
        received, before = crossing(graph, before), before | part
        sent = crossing(graph, before)
        if name == "paper":
            times.append(max(inner, 2 * (m - 1) * weights / bandwidth) / m)
            times.append(2 * received / bandwidth if place else 0)
        else:
            exchange = 4 * (m - 1) * weights / (bandwidth * m)
            if place == 0 and len(levels) > 1:
                exchange /= levels[-2].count
            times.append((inner + exchange) / m)
            times += [2 * received / (bandwidth * m), 2 * sent / (bandwidth * m)] if place else []
    return max(times)


def flat(split: Split, layers: frozenset[int], copies: int = 1) -> list[tuple[frozenset[int], int]]:
    if split is None:
        return [(layers, copies)]
    return [stage for part, n, inside in split for stage in flat(inside, part, copies * n)]


def need(graph: LayerGraph, stages: Sequence[tuple[frozenset[int], int]], state_copies: float) -> float:
    """Bytes of the device that needs most."""
    found = []
    for place, (part, replicas) in enumerate(stages):
        versions = -(-sum(r for _, r in stages[place:]) // replicas)
        weights = sum(graph.layers[n].parameter_bytes for n in part)
        saved = sum(graph.layers[n].saved_bytes for n in part)
        found.append(versions * (weights + saved) + state_copies * weights)
    return max(found)


def instance(rng: random.Random, most: int) -> LayerGraph:
    """Layers in any order, edges among them, some of which skip; a few layers cost nothing, as views do."""

    def size(scale: float) -> int:
        return 0 if rng.random() < 0.1 else round(scale * 10 ** rng.uniform(-1, 1))

    count = rng.randint(2, most)
    layers = [
        LayerCost(f"n{n}", 10 ** rng.uniform(-3, -1), 10 ** rng.uniform(-3, -1), size(2e7), size(3e7), size(1e7))
        if rng.random() < 0.85
        else LayerCost(f"n{n}", 0.0, 0.0, 0, 0, 0)
        for n in range(count)
    ]
    order = rng.sample(range(count), count)
    edges = [
        (order[a], order[b]) for a in range(count) for b in range(a + 1, count) if rng.random() < 1.2 / (b - a + 1)
    ]
    return LayerGraph(tuple(layers), tuple(edges))


def stages_of(graph: LayerGraph, found: Partition) -> list[tuple[frozenset[int], int]]:
    place = {layer.name: n for n, layer in enumerate(graph.layers)}
    return [
        (frozenset(place[y.name] for y in found.layers[s.first : s.last + 1]), s.replicas) for s in found.stages
    ]  # fmt: skip


def has_idle_stage(graph: LayerGraph, stages: list[tuple[frozenset[int], int]]) -> bool:
    return any(not any(any(costs(graph.layers[n])) for n in part) for part, _ in stages)


def costs(layer: LayerCost) -> tuple[float, ...]:
    return dataclasses.astuple(layer)[1:]


@pytest.mark.parametrize("free_first", [False, True])
@pytest.mark.parametrize("name", list(OBJECTIVES))
@pytest.mark.parametrize("counts, most", [((1,), 6), ((2,), 6), ((3,), 6), ((2, 2), 5)])
def test_equals_every_split_with_and_without_a_memory_limit(
    counts: tuple[int, ...], most: int, name: str, free_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With free layers in the first set that can have them: every split in which no stage has nothing else."""
    if free_first:
        monkeypatch.setattr(states, "FEW_STATES", 0)
    rng = random.Random(f"{counts}")
    for _ in range(12):
        graph = instance(rng, most)
        levels = tuple(Level(count, 10 ** rng.uniform(8, 10)) for count in counts)
        cluster, copies = Cluster(levels), rng.choice((0, 3))
        everything = frozenset(range(len(graph.layers)))
        every = []
        for split in splits(graph, everything, counts):
            stages = flat(split, everything)
            if free_first and has_idle_stage(graph, stages) and len(stages) > 1:
                continue
            time = seconds(graph, split, levels, everything, frozenset(), name)
            every.append((time, stages, need(graph, stages, copies)))
        found = partition(graph, cluster, name, None, copies)
        assert found.seconds == pytest.approx(min(time for time, _, _ in every), rel=1e-9)
        assert sorted(y.name for y in found.layers) == sorted(y.name for y in graph.layers)
        stages = stages_of(graph, found)
        assert min(time for time, others, _ in every if others == stages) == pytest.approx(found.seconds, rel=1e-9)
        assert found.memory_bytes == pytest.approx(need(graph, stages, copies))
        least = min(kept for _, _, kept in every)
        assert least_memory(graph, cluster, copies) == pytest.approx(least, abs=1)
        limit = rng.choice(sorted(kept for _, _, kept in every)[: len(every) // 2 + 1])
        if limit >= 1:
            tight = partition(graph, cluster, name, int(limit), copies)
            assert tight.seconds == pytest.approx(min(t for t, _, kept in every if kept <= limit), rel=1e-9)
            assert tight.memory_bytes <= limit
        if least > 8192:
            with pytest.raises(PlanError, match=r", 4\.00 KiB more\. Use"):
                partition(graph, cluster, name, int(least) - 4096, copies)


@pytest.mark.parametrize("name", list(OBJECTIVES))
@pytest.mark.parametrize("counts", [(4,), (2, 2), (3, 2)])
def test_a_chain_is_split_alike_as_layers_and_as_a_graph(counts: tuple[int, ...], name: str) -> None:
    rng = random.Random(3)
    for _ in range(6):
        layers = tuple(
            LayerCost(f"n{n}", rng.random(), rng.random(), *(rng.randrange(1, 10**9) for _ in range(3)))
            for n in range(rng.randint(1, 9))
        )
        graph = LayerGraph(layers, tuple(itertools.pairwise(range(len(layers)))))
        cluster = Cluster(tuple(Level(count, 10 ** rng.uniform(8, 10)) for count in counts))
        as_graph, as_layers = partition(graph, cluster, name, None, 3), partition(layers, cluster, name, None, 3)
        assert as_graph == as_layers
        assert as_graph.layers == layers


def test_the_order_puts_the_layers_of_each_stage_side_by_side() -> None:
    """Two towers, each fast inside and slow to send, that meet at the end: a stage is a tower, not half of both."""
    layers = [LayerCost(f"{tower}{n}", 0.1, 0.2, 10**9, 0, 1) for n in range(3) for tower in "ab"]
    ends = [LayerCost("head", 0.0, 0.0, 1, 1, 1)]
    small = [LayerCost(f"{tower}out", 0.0, 0.0, 10, 0, 0) for tower in "ab"]
    edges = [*((n, n + 2) for n in range(4)), (4, 6), (5, 7), (6, 8), (7, 8)]
    graph = LayerGraph((*layers, *small, *ends), tuple(edges))
    found = partition(graph, Cluster.flat(2, 1e9), shape="straight")
    assert found.seconds == pytest.approx(0.9)
    names = [[y.name[0] for y in found.layers[s.first : s.last + 1] if y.name != "head"] for s in found.stages]
    assert [set(each) for each in names] in ([{"a"}, {"b"}], [{"b"}, {"a"}])
    assert found.layers[found.stages[0].last].activation_bytes == 10  # all that crosses the cut


def test_an_output_that_skips_crosses_every_cut_on_its_way_once() -> None:
    layers = [LayerCost(f"n{n}", 1, 1, 10**n, 0, 0) for n in range(4)]
    graph = LayerGraph(tuple(layers), ((0, 1), (0, 2), (0, 3), (1, 2), (2, 3)))
    assert [y.activation_bytes for y in graph.chain([0, 1, 2, 3])] == [1, 11, 101, 1000]


def test_many_branches_side_by_side_are_taken_whole_and_too_many_refused() -> None:
    def parallel(branches: int, length: int) -> LayerGraph:
        layers = [LayerCost("in", 1, 1, 1, 1, 1)]
        edges = []
        for branch in range(branches):
            for n in range(length):
                edges.append((len(layers) - 1 if n else 0, len(layers)))
                layers.append(LayerCost(f"{branch}.{n}", 1, 1, 1, 1, 1))
        edges += [(1 + branch * length + length - 1, len(layers)) for branch in range(branches)]
        return LayerGraph((*layers, LayerCost("out", 1, 1, 1, 1, 1)), tuple(edges))

    assert not partition(parallel(3, 4), Cluster.flat(2, 1e9)).merged
    found = partition(parallel(8, 3), Cluster.flat(2, 1e9), shape="straight")
    assert found.merged and len(found.layers) == 26
    assert found.seconds == pytest.approx(2 * 13)
    with pytest.raises(PlanError, match="more than 1500 places for a cut, even with each branch taken as one layer"):
        partition(parallel(16, 1), Cluster.flat(2, 1e9))


def test_the_leanest_split_is_the_fastest_of_those_with_the_least_memory() -> None:
    rng = random.Random(11)
    for _ in range(4):
        graph, cluster = instance(rng, 6), Cluster.flat(3, 1e9)
        found = leanest(graph, cluster, state_copies=3)
        assert found.objective == "memory"
        assert (
            found.memory_bytes
            == least_memory(graph, cluster, 3)
            <= fastest(graph, cluster, state_copies=3).memory_bytes
        )
        assert found.seconds == fastest(graph, cluster, found.memory_bytes, 3).seconds


def test_a_graph_is_checked() -> None:
    layers = tuple(LayerCost(f"n{n}", 1, 1, 1, 1, 1) for n in range(3))
    with pytest.raises(PlanError, match="The edges of n0, n1, n2 make a circle"):
        LayerGraph(layers, ((0, 1), (1, 2), (2, 0)))
    with pytest.raises(PlanError, match=r"The edge \(0, 3\) names layer 3 of 3; number layers from 0 to 2"):
        LayerGraph(layers, ((0, 3),))
    with pytest.raises(PlanError, match="no layers"):
        partition(LayerGraph((), ()), Cluster.flat(1, 1.0))
    free = LayerGraph(tuple(LayerCost(f"n{n}", 0, 0, 0, 0, 0) for n in range(2)), ((0, 1),))
    assert partition(free, Cluster.flat(2, 1.0)).seconds == 0


def test_a_profile_of_a_graph_is_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    profile = GraphProfile("toy", "a machine", 8, instance(random.Random(0), 6))
    profile.save(path)
    assert read_profile(path) == profile
    content = json.loads(path.read_text())
    for change, said in (
        ({"edges": [["n0", "nowhere"]]}, r"the edge \['n0', 'nowhere'\] is no pair of the names of layers"),
        ({"edges": [["n0", "n1"], ["n1", "n0"]]}, "make a circle"),
        ({"layers": [content["layers"][0]] * 2, "edges": []}, "'n0' names two layers"),
        ({"layers": []}, "it has no layers"),
        ({"rows": 3}, "stands where"),
    ):
        path.write_text(json.dumps(content | change))
        with pytest.raises(Exception, match=said):
            read_profile(path)
