"""The values of a pretrained model: from its files, and initial ones where the files lack some.

An engine is made with them as its initialiser, which draws nothing that the files give, and then loads them by range
and box into each rank's slices ([Note: values from files]).
"""

import importlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from zeroshard.checkpoint.boxes import Box, BoxValues, intersection
from zeroshard.checkpoint.stream import CODES, bytes_of
from zeroshard.checkpoint.weights import LoadReport, Shards, files_of
from zeroshard.errors import CheckpointError, ModelError
from zeroshard.interop.huggingface.adapter_files import adapter_tensors
from zeroshard.interop.huggingface.conversion import (
    ModelTensors,
    Renamed,
    model_tensors,
    own_names,
    pretrained_part,
    renamed,
)
from zeroshard.interop.huggingface.lazy import ConvertedTensor, LazyTensor, StoredTensor, whole_of
from zeroshard.interop.huggingface.mxfp4 import with_microscaled
from zeroshard.interop.huggingface.quantized import by_own_names, quantised_tensors
from zeroshard.interop.huggingface.scaled import ScaledShards, quantisation_of
from zeroshard.text import format_names
from zeroshard.units.adapters import base_names
from zeroshard.units.materialise import is_absent, is_unset
from zeroshard.units.token_layers import token_layers
from zeroshard.validation.ranks import tied_names

Shape = tuple[int, ...]
OLD_BUFFERS = {  # buffers that files of earlier versions hold, by the end of the model's own
    "rotary_emb.inv_freq": r"rotary_emb\.inv_freq",
    "position_ids": r"(^|\.)position_ids$",
}


@dataclass(frozen=True, slots=True)
class Wanted:
    """The tensors of a model that need values.

    Attributes:
        shapes: of parameters on the meta device and of persistent buffers, by the first name of each.
        tied: each further name of a parameter, and the first.
        growing: names of embeddings and output layers, whose vocabulary may be larger than the file's.
        adapters: names of parameters of adapters, which the files of their base lack.
        optional: patterns of names that files may lack.
        ignored: patterns of further names that files may hold.
    """

    shapes: Mapping[str, Shape]
    tied: Mapping[str, str]
    growing: frozenset[str]
    adapters: frozenset[str]
    optional: tuple[re.Pattern[str], ...]
    ignored: tuple[re.Pattern[str], ...]

    @classmethod
    def of(cls, model: nn.Module) -> "Wanted":
        """Those of a model."""
        _, part = pretrained_part(model)
        parameters = {name: p for name, p in model.named_parameters() if p.is_meta}
        buffers = dict(_persistent_buffers(model))
        shapes = {name: tuple(tensor.shape) for name, tensor in (parameters | buffers).items()}
        growing: set[str] = set()
        for layer in () if part is None else token_layers(part):
            own = set(map(id, layer.parameters()))
            growing |= {name for name, p in parameters.items() if id(p) in own}
        ignored = list(getattr(part, "_keys_to_ignore_on_load_unexpected", None) or ())
        every = [name for name, _ in model.named_buffers()]
        ignored += [pattern for end, pattern in OLD_BUFFERS.items() if any(name.endswith(end) for name in every)]
        optional = getattr(part, "_keys_to_ignore_on_load_missing", None) or ()
        named = base_names(model)
        adapters = frozenset(name for name in shapes if named is not None and named(name) is None)
        return cls(
            shapes, tied_names(model), frozenset(growing), adapters, tuple(map(re.compile, optional)),
            tuple(map(re.compile, ignored)),
        )  # fmt: skip


@dataclass(slots=True)
class Match:
    """The tensors of files beside those of a model.

    Attributes:
        places: by the first name of a parameter or buffer, the names under which files hold it, with the tensors.
        partly: the names whose first rows alone are in the files.
        unlike: names whose shape in the files is another.
        valued: names of parameters that the files give and that have values in the model.
        missing: names without a value.
        unused: names in the files without a use.
    """

    places: dict[str, list[tuple[str, LazyTensor]]] = field(default_factory=dict)
    partly: list[str] = field(default_factory=list)
    unlike: list[str] = field(default_factory=list)
    valued: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)


