"""Quantised weights in checkpoints: the facts of their formats, and the weights that saved codes stand for.

A checkpoint holds codes and statistics as tensors. Type, block size, shape and dtype are in the model's modules alone,
so the manifest keeps them as facts, by the name of the weight: null for a format whose package has to do it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.checkpoint import Reader
from zeroshard.checkpoint.facts import FACTS, shown
from zeroshard.errors import DamagedError
from zeroshard.quantized.stacks import CODES, MatrixFormat
from zeroshard.quantized.weights import NESTED_BLOCK, STACK, TURNED, Row, end_of, taken_apart

FACT = "quantised"  # its key among the facts of a checkpoint


def quantised_facts(model: nn.Module) -> dict[str, Any]:
    """The facts of a model's quantised weights; empty for a model without any."""
    rows = {weight.label: weight.format.row(weight.module, weight.name) for weight in taken_apart(model)}
    return {FACT: rows} if rows else {}


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A quantised weight of a checkpoint.

    Attributes:
        kind: the format of its matrix, or of each matrix of a stack.
        layout: of `row_of`.
        sources: the full names of its tensors in the checkpoint, by the ends of their names.
        shape: of the weight: [O, I], or [E, O, I] of a stack.
    """

    kind: MatrixFormat
    layout: str
    sources: dict[str, str]
    shape: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weight before it was quantised."""
        return self.kind.dtype

    def read(self, reader: Reader) -> Tensor:
        """The weight that the codes stand for, on the CPU, by the functions of bitsandbytes.

        Raises:
            DamagedError: the checkpoint is damaged.
        """
        tensors = {end: _flat(reader, source) for end, source in self.sources.items()}
        codes = reader.tensors[self.sources[CODES]].shape
        if self.layout == STACK:
            flat = {end: values.view(self.shape[0], -1) for end, values in tensors.items()}
            found = [self._one({end: rows[n] for end, rows in flat.items()}, codes[1:]) for n in range(codes[0])]
            return torch.stack(found)
        values = self._one(tensors, codes)
        return values.T.contiguous() if self.layout == TURNED else values

    def _one(self, tensors: Mapping[str, Tensor], codes: tuple[int, ...]) -> Tensor:
        """A matrix of flat tensors."""
        flat = {end: values.view(-1) for end, values in tensors.items()}
        return self.kind.whole({**flat, CODES: flat[CODES].view(codes)})


def stored_weights(reader: Reader, sources: Mapping[str, str]) -> tuple[dict[str, StoredWeight], set[str]]:
    """The quantised weights of a checkpoint that can be dequantised from its files.

    Args:
        sources: the full names of its tensors in the checkpoint, by their names in the model.

    Returns:
        the weights by their names, and the names of all their tensors.

    Raises:
        DamagedError: the facts are none of a quantised weight, or do not fit the tensors.
    """
    table = reader.facts.get(FACT, {})
    fits, needed = FACTS[FACT]
    if not fits(table):
        raise DamagedError(f"{reader.path} is not to be trusted: {FACT} is {shown(table)}, and must be {needed}.")
    found: dict[str, StoredWeight] = {}
    taken: set[str] = set()
    for label, row in table.items():
        ends = {} if row is None else ends_of(row)
        names = {end: end_of(label, "" if end == CODES and row["layout"] != STACK else end) for end in ends}
        if not names or names[CODES] not in sources:
            continue  # the package's own format, or a further name of a weight that is written once
        if missing := [name for name in names.values() if name not in sources]:
            raise DamagedError(f"{reader.path} holds codes of '{label}' and no '{missing[0]}'; use another checkpoint.")
        found[label] = _checked(reader, label, row, {end: sources[name] for end, name in names.items()})
        taken |= set(names.values())
    return found, taken


def ends_of(row: Mapping[str, Any]) -> dict[str, torch.dtype]:
    """The dtypes of a weight's tensors, by the ends of their names."""
    if row["type"] == "int8":
        return {CODES: torch.int8, "SCB": torch.float32}
    ends = {CODES: torch.uint8, "absmax": torch.uint8 if row["double"] else torch.float32}
    return ends | ({"nested_absmax": torch.float32, "offset": torch.float32} if row["double"] else {})


def _flat(reader: Reader, source: str) -> Tensor:
    """A whole tensor of the checkpoint, flattened."""
    entry = reader.tensors[source]
    values = torch.empty(entry.numel, dtype=entry.dtype)
    reader.read(source, values, 0)
    return values


def _checked(reader: Reader, label: str, row: Row, sources: dict[str, str]) -> StoredWeight:
    """A weight after a check of the sizes and dtypes of its tensors, which the kernels of bitsandbytes trust."""
    codes = reader.tensors[sources[CODES]].shape
    stacked = row["layout"] == STACK
    each = codes[1:] if stacked else codes
    shape = torch.Size(each if row["shape"] is None else row["shape"])
    numel, count = shape.numel(), 1 if not stacked else codes[0] if len(codes) > 1 else -1
    sizes = {CODES: numel, "SCB": shape[0] if len(shape) == 2 else -1}
    if row["type"] != "int8":
        blocks = -(-numel // row["blocksize"])
        sizes = {CODES: -(-numel // 2), "absmax": blocks, "nested_absmax": -(-blocks // NESTED_BLOCK), "offset": 1}
    for end, dtype in ends_of(row).items():
        entry = reader.tensors[sources[end]]
        if entry.dtype != dtype or math.prod(entry.shape) != sizes[end] * count:
            raise DamagedError(
                f"{reader.path} is not to be trusted: '{sources[end]}' is {entry.dtype} of shape {list(entry.shape)}, "
                f"and '{label}' needs {sizes[end] * count:,} elements of {dtype}; use another checkpoint."
            )
    kind = MatrixFormat(row["type"], row["blocksize"], row["double"], shape, getattr(torch, row["dtype"]))
    whole = (count, *shape) if stacked else tuple(reversed(shape)) if row["layout"] == TURNED else tuple(shape)
    return StoredWeight(kind, row["layout"], sources, whole)
