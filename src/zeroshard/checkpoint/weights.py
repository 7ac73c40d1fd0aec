"""Weights in safetensors files under the names of a model's state dict, read by range and box.

    weights.safetensors                                            a file
    FOLDER/model.safetensors                                       a folder that transformers wrote
    FOLDER/model.safetensors.index.json, FOLDER/*.safetensors      likewise, in several files
    FOLDER/MANIFEST.json, FOLDER/rank-*.safetensors                a checkpoint
    FOLDER/.metadata, FOLDER/*.distcp                              a folder of torch.distributed.checkpoint

No code in the files is run, and nothing is unpickled. An index may only name files inside its folder.
"""

import contextlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from zeroshard.checkpoint.boxes import BoxValues
from zeroshard.checkpoint.distributed_folder import METADATA, DistributedFolder, refuse_megatron
from zeroshard.checkpoint.expert_names import Shape, StackedTensors, Tensors, are_stacked
from zeroshard.checkpoint.manifest import MANIFEST
from zeroshard.checkpoint.reader import Reader
from zeroshard.checkpoint.shard_file import STAGING, ShardFile, without_duplicates
from zeroshard.checkpoint.stream import bytes_of
from zeroshard.errors import CheckpointError
from zeroshard.text import format_names

INDEX, INDICES = "model.safetensors.index.json", ".safetensors.index.json"  # of transformers, and ends of others
SINGLE = "model.safetensors"
MOST_BYTES = 2**28  # limit on the size of an index
FILE_NAME = re.compile(r"[^./\\\0][^/\\\0]*\.safetensors")
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
PREFIXES = 8  # prefixes that are tried: a model inside of another has one or two


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The tensors that were read from files, and those that were not.

    Attributes:
        path: of the files.
        read: parameters and buffers with all values from the files.
        partly: those whose first rows are from the files, while the others were initialised.
        initialised: those without a value in the files.
        unused: names in the files that the model does not have.
        bytes_read: by this rank.
    """

    path: Path
    read: tuple[str, ...]
    partly: tuple[str, ...]
    initialised: tuple[str, ...]
    unused: tuple[str, ...]
    bytes_read: int


class WeightSource(Protocol):
    """Tensors under a model's own names, `weight:NAME` or `buffer:NAME`, in the shapes of the model."""

    def shape(self, name: str) -> Shape | None:
        """The shape of a tensor, or None if it is missing."""

    def dtype(self, name: str) -> torch.dtype | None:
        """The dtype that holds all values of a tensor as they are given; None if it is not known."""

    def fill(self, name: str, targets: Sequence[BoxValues]) -> None:
        """Fill boxes with elements of a tensor."""

    def whole(self, name: str) -> torch.Tensor:
        """All of a tensor, flat and in its own dtype."""


