"""Damaged and forged checkpoints, and how an engine treats them: F21.

Damage models disks and mistakes: bits and bytes that change, files cut, lengthened, emptied, deleted, swapped with
those of another checkpoint or with each other. A forgery keeps the format: it edits the manifest, the headers or the
values, and makes every digest right again.

An engine may refuse (`CheckpointError`), or load. If it loads, it saves at once, and the two checkpoints are compared,
tensor by tensor and fact by fact. Damage must be refused; or, in a part that this engine does not use, found by
`zeroshard checkpoint verify`. A forgery may also load as it is: a checkpoint of other weights whose digests are right
is a legal one. Any other outcome counts as silent.

All cases are drawn from one seed, in one process.
"""

import copy
import hashlib
import json
import os
import random
import shutil
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

import zeroshard as zs
from zeroshard.checkpoint import MANIFEST, Box, Reader, TensorPiece, WriteOrder, write
from zeroshard.checkpoint.boxes import BoxValues
from zeroshard.checkpoint.compare import Comparison, compare
from zeroshard.checkpoint.manifest import read_manifest
from zeroshard.checkpoint.stream import BLOCK
from zeroshard.errors import CheckpointError

COUNT, QUICK, SEED = 1000, 60, 0
RANKS = 2
Counts = dict[str, Any]
Change = Callable[[random.Random, Path, Path], None]  # draws, a checkpoint to change, and another step's
GOOD = ("refused", "unchanged", "as it stands", "not read, found by verify")
NOT_STATE = ("config", "tied")  # for people and for export
NUMBERS = [0, 1, -1, True, False, None, 0.5, -2.5, 1e300, 2**40, 2**53 + 1, 2**63, 10**30]
WORDS = ["", "x", "../x", "/etc/passwd", "float32", "float64", "int64", "AdamW", "weight:x", "\ud800", "NaN"]
NESTED = [[], {}, [[]], [0], ["x"], [1, 1, None], {"a": 1}, ["float", "nan"], ["float", "inf"], ["float", "x"]]
TENSORS = [["tensor", "float32", 3.0], ["tensor", "int64", 3], ["tensor", "float32", ["float", "nan"]], ["tensor"]]
VALUES = [*NUMBERS, *WORDS, *NESTED, *TENSORS]


