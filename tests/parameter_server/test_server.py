"""The parameter server as a monitor: who may go on, how stale a gradient was, and who hears of a failure."""

import random
import threading
from functools import partial

import pytest
import torch
from torch import nn

from zeroshard.errors import CommError
from zeroshard.memory.ledger import Ledger
from zeroshard.parameter_server import Server, Wire


class Bench:
    """A server of one weight, which counts the updates of each worker, and a wire for each worker."""

    def __init__(self, workers: int, bound: int | None) -> None:
        self.start = [nn.Parameter(torch.zeros(workers))]
        self.server = Server(self.start, partial(torch.optim.SGD, lr=1.0, maximize=True), workers, bound, Ledger())
        self.wires = [Wire(self.start, Ledger(), "wire") for _ in range(workers)]

    def push(self, worker: int) -> int:
        gradient = torch.zeros(len(self.wires))
        gradient[worker] = 1
        return self.server.push(worker, [gradient])

    def goes_on(self, worker: int) -> bool:
        """Whether the worker may go on now; if so, it has the weights and keeps to the bound."""
        reply = self.server.pull(worker, self.wires[worker], 0.0)
        if reply is not None:
            (weights,) = self.wires[worker].views
            assert weights.tolist() == self.server.clocks
            assert reply.version == sum(self.server.clocks)
            assert reply.lead == self.server.clocks[worker] - min(self.server.clocks)
        return reply is not None


@pytest.mark.parametrize("workers, bound", [(2, 0), (2, 1), (2, 3), (3, 0), (3, 2), (5, 1), (2, None), (4, None)])
def test_a_worker_goes_on_exactly_when_the_bound_lets_it(workers: int, bound: int | None) -> None:
    """Against the definition, in many random orders; staleness against a log of whose updates came when."""
    for seed in range(10):
        draw, bench = random.Random(seed), Bench(workers, bound)
        updates: list[int] = []  # whose
        pulled = [0] * workers  # how many updates there were
        waiting: set[int] = set()
        for _ in range(60):
            worker = draw.choice([w for w in range(workers) if w not in waiting])
            assert bench.push(worker) == sum(w != worker for w in updates[pulled[worker] :])
            updates.append(worker)
            waiting.add(worker)
            for other in draw.sample(sorted(waiting), len(waiting)):
                behind = min(updates.count(w) for w in range(workers))
                allowed = bound is None or updates.count(other) - behind <= bound
                assert bench.goes_on(other) == allowed
                if allowed:
                    waiting.remove(other)
                    pulled[other] = len(updates)


@pytest.mark.parametrize("workers, bound", [(2, 0), (2, 3), (3, 1), (4, 2)])
def test_staleness_reaches_what_the_bound_implies_and_no_more(workers: int, bound: int) -> None:
    """(N-1)(2s+1): the others go from s behind to s ahead, and one step more before they are stopped."""
    bench = Bench(workers, bound)
    for _ in range(bound):
        bench.push(0)
        assert bench.goes_on(0)
    for step in range(2 * bound + 1):
        for other in range(1, workers):
            bench.push(other)
        goes_on = [bench.goes_on(other) for other in range(1, workers)]
        assert goes_on == [step < 2 * bound] * (workers - 1)
    assert bench.push(0) == (workers - 1) * (2 * bound + 1)


def test_nobody_waits_for_a_worker_that_has_finished() -> None:
    bench = Bench(3, 1)
    for _ in range(2):
        bench.push(0)
    assert not bench.goes_on(0)
    bench.server.leave(1)
    assert not bench.goes_on(0)
    bench.server.leave(2)
    assert bench.server.pull(0, bench.wires[0], 0.0) is not None
    assert bench.server.pull(1, bench.wires[1], 0.0) is None, "it waits for the weights of the end"
    bench.push(0)
    bench.server.leave(0)
    for worker in range(3):
        assert bench.server.pull(worker, bench.wires[worker], 0.0) is not None
        assert bench.wires[worker].views[0].tolist() == [3, 0, 0]


def test_a_worker_that_waits_is_woken_by_the_one_it_waits_for() -> None:
    bench = Bench(2, 0)
    bench.push(0)
    replies, told = [], threading.Event()

    def wait() -> None:
        wire = bench.wires[0]
        while (reply := bench.server.pull(0, wire, 0.01)) is None:
            told.set()
        replies.append(reply)

    waiter = threading.Thread(target=wait)
    waiter.start()
    assert told.wait(30)
    assert not replies
    bench.push(1)
    waiter.join(30)
    assert [(reply.version, reply.lead) for reply in replies] == [(2, 0)]


def test_the_first_failure_is_what_everybody_hears() -> None:
    bench = Bench(2, 0)
    bench.push(0)
    bench.server.fail(ValueError("the disk is full"))
    bench.server.fail(ValueError("something later"))
    for call in (lambda: bench.push(1), lambda: bench.goes_on(0), lambda: bench.server.leave(1)):
        with pytest.raises(CommError, match="stopped: ValueError: the disk is full"):
            call()


def test_an_error_of_the_optimizer_stops_the_run() -> None:
    bench = Bench(2, None)
    bench.server.optimizer.register_step_pre_hook(lambda *_: (_ for _ in ()).throw(ArithmeticError("no such root")))
    with pytest.raises(ArithmeticError, match="no such root"):
        bench.server.exchange(0, bench.wires[0], [True])
    with pytest.raises(CommError, match="no such root"):
        bench.server.exchange(1, bench.wires[1], [True])


def test_a_wire_has_one_buffer_per_dtype_and_a_view_per_tensor() -> None:
    like = [torch.rand(2, 3), torch.rand(4).bfloat16(), torch.rand(()), torch.rand(0, 2).bfloat16()]
    ledger = Ledger()
    wire = Wire(like, ledger, "wire")
    assert [(buffer.dtype, buffer.numel()) for buffer in wire.buffers] == [(torch.float32, 7), (torch.bfloat16, 4)]
    assert ledger.total("host") == 7 * 4 + 4 * 2
    assert wire.pack([like[0], None, *like[2:]]) == [True, False, True, True]
    assert wire.buffers[0].tolist() == [*like[0].flatten().tolist(), like[2].item()]
    assert wire.buffers[1].tolist() == [0, 0, 0, 0]
    wire.pack(like)
    copies = [torch.empty_like(tensor) for tensor in like]
    wire.unpack(copies)
    assert all(torch.equal(copy, tensor) for copy, tensor in zip(copies, like, strict=True))
