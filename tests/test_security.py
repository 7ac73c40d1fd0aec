"""What SECURITY.md says where no other test shows it: rights of files, who may connect, what is never called."""

import ast
import os
import re
import stat
from functools import cache
from pathlib import Path

import psutil
import pytest

from zeroshard.comm.heartbeat import Heartbeat
from zeroshard.memory.disk import _nameless
from zeroshard.platform.shared_memory import offer
from zeroshard.supervisor.node_coordination import keep_store

ROOT = Path(__file__).parents[1]
SOURCE = sorted((ROOT / "src" / "zeroshard").rglob("*.py"))
PAGE = (ROOT / "SECURITY.md").read_text()
UNPICKLERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}


@cache
def calls() -> list[tuple[str, str, ast.Call]]:
    """(file, dotted name, call) of every call in the source."""
    return [
        (path.relative_to(ROOT / "src" / "zeroshard").as_posix(), ast.unparse(node.func), node)
        for path in SOURCE
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
    ]


def test_nothing_unpickles_and_no_text_is_run() -> None:
    for path in SOURCE:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.partition(".")[0] for name in names} & UNPICKLERS, path
    every = calls()
    assert not [(file, name) for file, name, _ in every if name in ("eval", "exec")]
    objects = [
        (file, name) for file, name, _ in every if re.search(r"(all_gather|broadcast|gather|scatter)_object", name)
    ]
    assert not objects, "these pickle what ranks tell each other"
    loads = [(file, node) for file, name, node in every if name == "torch.load"]
    assert [file for file, _ in loads] == ["interop/inert_pickle.py"]
    assert {k.arg: ast.literal_eval(k.value) for k in loads[0][1].keywords}["weights_only"] is True


def test_no_code_beside_a_configuration_is_run() -> None:
    trusts = [k.value for _, _, node in calls() for k in node.keywords if k.arg == "trust_remote_code"]
    assert len(trusts) >= 2 and not any(ast.literal_eval(value) for value in trusts)


def test_variables_are_on_the_page() -> None:
    used = {name for path in SOURCE for name in re.findall(r'"(ZEROSHARD_[A-Z]+)"', path.read_text())}
    assert used and used <= set(re.findall(r"ZEROSHARD_[A-Z]+", PAGE))


@pytest.mark.parametrize("what", ["shared memory", "heartbeat", "disk"])
def test_files_are_their_owners_alone(what: str, tmp_path: Path) -> None:
    """Whatever the umask."""
    kept = os.umask(0)
    try:
        match what:
            case "shared memory":
                descriptor, _ = offer(1)
            case "heartbeat":
                Heartbeat(tmp_path / "rank-0.heartbeat", 0)
                descriptor = os.open(tmp_path / "rank-0.heartbeat", os.O_RDONLY)
            case _:
                descriptor = _nameless(tmp_path)
    finally:
        os.umask(kept)
    facts = os.fstat(descriptor)
    os.close(descriptor)
    assert stat.S_IMODE(facts.st_mode) == 0o600
    assert facts.st_nlink == (1 if what == "heartbeat" else 0), "it has no name"
    assert what == "heartbeat" or list(tmp_path.iterdir()) == []


def test_the_store_of_one_machine_listens_on_the_loopback_address() -> None:
    store = keep_store("127.0.0.1", 0, 20.0, loopback=True)
    listening = [c.laddr for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert [place.ip for place in listening if place.port == store.port] == ["127.0.0.1"]  # type: ignore[attr-defined]
