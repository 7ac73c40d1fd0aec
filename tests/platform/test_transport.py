"""Messages of devices over gloo, which go through host memory; what the engine sends else is tested by its results."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from pool import Pool
from torch.utils._python_dispatch import TorchDispatchMode

import zeroshard as zs
from zeroshard.platform import transport
from zeroshard.platform.rehearsed import Rehearsal


def swap(mesh: zs.Mesh) -> tuple[bool, list[float]]:
    """Send a tensor to the other rank, and take its; whether the message is in place before the wait for it."""
    with patch.object(transport, "is_accelerator", lambda device: True):  # the CPU stands in for a GPU
        network = transport.Network(mesh.rank, mesh.ranks, mesh.device)
        other, into = 1 - mesh.rank, torch.zeros(3)
        receiving = network.receive(into, other, 7, mesh.gathers)
        sending = network.send(torch.arange(3.0) + 10 * mesh.rank, other, 7, mesh.gathers)
        assert receiving is not None and sending is not None
        early = bool(into.any())
        sending.wait()
        receiving.wait()
        assert receiving.is_completed()
        return early, into.tolist()


def test_a_message_lands_on_the_host_and_is_copied_by_the_wait(pool: Pool) -> None:
    assert pool.run(swap, 2) == [(False, [10.0, 11.0, 12.0]), (False, [0.0, 1.0, 2.0])]


class Counted(TorchDispatchMode):
    """Counts the operations inside."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("even", [True, False])
def test_an_exchange_that_sends_all_slices_at_once_makes_no_view_for_each_of_many_ranks(even: bool) -> None:
    """A rehearsal of one of 3,072 ranks with GPUs would otherwise take most of its time for them."""
    counts = []
    for ranks in (16, 64):
        network = Rehearsal(range(ranks), accelerated=True).network(3, ranks, torch.device("cpu"))
        bounds = None if even else [*range(0, 2 * ranks, 2), 2 * ranks]
        full = torch.arange(2.0 * ranks)
        with Counted() as counted:
            _, arrival = network.exchange(full, None, torch.empty, bounds)
        counts.append(counted.count)
        assert [copy.shape for copy in arrival.copies] == [(2,)] * ranks
    assert counts[0] == counts[1]
