"""`zeroshard export`: the weights of a checkpoint as safetensors, under the names of the model's own state dict."""

import contextlib
import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from zeroshard.checkpoint import CheckpointDisk, Reader, Slot, write_tensors
from zeroshard.checkpoint.expert_names import FAMILIES, in_files
from zeroshard.checkpoint.folder import find_checkpoint
from zeroshard.checkpoint.stream import in_order
from zeroshard.checkpoint.weights import INDEX, SINGLE
from zeroshard.errors import CheckpointError, ConfigError
from zeroshard.text import format_bytes, parse_bytes
from zeroshard.train.option_tree import Positional

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CONFIG = "config.json"


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Write the weights and buffers of a checkpoint as safetensors, under the names of the model's state_dict."""

    path: Positional[Path]
    """The checkpoint, or a run folder, which stands for its newest."""
    to: Literal["safetensors"] = "safetensors"
    """The format."""
    out: Path | None = None
    """Folder to write, which must not be there yet; by default NAME-safetensors here, after the checkpoint's name."""
    dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """Dtype of floating-point tensors; by default as saved, which is fp32 where there were master weights."""
    max_shard_size: str = "5GB"
    """Bytes of tensors in one file, at most; a larger tensor has a file of its own."""


@dataclass(frozen=True, slots=True)
class Export:
    """The files to write, with their tensors and the names of these in the checkpoint.

    Attributes:
        shards: by file name, the tensors in it, sorted as they are written.
        sources: by the name in the files, the full name in the checkpoint, and the first element there.
        config: content of `config.json`; None for a model that transformers does not know.
    """

    shards: dict[str, list[Slot]]
    sources: dict[str, tuple[str, int]]
    config: dict[str, Any] | None


def run_export(argv: Sequence[str]) -> None:
    """Write the folder, and list its files.

    Raises:
        ConfigError: a wrong option, or a folder that exists. CheckpointError: no checkpoint there, or the folder
            cannot be written. DamagedError: the checkpoint is damaged.
    """
    from zeroshard.train.options import parse

    options = parse(ExportOptions, argv, "zeroshard export")
    try:
        most = parse_bytes(options.max_shard_size)
    except ConfigError:
        most = 0
    if most < 1:
        raise ConfigError(f"max_shard_size is {options.max_shard_size!r}; write a size such as 500MB or 5GB.")
    reader = Reader(find_checkpoint(options.path))
    out = options.out or Path(f"{reader.path.resolve().name}-safetensors")
    if out.exists():
        raise ConfigError(f"{out} exists, and nothing is overwritten; name another folder with --out.")
    export = planned(reader, options.dtype and DTYPES[options.dtype], most)
    write_export(export, reader, out)
    _print(export, reader, out)


def planned(reader: Reader, dtype: torch.dtype | None, most: int) -> Export:
    """Assign tensors to names and files.

    A model of transformers is written as its own `save_pretrained` does: tied parameters once, experts one by one where
    its family has them so, `config.json` beside them. Of any other model all names of its state dict are written.

    Args:
        dtype: of floating-point tensors; None for as they are.
        most: bytes in a file.
    """
    config, tied = reader.facts.get("config"), reader.facts.get("tied")
    config = config if isinstance(config, dict) else None  # other programs may write other facts
    sources = {name: f"{kind}:{name}" for kind in ("weight", "buffer") for name in reader.names(kind)}
    if config is None and isinstance(tied, dict):
        sources |= {name: sources[str(first)] for name, first in tied.items() if str(first) in sources}
    family = FAMILIES.get(str(config.get("model_type"))) if config is not None else None
    slots, places = [], {}
    for name, source in sources.items():
        entry = reader.tensors[source]
        kind = dtype if dtype is not None and entry.dtype.is_floating_point else entry.dtype
        for part in in_files(name, entry.shape, family):
            slots.append(Slot(part.name, kind, part.shape))
            places[part.name] = source, part.start
    if config is not None:
        floating = {slot.dtype for slot in slots if slot.dtype.is_floating_point}
        if len(floating) == 1:  # otherwise the configuration's own
            config = {**config, "dtype": str(floating.pop()).removeprefix("torch.")}
    parts: list[list[Slot]] = [[]]
    nbytes = 0
    for slot in slots:
        if parts[-1] and nbytes + slot.nbytes > most:
            parts.append([])
            nbytes = 0
        parts[-1].append(slot)
        nbytes += slot.nbytes
    names = [f"model-{n:05d}-of-{len(parts):05d}.safetensors" for n in range(1, len(parts) + 1)]
    named = zip(names if len(parts) > 1 else [SINGLE], parts, strict=True)
    return Export({file: sorted(part, key=lambda s: in_order(s.dtype)) for file, part in named}, places, config)


