"""Files of profiles: of chains, of graphs, and the `graph.txt` of PipeDream's profiler (msr-fiddle/pipedream)."""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from zeroshard.errors import DataError, PlanError
from zeroshard.pipeline.partition.graph import GraphProfile, LayerGraph, edges_by_name
from zeroshard.pipeline.partition.profile import LayerCost, Profile

BETWEEN = " -- "
NUMBERS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
MADE_BY = "`zeroshard profile` makes one of a chain, PipeDream's profiler a graph.txt"


def read_profile(path: Path) -> Profile | GraphProfile:
    """A file of `Profile.save` or `GraphProfile.save`, or a `graph.txt` of PipeDream's profiler.

    Raises:
        DataError: no such file, or none of these.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise DataError(f"The profile {path} cannot be read ({why}); {MADE_BY}.") from error
    if BETWEEN in text.partition("\n")[0]:
        return read_graph_text(text, path)
    try:
        content = json.loads(text)
        if not isinstance(content, dict) or "edges" not in content:
            return Profile.load(path)
        return GraphProfile.parse(content)
    except (ValueError, TypeError, PlanError) as error:
        raise DataError(f"{path} is no profile ({error}); {MADE_BY}.") from error


def read_graph_text(text: str, path: Path) -> GraphProfile:
    """The content of a `graph.txt`: a line for each node, then one with a tab in front for each edge.

        node2 -- Conv2d(3, 64) -- forward_compute_time=22.3, backward_compute_time=6.4, activation_size=198246400.0, …
        \tnode2 -- node3

    Times are in ms, and sizes in bytes; several outputs are `[a; b]`. A layer saves its output for its backward, as in
    the authors' optimizer. As there, inputs are left out, which every stage can read itself, and so are elements of a
    tuple that no layer reads.

    Raises:
        DataError: a line that is neither, a node twice or absent, or a circle.
    """
    try:
        kinds: dict[str, str] = {}
        costs: dict[str, LayerCost] = {}
        edges: list[tuple[str, str]] = []
        for number, line in enumerate(text.splitlines(), 1):
            if line.startswith("\t"):
                edges.append(_edge(number, line, costs))
            elif line.strip():
                name, kind, cost = _node(number, line)
                if name in costs:
                    raise ValueError(f"line {number} has {name} a second time")
                kinds[name], costs[name] = kind, cost
        kept = _kept(kinds, edges)
        names = [name for name in costs if name in kept]
        if not names:
            raise ValueError("it has no layers")
        pairs = edges_by_name(names, [edge for edge in edges if kept.issuperset(edge)])
        graph = LayerGraph(tuple(costs[name] for name in names), pairs)
    except (ValueError, PlanError) as error:
        raise DataError(f"{path} is no graph.txt of PipeDream's profiler ({error}); correct it there.") from error
    model = (
        path.resolve().parent.name if path.stem == "graph" else path.stem
    )  # the authors keep one in a model's folder
    return GraphProfile(model, "the machine of its profiler", 0, graph)


def _node(number: int, line: str) -> tuple[str, str, LayerCost]:
    parts = line.strip().split(BETWEEN)
    if len(parts) not in (3, 4):  # the fourth is a stage, which the authors' optimizer writes
        raise ValueError(f"line {number} is {line.strip()[:60]!r}; a node is NAME -- KIND -- {'=…, '.join(NUMBERS)}=…")
    name, kind, pairs = parts[0], parts[1], parts[2]
    given = dict(pair.split("=", 1) for pair in pairs.split(", ") if "=" in pair)
    if set(given) != set(NUMBERS):
        raise ValueError(f"line {number} has {', '.join(given) or 'no numbers'}; it must have {', '.join(NUMBERS)}")
    forward, backward, sent, parameters = (_total(number, key, given[key]) for key in NUMBERS)
    label = f"{name} {kind.partition('(')[0].strip()}".strip()
    return name, kind, LayerCost(label, forward / 1e3, backward / 1e3, round(sent), round(sent), round(parameters))


def _total(number: int, key: str, text: str) -> float:
    try:
        found = math.fsum(float(part) for part in text.strip("[]").split(";"))
    except ValueError:
        found = math.nan
    if not 0 <= found < math.inf:
        raise ValueError(f"line {number} has {key}={text}; it must be 0 or more, and finite")
    return found


def _edge(number: int, line: str, known: dict[str, LayerCost]) -> tuple[str, str]:
    ends = line.strip().split(BETWEEN)
    absent = [end for end in ends if end not in known]
    if len(ends) != 2 or absent:
        raise ValueError(f"line {number} is {line.strip()!r}; an edge is two nodes of lines before it, as A -- B")
    return ends[0], ends[1]


def _kept(kinds: dict[str, str], edges: Sequence[tuple[str, str]]) -> set[str]:
    """All nodes but inputs, and elements of tuples that no layer reads."""
    inputs = set(_named(kinds, "Input")) - {reader for _, reader in edges}
    unread = set(_named(kinds, "__getitem__")) - {source for source, _ in edges}
    return set(kinds) - inputs - unread


def _named(kinds: dict[str, str], start: str) -> Iterator[str]:
    return (name for name, kind in kinds.items() if kind.startswith(start))
