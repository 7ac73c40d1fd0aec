"""Input that somebody made to do harm: refused before anything is allocated, and no code of it runs."""

import contextlib
import copy
import io
import json
import os
import pickle
import random
import shutil
import tomllib
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from checkpoint.faults import remade, save, save_as, seal
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from selection import by_default

from zeroshard.checkpoint import MANIFEST, Reader
from zeroshard.checkpoint.manifest import read_manifest
from zeroshard.cli import main as cli
from zeroshard.errors import CheckpointError, ConfigError, DamagedError, PlanError, ZeroshardError
from zeroshard.train.config import TrainConfig
from zeroshard.train.toml_config import dump_toml, load_toml

EXAMPLES = int(os.environ.get("ZEROSHARD_FUZZ", "300"))  # of each kind; the soak asks for 5,000
FUZZ = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
SHARD = "rank-00000-of-00001.safetensors"
FORMAT_2 = Path(__file__).parent / "format-2"
NUMBERS = [0, 1, -1, True, None, 2.0, 0.5, 2**40, 2**53 + 1, 2**63, 2**64, 10**400]
VALUES = st.one_of(
    st.sampled_from([*NUMBERS, "", "x", "../x", "/etc/passwd", SHARD, "\ud800", "float32", [], {}, [[]], {"a": 1}]),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
        max_leaves=6,
    ),
)
SETTINGS = st.sampled_from(
    [-1, 0, 1, 2, 3, 4, True, 0.5, -2.5, float("nan"), float("inf"), "", "x", "None", "1f1b"]
) | (
    st.sampled_from(["2bw", "bf16", "auto", "\0", [], [1, 1], [0], ["x"], [[]], {}, {"zero": 1}]) | st.text(max_size=5)
)


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.file),)


