"""States of optimizers over whole tensors: rows, columns, matrices and lists of them, in checkpoints and in formulas.

A checkpoint keeps a state in its parameter's shape by elements, as for elementwise optimizers. Other tensors are kept
whole, under the path of the state ("preconditioners.0"), and lists, tuples and tables by their structure.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from zeroshard.checkpoint import Box, Reader, TensorPiece
from zeroshard.checkpoint.boxes import BoxValues
from zeroshard.checkpoint.facts import plain, setting
from zeroshard.parts.part import Part
from zeroshard.parts.place import Split, boxes_of
from zeroshard.parts.updater import OwnRows, Span

Tensors = dict[str, torch.Tensor]
NAMES = "param_names"  # of a parameter group, as torch has it


def encoded(value: Any, path: str, tensors: Tensors) -> Any:
    """A state in JSON; its tensors with dimensions are entered into `tensors` by their paths.

    Raises:
        CheckpointError: it holds a value that is no tensor, number, text, list, tuple or table.
    """
    if isinstance(value, torch.Tensor) and value.dim():
        tensors[path] = value
        return {"tensor": path}
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [encoded(inner, f"{path}.{number}", tensors) for number, inner in enumerate(value)]}
    if isinstance(value, Mapping):
        return {"table": {str(key): encoded(inner, f"{path}.{key}", tensors) for key, inner in value.items()}}
    return plain(value)


def decoded(value: Any, read: Callable[[str], torch.Tensor]) -> Any:
    """The inverse of `encoded`; `read` returns the tensor of a path.

    Raises:
        ValueError: `encoded` makes no such value.
    """
    match value:
        case {"tensor": str(path)}:
            return read(path)
        case {"list": list(inner)}:
            return [decoded(each, read) for each in inner]
        case {"tuple": list(inner)}:
            return tuple(decoded(each, read) for each in inner)
        case {"table": dict(inner)}:
            return {key: decoded(each, read) for key, each in inner.items()}
        case dict():
            raise ValueError(f"a table of {sorted(value)}, which is no state")
    return setting(value)


def paths_of(value: Any) -> set[str]:
    """The paths of the tensors in a state in JSON."""
    match value:
        case {"tensor": str(path)}:
            return {path}
        case {"list": list(inner)} | {"tuple": list(inner)}:
            return set().union(*map(paths_of, inner))
        case {"table": dict(inner)}:
            return set().union(*map(paths_of, inner.values()))
    return set()


def tensor_bytes(state: Mapping[str, Any]) -> int:
    """Bytes of the tensors with dimensions in the states of one parameter."""
    return sum(leaf.nbytes for leaf in tree_leaves(dict(state)) if isinstance(leaf, torch.Tensor) and leaf.dim())


def whole_pieces(part: Part, interval: tuple[int, int]) -> Iterator[TensorPiece]:
    """The tensors in states of parameters that begin in an interval of the flat, except elementwise ones.

    Of a split stack of matrices, a state has one entry for each matrix in its first dimension.
    """
    start, stop = interval
    for span in part.updater.spans:
        tensors: Tensors = {}
        for key, value in (part.updater.scalars(span) or {}).items():
            encoded(value, key, tensors)
        entry = part.flat.index.entries[part.flat.index.number_at(span.start)]
        for path, values in tensors.items() if start <= span.start < stop else ():
            if span.rows is not None:
                yield from _rows_of(f"{path}:{entry.name}", values, span.rows, path)
                continue
            split = _of_state(part.splits.get(entry.name), tuple(values.shape[1:]))
            shape = tuple(values.shape) if split is None else split.shape
            for (box, inside), counted in boxes_of(values.shape, split, 0, values.reshape(-1)):
                if counted:
                    yield TensorPiece(f"{path}:{entry.name}", shape, box, inside)
    offsets = {entry.name: entry.offset for entry in part.flat.index.entries}
    for name, span in (part.updater.matrices or {}).items():
        if start <= offsets[name] < stop:
            tensors = {key: values.view(span.tensor.shape) for key, values in part.updater.elements(span).items()}
            for key, value in (part.updater.scalars(span) or {}).items():
                encoded(value, key, tensors)
            yield from (TensorPiece.whole(f"{path}:{name}", values) for path, values in tensors.items())


def elements_of(part: Part, low: int, high: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Elementwise states of [low, high) of one parameter, perhaps in several spans, by name."""
    found: dict[str, list[torch.Tensor]] = {}
    for span in part.updater.spans:
        a, b = max(low, span.start), min(high, span.stop)
        if a < b:
            for key, values in part.updater.elements(span).items():
                found.setdefault(key, []).append(values[a - span.start : b - span.start])
    for key, several in found.items():
        yield key, several[0] if len(several) == 1 else torch.cat(several)


