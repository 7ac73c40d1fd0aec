"""Adapters of peft written while the run goes on: alone, in peft's own files, or merged into the model's weights.

Both walk the table of `WholeWeights`, so they work alike under every plan, and memory is that of one whole tensor (of a
merged one, of its adapter too). Sums of a base and its adapters are computed by peft's own layers, in fp32, and then
cast. A checkpoint keeps the configurations of the adapters as facts, so that `zeroshard export` does the same later.
"""

import copy
import json
import warnings
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from zeroshard.access.whole_layers import (
    aliases_of_buffers,
    inside_of,
    lacks_values,
    merged_parameter,
    prompt_group,
    with_values,
)
from zeroshard.access.whole_weights import HeldBoxes, WholeWeights
from zeroshard.checkpoint.export import (
    CONFIG,
    ExportPlan,
    config_of_diffusers,
    folder_of,
    narrowed,
    plan_export,
    texts_of,
)
from zeroshard.checkpoint.file_names import FAMILY, further_names, grouped, kept_names, renamed
from zeroshard.checkpoint.stream import Slot
from zeroshard.errors import CheckpointWarning, PlanError
from zeroshard.precision.cast import floating_dtype
from zeroshard.quantized.weights import is_turned
from zeroshard.text import format_names, shard_bytes
from zeroshard.units.adapters import (
    INSIDE,
    active_adapters,
    base_names,
    base_of,
    configs_of,
    is_of_peft,
    is_own_base,
    layers_of_adapters,
    made_by_peft,
)

FACT = "adapters"  # its key among the facts of a checkpoint
EMBEDDINGS = ("embed_tokens", "lm_head")  # as peft knows them
WEIGHTS, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"  # as peft names them
Read = Callable[[Slot], Tensor]  # makes a source of a group; a collective call


class ExportSizes(NamedTuple):
    """The dtype and the largest file of an export, as of `WholeWeights.export`."""

    dtype: torch.dtype | str | None
    shard_size: str | int


class TensorTable(Protocol):
    """Whole tensors of a model: those of `WholeWeights`, or of a checkpoint.

    Attributes:
        table: all of them, with their shapes and dtypes.
        tied: for parameters with several names, each further name and the first.
    """

    table: list[HeldBoxes]
    tied: Mapping[str, str]

    def read(self, slot: Slot) -> Tensor:
        """A tensor of the table in the dtype of `slot`."""


def adapter_facts(model: Any) -> dict[str, Any]:
    """The facts of a checkpoint from which a model of peft can be built again; empty for other models.

    They are the class of its base, the configurations of all adapters by name, the names of the active ones, and those
    of parameters of the base that are trained.
    """
    if not is_of_peft(model):
        return {}
    try:
        tables = {name: _config_of(model, name) for name in model.peft_config}
    except TypeError:  # a value of the user's own that JSON lacks
        return {}
    facts = {"class": type(base_of(model)).__name__, "configs": tables, "active": active_adapters(model)}
    return {FACT: {**facts, "trained": _trained_of_base(model)}}


def export_adapters(
    whole: WholeWeights, model: nn.Module, out: Path, adapters: bool | str, merge: bool, sizes: ExportSizes
) -> None:
    """Write an adapter alone, or the base with its active adapters merged; a collective call.

    Args:
        adapters: the name of one, or True for the active one.
        merge: write the merged weights instead.

    Raises:
        PlanError: both are asked for, or the model has no such adapters. And as `WholeWeights.export`.
    """
    if merge and adapters:
        raise PlanError("export(adapters=..., merge=True) asks for two folders; export twice.")
    if merge:
        whole.write(out, *plan_merged(whole, model, sizes))
        return
    whole.write(out, plan_adapter(whole, model, adapters if isinstance(adapters, str) else None))


