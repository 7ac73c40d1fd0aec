"""`zeroshard export`: the weights of a checkpoint as safetensors, under the names that the model's files have."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from zeroshard.checkpoint import CheckpointDisk, Reader, Slot
from zeroshard.checkpoint.export import (
    CLASS_OF_DIFFUSERS,
    CONFIG,
    GENERATION,
    ExportPlan,
    converted,
    narrowed,
    plan_export,
    refuse_existing,
    write_export,
)
from zeroshard.checkpoint.file_names import FAMILY, further_names, grouped, kept_names, stacks_apart
from zeroshard.checkpoint.folder import find_checkpoint
from zeroshard.checkpoint.weights import SINGLE
from zeroshard.cli.early_options import ExportOptions
from zeroshard.errors import CheckpointError, ConfigError
from zeroshard.interop.huggingface.quantized import METHOD, package
from zeroshard.precision.cast import floating_dtype
from zeroshard.quantized.stored import FACT, StoredWeight, stored_weights
from zeroshard.text import format_bytes, shard_bytes
from zeroshard.train.own_code import maker_of, named_code

Source = str | StoredWeight
STATISTICS = ("_absmax", "_SCB")  # ends of the names of quantised weights' scales


def run_export(argv: Sequence[str]) -> None:
    """Write the folder, and list its files.

    Raises:
        ConfigError: a wrong option, or a folder that exists. CheckpointError: no checkpoint there, or the folder
            cannot be written. DamagedError: the checkpoint is damaged.
    """
    from zeroshard.train.options import parse

    options = parse(ExportOptions, argv, "zeroshard export")
    most = shard_bytes(options.max_shard_size, "max_shard_size")
    reader = Reader(find_checkpoint(options.path))
    out = options.out or Path(f"{reader.path.resolve().name}-safetensors")
    dtype = floating_dtype(options.dtype)
    refuse_existing(out)
    if (options.merge, options.adapter, options.base_folder, options.model) == (False, None, None, None):
        plan, read = _as_saved(reader, dtype, most)
    else:
        _check_adapters(options)
        adapters = importlib.import_module("zeroshard.interop.huggingface.stored_adapters")
        sizes = adapters.ExportSizes(dtype, options.max_shard_size)
        own = None if options.model is None else maker_of(named_code(options.model))
        plan, read = adapters.planned_adapters(reader, options.adapter, options.base_folder, sizes, own)
    write_export(plan, converted(plan.groups, read), out, CheckpointDisk())
    _print(plan, reader, out)


def _check_adapters(options: ExportOptions) -> None:
    """Refuse options of adapters that do not combine.

    Raises:
        ConfigError: with the way out.
    """
    if options.merge and options.adapter is not None:
        raise ConfigError("--merge and --adapter ask for two folders; export twice.")
    if not options.merge and options.adapter is None:
        given = "--base-folder is the folder" if options.model is None else "--model is the code"
        raise ConfigError(f"{given} of a base with adapters; add --merge or --adapter NAME.")
    if options.adapter is not None and options.dtype is not None:
        raise ConfigError("--dtype is for whole models, and an adapter is written as it was trained; leave it out.")


def _as_saved(
    reader: Reader, dtype: torch.dtype | None, most: int
) -> tuple[ExportPlan, Callable[[Slot], torch.Tensor]]:
    """The files of all that a checkpoint holds, and a reader of its tensors.

    Raises:
        CheckpointError: it left out a frozen base; and as `planned`.
    """
    reader.refuse_without_base()
    plan, sources = planned(reader, dtype, most)
    if any(isinstance(source, StoredWeight) for source in sources.values()):
        package(METHOD, "The export of quantised weights", "quantized")
    return plan, lambda slot: _read(reader, sources[slot.key], slot)


def planned(reader: Reader, dtype: torch.dtype | None, most: int) -> tuple[ExportPlan, dict[str, Source]]:
    """Assign tensors to names and files.

    A model of transformers is written as its own `save_pretrained` does: parameters that its class ties once, under the
    names of its family, `config.json` beside them. Of any other model all names of its state dict are written; of one
    of diffusers, its configuration too.

    Args:
        dtype: of floating-point tensors; None for as they are.
        most: bytes of tensors in a file.

    Returns:
        the files; and by the name of a tensor of the model, its full name in the checkpoint, or the quantised weight.

    Raises:
        CheckpointError: weights are quantised, and the manifest lacks their formats. DamagedError: those do not fit.
    """
    config, tied = reader.facts.get("config"), reader.facts.get("tied")
    config = config if isinstance(config, dict) else None  # other programs may write other facts
    texts = {CONFIG: config, GENERATION: reader.facts.get("generation")}
    config = None if config is not None and CLASS_OF_DIFFUSERS in config else config
    sources = {name: f"{kind}:{name}" for kind in ("weight", "buffer") for name in reader.names(kind)}
    model = None if config is None else _on_meta(config)
    if isinstance(tied, dict) and (config is None or model is not None):
        ties = {str(name): str(first) for name, first in tied.items()}
        further, kept = further_names(ties, model), kept_names(ties, model)
        sources |= {name: sources[first] for name, first in further.items() if first in sources}
        sources = {kept.get(name, name): source for name, source in sources.items()}
    weights, taken = stored_weights(reader, sources)
    plain = {name: source for name, source in sources.items() if name not in taken}
    _refuse_codes(reader, plain)
    found: dict[str, Source] = {**plain, **weights}
    slots, wide = [], set()
    for name, source in found.items():
        entry = reader.tensors[source] if isinstance(source, str) else source
        kind = dtype if dtype is not None and entry.dtype.is_floating_point else entry.dtype
        slots.append(Slot(name, kind, entry.shape))
        wide |= {name} if entry.dtype != torch.float16 else set()
    if config is None:
        groups = grouped(slots, None, None)
    elif model is not None:
        groups = grouped(slots, FAMILY, model)
    else:
        groups = stacks_apart(slots, str(config.get("model_type")))
    origin = reader.facts.get("origin")
    return plan_export(groups, most, texts, Path(origin) if origin else None, narrowed(groups, wide)), found


def _refuse_codes(reader: Reader, sources: Mapping[str, str]) -> None:
    """Refuse codes of quantised weights whose format is in the model's modules alone.

    The manifest has no format of torchao's tensors, nor of any weight in checkpoints of earlier versions.

    Raises:
        CheckpointError: with the first of them.
    """
    ends = {name: name.rpartition("_")[0] for name in sources if name.endswith(STATISTICS)}
    codes = [whole for whole in ends.values() if whole in sources and not _is_floating(reader, sources[whole])]
    rows = reader.facts.get(FACT) or {}
    codes += [name for name, row in rows.items() if row is None and any(n.startswith(f"{name}_") for n in sources)]
    if codes:
        raise CheckpointError(
            f"{reader.path} holds '{codes[0]}' and {len(codes) - 1} more quantised weights, and from_pretrained would "
            f"take their codes for values. Make the engine of the run, call engine.load(folder), then "
            f"engine.export(out), which writes the weights that they stand for; or engine.export(out, merge=True) with "
            f"the adapters added, or adapters=True for these alone."
        )


def _is_floating(reader: Reader, source: str) -> bool:
    return reader.tensors[source].dtype.is_floating_point


def _on_meta(config: dict[str, Any]) -> Any:
    """The model of transformers that a configuration describes, without values; None where it cannot be built."""
    try:
        import transformers

        kind = getattr(transformers, config["architectures"][0])
        with torch.device("meta"):
            return kind(kind.config_class.from_dict(config))
    except Exception:  # transformers is not installed, or too old; the class is the user's own
        return None


def _read(reader: Reader, source: Source, slot: Slot) -> torch.Tensor:
    """A whole tensor of the checkpoint in the dtype of its slot."""
    if isinstance(source, StoredWeight):
        return source.read(reader).to(slot.dtype).contiguous()
    if source.startswith("buffer:"):
        return reader.whole(source).to(slot.dtype).view(slot.shape)
    values = torch.empty(slot.shape, dtype=slot.dtype)
    reader.read(source, values.view(-1), 0)
    return values


def _print(plan: ExportPlan, reader: Reader, out: Path) -> None:
    """Print the files written, and how to load them."""
    slots = plan.slots
    dtypes = ", ".join(sorted({str(slot.dtype).removeprefix("torch.") for slot in slots}))
    size = format_bytes(sum(slot.nbytes for slot in slots))
    print(f"Step {reader.facts['step']} of {reader.path}: {len(slots):,} tensors, {dtypes}, {size}")
    for file in sorted(path.name for path in out.iterdir()):
        print(f"  {out / file}")
    adapted = any(".base_layer." in slot.key for slot in slots)  # peft's names, which no from_pretrained reads
    if "adapter_config.json" in plan.texts:
        print(f"Load it with peft.PeftModel.from_pretrained(base, {str(out)!r})")
    elif CLASS_OF_DIFFUSERS in plan.texts.get(CONFIG, ()):
        print(f"Load it with diffusers.{plan.texts[CONFIG][CLASS_OF_DIFFUSERS]}.from_pretrained({str(out)!r})")
    elif CONFIG in plan.texts and not adapted:
        kinds = plan.texts[CONFIG].get("architectures")
        kind = kinds[0] if isinstance(kinds, list) and kinds else "AutoModel"
        print(f"Load it with transformers.{kind}.from_pretrained({str(out)!r})")
    elif len(plan.shards) == 1:
        print(f"Load it with model.load_state_dict(safetensors.torch.load_file({str(out / SINGLE)!r}))")
    else:
        print(f"Load it with engine.load_weights({str(out)!r})")
