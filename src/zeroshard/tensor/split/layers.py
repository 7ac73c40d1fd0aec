"""The forwards of split linear layers: column-parallel, row-parallel, and the attention modules around them.

Megatron-LM (1909.08053, section 3): a column-parallel layer has some of the output features, a row-parallel one the
same input features, and between them each rank computes on its own. A forward stands in for that of a module which
keeps its class and its names; its parameters are parts already.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zeroshard.parts.zones import DividedActivations
from zeroshard.tensor.split.collectives import SEQUENCE, CopyIn, JoinRows, Summed, SumOut, TensorRanks
from zeroshard.tensor.split.collectives import Gathered as GatheredRows
from zeroshard.tensor.split.overlap import Input, Parameters, column_product
from zeroshard.tensor.split.zones import Zone, Zones


class Entrance:
    """The inputs of column-parallel layers of one module, which are brought to them once for all.

    Args:
        layers: that may read the same input.
        opened: whether the module that holds them is opened, so that any other input of theirs is whole.
        overlaps: whether sums run beside the gradients of weights; not where another technique makes those.
    """

    def __init__(
        self,
        ranks: TensorRanks,
        zones: Zones,
        label: str,
        layers: Sequence[Parameters],
        opened: bool,
        overlaps: bool = True,
    ) -> None:
        self._ranks, self._zones, self._label, self._layers = ranks, zones, label, list(layers)
        self._opened, self._overlaps = opened, overlaps
        self._known: list[tuple[weakref.ref[Tensor], Tensor | Input]] = []

    def open(self, x: Tensor) -> Tensor:
        """The rows of all ranks of own rows x [..., T/t, D], for a module that reads the number of positions."""
        dim, total = SEQUENCE, self._zones.positions
        whole: Tensor = JoinRows.apply(x, self._ranks, dim, total, self._label)  # type: ignore[no-untyped-call]
        self._known.append((weakref.ref(whole), self._brought(x, (dim, total), whole.detach())))
        return whole

    def of(self, x: Tensor) -> Tensor | Input:
        """The input of a column-parallel layer that reads x; a plain tensor where no gradients are made."""
        for reference, known in self._known:
            if reference() is x:
                return known
        local = self._zones.around is Zone.SEQUENCE and not self._opened
        found = self._brought(x, (SEQUENCE, self._zones.total(x, self._ranks)) if local else None)
        self._known.append((weakref.ref(x), found))
        return found

    def _brought(self, x: Tensor, rows: tuple[int, int] | None, whole: Tensor | None = None) -> Tensor | Input:
        """x for products; `rows` as of an `Input`."""
        if not torch.is_grad_enabled() or x.is_meta:
            return x if rows is None else self._ranks.gather(x, *rows, self._label) if whole is None else whole
        if self._overlaps:
            return Input(x, self._ranks, self._label, self._layers, rows, whole)
        if rows is None:
            copied: Tensor = CopyIn.apply(x, self._ranks, self._label)  # type: ignore[no-untyped-call]
            return copied
        gathered: Tensor = GatheredRows.apply(x, self._ranks, *rows, self._label)  # type: ignore[no-untyped-call]
        return gathered

    def stand(self, view: Tensor, x: Tensor) -> None:
        """Let layers that get `view` read x."""
        self._known.append((weakref.ref(view), self.of(x)))

    def close(self) -> None:
        """The row-parallel layer behind them is reached."""
        for _, known in self._known:
            if isinstance(known, Input):
                known.close()
        self._known.clear()


class ColumnForward:
    """The forward of a column-parallel layer.

    Args:
        columns: the features and heads that this rank has of its output.
        plain: the forward that another technique has put in the place of the module's own; None otherwise.
    """

    def __init__(
        self,
        module: nn.Module,
        entrance: Entrance,
        zones: Zones,
        parameters: Parameters,
        columns: DividedActivations,
        plain: Any = None,
    ) -> None:
        self._module, self._columns, self._plain = weakref.ref(module), columns, plain
        self._entrance, self._zones, self._transposed = entrance, zones, parameters.transposed
        self._sums = parameters.sums

    def __call__(self, x: Tensor) -> Tensor:
        """[..., I], or own rows of it, to this rank's features [..., O/t]."""
        module: Any = self._module()
        found = self._entrance.of(x)
        self._zones.enter(Zone.COLUMNS, self._columns)
        if isinstance(found, Input):
            return column_product(found, module)
        if self._plain is not None:
            product: Tensor = self._plain(found, sums=self._sums)
            return product
        return F.linear(found, module.weight.mT if self._transposed else module.weight, module.bias)


class RowForward:
    """The forward of a row-parallel layer.

    Args:
        entrances: of the column-parallel layers before it.
    """

    def __init__(
        self,
        module: nn.Module,
        ranks: TensorRanks,
        zones: Zones,
        label: str,
        entrances: Sequence[Entrance],
        transposed: bool,
        plain: Any = None,
    ) -> None:
        self._module, self._plain, self._transposed = weakref.ref(module), plain, transposed
        self._ranks, self._zones, self._label, self._entrances = ranks, zones, label, list(entrances)

    def __call__(self, x: Tensor) -> Tensor:
        """This rank's features [..., I/t] to [..., O], or own rows of it."""
        module: Any = self._module()
        for entrance in self._entrances:
            entrance.close()
        self._ranks.note_row(x)
        if self._plain is not None:
            y: Tensor = self._plain(x, biased=False)
        else:
            y = F.linear(x, module.weight.mT if self._transposed else module.weight)
        self._zones.leave()
        if self._zones.around is Zone.SEQUENCE:
            y = Summed.apply(y, self._ranks, SEQUENCE, self._label)  # type: ignore[no-untyped-call]
        elif torch.is_grad_enabled() and y.requires_grad:
            y = SumOut.apply(y, self._ranks, self._label)  # type: ignore[no-untyped-call]
        else:
            y = self._ranks.sum(y, self._label)
        if module.bias is not None:
            y = y + module.bias
        return y
