"""Models of transformers in 4 or 8 bits: layers of bitsandbytes in place of linear ones, quantised while they are read.

[Note: quantised while read] The model is built on the meta device, and its linear layers are replaced there as
transformers replaces them, with packed shapes. Then a tensor of codes or of statistics is one that a rank reads box by
box: the weight behind a box is read in the dtype of the model, quantised by bitsandbytes, and dropped, so that a rank
holds its slices, one weight and its codes. Weights whose statistics a rank has made with the codes are quantised once.
Files of a model that was quantised before hold codes and statistics, which are read as they are, under other names.
"""

import importlib
import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.checkpoint.boxes import Box
from zeroshard.checkpoint.weights import Shards, files_of
from zeroshard.errors import CheckpointError, ModelError
from zeroshard.interop.huggingface.conversion import pretrained_part
from zeroshard.interop.huggingface.lazy import LazyTensor, Shape, StoredTensor, whole_of
from zeroshard.moe.experts.families import find_experts
from zeroshard.quantized.stacks import CODES, MatrixFormat, QuantizedStack, stack_on_meta
from zeroshard.quantized.weights import QuantizedWeight, end_of, take_apart
from zeroshard.units.adapters import layers_of_adapters

NAMED: dict[str, dict[str, Any]] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": True},
    "int8": {"load_in_8bit": True},
}
SCB, STATE = ".SCB", ".quant_state.bitsandbytes__"  # ends of names in files of quantised models
TABLES = (".quant_map", ".nested_quant_map", ".weight_format")  # the same for all weights
METHOD = "bitsandbytes"


@dataclass(frozen=True, slots=True)
class StoredCodes:
    """The form of the 4-bit codes in files of a quantised model.

    Attributes:
        dtype: of the weights before they were quantised.
        blocksize: elements under one scale.
    """

    dtype: torch.dtype
    blocksize: int


def quantise(model: nn.Module, path: Path, given: Any, compute: torch.dtype | None) -> None:
    """Quantise the layers of a model on the meta device, if that is asked for, or its files are quantised.

    Args:
        path: of the files.
        given, compute: as for `settings_of`.

    Raises:
        ModelError, CheckpointError: as `settings_of` and `quantise_on_meta`.
    """
    settings = settings_of(model, given, compute)
    if settings is None:
        return
    shards = Shards(path, files_of(path))
    names = [name for name in shards.shapes if STATE in name or name.endswith(SCB)]
    stored = _codes_of({name: StoredTensor(shards, name, torch.uint8) for name in names if STATE in name})
    quantise_on_meta(model, settings, stored, stacks=not names)


def settings_of(model: nn.Module, given: Any, compute: torch.dtype | None) -> Any:
    """The `BitsAndBytesConfig` of a model; None for one that is not quantised.

    Args:
        given: "nf4", "fp4" or "int8" (4 bits are quantised doubly, and compute in the dtype of the plan); or a
            `BitsAndBytesConfig`; None for that of the model's configuration.
        compute: the plan's dtype of computation; None for that of the model.

    Raises:
        ModelError: another kind of quantisation, or none of these packages.
    """
    _, part = pretrained_part(model)
    stored = getattr(getattr(part, "config", None), "quantization_config", None)
    table = stored if isinstance(stored, Mapping) else stored.to_dict() if stored is not None else {}
    held = METHOD in str(table.get("quant_method", ""))
    if given is None and not held:
        return None
    if given is not None and held:
        raise ModelError(
            f"quantized={given!r} is for files of floating-point weights, and the configuration says that these are "
            f"quantised already ({table.get('quant_method')}). Leave quantized out."
        )
    kind = package("transformers", "quantized=", "hf").BitsAndBytesConfig
    package(METHOD, "quantized=", "quantized")
    if held:
        return kind.from_dict(dict(table), return_unused_kwargs=False)
    if isinstance(given, kind):
        return given
    if not isinstance(given, str) or given not in NAMED:
        raise ModelError(
            f"quantized is {given!r}; give {', '.join(map(repr, NAMED))}, or a BitsAndBytesConfig of transformers."
        )
    floats = (p.dtype for p in model.parameters() if p.dtype.is_floating_point)
    return kind(**NAMED[given], bnb_4bit_compute_dtype=compute or next(floats, torch.float32))


