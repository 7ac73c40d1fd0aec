"""Adapters of finished checkpoints, alone or added to their base, with one tensor in memory at a time.

The model is built again on the meta device from the configurations in the manifest, those of transformers and of peft,
so that names and sums are those of `engine.export`. Values come from the checkpoint, and those that it left out from
the files of the base; their digests are compared ([Note: a base in files]). A base that was quantised while it was read
is quantised again, matrix by matrix, to the codes that were trained upon; one whose files hold codes is read as it is.
"""

import copy
import importlib
import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from zeroshard.access.adapter_export import (
    FACT,
    ExportSizes,
    Read,
    merged_weights,
    plan_adapter,
    plan_merged,
)
from zeroshard.access.frozen_base import Row
from zeroshard.access.whole_layers import aliases_of_buffers
from zeroshard.access.whole_weights import HeldBoxes
from zeroshard.checkpoint import Reader, Slot
from zeroshard.checkpoint.boxes import Box, BoxValues
from zeroshard.checkpoint.digests import digest
from zeroshard.checkpoint.export import CONFIG, ExportPlan
from zeroshard.checkpoint.facts import FACTS, shown
from zeroshard.errors import CheckpointError, DamagedError
from zeroshard.interop.huggingface.pretrained import PretrainedValues
from zeroshard.interop.huggingface.quantized import METHOD, package, quantise
from zeroshard.interop.huggingface.scaled import quantisation_of
from zeroshard.quantized.stacks import CODES, MatrixFormat
from zeroshard.quantized.stored import FACT as QUANTISED
from zeroshard.quantized.stored import ends_of, stored_weights
from zeroshard.quantized.weights import STACK, TURNED, end_of
from zeroshard.units.adapters import INSIDE, base_names, base_of, layers_of_adapters

BASE = ".base_layer"
ENGINE = "Make the engine of the run, call engine.load(checkpoint), then engine.export(folder, merge=True)"


def planned_adapters(
    reader: Reader,
    adapter: str | None,
    base: Path | None,
    sizes: ExportSizes,
    own: Callable[[], Any] | None = None,
) -> tuple[ExportPlan, Read]:
    """The files of one adapter of a checkpoint, or of its base with the active adapters added; and a reader of tensors.

    Args:
        adapter: its name; None for the sum.
        base: the folder of the frozen base, if it is elsewhere now.
        own: makes the model of the run, with its adapters or without, if that is none of transformers.

    Raises:
        CheckpointError: the checkpoint is of no model of peft, or of one that cannot be built again, or files of the
            base do not fit. DamagedError: the manifest has other facts than those of adapters. PlanError: as
            `plan_adapter` and `plan_merged`.
    """
    model, weights = _weights_of(reader, base, own)
    if adapter is None:
        return plan_merged(weights, model, sizes)
    return plan_adapter(weights, model, adapter), weights.read


def merged_base(reader: Reader) -> Iterator[tuple[str, Tensor]]:
    """The weights of the base of a checkpoint with the active adapters added, as of `merged_weights`.

    Raises:
        CheckpointError, DamagedError, PlanError: as `planned_adapters`.
    """
    model, weights = _weights_of(reader)
    return merged_weights(weights, model)


def _weights_of(
    reader: Reader, base: Path | None = None, own: Callable[[], Any] | None = None
) -> tuple[Any, "CheckpointWeights"]:
    """The model of a checkpoint, with adapters, on the meta device; and its whole tensors."""
    facts = reader.facts.get(FACT)
    if facts is None:
        raise CheckpointError(
            f"{reader.path} has no configuration of adapters: it is of a model without adapters of peft, or an earlier "
            f"version wrote it. Leave out --merge and --adapter; or, of such a model: {ENGINE} or adapters=True."
        )
    for key in (FACT, "base"):
        fits, needed = FACTS[key]
        if not fits(reader.facts.get(key)):
            raise DamagedError(
                f"{reader.path} is not to be trusted: its manifest says that {key} is {shown(reader.facts[key])}, and "
                f"it must be {needed}. Use an earlier checkpoint."
            )
    model = _built(reader, facts, own)
    return model, CheckpointWeights(reader, model, base)


