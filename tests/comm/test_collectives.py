"""Comm: words on which ranks agree, what is counted, and what is said when the ranks part or one is gone."""

import os
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool, copies, impatient

import zeroshard as zs
from zeroshard.comm.collectives import Comm, Purpose
from zeroshard.comm.mesh import announce_failure, mesh_of
from zeroshard.comm.pending import Position
from zeroshard.errors import CommError

LONG = 1000


def words_of(mesh: zs.Mesh) -> Any:
    comm = Comm(mesh)
    short = comm.agree(bytes([mesh.rank]) * 3, "short")
    empty = comm.agree(b"", "empty")
    long = comm.agree(bytes([mesh.rank]) * LONG, "long")
    values = comm.agree_on({"rank": mesh.rank, "list": ["é"] * (50 * mesh.rank), "none": None}, "values")
    return short, empty, long, values


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_agree_returns_everyones_words_in_rank_order(pool: Pool, ranks: int) -> None:
    for short, empty, long, values in pool.run(words_of, ranks):
        assert short == [bytes([rank]) * 3 for rank in range(ranks)]
        assert empty == [b""] * ranks
        assert long == [bytes([rank]) * LONG for rank in range(ranks)]
        assert values == [{"rank": rank, "list": ["é"] * (50 * rank), "none": None} for rank in range(ranks)]


def moved(mesh: zs.Mesh, rotates: bool = True) -> Any:
    comm = Comm(mesh)
    assert comm._network._rotates
    comm._network._rotates = rotates  # or the collectives of the backend, as on GPUs and among many ranks
    n = mesh.ranks
    own = torch.full((3,), float(mesh.rank))
    full, sent = torch.empty(3 * n), (torch.arange(3 * n) + 100 * mesh.rank).bfloat16()
    first = comm.gather(full, own, Purpose.GATHER_PARAMETERS, "a", padding=1)
    second = comm.exchange(sent, partial(torch.empty, dtype=torch.bfloat16), "a", padding=2)
    second.wait()
    into = torch.cat(second.copies)
    second.done()
    second.wait_until_read()
    first.wait()
    first.wait()  # once more is nothing
    for tensor, label in ((full, "inside"),):
        comm.gather(tensor, tensor[3 * mesh.rank : 3 * mesh.rank + 3], Purpose.GATHER_GRADIENTS, label).wait()
    counts = {purpose: replace(count, seconds=0.0) for purpose, count in comm.counts.items()}
    digests = dict(comm.digests)
    comm.reset()
    start = torch.full((2,), float(mesh.rank))
    comm.broadcast(start, "start")
    return full, into.float(), counts, digests, start, dict(comm.counts)


@pytest.mark.parametrize("ranks, rotates", [(2, True), (4, True), (3, False)])
def test_gather_and_exchange_move_and_count(pool: Pool, ranks: int, rotates: bool) -> None:
    answers = pool.run(moved, ranks, rotates)
    for rank, (full, into, counts, digests, start, after) in enumerate(answers):
        assert full.tolist() == [float(r) for r in range(ranks) for _ in range(3)]
        wanted = torch.stack([torch.arange(3 * rank, 3 * rank + 3) + 100 * sender for sender in range(ranks)])
        assert torch.equal(into, wanted.bfloat16().float().flatten())
        gather, exchange, inside = (
            counts[p] for p in (Purpose.GATHER_PARAMETERS, Purpose.REDUCE_GRADIENTS, Purpose.GATHER_GRADIENTS)
        )
        assert (gather.elements, gather.padding, gather.nbytes, gather.calls) == (3 * ranks - 1, 1, 12 * ranks, 1)
        assert (exchange.elements, exchange.padding, exchange.nbytes, exchange.calls) == (
            3 * ranks - 2,
            2,
            6 * ranks,
            1,
        )
        assert gather.sent_nbytes == 12 * (ranks - 1) and exchange.sent_nbytes == 6 * (ranks - 1)
        assert inside.elements == 3 * ranks
        assert digests == answers[0][3]
        assert start.tolist() == [0.0, 0.0] and set(after) == {Purpose.SETUP}


def digest_of(mesh: zs.Mesh) -> dict[str, int]:
    comm = Comm(mesh)
    comm.gather(torch.empty(2), torch.zeros(1), Purpose.GATHER_PARAMETERS, f"unit {mesh.rank}").wait()
    return comm.digests


def test_digest_tells_ranks_apart_that_gathered_different_things(pool: Pool) -> None:
    one, other = pool.run(digest_of, 2)
    assert one["gather"] != other["gather"] and one["reduce"] == other["reduce"]


