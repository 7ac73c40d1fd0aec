"""Reads files of `torch.save` without running any code named in them.

Such files are pickles, which may name any class or function. torch's restricted reader loads tensors and plain
containers; other classes in a DeepSpeed checkpoint are replaced by objects that do nothing if they are in `STAND_INS`,
and refused otherwise.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from zeroshard.errors import CheckpointError


class Inert:
    """Replaces an object that is not needed: accepts any arguments and stores none."""

    def __new__(cls, *args: object) -> "Inert":
        """An instance, for any arguments."""
        return super().__new__(cls)

    def __init__(self, *args: object) -> None: ...

    def __setstate__(self, state: object) -> None: ...


class Number(int):
    """Replaces a member of DeepSpeed's `ZeroStageEnum`, with its value."""

    NAMES = ("disabled", "optimizer_states", "gradients", "weights")


class _Unknown(Exception):
    """A file names a class or function outside of the list of harmless ones."""


def member(kind: object, name: object) -> Number:
    """Replaces `getattr`, through which Python 3.11.0 to 3.11.3 pickle the members of an enumeration.

    It reads no attribute, and accepts only the names of members of `ZeroStageEnum`.
    """
    if kind is not Number or name not in Number.NAMES:
        raise _Unknown(f"builtins.getattr for more than a member of ZeroStageEnum ({name!r:.60})")
    return Number(Number.NAMES.index(name))


STAND_INS: dict[str, Callable[..., object]] = {
    "builtins.getattr": member,
    "deepspeed.runtime.zero.config.ZeroStageEnum": Number,
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": Inert,
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": Inert,
    "deepspeed.utils.tensor_fragment.fragment_address": Inert,
    "deepspeed.utils.tensor_fragment.tensor_fragment": Inert,
    "argparse.Namespace": Inert,  # options that Megatron-style scripts save beside the weights
    "numpy.dtype": Inert,
    "numpy.ndarray": Inert,
    "numpy.core.multiarray.scalar": Inert,
    "numpy.core.multiarray._reconstruct": Inert,
    "numpy._core.multiarray.scalar": Inert,
    "numpy._core.multiarray._reconstruct": Inert,
}


def load_inert(path: Path) -> dict[str, Any]:
    """The content of the file: tensors on the CPU, mapped from the disk and read on use; the rest by value.

    Raises:
        CheckpointError: it is missing or damaged, or names a class or function that is not known to be harmless.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist. Copy the whole folder that DeepSpeed saved.")
    try:
        unknown = sorted(set(get_unsafe_globals_in_checkpoint(str(path))) - set(STAND_INS))
        if unknown:
            raise _Unknown(", ".join(unknown))
        with safe_globals([(kind, name) for name, kind in STAND_INS.items()]):
            found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except _Unknown as error:
        raise CheckpointError(
            f"{path} names {error}, and reading a pickle may run what it names, so it was not read. If you trust the "
            f"file, let zero_to_fp32.py, which DeepSpeed saves beside the checkpoint, write plain weights, and load "
            f"those."
        ) from None
    except Exception as error:  # damaged bytes may raise any exception
        raise CheckpointError(
            f"{path} cannot be read as a file of torch.save ({type(error).__name__}: {error}). Copy it again; a file "
            f"of torch before 1.6 must be saved again by a newer torch."
        ) from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds a {type(found).__name__}, and a checkpoint of DeepSpeed is a dict.")
    return found
