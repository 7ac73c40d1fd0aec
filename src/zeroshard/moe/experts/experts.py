"""Experts: feed-forward networks in stacked parameters [E, ...], or any modules.

Both kinds take tokens with their routing (`forward`), and rows that are sorted by expert (`compute`), which is what
ranks that exchange rows call. Shapes: T tokens, R rows, D width, F hidden features, E experts.

16-bit rows on accelerators go through all experts in one product (`torch.nn.functional.grouped_mm`). It reads offsets
without a check and leaves rows behind the last one as memory was, so offsets are made from counts that cover the rows.
On CPUs experts one at a time (`kernels`) take less time and memory.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zeroshard.errors import ModelError
from zeroshard.moe.exchange.dispatch import combine, gather_gates, gather_rows, order_of
from zeroshard.moe.experts.activations import activation_of
from zeroshard.moe.experts.kernels import ExpertStack, check_counts, expert_rows, expert_tokens
from zeroshard.moe.routing.record import Routing
from zeroshard.moe.routing.statistics import Statistics
from zeroshard.platform.accelerator import on_cpus
from zeroshard.step.context import WeightGradients, store_for


class Experts(nn.Module):
    """E feed-forward networks of one shape: down(activation(up(x))), or down(activation(gate) * value) where gated.

    Args:
        width: D.
        hidden: F.
        experts: E, of all ranks.
        activation: "relu", "relu_squared", "gelu", "gelu_tanh" or "silu".
        gated: `up` makes the gate, then the value (SwiGLU: 2002.05202, with "silu").
        dropout: the probability with which a hidden feature is dropped in training (2101.03961, section 2.4).
        scale: initial weights have a variance of scale / fan-in, from a normal distribution cut at two standard
            deviations (2101.03961, section 2.4: 0.1); None for those of `nn.Linear`.

    Attributes:
        up: [E, F, D]; where gated [E, 2F, D].
        up_bias: [E, F], [E, 2F], or None.
        down: [E, D, F].
        down_bias: [E, D], or None.
        statistics: of the routings, which the layer adds.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        experts: int,
        activation: str = "relu",
        gated: bool = False,
        bias: bool = False,
        dropout: float = 0.0,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        if min(width, hidden, experts) < 1:
            raise ModelError(f"Experts need width, hidden and experts of at least 1, not {width}, {hidden}, {experts}.")
        self.activation = activation_of(activation, gated)
        self.experts, self._kind = experts, f"activation={activation}, gated={gated}"
        self.dropout, self.scale = dropout, scale
        made = 2 * hidden if gated else hidden
        self.up = nn.Parameter(torch.empty(experts, made, width))
        self.down = nn.Parameter(torch.empty(experts, width, hidden))
        self.up_bias = nn.Parameter(torch.empty(experts, made)) if bias else None
        self.down_bias = nn.Parameter(torch.empty(experts, width)) if bias else None
        self.statistics = Statistics(experts)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the weights of each expert by itself, so that no two are alike."""
        for weight, bias in ((self.up, self.up_bias), (self.down, self.down_bias)):
            fan_in = weight.shape[-1]
            if self.scale is None:
                weight.uniform_(-1 / math.sqrt(fan_in), 1 / math.sqrt(fan_in))
            else:
                std = math.sqrt(self.scale / fan_in)
                nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)
            if bias is not None:
                bound = 1 / math.sqrt(fan_in)
                bias.uniform_(-bound, bound) if self.scale is None else bias.zero_()

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        """[T, D] -> [T, D]: the sum of the kept choices of each token, times their gates."""
        order = order_of(routing, self.experts)
        if not (self._drops or fits(x, self._stack)):
            return expert_tokens(x, order, routing.gates, self._stack)
        return combine(self.compute(gather_rows(x, order), order.counts, gather_gates(routing.gates, order)), order)

    def compute(self, rows: Tensor, counts: Sequence[int], gates: Tensor | None) -> Tensor:
        """[R, D] -> [R, D]: each row by its expert, times its gate.

        Args:
            rows: sorted by the experts that this module holds.
            counts: rows of each of them.
            gates: [R]; None for 1.
        """
        if self._drops:
            return weighed(plain_rows(rows, counts, self._stack, self.dropout), gates)
        return stacked_rows(rows, counts, gates, self._stack)

    @property
    def leaves_weight_gradients(self) -> bool:
        """Whether those of both products are left for later, where a backward has two parts."""
        return not self.dropout

    @property
    def _drops(self) -> bool:
        return self.training and self.dropout > 0

    @property
    def _stack(self) -> ExpertStack:
        return ExpertStack(self.up, self.down, self.activation, self.up_bias, self.down_bias)

    def extra_repr(self) -> str:
        """Shapes and options."""
        width, hidden = self.down.shape[-2:]
        return f"width={width}, hidden={hidden}, experts={self.experts}, {self._kind}"


def stacked_rows(rows: Tensor, counts: Sequence[int], gates: Tensor | None, stack: ExpertStack) -> Tensor:
    """Rows [R, D] -> [R, D], sorted by expert, each times its gate: in one product where that fits the device."""
    if fits(rows, stack):
        return weighed(grouped_rows(rows, counts, stack), gates)
    return expert_rows(rows, counts, gates, stack)


def plain_rows(rows: Tensor, counts: Sequence[int], stack: ExpertStack, dropout: float = 0.0) -> Tensor:
    """The same products as plain operations of autograd, to read and to compare with; with dropout of hidden features.

    Weights are unbound once: indexing a stack in a loop would make a gradient of the stack's size for each expert.
    """
    check_counts(counts, len(stack.up), len(rows))
    nothing = [None] * len(counts)
    done = []
    for x, up, up_bias, down, down_bias in zip(
        rows.split(list(counts)),
        stack.up.mT.unbind() if stack.transposed else stack.up.unbind(),
        nothing if stack.up_bias is None else stack.up_bias.unbind(),
        stack.down.mT.unbind() if stack.transposed else stack.down.unbind(),
        nothing if stack.down_bias is None else stack.down_bias.unbind(),
        strict=True,
    ):
        hidden = stack.activation(F.linear(x, up, up_bias))
        done.append(F.linear(F.dropout(hidden, dropout) if dropout else hidden, down, down_bias))
    return torch.cat(done)


class ExpertModules(nn.Module):
    """E modules of any kind as experts, each from rows [r, D] to rows [r, D].

    Args:
        make: makes one expert; called E times, so that each has weights of its own.
        experts: E, of all ranks.

    Attributes:
        networks: the experts that this module holds.
        statistics: of the routings, which the layer adds.

    Raises:
        ModelError: two experts are one module.
    """

    undivided = True  # into units: which experts run depends on the routing

    def __init__(self, make: Callable[[], nn.Module], experts: int) -> None:
        super().__init__()
        self.experts = experts
        self.networks = nn.ModuleList(make() for _ in range(experts))
        if len({id(network) for network in self.networks}) < experts:
            raise ModelError("The factory of experts returned one module twice; let it make a new one in every call.")
        self.statistics = Statistics(experts)

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        """[T, D] -> [T, D]: the sum of the kept choices of each token, times their gates."""
        order = order_of(routing, self.experts)
        rows = self.compute(gather_rows(x, order), order.counts, gather_gates(routing.gates, order))
        return combine(rows, order)

    def compute(self, rows: Tensor, counts: Sequence[int], gates: Tensor | None) -> Tensor:
        """[R, D] -> [R, D]: each row by its expert, times its gate; an expert without rows is not called.

        Args:
            rows: sorted by the experts that this module holds.
            counts: rows of each of them.
            gates: [R]; None for 1.
        """
        return compute_modules(self.networks, rows, counts, gates)


def compute_modules(
    networks: Iterable[nn.Module],
    rows: Tensor,
    counts: Sequence[int],
    gates: Tensor | None,
    idle_gradients: bool = True,
) -> Tensor:
    """Rows [R, D], sorted by expert, each by the module of its expert and times its gate; see `ExpertModules`.

    Args:
        idle_gradients: whether experts without rows get zeros as gradients, and else None, as modules that no forward
            calls. The backward comes to their parameters either way, as ranks wait for all of a unit's gradients.
    """
    done, idle = [], []
    for expert, x in zip(networks, rows.split(list(counts)), strict=True):
        if len(x):
            done.append(expert(x))
        else:
            idle += [p for p in expert.parameters() if p.requires_grad]
    return weighed(with_gradients(torch.cat(done) if done else rows, idle, idle_gradients), gates)


def with_gradients(rows: Tensor, parameters: Sequence[Tensor], zeros: bool = True) -> Tensor:
    """The rows; their backward comes to the parameters too, with zeros or without a gradient."""
    same: Tensor = _Idle.apply(rows, zeros, *parameters) if parameters else rows  # type: ignore[no-untyped-call]
    return same


def weighed(rows: Tensor, gates: Tensor | None) -> Tensor:
    """Rows [R, D] times gates [R], multiplied in the wider dtype of both."""
    if gates is None:
        return rows
    product: Tensor = _Weighed.apply(rows, gates.unsqueeze(-1))  # type: ignore[no-untyped-call]
    return product


class _Weighed(torch.autograd.Function):
    """Products in the wider dtype, each rounded once to the dtype of the rows, without a copy in between."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, gates: Tensor) -> Tensor:
        """[R, D] times [R, 1] -> [R, D]."""
        ctx.save_for_backward(rows, gates)
        return _rounded_product(rows, gates, rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None]:
        rows, gates = ctx.saved_tensors
        of_rows = _rounded_product(gradients[0], gates, rows)
        if not ctx.needs_input_grad[1]:
            return of_rows, None
        wide = torch.promote_types(rows.dtype, gates.dtype)
        return of_rows, (gradients[0].to(wide) * rows).sum(-1, keepdim=True).to(gates.dtype)


