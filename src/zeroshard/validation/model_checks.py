"""Refusals of models that an engine cannot take, and of calls that would change a model behind its engine."""

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from types import MethodType
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zeroshard.access.writes import Writes
from zeroshard.errors import ModelError, PlanError, UnusedParameterWarning
from zeroshard.parts.part import Parts
from zeroshard.parts.weights import ABSENT
from zeroshard.precision.cast import DTYPES
from zeroshard.quantized.weights import QuantizedWeight
from zeroshard.text import format_names
from zeroshard.units.compiling import follow_compiling
from zeroshard.units.hooks import Hook
from zeroshard.units.ignored import is_ignored
from zeroshard.units.watched_parameters import WatchedParameter

WRAPPERS = {  # classes that make their own gradients or slices, and the way to the model inside
    "DistributedDataParallel": "its .module",
    "DataParallel": "its .module",
    "DeepSpeedEngine": "its .module",
    "FullyShardedDataParallel": "the model before it was wrapped",
    "FSDPModule": "the model before fully_shard",
}


class Running(Protocol):
    """Passes of the model under way, and writes into its parameters."""

    writes: Writes

    @property
    def running(self) -> bool:
        """Whether a forward or a backward of the model is under way."""


FIRST_STEPS = 2  # after which a parameter of an adapter has had a gradient; a zero counts as one


def check_model(model: nn.Module) -> None:
    """Refuse a model that no engine can take.

    Raises:
        ModelError: the model is an engine's already, wrapped by another library, or not yet initialised.
    """
    for path, module in model.named_modules():
        where = f"The module {path!r} of the model" if path else "The model"
        wrapper = next((kind.__name__ for kind in type(module).__mro__ if kind.__name__ in WRAPPERS), None)
        if wrapper is not None:
            raise ModelError(
                f"{where} is a {wrapper}, which divides gradients or parameters among ranks by itself, and so does the "
                f"engine. Give the engine {WRAPPERS[wrapper]}."
            )
        if _has_engine(module):
            raise ModelError(
                f"{where} already belongs to an engine, which keeps its parameters in buffers of its own and would not "
                f"see another one's updates. Go on with that engine, or make the second from a new model: build it "
                f"again, or take copy.deepcopy(model) inside `with engine.gathered():`."
            )
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            _check_tensor(f"{path}.{name}" if path else name, tensor, module)
    _check_overlaps(model)


def check_computing(found: Sequence[QuantizedWeight], model: nn.Module, compute: torch.dtype | None) -> None:
    """Refuse 4-bit layers that compute in fp16 in a model that does not; warn of those that compute in fp32.

    Args:
        compute: the plan's dtype of computation; None for the parameters' own.

    Raises:
        ModelError: fp16 would overflow, and lose small gradients, without a loss scale.
    """
    trained = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    around = {compute} if compute is not None else trained
    for weight in found:
        own: Any = getattr(weight.module, "compute_dtype", None)
        if own not in DTYPES.values() or own in around or not around:
            continue
        name, rest = _short(own), _short(next(iter(around)))
        if own is torch.float16:
            raise ModelError(
                f"'{weight.label}' is a {weight.format.label} that computes in {name} (bnb_4bit_compute_dtype), and "
                f"the model computes in {rest}: magnitudes over 65,504 become infinite there, and gradients under 6e-8 "
                f"become 0, without a loss scale. Set bnb_4bit_compute_dtype=torch.{rest}, or Plan(precision='fp16')."
            )
        if own is torch.float32:
            warnings.warn(
                f"'{weight.label}' and other 4-bit weights compute in {name} (bnb_4bit_compute_dtype) in a model that "
                f"computes in {rest}: it is exact, and slower than bnb_4bit_compute_dtype=torch.{rest}.",
                stacklevel=3,
            )
            return


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def guard(model: nn.Module, forward: Running, staged: bool) -> None:
    """Make calls raise that load, save or move parameters of `model` without the engine.

    Raises:
        PlanError: a module is compiled with graphs that read weights at fixed addresses.
    """
    follow_compiling(model)
    for module in model.modules():
        vars(module)["_apply"] = _Apply(module, forward)
        if module._parameters:
            module.register_load_state_dict_pre_hook(Hook(partial(_refuse_load, forward, staged)))
            module.register_state_dict_pre_hook(Hook(partial(_refuse_absent, forward)))


def _has_engine(module: nn.Module) -> bool:
    """Whether the module belongs to an engine, or to one whose construction failed."""
    hooks = module._forward_pre_hooks.values()
    watched = any(isinstance(p, WatchedParameter) and p.watcher() is not None for p in module._parameters.values())
    return watched or any(isinstance(hook, Hook) for hook in hooks)


def _check_tensor(name: str, tensor: torch.Tensor | None, module: nn.Module) -> None:
    if tensor is None:
        return
    if is_lazy(tensor):
        raise ModelError(
            f"'{name}' of {type(module).__name__} has no shape yet: lazy modules learn it from their first input. Call "
            f"the model on one batch, then make the optimizer and the engine."
        )
    if is_traceable_wrapper_subclass(tensor):
        raise ModelError(
            f"'{name}' is a {type(tensor).__name__}, and the engine slices plain tensors itself. Give it the model "
            f"before it was sliced or quantized."
        )
    if tensor.layout is not torch.strided:
        raise ModelError(
            f"'{name}' is of layout {tensor.layout}, and the engine places, sends and saves dense tensors. Register "
            f"the tensors that it is made of (its indices and values), or keep it as a plain attribute of "
            f"{type(module).__name__}, which stays as it is."
        )