class PretrainedFiles:
    """Safetensors files and the model whose values they hold.

    Args:
        quantisation: of `quantisation_of`, of the files; by default as the model's configuration says.
        adapters: a file of the model's adapters, if they have values.

    Attributes:
        path: of a folder or file.
        model: on the meta device.
        part: the `PreTrainedModel` in it, if there is one.
        stored: tensors by name in the files.
        wanted: tensors of the model that need values.

    Raises:
        CheckpointError: the files cannot be read.
    """

    def __init__(
        self,
        path: Path,
        model: nn.Module,
        quantisation: Mapping[str, Any] | None = None,
        adapters: Path | None = None,
    ) -> None:
        self.path, self.model, self._file = path, model, adapters
        _, self.part = pretrained_part(model)
        self.shards = Shards(path, files_of(path) | ({} if adapters is None else {adapters: None}))
        config = getattr(self.part, "config", None)
        scaled = ScaledShards(self.shards, quantisation_of(config) if quantisation is None else quantisation)
        plain = {name: StoredTensor(scaled, name, scaled.dtype(name)) for name in scaled.shapes}
        self._adapters = {name: plain.pop(name) for name in list(plain) if self.shards.file_of(name) == adapters}
        self.stored = by_own_names(with_microscaled(plain, self.shards))
        self.wanted = Wanted.of(model)
        self._own = own_names(model)

    def renamed(self) -> list[Renamed]:
        """The names in the files beside those in the model."""
        return renamed(self.model, self.stored, self._own)

    def tensors(self, names: Sequence[Renamed] | None = None) -> ModelTensors:
        """The tensors of the files under the model's names.

        Args:
            names: of `renamed` here or on another rank, where files may be others.

        Raises:
            CheckpointError: tensors do not fit together.
        """
        if names is None or self.stored.keys() != {name for name, _, _ in names}:
            names = self.renamed()
        found = model_tensors(self.model, self.stored, self._own, names)
        found.tensors = quantised_tensors(self.model, found.tensors)
        if self._file is not None:
            found.tensors |= adapter_tensors(self.model, self._file, self._adapters)
        return found


