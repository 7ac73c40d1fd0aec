"""Names of a model's tensors in files: its own, renamed ones, or those that transformers writes for its family.

transformers loads many families through tables of conversions (`WeightTransform`): renamings, and operations that join
or cut tensors, such as experts into stacks. Files need the reverse. Tensors that one operation reads together are a
`FileGroup`; everything else is a group of its own, so no more than one fused tensor is in memory at a time. Shapes of
the results are found on the meta device, before any value is there.
"""

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zeroshard.checkpoint.expert_names import FAMILIES, in_files
from zeroshard.checkpoint.stream import Slot
from zeroshard.errors import ConfigError

Conversion = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
Names = Callable[[str], str] | str | None
OF_PEFT = "base_model.model."  # before the names of a model inside of peft's
FAMILY = "transformers"  # of `Names`: those of the family's files


@dataclass(frozen=True, slots=True)
class FileGroup:
    """Tensors of a model, and the tensors of files that are made of them together.

    Attributes:
        sources: in the model.
        results: in the files.
        convert: from sources to results, by name; a view of its argument where it can be.
    """

    sources: tuple[Slot, ...]
    results: tuple[Slot, ...]
    convert: Conversion

    def converted(self, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The results, by name."""
        found = self.convert(values)
        assert found.keys() == {slot.key for slot in self.results}, (self.results, list(found))
        return found


def grouped(slots: Sequence[Slot], names: Names, model: nn.Module | None) -> list[FileGroup]:
    """The tensors of a model as groups, in their order.

    Args:
        names: a renaming; "transformers" for those in the files of the model's family; None for the model's own.
        model: of transformers, for its conversions; its values are not read.

    Raises:
        ConfigError: `names` is something else; it gives one name to two tensors; or the model is not of transformers.
    """
    if names is None:
        groups = [renamed(slot, slot.key) for slot in slots]
    elif callable(names):
        groups = [renamed(slot, names(slot.key)) for slot in slots]
    elif names == FAMILY and model is not None and getattr(model, "config", None) is not None:
        groups = list(_as_in_family(slots, model))
    elif names == FAMILY:
        raise ConfigError(
            f"names='{FAMILY}' takes a model of transformers, and this is a {type(model).__name__}; pass a function "
            f"from the model's names to yours, or nothing."
        )
    else:
        raise ConfigError(f"names is {names!r}; pass '{FAMILY}', a function of the model's names, or None.")
    seen: dict[str, str] = {}
    for group in groups:
        for slot in group.results:
            if not isinstance(slot.key, str):
                raise ConfigError(f"names gives {slot.key!r} to '{group.sources[0].key}', which is no text.")
            other = seen.setdefault(slot.key, group.sources[0].key)
            if other != group.sources[0].key:
                raise ConfigError(f"'{other}' and '{group.sources[0].key}' both get the name '{slot.key}'.")
    return groups


def kept_names(tied: Mapping[str, str], model: Any) -> dict[str, str]:
    """The names under which transformers writes tied parameters, by their first names, where they are others.

    Args:
        tied: for parameters with several names, each further name and the first.
        model: of transformers, or peft's around one; with any other, the first names are kept.
    """
    pairs = {(first, further) for further, first in tied.items()}
    return dict(pairs & _ties_of(model).items())


def _ties_of(model: Any) -> dict[str, str]:
    """The further names of parameters that the class of a model ties, with those that files keep."""
    ties = getattr(model, "get_expanded_tied_weights_keys", None)
    return {} if ties is None else ties(all_submodels=True)


def further_names(tied: Mapping[str, str], model: Any) -> dict[str, str]:
    """The further names of tied parameters that files must have, since loading does not tie them.

    Args:
        tied: for parameters with several names, each further name and the first.
        model: of transformers, or peft's around one; with any other, all of them.
    """
    own = {f"{prefix}{name}" for pair in _ties_of(model).items() for name in pair for prefix in ("", OF_PEFT)}
    return {name: first for name, first in tied.items() if not {name, first} <= own}


def stacks_apart(slots: Sequence[Slot], model_type: str) -> list[FileGroup]:
    """Groups of a family whose stacked experts are single ones in files; for where transformers is not installed."""
    groups = []
    for slot in slots:
        parts = list(in_files(slot.key, slot.shape, FAMILIES.get(model_type)))
        results = tuple(Slot(part.name, slot.dtype, part.shape) for part in parts)
        starts = [part.start for part in parts]
        groups.append(FileGroup((slot,), results, _Cut(slot.key, results, starts)))
    return groups


@dataclass(frozen=True, slots=True)
class _Cut:
    """Cuts one tensor into runs of its elements."""

    key: str
    results: tuple[Slot, ...]
    starts: list[int]

    def __call__(self, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        flat, found = values[self.key].reshape(-1), {}
        for slot, start in zip(self.results, self.starts, strict=True):
            found[slot.key] = flat[start : start + slot.nbytes // slot.dtype.itemsize].view(slot.shape)
        return found


def renamed(slot: Slot, name: str) -> FileGroup:
    """A tensor under another name."""
    return FileGroup((slot,), (Slot(name, slot.dtype, slot.shape),), lambda values: {name: values[slot.key]})


def _as_in_family(slots: Sequence[Slot], model: nn.Module) -> Iterator[FileGroup]:
    """Groups by the reverse of the conversions with which transformers loads a model."""
    from transformers.core_model_loading import WeightConverter, apply_converters, apply_renamings

    ignored = [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_save", None) or ()]
    reversed_ones = [each.reverse_transform() for each in conversions_of(model)[::-1]]
    converters = [each for each in reversed_ones if isinstance(each, WeightConverter)]
    renamings = [each for each in reversed_ones if not isinstance(each, WeightConverter)]
    together: dict[tuple[str, bool], list[tuple[Slot, str]]] = {}
    for slot in slots:
        if any(pattern.search(slot.key) for pattern in ignored):
            continue
        name, pattern = apply_converters(slot.key, converters)
        together.setdefault((name, pattern is not None), []).append((slot, pattern or ""))
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    for (name, converted), members in together.items():
        if not converted:
            yield renamed(members[0][0], apply_renamings(name, renamings))
            continue
        convert = _Converted(model, name, {s.key: p for s, p in members}, by_pattern[members[0][1]], renamings)
        sources = tuple(slot for slot, _ in members)
        shapes = convert({s.key: torch.empty(s.shape, dtype=s.dtype, device="meta") for s in sources})
        yield FileGroup(sources, tuple(Slot(key, v.dtype, tuple(v.shape)) for key, v in shapes.items()), convert)


def conversions_of(model: Any) -> list[Any]:
    """The conversions of transformers with which a model's files are loaded, in the order of loading.

    Those that add or remove a prefix say how particular files were written, and count only if they were used.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    used = getattr(model, "_weight_conversions", None)
    if used is not None:
        return list(used)
    every = get_model_conversion_mapping(model, add_legacy=False)
    return [each for each in every if not isinstance(each, PrefixChange)]


@dataclass(frozen=True, slots=True)
class _Converted:
    """One reversed operation of transformers on the tensors of a group.

    Attributes:
        patterns: by the name of a tensor, the pattern of the operation that matches it.
    """

    model: Any
    name: str
    patterns: Mapping[str, str]
    converter: Any
    renamings: list[Any]

    def __call__(self, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        from transformers.core_model_loading import apply_renamings

        converter = copy.deepcopy(self.converter)
        for key, pattern in self.patterns.items():
            converter.add_tensor(self.name, key, pattern, values[key])
        found = converter.convert(self.name, model=self.model, config=self.model.config)
        return {
            apply_renamings(key, self.renamings): value[0] if isinstance(value, list) else value
            for key, value in found.items()
        }