def _check_overlaps(model: nn.Module) -> None:
    """Refuse parameters that view common elements: in flat buffers each has elements of its own."""
    places: dict[int, list[tuple[int, int, str]]] = {}
    for name, parameter in model.named_parameters():
        if parameter.layout is torch.strided and parameter.numel():
            first = int(parameter.storage_offset())
            last = first + sum((n - 1) * step for n, step in zip(parameter.shape, parameter.stride(), strict=True))
            places.setdefault(parameter.untyped_storage()._cdata, []).append((first, last, name))
    for extents in places.values():
        for (_, last, name), (first, _, other) in pairwise(sorted(extents)):
            if first <= last:
                way = "Use one nn.Parameter under both names (tied weights), or one of which the forward takes views."
                if "lora_" in name:
                    way = (
                        "Leave out ensure_weight_tying of peft; or name the layer in modules_to_save, not as a target."
                    )
                raise ModelError(
                    f"'{name}' and '{other}' are parameters over the same memory, which they would not share in the "
                    f"engine's buffers. {way}"
                )


def refuse_renormalising(model: nn.Module, sliced: bool) -> None:
    """Refuse embeddings with `max_norm` where weights are sliced or copied over ranks.

    Raises:
        PlanError: a module has it.
    """
    for path, module in model.named_modules() if sliced else ():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            raise PlanError(
                f"'{path}' has max_norm={module.max_norm}, so its forward writes into the weights, in other rows on "
                f"each rank. Set max_norm to None, and renormalise inside `with engine.gathered():` between steps."
            )


def warn_of_unused(parts: Parts, never_written: Sequence[str]) -> None:
    """Warn of trained parameters without a gradient in the first steps, where others are frozen (adapters).

    Args:
        never_written: parameters that no backward of any rank has reached so far.
    """
    if len(parts.trained) == len(parts.all):
        return
    trained = {
        entry.name
        for part, _ in parts.trained
        for parameter, entry in zip(part.flat.parameters, part.flat.index.entries, strict=True)
        if parameter.requires_grad
    }
    unused = sorted(trained.intersection(never_written))
    if unused:
        warnings.warn(
            f"{format_names(unused)} had no gradient on any rank in the first {FIRST_STEPS} steps, so nothing trains "
            f"{'them' if len(unused) > 1 else 'it'}: the forward does not use them, or their results do not reach the "
            f"loss. Look at the modules that the adapter names (target_modules, modules_to_save), or freeze them.",
            UnusedParameterWarning,
            stacklevel=5,
        )


def _refuse_load(
    forward: Running,
    staged: bool,
    module: nn.Module,
    values: Mapping[str, Any],
    prefix: str,
    *more: Any,
) -> None:
    """Refuse a `load_state_dict` of a module whose writes would be lost."""
    assign = "assign_to_params_buffers" in more[0]
    for name, parameter in module._parameters.items():
        if parameter is None or prefix + name not in values or (forward.writes.allowed and not assign):
            continue
        if is_ignored(parameter):
            continue
        part = forward.writes.part_of(parameter)
        whole = "Call engine.load_state_dict(state) or engine.load_weights(path) on every rank"
        way = f"{whole}, or write `with engine.gathered(): model.load_state_dict(...)`"
        if staged:
            way = whole
            lost = "the model is cut into stages, and each rank has only its own"
        elif assign:
            lost = "assign=True puts new tensors into the model, and the engine updates the old ones"
        elif part is None or part.lost is None:
            continue
        else:
            lost = f"it would be written while {part.lost}"
        raise PlanError(f"load_state_dict cannot write '{prefix + name}' now: {lost}. {way}.")


def _refuse_absent(forward: Running, module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Refuse a `state_dict` of a module whose values are on other ranks."""
    for name, parameter in module._parameters.items():
        part = forward.writes.part_of(parameter)
        if not keep_vars and part is not None and part.weights.residence in ABSENT:
            raise PlanError(
                f"The parameters are sliced (zero=3), so '{prefix + name}' in the state_dict would hold NaN. Use "
                f"engine.state_dict(), or call state_dict() inside `with engine.gathered():` on every rank."
            )


class _Apply:
    """Replaces `Module._apply`, by which `to`, `cuda`, `half` and `float` change parameters."""

    __slots__ = ("_forward", "_module")

    def __init__(self, module: nn.Module, forward: Running) -> None:
        self._module, self._forward = weakref.ref(module), weakref.ref(forward)

    def __call__(self, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        """Apply `function` if it moves and casts no parameter; inside a forward it may ([Note: writes])."""
        module, forward = self._module(), self._forward()
        assert module is not None
        outside = forward is not None and not forward.running
        for name, parameter in module.named_parameters(recurse=recurse) if outside else ():
            if is_ignored(parameter):
                continue
            with torch.no_grad():
                probe = torch.empty((), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
                moved = None if parameter.is_meta else function(probe)
            if moved is not probe:
                became = "" if moved is None else f" to {moved.dtype} on {moved.device}"
                raise PlanError(
                    f"The parameter '{name}' ({parameter.dtype} on {parameter.device}) cannot be converted or "
                    f"moved{became} any more: the engine keeps it in its buffers. Call to(), half(), float(), cuda() "
                    f"and the like before the engine is made; Plan(precision=...) sets the dtype of computation, and "
                    f"init_mesh(device=...) the device."
                )
        applied: nn.Module = type(module)._apply(module, function, recurse)
        return applied

    def __reduce__(self) -> tuple[Any, ...]:
        module = self._module()
        assert module is not None
        return _plain_apply, (module,)

    def __deepcopy__(self, memo: dict[int, Any]) -> MethodType:
        """A copy of the module is a plain one."""
        module = self._module()
        assert module is not None
        return _plain_apply(memo[id(module)])


def _plain_apply(module: nn.Module) -> MethodType:
    return MethodType(type(module)._apply, module)
