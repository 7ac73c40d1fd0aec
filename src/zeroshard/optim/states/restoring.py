"""Checks of saved options and states against this run's optimizer, before anything is changed.

A copy of the optimizer is made with the saved options, which checks their ranges, and takes a few steps, which show
the names and types of its states. See `optim.trial.probe`.
"""

import math
from functools import partial
from pathlib import Path
from typing import Any

import torch

from zeroshard.checkpoint import Box, Reader
from zeroshard.checkpoint.boxes import BoxValues
from zeroshard.checkpoint.facts import setting, shown
from zeroshard.errors import CheckpointError, OptimizerError
from zeroshard.optim.states.whole_states import NAMES, decoded, paths_of, read_whole
from zeroshard.optim.trial.probe import SHAPE, try_states
from zeroshard.parts.part import Part
from zeroshard.parts.place import Split
from zeroshard.parts.updater import Span

NO_STATES = ("weight", "buffer", "rng")  # kinds of tensors that are no optimizer states
WAY_OUT = "Use an earlier checkpoint, or take the weights alone with engine.load_weights."

Table = dict[str, Any]


class Saved:
    """An optimizer's options and states in a checkpoint.

    Args:
        elementwise: whether it treats each element alone.

    Attributes:
        groups: the options of each parameter group when they were saved.
        scalars: by parameter, its scalar states in their JSON form.

    Raises:
        CheckpointError: the options do not fit this optimizer, or are out of range.
    """

    def __init__(self, reader: Reader, optimizer: torch.optim.Optimizer, elementwise: bool = True) -> None:
        self._reader, self._path, facts = reader, reader.path, reader.facts["optimizer"]
        self._elementwise = elementwise  # if not, states may differ for parameters of other dimensions than the trial's
        kind, groups = type(optimizer).__name__, optimizer.param_groups
        if (facts["class"], len(facts["groups"])) != (kind, len(groups)):
            raise CheckpointError(
                f"{self._path} was written with {facts['class']} in {len(facts['groups'])} parameter groups, "
                f"this run has {kind} in {len(groups)}. Use the same optimizer to go on."
            )
        version, saved_with = str(torch.__version__), reader.facts.get("torch", torch.__version__)
        needed = optimizer.defaults.keys() if version == saved_with else ()  # another version has other options
        self.scalars: Table = facts["scalars"]
        self.groups: list[Table] = []
        self._group_of = {name: n for n, saved in enumerate(facts["groups"]) for name in saved.get(NAMES, ())}
        self._needs: list[list[Table]] = []  # by group: the states after each of some steps
        for number, (live, saved) in enumerate(zip(groups, facts["groups"], strict=True)):
            at = f"the optimizer's group {number}"
            missing = [key for key in live if key in needed and key not in saved and not callable(live[key])]
            if missing:
                raise CheckpointError(f"{self._path} lacks '{missing[0]}' of {at}. {WAY_OUT}")
            free = [key for key, default in optimizer.defaults.items() if default is None]
            options = {}
            for key in (key for key in saved if key not in ("params", NAMES)):
                named = f"'{key}' of {at}"  # a schedule's "initial_lr" and an optimizer's counts may not exist yet
                if key in live:
                    options[key] = _option(self._path, named, saved[key], live[key], key in free)
                else:
                    options[key] = _decoded(self._path, named, saved[key])
            try:
                self._needs.append(try_states(optimizer, {**live, **options}))
            except OptimizerError as error:
                raise CheckpointError(f"{self._path} holds options that cannot be: {at}: {error} {WAY_OUT}") from error
            self.groups.append(options)

    def state(self, name: str, span: Span, split: Split | None = None) -> Table | None:
        """The states of a parameter without a value per element, on the device; None if it has no states.

        Args:
            span: its span with this rank's rows.
            split: this rank's part of it.
        """
        kept = self.scalars.get(name)
        read = partial(read_whole, self._reader, name, split, span)
        return None if kept is None else {key: decoded(value, read) for key, value in kept.items()}

    def room(self, key: str, name: str, span: Span) -> torch.Tensor:
        """Zeros for a state with a value for each element of a span, in the optimizer's dtype for it."""
        kept = self._reader.tensors[f"{key}:{name}"].dtype
        if self._elementwise:  # offloaded states may have other dtypes, and are saved in the values' dtype
            found = self._dtype(key, span.group)
            kept = span.tensor.dtype if found == torch.float32 else found
        return torch.zeros(span.tensor.shape, dtype=kept, device=span.tensor.device)

    def kinds(self, name: str) -> list[str]:
        """The states of a parameter with a value per element."""
        whole = set().union(*map(paths_of, self.scalars.get(name, {}).values()))
        return [kind for kind in self._reader.kinds(name) if kind not in NO_STATES and kind not in whole]

    def check(self, name: str, group: int) -> None:
        """Check a parameter's states against the trial steps of its group.

        Raises:
            CheckpointError: a state is missing, or of another type or shape; or the parameter was in another group.
        """
        if self._group_of.get(name, group) != group:
            raise CheckpointError(
                f"{self._path} was written with '{name}' in the optimizer's group {self._group_of[name]}, and here it "
                f"is in group {group}, which would get the options of others. Put the parameters into the same groups, "
                f"in the same order; or take the weights alone with engine.load_weights."
            )
        kept, kinds, steps = self.scalars.get(name), self.kinds(name), self._needs[group]
        if kept is None and not kinds:
            return
        for key in kinds:
            self._check_elements(key, name, group)
        known = {key: value for states in steps for key, value in states.items()}
        for key, value in known.items():
            elements = isinstance(value, torch.Tensor) and value.shape == SHAPE
            saved = key in kinds if elements else kept is not None and key in kept
            if not saved and self._elementwise and all(key in states for states in steps):
                raise CheckpointError(
                    f"{self._path} lacks the optimizer's state '{key}' of '{name}', without which the update would be "
                    f"another. {WAY_OUT}"
                )
        for path in {each for value in (kept or {}).values() for each in paths_of(value)}:
            if self._reader.shape(f"{path}:{name}") is None:
                raise CheckpointError(f"{self._path} lacks the optimizer's state '{path}' of '{name}'. {WAY_OUT}")
        if kept is None:
            raise CheckpointError(f"{self._path} holds '{kinds[0]}:{name}' and no scalars of '{name}'. {WAY_OUT}")
        for key, value in kept.items():
            if isinstance(value, dict):  # a structure with tensors
                continue
            self._check_scalar(name, key, value, known.get(key))

    def _check_scalar(self, name: str, key: str, saved: Any, like: Any) -> None:
        """Check a scalar state; one without a state of the trial steps (`like` is None) may have any type."""
        at = f"the optimizer's state '{key}' of '{name}'"
        value = _decoded(self._path, at, saved)
        if like is not None and not self._fits(name, value, like):
            raise CheckpointError(
                f"{self._path} says that {at} is a {_type(value)}; it must be a {_type(like)}. {WAY_OUT}"
            )
        number = value.item() if isinstance(value, torch.Tensor) else value
        if key == "step" and like is not None and not (_finite(value) and number >= 0 and number == int(number)):
            raise CheckpointError(f"{self._path} says that {at} is {shown(number)}; it must count steps. {WAY_OUT}")

    def _fits(self, name: str, value: Any, like: Any) -> bool:
        """Whether a scalar state fits a parameter; `like` is the state of the trial's fp32 matrix."""
        if isinstance(value, torch.Tensor) and isinstance(like, torch.Tensor):
            if not self._elementwise:  # a 0-dimensional parameter has such states for each element
                return value.dtype.is_floating_point == like.dtype.is_floating_point
            if like.dtype == torch.float32 and value.dtype == self._reader.tensors[f"weight:{name}"].dtype:
                return value.dim() == like.dim()
        return _type(value) == _type(like)

    def _dtype(self, key: str, group: int) -> torch.dtype:
        """The dtype of an elementwise state in the trial steps, which are in fp32; fp32 if they make none."""
        made = (states.get(key) for states in self._needs[group])
        return next((value.dtype for value in made if isinstance(value, torch.Tensor)), torch.float32)

    def _check_elements(self, key: str, name: str, group: int) -> None:
        entry, weight = self._reader.tensors[f"{key}:{name}"], self._reader.tensors[f"weight:{name}"]
        needed = self._dtype(key, group)
        wanted, fits = "floating-point numbers", entry.dtype.is_floating_point or entry.dtype.is_complex
        if not needed.is_floating_point:
            wanted, fits = f"values of {needed}", entry.dtype == needed
        if entry.shape != weight.shape or (self._elementwise and not fits):  # others may have codes
            raise CheckpointError(
                f"{self._path} holds '{key}:{name}' as {entry.dtype} {list(entry.shape)}; it must have {wanted} in the "
                f"shape of the weights, {list(weight.shape)}. {WAY_OUT}"
            )


