"""Small checkpoints, disks that fail, and a reader of checkpoints that is not zeroshard's."""

import contextlib
import hashlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from safetensors.torch import load_file

from zeroshard.checkpoint import (
    Box,
    CheckpointDisk,
    Notes,
    Reader,
    TensorPiece,
    WeightFiles,
    WriteOrder,
    clear,
    committed,
    name_of,
    write,
)
from zeroshard.checkpoint.boxes import cut, one_by_one
from zeroshard.comm.mesh import Mesh
from zeroshard.errors import CheckpointError

STEPS, KEEP = 4, 2
SHAPES = {"weight:a": (3, 7), "exp_avg:a": (3, 7), "weight:half": (5,), "weight:none": (0, 2)}
COPIES = {"buffer:seen": (2,), "rng:torch": (9,)}
DTYPES = {"weight:half": torch.bfloat16, "buffer:seen": torch.int64, "rng:torch": torch.uint8}
Part = tuple[tuple[int, ...], torch.dtype, bytes]
Tensors = dict[str, list[Part]]


def raw(values: torch.Tensor) -> bytes:
    """The bytes of a tensor."""
    return values.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def values_of(name: str, step: int) -> torch.Tensor:
    """What a tensor holds after a step."""
    shape = {**SHAPES, **COPIES}[name]
    generator = torch.Generator().manual_seed(1000 * step + sum(name.encode()))
    return torch.randint(100, shape, generator=generator).to(DTYPES.get(name, torch.float32))


def expected(step: int, ranks: int = 1) -> Tensors:
    """Every tensor of a step's checkpoint, as `content` gives them."""
    every = {name: values_of(name, step) for name in (*SHAPES, *COPIES)}
    return {n: [(tuple(v.shape), v.dtype, raw(v))] * (ranks if n in COPIES else 1) for n, v in every.items()}


def content(path: Path) -> Tensors:
    """Every tensor of a checkpoint, read by json and safetensors alone; of copies, those of all ranks."""
    table = json.loads((path / "MANIFEST.json").read_bytes())
    shards = {name: load_file(path / name) for name in table["files"]}
    whole: Tensors = {}
    for name, entry in table["tensors"].items():
        dtype = getattr(torch, entry["dtype"])
        parts = []
        for file, start, end, _ in entry["chunks"]:
            if table["format"] == 2:  # a range of the flattened tensor
                places = [slice(start, end)]
            else:
                places = [slice(low, low + length) for low, length in zip(start, end, strict=True)]
            key = ",".join(f"{place.start}:{place.stop}" for place in places)
            values = shards[file][f"{name}[{key}]"]
            parts.append((places, values.reshape([place.stop - place.start for place in places])))
        if name.partition(":")[0] in ("buffer", "rng"):
            held = [values for _, values in parts]
        else:
            size = [int(np.prod(entry["shape"]))] if table["format"] == 2 else entry["shape"]
            held = [torch.zeros(size, dtype=dtype)]
            for places, values in parts:
                held[0][tuple(places)] = values
        whole[name] = [(tuple(entry["shape"]), values.dtype, raw(values)) for values in held]
    return whole


def pieces_of(
    name: str, shape: tuple[int, ...], first: int, values: torch.Tensor, box: Box | None = None
) -> list[TensorPiece]:
    """A range of the elements of a box, or of the whole tensor; of an empty tensor, one empty piece."""
    whole = Box.whole(shape)
    held = cut(box or whole, first, first + values.numel()) if whole.numel else [whole]
    return [TensorPiece(name, shape, *each) for each in one_by_one(held, values)]


def read_box(
    source: Reader | WeightFiles, name: str, into: torch.Tensor, first: int = 0, box: Box | None = None
) -> None:
    """Fill `into` with elements of a box, or of the whole tensor, from `first` on."""
    box = box or Box.whole(source.shape(name) or ())
    source.fill(name, one_by_one(cut(box, first, first + into.numel()), into))


