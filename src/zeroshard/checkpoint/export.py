"""Folders of weights as `from_pretrained` of transformers reads them, written as a stream, one group at a time.

    model.safetensors                                   all tensors
    model-00001-of-00003.safetensors, ...               likewise, in several files, with model.safetensors.index.json
    config.json, generation_config.json                 of models of transformers, with the dtype written
    tokenizer.json, chat_template.jinja, ...            copied from the folder from which the model was loaded

The folder gets its name when it is whole; nothing is overwritten.
"""

import contextlib
import json
import math
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zeroshard.checkpoint.disk import CheckpointDisk
from zeroshard.checkpoint.file_names import FileGroup
from zeroshard.checkpoint.stream import Slot, in_order, write_tensors
from zeroshard.checkpoint.weights import INDICES
from zeroshard.errors import CheckpointError, ConfigError

SHARD_SIZE = "5GB"
STEM, STEM_OF_DIFFUSERS = "model", "diffusion_pytorch_model"  # of the names of weight files
CLASS_OF_DIFFUSERS = "_class_name"  # its key in a configuration
CONFIG, GENERATION = "config.json", "generation_config.json"
OF_INPUTS = (  # names of files about inputs and outputs, which training leaves as they are
    *("tokenizer*.json", "tokenizer*.model", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt"),
    *("*.tiktoken", "spiece.model", "sentencepiece*.model", "source.spm", "target.spm", "normalizer.json"),
    *("chat_template*", "*processor_config.json", GENERATION),
)
BLOCK = 2**22  # bytes that a copy has in memory


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """The files to write.

    Attributes:
        groups: in the order in which their results are written.
        shards: by file name, the tensors in it.
        texts: by file name, tables that are written as JSON.
        copies: files of another folder.
        checked: names of tensors in fp16 whose values had a wider range.
    """

    groups: list[FileGroup]
    shards: dict[str, list[Slot]]
    texts: dict[str, dict[str, Any]]
    copies: list[Path]
    checked: frozenset[str] = frozenset()

    @property
    def slots(self) -> list[Slot]:
        """All tensors, in the order in which they are written."""
        return [slot for slots in self.shards.values() for slot in slots]


def plan_export(
    groups: Sequence[FileGroup],
    most: int,
    texts: Mapping[str, dict[str, Any] | None],
    source: Path | None,
    checked: frozenset[str] = frozenset(),
) -> ExportPlan:
    """Assign tensors to files.

    Args:
        most: bytes of tensors in a file; a larger tensor has a file of its own.
        texts: by file name, tables; without those that are None.
        source: a folder whose files about inputs are copied; None for no copies.
        checked: names of tensors in fp16 whose values had a wider range.
    """
    groups = [replace(group, results=tuple(sorted(group.results, key=_alignment))) for group in groups]
    groups.sort(key=lambda group: min(map(_alignment, group.results), default=0))
    parts: list[list[Slot]] = [[]]
    nbytes = 0
    for slot in (slot for group in groups for slot in group.results):
        if parts[-1] and nbytes + slot.nbytes > most:
            parts.append([])
            nbytes = 0
        parts[-1].append(slot)
        nbytes += slot.nbytes
    tables = {name: dict(table) for name, table in texts.items() if table is not None}
    stem = stem_of(tables.get(CONFIG))
    names = [f"{stem}-{n:05d}-of-{len(parts):05d}.safetensors" for n in range(1, len(parts) + 1)]
    shards = dict(zip(names if len(parts) > 1 else [f"{stem}.safetensors"], parts, strict=True))
    floating = {slot.dtype for part in parts for slot in part if slot.dtype.is_floating_point}
    if stem == STEM and CONFIG in tables and len(floating) == 1:  # otherwise the configuration's own
        tables[CONFIG]["dtype"] = str(floating.pop()).removeprefix("torch.")
    if len(shards) > 1:
        tables[f"{stem}{INDICES}"] = _index(shards)
    return ExportPlan(groups, shards, tables, _copies(source, tables), checked)


def narrowed(groups: Sequence[FileGroup], wide: Container[str]) -> frozenset[str]:
    """Names of the results in fp16 of sources that are kept in a wider range.

    Args:
        wide: names of those sources.
    """
    found = (slot for g in groups if any(source.key in wide for source in g.sources) for slot in g.results)
    return frozenset(slot.key for slot in found if slot.dtype == torch.float16)


def _alignment(slot: Slot) -> int:
    return in_order(slot.dtype)


def _index(shards: Mapping[str, Sequence[Slot]]) -> dict[str, Any]:
    """The index of tensors by file, as transformers writes it."""
    sizes = {"total_size": sum(slot.nbytes for slots in shards.values() for slot in slots)}
    return {"metadata": sizes, "weight_map": {slot.key: file for file, slots in shards.items() for slot in slots}}


def _copies(source: Path | None, texts: Mapping[str, Any]) -> list[Path]:
    """The files about inputs in a folder."""
    if source is None or not source.is_dir():
        return []
    globs = [*OF_INPUTS, "*.py"] if "auto_map" in texts.get(CONFIG, ()) else OF_INPUTS  # code that the table names
    inside = [file for file in sorted(source.iterdir()) if file.is_file() and file.name not in texts]
    return [file for file in inside if any(fnmatch(file.name, glob) for glob in globs)]


def texts_of(model: nn.Module) -> dict[str, dict[str, Any] | None]:
    """The tables beside the weights of a model of transformers, as `from_pretrained` reads them; None without one."""
    describe = getattr(getattr(model, "config", None), "to_json_string", None)
    if describe is None:
        return {CONFIG: None, GENERATION: None}
    config = json.loads(describe())
    config.pop("quantization_config", None)  # quantised weights are written as the weights that they stand for
    generation: Any = getattr(model, "generation_config", None)
    generates = generation is not None and getattr(model, "can_generate", bool)()
    return {
        CONFIG: {**config, "architectures": [type(model).__name__]},
        GENERATION: json.loads(generation.to_json_string()) if generates else None,
    }


def config_of_diffusers(model: Any) -> dict[str, Any] | None:
    """The configuration of a model of diffusers; None for any other."""
    describe = getattr(model, "to_json_string", None)
    if describe is None or not hasattr(type(model), "load_config"):
        return None
    table: dict[str, Any] = json.loads(describe())
    return table


def stem_of(config: Mapping[str, Any] | None) -> str:
    """The stem of the names of weight files beside a configuration."""
    return STEM_OF_DIFFUSERS if config is not None and CLASS_OF_DIFFUSERS in config else STEM


def folder_of(model: nn.Module) -> Path | None:
    """The folder from which a model of transformers, or its configuration, was read; None if there is none."""
    name = getattr(getattr(model, "config", None), "_name_or_path", None)
    return Path(name).absolute() if isinstance(name, str) and name and Path(name).is_dir() else None


def refuse_existing(out: Path) -> None:
    """Refuse a path that is taken.

    Raises:
        ConfigError: it exists.
    """
    if out.exists():
        raise ConfigError(f"{out} exists, and nothing is overwritten; name another folder.")


def converted(
    groups: Sequence[FileGroup],
    read: Callable[[Slot], torch.Tensor],
    begin: Callable[[int], None] = lambda number: None,
) -> Iterator[tuple[Slot, torch.Tensor]]:
    """The results of each group in turn; the sources of one group are in memory at a time.

    Args:
        read: makes a source.
        begin: called with the number of each group before its sources are read.
    """
    for number, group in enumerate(groups):
        begin(number)
        found = group.converted({slot.key: read(slot) for slot in group.sources})
        for slot in group.results:
            yield slot, found.pop(slot.key)


def write_export(
    plan: ExportPlan, values: Iterator[tuple[Slot, torch.Tensor]], out: Path, disk: CheckpointDisk
) -> None:
    """Write all files into a temporary folder, and rename it.

    Args:
        values: of all tensors, in the order of `plan.groups`.

    Raises:
        CheckpointError: the folder cannot be written, or a value does not fit the dtype.
    """
    temporary = out.with_name(f"{out.name}.tmp-{time.time_ns():x}")
    tensors = _checked(values, plan.checked)
    try:
        disk.make_folder(temporary)
        for file, slots in plan.shards.items():
            write_tensors(disk, temporary / file, slots, islice(tensors, len(slots)), {"format": "pt"})
        for name, table in plan.texts.items():
            with disk.create(temporary / name) as text:
                disk.write(text, (json.dumps(table, indent=2, sort_keys=True) + "\n").encode())
                disk.sync(text)
        for path in plan.copies:
            _copy(disk, path, temporary / path.name)
        disk.sync_folder(temporary)
        if out.exists():
            raise CheckpointError(
                f"{out} was made by another program during the export, and is not overwritten. "
                "Remove it, or name another path."
            )
        disk.rename(temporary, out)
        disk.sync_folder(out.absolute().parent)
    except OSError as error:
        raise CheckpointError(f"{out} cannot be written ({error.strerror}); name another folder.") from error
    finally:
        with contextlib.suppress(OSError):
            disk.remove(temporary)  # renamed already if all went well


def _checked(values: Iterator[tuple[Slot, torch.Tensor]], names: frozenset[str]) -> Iterator[torch.Tensor]:
    """The tensors, those in `names` after a check that no value became infinite."""
    for slot, tensor in values:
        if slot.key in names and tensor.numel() and not all(math.isfinite(x.item()) for x in torch.aminmax(tensor)):
            raise CheckpointError(
                f"'{slot.key}' has values that are not finite in fp16, which ends at 65,504; write them in bf16."
            )
        yield tensor
        del tensor


def _copy(disk: CheckpointDisk, path: Path, to: Path) -> None:
    with path.open("rb") as source, disk.create(to) as target:
        while block := source.read(BLOCK):
            disk.write(target, block)
        disk.sync(target)
