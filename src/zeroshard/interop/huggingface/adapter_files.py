"""Adapters that peft or `engine.export(adapters=True)` wrote, as the first values of a model's adapters.

Their configuration attaches them on the meta device, and the names in their file are those that peft gives the tensors
of the model, as for an export. What the file leaves out by its configuration (projections of VeRA, drawn from a seed)
is filled as for new adapters. Adapters whose making changes the base (PiSSA, OLoRA) are refused: their file fits that
other base alone.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from zeroshard.access.adapter_export import ADAPTER_CONFIG, WEIGHTS, names_in_files
from zeroshard.checkpoint.weights import files_of
from zeroshard.errors import CheckpointError, ModelError
from zeroshard.interop.huggingface.lazy import LazyTensor
from zeroshard.interop.huggingface.quantized import package
from zeroshard.text import format_names
from zeroshard.units.adapters import WITHOUT_BASE, base_names, configs_of, layers_of_adapters, made_by_peft
from zeroshard.validation.ranks import tied_names

PROMPTS = "prompt_embeddings"  # their name in a file of peft


def stored_config(folder: Path) -> Any:
    """The configuration of adapters in a folder, for training.

    Raises:
        ModelError: there is none, or peft does not read it.
    """
    peft = package("peft", "adapters=", "peft")
    if not (folder / ADAPTER_CONFIG).is_file():
        raise ModelError(
            f"adapters={str(folder)!r} has no {ADAPTER_CONFIG}; give a folder that save_pretrained of peft or "
            f"engine.export(adapters=True) wrote, or a configuration of peft for new adapters."
        )
    try:
        config = peft.PeftConfig.from_pretrained(str(folder))
    except Exception as error:  # of any class, as of a kind of adapters that peft does not know
        raise ModelError(f"peft reads no configuration from {folder / ADAPTER_CONFIG}: {error}") from error
    config.inference_mode = False
    return config


def adapter_file(folder: Path) -> Path:
    """The safetensors file of the adapters in a folder.

    Raises:
        CheckpointError: there is none.
    """
    if not (folder / WEIGHTS).is_file():
        files_of(folder)  # a pickle is refused as such
        raise CheckpointError(f"{folder} has no {WEIGHTS}; copy it again, all of it.")
    return folder / WEIGHTS


def adapter_tensors(model: Any, file: Path, stored: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """The tensors of a file of adapters under the model's names.

    Args:
        model: of peft, on the meta device, made with the configuration beside the file.
        stored: by name in the file.

    Raises:
        CheckpointError: the file is of other adapters, with the tensor. ModelError: see the module.
    """
    _refuse_changed_bases(model)
    state = model.state_dict(keep_vars=True)  # without the buffers that no file holds
    every = (*model.named_parameters(), *model.named_buffers())
    empty = {name: torch.empty_like(tensor, device="meta") for name, tensor in every if name in state}
    tied, named = tied_names(model), base_names(model) or str
    names = _names_in_file(model, empty, tied)
    further = {name: tied.get(name, name) for name in stored.keys() - names.keys()}
    names |= {name: first for name, first in further.items() if first in empty}  # embeddings of the base
    own = {key for key, name in names.items() if named(name) is None or ".modules_to_save." in name}
    if missing := sorted(own - stored.keys()):
        raise _other_adapters(file, f"it lacks {format_names(missing)}")
    if unknown := sorted(stored.keys() - names.keys()):
        raise _other_adapters(file, f"it holds {format_names(unknown)}, which the model does not have")
    for key, tensor in stored.items():
        needed = tuple(empty[names[key]].shape)
        if tuple(tensor.shape) != needed:
            raise _other_adapters(file, f"'{key}' is {tuple(tensor.shape)} there and {needed} here")
    return {names[key]: tensor for key, tensor in stored.items()}


def _names_in_file(model: Any, empty: Mapping[str, torch.Tensor], tied: Mapping[str, str]) -> dict[str, str]:
    """The names of a model's adapters in their file, each with the first in the model.

    Raises:
        ModelError: the file holds values that are computed from the parameters.
    """
    (adapter,) = model.peft_config
    if adapter in getattr(model, "prompt_encoder", ()):
        inside = [name for name in empty if name.startswith(f"prompt_encoder.{adapter}.")]
        if inside != [f"prompt_encoder.{adapter}.embedding.weight"]:
            raise _computed(model, adapter)
        return {PROMPTS: inside[0]}
    found = names_in_files(model, adapter, empty, tied)
    known = {key: name for key, name in found.items() if name is not None}
    if known.keys() != found.keys():
        raise _computed(model, adapter)
    return known


def _refuse_changed_bases(model: Any) -> None:
    """Refuse adapters that change the weights of the base when they are attached.

    Raises:
        ModelError: with the layer.
    """
    configs, tried = configs_of(model), set[type]()
    for path, layer in layers_of_adapters(model).items():
        if type(layer) in tried or getattr(configs["default"], "init_lora_weights", None) in WITHOUT_BASE:
            continue
        tried.add(type(layer))
        try:
            made: Any = made_by_peft(configs, path, layer.get_base_layer(), 1)
            changed = any(bool((values != 1).any()) for values in made.get_base_layer().parameters())
        except (RuntimeError, ValueError, TypeError, AttributeError, KeyError):
            changed = True  # values of the base are needed
        if changed:
            raise ModelError(
                f"The adapters at '{path}' change the base that they are attached to, by its values, and those are not "
                f"there yet. Attach them by peft.PeftModel.from_pretrained(base, folder, is_trainable=True), and give "
                f"the model to zs.Engine."
            )


def _computed(model: Any, adapter: str) -> ModelError:
    kind = model.peft_config[adapter].peft_type.value
    return ModelError(
        f"The files of an adapter by {kind} hold values that are computed from its parameters, and not these. Resume "
        f"from a checkpoint of the run: engine.load(checkpoint)."
    )


def _other_adapters(file: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{file} is of other adapters than those that {ADAPTER_CONFIG} beside it makes in this model: {what}. "
        f"Give the base on which they were trained, with its vocabulary (model=, on the meta device, after "
        f"resize_token_embeddings(n, mean_resizing=False)), and the files of one adapter, all of them."
    )