@contextlib.contextmanager
def little_memory(most: int = 4 * 2**20) -> Iterator[None]:
    """Python allocates no more than so many bytes inside; what torch could be asked for is more than there is."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < most
    finally:
        tracemalloc.stop()


def first(table: dict[str, Any], name: str = "weight:a") -> Any:
    """The first chunk of a tensor: file, start, lengths, digests."""
    return table["tensors"][name]["chunks"][0]


def set_shape(*shape: Any) -> Callable[[dict[str, Any]], object]:
    return lambda table: table["tensors"]["weight:a"].update(shape=list(shape))


def set_file(name: str) -> Callable[[dict[str, Any]], object]:
    def change(table: dict[str, Any]) -> None:
        table["files"][name] = table["files"].pop(SHARD)
        for entry in table["tensors"].values():
            for chunk in entry["chunks"]:
                chunk[0] = name

    return change


def huge(table: dict[str, Any]) -> None:
    """2^40 elements, with as many digests as that needs."""
    table["tensors"]["weight:a"].update(shape=[2**30], chunks=[[SHARD, [0], [2**30], [0] * 2**10]])


def huge_everywhere(table: dict[str, Any]) -> None:
    """The same, and the file is said to be as large."""
    huge(table)
    table["files"][SHARD][0] = 2**40


def twice(table: dict[str, Any]) -> None:
    table["tensors"]["weight:a"]["chunks"].append(first(table))


def set_boxes(*boxes: tuple[Any, Any], name: str = "weight:a") -> Callable[[dict[str, Any]], object]:
    """Chunks of such starts and lengths, each with one digest."""
    chunks = [[SHARD, start, lengths, [0]] for start, lengths in boxes]
    return lambda table: table["tensors"][name].update(chunks=chunks)


BOXES: dict[str, tuple[tuple[Any, Any], ...]] = {
    "negative start": (([-1, 0], [3, 7]), ([2, 0], [1, 7])),
    "negative length": (([0, 0], [4, 7]), ([3, 0], [-1, 7])),
    "two negative lengths": (([0, 0], [3, 7]), ([2, 2], [-1, -1])),
    "out of the shape": (([0, 0], [3, 8]),),
    "beside the shape": (([0, 0], [3, 7]), ([3, 0], [1, 7])),
    "transposed": (([0, 0], [7, 3]),),
    "too few dimensions": (([0], [21]),),
    "too many dimensions": (([0, 0, 0], [3, 7, 1]),),
    "lengths of other dimensions": (([0, 0], [3]),),
    "no dimensions": (([], []),),
    "a range of format 2": ((0, 21),),
    "bool": (([False, 0], [3, 7]),),
    "bool length": (([0, 0], [1, 7]), ([1, 0], [True, 7]), ([2, 0], [1, 7])),
    "float": (([0, 0], [3.0, 7]),),
    "text": ((["0", 0], [3, 7]),),
    "none": (([None, 0], [3, 7]),),
    "huge": (([0, 0], [2**62, 7]),),
    "huge start": (([2**53, 0], [3, 7]),),
    "beyond 64 bits": (([0, 0], [10**400, 7]),),
    "overlap": (([0, 0], [2, 7]), ([1, 0], [2, 7])),
    "overlap of as much as is missing": (([0, 0], [2, 7]), ([1, 0], [1, 7])),
    "overlap in columns": (([0, 0], [3, 4]), ([0, 3], [3, 4])),
    "gap": (([0, 0], [1, 7]), ([2, 0], [1, 7])),
    "gap in columns": (([0, 0], [3, 3]), ([0, 4], [3, 3])),
    "nothing": (),
    "empty": (([0, 0], [0, 7]),),
}
POISON_2: dict[str, Callable[[dict[str, Any]], object]] = {
    "box": lambda table: first(table, "weight:conv.weight").__setitem__(slice(1, 3), [[0, 0, 0], [4, 5, 3]]),
    "negative": lambda table: first(table, "weight:conv.weight").__setitem__(1, -1),
    "bool": lambda table: first(table, "weight:conv.weight").__setitem__(1, False),
    "gap": lambda table: first(table, "weight:conv.weight").__setitem__(1, 1),
    "overlap": lambda table: first(table, "weight:conv.weight").__setitem__(2, 19),
    "ends before it starts": lambda table: first(table, "weight:conv.weight").__setitem__(slice(1, 3), [18, 0]),
    "beyond": lambda table: first(table, "weight:embed.weight").__setitem__(2, 36),
    "twice": lambda table: table["tensors"]["weight:scale"]["chunks"].append(first(table, "weight:scale")),
    "a part of a copy": lambda table: first(table, "buffer:norm.running_mean").__setitem__(2, 3),
    "said to be format 3": lambda table: table.update(format=3),
}


POISON: dict[str, Callable[[dict[str, Any]], object]] = {
    **{f"shape {word}": set_shape(word, 7) for word in ("3", -3, True, 3.0, None, 2**40, 2**63, 10**400)},
    "shape of many axes": set_shape(*[2**50] * 10**4),
    "shape that is none": lambda table: table["tensors"]["weight:a"].update(shape={}),
    "huge": huge,
    "twice": twice,
    **{f"box: {word}": set_boxes(*boxes) for word, boxes in BOXES.items()},
    "a part of a copy": lambda table: first(table, "rng:torch").__setitem__(2, [8]),
    "a copy of other dimensions": lambda table: first(table, "rng:torch").__setitem__(slice(1, 3), [[0, 0], [9, 1]]),
    "no copy": lambda table: table["tensors"]["rng:torch"]["chunks"].clear(),
    "said to be format 2": lambda table: table.update(format=2),
    "digests": lambda table: first(table)[3].append(1),
    "no digest": lambda table: first(table)[3].clear(),
    "digest -1": lambda table: first(table)[3].__setitem__(0, -1),
    "unknown file": lambda table: first(table).__setitem__(0, "rank-00001-of-00002.safetensors"),
    **{
        f"file {name}": set_file(name) for name in ("../" + SHARD, "/etc/passwd", "", ".", "a\0b", f"./{SHARD}", "x.pt")
    },
    "file in other digits": set_file("rank-٠٠٠٠٠-of-00001.safetensors"),
    "files as a list": lambda table: table.update(files=[SHARD]),
    "tensors as a list": lambda table: table.update(tensors=[]),
    "dtype": lambda table: table["tensors"]["weight:a"].update(dtype="load"),
    "dtype that is none": lambda table: table["tensors"]["weight:a"].update(dtype=["float32"]),
    "no kind": lambda table: table["tensors"].update({"weights": table["tensors"].pop("weight:a")}),
    "a name for the terminal": lambda table: table["tensors"].update(
        {"weight:\x1b[2J": table["tensors"].pop("weight:a")}
    ),
    "step": lambda table: table.update(step=True),
    "format": lambda table: table.update(format=2.0),
    "no format": lambda table: table.pop("format"),
    "no optimizer": lambda table: table.pop("optimizer"),
    "ranks": lambda table: table.update(ranks=2**50),
    "NaN": lambda table: table["extra"].update(a=float("nan")),
    "infinity": lambda table: table["extra"].update(a=-float("inf")),
}


@pytest.mark.parametrize("what", POISON)
def test_a_manifest_made_to_do_harm_is_refused(tmp_path: Path, what: str) -> None:
    """Its own digest is right, so it is the checks that refuse it."""
    path = save(tmp_path, 1)
    remade(path, lambda table: None)
    assert list(Reader(path).problems()) == []
    remade(path, POISON[what])
    with little_memory(), pytest.raises(DamagedError) as caught:
        Reader(path)
    assert str(path / MANIFEST) in str(caught.value) and "its own digest" not in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("forged", by_default([False, True], True))
def test_very_many_chunks_are_no_quadratic_work(tmp_path: Path, forged: bool) -> None:
    """Twenty thousand boxes, each of which is right by itself; one is there in place of another."""
    path, rows = save(tmp_path, 1), [*range(20_000)]
    rows[7] += forged

    def change(table: dict[str, Any]) -> None:
        table["files"][SHARD][0] = 2**40
        chunks = [[SHARD, [row, 0], [1, 1], [0]] for row in rows]
        table["tensors"]["weight:a"].update(shape=[20_000, 1], chunks=chunks)

    remade(path, change)
    with pytest.raises(DamagedError, match="not the whole of it") if forged else contextlib.nullcontext():
        Reader(path)


@pytest.mark.parametrize("what", POISON_2)
def test_a_manifest_of_format_2_made_to_do_harm_is_refused(tmp_path: Path, what: str) -> None:
    path = shutil.copytree(FORMAT_2, tmp_path / "c")
    remade(path, lambda table: None)
    assert list(Reader(path).problems()) == []
    remade(path, POISON_2[what])
    with little_memory(), pytest.raises(DamagedError, match="is not to be trusted"):
        Reader(path)


def test_what_is_claimed_is_never_allocated(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    remade(path, huge_everywhere)
    with little_memory():
        problems = list(Reader(path).problems())
        with pytest.raises(DamagedError, match=r"bytes and 1,099,511,627,776 were written"):
            Reader(path).whole("weight:a")
    assert len(problems) == 1


@pytest.mark.parametrize(
    "text",
    [
        "[" * 10**6,
        '{"a": ' * 10**5,
        '{"format": 3, "format": 3',
        '{"format": 3, "step": ' + "9" * 10**5,
        '{"format": 3, "step": 1e999',
        '{"format": 3, "step": NaN',
        '{"format": 3, "files": {"a": 1, "a": 1}',
        "[2",
        "{",
        "\ud800".encode("utf-8", "surrogatepass").decode("latin-1"),
    ],
    ids=range(10),
)
def test_json_that_is_none(tmp_path: Path, text: str) -> None:
    path = save(tmp_path, 1)
    seal(path / MANIFEST, text)
    with little_memory(32 * 2**20), pytest.raises(DamagedError, match=MANIFEST):
        Reader(path)


def test_a_manifest_too_long_is_not_read(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    os.truncate(path / MANIFEST, 2**40)  # a hole
    with little_memory(), pytest.raises(DamagedError, match="1,099,511,627,776 bytes, more than a manifest can have"):
        Reader(path)


def test_values_that_do_not_lie_flat_are_refused(tmp_path: Path) -> None:
    """The header of the file gives a chunk the shape of its box, and all digests are right."""
    path = save(tmp_path, 1)
    content = (path / SHARD).read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + length].replace(b'"shape":[21]', b'"shape":[3,7]')
    content = len(header).to_bytes(8, "little") + header + content[8 + length :]
    (path / SHARD).write_bytes(content)
    crc32 = zlib.crc32(content[: 8 + len(header)])
    remade(path, lambda table: table["files"].update({SHARD: [len(content), crc32]}))
    problems = list(Reader(path).problems())
    assert len(problems) == 2 and all("is damaged in '" in problem for problem in problems)


@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_a_pickle_is_never_unpickled(tmp_path: Path, protocol: int) -> None:
    harm = tmp_path / "harm"
    bomb = pickle.dumps(Bomb(harm), protocol)
    path = save(tmp_path, 1)
    (path / SHARD).write_bytes(bomb)
    assert any(SHARD in problem for problem in Reader(path).problems())
    # With a manifest that fits: the digest of the header is that of the whole file.
    for content in (bomb, len(bomb).to_bytes(8, "little") + bomb):
        (path / SHARD).write_bytes(content)
        length = 8 + int.from_bytes(content[:8], "little")
        crc32 = zlib.crc32(content[:length])
        remade(path, lambda t, n=len(content), crc=crc32: (t["files"].update({SHARD: [n, crc]}), t.update(tensors={})))
        (problem,) = Reader(path).problems()
        assert SHARD in problem
    (path / MANIFEST).write_bytes(bomb)
    with pytest.raises(DamagedError):
        Reader(path)
    assert not harm.exists()
    pickle.loads(bomb)
    assert harm.exists()  # it would have


def places(table: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path to every value in a JSON tree."""
    inner = table.items() if isinstance(table, dict) else enumerate(table) if isinstance(table, list) else ()
    for key, value in inner:
        yield (*at, key)
        yield from places(value, (*at, key))