class WeightFiles:
    """Reads tensors of a safetensors file, of a folder of them, or of a checkpoint, as a `Reader` does.

    Tensors are read as `weight:NAME` or `buffer:NAME`; either works.

    Args:
        tied: for parameters with several names, each further name and the first. A file may hold any of them; values
            under two of them must be equal.

    Raises:
        CheckpointError: no such files, or files that cannot be read.
    """

    def __init__(self, path: Path, tied: Mapping[str, str]) -> None:
        self.path = path
        self._tied = dict(tied)
        self._files: Tensors = _opened(path)
        self._folder = self._files if isinstance(self._files, DistributedFolder) else None
        self._buffers: set[str] = set()
        self._places = self._placed({name: name for name in self._files.shapes})

    def fit(self, parameters: Iterable[str], buffers: Mapping[str, Shape | None], ignored: Iterable[str] = ()) -> None:
        """Match the names in the files with those of a model, which may differ in one prefix (`transformer.`).

        Args:
            parameters: the first name of each.
            buffers: their shapes; None for one that is not read. A buffer that the files lack keeps its values.
            ignored: regular expressions for further names that the files may hold.

        Weights of single experts are stacked where the model has stacks (`expert_names`).

        Raises:
            CheckpointError: names are missing or unknown, or two prefixes fit; or a buffer has another shape; or
                experts of a stack are missing.
        """
        wanted, patterns = set(parameters), [re.compile(pattern) for pattern in ignored]
        if are_stacked(wanted):
            self._files = StackedTensors(self._files, self.path)
        known = {*wanted, *self._tied, *buffers}

        def differences(names: Mapping[str, str]) -> tuple[list[str], list[str]]:
            """The missing and the unknown names under a renaming of those in the files."""
            targets = {self._tied.get(name, name) for name in names.values()}
            unmatched = [old for old, new in names.items() if new not in known]
            twice = [old for old, new in names.items() if old != new and new in names]
            unknown = {name for name in unmatched if not any(pattern.search(name) for pattern in patterns)}
            return sorted(wanted - targets), sorted(unknown | set(twice))

        unchanged, *others = _renamings(list(self._files.shapes), known)
        fitting = [names for names in others if differences(names) == ([], [])]
        if differences(unchanged) == ([], []):
            fitting = [unchanged]
        if len(fitting) != 1:
            nearest = min((unchanged, *others), key=lambda names: sum(map(len, differences(names))))
            raise CheckpointError(self._misfit(*differences(nearest), ambiguous=bool(fitting)))
        self._buffers = set(buffers)
        self._places = self._placed({old: new for old, new in fitting[0].items() if new in known})
        for name, shape in buffers.items():
            if shape is not None and self.shape(f"buffer:{name}") not in (shape, None):
                raise CheckpointError(
                    f"{self.path} is of another model: '{name}' is {self.shape(f'buffer:{name}')} there and {shape} "
                    f"here. Build the model that was trained there."
                )

    def distributed(self) -> DistributedFolder | None:
        """The folder of `torch.distributed.checkpoint`, if that is read."""
        return self._folder

    def places(self, name: str) -> list[str]:
        """The names in the files of a parameter or buffer of the model; none if it is missing."""
        return self._places.get(name, [])

    def holds(self, name: str) -> bool:
        """Whether a tensor in the files has this name."""
        return name in self._files.shapes

    def names(self, kind: str) -> list[str]:
        """The model's names of all parameters (`weight`) or buffers (`buffer`)."""
        return [name for name in self._places if (name in self._buffers) == (kind == "buffer")]

    def shape(self, name: str) -> Shape | None:
        """The shape of a tensor, or None if it is missing."""
        places = self._places.get(name.partition(":")[2])
        return self._files.shapes[places[0]] if places else None

    def dtype(self, name: str) -> torch.dtype | None:
        """The dtype of a tensor in safetensors files; None in others, and of one that is made of several."""
        places = self._places.get(name.partition(":")[2])
        dtype_of: Callable[[str], torch.dtype] | None = getattr(self._files, "dtype", None)
        return dtype_of(places[0]) if places and dtype_of is not None else None

    def fill(self, name: str, targets: Sequence[BoxValues]) -> None:
        """Fill boxes with elements of a tensor; reads only these.

        Raises:
            CheckpointError: elements are missing, a file cannot be read, or two names of one parameter differ.
        """
        first, *others = self._of(name)
        self._files.fill(first, targets)
        for other in others:
            again = [BoxValues(box, torch.empty_like(values, device="cpu")) for box, values in targets]
            self._files.fill(other, again)
            pairs = zip(targets, again, strict=True)
            if any(bytes_of(target.values.cpu()) != bytes_of(found.values) for target, found in pairs):
                raise CheckpointError(
                    f"{self.path} holds other values under '{other}' than under '{first}', and in this model they are "
                    f"one parameter. Build the model that was trained there."
                )

    def whole(self, name: str) -> torch.Tensor:
        """All of a tensor, flat and in its own dtype.

        Raises:
            CheckpointError: it is missing, or cannot be read.
        """
        return self._files.whole(self._of(name)[0])

    def _of(self, name: str) -> list[str]:
        """The names in the files of one parameter or buffer of the model."""
        places = self._places.get(name.partition(":")[2])
        if not places:
            raise CheckpointError(f"{self.path} holds no tensor '{name}'.")
        return places

    def _placed(self, names: Mapping[str, str]) -> dict[str, list[str]]:
        """The names in the files of each tensor, by the model's first name."""
        places: dict[str, list[str]] = {}
        for old, new in names.items():
            places.setdefault(self._tied.get(new, new), []).append(old)
        for name, held in places.items():
            for other in held[1:]:
                if self._files.shapes[other] != self._files.shapes[held[0]]:
                    raise CheckpointError(
                        f"{self.path} holds '{held[0]}' and '{other}' in two shapes, and both are '{name}' here."
                    )
        return places

    def _misfit(self, missing: list[str], unknown: list[str], ambiguous: bool) -> str:
        if ambiguous:
            return (
                f"The names in {self.path} fit this model under more than one prefix. Name them as the model's "
                f"state_dict does."
            )
        parts = [f"lacks {format_names(missing)}"] if missing else []
        parts += [f"holds {format_names(unknown)}, which the model does not have"] if unknown else []
        held = f"; it holds {format_names(sorted(self._files.shapes))}" if missing and not unknown else ""
        return (
            f"{self.path} is of another model: it {' and '.join(parts)}{held}. Build the model that was trained there, "
            f"or give it these weights yourself before the engine is made."
        )


