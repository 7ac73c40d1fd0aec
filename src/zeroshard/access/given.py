"""A state dict in memory as the source of an engine's weights, read by range and box like a checkpoint.

[Note: one state dict] Every rank keeps its own part of its state dict, so ranks with different values would mix two
models. Checksums of the parameters are compared first. Buffers belong to each rank and may differ, as in
`engine.state_dict()`.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from zeroshard.checkpoint.boxes import Box, BoxValues
from zeroshard.comm.collectives import Comm
from zeroshard.errors import CheckpointError
from zeroshard.text import format_names
from zeroshard.units.flat import digest_of
from zeroshard.units.ignored import kept_by_rank

Shape = tuple[int, ...]
EXTRA = "_extra_state"  # key of the result of `get_extra_state` in a module's state dict


class LoadedKeys(NamedTuple):
    """The names that did not match in `engine.load_state_dict`, as `nn.Module.load_state_dict` returns them.

    Attributes:
        missing_keys: names in the model alone.
        unexpected_keys: names in the state dict alone.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]


class GivenWeights:
    """Reads tensors of a state dict, as a `Reader` reads those of a checkpoint; a missing one is skipped.

    Tensors are read as `weight:NAME` or `buffer:NAME`.

    Args:
        state: by name, the whole tensors.
        tied: for parameters with several names, each further name and the first.

    Attributes:
        path: the source, as messages name it.
        keys: the names that did not match.
    """

    path = "The state dict"

    def __init__(self, state: Mapping[str, Any], model: nn.Module, tied: Mapping[str, str]) -> None:
        self._state, self._model = state, model
        self._first = {**tied, **_further_buffers(model)}
        self.keys = LoadedKeys([], [])

    def fit(self, parameters: Mapping[str, Shape], strict: bool) -> None:
        """Compare names and shapes with those of the model.

        Args:
            parameters: the shape of each, by its first name.
            strict: refuse names that do not match.

        Raises:
            CheckpointError: names do not match; or shapes, kinds of numbers, or two names of one parameter differ.
        """
        buffers = {name: tuple(buffer.shape) for name, buffer in _buffers(self._model) if name not in self._first}
        shapes = {**buffers, **parameters}
        extras = set(_extras(self._model))
        given = {self._first.get(name, name) for name in self._state}
        missing = sorted((shapes.keys() | extras) - given)
        unexpected = sorted(n for n in self._state if self._first.get(n, n) not in shapes and n not in extras)
        self.keys = LoadedKeys(missing, unexpected)
        if strict and (missing or unexpected):
            parts = [f"lacks {format_names(missing)}"] if missing else []
            parts += [f"holds {format_names(unexpected)}, which the model does not have"] if unexpected else []
            raise CheckpointError(
                f"{self.path} is of another model: it {' and '.join(parts)}. Name the tensors as engine.state_dict() "
                f"does, or take those that match: engine.load_state_dict(state, strict=False)."
            )
        known = sorted(set(self._state) - set(unexpected) - extras)
        integers = {name for name, parameter in self._model.named_parameters() if _holds_integers(parameter)}
        for name in known:
            first = self._first.get(name, name)
            self._check(name, shapes[first], first not in integers if first in parameters else None)
        for name in known:
            self._compare(name, self._first.get(name, name))

    def fill(self, name: str, targets: Sequence[BoxValues]) -> None:
        """Fill boxes with elements of a tensor, unless it is missing."""
        values = self._values(name)
        if values is not None:
            for box, into in targets:
                into.copy_(values[box.slices(Box.whole(tuple(values.shape)))])

    def shape(self, name: str) -> Shape | None:
        """The shape of a tensor, or None if it is not there."""
        values = self._values(name)
        return None if values is None else tuple(values.shape)

    def dtype(self, name: str) -> torch.dtype | None:
        """The dtype of a tensor, or None if it is not there."""
        values = self._values(name)
        return None if values is None else values.dtype

    def whole(self, name: str) -> torch.Tensor:
        """All of a tensor that is not missing, flat and in its own dtype."""
        values = self._values(name)
        assert values is not None, name
        return values.reshape(-1)

    def set_extras(self) -> None:
        """Call `set_extra_state` of the modules with an entry in the state dict."""
        for key, module in _extras(self._model).items():
            if key in self._state:
                module.set_extra_state(self._state[key])

    def _values(self, name: str) -> torch.Tensor | None:
        """The tensor under the first of its names in the state dict; None if it is missing."""
        wanted = name.partition(":")[2]
        names = [wanted, *(other for other, first in self._first.items() if first == wanted)]
        return next((self._state[each].detach() for each in names if each in self._state), None)

    def _check(self, name: str, needed: Shape, floating: bool | None) -> None:
        """Refuse a value that is no tensor of this shape.

        Args:
            floating: whether its numbers must be floating-point ones; None for a buffer, of which any are taken.
        """
        value = self._state[name]
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(f"{self.path} holds a {type(value).__name__} under '{name}', and a tensor is needed.")
        if tuple(value.shape) != needed:
            raise CheckpointError(
                f"{self.path} is of another model: '{name}' is {tuple(value.shape)} there and {needed} here. Build the "
                f"model that was trained there."
            )
        if floating is not None and floating != (value.is_floating_point() or value.is_complex()):
            needed_kind = "floating-point numbers" if floating else "integers, since it is quantised"
            raise CheckpointError(
                f"{self.path} holds '{name}' as {value.dtype} and the model has {needed_kind}. Give weights "
                f"{'that are not quantised' if floating else 'of a model that is quantised alike'}."
            )

    def _compare(self, name: str, first: str) -> None:
        """Refuse two values under two names of one tensor."""
        value = self._state[name]
        kept = self._state.get(first, value)
        if kept is not value and not torch.allclose(kept, value.to(kept), rtol=0, atol=0, equal_nan=True):
            raise CheckpointError(
                f"{self.path} holds other values under '{name}' than under '{first}', and in this model they are one. "
                f"Build the model that was trained there."
            )