def state_pieces(part: Part) -> Iterator[TensorPiece]:
    """The tensors in states of this rank's slice of a part, as boxes in the shape of whole parameters."""
    index, interval = part.flat.index, part.flat.index.interval(part.weights.rank)
    for number, low, high in index.overlaps(*interval):
        for kind, values in elements_of(part, low, high):
            for (box, inside), counted in part.boxes(number, low, values):
                if counted:
                    yield TensorPiece(f"{kind}:{index.entries[number].name}", part.whole_shape(number), box, inside)
    yield from whole_pieces(part, interval)


def scalars_of(part: Part) -> dict[str, dict[str, Any]]:
    """States without a value per element (step counts), by parameter."""
    found: dict[str, dict[str, Any]] = {}
    spans = [
        (part.flat.index.entries[number].name, span)
        for span in part.updater.spans
        for number, _, _ in part.flat.index.overlaps(span.start, span.stop)
    ]
    for name, span in chain(spans, (part.updater.matrices or {}).items()):
        scalars = part.updater.scalars(span)
        if scalars is not None:
            found[name] = {key: encoded(value, key, {}) for key, value in scalars.items()}
    return found


def options_of(parts: Iterable[Part], optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The options of each parameter group in JSON, and the names of this rank's parameters.

    Functions are left out: code is never loaded, and the run that loads has its own.
    """
    names: dict[int, set[str]] = {}
    for part in parts:
        for span in part.updater.spans:
            entries = (part.flat.index.entries[n] for n, _, _ in part.flat.index.overlaps(span.start, span.stop))
            names.setdefault(span.group, set()).update(entry.name for entry in entries)
    return [
        {
            **{k: plain(v) for k, v in group.items() if k != "params" and not callable(v)},
            NAMES: sorted(names.get(n, ())),
        }
        for n, group in enumerate(optimizer.param_groups)
    ]


def merged_options(everyone: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The optimizer of all ranks: rank 0's class and options, and the names and scalars of all ranks."""
    groups = [
        {**of_ranks[0], NAMES: sorted(set().union(*(group[NAMES] for group in of_ranks)))}
        for of_ranks in zip(*(rank["groups"] for rank in everyone), strict=True)
    ]
    scalars = {name: kept for rank in everyone for name, kept in rank["scalars"].items()}
    return {**everyone[0], "groups": groups, "scalars": scalars}


def read_whole(reader: Reader, name: str, split: Split | None, span: Span, path: str) -> torch.Tensor:
    """A tensor in a state of a parameter, or this rank's part of it, on the device of the span's values."""
    entry, device = reader.tensors[f"{path}:{name}"], span.tensor.device
    if span.rows is not None and path in span.rows.states:
        own = torch.zeros((span.tensor.shape[0], *entry.shape[1:]), dtype=entry.dtype, device=device)
        reader.fill(f"{path}:{name}", [BoxValues(_box_of(span.rows, tuple(own.shape)), own)])
        return own
    split = _of_state(split, entry.shape[1:])
    values = torch.zeros(entry.shape if split is None else split.part_shape, dtype=entry.dtype, device=device)
    targets = [each for each, _ in boxes_of(values.shape, split, 0, values.view(-1))]
    reader.fill(f"{path}:{name}", targets)
    return values


def _rows_of(name: str, values: torch.Tensor, rows: OwnRows, path: str) -> Iterator[TensorPiece]:
    """A state of some rows: their entries; a state equal on all ranks comes from the rank with the first row."""
    if path in rows.states:
        shape = (rows.total, *values.shape[1:])
        yield TensorPiece(name, shape, _box_of(rows, tuple(values.shape)), values)
    elif rows.first == 0:
        yield TensorPiece.whole(name, values)


def _box_of(rows: OwnRows, shape: tuple[int, ...]) -> Box:
    return Box((rows.first, *(0 for _ in shape[1:])), shape)


def _of_state(split: Split | None, others: tuple[int, ...]) -> Split | None:
    """The split of a state along the first dimension, as of its parameter; None if it is whole on this rank."""
    if split is None or split.part_shape == split.shape:
        return None
    return replace(split, shape=(split.shape[0], *others))
