"""ReLU and max-pool that save one and four bits per element (Gist, ISCA 2018, section 4.1).

A ReLU's backward needs the sign of its output, a max-pool's the position of each window's maximum. So a ReLU before a
max-pool saves 1 bit per element, and the pool 4 bits per output element, instead of the ReLU's output and indices of 8
bytes. Every ReLU saves its bits; if another operation, such as a convolution, saves its output too, the values are
stored for that one only.

[Note: calls] A mode of torch's functions around the model's forward intercepts each call of a ReLU or a max-pool, of a
module or a function, and calls one of the functions below instead. The model is not changed. Not replaced are: compiled
or scripted code, forwards that torch's own checkpointing recomputes (without the mode), windows of more than 16
elements, pools that return indices, small tensors, and subclasses of tensors.

[Note: compiled modules] torch 2.13 returns a wrong tensor from a compiled module inside a mode of functions if its
graph breaks at a hook that is always called. So compiled modules run outside of the mode, and the compiler chooses
their saved tensors.

[Note: in place] Inside of the forward of `nn.Sequential`, only the ReLU behind a convolution, a linear layer or a norm
reads its output, since those save none of their outputs. There the ReLU overwrites its input, unless a hook of either
reads it. A model that calls the layers of a sequence by itself may keep their outputs.
"""

import copy
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any
from weakref import ReferenceType, ref

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._prims_common import suggest_memory_format
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from zeroshard.saved.codes.bits import pack_bits, pack_halves, unpack_bits, unpack_halves
from zeroshard.saved.compression import CompressedStore
from zeroshard.saved.kept import is_compiled, recomputed_by_others
from zeroshard.units.forwards import insert
from zeroshard.units.hooks import Hook, outside

POSITIONS = 16  # positions in a window that 4 bits encode
EXACT = (  # [Note: what is compressed] of `compression`
    *(F.scaled_dot_product_attention, F.multi_head_attention_forward, F.cross_entropy, F.nll_loss, F.kl_div),
    *(F.log_softmax, torch.log_softmax, Tensor.log_softmax, torch.logsumexp, Tensor.logsumexp, F.ctc_loss),
    *(F.gaussian_nll_loss, F.poisson_nll_loss, F.binary_cross_entropy, F.binary_cross_entropy_with_logits),
    *(F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss),
)
SAVE_NO_OUTPUT = (_ConvNd, _BatchNorm, nn.Linear, nn.GroupNorm, nn.LayerNorm)
Replacement = Callable[[Callable[..., Any], Any, Any], Any]


class ReluBits(torch.autograd.Function):
    """A ReLU of x [...] that saves one bit per element."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """The output [...]."""
        y = torch.relu(x)
        _save_signs(ctx, y)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """The gradient of x."""
        return _masked(ctx, gradients[0])


class ReluBitsInPlace(torch.autograd.Function):
    """A ReLU that writes over x [...], and saves one bit per element."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """x, changed."""
        ctx.mark_dirty(x.relu_())
        _save_signs(ctx, x)
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """The gradient of x as it was."""
        return _masked(ctx, gradients[0])


class PoolPositions(torch.autograd.Function):
    """A max-pool of x [..., C, H, W] that saves four bits per element of its output: the position in the window."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, window: "_Window") -> Tensor:
        """The output [..., C, H', W']."""
        y: Tensor
        y, indices = torch.ops.aten.max_pool2d_with_indices(x, *window)
        kernel, _, _, dilation, _ = window
        width = x.shape[-1]
        rows, columns = _corners(y, window)
        rows = (indices.div(width, rounding_mode="floor") - rows).div_(dilation[0], rounding_mode="floor")
        columns = (indices % width - columns).div_(dilation[1], rounding_mode="floor")
        positions = rows.mul_(kernel[1]).add_(columns).to(torch.uint8)
        ctx.save_for_backward(pack_halves(_in_memory_order(positions)))
        ctx.window, ctx.shape, ctx.out = window, x.shape, (y.shape, positions.stride())
        ctx.memory_format = suggest_memory_format(x)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """The gradient of x."""
        (gradient,), (packed,) = gradients, ctx.saved_tensors
        shape, stride = ctx.out
        positions = unpack_halves(packed, shape.numel()).as_strided(shape, stride).long()
        kernel, _, _, dilation, _ = ctx.window
        rows, columns = _corners(positions, ctx.window)
        rows = rows + positions.div(kernel[1], rounding_mode="floor") * dilation[0]
        indices = rows.mul_(ctx.shape[-1]).add_(columns).add_(positions.remainder_(kernel[1]).mul_(dilation[1]))
        like = gradient.new_empty(1).expand(ctx.shape)  # only its shape and memory format are read
        if ctx.memory_format is not torch.contiguous_format:
            like = gradient.new_empty(ctx.shape).to(memory_format=ctx.memory_format)
        result: Tensor = torch.ops.aten.max_pool2d_with_indices_backward(gradient, like, *ctx.window, indices)
        return result, None