def write_export(export: Export, reader: Reader, out: Path) -> None:
    """Write all files into a temporary folder, and rename it; one tensor is in memory at a time.

    Raises:
        CheckpointError: the folder cannot be written, or a value does not fit the dtype. DamagedError: the checkpoint
            is damaged.
    """
    disk, temporary = CheckpointDisk(), out.with_name(f"{out.name}.tmp-{time.time_ns():x}")
    buffer = torch.empty(
        max((slot.nbytes for part in export.shards.values() for slot in part), default=0), dtype=torch.uint8
    )
    try:
        disk.make_folder(temporary)
        for file, slots in export.shards.items():
            values = _values(slots, export.sources, reader, buffer)
            write_tensors(disk, temporary / file, slots, values, {"format": "pt"})
        texts = {CONFIG: export.config} if export.config is not None else {}
        if len(export.shards) > 1:
            texts[INDEX] = _index(export)
        for name, table in texts.items():
            with disk.create(temporary / name) as text:
                disk.write(text, (json.dumps(table, indent=2, sort_keys=True) + "\n").encode())
                disk.sync(text)
        disk.sync_folder(temporary)
        if out.exists():
            raise CheckpointError(f"{out} has come to exist meanwhile, and nothing is overwritten; export again.")
        disk.rename(temporary, out)
        disk.sync_folder(out.absolute().parent)
    except OSError as error:
        raise CheckpointError(f"{out} cannot be written ({error.strerror}); name another folder with --out.") from error
    finally:
        with contextlib.suppress(OSError):
            disk.remove(temporary)  # renamed already if all went well


def _values(
    slots: list[Slot], sources: dict[str, tuple[str, int]], reader: Reader, buffer: torch.Tensor
) -> Iterator[torch.Tensor]:
    """The values of the tensors in turn, in one buffer."""
    for slot in slots:
        values = buffer[: slot.nbytes].view(slot.dtype)
        source, start = sources[slot.key]
        if source.startswith("buffer:"):
            values.copy_(reader.whole(source))
        else:
            reader.read(source, values, start)
        narrowed = slot.dtype == torch.float16 and reader.tensors[source].dtype != slot.dtype
        if narrowed and values.numel() and not all(math.isfinite(end.item()) for end in torch.aminmax(values)):
            raise CheckpointError(
                f"'{slot.key}' has values that are not finite in fp16, which ends at 65,504; use --dtype bf16."
            )
        yield values


def _index(export: Export) -> dict[str, Any]:
    """The index of tensors by file, as transformers writes it."""
    slots = [slot for part in export.shards.values() for slot in part]
    sizes = {"total_size": sum(slot.nbytes for slot in slots)}
    return {"metadata": sizes, "weight_map": {slot.key: file for file, part in export.shards.items() for slot in part}}


def _print(export: Export, reader: Reader, out: Path) -> None:
    """Print the files written, and how to load them."""
    slots = [slot for part in export.shards.values() for slot in part]
    dtypes = ", ".join(sorted({str(slot.dtype).removeprefix("torch.") for slot in slots}))
    size = format_bytes(sum(slot.nbytes for slot in slots))
    print(f"Step {reader.facts['step']} of {reader.path}: {len(slots):,} tensors, {dtypes}, {size}")
    for file in sorted(path.name for path in out.iterdir()):
        print(f"  {out / file}")
    if export.config is not None:
        kinds = export.config.get("architectures")
        kind = kinds[0] if isinstance(kinds, list) and kinds else "AutoModel"
        print(f"Load it with transformers.{kind}.from_pretrained({str(out)!r})")
    elif len(export.shards) == 1:
        print(f"Load it with model.load_state_dict(safetensors.torch.load_file({str(out / SINGLE)!r}))")
    else:
        print(f"Load it with engine.load_weights({str(out)!r})")
