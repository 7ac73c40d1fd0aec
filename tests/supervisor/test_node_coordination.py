"""Orders and messages between the supervisors of several nodes, over a real store in one process."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from zeroshard.comm.heartbeat import Collective, HeartbeatReading
from zeroshard.supervisor.node_coordination import Connection, NodeCoordination, keep_store
from zeroshard.supervisor.records import RankState


def until(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 20
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return value


def test_orders_arrive_in_order_and_states_come_back() -> None:
    store = keep_store("127.0.0.1", 0, 20.0, loopback=True)
    board = NodeCoordination(store, 2)
    assert list(board.sizes()) == [None] and board.states() == {} and not board.asked()
    link = Connection(dist.TCPStore("127.0.0.1", store.port), 1, 3)
    until(lambda: list(board.sizes()) == [3])
    board.order("start", attempt=0)
    board.order("signal", number=15)
    assert [link.orders.get(timeout=20) for _ in range(2)] == [
        {"what": "start", "attempt": 0},
        {"what": "signal", "number": 15},
    ]
    heartbeat = HeartbeatReading(1, 7, 3, waiting=True, collective=Collective("gather", 1, "w"))
    state = RankState(rank=1, heartbeat=heartbeat, silent=2.0, idle=5.0)
    link.tell([state], 1, False)
    time.sleep(0.6)
    assert board.states() == {}  # what was seen before the last order says nothing about it
    link.tell([state], 2, True)
    ((seen,),) = until(board.states).values()
    assert seen.heartbeat == heartbeat and 2.0 <= seen.silent < 15.0 and seen.idle >= 5.0
    assert board.asked()
    board.order("leave", code=0)
    board.wait_for_goodbyes(20.0)
    link.join(20.0)
    assert not link.is_alive() and not link.lost


def test_a_silent_node_grows_older() -> None:
    store = dist.HashStore()
    board = NodeCoordination(store, 2)
    message = '{"number": %d, "processes": 1, "asked": false, "obeyed": 0, "states": [%s]}'
    state = '{"rank": 1, "host": "", "running": 0, "exit": null, "exited": 0, "silent": 0, "idle": 0, '
    state += '"suspended": false, "heartbeat": null, "failure": null, "stack": ""}'
    store.set("node/1", message % (0, state))
    assert board.states()[1][0].silent < 0.5
    time.sleep(0.6)
    assert board.states()[1][0].silent >= 0.6
    store.set("node/1", message % (1, state))
    assert board.states()[1][0].silent < 0.5
    began = time.monotonic()
    board.wait_for_goodbyes(1.0)
    assert time.monotonic() - began >= 0.5  # it may have been about to say it
    board.wait_for_goodbyes(0.0)


def test_a_store_that_is_gone_is_noticed() -> None:
    kept: list[Any] = [keep_store("127.0.0.1", 0, 20.0, loopback=True)]
    link = Connection(dist.TCPStore("127.0.0.1", kept[0].port), 1, 1)
    until(lambda: kept[0].check(["node/1"]))
    kept.clear()
    until(lambda: link.lost)


def test_a_store_that_does_not_answer_node_0_ends_the_job_and_not_its_supervisor() -> None:
    class Silent:
        def check(self, keys: list[str]) -> bool:
            raise dist.DistNetworkError("Socket Timeout")

    with pytest.raises(OSError, match=r"does not answer \(Socket Timeout\)"):
        list(NodeCoordination(Silent(), 2).sizes())  # type: ignore[arg-type]