@impatient()
def apart(mesh: zs.Mesh, case: str) -> str | None:
    """On groups of its own, because they end half way."""
    both = mesh_of([0, 1], torch.device("cpu"), 2.0 if case == "silent" else 20.0)
    if mesh.rank > 1:
        return None
    assert both.store is not None
    store = dist.PrefixStore(f"apart/{case}", both.store)
    comm = Comm(replace(both, store=store, failures=store))  # failures of its own, too: the pool lives on
    full, own = torch.empty(2), torch.zeros(1)
    try:
        if case == "groups":
            if mesh.rank == 0:
                comm.gather(full, own, Purpose.GATHER_PARAMETERS, "left").wait()
            else:
                comm.exchange(torch.zeros(2), torch.empty, "right").wait()
        elif case == "words":
            comm.agree(bytes(8 + 16 * mesh.rank), f"word {mesh.rank}")
        elif case == "silent":
            if mesh.rank == 0:
                comm.gather(full, own, Purpose.GATHER_PARAMETERS, "alone").wait()
            else:
                return "did not take part"
        elif case == "failed":
            if mesh.rank == 0:
                comm.gather(full, own, Purpose.GATHER_PARAMETERS, "alone").wait()
            else:
                announce_failure(comm.mesh, ValueError("the disk is full"))
                return str(comm.failure())
    except CommError as error:
        return str(error)
    return "no error"


def test_ranks_that_wait_for_different_things_name_both(pool: Pool) -> None:
    for message in pool.run(apart, 4, "groups")[:2]:
        assert message is not None and "gather parameters of left" in message and "reduce gradients of right" in message


def test_ranks_that_agree_on_different_things_name_both(pool: Pool) -> None:
    """Words of different lengths under different names: an error on both ranks, whose processes live on."""
    for message in pool.run(apart, 4, "words")[:2]:
        assert message is not None and "word 0" in message and "word 1" in message


def test_a_silent_rank_is_named_when_the_time_is_up(pool: Pool) -> None:
    message, other = pool.run(apart, 4, "silent")[:2]
    assert other == "did not take part"
    assert (
        message is not None
        and "gather parameters of alone" in message
        and "rank 1 is silent" in message
        and "2 s" in message
    )


def test_an_announced_failure_reaches_the_rank_that_waits(pool: Pool) -> None:
    """At its next look around, not when its time is up."""
    heard, said = pool.run(apart, 4, "failed")[:2]
    assert said == "rank 1 failed: ValueError: the disk is full"
    assert heard is not None and said in heard and "gather parameters of alone" in heard


def dying(rank: int, port: int, pipe: Any, speaks: bool) -> None:
    """A world of two whose rank 1 ends without a word, or after one, while rank 0 waits for it."""
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2, timeout=timedelta(seconds=20)
    )
    comm = Comm(mesh_of([0, 1], torch.device("cpu"), 20.0))
    comm.agree(b"here", "start")
    if rank == 1:
        if speaks:
            announce_failure(comm.mesh, RuntimeError("out of luck"))
        os._exit(3)
    try:
        comm.gather(torch.empty(4), torch.zeros(2), Purpose.GATHER_PARAMETERS, "blocks.7").wait()
        pipe.send("no error")
    except CommError as error:
        pipe.send(str(error))
    except Exception as error:
        pipe.send(f"another error: {error!r}")
    os._exit(0)


@pytest.mark.parametrize("speaks", [False, True])
def test_a_rank_that_dies_is_an_error_on_the_other(port: int, speaks: bool) -> None:
    context = copies()
    pipes = [context.Pipe() for _ in range(2)]
    processes = [context.Process(target=dying, args=(rank, port, pipes[rank][1], speaks)) for rank in range(2)]
    try:
        for process in processes:
            process.start()
        assert pipes[0][0].poll(60), "rank 0 hangs"
        message = pipes[0][0].recv()
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert "gather parameters of blocks.7" in message and "Rank 0 stopped" in message
    assert ("rank 1 failed: RuntimeError: out of luck" in message) == speaks


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[enforce fail at gloo/transport/tcp/pair.cc] op.preamble.length <= op.nbytes. 8 vs 4", "engine.data_rank"),
        ("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:3", "a connection broke"),
    ],
)
def test_the_backends_text_is_the_cause_and_not_the_message(text: str, said: str) -> None:
    comm = Comm(zs.Mesh())
    with pytest.raises(CommError) as error, comm._naming(Position("control", 1, "norm")):
        raise RuntimeError(text)
    assert said in str(error.value)
    assert "gloo" not in str(error.value)
    assert str(error.value.__cause__) == text
