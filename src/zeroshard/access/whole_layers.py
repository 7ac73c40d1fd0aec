"""Modules of adapters with whole values, apart from the engine, in which peft's own functions compute.

A copy has the attributes of the module in the model, and tables of parameters, buffers and modules of its own; hooks
and a forward that the engine set on the module are not in it.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

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
        name: child if child is None else with_values(child, _inside(values, name))
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


def _inside(values: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    start = f"{name}."
    return {key.removeprefix(start): value for key, value in values.items() if key.startswith(start)}