def load_states(part: Part, reader: Reader, saved: Saved) -> None:
    """Set the optimizer's states of a part, or of this owner's whole matrices if it steps over these."""
    entries, updater, matrices = part.flat.index.entries, part.updater, part.updater.matrices
    if matrices is not None:
        for name, span in matrices.items():
            state, whole = saved.state(name, span), Box.whole(tuple(span.tensor.shape))
            if state is not None:
                for key in saved.kinds(name):
                    state[key] = saved.room(key, name, span)
                    reader.fill(f"{key}:{name}", [BoxValues(whole, state[key])])
            updater.load_state(span, state)
        return
    kept = [(saved.scalars.get(entry.name), saved.kinds(entry.name)) for entry in entries]
    updater.split([after.offset for a, b, after in zip(kept, kept[1:], entries[1:], strict=False) if a != b])
    for span in updater.spans:
        entry = entries[part.flat.index.number_at(span.start)]
        loaded = saved.state(entry.name, span, part.splits.get(entry.name))
        if loaded is None:
            updater.load_state(span, None)
            continue
        for key in saved.kinds(entry.name):
            loaded[key] = saved.room(key, entry.name, span)
            values = loaded[key].view(-1)
            for number, low, high in part.flat.index.overlaps(span.start, span.stop):
                inside = values[low - span.start : high - span.start]
                reader.fill(f"{key}:{entries[number].name}", [each for each, _ in part.boxes(number, low, inside)])
        updater.load_state(span, loaded)