class BaseFiles:
    """Files of a base model as the source of a model with adapters, whose own parameters they lack.

    Args:
        files: matched with the names of the base.
        named: from a name in the model to that in the base, or None for an adapter's.
    """

    def __init__(self, files: WeightFiles, named: Callable[[str], str | None]) -> None:
        self._files, self._named = files, named

    def shape(self, name: str) -> Shape | None:
        """The shape of a tensor, or None if it is missing."""
        base = self._base(name)
        return None if base is None else self._files.shape(base)

    def dtype(self, name: str) -> torch.dtype | None:
        """The dtype of a tensor in the files of the base; None if it is not known, or of an adapter's."""
        base = self._base(name)
        return None if base is None else self._files.dtype(base)

    def fill(self, name: str, targets: Sequence[BoxValues]) -> None:
        """Fill boxes with elements of a tensor; those of an adapter stay as they are."""
        base = self._base(name)
        if base is not None:
            self._files.fill(base, targets)

    def whole(self, name: str) -> torch.Tensor:
        """All of a tensor of the base, flat and in its own dtype."""
        base = self._base(name)
        assert base is not None, name
        return self._files.whole(base)

    def _base(self, name: str) -> str | None:
        kind, _, own = name.partition(":")
        base = self._named(own)
        return None if base is None else f"{kind}:{base}"


def _opened(path: Path) -> Tensors:
    """The tensors of a checkpoint, of a folder of `torch.distributed.checkpoint`, or of safetensors files."""
    if (path / MANIFEST).exists():
        return _Checkpoint(path)
    refuse_megatron(path)
    return DistributedFolder(path) if (path / METADATA).is_file() else Shards(path, files_of(path))


class _Checkpoint:
    """The weights and buffers of a checkpoint, verified as they are read."""

    def __init__(self, path: Path) -> None:
        self._reader = Reader(path)
        self._reader.refuse_without_base()
        kinds = {name: kind for kind in ("weight", "buffer") for name in self._reader.names(kind)}
        self._full = {name: f"{kind}:{name}" for name, kind in kinds.items()}
        self.shapes = {name: self._reader.tensors[full].shape for name, full in self._full.items()}

    def fill(self, name: str, targets: Sequence[BoxValues]) -> None:
        """Fill boxes with elements of a tensor."""
        self._reader.fill(self._full[name], targets)

    def whole(self, name: str) -> torch.Tensor:
        """All of a tensor, flat."""
        full = self._full[name]
        if full.startswith("buffer:"):
            return self._reader.whole(full)
        values = torch.empty(math.prod(self.shapes[name]), dtype=self._reader.tensors[full].dtype)
        self._reader.read(full, values, 0)
        return values