def mutated(table: Any, draw: Any, values: st.SearchStrategy[Any] = VALUES) -> Any:
    """The same tree with one to three values replaced, taken out, or put in twice."""
    table = copy.deepcopy(table)
    for _ in range(draw(st.integers(1, 3))):
        *at, key = draw(st.sampled_from(list(places(table)) or [("a",)]))
        holder = table
        for word in at:
            holder = holder[word]
        change = draw(st.sampled_from(["replace", "remove", "again", "beside"]))
        if change == "replace" or (isinstance(holder, list) and change == "beside"):
            holder[key] = copy.deepcopy(draw(values))  # one that is changed later must not be drawn so again
        elif change == "remove":
            del holder[key]
        elif isinstance(holder, list):
            holder.append(holder[key])
        else:
            holder[draw(st.sampled_from(["", "weight:b", "x"]))] = holder[key]
    return table


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A checkpoint, and its manifest without the digest."""
    path = save_as(2, tmp_path_factory.mktemp("valid"), 1)
    table = json.loads((path / MANIFEST).read_bytes())
    del table["sha256"]
    return path, table


@pytest.fixture(scope="module")
def valid_2(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The same of format 2."""
    path = shutil.copytree(FORMAT_2, tmp_path_factory.mktemp("valid") / "c")
    table = json.loads((path / MANIFEST).read_bytes())
    del table["sha256"]
    return path, table


