"""Optimizer states in a folder of `torch.distributed.checkpoint`, with the interface of a checkpoint's `Reader`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from zeroshard.checkpoint.boxes import BoxValues
from zeroshard.checkpoint.distributed_folder import DistributedFolder
from zeroshard.checkpoint.facts import plain
from zeroshard.errors import CheckpointError


class FolderStates:
    """States of each element are read by box; scalars such as a step count at once.

    Args:
        names: by the name of each parameter of the model, its names in the folder.
        facts: class and options of this run's optimizer, which are not taken from the folder.

    Raises:
        CheckpointError: the folder has no states of these parameters.

    Attributes:
        path: of the folder.
        facts: in the form of a checkpoint's.
        tensors: by "KEY:NAME", without values.
    """

    def __init__(
        self, path: Path, folder: DistributedFolder, names: Mapping[str, Sequence[str]], facts: Mapping[str, Any]
    ) -> None:
        self.path, self._folder = path, folder
        self.tensors: dict[str, torch.Tensor] = {}
        self._places: dict[str, str] = {}
        self._kinds: dict[str, list[str]] = {}
        scalars: dict[str, dict[str, Any]] = {}
        for name, held in names.items():
            if held[0] not in folder.shapes:
                raise CheckpointError(
                    f"{path} has '{name}' as several tensors, whose optimizer states are not put together. Take the "
                    f"weights alone, with states=False."
                )
            self._add("weight", name, held[0])
            states = next((folder.states[each] for each in _ends([name, *held]) if each in folder.states), None)
            for key, full in (states or {}).items():
                if key == "step" or folder.shape_of(full) != folder.shape_of(held[0]):
                    value = folder.whole(full).view(folder.shape_of(full))
                    scalars.setdefault(name, {})[key] = plain(value)
                else:
                    scalars.setdefault(name, {})
                    self._add(key, name, full)
        if not scalars:
            raise CheckpointError(
                f"{path} holds no optimizer states of this model's parameters. Save them beside the model, as "
                f"get_state_dict of torch names them; or take the weights alone, with states=False."
            )
        self.facts = {"optimizer": {**facts, "scalars": scalars}}

    def kinds(self, name: str) -> list[str]:
        """The kinds of all tensors `KIND:NAME`."""
        return self._kinds.get(name, [])

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of a tensor; None for an unknown one."""
        return tuple(self.tensors[name].shape) if name in self.tensors else None

    def fill(self, name: str, targets: Sequence[BoxValues]) -> None:
        """Fill boxes with elements of a tensor.

        Raises:
            CheckpointError: elements are missing, or a file cannot be read.
        """
        self._folder.fill(self._places[name], targets)

    def _add(self, key: str, name: str, full: str) -> None:
        """Enter a tensor of the folder."""
        shape, dtype = self._folder.shape_of(full), self._folder.dtype_of(full)
        self.tensors[f"{key}:{name}"] = torch.empty(shape, dtype=dtype, device="meta")
        self._places[f"{key}:{name}"] = full
        self._kinds.setdefault(name, []).append(key)


def _ends(names: Sequence[str]) -> list[str]:
    """Names, whole and without their first parts, since keys of optimizers lack those of the model's key."""
    parts = [name.split(".") for name in names]
    return [".".join(each[first:]) for each in parts for first in range(len(each))]