def order(folder: Path, step: int, disk: CheckpointDisk | None = None, rank: int = 0, ranks: int = 1) -> WriteOrder:
    """One rank's part of a step's checkpoint, as step-... in a folder, of which `KEEP` stay."""
    pieces = []
    for name, shape in SHAPES.items():
        flat = values_of(name, step).reshape(-1)
        cuts = [flat.numel() * part // ranks for part in (rank, rank + 1)]
        if cuts[0] < cuts[1] or (rank == 0 and not flat.numel()):
            pieces += pieces_of(name, shape, cuts[0], flat[cuts[0] : cuts[1]])
    pieces += [TensorPiece.whole(name, values_of(name, step)) for name in COPIES]
    facts = {"step": step, "optimizer": {}, "extra": {"seen": step}}
    token = f"{step}-{id(disk)}"
    return WriteOrder(
        folder / name_of(step), token, pieces, facts, lambda all_facts: all_facts[0], KEEP, disk or CheckpointDisk()
    )


def save(folder: Path, step: int, disk: CheckpointDisk | None = None) -> Path:
    """Save a step's checkpoint in this process alone."""
    write(order(folder, step, disk), Mesh(), Notes(Mesh(), "alone"))
    return folder / name_of(step)


def remade(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a checkpoint's manifest as an attacker would, who makes its own digest right again."""
    table = json.loads((path / "MANIFEST.json").read_bytes())
    del table["sha256"]
    change(table)
    seal(path / "MANIFEST.json", json.dumps(table, indent=1)[: -len("\n}")])


def seal(file: Path, body: str) -> None:
    """A manifest with any body and the digest of that."""
    digest = hashlib.sha256(body.encode()).hexdigest()
    file.write_bytes(f'{body},\n "sha256": "{digest}"\n}}\n'.encode())


class Desk:
    """The board of ranks that write one after the other, rank 0 last."""

    def __init__(self) -> None:
        self.words: list[Any] = []

    def collect(self, word: Any) -> list[Any]:
        """The words so far, this one in front."""
        self.words.append(json.loads(json.dumps(word)))
        return [self.words[-1], *self.words[:-1]]

    def broadcast(self, word: Any) -> Any:
        """The word."""
        return word


def save_as(ranks: int, folder: Path, step: int) -> Path:
    """Save the checkpoint that so many ranks would write."""
    desk = Desk()
    for rank in (*range(1, ranks), 0):
        write(order(folder, step, rank=rank, ranks=ranks), Mesh(rank, ranks), desk)
    return folder / name_of(step)


class Kill(BaseException):
    """The process is dead: nothing of it runs any more."""


class Faulty(CheckpointDisk):
    """A disk on which the operation number `at` does not happen.

    Args:
        fault: raises what happens instead; from a `Kill` on nothing works, and what was in buffers is lost.
    """

    def __init__(self, at: int | None = None, fault: Callable[[], None] | None = None) -> None:
        self.at, self.fault = at, fault or killed
        self.log: list[str] = []
        self.dead = False

    def reached(self, operation: str, path: Path) -> None:
        """Count, and fail where it is time."""
        if self.dead:
            raise Kill
        self.log.append(operation)
        if len(self.log) - 1 == self.at:
            self.dead = self.fault is killed
            self.fault()

    @contextlib.contextmanager
    def create(self, path: Path) -> Iterator[BinaryIO]:
        """A file whose buffers are lost with the process."""
        with super().create(path) as file:
            try:
                yield file
            except Kill:
                with open(os.devnull, "wb") as nowhere:
                    os.dup2(nowhere.fileno(), file.fileno())
                raise


def killed() -> None:
    """The process dies."""
    raise Kill


def broken() -> None:
    """The disk says that it is broken."""
    raise OSError(5, "Input/output error")


class Node:
    """A file or folder: what names lead to it now and after a loss of power, and the content that would be left."""

    def __init__(self) -> None:
        self.live: dict[str, Node] = {}
        self.durable: dict[str, Node] = {}
        self.file = False
        self.content = b""


class Powered(Faulty):
    """A disk that knows what a loss of power would leave: files as of their last sync, names as of their folder's."""

    def __init__(self, root: Path, at: int | None = None) -> None:
        super().__init__(at)
        self.path, self.root = root, Node()

    def node(self, path: Path) -> Node:
        """What is there now, made if it is not."""
        found = self.root
        for word in path.relative_to(self.path).parts:
            found = found.live.setdefault(word, Node())
        return found

    def make_folder(self, path: Path) -> None:
        """The folder has a name, which is not synced."""
        self.node(path)
        super().make_folder(path)

    @contextlib.contextmanager
    def create(self, path: Path) -> Iterator[BinaryIO]:
        """The file has a name and no content."""
        self.node(path).file = True
        with super().create(path) as file:
            yield file

    def sync(self, file: BinaryIO) -> None:
        """The content stays."""
        super().sync(file)
        self.node(Path(file.name)).content = Path(file.name).read_bytes()

    def sync_folder(self, folder: Path) -> None:
        """The names stay."""
        super().sync_folder(folder)
        self.node(folder).durable = dict(self.node(folder).live)

    def rename(self, path: Path, to: Path) -> None:
        """Another name, which is not synced."""
        super().rename(path, to)
        self.node(to.parent).live[to.name] = self.node(path.parent).live.pop(path.name)

    def remove(self, folder: Path) -> None:
        """No name, which is not synced."""
        super().remove(folder)
        self.node(folder.parent).live.pop(folder.name, None)

    def leave(self, to: Path, names: str, node: Node | None = None) -> None:
        """Lay out what is left; `names` are the durable ones, or the live ones where the disk was quick with them."""
        node = node or self.root
        if node.file:
            to.write_bytes(node.content)
            return
        to.mkdir()
        entries: dict[str, Node] = getattr(node, names)
        for name, child in entries.items():
            self.leave(to / name, names, child)


def check(folder: Path, step: int) -> int:
    """The newest checkpoint after the save of `step` was cut off, which must be that one or the one before.

    It is whole, equal to what was saved, and a start afterwards leaves nothing behind and can save; 0 for none.
    """
    found = [(at, path) for at, path in committed(folder) if not list(Reader(path).problems())]
    newest, path = found[-1] if found else (0, Path())
    assert newest in (step - 1, step)
    assert newest == 0 or content(path) == expected(newest)
    clear(folder)
    save(folder, newest + 1)
    names = [f.name for f in sorted(folder.iterdir())]
    assert not [name for name in names if not name.startswith("step-") or "." in name]
    assert content(folder / name_of(newest + 1)) == expected(newest + 1)
    assert not newest or content(path) == expected(newest)  # retention keeps two
    return newest


def operations(folder: Path, step: int) -> list[str]:
    """What a save of `step` does, in order, where the steps before are there."""
    for before in range(1, step):
        save(folder, before)
    disk = Faulty()
    save(folder, step, disk)
    return disk.log


def kill_for_real(folder: Path) -> None:
    """Fork a child for every operation of a save, which is killed there; prints the newest step after each."""
    newest = []
    for at in range(len(operations(folder / "dry", 3))):
        for before in (1, 2):
            save(folder / str(at), before)
        child = os.fork()
        if child == 0:
            with contextlib.suppress(CheckpointError):
                save(folder / str(at), 3, Faulty(at, lambda: os.kill(os.getpid(), signal.SIGKILL)))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGKILL
        newest.append(check(folder / str(at), 3))
    json.dump(newest, sys.stdout)
