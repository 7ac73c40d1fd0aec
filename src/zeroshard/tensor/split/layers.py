"""Split linear layers: column-parallel, row-parallel, and the attention modules around them.

Megatron-LM (1909.08053, section 3): a column-parallel layer has some of the output features, a row-parallel one the
same input features, and between them each rank computes on its own. Modules keep class and names and get these
forwards; their parameters are shards already. Layers with one input share one sum of its gradients, which overlaps the
products of the weights' gradients (2205.05198, section 4.2.2, for sequence parallelism). Shapes: x [..., I], weight
[O, I] or, if transposed, [I, O].

[Note: order of the backward] Of all ready nodes, autograd runs the one made last. So an input passes four kinds of
nodes, made in this order: `AwaitedInput`, a `_Parameters` for each layer, `_Start`, and products. In the backward,
products compute the input's gradients and leave the parameters' for later; `_Start` starts the sum of the former, each
`_Parameters` computes the latter, and `AwaitedInput` waits for the sum.

[Note: inputs that are gathered again] Under sequence parallelism the products read the rows of all ranks, and save
this rank's rows; the first product of the backward starts another gather, and `_Parameters` reads its result.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zeroshard.parts.zones import DividedActivations
from zeroshard.tensor.split.collectives import (
    SEQUENCE,
    CopyIn,
    Gathering,
    JoinRows,
    ScatteringSum,
    Summed,
    Summing,
    SumOut,
    TensorRanks,
    Zone,
    Zones,
)
from zeroshard.tensor.split.collectives import Gathered as GatheredRows
from zeroshard.units.forwards import replaced

Left = list[tuple[Tensor | None, Tensor]]  # inputs and output gradients of products; None for an input to gather again
Viewed = tuple[Tensor, Tensor | None, Left]


class Input:
    """One input of column-parallel layers, from its forward to its backward.

    Args:
        x: equal on all ranks, or this rank's rows.
        layers: parameters of each layer that may read it.
        rows: dimension and total number of the rows; None if x is equal on all ranks.
        whole: the rows of all ranks, if gathered already.

    Attributes:
        value: operand of the products.
    """

    def __init__(
        self,
        x: Tensor,
        ranks: TensorRanks,
        label: str,
        layers: list["Parameters"],
        rows: tuple[int, int] | None = None,
        whole: Tensor | None = None,
    ) -> None:
        self.ranks, self.label, self.rows = ranks, label, rows
        self.own = None if rows is None else x.detach()
        self._shape = x.shape
        self._sum: Summing | ScatteringSum | None = None
        self._gathering: Gathering | None = None
        self._readers = 0
        x = AwaitedInput.apply(x, self)  # type: ignore[no-untyped-call]
        self.layers: dict[nn.Module, tuple[Viewed, Parameters]] = {
            each.module: (each.view(self), each) for each in layers
        }
        if rows is not None and whole is None:
            whole = ranks.gather(x.detach(), *rows, label)
        self.value: Tensor | None = _Start.apply(x, self, whole)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Release the tensors after the last product; the graph keeps those that it needs."""
        self.layers, self.value, self.own = {}, None, None

    def start_sum(self, gradient: Tensor) -> Tensor:
        """Start the sum of the input's gradient over the ranks; returns a placeholder until `finish`."""
        label = f"gradient of {self.label}"
        if self.rows is None:
            self._sum = self.ranks.start_sum(gradient.contiguous(), label)
            return gradient
        self._sum = self.ranks.start_scatter_sum(gradient, self.rows[0], label)
        return _absent(gradient, self._shape)

    def finish(self, gradient: Tensor) -> Tensor:
        """The sum that `start_sum` started."""
        pending, self._sum = self._sum, None
        return gradient if pending is None else pending.result()

    def gather_again(self, own: Tensor) -> None:
        """Start to gather the rows of all ranks for one more product."""
        assert self.rows is not None
        self._readers += 1
        if self._gathering is None:
            self._gathering = self.ranks.start_gather(own, *self.rows, f"{self.label} again")

    def gathered_again(self) -> Tensor:
        """The rows of all ranks; each product that called `gather_again` reads them once."""
        assert self._gathering is not None
        whole = self._gathering.result()
        self._readers -= 1
        if not self._readers:
            self._gathering = None
        return whole