def _rounded_product(factor: Tensor, gates: Tensor, like: Tensor) -> Tensor:
    if torch.is_grad_enabled():  # in a backward that is differentiated itself
        return (factor * gates).to(like.dtype)
    return torch.mul(factor, gates, out=torch.empty_like(like))


class _Idle(torch.autograd.Function):
    """The identity, whose backward comes to the parameters of experts without rows: with zeros, or with None."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, zeros: bool, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(*parameters if zeros else ())
        ctx.unwritten = () if zeros else (None,) * len(parameters)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0], None, *map(torch.zeros_like, ctx.saved_tensors), *ctx.unwritten


STRIDE = 16  # bytes of which the operator needs rows to be multiples


def fits(rows: Tensor, stack: ExpertStack) -> bool:
    """Whether these experts can and should be computed in one product."""
    device = rows.device.type
    if device == "meta" or on_cpus(rows):
        return False
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else rows.dtype
    return dtype is torch.bfloat16 and aligned(stack, dtype)


def aligned(stack: ExpertStack, dtype: torch.dtype) -> bool:
    """Whether all rows are of whole strides."""
    return all(n * dtype.itemsize % STRIDE == 0 for weight in (stack.up, stack.down) for n in weight.shape[1:])


def grouped_rows(rows: Tensor, counts: Sequence[int], stack: ExpertStack) -> Tensor:
    """Rows [R, D] -> [R, D], sorted by expert.

    Args:
        counts: rows of each expert.

    Raises:
        ModelError: the counts do not cover the rows.
    """
    check_counts(counts, len(stack.up), len(rows))
    device = rows.device.type
    if torch.is_autocast_enabled(device):
        rows = rows.to(torch.get_autocast_dtype(device))
    offsets = torch.tensor(list(accumulate(counts)), dtype=torch.int32, device=rows.device)
    with torch.autocast(device, enabled=False):
        made = _product(rows, stack.up, stack.up_bias, offsets, stack.transposed)
        return _product(stack.activation(made), stack.down, stack.down_bias, offsets, stack.transposed)


def _product(rows: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor, transposed: bool) -> Tensor:
    store = store_for(weight)
    rows, values = rows.contiguous(), weight.to(rows.dtype)
    if store is None:
        made = F.grouped_mm(rows, _matrices(values, transposed), offs=offsets)
        product: Tensor = _Whole.apply(made)  # type: ignore[no-untyped-call]
    else:
        anchor = rows.new_zeros((), requires_grad=True)
        product = _Product.apply(  # type: ignore[no-untyped-call]
            rows, anchor, values.detach(), (weight,), store, offsets, transposed
        )
    if bias is None:
        return product
    sizes = offsets.diff(prepend=offsets.new_zeros(1))
    return product + bias.to(rows.dtype).repeat_interleave(sizes, 0, output_size=len(rows))


def _matrices(stacked: Tensor, transposed: bool) -> Tensor:
    """[E, in, out]."""
    return stacked if transposed else stacked.mT


class _Product(torch.autograd.Function):
    """The product of rows and their experts' matrices, whose backward leaves the gradient of the weight to a store."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        anchor: Tensor,
        values: Tensor,
        weight: tuple[Tensor],
        store: WeightGradients,
        offsets: Tensor,
        transposed: bool,
    ) -> Tensor:
        """[R, in] -> [R, out]; the anchor keeps the node in the graph where rows need no gradient.

        The weight comes in a tuple, so that autograd does not take it for an input.
        """
        ctx.save_for_backward(rows, values, offsets)
        ctx.weight, ctx.store, ctx.transposed = weight[0], store, transposed
        return F.grouped_mm(rows, _matrices(values, transposed), offs=offsets)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of the rows only."""
        rows, values, offsets = ctx.saved_tensors
        gradient, of_rows = gradients[0].contiguous(), None
        left, right = (rows, gradient) if ctx.transposed else (gradient, rows)
        ctx.store.add(ctx.weight, partial(_make, left=left, right=right, offsets=offsets))
        if ctx.needs_input_grad[0]:
            of_rows = F.grouped_mm(gradient, _matrices(values, ctx.transposed).mT, offs=offsets)
        return of_rows, None, None, None, None, None, None


def _make(weight: Tensor, left: Tensor, right: Tensor, offsets: Tensor) -> None:
    """Hand the products of an expert's rows, leftᵀ·right, to autograd as the gradient of the weight."""
    with torch.no_grad():
        product = F.grouped_mm(left.mT, right, offs=offsets)
    weight.backward(product.to(weight.dtype))


class _Whole(torch.autograd.Function):
    """The identity; its gradient is contiguous, as the operator needs it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].contiguous()
