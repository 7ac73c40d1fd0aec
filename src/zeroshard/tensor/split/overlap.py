"""The product of column-parallel layers, whose backward sums the gradient of the input under that of the weight.

Megatron-LM (1909.08053, section 3) and its sequence parallelism (2205.05198, section 4.2.2): layers that read one input
share one sum of its gradients. Shapes: x [..., I], weight [O, I] or, where transposed, [I, O].

[Note: order of the backward] Autograd runs, of all nodes that could run, the one that was made last. So an input goes
through four kinds of nodes, made in this order: `AwaitedInput`, a `_Parameters` for each layer, `_Start`, and products.
In the backward, products make the gradients of the input and leave those of the parameters; `_Start` sends the sum of
the former, each `_Parameters` makes the latter, and `AwaitedInput` takes what has arrived.

[Note: inputs that are gathered again] Under sequence parallelism the products read the rows of all ranks, and save own
rows; the first product of the backward starts to gather them again, and `_Parameters` reads them.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zeroshard.tensor.split.collectives import Gathering, ScatteringSum, Summing, TensorRanks

Left = list[tuple[Tensor | None, Tensor]]  # inputs and output gradients of products; None for an input gathered again
Viewed = tuple[Tensor, Tensor | None, Left]


class Input:
    """One input of column-parallel layers, from its forward to its backward.

    Args:
        x: equal on all ranks, or own rows along `dim` of `total` in all.
        whole: the rows of all ranks, where they are gathered already.
        layers: weight, bias, and the segments whose gradients several ranks sum, of each layer that may read it.

    Attributes:
        value: what products read.
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
        """No further product reads it: let go of the tensors, which the graph keeps as far as it needs them."""
        self.layers, self.value, self.own = {}, None, None

    def start_sum(self, gradient: Tensor) -> Tensor:
        """Send the gradient of the input; what stands for it until `finish`."""
        label = f"gradient of {self.label}"
        if self.rows is None:
            self._sum = self.ranks.start_sum(gradient.contiguous(), label)
            return gradient
        self._sum = self.ranks.start_scatter_sum(gradient, self.rows[0], label)
        return _absent(gradient, self._shape)

    def finish(self, gradient: Tensor) -> Tensor:
        """The sum that `start_sum` sent."""
        pending, self._sum = self._sum, None
        return gradient if pending is None else pending.result()

    def gather_again(self, own: Tensor) -> None:
        """Start to bring the rows of all ranks for one more product."""
        assert self.rows is not None
        self._readers += 1
        if self._gathering is None:
            self._gathering = self.ranks.start_gather(own, *self.rows, f"{self.label} again")

    def gathered_again(self) -> Tensor:
        """The rows of all ranks; each product that started it reads them once."""
        assert self._gathering is not None
        whole = self._gathering.result()
        self._readers -= 1
        if not self._readers:
            self._gathering = None
        return whole


class Parameters:
    """The parameters of a column-parallel layer as its products read them.

    Args:
        module: has `weight`, and perhaps `bias`.
        transposed: whether the weight is [I, O].
        sums: adds up over ranks the gradients [O, ...] of features that several ranks hold; None where there are none.
    """

    def __init__(self, module: nn.Module, transposed: bool, sums: Any = None) -> None:
        self.module, self.transposed, self.sums = module, transposed, sums

    def view(self, input: Input) -> Viewed:
        """Views of the parameters, whose gradients are made late ([Note: order of the backward])."""
        weight, bias = self.module.weight, self.module.bias
        left: Left = []
        assert isinstance(weight, Tensor) and (bias is None or isinstance(bias, Tensor))
        if not (weight.requires_grad or (bias is not None and bias.requires_grad)):
            return weight, bias, left
        weight, bias = _Parameters.apply(weight, bias, self, input, left)  # type: ignore[no-untyped-call]
        return weight, bias, left

    def gradients(self, left: Left, input: Input, wanted: Sequence[bool]) -> tuple[Tensor | None, Tensor | None]:
        """Those of weight and bias, as far as they are wanted."""
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
    """Whether a node of autograd's graph made the output of a column-parallel layer."""
    return getattr(node, "_forward_cls", None) is _Product


class AwaitedInput(torch.autograd.Function):
    """The input before all else; in the backward, what its sum brings."""

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
    """A gradient that another node makes later."""
    return like.new_zeros(()).expand(shape)


def _rows(x: Tensor) -> Tensor:
    """[..., N] -> [rows, N]."""
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])