class Parameters:
    """The parameters of a column-parallel layer for its products.

    Args:
        module: has `weight`, and perhaps `bias`.
        transposed: whether the weight is [I, O].
        sums: sums gradients [O, ...] of features with copies on several ranks; None without copies.
    """

    def __init__(self, module: nn.Module, transposed: bool, sums: Any = None) -> None:
        self.module, self.transposed, self.sums = module, transposed, sums

    def view(self, input: Input) -> Viewed:
        """Views of the parameters, whose gradients are computed late ([Note: order of the backward])."""
        weight, bias = self.module.weight, self.module.bias
        left: Left = []
        assert isinstance(weight, Tensor) and (bias is None or isinstance(bias, Tensor))
        if not (weight.requires_grad or (bias is not None and bias.requires_grad)):
            return weight, bias, left
        weight, bias = _Parameters.apply(weight, bias, self, input, left)  # type: ignore[no-untyped-call]
        return weight, bias, left

    def gradients(self, left: Left, input: Input, wanted: Sequence[bool]) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of weight and bias, each if `wanted`."""
        of_weight: Tensor | None = None
        of_bias: Tensor | None = None
        for x, gradient in left:
            rows = _rows(input.gathered_again() if x is None else x)
            of_rows = _rows(gradient)
            if wanted[0]:
                rows = rows.to(of_rows.dtype)  # under autocast, that of products
                product = rows.mT @ of_rows if self.transposed else of_rows.mT @ rows
                of_weight = product if of_weight is None else of_weight.add_(product)
            if wanted[1]:
                total = of_rows.sum(0)
                of_bias = total if of_bias is None else of_bias.add_(total)
        left.clear()
        if self.sums is not None:
            of_weight = None if of_weight is None else self.sums(of_weight, 1 if self.transposed else 0)
            of_bias = None if of_bias is None else self.sums(of_bias, 0)
        return of_weight, of_bias


def column_product(input: Input, module: nn.Module) -> Tensor:
    """[..., I] -> this rank's [..., O/t]."""
    (weight, bias, left), parameters = input.layers[module]
    assert input.value is not None
    own = input.value if input.own is None else input.own
    product: Tensor = _Product.apply(input.value, weight, bias, own.detach(), parameters.transposed, input, left)  # type: ignore[no-untyped-call]
    return product


def is_column_product(node: Any) -> bool:
    """Whether a node of the autograd graph is a column-parallel layer's product."""
    return getattr(node, "_forward_cls", None) is _Product


