"""Planned traffic of blocks by the formulas of the papers, next to the counted traffic in `engine.traffic()`.

Each forward and backward of a block adds its formula (2104.04473, section 2.3; 2205.05198, section 4.2.2), by its
number of positions and its layers' features, independently of the collectives. A pair is a group of column-parallel
layers with one input of I features, and the row-parallel layer behind them with O output features:

                forward                        backward
    whole       a sum of O                     a sum of I
    sequence    a gather of I,                 gathers of I (again) and O,
                a scattered sum of O           a scattered sum of I

A model has formulas if its split layers are such pairs in the blocks of one stack, all parameters train, and no block
is recomputed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from zeroshard.tensor.find.found import FoundLayer, FoundLayers, Style
from zeroshard.tensor.find.linear import linear_features
from zeroshard.tensor.split.collectives import SEQUENCE, TensorRanks, Zone, Zones
from zeroshard.tensor.split.sequence import activation_in
from zeroshard.traffic import Purpose
from zeroshard.units.hooks import Hook, listen

PAIRS = 2  # of a block: attention and feed-forward layers; of more, some read two inputs (cross attention)


@dataclass(frozen=True, slots=True)
class Pair:
    """A row-parallel layer and the column-parallel layers whose output it reads.

    Attributes:
        inputs: input features of the column-parallel layers, I.
        outputs: output features of the row-parallel layer, O.
        copied: elements of gradients with copies on several ranks, to be summed (few key heads).
    """

    inputs: int
    outputs: int
    copied: int = 0

    def forward(self, sequence: bool) -> dict[Purpose, int]:
        """Elements for each position, as comm counts them: 2Ψ for a sum of Ψ, Ψ for a gather or a scattered sum."""
        if not sequence:
            return {Purpose.SUM_ACTIVATIONS: 2 * self.outputs}
        return {Purpose.SUM_ACTIVATIONS: self.outputs, Purpose.GATHER_ACTIVATIONS: self.inputs}

    def backward(self, sequence: bool) -> dict[Purpose, int]:
        """Elements for each position in the backward, without copied features."""
        if not sequence:
            return {Purpose.SUM_ACTIVATIONS: 2 * self.inputs}
        return {Purpose.SUM_ACTIVATIONS: self.inputs, Purpose.GATHER_ACTIVATIONS: self.inputs + self.outputs}


def pairs_of(found: FoundLayers, modules: Mapping[str, nn.Module], ranks: int) -> dict[str, list[Pair]] | None:
    """The pairs of each block; None if a split layer is in no such pair of the blocks of one stack."""
    if len(found.blocks) != 1 or found.whole_sequences or any(e.style is Style.EXPERTS for e in found.layers):
        return None
    layers = {layer.name: layer for layer in found.layers if layer.style in (Style.COLUMN, Style.ROW)}
    pairs: dict[str, list[Pair]] = {block: [] for block in found.blocks[0]}
    free = {name for name, layer in layers.items() if layer.style is Style.COLUMN}
    for row in (layer for layer in layers.values() if layer.style is Style.ROW):
        block = next((block for block in pairs if row.name.startswith(f"{block}.")), None)
        columns = [layers[name] for name in row.columns if name in free]
        if block is None or not columns or len({column.name.rpartition(".")[0] for column in columns}) > 1:
            return None
        free -= {column.name for column in columns}
        pairs[block].append(_pair(modules, columns, row, ranks))
    if free or any(len(of_block) > PAIRS for of_block in pairs.values()):
        return None
    return pairs


def _pair(modules: Mapping[str, nn.Module], columns: list[FoundLayer], row: FoundLayer, ranks: int) -> Pair:
    read, made, copied = linear_features(modules[columns[0].name]), linear_features(modules[row.name]), 0
    assert read is not None and made is not None
    for layer in columns:
        whole = sum(segment.size for segment in layer.segments if segment.copies(ranks) > 1)
        copied += whole * (read.inputs + (getattr(modules[layer.name], "bias", None) is not None))
    return Pair(read.inputs, made.outputs, copied)


class PlannedMessages:
    """Hooks on the blocks of a stack that add their formulas.

    Args:
        pairs: pairs of each block, in order.
    """

    def __init__(
        self, pairs: Mapping[str, list[Pair]], modules: Mapping[str, nn.Module], ranks: TensorRanks, zones: Zones
    ) -> None:
        self._ranks, self._zones = ranks, zones
        self._first, self._last = next(iter(pairs)), list(pairs)[-1]
        self._entered = (0, False)  # positions of all rows in the block under way; whether each rank has some of them
        for name, of_block in pairs.items():
            modules[name].register_forward_pre_hook(Hook(partial(self._enter, name)), with_kwargs=True)
            modules[name].register_forward_hook(Hook(partial(self._leave, name, of_block)))
        ranks.has_formulas = True

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        x, sequence = activation_in(args, kwargs, name), self._zones.around is Zone.SEQUENCE
        positions = 0 if x.is_meta else x.shape[:-1].numel()
        if sequence and positions:
            positions = x.shape[:SEQUENCE].numel() * self._zones.positions
        self._entered, self._ranks.sums_rows = (positions, sequence), False

    def _leave(self, name: str, pairs: list[Pair], module: nn.Module, args: Any, output: Any) -> None:
        positions, sequence = self._entered
        x = output[0] if isinstance(output, (tuple, list)) else output
        if not positions or not self._ranks.sums_rows:
            return
        for pair in pairs:
            self._add(pair.forward(sequence), positions)
        if sequence and name == self._last:  # whose output is joined
            self._add({Purpose.GATHER_ACTIVATIONS: x.shape[-1]}, positions)
        listen(x, partial(self._back, name, pairs, positions, sequence), first=True)

    def _back(self, name: str, pairs: list[Pair], positions: int, sequence: bool, gradient: Tensor) -> None:
        for pair in pairs:
            self._add(pair.backward(sequence), positions)
            self._ranks.plan(Purpose.SUM_ACTIVATIONS, 2 * pair.copied)
        if sequence and name == self._first:  # whose input was cut
            self._add({Purpose.GATHER_ACTIVATIONS: gradient.shape[-1]}, positions)

    def _add(self, elements: Mapping[Purpose, int], positions: int) -> None:
        for purpose, each in elements.items():
            self._ranks.plan(purpose, each * positions)
