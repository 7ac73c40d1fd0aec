"""Bandwidth of each collective of the engine between GPUs, beside the rate of the link between them.

    python benchmarks/gpu/links.py --ranks N [--device cuda] [--largest BYTES] [--json FILE]

Each collective goes through comm, as in a step, and its result is compared with the right one. A rate is the bytes that
one rank must send, divided by the time of the slowest rank (median of `TIMES`, device idle before and after):

    gather         S (N-1)            of slices of S bytes each, even, and uneven (which are broadcasts)
    exchange       S (N-1)            of slices of S bytes, without the sum that follows
    all-to-all     S (N-1)            of rows, as experts send them
    all-reduce     2 S N (N-1) / N    of a buffer of S N bytes
    broadcast, send  S N              of a buffer of S N bytes, from one rank

The link's rate is that of the vendor for the nearest GPU of devices.toml, in one direction; without one there is none
to compare with. The exit status is 1 if a result is wrong.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
from ranks import answer, circumstances, keep, launch

TIMES = 7
SMALLEST, LARGEST = 2**16, 2**28  # bytes of the whole buffer
TIMEOUT = 60.0
Row = dict[str, Any]


def collectives(comm: Any, numel: int) -> dict[str, tuple[Callable[[], Any], Callable[[], bool], float]]:
    """By name, for a buffer of `numel` elements: operation, whether its result is right, bytes that a rank sends."""
    import torch

    from zeroshard.traffic import Purpose

    mesh, device, slice_numel = comm.mesh, comm.mesh.device, numel // comm.mesh.ranks
    ranks, rank = mesh.ranks, mesh.rank
    full = torch.zeros(numel, device=device)
    whole = torch.arange(ranks, device=device, dtype=torch.float32).repeat_interleave(slice_numel)
    own = torch.full((slice_numel,), float(rank), device=device)
    bounds = [0, *(slice_numel * (place + 1) - 1 for place in range(ranks - 1)), numel]
    uneven = full.new_full((bounds[rank + 1] - bounds[rank],), float(rank))
    scratch, rows = torch.empty(numel, device=device), own.new_full((numel, 1), float(rank))
    into, total = torch.zeros(numel, 1, device=device), torch.empty(numel, device=device)
    held: list[Any] = []

    def exchange() -> None:
        held[:] = [comm.exchange(whole, lambda count: scratch[:count], "links")]
        held[0].wait()
        held[0].done()

    def all_reduce() -> None:
        total.fill_(1.0)
        comm.all_reduce(total, Purpose.REDUCE_GRADIENTS, "links").wait()

    def send() -> None:
        if rank == 0:
            comm.send(full, 1, Purpose.SEND_ACTIVATIONS, "links").wait()
        elif rank == 1:
            comm.receive(scratch, 0, Purpose.SEND_ACTIVATIONS, "links").wait()

    def broadcast() -> None:
        total.fill_(float(rank))
        comm.broadcast(total, "links", source=1)

    counts, sent = [slice_numel] * ranks, 4.0 * slice_numel * (ranks - 1)
    gather = Purpose.GATHER_PARAMETERS
    right_gather = lambda: bool(torch.equal(full, whole))  # noqa: E731
    sent_uneven = lambda: all(bool((full[bounds[r] : bounds[r + 1]] == r).all()) for r in range(ranks))  # noqa: E731
    return {
        "gather": (lambda: comm.gather(full, own, gather, "links").wait(), right_gather, sent),
        "gather, uneven": (lambda: comm.gather(full, uneven, gather, "links", bounds=bounds).wait(), sent_uneven, sent),
        "exchange": (exchange, lambda: all(bool((copy == rank).all()) for copy in held[0].copies), sent),
        "all-to-all": (
            lambda: comm.all_to_all(into, rows, counts, counts, Purpose.SEND_ACTIVATIONS, "links").wait(),
            lambda: bool(torch.equal(into.flatten(), whole)),
            sent,
        ),
        "all-reduce": (all_reduce, lambda: bool((total == ranks).all()), 2 * sent),
        "broadcast": (broadcast, lambda: bool((total == 1).all()), 4.0 * numel),
        "send": (send, lambda: rank != 1 or bool(torch.equal(scratch, full)), 4.0 * numel),
    }


def rank_part(device: str, largest: int) -> None:
    """One rank: all collectives by size."""
    import torch

    import zeroshard as zs
    from zeroshard.comm.collectives import Comm
    from zeroshard.platform import accelerator

    torch.set_num_threads(1)
    mesh = zs.init_mesh(timeout=TIMEOUT, device=device)
    comm, rows, size = Comm(mesh), [], SMALLEST
    while size <= largest:
        numel = size // 4 // mesh.ranks * mesh.ranks
        for name, (run, right, sent) in collectives(comm, numel).items():
            run()
            good, walls = right(), []
            for _ in range(TIMES):
                accelerator.synchronize(mesh.device)
                comm.agree_on(None, "all are there")
                began = time.perf_counter()
                run()
                accelerator.synchronize(mesh.device)
                walls.append(time.perf_counter() - began)
            found = comm.agree_on([statistics.median(walls), good], f"figures of {name}")
            seconds = max(wall for wall, _ in found)
            rows.append({"collective": name, "bytes": 4 * numel, "seconds": seconds, "gb_s": sent / seconds / 1e9,
                         "right": all(good for _, good in found)})  # fmt: skip
        size *= 8
    link = link_of(accelerator.title(mesh.device), accelerator.total_memory(mesh.device))
    answer({"rows": rows, "link_gb_s": link})


def link_of(title: str | None, memory: int | None) -> float | None:
    """GB/s of the vendor's link between two such GPUs, in one direction; None for one that is not known by name."""
    from zeroshard.doctor.presets import card_of
    from zeroshard.planner.search.this_machine import nearest_preset

    name = nearest_preset(title, memory or 0) if title else None
    return card_of(name).inside_gbytes if name else None


def main() -> None:
    """Launch, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--largest", type=int, default=LARGEST)
    parser.add_argument("--json")
    parser.add_argument("--launched", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.launched:
        rank_part(options.launched[0], int(options.launched[1]))
        return
    found: Row = launch(__file__, ["--launched", options.device, str(options.largest)], options.ranks)[0]
    link = found["link_gb_s"]
    print(f"{options.ranks} ranks; the link has {f'{link:g} GB/s' if link else 'no known rate'} in one direction")
    for row in found["rows"]:
        share = f"{100 * row['gb_s'] / link:5.1f} % of the link" if link else ""
        wrong = "" if row["right"] else "  WRONG RESULT"
        rate = f"{1e3 * row['seconds']:9.3f} ms {row['gb_s']:8.2f} GB/s"
        print(f"{row['collective']:15} {row['bytes']:12,} bytes {rate}  {share}{wrong}".rstrip())
    keep({**circumstances(), "ranks": options.ranks, "device": options.device, **found}, options.json)
    sys.exit(not all(row["right"] for row in found["rows"]))


if __name__ == "__main__":
    main()
