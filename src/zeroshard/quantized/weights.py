"""Quantised weights of other packages, with their statistics as parameters of the model.

[Note: statistics] A quantised weight is several tensors: the codes, the largest magnitude of each block or row, for
double quantisation the scales of those, an offset. bitsandbytes keeps all but the codes as attributes of Python
objects, torchao all inside of one tensor subclass; so every rank would hold them whole, and no ledger would count them.
Here each of them becomes a frozen parameter of the module (`weight_absmax` beside `weight`), which is sliced, gathered,
offloaded, sent to its pipeline stage and saved like other frozen parameters, and keeps its dtype under mixed precision.
The objects of the package then refer to these parameters, so that its own modules and kernels compute with the gathered
values. Tables of code values (64 and 1,024 bytes) are the same for all weights, and all weights share one.
"""

import copy
import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import MethodType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zeroshard.errors import ModelError
from zeroshard.units import values_of

Parameters = Mapping[str, nn.Parameter]  # by the ends of their names
Row = dict[str, Any]  # of `quantized.stored`: type, blocksize, double, shape, dtype and layout of a weight
MATRIX, TURNED, STACK = "matrix", "turned", "stack"  # layouts of weights
NESTED_BLOCK = 256  # scales under one scale, with double quantisation
KEEPS_DTYPE = "keeps_dtype"  # an attribute, true of parameters that mixed precision does not cast


