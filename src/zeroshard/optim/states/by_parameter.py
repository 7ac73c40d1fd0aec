"""An optimizer's states by whole parameter, as in `torch.optim`: gathered from slices, and cut into them.

So `engine.optimizer.state_dict()` equals that of the plain loop, and either loads into the other.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.checkpoint import Box
from zeroshard.checkpoint.boxes import BoxValues
from zeroshard.checkpoint.facts import plain
from zeroshard.comm.collectives import Comm
from zeroshard.errors import CheckpointError, OptimizerError
from zeroshard.optim.slices.spans import SpanOptimizer
from zeroshard.optim.states.other_forms import SOURCE, GivenParameter, Members, by_position, gathered_states
from zeroshard.optim.states.restoring import Saved, load_states
from zeroshard.optim.states.whole_states import NAMES, decoded, encoded, scalars_of, state_pieces
from zeroshard.optim.trial.probe import SHAPE, try_states
from zeroshard.parts.part import Parts
from zeroshard.units.flat import digest_of


def members_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> Members:
    """The parameters of an optimizer's groups; call it before any is cut."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    members = []
    for group in optimizer.param_groups:
        named = [(p, names.get(id(p), [""])) for p in group["params"]]
        members.append(
            [
                GivenParameter(own[0], nn.Parameter(_hollow(p), p.is_floating_point()), tuple(own[1:]))
                for p, own in named
            ]
        )
    return members


def given_parameter(name: str, parameter: nn.Parameter) -> GivenParameter:
    """A parameter of a group, which may be on the meta device."""
    return GivenParameter(name, nn.Parameter(_hollow(parameter), parameter.is_floating_point()))