class AwaitedInput(torch.autograd.Function):
    """The first node of an input; its backward waits for the sum of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, input: Input) -> Tensor:
        """x itself."""
        ctx.input = input
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """The gradient, summed over the ranks."""
        return ctx.input.finish(gradients[0]), None


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, input: Input, whole: Tensor | None) -> Tensor:
        ctx.input = input
        return x.view_as(x) if whole is None else whole.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.input.start_sum(gradients[0]), None, None


class _Parameters(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, bias: Tensor | None, parameters: Parameters, input: Input, left: Left
    ) -> tuple[Tensor, Tensor | None]:
        ctx.parameters, ctx.input, ctx.left = parameters, input, left
        return weight.view_as(weight), None if bias is None else bias.view_as(bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        return (*ctx.parameters.gradients(ctx.left, ctx.input, ctx.needs_input_grad[:2]), None, None, None)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        own: Tensor,
        transposed: bool,
        input: Input,
        left: Left,
    ) -> Tensor:
        ctx.save_for_backward(own, weight)
        ctx.transposed, ctx.input, ctx.left = transposed, input, left
        ctx.bias_shape = None if bias is None else bias.shape
        return F.linear(x, weight.mT if transposed else weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        own, weight = ctx.saved_tensors
        of_weight = of_bias = None
        if ctx.needs_input_grad[1]:
            again = ctx.input.rows is not None
            if again:
                ctx.input.gather_again(own)
            ctx.left.append((None if again else own, gradient))
            of_weight = _absent(gradient, weight.shape)
        if ctx.needs_input_grad[2]:
            of_bias = _absent(gradient, ctx.bias_shape)
        of_x = None
        if ctx.needs_input_grad[0]:
            weight = weight.to(gradient.dtype)  # under autocast, that of products
            of_x = gradient @ (weight.mT if ctx.transposed else weight)
        return of_x, of_weight, of_bias, None, None, None, None


def _absent(like: Tensor, shape: torch.Size) -> Tensor:
    """A placeholder for a gradient that another node computes later."""
    return like.new_zeros(()).expand(shape)


def _rows(x: Tensor) -> Tensor:
    """[..., N] -> [rows, N]."""
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


class Entrance:
    """The inputs of one module's column-parallel layers, each copied or gathered once for all of them.

    Args:
        layers: layers that may read the same input.
        opened: whether the module that holds them is opened, so that any other input of theirs is whole.
        overlaps: whether sums overlap the weights' gradients; not if another technique computes those.
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
        """Gather the rows x [..., T/t, D] of all ranks, for a module that reads the number of positions."""
        dim, total = SEQUENCE, self._zones.positions
        whole: Tensor = JoinRows.apply(x, self._ranks, dim, total, self._label)  # type: ignore[no-untyped-call]
        self._known.append((weakref.ref(whole), self._brought(x, (dim, total), whole.detach())))
        return whole

    def of(self, x: Tensor) -> Tensor | Input:
        """The input of a column-parallel layer that reads x; a plain tensor without gradients."""
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
        """Replace the input `view` of layers by x."""
        self._known.append((weakref.ref(view), self.of(x)))

    def close(self) -> None:
        """Release the inputs, as the row-parallel layer behind is reached."""
        for _, known in self._known:
            if isinstance(known, Input):
                known.close()
        self._known.clear()


class ColumnForward:
    """The forward of a column-parallel layer.

    Args:
        columns: this rank's features and heads of the output.
    """

    def __init__(
        self,
        module: nn.Module,
        entrance: Entrance,
        zones: Zones,
        parameters: Parameters,
        columns: DividedActivations,
    ) -> None:
        self._module, self._columns = weakref.ref(module), columns
        self._plain: Any = None  # the inner forward, if another technique or the user replaced it
        self._entrance, self._zones, self._transposed = entrance, zones, parameters.transposed
        self._sums = parameters.sums

    def around(self, inner: Any) -> "ColumnForward":
        """Itself, with another forward inside."""
        module: Any = self._module()
        self._plain = replaced(module, inner)
        return self

    def __call__(self, x: Tensor) -> Tensor:
        """[..., I], or this rank's rows of it, to this rank's features [..., O/t]."""
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
        entrances: entrances of the column-parallel layers before it.
    """

    def __init__(
        self,
        module: nn.Module,
        ranks: TensorRanks,
        zones: Zones,
        label: str,
        entrances: Sequence[Entrance],
        transposed: bool,
    ) -> None:
        self._module, self._transposed = weakref.ref(module), transposed
        self._plain: Any = None
        self._ranks, self._zones, self._label, self._entrances = ranks, zones, label, list(entrances)

    def around(self, inner: Any) -> "RowForward":
        """Itself, with another forward inside."""
        module: Any = self._module()
        self._plain = replaced(module, inner)
        return self

    def __call__(self, x: Tensor) -> Tensor:
        """This rank's features [..., I/t] to [..., O], or this rank's rows of it."""
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