def _decoded(path: Path, at: str, saved: Any) -> Any:
    try:
        return setting(saved)
    except (ValueError, RuntimeError, OverflowError) as error:
        raise CheckpointError(f"{path} says that {at} is {error}. {WAY_OUT}") from error


def _option(path: Path, at: str, saved: Any, live: Any, free: bool) -> Any:
    """A saved option, in the type of this run's option.

    Args:
        free: whether the option may also be None, a number or a bool, since its default is None.
    """
    value = _decoded(path, at, saved)
    if not _same_type(value, live, free):
        raise CheckpointError(f"{path} says that {at} is {shown(value)}, and here it is {shown(live)}. {WAY_OUT}")
    if isinstance(value, torch.Tensor) and isinstance(live, torch.Tensor):
        return value.to(live.device)
    return list(value) if isinstance(live, list) else value


def _same_type(value: Any, live: Any, free: bool) -> bool:
    """Whether a saved value has the type and form of the one in use."""
    if isinstance(value, torch.dtype) or isinstance(live, torch.dtype):
        return all(isinstance(each, torch.dtype) or (free and each is None) for each in (value, live))
    if free and (value is None or live is None):
        return value is None or (_finite(value) is not False and not isinstance(value, (str, tuple)))
    if isinstance(live, bool) or live is None or isinstance(live, str):
        return type(value) is type(live)
    if isinstance(live, (list, tuple)):
        pairs = zip(value, live, strict=False) if isinstance(value, tuple) else ()
        return isinstance(value, tuple) and len(value) == len(live) and all(_same_type(a, b, False) for a, b in pairs)
    return bool(_finite(value)) or (_finite(live) is False and _finite(value) is False)


def _finite(value: Any) -> bool | None:
    """Whether a number, also one in a tensor, is finite; None if the value is no number."""
    if isinstance(value, torch.Tensor):
        return None if value.dtype == torch.bool else math.isfinite(value.item())
    return math.isfinite(value) if type(value) in (int, float) else None


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{'scalar' if value.dim() == 0 else 'whole'} tensor of {value.dtype}"
    return type(value).__name__