class Net(nn.Module):
    """Tied parameters, buffers, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.norm = nn.BatchNorm1d(8)
        self.up = nn.Linear(8, 8).requires_grad_(False)
        self.down = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(self.up(self.norm(self.embed(tokens))))).square().mean()


NORM = {"fp32_modules": ("BatchNorm1d",)}
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (partial(torch.optim.AdamW, lr=1e-2), {"zero": 0}),
    "amsgrad": (
        partial(torch.optim.AdamW, lr=1e-2, amsgrad=True),
        {"zero": 3, "precision": "bf16", **NORM},
    ),
    "sgd": (
        partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
        {"zero": 1, "precision": "fp16", **NORM},
    ),
}


def engine_of(name: str) -> zs.Engine:
    """A new engine."""
    make, plan = OPTIMIZERS[name]
    torch.manual_seed(3)
    return zs.Engine(
        Net(), lambda ps: make([p for p in ps if p.requires_grad]), zs.Plan.from_dict(plan), mesh=zs.Mesh()
    )


class Desk:
    """The board of ranks that write one after the other, rank 0 last."""

    def __init__(self) -> None:
        self.words: list[Any] = []

    def collect(self, word: Any) -> list[Any]:
        """The values so far, this one in front."""
        self.words.append(word)
        return [word, *self.words[:-1]]

    def broadcast(self, word: Any) -> Any:
        """The value."""
        return word


def in_two(path: Path, to: Path) -> None:
    """The same state as two ranks would write it: each has one half of the columns of a matrix, or of a vector."""
    reader, desk = Reader(path), Desk()
    facts = {name: value for name, value in reader.facts.items() if name != "ranks"}
    for rank in (1, 0):
        pieces = []
        for name, entry in reader.tensors.items():
            if name.startswith(("buffer:", "rng:")):
                pieces.append(TensorPiece.whole(name, reader.whole(name).view(entry.shape)))
                continue
            if not entry.shape:
                pieces += [TensorPiece.whole(name, reader.whole(name).view(()))] if rank == 0 else []
                continue
            *rows, columns = entry.shape
            low, high = (columns * part // RANKS for part in (rank, rank + 1))
            box = Box((*(0 for _ in rows), low), (*rows, high - low))
            values = torch.empty(box.shape, dtype=entry.dtype)
            reader.fill(name, [BoxValues(box, values)])
            pieces.append(TensorPiece(name, entry.shape, box, values))
        write(WriteOrder(to, "two", pieces, facts, lambda everyone: everyone[0]), zs.Mesh(rank, RANKS), desk)


def sources(folder: Path) -> dict[str, list[Path]]:
    """Of each optimizer the checkpoints of two steps, one of them in two files."""
    found: dict[str, list[Path]] = {}
    for name in OPTIMIZERS:
        engine, paths = engine_of(name), [folder / name / part for part in ("one", "other", "two")]
        for path in paths[:2]:
            for _ in range(2):
                engine.backward(engine(torch.arange(8) + engine.steps))
                engine.step()
            engine.save(path, {"seen": engine.steps, "deep": {"a": [1, 2.5, None, "x"]}}, wait=True)
        in_two(paths[0], paths[2])
        in_two(paths[1], folder / name / "other-two")
        found[name] = [*paths, folder / name / "other-two"]
    return found


def _file(drawn: random.Random, path: Path) -> Path:
    return drawn.choice(sorted(path.iterdir()))


def flip(drawn: random.Random, path: Path, other: Path) -> None:
    """One bit."""
    file = _file(drawn, path)
    content = bytearray(file.read_bytes())
    bit = drawn.randrange(8 * len(content))
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)


def burst(drawn: random.Random, path: Path, other: Path) -> None:
    """Up to 512 bytes that are others, or zeros."""
    file = _file(drawn, path)
    content = bytearray(file.read_bytes())
    at, count = drawn.randrange(len(content)), drawn.randrange(1, 513)
    count = min(count, len(content) - at)
    content[at : at + count] = bytes(count) if drawn.random() < 0.5 else drawn.randbytes(count)
    file.write_bytes(content)


def cut(drawn: random.Random, path: Path, other: Path) -> None:
    """A file that ends early."""
    file = _file(drawn, path)
    os.truncate(file, drawn.randrange(file.stat().st_size))


def lengthen(drawn: random.Random, path: Path, other: Path) -> None:
    """Bytes behind a file's end."""
    with _file(drawn, path).open("ab") as file:
        file.write(drawn.randbytes(drawn.randrange(1, 99)))


def delete(drawn: random.Random, path: Path, other: Path) -> None:
    """A file less."""
    _file(drawn, path).unlink()


def swap(drawn: random.Random, path: Path, other: Path) -> None:
    """One file of another step's checkpoint."""
    file = _file(drawn, path)
    shutil.copyfile(other / file.name, file)


def exchange(drawn: random.Random, path: Path, other: Path) -> None:
    """Two files that changed their names; of a single shard, it and the manifest."""
    files = sorted(path.glob("*.safetensors"))
    a, b = files if len(files) > 1 else (files[0], path / MANIFEST)
    contents = a.read_bytes(), b.read_bytes()
    a.write_bytes(contents[1]), b.write_bytes(contents[0])


