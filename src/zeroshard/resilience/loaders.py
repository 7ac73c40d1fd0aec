"""States of data loaders in checkpoints: of any object with `state_dict` and `load_state_dict`, in plain values.

torchdata's `StatefulDataLoader` is such an object, and so is `zeroshard.data.loader.Loader`. Their states hold random
numbers in tensors, arrays, tuples or bytes, which are written as text; nothing is unpickled.
"""

import base64
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from zeroshard.checkpoint import DTYPES
from zeroshard.engine import Engine
from zeroshard.errors import CheckpointError

LOADER = "!loader"  # key of the states in a checkpoint's extra
TENSOR, ARRAY, TUPLE, BYTES = "!tensor", "!array", "!tuple", "!bytes"
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@runtime_checkable
class StatefulLoader(Protocol):
    """The protocol of loaders that can be resumed.

    A loader may also have `merged`, a function of the states of all ranks to one with which any number of ranks go on.
    """

    def state_dict(self) -> dict[str, Any]:
        """The position, of plain values, tensors, arrays and bytes."""

    def load_state_dict(self, state: Any, /) -> None:
        """Go on from a state."""


def check_loader(loader: Any) -> None:
    """Refuse a loader without a state.

    Raises:
        CheckpointError: it does not have the protocol.
    """
    if not isinstance(loader, StatefulLoader):
        raise CheckpointError(
            f"loader is a {type(loader).__name__}, which has no state_dict and load_state_dict; pass "
            f"torchdata.stateful_dataloader.StatefulDataLoader, zeroshard.data.loader.Loader, or none"
        )


def with_loader(engine: Engine, loader: StatefulLoader, extra: Mapping[str, Any]) -> dict[str, Any]:
    """The extra of a checkpoint with the loader's state on every rank, once where all are equal; a collective call.

    Raises:
        CheckpointError: a state holds a value that is not written.
    """
    states = engine.world.agree_on(encoded(loader.state_dict()), "states of loaders")
    return {**extra, LOADER: states[:1] if all(state == states[0] for state in states) else states}


def restore(engine: Engine, loader: StatefulLoader | None, extra: dict[str, Any]) -> dict[str, Any]:
    """Go on with the loader's state in a checkpoint's extra; returns the extra without it.

    Raises:
        CheckpointError: the checkpoint has no such state, or those of another number of ranks.
    """
    rest = {key: value for key, value in extra.items() if key != LOADER}
    if loader is None:
        return rest
    if LOADER not in extra:
        raise CheckpointError(
            "The checkpoint has no state of a loader, and the data would begin anew; make zs.Checkpoints without "
            "loader to go on so."
        )
    states, mesh = [decoded(state) for state in extra[LOADER]], engine.world.mesh
    merged = getattr(loader, "merged", None)
    if merged is not None:
        loader.load_state_dict(merged(states))
    elif len(states) in (1, mesh.ranks):
        loader.load_state_dict(states[mesh.rank % len(states)])
    else:
        raise CheckpointError(
            f"The checkpoint has the states of loaders on {len(states)} ranks, and {mesh.ranks} ranks go on; a "
            f"{type(loader).__name__} needs as many. zeroshard.data.loader.Loader goes on under any number."
        )
    return rest


def encoded(value: Any, at: str = "state") -> Any:
    """A loader's state in JSON's values.

    Raises:
        CheckpointError: a value is not written, with its place.
    """
    if isinstance(value, Mapping):
        keys = [key for key in value if not isinstance(key, str)]
        if keys:
            raise CheckpointError(f"{at} of the loader has the key {keys[0]!r}, and keys must be strings; leave it out")
        return {key: encoded(each, f"{at}[{key!r}]") for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        inner = [encoded(each, f"{at}[{number}]") for number, each in enumerate(value)]
        return {TUPLE: inner} if isinstance(value, tuple) else inner
    if isinstance(value, torch.Tensor) and value.dtype in NAMES:
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return {TENSOR: [NAMES[value.dtype], list(value.shape), _text(data)]}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return {ARRAY: [value.dtype.str, list(value.shape), _text(value.tobytes())]}
    if isinstance(value, np.generic):
        return encoded(value.item(), at)
    if isinstance(value, bytes):
        return {BYTES: _text(value)}
    if value is None or isinstance(value, (str, int, float)):
        return value
    raise CheckpointError(
        f"{at} of the loader is a {type(value).__name__}, which is not written; give plain values, tensors or arrays"
    )


def decoded(value: Any) -> Any:
    """The inverse of `encoded`."""
    match value:
        case {"!tensor": [str(name), list(shape), str(text)]}:
            return torch.frombuffer(_data(text), dtype=DTYPES[name]).reshape(shape) if text else torch.empty(shape)
        case {"!array": [str(name), list(shape), str(text)]}:
            return np.frombuffer(_data(text), dtype=np.dtype(name)).reshape(shape)
        case {"!tuple": list(inner)}:
            return tuple(decoded(each) for each in inner)
        case {"!bytes": str(text)}:
            return bytes(_data(text))
        case dict():
            return {key: decoded(each) for key, each in value.items()}
        case list():
            return [decoded(each) for each in value]
    return value


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _data(text: str) -> bytearray:
    return bytearray(base64.b64decode(text))