_Window = tuple[list[int], list[int], list[int], list[int], bool]  # kernel, stride, padding, dilation, ceil_mode


class GistMode(TorchFunctionMode):
    """Replaces ReLUs and max-pools by the functions above, and sets a store's `exact` for `EXACT` ([Note: calls]).

    Args:
        store: the store of saved tensors.
        binarize: whether to replace ReLUs and max-pools.
        smallest: bytes of the smallest tensor to replace.
    """

    def __init__(self, store: CompressedStore, binarize: bool, smallest: int) -> None:
        super().__init__()
        self._store, self._smallest = store, smallest
        self.overwritten: Tensor | None = None  # the input of a ReLU that may write over it
        self._known: dict[Any, Replacement] = dict.fromkeys(EXACT, self._exactly)
        if binarize:
            self._known |= dict.fromkeys((F.relu, torch.relu, Tensor.relu), self._relu)
            self._known |= dict.fromkeys((torch.relu_, Tensor.relu_), self._relu_in_place)
            self._known |= dict.fromkeys((F.max_pool2d, torch.max_pool2d), self._max_pool)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        replacement = self._known.get(func)
        if replacement is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        return replacement(func, args, kwargs or {})

    def _exactly(self, func: Any, args: Any, kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        before, self._store.exact = self._store.exact, True
        try:
            return func(*args, **kwargs)
        finally:
            self._store.exact = before

    def _relu(self, func: Any, args: Any, kwargs: Any) -> Any:
        x = args[0] if args else kwargs.get("input")
        may_overwrite, self.overwritten = x is self.overwritten, None
        if not self._replaces(x):
            return func(*args, **kwargs)
        overwrites = may_overwrite and not x.is_leaf and not x._is_view()
        if (len(args) > 1 and args[1]) or kwargs.get("inplace", False):
            return self._relu_in_place(func, args, kwargs)
        return (ReluBitsInPlace if overwrites else ReluBits).apply(x)  # type: ignore[no-untyped-call]

    def _relu_in_place(self, func: Any, args: Any, kwargs: Any) -> Any:
        x = args[0] if args else kwargs.get("input")
        if not self._replaces(x) or x.is_leaf or x._is_view():
            return func(*args, **kwargs)
        return ReluBitsInPlace.apply(x)  # type: ignore[no-untyped-call]

    def _max_pool(self, func: Any, args: Any, kwargs: Any) -> Any:
        given = dict(zip(NAMES, args, strict=False)) | kwargs
        x = given.get("input")
        if given.get("return_indices") or not self._replaces(x) or x.dim() not in (3, 4):
            return func(*args, **kwargs)
        kernel = _pair(given["kernel_size"])
        if kernel[0] * kernel[1] > POSITIONS:
            return func(*args, **kwargs)
        stride = _pair(given.get("stride") or kernel)
        padding, dilation = _pair(given.get("padding", 0)), _pair(given.get("dilation", 1))
        window = kernel, stride, padding, dilation, bool(given.get("ceil_mode", False))
        return PoolPositions.apply(x, window)  # type: ignore[no-untyped-call]

    def _replaces(self, x: Any) -> bool:
        """Whether to replace an operation on x ([Note: calls])."""
        if not isinstance(x, Tensor) or not (torch.is_grad_enabled() and x.requires_grad and x.is_floating_point()):
            return False
        known = type(x).__torch_function__ in (Tensor.__torch_function__, torch._C._disabled_torch_function_impl)
        if not known or x.layout is not torch.strided or x.nbytes < self._smallest:
            return False
        return torch._C._functorch.peek_interpreter_stack() is None and not recomputed_by_others(in_backward=False)


NAMES = ("input", "kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")  # of `F.max_pool2d`


def enter_forwards(model: nn.Module, mode: GistMode, in_place: bool) -> None:
    """Run the forwards of a model in a mode.

    Args:
        in_place: whether ReLUs overwrite inputs without other readers ([Note: in place]).
    """
    opened: list[GistMode] = []
    if is_compiled(model):
        return
    for module in list(model.modules()):
        if module._compiled_call_impl is not None:
            module._compiled_call_impl = _Outside(mode, module._compiled_call_impl)
        elif is_compiled(module) and not isinstance(module, torch.jit.ScriptModule):
            insert(module, "compiled", partial(_Outside, mode))

    def enter(*_: Any) -> None:
        mode.__enter__()  # type: ignore[no-untyped-call]
        opened.append(mode)

    def leave(*_: Any) -> None:
        if opened:
            opened.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    model.register_forward_pre_hook(outside(enter))
    model.register_forward_hook(outside(leave), always_call=True)
    for sequence, before, relu in _in_sequence(model) if in_place else ():
        _Overwriting(mode, sequence, before, relu)


class _Outside:
    """A compiled call outside of a mode ([Note: compiled modules]); a deep copy is the plain compiled call."""

    def __init__(self, mode: GistMode, call: Callable[..., Any]) -> None:
        self._mode, self._call = mode, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        stack = _get_current_function_mode_stack()
        if not stack or stack[-1] is not self._mode:
            return self._call(*args, **kwargs)
        self._mode.__exit__(None, None, None)
        try:
            return self._call(*args, **kwargs)
        finally:
            self._mode.__enter__()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._call, memo)


