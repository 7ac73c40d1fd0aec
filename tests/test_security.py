"""What SECURITY.md says where no other test shows it: rights of files, who may connect, what is never called."""

import ast
import os
import re
import stat
from pathlib import Path

import psutil
import pytest
from house import house, imports, last_word

from zeroshard.comm.heartbeat import Heartbeat
from zeroshard.memory.disk import _nameless
from zeroshard.platform.shared_memory import offer
from zeroshard.supervisor.node_coordination import keep_store

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "SECURITY.md").read_text()
UNPICKLERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}


def calls(*names: str) -> list[tuple[str, ast.Call]]:
    """(module, call) of every call in the source whose function ends with one of the names."""
    return [
        (module.name, node)
        for module in house()
        for node in module.nodes
        if isinstance(node, ast.Call) and last_word(node.func) in names
    ]


def test_nothing_unpickles_and_no_text_is_run() -> None:
    for module in house():
        assert not {name.partition(".")[0] for name in imports(module)} & UNPICKLERS, module.name
    assert not [module for module, call in calls("eval", "exec") if isinstance(call.func, ast.Name)]
    names = ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list")
    objects = calls(*names, "send_object_list", "recv_object_list")
    assert not objects, "these pickle what ranks tell each other"
    loads = [(module, call) for module, call in calls("load") if ast.unparse(call.func) == "torch.load"]
    assert [module for module, _ in loads] == ["interop.inert_pickle"]
    assert {k.arg: ast.literal_eval(k.value) for k in loads[0][1].keywords}["weights_only"] is True


def test_no_code_beside_a_configuration_is_run() -> None:
    trusts = [
        node.value
        for module in house()
        for node in module.nodes
        if isinstance(node, ast.keyword) and node.arg == "trust_remote_code"
    ]
    assert len(trusts) >= 2 and not any(ast.literal_eval(value) for value in trusts)


def test_variables_are_on_the_page() -> None:
    used = {name for module in house() for name in re.findall(r'"(ZEROSHARD_[A-Z]+)"', module.text)}
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