class CheckpointWeights:
    """The whole tensors of a checkpoint and of the base that it left out.

    Args:
        model: with adapters, on the meta device.
        base: the folder of the base; by default the one from which it was read.

    Attributes:
        table: all tensors, in the order of the model's state dict.
        tied: for parameters with several names, each further name and the first.

    Raises:
        CheckpointError: a tensor is neither in the checkpoint nor among those that it left out, or has another shape.
    """

    def __init__(self, reader: Reader, model: Any, base: Path | None) -> None:
        self._reader, self._model = reader, model
        left = reader.facts.get("base") or {"source": "", "tensors": {}}
        self._left: Mapping[str, Row] = left["tensors"]
        self._folder = Path(left["source"]) if base is None else base
        further: Mapping[str, str] = reader.facts.get("tied", {})
        self.tied = further
        self._sources = {name: f"{kind}:{name}" for kind in ("weight", "buffer") for name in reader.names(kind)}
        self._stored, _ = stored_weights(reader, self._sources)
        rows: Mapping[str, Any] = reader.facts.get(QUANTISED) or {}
        self._quantised = {label: row for label, row in rows.items() if row is not None and label not in self._stored}
        state = model.state_dict(keep_vars=True)
        again = further.keys() | aliases_of_buffers(model).keys()
        self.table = [self._row(name, tuple(tensor.shape)) for name, tensor in state.items() if name not in again]

    def read(self, slot: Slot) -> Tensor:
        """A whole tensor in the dtype of `slot`.

        Raises:
            CheckpointError: the base cannot be read, or has other values.
        """
        return self._whole(slot.key).to(slot.dtype).contiguous()

    def _row(self, name: str, shape: tuple[int, ...]) -> HeldBoxes:
        found: tuple[tuple[int, ...], torch.dtype] | None = None
        if name in self._stored:
            found = self._stored[name].shape, self._stored[name].dtype
        elif name in self._quantised:
            found = shape, getattr(torch, self._quantised[name]["dtype"])
        elif name in self._sources:
            entry = self._reader.tensors[self._sources[name]]
            found = tuple(entry.shape), entry.dtype
        elif name in self._left:
            found = tuple(self._left[name][0]), getattr(torch, self._left[name][1])
        if found is None or found[0] != shape:
            held = "no such tensor" if found is None else f"{list(found[0])}"
            raise CheckpointError(
                f"{self._reader.path} holds {held} where the model that was built has '{name}' {list(shape)}: the "
                f"installed transformers or peft, or the given code, builds another one. Install the versions of the "
                f"run, or give its code; or: {ENGINE}."
            )
        return HeldBoxes(name, shape, found[1], found[1], ())

    def _whole(self, name: str) -> Tensor:
        if name in self._stored:
            return self._stored[name].read(self._reader)
        if name in self._quantised:
            return self._behind_codes(name, self._quantised[name])
        if name in self._sources:
            source = self._sources[name]
            entry = self._reader.tensors[source]
            if source.startswith("buffer:"):
                return self._reader.whole(source).view(entry.shape)
            values = torch.empty(entry.shape, dtype=entry.dtype)
            self._reader.read(source, values.view(-1), 0)
            return values
        shape, dtype, _ = self._left[name]
        values = self._from_files(name, tuple(shape), getattr(torch, dtype))
        self._compare(name, values)
        return values

    def _behind_codes(self, label: str, row: Mapping[str, Any]) -> Tensor:
        """The weight that the codes of a weight of the base stand for."""
        shape, dtype = self._model.get_parameter(label).shape, getattr(torch, row["dtype"])
        stacked, turned = row["layout"] == STACK, row["layout"] == TURNED
        each = shape[1:] if stacked else shape[::-1] if turned else shape
        kind = MatrixFormat(row["type"], row["blocksize"], row["double"], torch.Size(each), dtype)
        names = {end: end_of(label, "" if end == CODES and not stacked else end) for end in ends_of(row)}
        if self._codes is None:
            whole = self._from_files(label, tuple(shape), dtype)
            matrices = list(whole) if stacked else [whole.T.contiguous() if turned else whole]
            made = [kind.quantised(matrix) for matrix in matrices]
        else:
            made = [{end: self._code(names[end], kept) for end, kept in ends_of(row).items()}]
        for end, name in names.items():
            tensors = [each[end] for each in made]
            self._compare(name, torch.stack(tensors) if stacked else tensors[0])
        values = [kind.whole(each) for each in made]
        if stacked:
            return torch.stack(values)
        return values[0].T.contiguous() if turned else values[0]

    def _from_files(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if not self._files.reads(name) or self._files.shape(f"weight:{name}") != shape:
            raise CheckpointError(
                f"{self._folder} does not hold the values of '{name}' {list(shape)}, which {self._reader.path} left "
                f"out as frozen. Name the folder of that base with --base-folder; or: {ENGINE}."
            )
        values = torch.empty(shape, dtype=dtype)
        self._files.fill(f"weight:{name}", [BoxValues(Box.whole(shape), values)])
        return values

    def _code(self, name: str, dtype: torch.dtype) -> Tensor:
        """A tensor of codes or of statistics in the files of the base."""
        named = base_names(self._model)
        assert self._codes is not None and named is not None
        inside = str(named(name)).removeprefix(INSIDE)
        values = torch.empty(tuple(self._left[name][0]), dtype=dtype)
        self._codes.fill(f"weight:{inside}", [BoxValues(Box.whole(tuple(values.shape)), values)])
        return values

    def _compare(self, name: str, values: Tensor) -> None:
        """Compare the digest of a tensor of the base."""
        shape, _, wanted = self._left.get(name, ((), "", None))
        if wanted is None or values.numel() != torch.Size(shape).numel():
            raise CheckpointError(f"{self._reader.path} is not to be trusted: it has no digest of '{name}'.")
        if digest(values.reshape(shape), Box.whole(tuple(shape)), tuple(shape)) != wanted:
            raise CheckpointError(
                f"{self._folder} is another base than that of {self._reader.path}: '{name}' has other values. Name the "
                f"folder of the base with --base-folder."
            )

    @cached_property
    def _files(self) -> PretrainedValues:
        quantisation = quantisation_of(SimpleNamespace(quantization_config=self._quantisation))
        return PretrainedValues(self._folder, self._model, False, "initialise", quantisation)

    @cached_property
    def _codes(self) -> PretrainedValues | None:
        """The codes of the base, if its files hold these in the place of weights."""
        if METHOD not in str((self._quantisation or {}).get("quant_method", "")):
            return None
        base = base_of(self._model)
        with torch.device("meta"):
            plain = type(base)(copy.deepcopy(base.config))
        plain.config.quantization_config = self._quantisation
        quantise(plain, self._folder, None, None)
        quantisation = quantisation_of(SimpleNamespace(quantization_config=self._quantisation))
        return PretrainedValues(self._folder, plain, False, "initialise", quantisation)

    @cached_property
    def _quantisation(self) -> Any:
        """How the files of the base say that it was quantised."""
        if not self._folder.exists():
            raise CheckpointError(
                f"{self._reader.path} left out its frozen base, which was read from {self._folder}, and that is not "
                f"there. Name its folder with --base-folder."
            )
        config = self._folder / CONFIG
        return json.loads(config.read_text(encoding="utf-8")).get("quantization_config") if config.is_file() else None


def _built(reader: Reader, facts: Mapping[str, Any], own: Callable[[], Any] | None) -> Any:
    """The model of a checkpoint on the meta device, with its adapters.

    Raises:
        CheckpointError: transformers, peft or the user's own code cannot build it.
    """
    peft = package("peft", "The export of adapters", "peft")
    make = _of_transformers(reader, facts["class"]) if own is None else own
    try:
        with warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter("ignore")  # of peft, about names of bases
            wraps = any(name.startswith(INSIDE) for name in reader.names("weight"))
            model = made = make()
            if not hasattr(made, "peft_config"):
                model = _adapted(made, reader.facts, facts["configs"], peft, wraps)
    except Exception as error:  # of any kind, by values in the manifest
        builders = "transformers and peft" if own is None else "The given model and peft"
        raise CheckpointError(
            f"{builders} cannot build the model of {reader.path}: {error}. Install the versions of the run; "
            f"or: {ENGINE} or adapters=True."
        ) from error
    _leave_stacks_bare(model, reader.facts.get(QUANTISED) or {})
    if list(getattr(model, "peft_config", ())) != list(facts["configs"]):
        raise CheckpointError(
            f"{reader.path} has the adapters {', '.join(facts['configs'])}, and the given model is a "
            f"{type(made).__name__} with others ({', '.join(made.peft_config)}). Name the code that makes the "
            f"model of the run."
        )
    for path, parameter in model.named_parameters():
        parameter.requires_grad_(path in facts["trained"])
    (model.base_model if wraps else model).set_adapter(facts["active"])
    return model


def _leave_stacks_bare(model: Any, rows: Mapping[str, Any]) -> None:
    """Take adapters away from weights that were quantised stacks, beside which peft puts none in a run."""
    for path, layer in reversed(layers_of_adapters(model).items()):
        around = path
        while around.endswith(BASE):
            around = around.removesuffix(BASE)
        if f"{around}.{getattr(layer, 'parameter_name', '')}" in rows:
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, layer.base_layer)


