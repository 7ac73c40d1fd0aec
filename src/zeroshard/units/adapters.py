"""Adapters of peft inside a model: the names of the base's tensors in files, and values for adapters on meta.

peft puts layers of its own around those of the base (`q_proj` becomes `q_proj.base_layer`, with `q_proj.lora_A.default`
beside it), and copies of trained modules beside the frozen ones (`lm_head.original_module`,
`lm_head.modules_to_save.default`). Its layers are recognised by these attributes; peft itself is not imported.

[Note: adapters on meta] `nn.Linear.reset_parameters`, which fills a module on the meta device, would draw both matrices
of LoRA. So an adapter's matrices are filled as `LoraConfig` says: with `init_lora_weights=True` A as a linear layer's
weight and B with zeros, or with "gaussian" A from a normal distribution. Initial values that depend on the base's
(PiSSA, OLoRA, EVA and others) need a base with values, and so do DoRA's magnitudes, the norms of its rows.

[Note: adapters of other kinds] Layers of LoHa, LoKr, IA3, OFT, VeRA and others are made once more by peft, around one
layer of the base on the host whose elements are all the same, without memory for each. The first of each kind is made
with two such values and the same random numbers: adapters that differ then are computed from the base, and refused.
"""

import copy
import math
import re
import warnings
from collections.abc import Callable, Hashable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from zeroshard.errors import ModelError, PlanError

COPIES = re.compile(r"(?<=\.)(original_module|modules_to_save\.[^.]+)\.")
TOKENS = ".token_adapter.base_layer."  # of embeddings some of whose rows are trained (`trainable_token_indices`)
INSIDE = "base_model.model."  # before the paths of the base inside of peft's model
DRAWN = (
    "PROMPT_TUNING",
    "P_TUNING",
    "PREFIX_TUNING",
)  # prompts of random values, where the configuration has no others
Configs = dict[str, Any]  # of peft, by the name of the adapter
WITHOUT_BASE = (True, False, "gaussian")  # values of `init_lora_weights` that need no values of the base


def layers_of_adapters(model: nn.Module) -> dict[str, Any]:
    """The layers of adapters in a model, by path."""
    return {path: m for path, m in model.named_modules() if "base_layer" in m._modules and _names_layers(m)}


def base_names(model: nn.Module) -> Callable[[str], str | None] | None:
    """A function from the name of a parameter or buffer to its name in the base model's files; None without adapters.

    It returns None for the parameters of adapters, and one name for the frozen original and the trained copies of a
    module in `modules_to_save`. The prefix of a model inside of peft's (`base_model.model.`) stays.
    """
    layers = layers_of_adapters(model)
    prompts = tuple(f"{path}." for path in _prompt_encoders(model))
    beside = any("original_module" in module._modules for module in model.modules())
    if not layers and not beside and not prompts:
        return None

    def named(name: str) -> str | None:
        if name.startswith(prompts):
            return None
        words = name.replace(TOKENS, ".base_layer.").split(".")
        for place, word in enumerate(words):
            if word != "base_layer" and ".".join(words[:place]) in layers:
                return None
        return COPIES.sub("", ".".join(word for word in words if word != "base_layer"))

    return named


def stack_adapters(model: nn.Module, holder: nn.Module) -> dict[str, list[Any]]:
    """The layers of adapters around stacked parameters of experts, by the parameter's name (`target_parameters`).

    With E experts and rank r, A is [E * r, in], one expert after the other, and B is [out, r * E], whose columns of one
    expert are E apart.
    """
    found: dict[str, list[Any]] = {}
    for layer in layers_of_adapters(model).values():
        count = getattr(layer, "num_experts", 1)
        if count > 1 and layer.get_base_layer() is holder:
            found.setdefault(layer.parameter_name, []).append(layer)
    return found


def initialisers_of(model: nn.Module) -> dict[nn.Module, Callable[[], None]]:
    """For modules of adapters, the functions that fill their parameters ([Note: adapters on meta])."""
    found: dict[nn.Module, Callable[[], None]] = {}
    configs, drawn = configs_of(model), set[Hashable]()
    for path, layer in layers_of_adapters(model).items():
        for adapter, module, fill in _modules_of(layer):
            found[module] = partial(_fill, path, getattr(configs.get(adapter), "init_lora_weights", True), fill)
        base = None
        for name, module in layer.named_modules():
            if module in found or name.split(".")[0] in ("", "base_layer") or not _is_own_on_meta(module):
                continue
            base = _without_tables(layer.get_base_layer()) if base is None else base
            found[module] = partial(_fill_as_peft, configs, path, base, name, module, drawn)
    for path, encoder in _prompt_encoders(model).items():
        for module in filter(_is_own_on_meta, encoder.modules()):
            found[module] = partial(_fill_prompt, path, configs.get(path.rpartition(".")[2]), module)
    return found