def read_as_it_is(path: Path, changed: Any) -> None:
    """A changed manifest is refused, or all that was read is what it says."""
    seal(path / MANIFEST, json.dumps(changed)[:-1])
    try:
        manifest = read_manifest(path)
    except CheckpointError:
        return
    again = json.loads(manifest.dump())
    del again["sha256"]
    if changed["format"] == 2:
        again["format"] = 2
        for chunk in (chunk for entry in again["tensors"].values() for chunk in entry["chunks"]):
            chunk[1:3] = chunk[1][0], chunk[1][0] + chunk[2][0]
    assert again == changed
    assert all(isinstance(problem, str) for problem in Reader(path).problems())


@FUZZ
@given(st.data())
def test_any_change_of_a_manifest_is_refused_or_read_as_it_is(valid: tuple[Path, Any], data: st.DataObject) -> None:
    path, table = valid
    read_as_it_is(path, mutated(table, data.draw))


@FUZZ
@given(st.data())
def test_so_is_any_change_of_one_of_format_2(valid_2: tuple[Path, Any], data: st.DataObject) -> None:
    path, table = valid_2
    read_as_it_is(path, mutated(table, data.draw))


@FUZZ
@given(st.binary(max_size=200), st.integers(0, 2000), st.booleans())
def test_any_bytes_in_a_manifest_are_refused(valid: tuple[Path, Any], new: bytes, at: int, sealed: bool) -> None:
    path, table = valid
    seal(path / MANIFEST, json.dumps(table)[:-1])
    good = (path / MANIFEST).read_bytes()
    bad = good[:at] + new + good[at + len(new) :]
    if sealed:
        seal(path / MANIFEST, bad.decode("utf-8", "replace"))
    else:
        (path / MANIFEST).write_bytes(bad)
    with contextlib.nullcontext() if bad == good and not sealed else pytest.raises(CheckpointError):
        read_manifest(path)


