"""Checks of paths and devices that a command names, made before torch is loaded and before any rank is started."""

from pathlib import Path

from zeroshard.data.files import find, parse_sources
from zeroshard.errors import CheckpointError, ConfigError, PlanError
from zeroshard.train.config import TrainConfig

CONFIG = "config.toml"  # of a run folder
OTHER_NAMES = {  # of devices, and what torch calls them
    **dict.fromkeys(("gpu", "nvidia", "amd", "rocm", "hip"), "cuda"),
    "tpu": "xla",
    "intel": "xpu",
    "apple": "mps",
}


def refuse_early(config: TrainConfig) -> None:
    """Refuse paths that no run can use, and devices by other names than torch's.

    Raises:
        DataError, ConfigError, CheckpointError, PlanError: with the option, the value found, and the way out.
    """
    for path, _ in parse_sources(config.data):
        find(path)
    if config.tokenizer != "bytes":
        _check_tokenizer(Path(config.tokenizer))
    if isinstance(config.resume, Path):
        _check_resumed(config.resume)
    if config.weights is not None and not config.weights.exists():
        raise CheckpointError(
            f"weights names {config.weights}, which does not exist; give a safetensors file, a folder of them, or a "
            f"checkpoint."
        )
    _check_out(config.out)
    kind, colon, number = config.device.partition(":")
    if kind in OTHER_NAMES or colon:
        numbered = " Ranks take the devices of a machine by their own numbers." if number else ""
        raise PlanError(
            f"device is {config.device!r}; it must be auto, cpu, or the type of an accelerator by torch's name, here "
            f"{OTHER_NAMES.get(kind, kind)}.{numbered}"
        )


def _check_tokenizer(path: Path) -> None:
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f'tokenizer names {file}, which does not exist; give "bytes" or the path of a tokenizer.json')


def _check_resumed(path: Path) -> None:
    if (path / "MANIFEST.json").is_file() or (path / "checkpoints").is_dir():
        return
    found = "it is a file" if path.exists() else "there is no such folder"
    if path.is_dir():
        found = "the folder has no MANIFEST.json"
    raise CheckpointError(
        f"resume names {path}, which is no checkpoint: {found}. Give a run folder or a checkpoint that zeroshard train "
        f"wrote, or auto."
    )


def _check_out(path: Path) -> None:
    """Refuse a folder of runs below something that is no folder."""
    nearest = next(part for part in (path, *path.absolute().parents) if part.exists() or part.is_symlink())
    if not nearest.is_dir():
        raise ConfigError(f"out is {path}, and {nearest} is a file; name a folder.")


def run_folder_of(path: Path) -> Path:
    """The run folder at `path`, or around the checkpoint there.

    Raises:
        ConfigError: no run folder there.
    """
    if not path.is_dir():
        raise ConfigError(f"run names {path}, which is no folder; give a run folder that zeroshard train made")
    folder = path if (path / CONFIG).is_file() else path.absolute().parent.parent
    if not (folder / CONFIG).is_file():
        raise ConfigError(f"{path} has no {CONFIG}, so it is no run folder; give one that zeroshard train made")
    return folder
