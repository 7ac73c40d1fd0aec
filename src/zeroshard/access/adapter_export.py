"""Adapters of peft written while the run goes on: alone, in peft's own files, or merged into the model's weights.

Both walk the table of `WholeWeights`, so they work alike under every plan, and memory is that of one whole tensor (of a
merged one, of its adapter too). Sums of a base and its adapters are computed by peft's own layers, in fp32, and then
cast.
"""

import copy
import json
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zeroshard.access.whole_weights import HeldBoxes, WholeWeights
from zeroshard.checkpoint.export import CONFIG, ExportPlan, folder_of, plan_export, shard_bytes, texts_of
from zeroshard.checkpoint.file_names import FAMILY, grouped, renamed
from zeroshard.checkpoint.stream import Slot
from zeroshard.errors import PlanError
from zeroshard.units.adapters import base_names, layers_of_adapters

EMBEDDINGS = ("embed_tokens", "lm_head")  # as peft knows them
WEIGHTS, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"  # as peft names them
Read = Callable[[Slot], Tensor]  # makes a source of a group; a collective call


class ExportSizes(NamedTuple):
    """The dtype and the largest file of an export, as of `WholeWeights.export`."""

    dtype: torch.dtype | None
    shard_size: str | int


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


def plan_adapter(whole: WholeWeights, model: Any, adapter: str | None) -> ExportPlan:
    """The files of one adapter, as `PeftModel.from_pretrained` reads them.

    Args:
        adapter: its name; by default the active one.

    Raises:
        PlanError: the model is none of peft's, or has no such adapter.
    """
    name = _adapter_of(model, adapter)
    held = {each.name: each for each in whole.table}
    empty = {n: torch.empty(each.shape, dtype=each.kept, device="meta") for n, each in held.items()}
    tied = {further: empty[first] for further, first in whole.tied.items() if first in empty}
    sources = {id(tensor): n for n, tensor in empty.items()}
    groups = []
    for key, tensor in _state_dict_of_adapter(model, name, empty | tied).items():
        first = sources[id(tensor)]
        groups.append(renamed(Slot(first, held[first].kept, held[first].shape), key))
    plan = plan_export(groups, 2**62, {ADAPTER_CONFIG: _config_of(model, name)}, None)
    return replace(plan, shards={WEIGHTS: plan.slots})


def plan_merged(whole: WholeWeights, model: Any, sizes: ExportSizes) -> tuple[ExportPlan, Read]:
    """The files of the base with its active adapters merged, as `from_pretrained` of transformers reads them.

    Raises:
        PlanError: the model is none of peft's, or an adapter cannot be merged.
    """
    active = list(dict.fromkeys(_active(model)))
    base = model.get_base_model()
    prefix = next(path for path, module in model.named_modules() if module is base)
    merging = _Merging(whole, model, active, f"{prefix}." if prefix else "")
    slots = [
        Slot(name, sizes.dtype if sizes.dtype and held.kept.is_floating_point else held.kept, held.shape)
        for name, held in merging.held.items()
    ]
    texts = texts_of(base)
    groups = grouped(slots, None if texts[CONFIG] is None else FAMILY, base)
    plan = plan_export(groups, shard_bytes(sizes.shard_size, "shard_size"), texts, folder_of(base))
    return plan, merging.read