def _in_sequence(model: nn.Module) -> list[tuple[nn.Module, nn.Module, nn.Module]]:
    """Triples of a sequence, a layer that saves no output, and the ReLU behind it ([Note: in place])."""
    found: list[tuple[nn.Module, nn.Module, nn.Module]] = []
    for sequence in model.modules():
        layers = list(sequence) if type(sequence) is nn.Sequential else []
        for before, relu in pairwise(layers):
            own = type(before).forward.__module__.startswith("torch.nn.modules.") and "forward" not in vars(before)
            if type(relu) is nn.ReLU and isinstance(before, SAVE_NO_OUTPUT) and own:
                found.append((sequence, before, relu))
    return found


class _Overwriting:
    """Hooks that set the input a ReLU in a sequence may overwrite ([Note: in place])."""

    def __init__(self, mode: GistMode, sequence: nn.Module, before: nn.Module, relu: nn.Module) -> None:
        self._mode, self._before, self._relu = mode, before, relu
        self._running = 0  # forwards of the sequence
        self._made: ReferenceType[Tensor] | None = None  # output of `before` in the current one
        sequence.register_forward_pre_hook(Hook(self._begin))
        sequence.register_forward_hook(Hook(self._end), always_call=True)
        self._own = (
            before.register_forward_hook(Hook(self._keep)).id,
            relu.register_forward_pre_hook(Hook(self._tell)).id,
        )

    def _begin(self, *_: Any) -> None:
        self._running += 1

    def _end(self, *_: Any) -> None:
        self._running, self._made = max(0, self._running - 1), None

    def _keep(self, before: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_dynamo_compiling():
            self._made = ref(output) if self._running and isinstance(output, Tensor) else None

    def _tell(self, relu: nn.Module, args: Any) -> None:
        if torch.compiler.is_dynamo_compiling() or not torch.is_grad_enabled():
            return
        made, self._made = self._made, None
        alone = made is not None and bool(args) and made() is args[0] and not self._seen
        self._mode.overwritten = args[0] if alone else None

    @property
    def _seen(self) -> bool:
        """Whether another hook reads the tensor between the layers."""
        hooks = {*self._before._forward_hooks, *self._relu._forward_pre_hooks, *self._relu._forward_hooks}
        return bool(hooks - {*self._own} or _global_forward_hooks or _global_forward_pre_hooks)


def _save_signs(ctx: Any, y: Tensor) -> None:
    flags = (y <= 0).logical_not_()  # a NaN passes its gradient on, as in torch
    ctx.save_for_backward(pack_bits(_in_memory_order(flags)))
    ctx.shape, ctx.stride = y.shape, flags.stride()


def _masked(ctx: Any, gradient: Tensor) -> Tensor:
    flags = unpack_bits(ctx.saved_tensors[0], ctx.shape.numel()).as_strided(ctx.shape, ctx.stride)
    result: Tensor = torch.ops.aten.threshold_backward(gradient, flags, 0)
    return result


def _in_memory_order(tensor: Tensor) -> Tensor:
    """A tensor without gaps [...] as [n], in memory order."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _corners(y: Tensor, window: _Window) -> tuple[Tensor, Tensor]:
    """The first row [H', 1] and column [W'] of each window; negative in padding."""
    _, stride, padding, _, _ = window
    rows = torch.arange(y.shape[-2], device=y.device).mul_(stride[0]).sub_(padding[0]).unsqueeze(1)
    return rows, torch.arange(y.shape[-1], device=y.device).mul_(stride[1]).sub_(padding[1])


def _pair(value: Any) -> list[int]:
    """One number or two as two."""
    values = [value] if isinstance(value, int) else list(value)
    return values * 2 if len(values) == 1 else values
