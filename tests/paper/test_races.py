"""Races made on purpose: each is found on a device of paper, and the right version beside it is not."""

import gc
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from paper.device import DEVICE, Paper
from paper.record import disagreements
from pool import Pool

import zeroshard as zs
from zeroshard.memory.host import HostMemory
from zeroshard.memory.ledger import Category, Ledger
from zeroshard.memory.transfers import ThreadRunner, Transfers
from zeroshard.platform import accelerator
from zeroshard.traffic import Purpose

N = 8


def kinds(run: Callable[[Paper], Any]) -> list[str]:
    """The kinds of findings in a run."""
    gc.collect()
    with Paper() as paper:
        run(paper)
    return [finding.kind for finding in paper.record.findings]


def on_device() -> torch.Tensor:
    return torch.ones(N, device=DEVICE)


def begun() -> tuple[torch.Stream, torch.Tensor, torch.Event]:
    """A stream, a tensor that the main stream wrote, and an event after that."""
    stream, x, event = accelerator.new_stream(DEVICE), on_device(), accelerator.record(DEVICE)
    assert stream is not None and event is not None
    return stream, x, event


def read_beside(paper: Paper, waits: bool) -> None:
    """A stream reads what the main stream writes."""
    stream, x, event = begun()
    with accelerator.inside(stream):
        if waits:
            accelerator.wait_in_stream(DEVICE, event)
        y = x * 2
    over = stream.record_event()
    accelerator.wait_in_stream(DEVICE, over)
    y += 1
    accelerator.synchronize(DEVICE)  # or its memory would go back to the stream's pool under this


def write_under_a_reader(paper: Paper, waits: bool) -> None:
    """The main stream overwrites what a stream still reads."""
    stream, x, event = begun()
    with accelerator.inside(stream):
        accelerator.wait_in_stream(DEVICE, event)
        y = x * 2
        over = accelerator.record(DEVICE)
    assert over is not None
    if waits:
        accelerator.wait_in_stream(DEVICE, over)
    x.zero_()
    accelerator.synchronize(DEVICE)
    del y


def early_release(paper: Paper, waits: bool) -> None:
    """A buffer of the main stream's pool is freed while a stream reads it."""
    stream, x = accelerator.new_stream(DEVICE), on_device()
    kept = torch.empty(N, device=DEVICE)
    event = accelerator.record(DEVICE)
    assert stream is not None and event is not None
    with accelerator.inside(stream):
        accelerator.wait_in_stream(DEVICE, event)
        kept.copy_(x)
    if waits:
        accelerator.wait_in_stream(DEVICE, stream.record_event())
    del x
    accelerator.synchronize(DEVICE)


def late_event(paper: Paper, waits: bool) -> None:
    """An event that is recorded before the write that it should cover."""
    stream, x = accelerator.new_stream(DEVICE), torch.empty(N, device=DEVICE)
    event = accelerator.record(DEVICE)
    x.fill_(1.0)
    if waits:
        event = accelerator.record(DEVICE)
    assert stream is not None and event is not None
    with accelerator.inside(stream):
        accelerator.wait_in_stream(DEVICE, event)
        y = x.clone()
    accelerator.synchronize(DEVICE)
    del y


def host_reads(paper: Paper, waits: bool) -> None:
    """The host reads page-locked memory under the copy into it."""
    x, there = on_device(), accelerator.page_locked(N, torch.float32, DEVICE)
    there.copy_(x, non_blocking=True)
    if waits:
        accelerator.finish_stream(DEVICE)
    assert there.sum() == N


def host_overwrites(paper: Paper, waits: bool) -> None:
    """The host overwrites page-locked memory under the copy out of it."""
    there, x = accelerator.page_locked(N, torch.float32, DEVICE), torch.empty(N, device=DEVICE)
    there.fill_(1.0)
    x.copy_(there, non_blocking=True)
    event = accelerator.record(DEVICE)
    assert event is not None
    if waits:
        event.synchronize()
    there.fill_(2.0)


def host_releases(paper: Paper, waits: bool) -> None:
    """A registered slab is unmapped under a copy out of it; unregistering waits for the device, or not."""
    host = HostMemory(Ledger(), DEVICE)
    slab, x = host.slab(N, torch.float32, Category.BUFFERS, "a slab"), torch.empty(N, device=DEVICE)
    x.copy_(slab, non_blocking=True)
    host.close()
    with nullcontext() if waits else patch.object(accelerator, "synchronize"):
        del slab