def _places(table: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path to every value in a JSON tree."""
    inner = table.items() if isinstance(table, dict) else enumerate(table) if isinstance(table, list) else ()
    for key, value in inner:
        yield (*at, key)
        yield from _places(value, (*at, key))


def _edit(drawn: random.Random, table: Any, below: tuple[str, ...] = ()) -> None:
    """Replace a value, take it out, or put it in once more."""
    inside = [place for place in _places(table) if not below or place[0] in below]
    *at, key = drawn.choice(inside)
    holder = table
    for word in at:
        holder = holder[word]
    change = drawn.random()
    if change < 0.7:
        holder[key] = copy.deepcopy(drawn.choice(VALUES))
    elif change < 0.9:
        del holder[key]
    elif isinstance(holder, list):
        holder.append(copy.deepcopy(holder[key]))
    else:
        holder[f"{key}x"] = holder[key]


def _seal(path: Path, table: dict[str, Any]) -> None:
    """Write a manifest with the digest of its content."""
    body = json.dumps(table, indent=1)[: -len("\n}")]
    digest = hashlib.sha256(body.encode()).hexdigest()
    (path / MANIFEST).write_bytes(f'{body},\n "sha256": "{digest}"\n}}\n'.encode())


def _table(path: Path) -> dict[str, Any]:
    table: dict[str, Any] = json.loads((path / MANIFEST).read_bytes())
    del table["sha256"]
    return table


def forge_facts(drawn: random.Random, path: Path, other: Path) -> None:
    """Change a value of the manifest that is not a tensor."""
    table = _table(path)
    kept = tuple(name for name in table if name not in ("files", "tensors"))
    for _ in range(drawn.choice((1, 1, 2))):
        _edit(drawn, table, kept)
    _seal(path, table)


def forge_optimizer(drawn: random.Random, path: Path, other: Path) -> None:
    """An option or a scalar state is another."""
    table = _table(path)
    _edit(drawn, table, ("optimizer",))
    _seal(path, table)


def forge_tensors(drawn: random.Random, path: Path, other: Path) -> None:
    """Names, shapes, dtypes, chunks, digests or files of tensors are others, or a tensor is gone."""
    table = _table(path)
    tensors = table["tensors"]
    name = drawn.choice(sorted(tensors))
    change = drawn.randrange(4)
    if change == 0:
        del tensors[name]
    elif change == 1:
        tensors[drawn.choice(sorted(tensors))] = tensors[name]
    elif change == 2:
        tensors[f"{drawn.choice(('weight', 'exp_avg', 'buffer', 'rng', 'odd'))}:new"] = tensors[name]
    else:
        _edit(drawn, table, ("tensors", "files"))
    _seal(path, table)


def forge_boxes(drawn: random.Random, path: Path, other: Path) -> None:
    """Chunks of a tensor are other boxes: negative, too long, moved, of other dimensions or types, doubled or gone.

    Half of the time the header of their file names them as the manifest does.
    """
    table = _table(path)
    tensors = table["tensors"]
    name = drawn.choice(sorted(name for name in tensors if tensors[name]["shape"]))
    chunks = tensors[name]["chunks"]
    chunk = drawn.choice(chunks)
    file, start, lengths, _ = chunk
    before = _key(name, start, lengths)
    axis, change = drawn.randrange(len(start)), drawn.randrange(11)
    if change == 0:
        start[axis] += drawn.choice((-1, 1, 2**53, -(2**63), 10**30))
    elif change == 1:
        lengths[axis] += drawn.choice((-1, 1, -2 * lengths[axis], 2**53, 10**30))
    elif change == 2:
        start[axis], lengths[axis] = start[axis] + lengths[axis], -lengths[axis]
    elif change == 3:
        drawn.choice((start, lengths))[axis] = drawn.choice((True, False, None, 1.0, "1", [1], {}))
    elif change == 4:
        start.append(0), lengths.append(1)
    elif change == 5:
        drawn.choice((start, lengths)).pop()
    elif change == 6:
        lengths.reverse()
    elif change == 7:
        chunks.append(copy.deepcopy(chunk))
    elif change == 8:
        chunks.remove(chunk)
    elif change == 9:
        chunks[0][1], chunks[-1][1] = chunks[-1][1], chunks[0][1]
    else:
        chunk[1:3] = 0, 2  # as in format 2
    if drawn.random() < 0.5:
        after = _key(name, start, lengths)
        header = {after if key == before else key: row for key, row in _header(path / file).items()}
        _write_header(path / file, header, table)
    _seal(path, table)


def _key(name: str, start: list[Any], lengths: list[Any]) -> str:
    """The key of a chunk in its file, for a box of any type."""
    ends = [
        (low, low + length) for low, length in zip(start, lengths, strict=False) if type(low) is type(length) is int
    ]
    return f"{name}[{','.join(f'{low}:{high}' for low, high in ends)}]"


def _write_header(file: Path, header: dict[str, Any], table: dict[str, Any]) -> None:
    """Write another header into a file, and its digest into the manifest."""
    content = file.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    text = json.dumps(header).encode()
    head = len(text).to_bytes(8, "little") + text
    file.write_bytes(head + content[start:])
    table["files"][file.name] = [len(head) + len(content) - start, zlib.crc32(head)]


def _header(file: Path) -> dict[str, Any]:
    content = file.read_bytes()
    header: dict[str, Any] = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return header


def forge_header(drawn: random.Random, path: Path, other: Path) -> None:
    """Change a file's header, and its digest in the manifest."""
    file, table = drawn.choice(sorted(path.glob("*.safetensors"))), _table(path)
    header = _header(file)
    _edit(drawn, header)
    _write_header(file, header, table)
    _seal(path, table)


def forge_values(drawn: random.Random, path: Path, other: Path) -> None:
    """Change values of a tensor, with matching digests: a legal checkpoint of other weights."""
    manifest = read_manifest(path)
    name = drawn.choice(sorted(name for name in manifest.tensors if manifest.tensors[name].numel))
    chunk = manifest.tensors[name].chunks[0]
    file = path / chunk.file
    content = bytearray(file.read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    low, high = json.loads(content[8:start])[chunk.key(name)]["data_offsets"]
    content[start + drawn.randrange(low, high)] ^= 1 << drawn.randrange(8)
    file.write_bytes(content)
    part = content[start + low : start + high]
    table = _table(path)
    table["tensors"][name]["chunks"][0][3] = [zlib.crc32(part[at : at + BLOCK]) for at in range(0, len(part), BLOCK)]
    _seal(path, table)


DAMAGE: tuple[Change, ...] = (flip, burst, cut, lengthen, delete, swap, exchange)
FORGERIES: tuple[Change, ...] = (
    *(forge_facts, forge_optimizer, forge_tensors, forge_boxes),
    *(forge_header, forge_values),
)
KINDS = (*DAMAGE, flip, *FORGERIES, forge_facts, forge_optimizer, forge_tensors)


def differences(a: Path, b: Path) -> Comparison:
    """Differences of two checkpoints as states: without facts for people, and without those that readers add."""
    readers = [Reader(path) for path in (a, b)]
    for reader, like in zip(readers, readers[::-1], strict=True):
        reader.facts.setdefault("buffers", {"made": {}, "unset": []})
        for name in NOT_STATE:
            reader.facts.pop(name, None)
        for group, live in zip(reader.facts["optimizer"]["groups"], like.facts["optimizer"]["groups"], strict=True):
            for option in group.keys() - live.keys():  # which the optimizer does not have: they are left out
                del group[option]
    return compare(*readers)


def _bytes_of(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def disturb(engine: zs.Engine) -> None:
    """Make an engine's state unlike any checkpoint, so that parts which a load does not set are seen."""
    torch.manual_seed(12345)
    random.seed(12345)
    engine.steps, engine.skipped = 12345, 678
    for buffer in engine.model.buffers():
        buffer.fill_(3)


def judged(engine: zs.Engine, path: Path, whole: Path, forged: bool) -> str:
    """The outcome of loading a checkpoint: one of `GOOD`, or else the fault."""
    again = path.with_name("again")
    disturb(engine)
    try:
        extra = engine.load(path)
    except CheckpointError:
        return "refused"
    except Exception as error:  # neither refused nor loaded
        return f"an error of another kind: {error!r}"
    engine.save(again, extra, wait=True)
    found = differences(whole, again)
    if found.equal and not forged and _bytes_of(path) != _bytes_of(whole):
        # damage in a part that this engine does not use, such as the random numbers of another rank
        return "not read, found by verify" if list(Reader(path).problems()) else "silent: verify finds nothing"
    if found.equal:
        return "unchanged"
    if forged:
        found = differences(path, again)
        if found.equal:
            return "as it stands"
    return f"silent: {[*found.facts.items(), *found.only_a, *found.only_b, *found.different.items()][:3]}"


def forged(folder: Path, quick: bool, count: int | None = None, seed: int = SEED) -> Counts:
    """F21: checkpoints that are damaged, or forged with right digests: none loads as another state unnoticed."""
    count = count or (QUICK if quick else COUNT)
    counts: Counter[str] = Counter(made=0, silent=0)
    wrong: list[str] = []
    with mock.patch.object(os, "fsync"):
        found = sources(folder)
        engines = {name: engine_of(name) for name in found}
        for number in range(count):
            drawn = random.Random(f"{seed} {number}")
            change, name = KINDS[number % len(KINDS)], drawn.choice(sorted(found))
            one, other, two, other_two = found[name]
            whole, foreign = drawn.choice(((one, other), (two, other_two)))
            path = folder / str(number) / "made"
            shutil.copytree(whole, path)
            change(drawn, path, foreign)
            result = judged(engines[name], path, whole, change in FORGERIES)
            counts["made"] += 1
            if result in GOOD:
                counts[f"{change.__name__} {result}"] += 1
                shutil.rmtree(path.parent)
            else:
                counts["silent"] += 1
                wrong.append(f"{number}: {change.__name__} of {name}: {result}")
    assert not wrong, "\n".join(wrong)
    return dict(sorted(counts.items(), key=lambda item: (item[0] not in ("made", "silent"), item[0])))


FAULTS: dict[str, Callable[[Path, bool], Counts]] = {"F21": forged}