class _Merging:
    """The tensors of a base under its own names, with adapters added.

    Attributes:
        held: by the name in the base, the tensor that is read.
    """

    def __init__(self, whole: WholeWeights, model: Any, active: list[str], prefix: str) -> None:
        self._whole, self._active = whole, active
        named = base_names(model)
        assert named is not None
        self._table = {each.name: each for each in whole.table}
        self.held: dict[str, HeldBoxes] = {}
        for name, each in self._table.items():
            own = named(name)
            if own is not None and (".modules_to_save." not in name or any(f".{a}." in name for a in active)):
                self.held[own.removeprefix(prefix)] = each  # a trained copy comes after its original
        self._layers: dict[str, list[tuple[str, Any]]] = {}  # by the name of the parameter, innermost layer first
        for path, layer in layers_of_adapters(model).items():
            parameter = f"{_inside(path, layer)}.{getattr(layer, 'parameter_name', None) or 'weight'}"
            self._layers.setdefault(parameter, []).insert(0, (path, layer))
            _check(path, layer, active)
            codes = self._table.get(parameter)
            if codes is not None and not codes.kept.is_floating_point:
                raise PlanError(
                    f"merge=True adds to floating-point weights, and '{parameter}' holds codes ({codes.kept}). Export "
                    f"the adapter alone, with adapters=True, and merge it into a base that is not quantised."
                )

    def read(self, slot: Slot) -> Tensor:
        """A tensor of the base, merged; a collective call."""
        held = self.held[slot.key]
        layers = self._layers.get(held.name, ())
        if not layers:
            return self._whole.read(replace(slot, key=held.name))
        values = self._one(held.name)
        for path, layer in layers:
            for adapter in self._active:
                if adapter in layer.scaling:
                    values = _merged(layer, adapter, values, self._of_adapter(path, layer, adapter))
        return values.to(slot.dtype)

    def _one(self, name: str) -> Tensor:
        held = self._table[name]
        return self._whole.read(Slot(name, torch.float32, held.shape))

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


def _check(path: str, layer: Any, active: list[str]) -> None:
    """Refuse a layer whose adapters are no sums.

    Raises:
        PlanError: with the way out.
    """
    biased = [name for name, flag in (getattr(layer, "lora_bias", None) or {}).items() if flag and name in active]
    if not hasattr(layer, "get_delta_weight") or not hasattr(layer, "lora_A") or biased:
        raise PlanError(
            f"merge=True merges adapters by LoRA and DoRA without biases, and '{path}' has a {type(layer).__name__}. "
            f"Export the adapter alone, with adapters=True, and merge it by PeftModel.from_pretrained(...)."
            f"merge_and_unload()."
        )


def _active(model: Any) -> list[str]:
    """The names of the active adapters.

    Raises:
        PlanError: the model is none of peft's.
    """
    if "base_model" not in model._modules or not hasattr(model, "get_base_model"):
        raise PlanError(
            f"adapters= and merge= are for models of peft, and this one is a {type(model).__name__}. Leave them out; "
            f"or give the engine peft.get_peft_model(model, config)."
        )
    return list(getattr(model, "active_adapters", None) or [model.active_adapter])


def _adapter_of(model: Any, adapter: str | None) -> str:
    active = _active(model)
    name = active[0] if adapter is None else adapter
    if name not in model.peft_config:
        raise PlanError(f"There is no adapter {name!r}; the model has {', '.join(map(repr, model.peft_config))}.")
    return name


def _state_dict_of_adapter(model: Any, adapter: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of an adapter's files, under their names there: some of `state`, whose values are not read."""
    from peft import get_peft_model_state_dict

    targets = getattr(model.peft_config[adapter], "target_modules", None) or ()
    embeds = not isinstance(targets, str) and any(word in targets for word in EMBEDDINGS)  # then peft saves their base
    with _names_alone(model):
        found: dict[str, Tensor] = get_peft_model_state_dict(
            model, state_dict=state, adapter_name=adapter, save_embedding_layers=embeds
        )
    return found


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
    """The configuration of an adapter as peft writes it, for inference."""
    config, base = copy.copy(model.peft_config[adapter]), model.get_base_model()
    config.inference_mode = True
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = getattr(base, "name_or_path", None) or None
    kind = type(base)
    mapping = None if config.task_type is not None else {
        "base_model_class": kind.__name__, "parent_library": kind.__module__,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder, auto_mapping_dict=mapping)
        table: dict[str, Any] = json.loads((Path(folder) / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    return table