def quantise_on_meta(model: nn.Module, settings: Any, stored: StoredCodes | None, stacks: bool) -> None:
    """Replace the linear layers of a model on the meta device by quantised ones.

    Layers are chosen, and left out, as by transformers: output layers, tied ones, those that the settings name.

    Args:
        stored: the form of the codes in files, if they are quantised.
        stacks: whether stacks of experts are quantised, too.

    Raises:
        ModelError: the model is none of transformers, or has nothing to quantise.
    """
    _, part = pretrained_part(model)
    if part is None:
        raise ModelError(f"quantized= is for models of transformers, and {type(model).__name__} contains none.")
    part = _anything(part)
    if layers_of_adapters(model):
        raise ModelError(
            "quantized= replaces linear layers before adapters are put in: pass adapters=, and the model without."
        )
    if settings.llm_int8_has_fp16_weight:
        raise ModelError("llm_int8_has_fp16_weight=True keeps 16-bit weights, and quantized= is for 8-bit ones.")
    before = dict(part.named_modules())
    base = importlib.import_module("transformers.quantizers.base").HfQuantizer
    kept = base.get_modules_to_not_convert(part, settings.llm_int8_skip_modules, part._keep_in_fp32_modules)
    if stacks:
        _stack_experts(part, settings, kept)
    replace = importlib.import_module("transformers.integrations.bitsandbytes").replace_with_bnb_linear
    replace(part, modules_to_not_convert=kept, quantization_config=settings)
    for path, module in part.named_modules():
        if before.get(path) not in (module, None):
            _pack(module, _anything(before[path]), stored)
    if not take_apart(part):
        raise ModelError(
            f"{type(part).__name__} has no linear layer to quantise besides {', '.join(sorted(kept))}, which stay as "
            f"they are. Leave quantized out."
        )
    setattr(part, "is_loaded_in_4bit" if settings.load_in_4bit else "is_loaded_in_8bit", True)
    part.config.quantization_config = settings


