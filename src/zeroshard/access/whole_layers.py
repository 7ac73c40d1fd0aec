"""Modules of adapters with whole values, apart from the engine, in which peft's own functions compute.

A copy has the attributes of the module in the model, and tables of parameters, buffers and modules of its own; hooks
and a forward that the engine set on the module are not in it.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from zeroshard.access.whole_weights import HeldBoxes
from zeroshard.checkpoint.file_names import FileGroup
from zeroshard.checkpoint.stream import Slot
from zeroshard.errors import PlanError

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
MERGED = "merged_adapters"  # peft's list of the adapters that a layer has added to its base


def with_values(module: nn.Module, values: Mapping[str, Tensor]) -> Any:
    """A copy of a module with other parameters and buffers.

    Args:
        values: by name inside of the module; tensors without one there are those of the module.
    """
    made = copy.copy(module)
    own = vars(made)
    own.update({table: type(getattr(module, table))() for table in HOOKS})
    own.pop("forward", None)
    if MERGED in own:
        own[MERGED] = []
    own["_parameters"] = {
        name: held if held is None else nn.Parameter(values.get(name, held), requires_grad=False)
        for name, held in module._parameters.items()
    }
    own["_buffers"] = {name: values.get(name, held) for name, held in module._buffers.items()}
    own["_modules"] = {
        name: child if child is None else with_values(child, inside_of(f"{name}.", values))
        for name, child in module._modules.items()
    }
    return made


def merged_parameter(layer: nn.Module, active: Sequence[str], values: Mapping[str, Tensor], name: str) -> Tensor:
    """A parameter of a layer of the base with adapters merged, by peft's `merge`.

    Args:
        active: the adapters in their order; those that the layer lacks are left out.
        values: the whole parameters of the layer of adapters, the base's in `base_layer` among them.
        name: of the parameter in the base's layer.

    Raises:
        PlanError: peft refuses, as a bias that the base's layer has no place for.
    """
    whole = with_values(layer, values)
    tables = [getattr(layer, table, None) or () for table in getattr(type(layer), "adapter_layer_names", ())]
    with torch.no_grad():
        try:
            whole.merge(adapter_names=[adapter for adapter in active if any(adapter in table for table in tables)])
        except RuntimeError as error:
            raise PlanError(f"peft cannot merge: {error} Export the adapter alone, with adapters=True.") from error
        found: Tensor = whole.get_base_layer().get_parameter(name).detach()
    return found


def aliases_of_buffers(model: nn.Module) -> dict[str, str]:
    """For buffers with several names, each further name and the first."""
    firsts: dict[int, str] = {}
    every = model.named_buffers(remove_duplicate=False)
    pairs = {name: firsts.setdefault(id(buffer), name) for name, buffer in every}
    return {name: first for name, first in pairs.items() if name != first}


def prompt_group(model: Any, name: str, table: Iterable[HeldBoxes]) -> FileGroup:
    """The embeddings of virtual tokens, which peft computes from the parameters of their encoder.

    Args:
        name: of the adapter.
        table: all tensors of the model.

    Raises:
        PlanError: the files have more, since there are several tasks.
    """
    encoder, path = model.prompt_encoder[name], f"prompt_encoder.{name}."
    if hasattr(encoder, "prefix_task_rows"):
        raise PlanError(
            "adapters= has no prompts of several tasks. Load the weights into a model of peft, and save that: "
            "model.load_state_dict(engine.state_dict()), model.save_pretrained(folder)."
        )

    def convert(values: dict[str, Tensor]) -> dict[str, Tensor]:
        whole = with_values(encoder, {key.removeprefix(path): value for key, value in values.items()})
        apart = copy.copy(model)
        vars(apart)["_modules"] = {**model._modules, "prompt_encoder": {name: whole}}
        return {"prompt_embeddings": apart.get_prompt_embedding_to_save(name)}

    sources = tuple(Slot(held.name, held.kept, held.shape) for held in table if held.name.startswith(path))
    embeddings = convert({slot.key: torch.zeros(slot.shape, dtype=slot.dtype) for slot in sources})
    results = tuple(Slot(key, value.dtype, tuple(value.shape)) for key, value in embeddings.items())
    return FileGroup(sources, results, convert)


def lacks_values(module: nn.Module, values: Mapping[str, Tensor]) -> bool:
    """Whether tensors of a module are on the meta device that are not among the values, in plain attributes too."""
    named = (*module.named_parameters(), *module.named_buffers())
    plain = [leaf for each in module.modules() for leaf in tree_leaves(_attributes(each))]
    return any(held.is_meta for name, held in named if name not in values) or any(
        isinstance(leaf, Tensor) and leaf.is_meta for leaf in plain
    )


def _attributes(module: nn.Module) -> list[Any]:
    """A module's own attributes that are tensors, or tables of them."""
    return [value for name, value in vars(module).items() if not name.startswith("_")]


def inside_of(start: str, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The values under a prefix, by the rest of their names."""
    return {key.removeprefix(start): value for key, value in values.items() if key.startswith(start)}