def plan_adapter(whole: TensorTable, model: Any, adapter: str | None) -> ExportPlan:
    """The files of one adapter, as `PeftModel.from_pretrained` reads them.

    Embeddings and an output layer that are adapted, trained, or of another size than in the base's files, are in them.

    Args:
        adapter: its name; by default the active one.

    Raises:
        PlanError: the model is none of peft's, or has no such adapter.
    """
    name = _adapter_of(model, adapter)
    held = {each.name: each for each in whole.table}
    empty = {n: torch.empty(each.shape, dtype=each.kept, device="meta") for n, each in held.items()}
    groups = [prompt_group(model, name, held.values())] if name in getattr(model, "prompt_encoder", ()) else []
    for key, first in ({} if groups else names_in_files(model, name, empty, whole.tied)).items():
        if first is None:
            raise PlanError(
                f"The files of an adapter by {model.peft_config[name].peft_type.value} have '{key}', which is no "
                f"parameter or buffer of the model. Load its weights into a model of peft, and save that: "
                f"model.load_state_dict(engine.state_dict()), model.save_pretrained(folder)."
            )
        groups.append(renamed(Slot(first, held[first].kept, held[first].shape), key))
    plan = plan_export(groups, 2**62, {ADAPTER_CONFIG: _config_of(model, name)}, None)
    return replace(plan, shards={WEIGHTS: plan.slots})


def plan_merged(whole: TensorTable, model: Any, sizes: ExportSizes) -> tuple[ExportPlan, Read]:
    """The files of the base with its active adapters merged, as `from_pretrained` of transformers reads them.

    Of a base that is none of transformers all names of its state dict are in them.

    Raises:
        PlanError: the model is none of peft's, or an adapter cannot be merged. ConfigError: as `floating_dtype`.
    """
    dtype = floating_dtype(sizes.dtype)
    base = base_of(model)
    texts = texts_of(base)
    config = texts[CONFIG]
    merging = _Merging(whole, model, every=config is None)
    if merging.parted and config is not None:
        config["tie_word_embeddings"] = False
    slots = [
        Slot(name, dtype if dtype and held.kept.is_floating_point else held.kept, held.shape)
        for name, held in merging.held.items()
    ]
    groups = grouped(slots, None if config is None else FAMILY, base)
    texts[CONFIG] = config or config_of_diffusers(base)
    wide = {name for name, held in merging.held.items() if held.kept != torch.float16}
    most = shard_bytes(sizes.shard_size, "shard_size")
    return plan_export(groups, most, texts, folder_of(base), narrowed(groups, wide)), merging.read


def merged_weights(whole: TensorTable, model: Any) -> Iterator[tuple[str, Tensor]]:
    """The weights of the base with its active adapters added, in fp32, by the names of its state dict.

    Raises:
        PlanError: as `plan_merged`.
    """
    merging = _Merging(whole, model, every=True)
    for name, held in merging.held.items():
        wide = torch.float32 if held.kept.is_floating_point else held.kept
        yield name, merging.read(Slot(name, wide, held.shape))


