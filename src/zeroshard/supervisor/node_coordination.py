"""Coordination of the supervisors of several nodes: node 0 gives numbered orders, the others report rank states.

All messages go through a key-value store that node 0 keeps. A supervisor that loses the store ends its workers, because
only node 0 decides.
"""

import contextlib
import json
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from zeroshard.supervisor.records import RankState

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

BEAT = 0.25  # seconds between two messages of a node
ANSWER = 10.0  # longest seconds for an answer of this process's own store
Answer = TypeVar("Answer")


def keep_store(address: str, port: int, patience: float, loopback: bool) -> "Store":
    """A key-value store hosted by this process.

    Args:
        port: 0 for any.
        patience: seconds that a client may wait for a key.
        loopback: whether only this machine may reach it.

    Raises:
        OSError: the port is taken.
    """
    from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]

    from zeroshard.comm.rendezvous import limit_waits

    listener = socket.create_server(("127.0.0.1" if loopback else "", port), backlog=1024)
    port, descriptor = listener.getsockname()[1], listener.detach()  # the store closes it
    try:
        store: Store = TCPStore(
            "127.0.0.1" if loopback else address,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=patience),
            master_listen_fd=descriptor,
        )
    except DistError as error:
        raise OSError(str(error)) from error
    limit_waits(store, ANSWER)
    return store


class NodeCoordination:
    """Node 0's side.

    Args:
        store: shared by all nodes.
        nodes: number of nodes.
    """

    def __init__(self, store: "Store", nodes: int) -> None:
        self._store, self._others = store, range(1, nodes)
        self._orders = 0
        self._heard: dict[int, tuple[int, float]] = {}  # by node: the number of its last message, and when it came

    def sizes(self) -> Iterator[int | None]:
        """The number of processes of each other node; None for a node that has not joined yet."""
        for node in self._others:
            message = self._message(node)
            yield None if message is None else int(message["processes"])

    def order(self, what: str, **details: Any) -> None:
        """Give an order to all other nodes."""
        payload = json.dumps({"what": what, **details})
        self._ask(lambda store: store.set(f"order/{self._orders}", payload))
        self._orders += 1

    def states(self) -> dict[int, list[RankState]]:
        """The rank states of each other node that has carried out the last order; ages include that of its message."""
        found = {}
        for node in self._others:
            message = self._message(node)
            if message is None or message["obeyed"] < self._orders:
                continue
            age = time.monotonic() - self._heard[node][1]
            states = (RankState.from_dict(values) for values in message["states"])
            found[node] = [replace(s, silent=s.silent + age, idle=s.idle + age) for s in states]
        return found

    def asked(self) -> bool:
        """Whether another node was asked to stop."""
        return any(message["asked"] for message in map(self._message, self._others) if message)

    def wait_for_goodbyes(self, seconds: float) -> None:
        """Wait until the other nodes have confirmed the end of the job, or have sent no message for `seconds`."""
        while any(self._is_there(node, seconds) for node in self._others):
            time.sleep(BEAT)

    def _is_there(self, node: int, seconds: float) -> bool:
        if self._message(node) is None or self._ask(lambda store: store.check([f"node/{node}/gone"])):
            return False
        return time.monotonic() - self._heard[node][1] < seconds

    def _message(self, node: int) -> dict[str, Any] | None:
        key = f"node/{node}"
        if not self._ask(lambda store: store.check([key])):
            return None
        message: dict[str, Any] = json.loads(self._ask(lambda store: store.get(key)))
        if self._heard.get(node, (-1, 0.0))[0] != message["number"]:
            self._heard[node] = (message["number"], time.monotonic())
        return message

    def _ask(self, question: "Callable[[Store], Answer]") -> Answer:
        """The store's answer to a question.

        Raises:
            OSError: the store does not answer.
        """
        from torch.distributed import DistError

        from zeroshard.comm.rendezvous import give_up

        try:
            return question(self._store)
        except DistError as error:
            give_up(self._store)
            first = str(error).splitlines()[0]
            raise OSError(f"the store in which the nodes meet does not answer ({first}); is `lo` up?") from error


class Connection(threading.Thread):
    """The side of any node but 0: a thread, because a store behind a cut network answers late or never.

    Attributes:
        orders: orders of node 0, oldest first.
        heard: when node 0's store last answered (monotonic seconds).
        lost: whether the connection broke.
    """

    def __init__(self, store: "Store", node: int, processes: int) -> None:
        super().__init__(name="zeroshard link", daemon=True)
        self.orders: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.heard, self.lost = time.monotonic(), False
        self._store, self._key = store, f"node/{node}"
        self._message: dict[str, Any] = {"processes": processes, "asked": False, "obeyed": 0, "states": []}
        self.start()

    def tell(self, states: Sequence[RankState], obeyed: int, asked: bool) -> None:
        """Set the content of the next message to node 0."""
        payload = {"asked": asked, "obeyed": obeyed, "states": [asdict(state) for state in states]}
        self._message = {**self._message, **payload}

    def run(self) -> None:
        """Exchange messages until the connection breaks or node 0 ends the job."""
        from torch.distributed import DistError

        number, taken, over = 0, 0, False
        with contextlib.suppress(DistError):
            while not over:
                self._store.set(self._key, json.dumps({**self._message, "number": number}))
                while self._store.check([f"order/{taken}"]):
                    order = json.loads(self._store.get(f"order/{taken}"))
                    self.orders.put(order)
                    taken, over = taken + 1, over or order["what"] == "leave"
                number, self.heard = number + 1, time.monotonic()
                time.sleep(BEAT)
            self._store.set(f"{self._key}/gone", "")
            return
        self.lost = True