@FUZZ
@given(st.data())
def test_any_options_file_is_read_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    """Options replaced, taken out, misspelt; and characters of the file changed."""
    dump_toml(TrainConfig(), tmp_path / "good.toml")
    good = (tmp_path / "good.toml").read_text()
    if data.draw(st.booleans()):
        changed = mutated(tomllib.loads(good), data.draw, SETTINGS)
        try:
            text = tomli_w.dumps(changed)
        except (TypeError, ValueError):
            return  # what TOML cannot hold
    else:
        at = data.draw(st.integers(0, len(good)))
        text = good[:at] + data.draw(st.text(max_size=5)) + good[at + data.draw(st.integers(0, 20)) :]
    (tmp_path / "options.toml").write_bytes(text.encode("utf-8", "surrogatepass"))
    with contextlib.suppress(ConfigError, PlanError):
        assert isinstance(load_toml(tmp_path / "options.toml", TrainConfig), TrainConfig)


OPTIONS = "params ranks json zero microbatches stages schedule chunks precision clip-norm config data model out resume \
weights steps keep batch sequence checkpoint-every nproc-per-node to dry-run help replicas link profile save devices"
PLAIN = "-1 0 1 2 3 1e9 nan inf 1e999 None true x 1f1b 2bw bf16 slurm k8s ls verify info diff = -- - -h . .. / \ud800 é"
WORDS = [
    *PLAIN.split(),
    *("", "a b", "MANIFEST.json", "options.toml", "--help", "--=", "--config=", "nothing/here", "9" * 5000),
    *(f"--{option}" for option in OPTIONS.split()),
    *(f"--{option}={value}" for option in OPTIONS.split() for value in ("2", "x", "")),
]
COMMANDS = ["train", "plan", "simulate", "report", "partition", "launch", "checkpoint", "export", "x", "--version"]


def test_any_words_on_the_command_line_are_obeyed_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing but an exit code comes out; what would start a job does not, here."""
    import zeroshard.cli.rank
    import zeroshard.cli.run

    monkeypatch.chdir(tmp_path)
    save(tmp_path, 1)
    monkeypatch.setenv(cli.AGAIN, "")
    monkeypatch.delenv(cli.AGAIN)  # `train --ranks` sets it; the test's end takes it away again
    monkeypatch.setattr(zeroshard.cli.run, "run_ranks", lambda ranks, argv: None)
    monkeypatch.setattr(zeroshard.cli.rank, "run_rank", lambda config, again: None)
    chance = random.Random(0)
    for _ in range(max(1, EXAMPLES // 5)):
        argv = [chance.choice(COMMANDS), *chance.choices(WORDS, k=chance.randrange(5))]
        said = io.StringIO()  # which takes surrogates too, as standard error does
        refused = contextlib.suppress(SystemExit, ZeroshardError)
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), refused:
            cli.main(argv)
        assert "Traceback" not in said.getvalue(), argv
    capsys.readouterr()
