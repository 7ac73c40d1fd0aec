"""Optimizer states in the forms of other tools, as the plain state dict of this optimizer, by position.

Parameters may be numbered, or have names: in `param_names` of the groups, as keys (`get_optimizer_state_dict` of
torch.distributed.checkpoint, `optim_state_dict` of FSDP), or inside of flattened keys ("state.NAME.exp_avg"). Tensors
may be whole, or shards of a `DTensor` or `ShardedTensor`. Every rank gives its own, or rank 0 alone all of it.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zeroshard.checkpoint.boxes import Box, BoxValues
from zeroshard.checkpoint.facts import plain, setting
from zeroshard.comm.collectives import Comm
from zeroshard.errors import CheckpointError
from zeroshard.optim.states.whole_states import NAMES, decoded, encoded
from zeroshard.text import format_names

SOURCE = "engine.optimizer.load_state_dict()"
# Parts of names that wrappers add: DDP, torch.compile, FSDP, checkpoint_wrapper.
WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
FORMS = (
    "Give it the state_dict() of the same optimizer over the same model, what get_optimizer_state_dict of "
    "torch.distributed.checkpoint returns, or what engine.optimizer.state_dict() has returned"
)
StateDict = Mapping[str, Any]


class GivenParameter(NamedTuple):
    """A parameter of a group of the user's.

    Attributes:
        name: its first name in the model.
        whole: a tensor of its shape and dtype, without its values.
        others: its further names, if it is tied.
    """

    name: str
    whole: nn.Parameter
    others: tuple[str, ...] = ()


Members = list[list[GivenParameter]]  # of each group


def gathered_states(given: Any, world: Comm) -> StateDict:
    """A state dict with whole tensors, from those of all ranks; a collective call.

    Raises:
        CheckpointError: on all ranks, if one gives no state dict, or not all ranks do and neither does rank 0 alone.
    """
    mine = _described(given)
    everyone = world.agree_on(mine, "forms of optimizer states")
    for rank, theirs in enumerate(everyone):
        if "problem" in theirs:
            raise CheckpointError(f"{SOURCE} on rank {rank} {theirs['problem']}")
    givers = [rank for rank, theirs in enumerate(everyone) if not theirs["none"]]
    if givers not in ([0], list(range(world.mesh.ranks))):
        raise CheckpointError(
            f"{SOURCE} was given states on ranks {givers} of {world.mesh.ranks}. Give them on every rank, or all of "
            f"them on rank 0 and None on the others."
        )
    shards = [theirs["shards"] for theirs in everyone]
    if len(givers) < world.mesh.ranks:
        if shards[0]:
            raise CheckpointError(
                f"{SOURCE} was given states on rank 0 alone, and '{next(iter(shards[0]))}' of them is a shard there. "
                f"Give every rank its own, or gather them first (full_state_dict=True)."
            )
        return _of_rank_0(given, world)
    return _from_shards(given, shards, world) if any(shards) else _mapping(given)


def by_position(given: StateDict, members: Members) -> dict[str, Any]:
    """A state dict whose parameters are numbered in the order of this optimizer's groups.

    Raises:
        CheckpointError: names are unknown or missing; or parameters of one group had different options.
    """
    states, groups = _unflattened(given, members)
    names = _names(groups, members)
    if names is None:
        return {**given, "state": dict(states), "param_groups": list(groups)}
    known = _Lookup(members)
    found: dict[str, Any] = {known.first(name): states[key] for key, name in names.items() if key in states}
    options = {known.first(names[key]): group for group in groups for key in group["params"]}
    missing = [each.name for group in members for each in group if each.name not in options]
    extra = [str(key) for key in states if key not in names]
    if missing or extra:
        lacks = f"no {format_names(missing)}" if missing else f"{format_names(extra)} in none of its groups"
        raise CheckpointError(f"{SOURCE} was given states with {lacks}. {FORMS}.")
    numbered, own, first = {}, [], 0
    for number, group in enumerate(members):
        for position, each in enumerate(group, first):
            if each.name in found:
                numbered[position] = found[each.name]
        saved = _options(number, [(each.name, options[each.name]) for each in group], groups)
        own.append({**saved, "params": list(range(first, first + len(group)))})
        first += len(group)
    return {"state": numbered, "param_groups": own}


class _Lookup:
    """Finds the first name of a parameter in the model by any of its names, or by one with or without wrappers."""

    def __init__(self, members: Members) -> None:
        every = [(name, each.name) for group in members for each in group for name in (each.name, *each.others)]
        self._exact, self._bare = dict(every), dict[str, str | None]()
        for name, first in every:
            bare = _bare(name)
            self._bare[bare] = first if self._bare.get(bare, first) == first else None

    def find(self, name: str) -> str | None:
        """The first name; None for an unknown or ambiguous one."""
        return self._exact.get(name) or self._bare.get(_bare(name))

    def first(self, name: str) -> str:
        """The first name.

        Raises:
            CheckpointError: it is unknown.
        """
        found = self.find(name)
        if found is None:
            raise CheckpointError(
                f"{SOURCE} was given states of '{name}', and the optimizer's groups hold "
                f"{format_names(list(self._exact))}. {FORMS}."
            )
        return found


def _bare(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def _names(groups: Sequence[StateDict], members: Members) -> dict[Any, str] | None:
    """The names of the parameters by their keys; None where numbers alone identify them."""
    keys = [key for group in groups for key in group.get("params", ())]
    if any(isinstance(key, str) for key in keys):
        return {key: str(key) for key in keys}
    names = [name for group in groups for name in group.get(NAMES, ())]
    known = _Lookup(members)
    if not names or len(names) != len(keys) or any(known.find(str(name)) is None for name in names):
        return None
    return dict(zip(keys, map(str, names), strict=True))


def _options(number: int, saved: Sequence[tuple[str, StateDict]], groups: Sequence[StateDict]) -> dict[str, Any]:
    """The options of one of this optimizer's groups, from those under which each of its parameters was saved.

    Raises:
        CheckpointError: they differ.
    """
    if not saved:  # a group without parameters is found by its number
        same = groups[number] if number < len(groups) and not groups[number].get("params") else {}
        return {key: value for key, value in same.items() if key not in ("params", NAMES)}
    (first, options), *others = saved
    own = {key: value for key, value in options.items() if key not in ("params", NAMES)}
    for name, other in others:
        if other is options:
            continue
        for key in own.keys() | (other.keys() - {"params", NAMES}):
            if not _same(own.get(key), other.get(key)):
                raise CheckpointError(
                    f"{SOURCE} was given '{key}'={own.get(key)!r} for '{first}' and {other.get(key)!r} for '{name}', "
                    f"and both are in group {number} here. Put the parameters into the same groups as there."
                )
    return own


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


def _unflattened(given: StateDict, members: Members) -> tuple[StateDict, Sequence[StateDict]]:
    """States by parameter, and groups; of flattened keys, one group for each parameter.

    Raises:
        CheckpointError: there are none.
    """
    states, groups = given.get("state"), given.get("param_groups")
    if isinstance(states, Mapping) and isinstance(groups, Sequence):
        return states, groups
    prefixes = ("state.", "param_groups.")
    odd = next((key for key in given if not (isinstance(key, str) and key.startswith(prefixes))), None)
    if odd is not None or not given:
        raise CheckpointError(f"{SOURCE} was given a mapping with {odd!r}, which is no optimizer's. {FORMS}.")
    by_name: tuple[dict[str, Any], dict[str, Any]] = {}, {}
    for full, value in given.items():
        kind, _, rest = full.partition(".")
        name, _, key = rest.rpartition(".")
        by_name[kind == "param_groups"].setdefault(name, {})[key] = value
    return by_name[0], [{**options, "params": [name]} for name, options in by_name[1].items()]


def _mapping(given: Any) -> StateDict:
    assert isinstance(given, Mapping)
    return given


def _described(given: Any) -> dict[str, Any]:
    """A rank's state dict as plain JSON: its shards, or its problem; `none` if it has nothing."""
    if given is None or (isinstance(given, Mapping) and not given):
        return {"none": True, "shards": {}}
    if not isinstance(given, Mapping):
        return {"problem": f"was given a {type(given).__name__}. {FORMS}; files are read by engine.load(folder)."}
    shards: dict[str, Any] = {}
    for path, value in _leaves(given, ""):
        if _is_sharded(value):
            try:
                boxes = [[list(box.start), list(box.shape)] for box, _ in _pieces(value)]
            except (RuntimeError, NotImplementedError, ValueError) as error:
                return {"problem": f"cannot read the shards of '{path}' ({error}). Use full_state_dict=True."}
            shards[path] = [list(value.size()), str(value.dtype), boxes]
        elif isinstance(value, Tensor) and value.is_meta:
            return {"problem": f"was given '{path}' on the meta device, where there are no values."}
    return {"none": False, "shards": shards}


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (list, tuple)):
        for number, inner in enumerate(value):
            yield from _leaves(inner, f"{path}.{number}")
    else:
        yield path, value


