"""Graphs of layers with branches and skips, and their profiles (PipeDream, SOSP 2019, section 3.1, and its program).

A pipeline is cut where no edge goes backwards: before a cut stands a set of layers with all that they read. Each output
of theirs that a layer behind the cut reads crosses it once, and an output that skips a stage crosses both of its cuts.
Such sets, each inside of the next, put the layers in an order in which every stage is a range: the chain of
`LayerGraph.chain`. A model whose blocks follow that order is cut between them.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from heapq import heapify, heappop, heappush
from pathlib import Path
from typing import Any

from zeroshard.errors import DataError, PlanError
from zeroshard.pipeline.partition.profile import LayerCost, check_layers, facts


@dataclass(frozen=True, slots=True)
class LayerGraph:
    """Layers and the edges between them; the `activation_bytes` of a layer are its output, the same for all readers.

    Attributes:
        edges: pairs of positions in `layers`: (the layer that computes an output, a layer that reads it).

    Raises:
        PlanError: an edge of no layer, or a circle.
    """

    layers: tuple[LayerCost, ...]
    edges: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        for edge in self.edges:
            for end in edge:
                if not 0 <= end < len(self.layers):
                    raise PlanError(
                        f"The edge {edge} names layer {end} of {len(self.layers)}; number layers from 0 to "
                        f"{len(self.layers) - 1}."
                    )
        self.order()

    def readers(self) -> list[set[int]]:
        """The layers that read each layer's output."""
        found: list[set[int]] = [set() for _ in self.layers]
        for source, reader in self.edges:
            found[source].add(reader)
        return found

    def order(self) -> list[int]:
        """An order in which each layer follows all that it reads; of the layers that could be next, the first as given.

        Raises:
            PlanError: a circle.
        """
        readers, missing = self.readers(), [0] * len(self.layers)
        for each in readers:
            for reader in each:
                missing[reader] += 1
        ready = [layer for layer, count in enumerate(missing) if not count]
        heapify(ready)
        found: list[int] = []
        while ready:
            found.append(heappop(ready))
            for reader in readers[found[-1]]:
                missing[reader] -= 1
                if not missing[reader]:
                    heappush(ready, reader)
        if len(found) < len(self.layers):
            names = [layer.name for layer, count in zip(self.layers, missing, strict=True) if count]
            raise PlanError(
                f"The edges of {', '.join(names[:4])}{' and others' if len(names) > 4 else ''} make a circle; a layer "
                f"reads only outputs of layers before it."
            )
        return found

    def chain(self, order: Sequence[int]) -> tuple[LayerCost, ...]:
        """The layers in this order, each with the bytes that cross a cut behind it as its `activation_bytes`."""
        place = {layer: n for n, layer in enumerate(order)}
        ends = [max((place[reader] for reader in each), default=-1) for each in self.readers()]
        open_until: list[tuple[int, int]] = []  # (place of the last reader, bytes) of the outputs that cross
        found = []
        for n, layer in enumerate(order):
            open_until.append((ends[layer], self.layers[layer].activation_bytes))
            open_until = [each for each in open_until if each[0] > n]
            found.append(replace(self.layers[layer], activation_bytes=sum(nbytes for _, nbytes in open_until)))
        if found and not open_until:  # a cut behind the last layer is none; its output is the model's
            found[-1] = replace(found[-1], activation_bytes=self.layers[order[-1]].activation_bytes)
        return tuple(found)


@dataclass(frozen=True, slots=True)
class GraphProfile:
    """The costs of the layers of a graph, for one microbatch, and the machine of the measurement."""

    model: str
    machine: str
    microbatch_rows: int
    graph: LayerGraph

    def save(self, path: Path) -> None:
        """Write it as JSON: as `Profile.save`, with `edges`, pairs of names.

        Raises:
            DataError: the file cannot be written.
        """
        names = [layer.name for layer in self.graph.layers]
        content = {
            "model": self.model,
            "machine": self.machine,
            "microbatch_rows": self.microbatch_rows,
            "layers": [asdict(layer) for layer in self.graph.layers],
            "edges": [[names[source], names[reader]] for source, reader in self.graph.edges],
        }
        try:
            path.write_text(json.dumps(content, indent=1) + "\n")
        except OSError as error:
            raise DataError(
                f"The profile {path} cannot be written ({error.strerror}); name a file that can be written."
            ) from error

    @classmethod
    def parse(cls, content: dict[str, Any]) -> "GraphProfile":
        """From the content of a file of `save`.

        Raises:
            ValueError: no profile of a graph.
        """
        names = ("model", "machine", "microbatch_rows", "layers", "edges")
        content = facts(names, content)
        layers = [facts(LayerCost, layer) for layer in content["layers"]]
        check_layers(layers)
        costs = tuple(LayerCost(**layer) for layer in layers)
        graph = LayerGraph(costs, edges_by_name([cost.name for cost in costs], content["edges"]))
        return cls(content["model"], content["machine"], content["microbatch_rows"], graph)


def edges_by_name(names: Sequence[str], pairs: Iterable[Sequence[str]]) -> tuple[tuple[int, int], ...]:
    """Pairs of names as pairs of positions.

    Raises:
        ValueError: a name twice among the layers, or an edge that is no pair of their names.
    """
    places = {name: place for place, name in enumerate(names)}
    if len(places) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} names two layers; give each its own name")
    found = []
    for pair in pairs:
        if len(pair) != 2 or not all(name in places for name in pair):
            raise ValueError(f"the edge {list(pair)!r} is no pair of the names of layers")
        found.append((places[pair[0]], places[pair[1]]))
    return tuple(found)