class MatchedValues:
    """Values of a model from safetensors files: an initialiser of all others, and a source of weights.

    Args:
        strict: whether the files may hold nothing else.
        missing: whether tensors without a value are initialised.
        names: of `PretrainedFiles.tensors`.

    Attributes:
        report: what was read, and what was not.

    Raises:
        CheckpointError: the files are of another model.
    """

    def __init__(
        self,
        files: PretrainedFiles,
        strict: bool,
        missing: Literal["refuse", "initialise"],
        names: Sequence[Renamed] | None = None,
    ) -> None:
        self._path, self._model, self._part = files.path, files.model, files.part
        self._config = getattr(self._part, "config", None)
        self._shards, self._wanted = files.shards, files.wanted
        self._tensors = files.tensors(names)
        self._match = self._matched(initialises=missing == "initialise")
        self._refuse(strict, missing == "initialise")
        self._compare_tied()
        self._drawn: dict[str, torch.Tensor] = {}
        self._owners = dict(_owners(self._model, self._part))

    def __call__(self, module: nn.Module) -> None:
        """Initialise a module's buffers, and its parameters that are not absent, as its model does."""
        for parameter in module.parameters():
            if is_absent(parameter):
                parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # transformers leaves it as it is
        owner: Any = self._owners.get(module)
        own: Any = getattr(module, "reset_parameters", None)
        if owner is None and own is None:
            raise ModelError(
                f"{type(module).__name__} has buffers or parameters that {self._path} does not give, and no "
                f"reset_parameters() to give them values. Build it on the CPU, or add that method."
            )
        with importlib.import_module("transformers.initialization").guard_torch_init_functions():
            initialise = own if owner is None else partial(owner._init_weights, module)
            initialise()
            if owner is not None and any(map(is_unset, module._buffers.values())):
                owner._init_weights(owner)  # some fill buffers of the modules inside

    def reads(self, name: str) -> bool:
        """Whether the files give all values of a parameter."""
        return name in self._match.places and name not in self._match.partly

    def keep(self, name: str, values: torch.Tensor) -> None:
        """Take the initial values of a parameter that the files lack, wholly or partly."""
        self._drawn[name] = values

    def shape(self, name: str) -> Shape | None:
        """The shape of a tensor in the model, or None if there is no value."""
        wanted = name.partition(":")[2]
        return self._wanted.shapes[wanted] if wanted in self._match.places or wanted in self._drawn else None

    def dtype(self, name: str) -> torch.dtype | None:
        """The dtype in which the files hold all of a tensor; None if there are several, or scales."""
        name = name.partition(":")[2]
        if not self.reads(name):
            return None
        (_, tensor), *_ = self._match.places[name]
        kinds = {self._shards.code(stored) for stored in tensor.stored()}
        return tensor.dtype if kinds == {CODES.get(tensor.dtype)} else None

    def fill(self, name: str, targets: Sequence[BoxValues]) -> None:
        """Fill boxes with elements of a tensor, first with the initial values where files lack some.

        Raises:
            CheckpointError: a file cannot be read, or two names of one parameter differ.
        """
        name = name.partition(":")[2]
        if name in self._drawn:
            whole = Box.whole(tuple(self._drawn[name].shape))
            for box, values in targets:
                values.copy_(self._drawn[name][box.slices(whole)])
        for number, (alias, tensor) in enumerate(self._match.places.get(name, ())):
            for box, values in _clipped(targets, tuple(tensor.shape)):
                if not number:
                    tensor.fill(box, values)
                    continue
                again = torch.empty_like(values, device="cpu", memory_format=torch.contiguous_format)
                tensor.fill(box, again)
                if bytes_of(values.cpu()) != bytes_of(again):
                    self._refuse_unequal(name, alias)

    def whole(self, name: str) -> torch.Tensor:
        """All of a tensor, flat."""
        (_, tensor), *_ = self._match.places[name.partition(":")[2]]
        return whole_of(tensor).reshape(-1)

    @property
    def report(self) -> LoadReport:
        """The names that were read, initialised and left out."""
        match = self._match
        read = [name for name in match.places if name not in match.partly]
        initialised = [name for name in match.missing if name in self._wanted.shapes]
        return LoadReport(
            self._path, tuple(read), tuple(match.partly), tuple(initialised), tuple(match.unused),
            self._shards.bytes_read,
        )  # fmt: skip

    def _matched(self, initialises: bool) -> Match:
        wanted, match = self._wanted, Match()
        for name, tensor in self._tensors.tensors.items():
            first = wanted.tied.get(name, name)
            if first not in wanted.shapes:
                match.valued.append(name)
                continue
            needed, held = wanted.shapes[first], tuple(tensor.shape)
            grows = first in wanted.growing and held[1:] == needed[1:] and bool(held) and held[0] < needed[0]
            if held == needed or (grows and initialises):
                match.places.setdefault(first, []).append((name, tensor))
                match.partly += [first] if grows and first not in match.partly else []
            else:
                match.unlike.append(name)
        match.missing = sorted(wanted.shapes.keys() - match.places.keys())
        match.unused = [name for name in self._tensors.unused if not _fits(name, wanted.ignored)]
        return match

    def _refuse(self, strict: bool, initialises: bool) -> None:
        """Refuse files of another model.

        Raises:
            CheckpointError: with the tensors, the file and the way out.
        """
        match = self._match
        if match.valued and strict:
            raise CheckpointError(
                f"'{match.valued[0]}' has values in the model, and {self._path} gives others. Build the model under "
                f'torch.device("meta"), or pass strict=False to keep the model\'s own values.'
            )
        match.unused += [stored for name in match.valued for stored in self._tensors.tensors[name].stored()]
        if match.unlike and not (initialises and not strict):
            self._refuse_unlike(match.unlike[0])
        if match.unlike:
            match.unused += [stored for name in match.unlike for stored in self._tensors.tensors[name].stored()]
        needed = (name for name in match.missing if name not in self._wanted.adapters)
        missing = [name for name in needed if not _fits(name, self._wanted.optional)]
        missing = [] if initialises else missing
        unused = match.unused if strict else []
        if not missing and not unused:
            return
        parts = [f"lacks {format_names(missing)}"] if missing else []
        parts += [f"holds {format_names(sorted(unused))}, which the model does not have"] if unused else []
        ways = ['missing="initialise" to draw those that it lacks'] if missing else []
        ways += ["strict=False to leave out those that it holds"] if unused else []
        raise CheckpointError(
            f"{self._path} is of another model than {self._described}: it {' and '.join(parts)}. Build the model that "
            f"was trained there, or pass {' and '.join(ways)}."
        )

    def _compare_tied(self) -> None:
        """Compare a few rows of values under several names of one parameter, before more is read; `fill` compares all.

        Raises:
            CheckpointError: they differ.
        """
        for name, ((_, first), *others) in self._match.places.items():
            for alias, tensor in others:
                if isinstance(first, ConvertedTensor) or isinstance(tensor, ConvertedTensor):
                    continue  # a row of it would take all of it
                for box in _sample(tuple(min(pair) for pair in zip(first.shape, tensor.shape, strict=True))):
                    rows = [torch.empty(box.shape, dtype=first.dtype) for _ in range(2)]
                    first.fill(box, rows[0])
                    tensor.fill(box, rows[1])
                    if bytes_of(rows[0]) != bytes_of(rows[1]):
                        self._refuse_unequal(name, alias)

    def _refuse_unlike(self, name: str) -> None:
        tensor, first = self._tensors.tensors[name], self._wanted.tied.get(name, name)
        stored, needed = next(tensor.stored()), self._wanted.shapes[first]
        way = 'strict=False and missing="initialise" to draw it anew'
        if first in self._wanted.growing and tuple(tensor.shape[1:]) == needed[1:] and tensor.shape[0] < needed[0]:
            way = 'missing="initialise" to draw the further rows'
        raise CheckpointError(
            f"{self._shards.file_of(stored)} is of another model than {self._described}: '{name}' is "
            f"{tuple(tensor.shape)} there and {needed} here. Build the model that was trained there, or pass {way}."
        )

    def _refuse_unequal(self, name: str, alias: str) -> None:
        (first, tensor), *_ = self._match.places[name]
        file = self._shards.file_of(next(tensor.stored()))
        raise CheckpointError(
            f"{file} holds other values under '{alias}' than under '{first}', and in this model they are one "
            f'parameter. Set "tie_word_embeddings" to false in its configuration, or build the model that was trained '
            f"there."
        )

    @property
    def _described(self) -> str:
        """The model, with the name of its family."""
        family = getattr(self._config, "model_type", None)
        return type(self._model).__name__ + (f" ({family})" if family else "")