class Format(Protocol):
    """The way in which a package keeps quantised weights.

    Attributes:
        label: in messages.
    """

    label: str

    def fits(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter is a weight of this kind."""

    def statistics(self, module: nn.Module, parameter: nn.Parameter) -> dict[str, Tensor] | None:
        """The tensors of a weight besides the parameter itself, by the ends of their names; None before it has any."""

    def join(self, module: nn.Module, name: str, tensors: Parameters) -> None:
        """Make the objects of the package refer to these tensors.

        Args:
            name: of the weight in the module.
            tensors: by the ends of their names; the weight itself, where it is a parameter, under "".
        """

    def described(self, module: nn.Module, name: str) -> tuple[torch.Size, torch.dtype]:
        """Shape and dtype of the weight that is stood for."""

    def dequantised(self, module: nn.Module, name: str, tensors: Mapping[str, Tensor]) -> Tensor:
        """The weight that whole tensors stand for."""

    def row(self, module: nn.Module, name: str) -> Row | None:
        """The facts with which the weight is dequantised without its module; None if these are not enough."""


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A quantised weight of a model.

    Attributes:
        path: of its module.
        module: it.
        name: of the weight in the module.
        format: the way in which it is kept.
        ends: of the names of its tensors; "" for a parameter of the weight's own name.
    """

    path: str
    module: nn.Module
    name: str
    format: Format
    ends: tuple[str, ...]

    @property
    def label(self) -> str:
        """The name of the weight in the model."""
        return f"{self.path}.{self.name}".lstrip(".")

    @property
    def tensors(self) -> dict[str, nn.Parameter]:
        """Its tensors, by the ends of their names."""
        return {end: self.module.get_parameter(end_of(self.name, end)) for end in self.ends}

    @property
    def described(self) -> tuple[torch.Size, torch.dtype]:
        """Shape and dtype of the weight that its tensors stand for."""
        return self.format.described(self.module, self.name)

    def dequantised(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The weight that whole tensors stand for.

        Args:
            tensors: by the ends of their names.
        """
        return self.format.dequantised(self.module, self.name, tensors)

    def join(self) -> None:
        """Make the package's objects refer to the parameters that the module has now; none of other stages."""
        tensors = self.tensors
        for end, parameter in tensors.items():
            if end:
                setattr(parameter, KEEPS_DTYPE, True)
        if not any(parameter.is_meta for parameter in tensors.values()):
            self.format.join(self.module, self.name, tensors)


def end_of(name: str, end: str) -> str:
    """The name of a tensor of a quantised weight in its module."""
    return f"{name}_{end}" if end else name


class FourBits:
    """Blocks of 4-bit codes in a parameter of bytes (`bitsandbytes.nn.Params4bit`), quantised once or twice.

    Attributes:
        label: in messages.
    """

    label = "4-bit weight of bitsandbytes"

    def fits(self, parameter: nn.Parameter) -> bool:
        """Whether it is a `Params4bit`."""
        return "quant_state" in vars(parameter)

    def statistics(self, module: nn.Module, parameter: Any) -> dict[str, Tensor] | None:
        """Scales of the blocks; of double quantisation also the scales of those, and their mean."""
        state = parameter.quant_state
        if state is None:
            return None
        found = {"absmax": state.absmax}
        if state.nested:
            found |= {"nested_absmax": state.state2.absmax, "offset": state.offset}
        return found

    def join(self, module: Any, name: str, tensors: Parameters) -> None:
        """Put them into the weight's `quant_state`."""
        weight: Any = tensors[""]
        state, device = weight.quant_state, tensors["absmax"].device
        if weight.dtype is not torch.uint8:  # "quant_storage", numbers that no one may cast
            weight.data = weight.data.view(torch.uint8).reshape(-1, 1)
            weight.quant_storage = torch.uint8
        state.absmax, state.code = tensors["absmax"], table(state.code, device)
        if state.nested:
            state.offset, state.state2.absmax = tensors["offset"], tensors["nested_absmax"]
            state.state2.code = table(state.state2.code, device)
        if hasattr(module, "quant_state"):
            module.quant_state = state
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # evaluation would replace the codes by others, for good

    def described(self, module: Any, name: str) -> tuple[torch.Size, torch.dtype]:
        """As the package's object of statistics has them."""
        state = self._state(module, name)
        return _turned(module, state.shape), state.dtype

    def dequantised(self, module: Any, name: str, tensors: Mapping[str, Tensor]) -> Tensor:
        """By the package's own function."""
        state = copy.copy(self._state(module, name))
        state.absmax = tensors["absmax"]
        if state.nested:
            state.offset, state.state2 = tensors["offset"], copy.copy(state.state2)
            state.state2.absmax = tensors["nested_absmax"]
        functional = importlib.import_module("bitsandbytes").functional
        values: Tensor = functional.dequantize_4bit(tensors[""].view(-1, 1), state)
        return values.T if is_turned(module) else values

    def row(self, module: Any, name: str) -> Row | None:
        """As the package's object of statistics has them."""
        state = self._state(module, name)
        if state.nested and state.state2.blocksize != NESTED_BLOCK:
            return None
        layout = TURNED if is_turned(module) else MATRIX
        return row_of(state.quant_type, state.blocksize, bool(state.nested), list(state.shape), state.dtype, layout)

    def _state(self, module: Any, name: str) -> Any:
        """The object of the module, which stays where the weight is on another stage; embeddings have none."""
        return getattr(module, "quant_state", None) or getattr(module, name).quant_state


class EightBits:
    """Rows of 8-bit numbers (`bitsandbytes.nn.Int8Params`).

    Attributes:
        label: in messages.
    """

    label = "8-bit weight of bitsandbytes"

    def fits(self, parameter: nn.Parameter) -> bool:
        """Whether it is an `Int8Params` for frozen weights."""
        return vars(parameter).get("has_fp16_weights") is False

    def statistics(self, module: nn.Module, parameter: Any) -> dict[str, Tensor] | None:
        """The largest magnitude of each row."""
        scales = parameter.SCB if parameter.SCB is not None else getattr(getattr(module, "state", None), "SCB", None)
        return None if scales is None else {"SCB": scales}

    def join(self, module: Any, name: str, tensors: Parameters) -> None:
        """Put them into the module's state, where its forward takes them from; of embeddings into the weight."""
        weight: Any = tensors[""]
        state = getattr(module, "state", None)
        if state is None:
            weight.SCB = tensors["SCB"]
            return
        kind: Any = type(state)
        if not isinstance(vars(kind).get("CB"), property):
            state.__class__ = _with_codes_of_weight(kind)
        state.weight, state.SCB = weight, tensors["SCB"]
        weight.CB = weight.SCB = None

    def described(self, module: Any, name: str) -> tuple[torch.Size, torch.dtype]:
        """The shape of the codes, and the dtype in which the weight was read."""
        return _turned(module, getattr(module, name).shape), getattr(module, "source_dtype", torch.float32)

    def dequantised(self, module: Any, name: str, tensors: Mapping[str, Tensor]) -> Tensor:
        """By the package's own function."""
        functional = importlib.import_module("bitsandbytes").functional
        values: Tensor = functional.int8_vectorwise_dequant(tensors[""], tensors["SCB"])
        return values.T if is_turned(module) else values

    def row(self, module: Any, name: str) -> Row | None:
        """Without a shape, which is that of the codes."""
        layout = TURNED if is_turned(module) else MATRIX
        return row_of("int8", 0, False, None, getattr(module, "source_dtype", torch.float32), layout)


def is_turned(module: Any) -> bool:
    """Whether a layer was quantised from a transposed weight, as transformers does with its `Conv1D`."""
    return getattr(module, "source_cls", nn.Linear) is not nn.Linear


def _turned(module: Any, shape: torch.Size) -> torch.Size:
    return torch.Size(reversed(shape)) if is_turned(module) else shape


class Wrapped:
    """A frozen tensor subclass made of tensors, as torchao's (`NF4Tensor`, `Int8Tensor`, `Int4Tensor` and others).

    Attributes:
        label: in messages.
    """

    label = "quantised tensor of torchao"

    def fits(self, parameter: nn.Parameter) -> bool:
        """Whether it is a frozen one of torchao."""
        ours = type(parameter).__module__.partition(".")[0] == "torchao"
        return ours and is_traceable_wrapper_subclass(parameter) and not parameter.requires_grad

    def statistics(self, module: nn.Module, parameter: Any) -> dict[str, Tensor] | None:
        """All tensors that it is made of."""
        return {"_".join(way): _inside(parameter, way) for way in _ways(parameter)}

    def join(self, module: nn.Module, name: str, tensors: Parameters) -> None:
        """Put them into the weight, which is a plain attribute of the module."""
        weight = vars(module)[name]
        for way in list(_ways(weight)):
            setattr(_inside(weight, way[:-1]), way[-1], tensors["_".join(way)])

    def described(self, module: nn.Module, name: str) -> tuple[torch.Size, torch.dtype]:
        """As the tensor says."""
        weight = vars(module)[name]
        return weight.shape, weight.dtype

    def dequantised(self, module: nn.Module, name: str, tensors: Mapping[str, Tensor]) -> Tensor:
        """By the package's own function."""
        weight = copy.copy(vars(module)[name])
        for way in list(_ways(weight)):
            setattr(_inside(weight, way[:-1]), way[-1], tensors["_".join(way)])
        values: Tensor = weight.dequantize()
        return values

    def row(self, module: nn.Module, name: str) -> Row | None:
        """None: the tensor subclass alone has the way in which its tensors are put together."""


def row_of(
    quant_type: str, blocksize: int, double: bool, shape: list[int] | None, dtype: torch.dtype, layout: str
) -> Row:
    """The facts of a weight, as JSON keeps them.

    Args:
        quant_type: "nf4", "fp4" or "int8".
        blocksize: elements under one scale, of 4-bit codes.
        double: whether the scales are quantised, too.
        shape: [O, I] of the matrix that was quantised; None for that of the codes.
        dtype: of the weight before it was quantised.
        layout: `MATRIX`; `TURNED`, for the transpose of the weight; or `STACK`, of one matrix per expert.
    """
    name = str(dtype).removeprefix("torch.")
    of_codes = {"type": quant_type, "blocksize": blocksize, "double": double}
    return {**of_codes, "shape": shape, "dtype": name, "layout": layout}


FORMATS: tuple[Format, ...] = (FourBits(), EightBits(), Wrapped())
MARK = "quantized_weights"  # an attribute of modules: formats and ends of names, by the name of the weight


def take_apart(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> tuple[QuantizedWeight, ...]:
    """Find a model's quantised weights, and make all their tensors parameters; see the note on statistics.

    Of weights that have been taken apart, the package's objects refer to the present parameters afterwards.

    Args:
        optimizer: drops the parameters that are plain attributes then.

    Raises:
        ModelError: a weight of a package for quantised ones is not quantised yet.
    """
    made: dict[int, dict[str, nn.Parameter]] = {}
    gone: set[int] = set()
    for path, module in model.named_modules():
        for name, parameter in list(module._parameters.items()):
            kind = next((each for each in FORMATS if parameter is not None and each.fits(parameter)), None)
            if parameter is None or kind is None or name in vars(module).get(MARK, {}):
                continue
            if id(parameter) not in made:
                made[id(parameter)] = _as_parameters(f"{path}.{name}".lstrip("."), module, parameter, kind)
            _register(module, name, made[id(parameter)], kind)
            gone |= {id(parameter)} if name not in module._parameters else set()
    for group in optimizer.param_groups if optimizer is not None and gone else ():
        group["params"] = [parameter for parameter in group["params"] if id(parameter) not in gone]
    found = taken_apart(model)
    for weight in found:
        weight.join()
    return found


def taken_apart(model: nn.Module) -> tuple[QuantizedWeight, ...]:
    """The weights of a model that `take_apart` has found before."""
    return tuple(
        QuantizedWeight(path, module, name, kind, ends)
        for path, module in model.named_modules()
        for name, (kind, ends) in vars(module).get(MARK, {}).items()
    )


def has_quantized(module: nn.Module) -> bool:
    """Whether a module has a quantised weight of its own, which has been taken apart."""
    return MARK in vars(module)


def _as_parameters(label: str, module: nn.Module, parameter: nn.Parameter, kind: Format) -> dict[str, nn.Parameter]:
    statistics = kind.statistics(module, parameter)
    if statistics is None:
        raise ModelError(
            f"'{label}' is a {kind.label} of {parameter.dtype} and is not quantised yet, which bitsandbytes does when "
            f"a module is moved: call model.to(device) before the engine is made, or use zs.from_pretrained(..., "
            f"quantized=...), which quantises while it reads."
        )
    return {end: nn.Parameter(tensor.detach(), requires_grad=False) for end, tensor in statistics.items()}


def _register(module: nn.Module, name: str, statistics: dict[str, nn.Parameter], kind: Format) -> None:
    """Register the statistics of a weight; one that is made of them alone becomes a plain attribute."""
    ends = tuple(statistics)
    if isinstance(kind, Wrapped):
        vars(module)[name] = module._parameters.pop(name)
    else:
        ends = ("", *ends)
    for end, parameter in statistics.items():
        module.register_parameter(end_of(name, end), parameter)
    mark(module, name, kind, ends)


def mark(module: nn.Module, name: str, kind: Format, ends: tuple[str, ...]) -> None:
    """Register a weight that has been taken apart."""
    vars(module).setdefault(MARK, {})[name] = kind, ends
    # bitsandbytes' own entries of a state dict would repeat the parameters under names that no parameter has.
    vars(module)["_save_to_state_dict"] = MethodType(nn.Module._save_to_state_dict, module)


def _ways(tensor: Any) -> Iterator[tuple[str, ...]]:
    """The names of the attributes on the way to each plain tensor inside of a wrapper."""
    for name in tensor.__tensor_flatten__()[0]:
        inner = getattr(tensor, name)
        if is_traceable_wrapper_subclass(inner):
            yield from ((name, *way) for way in _ways(inner))
        else:
            yield (name,)


def _inside(tensor: Any, way: tuple[str, ...]) -> Any:
    for name in way:
        tensor = getattr(tensor, name)
    return tensor


@cache
def _with_codes_of_weight(state: Any) -> Any:
    """A class of bitsandbytes' state of an 8-bit layer whose `CB` is the present memory of the weight."""
    codes = property(lambda self: values_of(self.weight), lambda self, values: None)
    return type(state.__name__, (state,), {"CB": codes})


_TABLES: dict[tuple[bytes, torch.device], Tensor] = {}


def table(values: Tensor, device: torch.device) -> Tensor:
    """The one tensor of this process with these values, on a device."""
    key = values.detach().cpu().numpy().tobytes(), device
    return _TABLES.setdefault(key, values.detach().to(device))
