"""The dtype in which each parameter computes, and the casts around modules in fp32."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.parametrizations import _Orthogonal, _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from zeroshard.errors import ConfigError, PlanError
from zeroshard.quantized.weights import KEEPS_DTYPE
from zeroshard.units.hooks import map_tensors

FP32 = "computes_in_fp32"  # an attribute, true of modules that compute in fp32 without being named
RETURNS_FP32 = "returns_fp32"  # and one of modules whose outputs are not cast back
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def floating_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """A floating-point dtype, given as such or by a name of a plan or of torch, "bf16" or "bfloat16"; None stays None.

    Raises:
        ConfigError: it is none.
    """
    found = DTYPES.get(dtype, getattr(torch, dtype, dtype)) if isinstance(dtype, str) else dtype
    if found is not None and not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise ConfigError(f"dtype is {dtype!r}; it must be a floating-point one, such as torch.bfloat16, or None.")
    return found


@dataclass(frozen=True, slots=True)
class Precision:
    """The dtype of computation; None keeps every parameter in its own dtype."""

    compute: torch.dtype | None

    @classmethod
    def named(cls, name: str) -> "Precision":
        """From a plan's "fp32" (the model's own dtypes), "bf16" or "fp16"."""
        return cls(None if name == "fp32" else DTYPES[name])

    def dtype_of(self, parameter: nn.Parameter, stays_fp32: bool) -> torch.dtype:
        """The dtype in which a parameter computes; integers and statistics of quantised weights stay as they are."""
        if self.compute is None or not parameter.dtype.is_floating_point or getattr(parameter, KEEPS_DTYPE, False):
            return parameter.dtype
        return torch.float32 if stays_fp32 else self.compute

    def cast_inputs(self, args: Any) -> Any:
        """A model's inputs with their floating-point tensors in the dtype of computation, those in dataclasses too."""
        return args if self.compute is None else _cast(args, self.compute)


def keep_in_fp32(model: nn.Module, wanted: Sequence[str], precision: Precision) -> set[nn.Parameter]:
    """Make modules compute in fp32, with casts of inputs and outputs: those named, and those with the attribute `FP32`.

    So does a layer that shares a parameter with one of them, such as an output layer tied to an embedding.

    Args:
        wanted: classes or paths.

    Returns:
        The parameters of those modules.

    Raises:
        PlanError: a name fits no module, or another module has parameters and buffers of two dtypes and a kernel that
            takes one.
    """
    kept: set[nn.Parameter] = set()
    names = {type(module).__name__ for module in model.modules()} | {path for path, _ in model.named_modules()}
    for want in wanted:
        if want not in names:
            near = difflib.get_close_matches(want, list(names), n=1)
            classes = ", ".join(sorted({type(module).__name__ for module in model.modules()}))
            hint = f"Did you mean {near[0]!r}?" if near else f"Name a path or one of its classes: {classes}."
            raise PlanError(f"fp32_modules names {want!r}, which is no class and no path in the model. {hint}")
    if precision.compute is None:
        return kept
    outermost: list[str] = []
    computing = _computing_in_fp32(model, wanted)
    for path, module in model.named_modules():
        inside = any(not outer or path.startswith(outer + ".") for outer in outermost)
        if module in computing and not inside:
            outermost.append(path)
            kept.update(module.parameters())
            module.register_forward_pre_hook(_to_fp32, with_kwargs=True)
            if not getattr(module, RETURNS_FP32, False):
                module.register_forward_hook(_FromFp32(precision.compute))
    _refuse_fp32_buffers(model, outermost, precision.compute, wanted)
    return kept


def _computing_in_fp32(model: nn.Module, wanted: Sequence[str]) -> set[nn.Module]:
    """Modules named by the user or marked `FP32`, and layers that share a parameter with them."""
    named = [m for path, m in model.named_modules() if path in wanted or type(m).__name__ in wanted]
    found = {*named, *(m for m in model.modules() if getattr(m, FP32, False))}
    layers = [m for m in model.modules() if m._parameters and not m._modules]
    before = -1
    while before < len(found):
        before, kept = len(found), {p for m in found for p in m.parameters()}
        found.update(m for m in layers if not kept.isdisjoint(m._parameters.values()))
    return found


def _refuse_fp32_buffers(model: nn.Module, kept: Sequence[str], compute: torch.dtype, wanted: Sequence[str]) -> None:
    """Refuse modules of torch whose kernels take parameters and buffers of one dtype, if these differ.

    Args:
        kept: paths of the modules that compute in fp32.
    """
    found: dict[str, tuple[str, str, torch.dtype]] = {}  # by entry for fp32_modules: class, buffer, its dtype
    for path, module in model.named_modules():
        inside = any(not outer or path == outer or path.startswith(outer + ".") for outer in kept)
        buffer = None if inside else _mixed_buffer(module)
        if buffer is None or module.get_buffer(buffer).dtype == compute:
            continue
        owner = path.partition(".parametrizations.")[0]
        name = type(module).__name__ if isinstance(module, _BatchNorm) else owner
        found.setdefault(name, (type(module).__name__, f"{path}.{buffer}".lstrip("."), module.get_buffer(buffer).dtype))
    if found:
        kind, buffer, dtype = next(iter(found.values()))
        short = {name: str(d).removeprefix("torch.") for name, d in (("have", dtype), ("want", compute))}
        raise PlanError(
            f"The {kind} of '{buffer}' computes with that buffer, which is {short['have']}, and with parameters that "
            f"would be {short['want']}; its kernel takes one dtype. Keep such modules in fp32 by "
            f"Plan(fp32_modules={(*wanted, *found)!r})."
        )


def _mixed_buffer(module: nn.Module) -> str | None:
    """The buffer that a module's kernel needs in the dtype of the parameters; None if there is none."""
    if isinstance(module, _BatchNorm) and module.affine and module.running_mean is not None:
        return "running_mean"
    if isinstance(module, (_SpectralNorm, _Orthogonal)) and module._buffers:
        return next(iter(module._buffers))
    old = any(isinstance(hook, SpectralNorm) for hook in module._forward_pre_hooks.values())
    return next(name for name in module._buffers if name.endswith("_u")) if old else None


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, tree)


def _to_fp32(module: nn.Module, args: Any, kwargs: Any) -> Any:
    return _cast(args, torch.float32), _cast(kwargs, torch.float32)


@dataclass(frozen=True, slots=True)
class _FromFp32:
    dtype: torch.dtype

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return _cast(output, self.dtype)