def _is_sharded(value: Any) -> bool:
    return hasattr(value, "local_shards") or (isinstance(value, Tensor) and hasattr(value, "placements"))


def _pieces(value: Any) -> Iterator[BoxValues]:
    """The boxes of a `DTensor` or `ShardedTensor` on this rank."""
    if hasattr(value, "local_shards"):
        for shard in value.local_shards():
            at = shard.metadata
            yield BoxValues(Box(tuple(at.shard_offsets), tuple(at.shard_sizes)), shard.tensor)
        return
    chunks = value.__create_chunk_list__()  # the protocol of torch.distributed.checkpoint
    if len(chunks) != 1:
        raise ValueError(f"{len(chunks)} boxes on one rank")
    yield BoxValues(Box(tuple(chunks[0].offsets), tuple(chunks[0].sizes)), value.to_local())


def _from_shards(given: Any, shards: Sequence[Mapping[str, Any]], world: Comm) -> StateDict:
    """The state dict with whole tensors in the place of shards; a collective call.

    Raises:
        CheckpointError: ranks have shards of different tensors, or elements are missing.
    """
    if any(theirs.keys() != shards[0].keys() for theirs in shards):
        odd = sorted(set().union(*shards) - set(shards[0]).intersection(*shards))
        raise CheckpointError(f"{SOURCE} was given shards of {format_names(odd)} on some ranks alone. {FORMS}.")
    mine, whole = dict(_leaves(given, "")), dict[str, Tensor]()
    for path, (shape, dtype, _) in shards[0].items():
        values = torch.zeros(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
        covered: set[Box] = set()
        for rank, theirs in enumerate(shards):
            own = list(_pieces(mine[path])) if rank == world.mesh.rank else []
            for number, (start, length) in enumerate(theirs[path][2]):
                box = Box(tuple(start), tuple(length))
                if box in covered or not box.numel:
                    continue
                covered.add(box)
                piece = torch.empty(length, dtype=values.dtype, device=world.mesh.device)
                if own:
                    piece.copy_(own[number].values.detach())
                world.broadcast(piece.reshape(-1).view(torch.uint8), f"optimizer state {path}", rank)
                values[box.slices(Box.whole(tuple(shape)))].copy_(piece)
        if sum(box.numel for box in covered) != math.prod(shape):
            raise CheckpointError(f"{SOURCE} was given shards of '{path}' that are not all of it. {FORMS}.")
        whole[path] = values
    return _mapping(_replaced(given, "", whole))


def _replaced(value: Any, path: str, whole: Mapping[str, Tensor]) -> Any:
    """A structure with the tensors of `whole` at their paths."""
    if isinstance(value, Mapping):
        return {key: _replaced(each, f"{path}.{key}" if path else str(key), whole) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_replaced(each, f"{path}.{number}", whole) for number, each in enumerate(value))
    return whole.get(path, value)


def _of_rank_0(given: Any, world: Comm) -> StateDict:
    """The state dict of rank 0, sent to all ranks tensor by tensor; a collective call.

    Raises:
        CheckpointError: on all ranks, if it holds other values than tensors, numbers and texts.
    """
    tensors: dict[str, Tensor] = {}
    facts: Any = None
    problem = None
    if world.mesh.rank == 0:
        try:
            facts = json.loads(json.dumps(_encoded(given, tensors)))
        except (CheckpointError, TypeError, ValueError) as error:
            problem = f"{SOURCE} cannot send the states of rank 0 to other ranks ({error}). Give them on every rank."
    table = [[path, list(values.shape), str(values.dtype)] for path, values in tensors.items()]
    (facts, problem, table), *_ = world.agree_on([facts, problem, table], "optimizer states of rank 0")
    if problem:
        raise CheckpointError(problem)
    whole: dict[str, Tensor] = {}
    for path, shape, dtype in table:
        values = torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")), device=world.mesh.device)
        if world.mesh.rank == 0:
            values.copy_(tensors[path].detach())
        world.broadcast(values.reshape(-1).view(torch.uint8), f"optimizer state {path}", 0)
        whole[path] = values.cpu()
    return _decoded(facts, whole)


def _encoded(given: Any, tensors: dict[str, Tensor]) -> Any:
    if "state" not in given:  # flattened
        return {"flat": [[key, encoded(value, str(key), tensors)] for key, value in given.items()]}
    states = [[key, encoded(state, str(key), tensors)] for key, state in given["state"].items()]
    return {"state": states, "groups": [_plain(group) for group in given["param_groups"]]}


def _plain(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group in JSON, without functions."""
    lists = ("params", NAMES)
    return {
        key: list(value) if key in lists else plain(value)
        for key, value in group.items()
        if key in lists or not callable(value)
    }


def _decoded(facts: Any, whole: Mapping[str, Tensor]) -> StateDict:
    if "flat" in facts:
        return {key: decoded(value, whole.__getitem__) for key, value in facts["flat"]}
    states = {key: decoded(state, whole.__getitem__) for key, state in facts["state"]}
    lists = ("params", NAMES)
    groups: Iterable[dict[str, Any]] = facts["groups"]
    return {
        "state": states,
        "param_groups": [{k: v if k in lists else setting(v) for k, v in group.items()} for group in groups],
    }