class Shards:
    """The tensors of safetensors files, by their names there.

    Args:
        where: by file, the names to read; None for all in it.

    Attributes:
        shapes: by name.

    Raises:
        CheckpointError: a file cannot be read, or lacks one of these names; or two files hold one name.
    """

    def __init__(self, path: Path, where: Mapping[Path, list[str] | None]) -> None:
        self._files: dict[str, ShardFile] = {}
        self.shapes: dict[str, Shape] = {}
        staging = torch.empty(STAGING, dtype=torch.uint8)
        for file, names in where.items():
            shard = ShardFile(file, staging)
            missing = sorted(set(names or ()) - shard.tensors.keys())
            if missing:
                raise CheckpointError(
                    f"{file} lacks {format_names(missing)}, which {path} says it holds. Copy it again."
                )
            for name in shard.tensors if names is None else names:
                self._files[name] = shard
                self.shapes[name] = shard.tensors[name].shape

    def fill(self, name: str, targets: Sequence[BoxValues]) -> None:
        """Fill boxes with elements of a tensor.

        Raises:
            CheckpointError: elements are missing, or the file cannot be read; or it holds integers for a weight.
        """
        for box, values in targets:
            self._files[name].fill(name, box, values)

    def whole(self, name: str) -> torch.Tensor:
        """All of a tensor, flat."""
        return self._files[name].whole(name)

    def file_of(self, name: str) -> Path:
        """The file that holds a tensor."""
        return self._files[name].path

    def code(self, name: str) -> str:
        """The dtype of a tensor, as its file spells it, such as "BF16"."""
        return self._files[name].tensors[name].code

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor.

        Raises:
            CheckpointError: torch has no such dtype.
        """
        return self._files[name].dtype(name)

    @property
    def bytes_read(self) -> int:
        """Bytes read from the files so far."""
        return sum(file.bytes_read for file in set(self._files.values()))


def files_of(path: Path) -> dict[Path, list[str] | None]:
    """The safetensors files at `path`, each with the names to read from it; None for all.

    Raises:
        CheckpointError: there are none, or the index is damaged.
    """
    if path.is_dir():
        if (path / SINGLE).is_file():
            return {path / SINGLE: None}
        indices = [path / INDEX] if (path / INDEX).is_file() else sorted(path.glob(f"*{INDICES}"))
        if len(indices) == 1:
            return _indexed(indices[0])
        inside = sorted(file for file in path.iterdir() if file.is_file())
        found = [file for file in inside if file.suffix == ".safetensors"]
        if len(found) == 1:
            return {found[0]: None}
        for file in inside if not found else ():
            _refuse_pickle(file)
        held = f"{len(found)} safetensors files and no {INDEX}" if found else "no safetensors file"
        raise CheckpointError(f"{path} has {held}. Give a folder that save_pretrained or `zeroshard export` wrote.")
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist; give a safetensors file, a folder of them, or a checkpoint.")
    _refuse_pickle(path)
    if path.name.endswith(INDICES):
        return _indexed(path)
    if path.suffix != ".safetensors":
        raise CheckpointError(f"{path} is no safetensors file by its name; give one that ends in .safetensors.")
    return {path: None}


def _refuse_pickle(file: Path) -> None:
    if file.suffix.lower() in PICKLES:
        raise CheckpointError(
            f"{file} may be a pickle, which can run any code when it is opened, so it is not. Load it where you trust "
            f"it, and write its weights with safetensors.torch.save_file or save_pretrained."
        )


def _indexed(index: Path) -> dict[Path, list[str] | None]:
    """The files and names in an index, after a check of its content."""
    with _readable(index):
        if index.stat().st_size > MOST_BYTES:
            raise ValueError(f"it has more than {MOST_BYTES:,} bytes")
        table = json.loads(index.read_text(encoding="utf-8"), object_pairs_hook=without_duplicates)
    names = table.get("weight_map") if isinstance(table, dict) else None
    if not isinstance(names, dict) or not names:
        raise CheckpointError(f'{index} has no "weight_map", which says in which file a tensor is. Copy it again.')
    where: dict[Path, list[str] | None] = {}
    for name, file in names.items():
        if not isinstance(file, str) or not FILE_NAME.fullmatch(file):
            raise CheckpointError(
                f"{index} says that '{name}' is in {str(file)[:80]!r}, which is no name of a safetensors file in its "
                f"folder. Do not use it."
            )
        held = where.setdefault(index.parent / file, [])
        assert held is not None
        held.append(name)
    return where


@contextlib.contextmanager
def _readable(file: Path) -> Iterator[None]:
    """Raise any error of reading a file as a `CheckpointError`; safetensors raises several kinds."""
    try:
        yield
    except Exception as error:
        raise CheckpointError(f"{file} cannot be read ({error}). Copy it again.") from error


def _renamings(found: list[str], known: set[str]) -> Iterator[dict[str, str]]:
    """Renamings of the names in files: none, then those that add a prefix, then those that remove one."""
    yield {name: name for name in found}
    missing, unknown = known - set(found), set(found) - known
    added = Counter(first for name in missing for first, rest in _cuts(name) if rest in unknown)
    removed = Counter(first for name in unknown for first, rest in _cuts(name) if rest in missing)
    seen = []
    makers: list[tuple[Counter[str], Callable[[str, str], str]]] = [
        (added, lambda prefix, name: prefix + name),
        (removed, lambda prefix, name: name.removeprefix(prefix)),
    ]
    for prefixes, renamed in makers:
        for prefix, _ in prefixes.most_common(PREFIXES):
            names = {name: name if name in known else renamed(prefix, name) for name in found}
            if names not in seen:
                seen.append(names)
                yield names


def _cuts(name: str) -> Iterator[tuple[str, str]]:
    """The two parts of a dotted name, cut at each of its dots."""
    for place, letter in enumerate(name):
        if letter == ".":
            yield name[: place + 1], name[place + 1 :]