class _Merging:
    """The tensors of a base under its own names, with adapters added.

    Embeddings and an output layer that are one parameter, with an adapter on one of them, are two weights after that.

    Attributes:
        held: by the name in the base, the tensor that is read; if `every`, tied parameters under all names.
        parted: whether there are weights that were one parameter.
    """

    def __init__(self, whole: TensorTable, model: Any, every: bool) -> None:
        self._whole, self._model, self._active = whole, model, list(dict.fromkeys(active_adapters(model)))
        prefix = next(f"{path}." if path else "" for path, module in model.named_modules() if module is base_of(model))
        named = base_names(model)
        if named is None or hasattr(model, "prompt_encoder"):
            raise PlanError(
                "merge=True merges adapters into weights, and those of this model are beside them (prompts, prefixes). "
                "Export them alone, with adapters=True."
            )
        self._table = {each.name: each for each in whole.table}
        self._layers: dict[str, list[tuple[str, Any]]] = {}  # by the name of the parameter, innermost layer first
        for path, layer in layers_of_adapters(model).items():
            inside, names = _inside(path, layer), [getattr(layer, "parameter_name", None) or "weight"]
            if not _is_sum(layer, self._active):
                _check(path, layer)
                names = [name for name, _ in layer.get_base_layer().named_parameters()]
            for parameter in (f"{inside}.{name}" for name in names):
                self._layers.setdefault(parameter, []).insert(0, (path, layer))
            codes = self._table.get(f"{inside}.{names[0]}")
            if codes is not None and not codes.kept.is_floating_point:
                raise PlanError(
                    f"merge=True adds to floating-point weights, and '{codes.name}' holds codes ({codes.kept}). Export "
                    f"the adapter alone, with adapters=True, and merge it into a base that is not quantised."
                )
        own = {name: base.removeprefix(prefix) for name in (*self._table, *whole.tied) if (base := named(name))}
        ties = {own[further]: own[first] for further, first in whole.tied.items() if {further, first} <= own.keys()}
        apart, kept = further_names(ties, base_of(model)), kept_names(ties, base_of(model))
        own = dict(sorted(own.items(), key=lambda pair: pair[1] in kept))  # first the names that files keep
        self.held = self._chosen(own, own.values() if every else apart)
        of_class = ({name, first} for name, first in ties.items() if name != first and name not in apart)
        self.parted = any(names <= self.held.keys() for names in of_class)

    def _chosen(self, own: Mapping[str, str], apart: Collection[str]) -> dict[str, HeldBoxes]:
        """By the name in the base, the tensor under it: an active trained copy before the frozen one.

        Args:
            own: the names in the base, by those in the model.
            apart: names that are there although another tensor is equal.
        """
        chosen: dict[str, str] = {}
        for name, base in own.items():
            trains = ".modules_to_save." in name
            active = any(f".modules_to_save.{adapter}." in name for adapter in self._active)
            if active or (base not in chosen and not trains):
                chosen[base] = name
        found: dict[str, HeldBoxes] = {}
        seen: set[tuple[str, tuple[str, ...]]] = set()
        for base, name in chosen.items():
            first = self._whole.tied.get(name, name)
            same = first, tuple(path for path, _ in self._layers.get(name, ()))
            if base in apart or same not in seen:
                seen.add(same)
                found[base] = replace(self._table[first], name=name)
        return found

    def read(self, slot: Slot) -> Tensor:
        """A tensor of the base, merged; a collective call."""
        held = self.held[slot.key]
        layers, name = self._layers.get(held.name, ()), self._whole.tied.get(held.name, held.name)
        if not layers:
            return self._whole.read(replace(slot, key=name))
        values = self._one(name)
        for path, layer in layers:
            if not _is_sum(layer, self._active):
                values = self._by_peft(path, layer, held.name, values)
                continue
            for adapter in self._active:
                if adapter in layer.scaling:
                    values = _merged(layer, adapter, values, self._of_adapter(path, layer, adapter))
        return values.to(slot.dtype)

    def _one(self, name: str) -> Tensor:
        held = self._table[name]
        return self._whole.read(Slot(name, torch.float32, held.shape))

    def _by_peft(self, path: str, layer: Any, parameter: str, values: Tensor) -> Tensor:
        """A parameter of the base merged by a layer whose adapters are no sums."""
        inside, found = f"{_inside(path, layer)}.", {}
        for name, _ in (*layer.named_parameters(), *layer.named_buffers()):
            first = self._whole.tied.get(f"{path}.{name}", f"{path}.{name}")
            if first in self._table and f"{path}.{name}" != parameter:
                held = self._table[first]
                wide = torch.float32 if held.kept.is_floating_point else held.kept
                found[name] = self._whole.read(Slot(first, wide, held.shape))
        found[parameter.removeprefix(f"{path}.")] = values
        if lacks_values(layer, found):  # indices that peft makes, of a layer that is on another rank or in a checkpoint
            whole = with_values(layer.get_base_layer(), inside_of(inside.removeprefix(f"{path}."), found))
            layer = made_by_peft(configs_of(self._model), path, whole, 0)
        return merged_parameter(layer, self._active, found, parameter.removeprefix(inside))

    def _of_adapter(self, path: str, layer: Any, adapter: str) -> dict[str, Any]:
        """The whole parameters of an adapter in one layer, in the places where the layer has them."""
        found: dict[str, Any] = {}
        for table in ("lora_A", "lora_B", "lora_magnitude_vector"):
            if adapter in (getattr(layer, table, None) or {}):
                found[table] = {adapter: SimpleNamespace(weight=self._one(f"{path}.{table}.{adapter}.weight"))}
        for table in ("lora_embedding_A", "lora_embedding_B"):
            if adapter in (getattr(layer, table, None) or {}):
                found[table] = {adapter: self._one(f"{path}.{table}.{adapter}")}
        return found


