"""Checks of paths and devices that a command names, made before torch is loaded and before any rank is started."""

import glob
import importlib.util
from collections.abc import Sequence
from pathlib import Path

from zeroshard.data.files import find, parse_sources
from zeroshard.errors import CheckpointError, ConfigError, PlanError
from zeroshard.planning.adapters import AdapterName
from zeroshard.train.config import TrainConfig
from zeroshard.train.named_models import has_weights
from zeroshard.train.sizes import SIZES
from zeroshard.validation.rank_count import check_ranks

CONFIG = "config.toml"  # of a run folder
MANIFEST = "MANIFEST.json"  # of a checkpoint
OF_A_RUN = "Give the folder of a checkpoint, as engine.save and zeroshard train write it, or a run folder with one."
TO_RESUME = "Give a run folder or a checkpoint that zeroshard train wrote, or auto."
BESIDE: dict[AdapterName, tuple[tuple[str, ...], str]] = {  # packages that adapters need, and their extras
    "lora": (("transformers", "peft"), "hf,peft"),
    "qlora": (("transformers", "peft", "bitsandbytes"), "hf,peft,quantized"),
}
OTHER_NAMES = {  # of devices, and what torch calls them
    **dict.fromkeys(("gpu", "nvidia", "amd", "rocm", "hip"), "cuda"),
    "tpu": "xla",
    "intel": "xpu",
    "apple": "mps",
}


def refuse_early(config: TrainConfig, ranks: int | None = None) -> None:
    """Refuse paths that no run can use, devices by other names than torch's, and ranks that the plan does not divide.

    Args:
        ranks: in all; None where they are not known here.

    Raises:
        DataError, ConfigError, CheckpointError, PlanError: with the option, the value found, and the way out.
    """
    check_data(config.data)
    check_tokenizer(config.tokenizer)
    if isinstance(config.resume, Path) and not (config.resume / "checkpoints").is_dir():
        check_checkpoint(config.resume, "resume", TO_RESUME)
    if config.weights is not None and not config.weights.exists():
        raise CheckpointError(
            f"weights names {config.weights}, which does not exist; give a safetensors file, a folder of them, or a "
            f"checkpoint."
        )
    check_adapters(config)
    check_place("out", config.out)
    check_device(config.device)
    if ranks is not None and config.planning == "given":
        check_ranks(config.plan, ranks)


def check_adapters(config: TrainConfig) -> None:
    """Refuse adapters of a model without weights in files, and those whose packages are not installed.

    Raises:
        ConfigError: with the way out.
    """
    if config.adapters is None:
        return
    if not has_weights(config.model):
        size = f"a built-in size (./{config.model} would be a folder)"
        found = size if config.model in SIZES else "no folder with safetensors files"
        raise ConfigError(
            f"adapters={config.adapters} lie beside pretrained weights, and {config.model} is {found}; give the folder "
            f"of a Hugging Face model with its weights."
        )
    packages, extras = BESIDE[config.adapters]
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"adapters={config.adapters} need the package {package}, which is not installed; "
                f'run pip install "zeroshard[{extras}]".'
            )


def check_data(named: Sequence[Path | str]) -> None:
    """Refuse data that are not there.

    Raises:
        DataError: as `parse_sources` and `find`.
    """
    for path, _ in parse_sources(named):
        find(path)


def check_tokenizer(tokenizer: str | None) -> None:
    """Refuse a path of a tokenizer that is not there.

    Raises:
        ConfigError: with the path.
    """
    if tokenizer is None or tokenizer == "bytes":
        return
    path = Path(tokenizer)
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f'tokenizer names {file}, which does not exist; give "bytes" or the path of a tokenizer.json')


def check_checkpoint(path: Path, option: str = "", way_out: str = OF_A_RUN) -> None:
    """Refuse a path that is no checkpoint, and no folder that holds one.

    Raises:
        CheckpointError: with what is there instead.
    """
    if any(next(path.glob(f"{inside}{MANIFEST}"), None) for inside in ("", "step-*/", "checkpoints/step-*/")):
        return
    if next(path.absolute().parent.glob(f"{glob.escape(path.name)}.*"), None):
        return  # half written or put aside, which the reader describes
    found = "it is a file" if path.exists() else "there is no such folder"
    if path.is_dir():
        found, run = f"the folder has no {MANIFEST}", newest_run(path)
        way_out = way_out if run is None else f"Give {run}, the newest run inside."
    named = f"{option} names {path}, which" if option else path
    raise CheckpointError(f"{named} is no checkpoint: {found}. {way_out}")


def check_device(device: str) -> None:
    """Refuse a device by another name than torch's, and one with a number.

    Raises:
        PlanError: with torch's name.
    """
    kind, colon, number = device.partition(":")
    if kind in OTHER_NAMES or colon:
        numbered = " Ranks take the devices of a machine by their own numbers." if number else ""
        raise PlanError(
            f"device is {device!r}; it must be auto, cpu, or the type of an accelerator by torch's name, here "
            f"{OTHER_NAMES.get(kind, kind)}.{numbered}"
        )


def check_place(option: str, path: Path) -> None:
    """Refuse a folder below a path that is no folder.

    Raises:
        ConfigError: with that path.
    """
    nearest = next(part for part in (path, *path.absolute().parents) if part.exists() or part.is_symlink())
    if not nearest.is_dir():
        raise ConfigError(f"{option} is {path}, and {nearest} is a file; name a folder.")


def run_folder_of(path: Path) -> Path:
    """The run folder at `path`, or around the checkpoint there.

    Raises:
        ConfigError: no run folder there.
    """
    if not path.is_dir():
        raise ConfigError(f"run names {path}, which is no folder; give a run folder that zeroshard train made")
    folder = path if (path / CONFIG).is_file() else path.absolute().parent.parent
    if not (folder / CONFIG).is_file():
        run = newest_run(path)
        given = "one that zeroshard train made" if run is None else f"{run}, the newest run inside"
        raise ConfigError(f"{path} has no {CONFIG}, so it is no run folder; give {given}")
    return folder


def newest_run(path: Path) -> Path | None:
    """The newest run folder inside of a folder, as `--out` names it, or None."""
    inside = [found.parent for found in path.glob(f"*/{CONFIG}")]
    return max(inside, key=lambda run: run.stat().st_mtime, default=None)