class PretrainedValues(MatchedValues):
    """Those of files that are opened here.

    Args:
        path, model, quantisation: as for `PretrainedFiles`.
        strict, missing: as for `MatchedValues`.

    Raises:
        CheckpointError: the files cannot be read, or are of another model.
    """

    def __init__(
        self,
        path: Path,
        model: nn.Module,
        strict: bool,
        missing: Literal["refuse", "initialise"],
        quantisation: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(PretrainedFiles(path, model, quantisation), strict, missing)


def _clipped(targets: Iterable[BoxValues], shape: Shape) -> Iterator[BoxValues]:
    """The elements of boxes that a tensor of a shape has."""
    for box, values in targets:
        common = intersection(box, Box.whole(shape)) if shape else box
        if common is not None:
            yield BoxValues(common, values[common.slices(box)])


def _sample(shape: Shape) -> Iterator[Box]:
    """The first, the middle and the last row of a shape."""
    for row in sorted({0, shape[0] // 2, shape[0] - 1}) if shape and 0 not in shape else ():
        yield Box((row, *(0 for _ in shape[1:])), (1, *shape[1:]))


def _fits(name: str, patterns: Iterable[re.Pattern[str]]) -> bool:
    return any(pattern.search(name) for pattern in patterns)


def _persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, buffer


def _owners(model: nn.Module, part: nn.Module | None) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Each module inside of a `PreTrainedModel`, and the innermost of these around it."""
    kind = type(None) if part is None else importlib.import_module("transformers").PreTrainedModel
    for module in model.modules():  # outer ones first
        if isinstance(module, kind):
            yield from ((inside, module) for inside in module.modules())