def _pack(module: Any, before: Any, stored: StoredCodes | None) -> None:
    """Give a layer of bitsandbytes on the meta device the shapes of quantised tensors; its bias stays as it was."""
    bnb = package(METHOD, "quantized=", "quantized")
    module.bias, module.source_dtype = before.bias, before.weight.dtype
    if module.bias is not None:
        module.bias.requires_grad_(False)
    shape = torch.Size((module.out_features, module.in_features))
    weight, dtype = module.weight, before.weight.dtype if stored is None else stored.dtype
    if isinstance(module, bnb.nn.Linear8bitLt):
        weight.data = torch.empty(shape, dtype=torch.int8, device="meta")
        weight.CB, weight.SCB = weight.data, torch.empty(shape[0], device="meta")
        return
    if stored is not None:
        weight.blocksize = stored.blocksize
    sample = torch.ones(1, weight.blocksize, dtype=dtype)
    options = {"blocksize": weight.blocksize, "compress_statistics": weight.compress_statistics}
    _, state = bnb.functional.quantize_4bit(sample, quant_type=weight.quant_type, **options)
    blocks = -(-shape.numel() // weight.blocksize)
    state.shape, state.absmax = shape, torch.empty(blocks, dtype=state.absmax.dtype, device="meta")
    if state.nested:
        state.offset = state.offset.to("meta")
        state.state2.absmax = torch.empty(-(-blocks // state.state2.blocksize), device="meta")
    weight.data = torch.empty(-(-shape.numel() // 2), 1, dtype=torch.uint8, device="meta")
    weight.quant_state, weight.bnb_quantized, weight.quant_storage = state, True, torch.uint8
    module.quant_state = state


def _stack_experts(part: Any, settings: Any, kept: list[str]) -> None:
    """Quantise the stacked weights of experts; warn of those that stay as they are."""
    converts = importlib.import_module("transformers.quantizers.quantizers_utils").should_convert_module
    left: list[str] = []
    for found in find_experts(part):
        module = _anything(found.module)
        matrices = [name for name in found.stacked if module.get_parameter(name).dim() == 3]
        if not matrices or not converts(found.path, kept):
            continue
        if getattr(module, "is_transposed", True) or not hasattr(module, "config"):
            left += [f"{found.path}.{name}" for name in matrices]
            continue
        for name in matrices:
            weight = module.get_parameter(name)
            kind = MatrixFormat(
                "int8" if settings.load_in_8bit else settings.bnb_4bit_quant_type, 64,
                settings.bnb_4bit_use_double_quant and not settings.load_in_8bit, weight.shape[1:], weight.dtype,
            )  # fmt: skip
            stack_on_meta(module, name, kind)
        module.config._experts_implementation = "eager"  # one expert's matrix at a time
    if left:
        warnings.warn(
            f"Stacked weights of experts stay in floating point, since their forward multiplies otherwise than by "
            f"linear layers: {', '.join(left)}.",
            stacklevel=2,
        )


def _codes_of(stored: Mapping[str, LazyTensor]) -> StoredCodes | None:
    """The form of the 4-bit codes in files; None if they hold none.

    Raises:
        CheckpointError: codes are of different forms.
    """
    found: dict[StoredCodes, str] = {}
    for name, tensor in stored.items():
        table = _table_of(name, tensor)
        found.setdefault(StoredCodes(getattr(torch, table["dtype"]), table["blocksize"]), name)
    if len(found) > 1:
        (one, first), (two, second), *_ = found.items()
        raise CheckpointError(f"The files hold '{first}' as {one} and '{second}' as {two}. Quantise all weights alike.")
    return next(iter(found), None)


def by_own_names(stored: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """The tensors of files with the statistics of quantised weights under the names that they have here."""
    found: dict[str, LazyTensor] = {}
    for name, tensor in stored.items():
        weight, _, end = name.rpartition(".")
        if STATE in name:
            table, weight = _table_of(name, tensor), name.partition(STATE)[0]
            if "nested_offset" in table:
                found[end_of(weight, "offset")] = StoredNumber(name, float(table["nested_offset"]))
        elif name.endswith(TABLES):
            continue
        elif name.endswith(SCB):
            found[end_of(f"{weight}.weight", "SCB")] = tensor
        elif end in ("absmax", "nested_absmax"):
            found[end_of(weight, end)] = tensor
        else:
            found[name] = tensor
    return found


def quantised_tensors(model: nn.Module, tensors: dict[str, LazyTensor]) -> dict[str, LazyTensor]:
    """The tensors of files by name, with codes and statistics in the place of weights that are quantised."""
    found, latest = dict(tensors), Latest()
    for weight in take_apart(model):
        names = {end: end_of(weight.label, end) for end in weight.ends}
        if any(name in tensors for end, name in names.items() if end) or weight.label not in tensors:
            continue  # the files hold codes; or lack the weight
        source = found.pop(weight.label)
        quantising = Quantising(source, *_quantiser(weight), latest)
        for end, name in names.items():
            parameter = weight.tensors[end]
            found[name] = QuantisedTensor(quantising, end, tuple(parameter.shape), parameter.dtype)
    return found


def _quantiser(weight: QuantizedWeight) -> tuple[Callable[[Tensor], dict[str, Tensor]], str, bool, torch.dtype]:
    """A function of a matrix to its codes and statistics; the end of the codes' name; whether there is a stack."""
    module = _anything(weight.module)
    stack = vars(module).get(weight.name)
    if isinstance(stack, QuantizedStack):
        return stack.kind.quantised, CODES, True, stack.kind.dtype
    bnb, own = package(METHOD, "quantized=", "quantized"), module.weight
    transposed = module.source_cls is not nn.Linear

    def quantised(matrix: Tensor) -> dict[str, Tensor]:
        values = matrix.T.contiguous() if transposed else matrix
        if isinstance(module, bnb.nn.Linear8bitLt):
            made = bnb.nn.Int8Params(values, requires_grad=False)._quantize("cpu")
        else:
            options = ("blocksize", "compress_statistics", "quant_type")
            made = bnb.nn.Params4bit(values, **{name: getattr(own, name) for name in options})._quantize("cpu")
        return {"": made.data, **(weight.format.statistics(module, made) or {})}

    return quantised, "", False, module.source_dtype


@dataclass(slots=True)
class Latest:
    """The codes that were made last."""

    of: tuple[Any, int, dict[str, Tensor]] | None = None


@dataclass(slots=True, eq=False)
class Quantising:
    """A weight, or a stack of matrices, that is quantised as it is read; see the note above.

    Attributes:
        source: the weight in files.
        convert: from a matrix to codes and statistics, by the ends of their names.
        codes: the end of the codes' name.
        stacked: whether the source is a stack of matrices.
        dtype: in which a matrix is read.
        latest: keeps one result for all weights.
        kept: the statistics of each matrix that was quantised.
    """

    source: LazyTensor
    convert: Callable[[Tensor], dict[str, Tensor]]
    codes: str
    stacked: bool
    dtype: torch.dtype
    latest: Latest
    kept: dict[int, dict[str, Tensor]] = field(default_factory=dict)

    def result(self, number: int, end: str) -> Tensor:
        """Codes or statistics of a matrix."""
        if end != self.codes and number in self.kept:
            return self.kept[number][end]
        of = self.latest.of
        if of is None or of[0] is not self or of[1] != number:
            self.latest.of = None
            results = self.convert(self._matrix(number))
            self.kept[number] = {other: tensor for other, tensor in results.items() if other != self.codes}
            self.latest.of = of = self, number, results
        return of[2][end]

    def _matrix(self, number: int) -> Tensor:
        shape = tuple(self.source.shape)
        box = Box((number, 0, 0), (1, *shape[1:])) if self.stacked else Box.whole(shape)
        values = torch.empty(box.shape, dtype=self.dtype)
        self.source.fill(box, values)
        return values[0] if self.stacked else values


class QuantisedTensor(LazyTensor):
    """Codes or statistics of a weight that is quantised as it is read."""

    def __init__(self, quantising: Quantising, end: str, shape: Shape, dtype: torch.dtype) -> None:
        super().__init__(shape, dtype)
        self._quantising, self._end = quantising, end

    def fill(self, box: Box, values: Tensor) -> None:
        """Quantise the matrices behind the box."""
        if not self._quantising.stacked:
            values.copy_(self._quantising.result(0, self._end)[box.slices(Box.whole(tuple(self.shape)))])
            return
        inner = Box(box.start[1:], box.shape[1:]).slices(Box.whole(tuple(self.shape[1:])))
        for place in range(box.shape[0]):
            values[place].copy_(self._quantising.result(box.start[0] + place, self._end)[inner])

    def stored(self) -> Iterator[str]:
        """The names of the weight in files."""
        return self._quantising.source.stored()


class StoredNumber(LazyTensor):
    """One number, which files hold inside of another tensor."""

    def __init__(self, name: str, value: float) -> None:
        super().__init__((), torch.float32)
        self._name, self._value = name, value

    def fill(self, box: Box, values: Tensor) -> None:
        """Set the number."""
        values.fill_(self._value)

    def stored(self) -> Iterator[str]:
        """The name of the tensor that holds it."""
        yield self._name


def _table_of(name: str, tensor: LazyTensor) -> dict[str, Any]:
    """The settings of a quantised weight, which bitsandbytes stores as bytes of JSON."""
    try:
        table: dict[str, Any] = json.loads(bytes(whole_of(tensor).numpy()))
        table["dtype"], table["blocksize"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"'{name}' is no table of a quantised weight ({error!r}). Copy the files again."
        ) from error
    return table


def package(name: str, user: str, extra: str) -> Any:
    """An optional package.

    Args:
        user: of the package, for the error.
        extra: of zeroshard, which installs it.

    Raises:
        ModelError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ModelError(f'{user} needs the package {name}; run pip install "zeroshard[{extra}]"') from error


def _anything(module: Any) -> Any:
    return module
