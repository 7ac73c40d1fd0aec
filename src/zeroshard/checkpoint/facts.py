"""The facts of a checkpoint besides its tensors: their form in JSON, and the type and range of each."""

import math
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch

from zeroshard.checkpoint import DTYPES
from zeroshard.checkpoint.manifest import MOST
from zeroshard.errors import CheckpointError, DamagedError
from zeroshard.text import format_names

SHOWN = 60  # characters of a value in a message
NOT_FINITE = ("nan", "inf", "-inf")
BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)  # of 4-bit codes of bitsandbytes
HALVES_AND_SINGLES = ("float16", "bfloat16", "float32")
LAYOUTS = tuple({"layout": layout} for layout in ("matrix", "turned", "stack"))  # of quantised weights
SETTING, TABLE = "!setting", "!table"  # keys of values that JSON lacks, in values of the user's


def plain(value: Any) -> Any:
    """A scalar tensor as ["tensor", dtype, value], NaN and infinities as ["float", name], a dtype as ["dtype", name].

    All else is unchanged.

    Raises:
        CheckpointError: a tensor of several elements, which is no option of an optimizer.
    """
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise CheckpointError(
                f"The optimizer keeps a tensor of shape {list(value.shape)} as an option or as a state that is no "
                f"element's, and only scalars can be saved there. Keep it as a buffer of the model."
            )
        return ["tensor", str(value.dtype).removeprefix("torch."), plain(value.item())]
    if isinstance(value, float) and not math.isfinite(value):
        return ["float", str(value)]
    if isinstance(value, torch.dtype):
        return ["dtype", str(value).removeprefix("torch.")]
    return [plain(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def setting(value: Any) -> Any:
    """The inverse of `plain`: an option or scalar state; lists of JSON become tuples.

    Raises:
        ValueError: `plain` makes no such value.
    """
    match value:
        case ["tensor", str(dtype), inner] if dtype in DTYPES:
            number = setting(inner)
            if not isinstance(number, (bool, int, float)):
                raise ValueError(f"a tensor of {shown(inner)}")
            return torch.tensor(number, dtype=DTYPES[dtype])
        case ["float", str(name)] if name in NOT_FINITE:
            return float(name)
        case ["dtype", str(name)] if name in DTYPES:
            return DTYPES[name]
        case [("tensor" | "float" | "dtype"), *_]:
            raise ValueError(f"{shown(value)}, which is no {'dtype' if value[0] == 'dtype' else 'number'}")
        case list():
            return tuple(setting(inner) for inner in value)
    return value


def shown(value: Any) -> str:
    """A value in at most `SHOWN` characters, for a message."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def kept(value: Any, at: str = "extra") -> Any:
    """A value of the user's in JSON; JSON's own values stay as they are, but tuples become lists.

    Tables with whole numbers as keys, NaN and infinities, dtypes and scalar tensors (of schedulers) are kept too.

    Raises:
        ValueError: it holds something else, with its place.
    """
    if isinstance(value, dict):
        for key in value:
            if type(key) not in (str, int):
                raise ValueError(f"{at} has the key {shown(key)}, and keys must be strings or whole numbers")
            if key in (SETTING, TABLE):
                raise ValueError(f"{at} has the key {key!r}, which is reserved; rename it")
        inner = {key: kept(each, f"{at}[{key!r}]") for key, each in value.items()}
        return inner if all(isinstance(key, str) for key in inner) else {TABLE: [list(pair) for pair in inner.items()]}
    if isinstance(value, (list, tuple)):
        return [kept(each, f"{at}[{number}]") for number, each in enumerate(value)]
    if isinstance(value, torch.Tensor) and value.dim():
        raise ValueError(f"{at} is a tensor of shape {list(value.shape)}, and only scalars can be saved there")
    if isinstance(value, (torch.Tensor, torch.dtype)) or (isinstance(value, float) and not math.isfinite(value)):
        return {SETTING: plain(value)}
    if value is None or isinstance(value, (str, int, float)):
        return value
    raise ValueError(f"{at} is a {type(value).__name__}, which cannot be saved there")


def given(value: Any) -> Any:
    """The inverse of `kept`.

    Raises:
        ValueError: `kept` makes no such value.
    """
    match value:
        case {"!setting": inner}:
            return setting(inner)
        case {"!table": list(pairs)}:
            return {key: given(inner) for key, inner in pairs}
        case dict():
            return {key: given(inner) for key, inner in value.items()}
        case list():
            return [given(inner) for inner in value]
    return value


def check_facts(path: Path, facts: dict[str, Any]) -> None:
    """Check the type and range of every fact but `CHECKED_BEFORE`, which reading the manifest has checked.

    Raises:
        DamagedError: a fact is missing, unknown, or out of range, with its name and the values it may have.
    """
    unknown = sorted(facts.keys() - FACTS.keys() - set(CHECKED_BEFORE))
    if unknown:
        raise DamagedError(
            f"{path} is not to be trusted: its manifest says {shown(unknown[0])}, which this zeroshard does not "
            f"know. Use an earlier checkpoint, or the version that wrote this one."
        )
    for name, (fits, needed) in FACTS.items():
        if name not in facts and name in OPTIONAL:
            continue
        if name not in facts or not fits(facts[name]):
            found = f"says that {name} is {shown(facts[name])}" if name in facts else f"has no {name}"
            raise DamagedError(
                f"{path} is not to be trusted: its manifest {found}, and {name} must be {needed}. Use an earlier "
                f"checkpoint."
            )
    if not _fits_ranks(facts["cut"], facts["ranks"]):
        raise DamagedError(
            f"{path} is not to be trusted: its manifest says that cut is {facts['cut']}, and {facts['ranks']} ranks "
            f"cannot be cut so. Use an earlier checkpoint."
        )


def check_ignored(path: Path, saved: Sequence[str], live: Collection[str]) -> None:
    """Refuse a checkpoint of a run that ignored other parameters: it has optimizer states of others.

    Raises:
        CheckpointError: with the names.
    """
    differing = sorted(set(saved) ^ set(live))
    if differing:
        raise CheckpointError(
            f"{path} was written where the plan ignored {format_names(sorted(saved)) or 'no parameter'}, and here it "
            f"ignores {format_names(sorted(live)) or 'none'}. Ignore the same parameters to go on, or take the weights "
            f"alone with engine.load_weights."
        )


def _fits_ranks(cut: list[Any], ranks: int) -> bool:
    stages, _, counts = cut
    return cut == [1, 1, None] if stages == 1 else counts is not None and sum(counts) == ranks


def _count(value: Any, least: int = 0) -> bool:
    return type(value) is int and value >= least


def _counts(value: Any, least: int = 0) -> bool:
    return isinstance(value, list) and all(_count(inner, least) for inner in value)


def _names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _cut(value: Any) -> bool:
    match value:
        case [stages, chunks, counts]:
            each = counts is None or (_counts(counts, 1) and len(counts) == stages)
            return _count(stages, 1) and _count(chunks, 1) and each
    return False


def _loss_scale(value: Any) -> bool:
    match value:
        case None:
            return True
        case {"scale": scale, "good": good, "left": left, **more}:
            return _number(scale) and scale > 0 and _count(good) and _count(left, 1) and not more
    return False


def _last_update(value: Any) -> bool:
    def one(fields: Any) -> bool:
        match fields:
            case None:
                return True
            case [norm, bool()]:
                return (_number(norm) and norm >= 0) or norm in (["float", "nan"], ["float", "inf"])
        return False

    return isinstance(value, dict) and all(map(one, value.values()))


def _layouts(value: Any) -> bool:
    pairs = value.values() if isinstance(value, dict) else [None]
    return all(isinstance(pair, list) and [type(flag) for flag in pair] == [bool, bool] for pair in pairs)


def _buffers(value: Any) -> bool:
    match value:
        case {"made": dict() as made, "unset": unset, **more}:
            return not more and _names(unset) and all(shape is None or _counts(shape) for shape in made.values())
    return False


def _base(value: Any) -> bool:
    match value:
        case {"source": str(), "tensors": dict() as tensors, **more}:
            rows = [row for row in tensors.values() if isinstance(row, list) and len(row) == 3]
            fits = all(
                _counts(shape) and isinstance(dtype, str) and dtype in DTYPES and _count(share)
                for shape, dtype, share in rows
            )
            return not more and fits and len(rows) == len(tensors)
    return value is None


def _optimizer(value: Any) -> bool:
    match value:
        case {"class": str(), "groups": list() as groups, "scalars": dict() as scalars, **more}:
            return not more and all(isinstance(table, dict) for table in (*groups, *scalars.values()))
    return False


def _quantised(value: Any) -> bool:
    def one(row: Any) -> bool:
        match row:
            case None:
                return True
            case {"type": kind, "blocksize": size, "double": double, "shape": shape, "dtype": dtype, **rest}:
                fits = dtype in HALVES_AND_SINGLES and rest in LAYOUTS
                if kind == "int8":
                    return fits and (size in BLOCK_SIZES or size == 0) and double is False and shape is None
                counts = _counts(shape, 1) and len(shape) == 2 and math.prod(shape) <= MOST
                return fits and kind in ("nf4", "fp4") and size in BLOCK_SIZES and type(double) is bool and counts
        return False

    return isinstance(value, dict) and all(map(one, value.values()))


def _adapters(value: Any) -> bool:
    match value:
        case {"class": str(), "configs": dict() as configs, "active": active, "trained": trained, **more}:
            tables = bool(configs) and all(isinstance(table, dict) for table in configs.values())
            return not more and tables and _names(active) and _names(trained) and set(active) <= configs.keys()
    return False


FACTS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "zeroshard": (lambda v: isinstance(v, str), "a version"),
    "torch": (lambda v: isinstance(v, str), "a version"),
    "plan": (lambda v: isinstance(v, dict), "a table"),
    "skipped": (_count, "a whole number of 0 or more"),
    "loss_scale": (_loss_scale, "null, or a table of a scale above 0 and two counts"),
    "loss_count": (lambda v: v is None or (_number(v) and v > 0), "null, or a number above 0"),
    "last_update": (_last_update, "by stage a gradient norm and whether the update was skipped, or null"),
    "never_written": (lambda v: v is None or _names(v), "null, or a list of names"),
    "cut": (_cut, "stages, chunks, and null or the ranks of each stage"),
    "axes": (
        lambda v: isinstance(v, dict) and _counts(list(v.values()), 1),
        "by axis over which parameters are split, its ranks",
    ),
    "gradient_layouts": (_layouts, "by label two of true or false"),
    "base": (_base, "null, or a source and by name a shape, a dtype and a digest"),
    "optimizer": (_optimizer, "a class, a list of groups and a table of scalars"),
    "buffers": (_buffers, "a table of shapes and a list of names"),
    "ignored": (_names, "a list of names"),
    "quantised": (_quantised, "by weight null, or a type, a blocksize, double, a shape, a dtype and a layout"),
    "adapters": (_adapters, "a class, by name a configuration, active names, and names of trained parameters"),
    "tied": (lambda v: isinstance(v, dict) and _names(list(v.values())), "a table of names"),
    "config": (lambda v: v is None or isinstance(v, dict), "null or a table"),
    "generation": (lambda v: v is None or isinstance(v, dict), "null or a table"),
    "origin": (lambda v: v is None or isinstance(v, str), "null or a folder"),
}
CHECKED_BEFORE = ("step", "ranks", "extra")
OPTIONAL = (
    *("zeroshard", "torch", "plan", "loss_count", "last_update", "axes", "base", "buffers", "tied"),
    *("ignored", "quantised", "adapters"),
    *("config", "generation", "origin"),
)
