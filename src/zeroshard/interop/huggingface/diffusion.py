"""Models of diffusers, built from their folders without weights.

Their modules fill some buffers while they are made, and no file holds those (tables of positions), so parameters alone
are on the meta device.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zeroshard.checkpoint.export import CLASS_OF_DIFFUSERS
from zeroshard.errors import ModelError
from zeroshard.interop.huggingface.quantized import package


def diffusion_class(config: Path, kind: type | None) -> Any:
    """The class of diffusers that a configuration names, or the given one; None if it is of another library.

    Raises:
        ModelError: diffusers is not installed, or has no such class.
    """
    if kind is not None:
        return kind if hasattr(kind, "load_config") and hasattr(kind, "from_config") else None
    try:
        name = json.loads(config.read_text()).get(CLASS_OF_DIFFUSERS)
    except (OSError, ValueError, AttributeError):
        return None
    if name is None:
        return None
    found = getattr(package("diffusers", f"building the model of {config.parent}", "diffusers"), str(name), None)
    if found is None:
        raise ModelError(f"{config} names {name!r}, which diffusers does not have. Pass the class as model=.")
    return found


def built_by_diffusers(folder: Path, kind: Any, dtype: torch.dtype | None) -> nn.Module:
    """A model with its parameters on the meta device.

    Raises:
        ModelError: diffusers refuses the configuration.
    """
    try:
        with parameters_on_meta():
            model: nn.Module = kind.from_config(kind.load_config(str(folder), local_files_only=True))
    except Exception as error:  # of any class
        reason = str(error).partition("\n")[0]
        raise ModelError(f"diffusers cannot build {kind.__name__} from {folder}: {reason}") from error
    return model if dtype is None else model.to(dtype)


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Put each parameter on the meta device when a module registers it, before it is drawn."""
    own = nn.Module.register_parameter

    def register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        own(module, name, param)

    try:
        nn.Module.register_parameter = register  # type: ignore[method-assign, assignment]
        yield
    finally:
        nn.Module.register_parameter = own  # type: ignore[method-assign]