def _prompt_encoders(model: nn.Module) -> dict[str, nn.Module]:
    """The encoders of virtual tokens of prompt and prefix tuning, by path."""
    owners = {path: module for path, module in model.named_modules() if "prompt_tokens" in vars(module)}
    found = {}
    for path, module in owners.items():
        for name, encoder in module.get_submodule("prompt_encoder").named_children():
            found[".".join(filter(None, (path, "prompt_encoder", name)))] = encoder
    return found


def _fill_prompt(path: str, config: Any, module: Any) -> None:
    """Fill a module of an encoder of virtual tokens as its class does.

    Raises:
        ModelError: its initial values are rows of the base's embeddings.
    """
    drawn = getattr(config, "prompt_tuning_init", "RANDOM") == "RANDOM" and config.peft_type.value in DRAWN
    if not drawn or not hasattr(module, "reset_parameters"):
        raise _of_base(path)
    module.reset_parameters()


def _is_own_on_meta(module: nn.Module) -> bool:
    tensors = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return any(tensor.is_meta for tensor in tensors)


def _without_tables(module: nn.Module) -> nn.Module:
    """A copy of a module with tables of parameters of its own, as it is before a cut."""
    found = copy.copy(module)
    vars(found).update(_parameters=dict(module._parameters), _forward_hooks={}, _forward_pre_hooks={})
    return found


def _fill_as_peft(
    configs: Configs, path: str, base: nn.Module, name: str, module: nn.Module, drawn: set[Hashable]
) -> None:
    """Fill a module of an adapter with the values that peft gives it ([Note: adapters of other kinds]).

    Args:
        path: of the layer of adapters.
        base: the layer inside.
        name: of the module inside of the layer of adapters.
        drawn: kinds of modules whose values were found to be the same for two bases; this one is added.

    Raises:
        ModelError: peft computes the values from the base's.
    """
    state, kind, made = torch.get_rng_state(), (type(base), name), []
    for value in (0,) if kind in drawn else (0, 1):
        torch.set_rng_state(state)
        try:
            made.append(made_by_peft(configs, path, base, value).get_submodule(name))
        except (RuntimeError, ValueError, TypeError, AttributeError, KeyError) as error:
            raise _of_base(f"{path}.{name}") from error
    first, last = (dict((*made[at].named_parameters(), *made[at].named_buffers())) for at in (0, -1))
    for key, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
        if key not in first or not torch.equal(first[key], last[key]) or first[key].shape != tensor.shape:
            raise _of_base(f"{path}.{name}")
        if tensor.is_contiguous():  # or it has one value for all elements, until it is read from a file
            tensor.copy_(first[key])
    drawn.add(kind)


def _of_base(path: str) -> ModelError:
    return ModelError(
        f"'{path}' is on the meta device, and peft computes its initial values from the base's, which are not there "
        f"yet. Attach the adapters to a base with values, by peft.get_peft_model(base, config) or "
        f"peft.PeftModel.from_pretrained(base, folder, is_trainable=True), and give that model to zs.Engine."
    )


def made_by_peft(configs: Configs, path: str, base: nn.Module, value: int) -> nn.Module:
    """A layer of adapters around a layer of the base with one value for all elements, made by peft."""
    from peft import get_peft_model

    *outer, last = path.rpartition(INSIDE)[2].split(".")
    inner = _without_tables(base)
    for name, parameter in base._parameters.items():
        if parameter is not None:
            values = torch.full((), value, dtype=parameter.dtype).expand(parameter.shape)
            inner._parameters[name] = nn.Parameter(values, requires_grad=False)
    root: Any = nn.Module()
    at: nn.Module = root
    for word in outer:
        at.add_module(word, nn.Module())
        at = getattr(at, word)
    at.add_module(last, inner)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those came when the adapters were attached
        for adapter, config in configs.items():
            config = copy.deepcopy(config)
            config.task_type = None  # of a class with inputs of its own
            if hasattr(root, "add_adapter"):
                root.add_adapter(adapter, config)
            else:
                root = get_peft_model(root, config, adapter)
    return at.get_submodule(last)


def _names_layers(module: nn.Module) -> bool:
    return bool(getattr(type(module), "adapter_layer_names", ()))


def configs_of(model: nn.Module) -> Configs:
    """The configurations of all adapters by name."""
    tables = [vars(m).get("peft_config") or vars(m).get("_peft_config") for m in model.modules()]
    return {adapter: c for table in tables[::-1] if isinstance(table, dict) for adapter, c in table.items()}


Fill = Callable[[Any], None]  # by `init_lora_weights`