def _merged(layer: Any, adapter: str, values: Tensor, parameters: Mapping[str, Any]) -> Tensor:
    """The sum of base and adapter, by the layer's own function."""
    if is_turned(layer.get_base_layer()):  # the weight before it was quantised is the transpose of the layer's
        return _sum(layer, adapter, values.T, parameters).T.contiguous()
    return _sum(layer, adapter, values, parameters)


def _sum(layer: Any, adapter: str, values: Tensor, parameters: Mapping[str, Any]) -> Tensor:
    """As `_merged`, of a weight in the layer's own shape."""
    whole = copy.copy(layer)
    vars(whole)["_modules"] = {**layer._modules, **parameters}
    vars(whole)["get_param"] = lambda: values
    count = getattr(layer, "num_experts", None)
    if count is not None and values.dim() == 3:
        whole.num_experts = len(values)  # of all ranks
    change: Tensor = whole.get_delta_weight(adapter)
    if "lora_magnitude_vector" not in parameters:
        return values + change
    across = change.T if layer.fan_in_fan_out else change
    norms = layer.lora_magnitude_vector[adapter].get_weight_norm(values, across, scaling=1)
    factors = (parameters["lora_magnitude_vector"][adapter].weight / norms).view(-1, 1)
    product: Tensor = (factors.T if layer.fan_in_fan_out else factors) * (values + change)
    return product


def _inside(path: str, layer: Any) -> str:
    """The path of the base's module inside of a layer, and of further layers inside."""
    path = f"{path}.base_layer"
    return _inside(path, layer.base_layer) if "base_layer" in layer.base_layer._modules else path


def _is_sum(layer: Any, active: Sequence[str]) -> bool:
    """Whether the active adapters of a layer are those of LoRA and DoRA without biases, which are added to a weight."""
    biased = [name for name, flag in (getattr(layer, "lora_bias", None) or {}).items() if flag and name in active]
    modules = isinstance(getattr(layer, "lora_A", None), nn.ModuleDict)
    return hasattr(layer, "get_delta_weight") and modules and not biased


def _check(path: str, layer: Any) -> None:
    """Refuse a layer of other adapters that peft does not merge, or not by itself.

    Raises:
        PlanError: with the way out.
    """
    inner: Any = layer.base_layer
    weight = getattr(inner, "weight", None)
    plain = weight is not None and weight.is_floating_point() and "base_layer" not in inner._modules
    if not hasattr(layer, "merge") or not plain or ".token_adapter." in f".{path}.":
        raise PlanError(
            f"merge=True merges adapters by LoRA and DoRA, and those of peft's layers that merge around a "
            f"floating-point layer; '{path}' has a {type(layer).__name__}. Export the adapter alone, with "
            f"adapters=True, and merge it by PeftModel.from_pretrained(...).merge_and_unload()."
        )


def _trained_of_base(model: nn.Module) -> list[str]:
    """Names of trained parameters that are neither an adapter's nor a trained copy of a module."""
    named = base_names(model) or str
    trained = (name for name, parameter in model.named_parameters() if parameter.requires_grad)
    return [name for name in trained if named(name) is not None and ".modules_to_save." not in name]


def _adapter_of(model: Any, adapter: str | None) -> str:
    active = active_adapters(model)
    name = active[0] if adapter is None else adapter
    if name not in model.peft_config:
        raise PlanError(f"There is no adapter {name!r}; the model has {', '.join(map(repr, model.peft_config))}.")
    return name


def names_in_files(
    model: Any, adapter: str, empty: Mapping[str, Tensor], tied: Mapping[str, str]
) -> dict[str, str | None]:
    """The names of an adapter's tensors in its files, each with the first in the model; None for values computed there.

    Args:
        empty: tensors without values of all parameters and buffers, by first name.
        tied: for parameters with several names, each further name and the first.
    """
    firsts = {**tied, **aliases_of_buffers(model)}
    further = {name: empty[first] for name, first in firsts.items() if first in empty}
    names = {id(tensor): name for name, tensor in empty.items()}
    found = _state_dict_of_adapter(model, adapter, {**empty, **further})
    return {key: names.get(id(tensor)) for key, tensor in found.items()}