def shared(state: Mapping[str, Any] | None, world: Comm) -> Mapping[str, Any]:
    """The state dict of this rank, or of rank 0 if all other ranks pass None; a collective call.

    Raises:
        CheckpointError: on all ranks, if one gives another kind of object, or the ranks with a state dict are neither
            all ranks nor rank 0 alone.
    """
    by_rank = world.agree_on(_described(state), "state dicts")
    for rank, described in enumerate(by_rank):
        if "problem" in described:
            raise CheckpointError(f"engine.load_state_dict() on rank {rank} {described['problem']}")
    if any("none" in described for described in by_rank):
        return _from_rank_0(state, world, by_rank)
    assert state is not None
    return state


def check_same(state: Mapping[str, Any], names: set[str], world: Comm) -> None:
    """Compare the parameters that ranks pass ([Note: one state dict]); a collective call.

    Args:
        names: of the parameters.

    Raises:
        CheckpointError: two ranks give different values.
    """
    given = {name: values for name, values in state.items() if name in names and isinstance(values, torch.Tensor)}
    mine = {name: digest_of([values.detach().reshape(-1)]) for name, values in given.items() if values.numel()}
    by_rank = world.agree_on(mine, "digests of state dicts")
    for rank, digests in enumerate(by_rank):
        for name in sorted(digests.keys() | by_rank[0].keys()):
            if digests.get(name) != by_rank[0].get(name):
                raise CheckpointError(
                    f"Ranks 0 and {rank} give engine.load_state_dict() different values of '{name}'. Give the same "
                    f"state dict on every rank, or give it on rank 0 and None on the others."
                )


def _described(state: Any) -> dict[str, Any]:
    """A rank's state dict as plain JSON: its tensors, or its problem."""
    if state is None:
        return {"none": True}
    if not isinstance(state, Mapping):
        return {
            "problem": f"was given a {type(state).__name__}, and takes the mapping that engine.state_dict() returns; "
            f"files are read by engine.load_weights(path)."
        }
    tensors = {k: [list(v.shape), str(v.dtype)] for k, v in state.items() if isinstance(v, torch.Tensor)}
    meta = next((k for k, v in state.items() if isinstance(v, torch.Tensor) and v.is_meta), None)
    if meta is not None:
        return {"problem": f"was given '{meta}' on the meta device, where there are no values."}
    return {"tensors": tensors}


def _from_rank_0(state: Mapping[str, Any] | None, world: Comm, by_rank: list[dict[str, Any]]) -> Mapping[str, Any]:
    """The state dict of rank 0, sent to all ranks tensor by tensor."""
    rank = world.mesh.rank
    givers = [number for number, described in enumerate(by_rank) if "none" not in described]
    if givers != [0]:
        raise CheckpointError(
            f"engine.load_state_dict() was given a state dict on ranks {givers} of {len(by_rank)}. Give the same on "
            f"every rank, or give it on rank 0 and None on the others."
        )
    tensors = by_rank[0]["tensors"]
    rest, problem = {}, None
    if state is not None:
        rest = {key: value for key, value in state.items() if key not in tensors}
        try:
            json.dumps(rest)
        except (TypeError, ValueError):
            problem = f"{format_names(sorted(rest))} cannot be sent to other ranks: give the state dict on every rank"
            rest = {}
    (rest, problem), *_ = world.agree_on([rest, problem], "extra states")
    if problem:
        raise CheckpointError(f"engine.load_state_dict(): {problem}.")
    whole: dict[str, Any] = dict(rest)
    for key, (shape, dtype) in tensors.items():
        value = torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")), device=world.mesh.device)
        if rank == 0 and state is not None:
            value.copy_(state[key])
        world.broadcast(value, f"given {key}", 0)
        whole[key] = value.cpu()
    return whole


def _holds_integers(parameter: nn.Parameter) -> bool:
    return not (parameter.dtype.is_floating_point or parameter.dtype.is_complex)


def _buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers and ignored parameters that a state dict holds, by the first name of each module."""
    for path, module in model.named_modules():
        for name, buffer in kept_by_rank(module):
            if buffer is not None:
                yield f"{path}.{name}" if path else name, buffer


def _further_buffers(model: nn.Module) -> dict[str, str]:
    """For buffers of modules with several names, each further name and the first."""
    firsts = {id(module): path for path, module in model.named_modules()}
    return {
        f"{path}.{name}": f"{firsts[id(module)]}.{name}" if firsts[id(module)] else name
        for path, module in model.named_modules(remove_duplicate=False)
        for name in module._buffers
        if path != firsts[id(module)]
    }


def _extras(model: nn.Module) -> dict[str, nn.Module]:
    """The modules with an extra state, by its name in a state dict."""
    return {
        f"{path}.{EXTRA}" if path else EXTRA: module
        for path, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }
