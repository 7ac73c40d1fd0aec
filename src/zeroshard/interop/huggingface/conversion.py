"""The tensors of files under a model's names, by transformers' own tables of renamings and conversions.

transformers gives each family a list of `WeightRenaming`s, of which all that match apply, and `WeightConverter`s, of
which one may apply to a name: it takes several tensors (the experts of a layer, gate and up) and makes others of them
by operations. Both are followed here with lazy tensors, as `from_pretrained` of transformers follows them with values.
A model that is no `PreTrainedModel`, and contains none, has the names of its state dict.
"""

import copy
import importlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from zeroshard.errors import CheckpointError
from zeroshard.interop.huggingface.lazy import (
    ConvertedTensor,
    LatestResults,
    LazyTensor,
    NotLazyError,
    Results,
    WholeConversion,
)
from zeroshard.quantized.stacks import stacks_of
from zeroshard.text import format_names
from zeroshard.units.adapters import base_names

Renamed = tuple[str, str, str | None]  # a name in files, that in the model, the pattern of a conversion that takes it


@dataclass(slots=True)
class ModelTensors:
    """The tensors of files under a model's names.

    Attributes:
        tensors: by name in the model's state dict.
        unused: names in the files that fit no name of the model.
        latest: results of conversions of whole tensors.
    """

    tensors: dict[str, LazyTensor] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)
    latest: LatestResults = field(default_factory=LatestResults)


@dataclass(slots=True)
class Collected:
    """Stored tensors that one conversion takes, with the pattern under which it takes each."""

    converter: Any
    sources: list[tuple[str, str, LazyTensor]] = field(default_factory=list)  # pattern, name in the files, tensor


def pretrained_part(model: nn.Module) -> tuple[str, nn.Module | None]:
    """The outermost `PreTrainedModel` in a model, with its path; None if there is none."""
    kind = importlib.import_module("transformers").PreTrainedModel
    return next(((path, module) for path, module in model.named_modules() if isinstance(module, kind)), ("", None))


def own_names(model: nn.Module) -> dict[str, list[str]]:
    """Names in the model's state dict, by those in the state dict of the `PreTrainedModel` inside, without adapters.

    If there is none, by those of the model, or of the base inside of peft's. A frozen module and its trained copies, in
    `modules_to_save` of peft, share one name.
    """
    path, part = pretrained_part(model)
    if part is None and (base_of := getattr(model, "get_base_model", None)) is not None:
        path, part = next(named for named in model.named_modules() if named[1] is base_of())
    prefix, named = f"{path}." if path else "", base_names(model)
    found: dict[str, list[str]] = {}
    for name in _state(model if part is None else part):
        base = prefix + name if named is None else named(prefix + name)
        if base is not None:
            found.setdefault(base.removeprefix(prefix), []).append(prefix + name)
    return found


def model_tensors(
    model: nn.Module, stored: Mapping[str, LazyTensor], names: Mapping[str, list[str]], found_names: Sequence[Renamed]
) -> ModelTensors:
    """The tensors of files under a model's names.

    Args:
        model: on the meta device.
        stored: by name in the files.
        names: of `own_names` of the model.
        found_names: of `renamed` of the model and the names in the files.

    Raises:
        CheckpointError: tensors do not fit together.
    """
    found = ModelTensors()
    collected: dict[str, Collected] = {}
    _, part = pretrained_part(model)
    converters = _converters(part) if any(pattern is not None for _, _, pattern in found_names) else {}
    for name, target, pattern in found_names:
        if target not in names:
            found.unused.append(name)
        elif pattern is None:
            found.tensors.update(dict.fromkeys(names[target], stored[name]))
        else:
            one = collected.setdefault(target, Collected(converters.get(pattern)))
            one.sources.append((pattern, name, stored[name]))
    state = _state(model) if collected else {}
    for renamed, one in collected.items():
        results = _converted(one, renamed, part, found.latest)
        for target, tensor in results.items():
            found.tensors.update(dict.fromkeys(names.get(target, ()), tensor))
        needed = state[names[renamed][0]].shape
        if renamed in results and results[renamed].shape != needed:
            _refuse_gaps(one, needed)
    return found


def _state(model: nn.Module) -> dict[str, Any]:
    """The tensors of a state dict, and the quantised stacks that take the place of some."""
    return {**model.state_dict(keep_vars=True), **stacks_of(model)}


def renamed(model: nn.Module, stored: Iterable[str], names: Mapping[str, list[str]]) -> list[Renamed]:
    """The names in files beside those in the model, in the order in which tensors are collected.

    The first call in a process takes long: transformers makes the table of all families then.

    Args:
        names: of `own_names` of the model.
    """
    _, part = pretrained_part(model)
    if part is None:
        return [(name, name, None) for name in stored]
    core, table = _table(part)
    renamings = [entry for entry in table if isinstance(entry, core.WeightRenaming)]
    converters = [entry for entry in table if isinstance(entry, core.WeightConverter)]
    prefix, found = part.base_model_prefix, []
    for name in sorted(stored, key=core.dot_natural_key):
        target, pattern = core.rename_source_key(name, renamings, converters, prefix, names)
        if target not in names and name in names:  # a name of the model that a renaming took for one of a file
            target, pattern = core.rename_source_key(name, [], [], prefix, names)
        found.append((name, target, pattern))
    return found


def _table(part: Any) -> tuple[Any, Sequence[Any]]:
    """The module of transformers' conversions, and those of a model."""
    core = importlib.import_module("transformers.core_model_loading")
    return core, importlib.import_module("transformers.conversion_mapping").get_model_conversion_mapping(part)


def _converters(part: Any) -> dict[str, Any]:
    """The converters of a model, by the patterns of the names that each takes."""
    core, table = _table(part)
    entries = [entry for entry in table if isinstance(entry, core.WeightConverter)]
    return {pattern: converter for converter in entries for pattern in converter.source_patterns}


def _converted(one: Collected, renamed: str, part: Any, latest: LatestResults) -> dict[str, LazyTensor]:
    """The results of a conversion by name: lazily, else by a conversion of whole tensors.

    Raises:
        CheckpointError: transformers' operations refuse the tensors.
    """
    sources = [tensor for _, _, tensor in one.sources]

    def convert(tensors: Sequence[Any]) -> dict[str, Any]:
        """Run transformers' operations."""
        converter = copy.deepcopy(one.converter)
        for (pattern, name, _), tensor in zip(one.sources, tensors, strict=True):
            converter.add_tensor(renamed, name, pattern, tensor)
        results = converter.convert(renamed, model=part, config=part.config)
        return {name: result[0] if isinstance(result, list) else result for name, result in results.items()}

    try:
        results = convert(sources)
        if all(isinstance(result, LazyTensor) for result in results.values()):
            return results
    except (NotLazyError, AttributeError, TypeError):
        pass  # an operation that takes whole tensors
    except Exception as error:
        raise _misfit(one, renamed, error) from error
    try:
        shapes: Results = convert([torch.empty(each.shape, dtype=each.dtype, device="meta") for each in sources])
    except Exception as error:  # of any operation
        raise _misfit(one, renamed, error) from error
    conversion = WholeConversion(sources, convert, latest)
    return {name: ConvertedTensor(conversion, name, tuple(t.shape), t.dtype) for name, t in shapes.items()}


def _misfit(one: Collected, renamed: str, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{format_names([name for _, name, _ in one.sources])} in the files do not make up '{renamed}' of the model "
        f"({error}). Give the files of one model, all of them."
    )


def _refuse_gaps(one: Collected, needed: Sequence[int]) -> None:
    """Refuse a stack of numbered tensors in which some numbers are missing.

    Raises:
        CheckpointError: with the first missing name.
    """
    by_pattern: dict[str, list[str]] = {}
    for pattern, name, _ in one.sources:
        by_pattern.setdefault(pattern, []).append(name)
    for names in by_pattern.values():
        numbered = [re.split(r"\.(\d+)\.", name) for name in names]
        varying = [place for place in range(1, len(numbered[0]), 2) if len({each[place] for each in numbered}) > 1]
        if len(varying) != 1:
            continue
        place = varying[0]
        held = {int(each[place]) for each in numbered}
        absent = sorted(set(range(needed[0])) - held)
        if absent and max(held) < needed[0]:
            parts = [f".{word}." if n % 2 else word for n, word in enumerate(numbered[0])]
            parts[place] = f".{absent[0]}."
            raise CheckpointError(
                f"The files lack '{''.join(parts)}'{f' and {len(absent) - 1} more' if absent[1:] else ''}, and hold "
                f"other weights of these {needed[0]} experts. Copy them again."
            )
