"""The published profiles of PipeDream, split by zeroshard and by the authors' own optimizer, under its cost model.

    python benchmarks/partition_graphs.py [--original DIR] [--json FILE]

AlexNet, VGG-16, ResNet-50, SqueezeNet and GNMT as the authors measured them (`pipedream_profiles/`, from
github.com/msr-fiddle/pipedream at 7db6a1c, MIT licence), on 4 and 8 workers at 10 Gb/s and on 4 machines of 4 workers,
at 100 Gb/s inside of a machine and 10 Gb/s between them. Nothing is timed but the optimizers.

- original: seconds per microbatch that the authors' `optimizer_graph_hierarchical.py` prints for its split, with
  `--activation_compression_ratio 1`;
- ours: those of our split under the same cost model (objective "released");
- clock: both splits, and the split of objective "simulated", under the simulator of PipeDream's schedule.

The original's splits are kept in `pipedream_profiles/original.json`; with `--original`, a checkout of its repository,
its program runs anew and the file is written. It takes minutes for ResNet-50 on 16 workers.
"""

import argparse
import contextlib
import importlib
import io
import json
import re
import sys
import time
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zeroshard.pipeline.partition.cluster import Cluster, Level
from zeroshard.pipeline.partition.graph import GraphProfile, LayerGraph
from zeroshard.pipeline.partition.pipedream import Partition, PartitionStage, partition
from zeroshard.pipeline.partition.reading import read_profile
from zeroshard.pipeline.partition.simulated import fastest, timed

PROFILES = Path(__file__).parent / "pipedream_profiles"
ORIGINAL = PROFILES / "original.json"
MODELS = {
    "AlexNet": "alexnet",
    "VGG-16": "vgg16",
    "ResNet-50": "resnet50",
    "SqueezeNet": "squeezenet1_0",
    "GNMT": "gnmt",
}
GBIT = 1e9 / 8
CLUSTERS = {
    "4": Cluster.flat(4, 10 * GBIT),
    "8": Cluster.flat(8, 10 * GBIT),
    "4 x 4": Cluster((Level(4, 100 * GBIT), Level(4, 10 * GBIT))),
}


def graph_of(model: str) -> LayerGraph:
    """The published profile."""
    profile = read_profile(PROFILES / f"{MODELS[model]}.txt")
    assert isinstance(profile, GraphProfile)
    return profile.graph


class Original:
    """The authors' optimizer from a checkout of their repository."""

    def __init__(self, folder: Path) -> None:
        sys.setrecursionlimit(10_000)  # its sort of the states is recursive
        sys.modules.setdefault("graphviz", types.ModuleType("graphviz"))  # it draws, which is not asked for here
        sys.path[:0] = [str(folder / "optimizer"), str(folder)]
        self.program = importlib.import_module("optimizer_graph_hierarchical")
        self.graphs = importlib.import_module("graph.graph")
        settings = {"use_memory_constraint": False, "straight_pipeline": False, "use_fewer_machines": False}
        for name, value in (settings | {"memory_size": 0.0, "activation_compression_ratio": 1.0}).items():
            setattr(self.program, name, value)

    def split(self, path: Path, cluster: Cluster) -> dict[str, Any]:
        """Its seconds, and its stages as (names of the last nodes, replicas)."""
        states: list[Any] = []
        calls: list[list[tuple[int, int, int]]] = []
        sort, analyse = self.graphs.Graph.topological_sort, self.program.analyze_partitioning

        def sorted_states(graph: Any) -> Any:
            states[:] = sort(graph)
            return states[:]

        def analysed(*words: Any) -> Any:
            with contextlib.redirect_stdout(io.StringIO()) as said:
                found = analyse(*words)
            rows = re.findall(r"^\((\d+), (\d+)\) \S+ (\d+)$", said.getvalue(), re.MULTILINE)
            calls.append([(int(first), int(last), int(copies)) for first, last, copies in rows])
            return found

        self.graphs.Graph.topological_sort, self.program.analyze_partitioning = sorted_states, analysed
        counts, rates = [y.count for y in cluster.levels], [y.bandwidth for y in cluster.levels]
        began = time.process_time()
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                seconds, _ = self.program.main(
                    counts, str(path), rates, 0.0, False, False, False, 1.0, None, True, True
                )
        finally:
            self.graphs.Graph.topological_sort, self.program.analyze_partitioning = sort, analyse
        took = time.process_time() - began
        stages = calls[0]  # of the outermost level; then those inside of each, in turn
        if len(cluster.levels) > 1:
            stages = [
                (first, last, copies * n)
                for (_, _, copies), inside in zip(calls[0], calls[1:], strict=True)
                for first, last, n in inside
            ]
        kept = [[list(states[last - 1].antichain), copies] for _, last, copies in stages]
        return {"seconds": seconds, "states": len(states), "stages": kept, "cpu_seconds": round(took, 2)}