class ByParameter:
    """The states of an engine's optimizer by parameter.

    Args:
        world: all ranks.
    """

    def __init__(self, optimizer: SpanOptimizer, parts: Parts, world: Comm, members: Members) -> None:
        self._spans, self._parts, self._world, self._members = optimizer, parts, world, members

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's own state dict over whole parameters, on the CPU on every rank; a collective call."""
        tensors, scalars = self._gathered()
        by_name: dict[str, dict[str, Tensor]] = {}
        for full, values in tensors.items():
            key, _, name = full.partition(":")
            by_name.setdefault(name, {})[key] = values
        states = {}
        for member in (member for group in self._members for member in group):
            kept, own = scalars.get(member.name), by_name.get(member.name, {})
            if kept is not None:
                decodes = {key: decoded(value, own.__getitem__) for key, value in kept.items()}
                paths = {key for key in own if key.partition(".")[0] in kept}
                states[member.whole] = decodes | {key: own[key] for key in own if key not in paths}
        optimizer = self._spans.optimizer
        with self._spans.held.inside(self._wholes, states):
            found: dict[str, Any] = type(optimizer).state_dict(optimizer)
        return found

    def load(self, given: Mapping[str, Any] | None) -> None:
        """Load a state dict in one of the forms of `other_forms`; a collective call.

        Raises:
            CheckpointError: it does not fit the optimizer or the model, or differs between ranks.
        """
        problem, source, whole = None, None, gathered_states(given, self._world)
        try:
            source = self._source(by_position(whole, self._members))
            saved = Saved(source, self._spans.optimizer, self._spans.layout.whole is None)  # type: ignore[arg-type]
            for part in self._parts.all:
                for span in part.updater.spans:
                    for number, _, _ in part.flat.index.overlaps(span.start, span.stop):
                        saved.check(part.flat.index.entries[number].name, span.group)
        except (CheckpointError, OptimizerError) as error:
            problem = str(error)
        digest = source.digest if source is not None else 0
        answers = self._world.agree_on([problem, digest], "loaded optimizer states")
        problem = next(filter(None, (said for said, _ in answers)), None)
        if problem is None and len({digest for _, digest in answers}) > 1:
            problem = f"{SOURCE} was given different states by rank. Give every rank the same, as state_dict() does."
        if problem is not None:
            raise CheckpointError(problem)
        assert source is not None
        for part in self._parts.all:
            with part.updater.at_hand(writes=True):
                if part.gradients is not None:
                    load_states(part, source, saved)  # type: ignore[arg-type]
        for group, options in zip(self._spans.optimizer.param_groups, saved.groups, strict=True):
            group.update(options)
        self._spans.account()

    @property
    def _wholes(self) -> list[list[nn.Parameter]]:
        return [[member.whole for member in group] for group in self._members]

    def _gathered(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """All tensors of states by "KEY:NAME", and all other states by the parameter's name."""
        pieces = []
        for part in (part for part in self._parts.all if part.place.counted):
            with part.updater.at_hand():
                pieces += [replace(piece, values=piece.values.cpu().clone()) for piece in state_pieces(part)]
        scalars = {name: kept for part in self._parts.all for name, kept in scalars_of(part).items()}
        mine = [[p.name, p.shape, p.box.start, p.box.shape, str(p.values.dtype)] for p in pieces]
        everyone = self._world.agree_on([mine, scalars], "optimizer states")
        whole: dict[str, Tensor] = {}
        for rank, (described, _) in enumerate(everyone):
            for number, (name, shape, start, length, dtype) in enumerate(described):
                kind, box = getattr(torch, dtype.removeprefix("torch.")), Box(tuple(start), tuple(length))
                values = torch.empty(length, dtype=kind, device=self._world.mesh.device)
                if rank == self._world.mesh.rank:
                    values.copy_(pieces[number].values.view(values.shape))
                self._world.broadcast(values.reshape(-1).view(torch.uint8), f"optimizer state {name}", rank)
                room = whole.setdefault(name, torch.zeros(shape, dtype=kind))
                room[box.slices(Box.whole(tuple(shape)))].copy_(values)
        return whole, {name: kept for _, theirs in everyone for name, kept in theirs.items()}

    def _source(self, given: dict[str, Any]) -> "GivenStates":
        """A state dict by the names of parameters.

        Raises:
            CheckpointError: the optimizer refuses it.
        """
        optimizer, states = self._spans.optimizer, dict[Any, Any]()
        own = type(optimizer).load_state_dict
        with self._spans.held.inside(self._wholes, states):
            try:
                own(optimizer, given)
                states, groups = dict(optimizer.state), optimizer.param_groups
            except Exception as error:  # torch's, or the optimizer's own
                raise CheckpointError(
                    f"{SOURCE} cannot take what it was given ({type(error).__name__}: {error}). Give it what "
                    f"engine.optimizer.state_dict() has returned, or the state_dict() of the same optimizer over the "
                    f"same model; or go on from a folder of engine.save() by engine.load()."
                ) from error
        casts = own is torch.optim.Optimizer.load_state_dict and not optimizer._optimizer_load_state_dict_pre_hooks
        if casts:  # to the dtype of the weights; take the states as they were saved
            numbers = [number for group in given["param_groups"] for number in group["params"]]
            members = [member for group in self._wholes for member in group]
            states = {p: given["state"][n] for n, p in zip(numbers, members, strict=True) if n in given["state"]}
        return GivenStates(optimizer, self._members, states, groups, self._spans.layout.whole is None)


class GivenStates:
    """States in memory, with the interface of a checkpoint's `Reader`.

    Args:
        states: by whole parameter.
        groups: with the options.
        elementwise: whether the optimizer treats each element alone.

    Attributes:
        path: name of the source in messages.
        facts: in the form of a checkpoint's.
        tensors: by "KEY:NAME"; weights have only shapes.
    """

    path = SOURCE

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        members: Members,
        states: Mapping[Any, Any],
        groups: Sequence[Mapping[str, Any]],
        elementwise: bool,
    ) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._kinds: dict[str, list[str]] = {}
        scalars: dict[str, dict[str, Any]] = {}
        options = []
        for members_of_group, group in zip(members, groups, strict=True):
            own = {k: plain(v) for k, v in group.items() if k not in ("params", NAMES) and not callable(v)}
            options.append({**own, NAMES: [member.name for member in members_of_group]})
            for member in members_of_group:
                self._add("weight", member.name, member.whole)
                if member.whole in states:
                    whole = member.whole if elementwise or member.whole.dim() else None
                    each = _elements(optimizer, group) if whole is not None and not whole.dim() else None
                    scalars[member.name] = self._take(member.name, states[member.whole], whole, each)
        kind = {"class": type(optimizer).__name__, "groups": options, "scalars": scalars}
        self.facts = {"optimizer": kind}

    def kinds(self, name: str) -> list[str]:
        """The kinds of all tensors `KIND:NAME`."""
        return self._kinds.get(name, [])

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of a tensor; None for an unknown one."""
        return tuple(self.tensors[name].shape) if name in self.tensors else None

    def fill(self, name: str, targets: Sequence[BoxValues]) -> None:
        """Fill boxes with elements of a tensor."""
        values = self.tensors[name]
        for box, into in targets:
            into.copy_(values[box.slices(Box.whole(tuple(values.shape)))])

    @property
    def digest(self) -> int:
        """A checksum of all states."""
        own = [value for name, value in self.tensors.items() if not name.startswith("weight:") and value.numel()]
        return digest_of(value.detach().contiguous().reshape(-1) for value in own)

    def _take(self, name: str, state: Mapping[str, Any], whole: Tensor | None, each: set[str] | None) -> dict[str, Any]:
        """Enter the tensors among a parameter's states; returns the others in JSON.

        Args:
            whole: shape of states with a value for each element; None if there are none.
            each: names of those states, if the shape does not identify them.
        """
        scalars: dict[str, Any] = {}
        for key, value in state.items():
            found: dict[str, Tensor] = {}
            alike = whole is not None and isinstance(value, Tensor) and value.shape == whole.shape
            if alike and (each is None or key in each):
                self._add(key, name, value)
                continue
            scalars[key] = encoded(value, key, found)
            for path, values in found.items():
                self._add(path, name, values)
        return scalars

    def _add(self, kind: str, name: str, values: Tensor) -> None:
        self.tensors[f"{kind}:{name}"] = values
        self._kinds.setdefault(name, []).append(kind)


def _elements(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> set[str]:
    """The names of an elementwise optimizer's states with a value for each element."""
    own = {key: value for key, value in group.items() if key != "params"}
    every = (item for states in try_states(optimizer, own) for item in states.items())
    return {key for key, value in every if isinstance(value, Tensor) and value.shape == SHAPE}


def _hollow(parameter: Tensor) -> Tensor:
    dtype = torch.promote_types(parameter.dtype, torch.float32) if parameter.is_floating_point() else parameter.dtype
    return torch.zeros((), dtype=dtype).expand(parameter.shape)


def shown_parameters(parts: Parts, members: Members) -> Iterator[list[nn.Parameter]]:
    """The model's parameters on this rank, of each group."""
    every = [(part, number, entry.name) for part in parts.all for number, entry in enumerate(part.flat.index.entries)]
    here = {name: part.flat.parameters[number] for part, number, name in every}
    for group in members:
        yield [here[member.name] for member in group if member.name in here]