def _modules_of(layer: Any) -> Iterator[tuple[str, nn.Module, Fill]]:
    """The modules of a layer's adapters that own parameters, each with the function that fills them."""
    for name, fill in (("lora_A", _draw), ("lora_B", _zero)):
        for adapter, module in (getattr(layer, name, None) or {}).items():
            yield adapter, module, partial(fill, module, layer.r[adapter])
    for name, draws in (("lora_embedding_A", False), ("lora_embedding_B", True)):
        table = getattr(layer, name, None)
        if isinstance(table, nn.ParameterDict) and len(table):
            yield next(iter(table)), table, partial(_embed, table, draws)
    for adapter, module in (getattr(layer, "lora_magnitude_vector", None) or {}).items():
        yield adapter, module, partial(_unknown, module)
    rows = getattr(layer, "trainable_tokens_delta", None)
    if isinstance(rows, nn.ParameterDict) and len(rows):
        yield next(iter(rows)), rows, _refuse_rows


def _fill(path: str, kind: Any, fill: Fill) -> None:
    if (kind.casefold() if isinstance(kind, str) else kind) not in WITHOUT_BASE:
        raise ModelError(
            f"The adapter at '{path}' is on the meta device with init_lora_weights={kind!r}, whose values are computed "
            f"from those of the base. Attach it to a base with values, or set init_lora_weights=True."
        )
    fill(kind)


def _draw(module: nn.Module, rank: int, kind: Any) -> None:
    """A of LoRA."""
    for parameter in module.parameters(recurse=False):
        if isinstance(kind, str):
            nn.init.normal_(parameter, std=1 / rank)
        else:
            nn.init.kaiming_uniform_(parameter, a=math.sqrt(5))


def _zero(module: nn.Module, rank: int, kind: Any) -> None:
    """B of LoRA; with `init_lora_weights=False` as its class has it, so that an adapter changes the model."""
    if kind is False and isinstance(module, nn.Linear):
        module.reset_parameters()
        return
    for parameter in module.parameters(recurse=False):
        nn.init.zeros_(parameter)


def _embed(table: nn.ParameterDict, draws: bool, kind: Any) -> None:
    """A of an embedding's adapter is zero, and B is drawn."""
    for parameter in table.parameters():
        if draws or kind is False:
            nn.init.normal_(parameter)
        else:
            nn.init.zeros_(parameter)


def _refuse_rows(kind: Any) -> None:
    raise ModelError(
        "An adapter with trainable_token_indices is on the meta device, and its initial values are rows of the base. "
        "Attach it to a base with values."
    )


def _unknown(module: nn.Module, kind: Any) -> None:
    """Magnitudes of DoRA until the base has its values."""
    for parameter in module.parameters(recurse=False):
        nn.init.ones_(parameter)


def magnitudes_of(model: nn.Module) -> dict[str, tuple[Any, str]]:
    """The magnitudes of DoRA by the name of the parameter: the layer, and its adapter."""
    return {
        f"{path}.lora_magnitude_vector.{adapter}.weight": (layer, adapter)
        for path, layer in layers_of_adapters(model).items()
        for adapter in getattr(layer, "lora_magnitude_vector", None) or ()
        if adapter in layer.lora_A
    }


def row_norms(layer: Any, adapter: str) -> torch.Tensor:
    """The initial magnitudes of an adapter by DoRA (2402.09353, section 4.1): norms of rows of the base and adapter."""
    change = layer.lora_B[adapter].weight @ layer.lora_A[adapter].weight
    norms: torch.Tensor = layer.lora_magnitude_vector[adapter].get_weight_norm(
        weight=layer.get_base_layer().weight, lora_weight=change, scaling=layer.scaling[adapter]
    )
    return norms


def base_of(model: Any) -> Any:
    """The model inside of peft's; one of transformers that took adapters in itself (`add_adapter`) is its own base."""
    return model if is_own_base(model) else model.get_base_model()


def is_own_base(model: Any) -> bool:
    """Whether a model of transformers took adapters in itself."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))


def is_of_peft(model: Any) -> bool:
    """Whether a model has adapters of peft, around it or in itself."""
    return is_own_base(model) or ("base_model" in model._modules and hasattr(model, "get_base_model"))


def active_adapters(model: Any) -> list[str]:
    """The names of the active adapters.

    Raises:
        PlanError: the model is none of peft's.
    """
    if not is_of_peft(model):
        raise PlanError(
            f"adapters= and merge= are for models of peft, and this one is a {type(model).__name__}. Leave them out; "
            f"or give the engine peft.get_peft_model(model, config)."
        )
    if is_own_base(model):
        return list(model.active_adapters())
    return list(getattr(model, "active_adapters", None) or [model.active_adapter])