def _of_transformers(reader: Reader, name: str) -> Callable[[], Any]:
    """Makes the base of a checkpoint from its configuration.

    Raises:
        CheckpointError: it is no model of transformers.
    """
    transformers, config = package("transformers", "The export of adapters", "hf"), reader.facts.get("config")
    kind: Any = getattr(transformers, name, None)
    if config is None or not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise CheckpointError(
            f"{reader.path} is of a {name}, which is no model of transformers and cannot be built from the manifest. "
            f"Name the code that makes it, --model mine.py or mine.py:Net; or: {ENGINE} or adapters=True."
        )
    family: Any = kind
    return lambda: family(family.config_class.from_dict(config))


def _adapted(base: Any, facts: Mapping[str, Any], configs: Mapping[str, Any], peft: Any, wraps: bool) -> Any:
    """A base with adapters of peft; `wraps` says whether peft's own model is around it."""
    if hasattr(base, "config_class"):
        base.config.name_or_path = base.name_or_path = facts.get("origin") or ""
    if facts.get("generation") and hasattr(base, "generation_config"):
        generation: Callable[..., Any] = importlib.import_module("transformers").GenerationConfig.from_dict
        base.generation_config = generation(facts["generation"])
    model: Any = None if wraps else base
    for name, table in configs.items():
        made = peft.PeftConfig.from_peft_type(**table)
        if getattr(made, "init_lora_weights", True) not in (True, False):
            made.init_lora_weights = True  # others compute values of the base, which has none here
        if model is None:
            model = peft.get_peft_model(base, made, adapter_name=name)
        elif not wraps:
            model.add_adapter(made, name)
        else:
            model.add_adapter(name, made)
        model.peft_config[name] = peft.PeftConfig.from_peft_type(**table)  # peft has changed the other one
    return model