def _state_dict_of_adapter(model: Any, adapter: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of an adapter's files, under their names there: some of `state`, whose values are not read."""
    from peft import get_peft_model_state_dict

    with _names_alone(model):
        found: dict[str, Tensor] = get_peft_model_state_dict(
            model, state_dict=state, adapter_name=adapter, save_embedding_layers=False
        )
    trained, every = _trained_of_base(model), _grew(model, adapter)
    for path in _embeddings(model, adapter):
        inside = [name for name in state if name.startswith(f"{path}.")]
        if every or _is_adapted(path) or any(name in trained for name in inside):
            found |= {name: state[name] for name in inside}
    if left := [name for name in trained if name not in found]:
        warnings.warn(
            f"Trained parameters of the base are in no file of the adapter '{adapter}': {format_names(left)}. "
            f"export(folder, merge=True) writes them.",
            CheckpointWarning,
            stacklevel=2,
        )
    return {f"{INSIDE}{name}": value for name, value in found.items()} if is_own_base(model) else found


def _embeddings(model: Any, adapter: str) -> Sequence[str]:
    """The paths of the input embeddings and of the output layer, but for those with a trained copy."""
    base = base_of(model)
    found = []
    for getter in ("get_input_embeddings", "get_output_embeddings"):
        try:
            layer = getattr(base, getter, lambda: None)()
        except NotImplementedError:  # of a model without any
            continue
        if layer is None or adapter in getattr(layer, "modules_to_save", ()):
            continue
        inside = getattr(layer, "base_layer", None) or getattr(layer, "original_module", None) or layer
        found += [path for path, module in model.named_modules() if module is inside]
    return found


def _is_adapted(path: str) -> bool:
    """Whether the files of an adapter on the layer of this path hold the layer, too, as peft has it."""
    return f".{path}".endswith(tuple(f".{name}.base_layer" for name in EMBEDDINGS))


def _grew(model: Any, adapter: str) -> bool:
    """Whether the vocabulary has another size than in the files of the base, on this machine."""
    config: Any = getattr(model, "config", None)
    source = model.peft_config[adapter].base_model_name_or_path
    size = getattr(_of_text(config), "vocab_size", None)
    if size is None or not source:
        return False
    try:
        held = _of_text(type(config).from_pretrained(source, local_files_only=True))
    except Exception:  # no such folder, nor a copy of it from the hub
        return False
    return bool(held.vocab_size != size)


def _of_text(config: Any) -> Any:
    """The configuration of the language model inside."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


@contextmanager
def _names_alone(model: nn.Module) -> Iterator[None]:
    """Allow state dicts of modules inside, for the names in them: values may be on other ranks."""
    hooks = [(module, module._state_dict_pre_hooks) for module in model.modules()]
    try:
        for module, _ in hooks:
            module._state_dict_pre_hooks = OrderedDict()
        with torch._C.DisableTorchFunctionSubclass():
            yield
    finally:
        for module, kept in hooks:
            module._state_dict_pre_hooks = kept


def _config_of(model: Any, adapter: str) -> dict[str, Any]:
    """The configuration of an adapter as peft writes it, for inference.

    Raises:
        TypeError: it has a value that JSON lacks.
    """
    config, base = copy.copy(model.peft_config[adapter]), base_of(model)
    config.inference_mode = True
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = getattr(base, "name_or_path", None) or None
    kind = type(base)
    mapping = None if config.task_type is not None else {
        "base_model_class": kind.__name__, "parent_library": kind.__module__,
    }  # fmt: skip
    table = config.to_dict() | ({} if mapping is None else {"auto_mapping": mapping})
    plain: dict[str, Any] = json.loads(json.dumps(table, default=_plain))
    return plain


def _plain(value: Any) -> list[Any]:
    """A set as JSON has it.

    Raises:
        TypeError: it is none.
    """
    if isinstance(value, set):
        return sorted(value)
    raise TypeError(f"JSON has no {type(value).__name__}")