def threads_meet(paper: Paper, waits: bool) -> None:
    """A thread of the host reads what another has written: after an event, or after a flag that orders nothing."""
    values, ready, written = torch.zeros(N), threading.Event(), list[bool]()

    def read() -> None:
        if waits:
            ready.wait()
        while not written:
            time.sleep(1e-3)
        values.sum()

    def write() -> None:
        values.fill_(1.0)
        written.append(True)
        ready.set()

    threads = [threading.Thread(target=run) for run in (write, read)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def transferred(paper: Paper, waits: bool) -> None:
    """The transfers of zeroshard, with and without the wait for a copy."""
    link = Transfers(ThreadRunner(DEVICE, 10.0))
    x, there = on_device(), accelerator.page_locked(N, torch.float32, DEVICE)
    task = link.copy(x, there, Purpose.GRADIENTS_DOWN, "a gradient")
    if waits:
        task.wait()
    x.zero_()
    task.wait_on_host()
    there.sum()


def copied_on(paper: Paper, waits: bool) -> None:
    """A copy to the host and one from there, on streams of their own, with and without an order."""
    link = Transfers(ThreadRunner(DEVICE, 10.0))
    x, back, there = on_device(), on_device(), accelerator.page_locked(N, torch.float32, DEVICE)
    down = link.copy(x, there, Purpose.GRADIENTS_DOWN, "a gradient")
    up = link.copy(there, back, Purpose.PARAMETERS_UP, "a parameter", [down] if waits else [])
    down.wait()
    up.wait()


RACES: dict[Callable[[Paper, bool], None], str] = {
    read_beside: "read before the writer ended",
    write_under_a_reader: "write while a reader may still run",
    early_release: "release while another stream may still use it",
    late_event: "read before the writer ended",
    host_reads: "page-locked memory used by the host before its copy ended",
    host_overwrites: "page-locked memory used by the host before its copy ended",
    host_releases: "page-locked memory of the host released before its copy ended",
    threads_meet: "read before the writer ended",
    transferred: "write while a reader may still run",
    copied_on: "read before the writer ended",
}


@pytest.mark.parametrize("race", RACES, ids=lambda race: race.__name__)
def test_a_race_is_found_and_its_repair_is_not(race: Callable[[Paper, bool], None]) -> None:
    assert kinds(lambda paper: race(paper, True)) == []
    assert RACES[race] in kinds(lambda paper: race(paper, False))


def test_record_stream_delays_the_reuse_of_a_buffer() -> None:
    def run(paper: Paper) -> None:
        stream, x, event = begun()
        with accelerator.inside(stream):
            accelerator.wait_in_stream(DEVICE, event)
            y = x * 2
        x.record_stream(stream)
        del x
        accelerator.synchronize(DEVICE)
        del y

    assert kinds(run) == []


@pytest.mark.parametrize(("used", "found"), [("never", 0), ("before", 1), ("after", 1), ("rewritten", 0)])
def test_a_write_under_a_copy_to_the_host_matters_where_the_copy_is_used(used: str, found: int) -> None:
    def run(paper: Paper) -> None:
        x, back, there = on_device(), on_device(), accelerator.page_locked(N, torch.float32, DEVICE)
        down, up, ready = accelerator.new_stream(DEVICE), accelerator.new_stream(DEVICE), accelerator.record(DEVICE)
        assert down is not None and up is not None and ready is not None
        with accelerator.inside(down):
            accelerator.wait_in_stream(DEVICE, ready)
            there.copy_(x, non_blocking=True)
            copied = down.record_event()
        if used == "before":
            with accelerator.inside(up):
                accelerator.wait_in_stream(DEVICE, copied)
                back.copy_(there, non_blocking=True)
        x.zero_()
        accelerator.synchronize(DEVICE)
        if used == "rewritten":
            there[: N // 2].zero_()
            there[N // 2 :].zero_()
        if used in ("after", "rewritten"):
            there.sum()

    assert kinds(run) == ["write while a reader may still run"] * found


def test_disjoint_halves_of_a_buffer_do_not_race() -> None:
    def run(paper: Paper) -> None:
        stream, x, event = begun()
        with accelerator.inside(stream):
            accelerator.wait_in_stream(DEVICE, event)
            x[: N // 2].zero_()
        x[N // 2 :].zero_()
        accelerator.synchronize(DEVICE)

    assert kinds(run) == []


def test_a_finding_names_tensor_operations_lines_and_the_missing_edge() -> None:
    with Paper() as paper:
        buffer = Ledger().empty(N, torch.float32, DEVICE, Category.GRADIENTS, "blocks.3")
        stream = accelerator.new_stream(DEVICE)
        assert stream is not None
        with accelerator.inside(stream):
            buffer.add_(1.0)
        accelerator.synchronize(DEVICE)
    (finding,) = paper.record.findings
    assert finding.tensor == "blocks.3 (gradients)"
    assert "zeros" in finding.first and "src/zeroshard/memory/zeros.py:" in finding.first
    assert "add_" in finding.second and "tests/paper/test_races.py:" in finding.second
    assert finding.missing == "stream 1 waits for main stream"


def test_waits_of_the_host_are_counted() -> None:
    with Paper() as paper:
        x = on_device()
        x.sum().item()
        x.cpu()
        x.nonzero()
        torch.ones(N).to(DEVICE)
        x[x > 0].sum()
        accelerator.synchronize(DEVICE)
        accelerator.finish_stream(DEVICE)
        x.add_(1).mul_(torch.ones(N, device=DEVICE))
    names = [name for (_, name), n in paper.record.synchronisations.items() for _ in range(n)]
    assert sorted(names) == sorted(
        ["_local_scalar_dense", "_to_copy", "nonzero", "_to_copy", "index", "synchronize", "stream.synchronize"]
    )


def test_tensors_of_the_device_and_of_the_host_do_not_meet() -> None:
    def run(paper: Paper) -> None:
        on_device() + torch.ones(N)

    assert kinds(run) == ["operation on tensors of the device and of the host"]
    assert kinds(lambda paper: on_device() * torch.tensor(2.0)) == []


def collectives(mesh: zs.Mesh, case: str) -> tuple[list[str], dict[str, list[str]]]:
    """The findings of a rank, and its launches."""
    mesh = replace(mesh, device=DEVICE)
    with Paper() as paper:
        network = mesh.platform.network(mesh.rank, mesh.ranks, mesh.device)
        full, own = torch.zeros(N * mesh.ranks, device=DEVICE), torch.ones(N, device=DEVICE)
        other = torch.ones(N, device=DEVICE)
        if case == "unready input":
            stream = accelerator.new_stream(DEVICE)
            assert stream is not None
            accelerator.synchronize(DEVICE)
            with accelerator.inside(stream):
                own.add_(1.0)
        work = network.all_gather(full, own, mesh.gathers)
        last = network.all_reduce(other, mesh.gathers, False)
        if case == "no wait":
            full.add_(1.0)
        if case == "input overwritten":
            own.zero_()
        work.wait()
        last.wait()
        assert full.numel() == N * mesh.ranks
        dist.barrier(mesh.control)
    return [str(finding) for finding in paper.record.findings], paper.record.launches


CASES = {
    "right": [],
    "no wait": ["write while a reader may still run", "write while a writer may still run"],
    "input overwritten": ["write while a reader may still run"],
    "unready input": ["collective before its input is there"],
}


@pytest.mark.parametrize("case", CASES)
def test_collectives_wait_and_are_waited_for(pool: Pool, case: str) -> None:
    for found, _ in pool.run(collectives, 2, case):
        assert {text.partition(":")[0] for text in found} <= set(CASES[case])
        assert bool(found) == bool(CASES[case])


def test_ranks_launch_in_the_same_order(pool: Pool) -> None:
    launches = [launched for _, launched in pool.run(collectives, 2, "right")]
    assert not list(disagreements(launches))
    swapped = pool.run(swapped_launches, 2)
    (finding,) = disagreements(swapped)
    assert "all_reduce" in finding.first and "broadcast" in finding.second


def swapped_launches(mesh: zs.Mesh) -> dict[str, list[str]]:
    """The launches of ranks that disagree; no bytes are moved, since gloo would not accept that either."""
    mesh = replace(mesh, device=DEVICE)
    done = SimpleNamespace(wait=lambda *_: True, is_completed=lambda: True)
    calls = {name: lambda *_, **__: done for name in ("all_reduce", "broadcast")}
    with patch.multiple(dist, **calls), Paper() as paper:
        network, x = mesh.platform.network(mesh.rank, mesh.ranks, mesh.device), torch.ones(N, device=DEVICE)
        launches = [lambda: network.all_reduce(x, mesh.gathers, False), lambda: network.broadcast(x, 0, mesh.gathers)]
        for launch in launches[:: -1 if mesh.rank else 1]:
            work = launch()
            assert work is not None
            work.wait()
    return paper.record.launches
