"""Messages of devices over gloo, which go through host memory; what the engine sends else is tested by its results."""

from unittest.mock import patch

import torch
from pool import Pool

import zeroshard as zs
from zeroshard.platform import transport


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