def as_partition(graph: LayerGraph, stages: Sequence[tuple[Sequence[str], int]]) -> Partition:
    """The original's split as one of ours: a stage has all that its last nodes need and no earlier stage has."""
    place = {layer.name.partition(" ")[0]: n for n, layer in enumerate(graph.layers)}
    needs: dict[int, set[int]] = {n: set() for n in range(len(graph.layers))}
    for layer in graph.order():
        for source, reader in graph.edges:
            if reader == layer:
                needs[layer] |= {source} | needs[source]
    order: list[int] = []
    found = []
    for ends, copies in stages:
        nodes = {place[end] for end in ends}.union(*(needs[place[end]] for end in ends)).difference(order)
        found.append(PartitionStage(len(order), len(order) + len(nodes) - 1, copies, 0.0, 0.0, 0.0))
        order += [layer for layer in graph.order() if layer in nodes]
    assert len(order) == len(graph.layers)
    return Partition(tuple(found), 0.0, "original", graph.chain(order))


def rows_of(models: Sequence[str], known: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row for each model and cluster."""
    rows = []
    for model in models:
        graph = graph_of(model)
        for name, cluster in CLUSTERS.items():
            theirs = known[model][name]
            began = time.process_time()
            ours = partition(graph, cluster, "released")
            took = time.process_time() - began
            simulated, other = fastest(graph, cluster), as_partition(graph, theirs["stages"])
            clock = {
                "original": timed(other.layers, other, cluster).seconds,
                "ours": timed(ours.layers, ours, cluster).seconds,
                "simulated": simulated.seconds,
            }
            rows.append(
                {
                    "model": model,
                    "workers": name,
                    "layers": len(graph.layers),
                    "original": theirs["seconds"],
                    "ours": ours.seconds,
                    "ratio": ours.seconds / theirs["seconds"],
                    "replicas": {
                        "original": shown(other.replicas),
                        "ours": shown(ours.replicas),
                        "simulated": shown(simulated.replicas),
                    },
                    "clock": clock,
                    "cpu_seconds": {"original": theirs["cpu_seconds"], "ours": round(took, 2)},
                }
            )
    return rows


def shown(replicas: Sequence[int]) -> str:
    """Replicas as the paper writes them."""
    return "-".join(map(str, replicas))


def main() -> None:
    """Print the table; end with 1 where our split is slower than the original's under its cost model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--original", type=Path, help="a checkout of github.com/msr-fiddle/pipedream")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.original:
        program = Original(options.original)
        found = {
            model: {
                name: program.split(PROFILES / f"{MODELS[model]}.txt", cluster) for name, cluster in CLUSTERS.items()
            }
            for model in options.models
        }
        known = (json.loads(ORIGINAL.read_text()) if ORIGINAL.exists() else {}) | found
        ORIGINAL.write_text(json.dumps(known, indent=1) + "\n")
    rows = rows_of(options.models, json.loads(ORIGINAL.read_text()))
    print("ms per microbatch       the authors' cost model            on the clock")
    print("model       workers   original      ours   ratio   original     ours  simulated   original's | our replicas")
    for row in rows:
        clock = row["clock"]
        print(
            f"{row['model']:11} {row['workers']:7} {1e3 * row['original']:10.2f} {1e3 * row['ours']:9.2f} "
            f"{row['ratio']:7.4f} {1e3 * clock['original']:10.2f} {1e3 * clock['ours']:8.2f} "
            f"{1e3 * clock['simulated']:10.2f}   {row['replicas']['original']} | {row['replicas']['ours']}"
        )
    if options.json:
        options.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    if any(row["ratio"] > 1 + 1e-9 for row in rows):
        sys.exit("A split of ours is slower than the original's under its own cost model.")


if __name__ == "__main__":
    main()
