"""Savers in a list: the first that takes a tensor has it, and equal views are stored once."""

from typing import Any

import pytest
import torch

from zeroshard.saved.kept import Kept
from zeroshard.saved.savers import Savers
from zeroshard.saved.storages import ViewHandle, Views


class Doubles:
    """A saver that takes tensors of one length, and stores twice their values."""

    moves, how, varies = True, "doubled", False

    def __init__(self, length: int) -> None:
        self.length, self.settled, self.stored = length, 0, 0
        self.views = Views()

    def pack(self, tensor: torch.Tensor) -> Any:
        if tensor.numel() != self.length:
            return None
        handle = self.views.find(tensor)
        if handle is None:
            handle = Doubled(tensor)
            self.stored += 1
            self.views.enter(tensor, handle)
        return handle

    def unpack(self, saved: Any) -> torch.Tensor:
        result: torch.Tensor = saved.twice / 2
        return result

    def settle(self) -> None:
        self.settled += 1


class Doubled(ViewHandle):
    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor)
        self.twice = tensor.detach().double() * 2


class Pins(Doubles):
    """A saver that keeps tensors of one length where they are."""

    def pack(self, tensor: torch.Tensor) -> Any:
        return Kept(tensor) if tensor.numel() == self.length else None


def test_the_first_that_takes_a_tensor_has_it_and_the_rest_is_kept() -> None:
    first, second, both = Doubles(3), Doubles(4), Doubles(4)
    savers = Savers([first, second, both])
    tensors = [torch.randn(n) for n in (3, 4, 5, 4)]
    handles = [savers.pack(tensor) for tensor in tensors]
    assert (first.stored, second.stored, both.stored) == (1, 2, 0)
    assert [isinstance(handle, Kept) for handle in handles] == [False, False, True, False]
    for handle, tensor in zip(handles, tensors, strict=True):
        assert torch.equal(savers.unpack(handle).float(), tensor)


def test_a_saver_can_keep_a_tensor_from_those_behind_it() -> None:
    behind = Doubles(3)
    assert isinstance(Savers([Pins(3), behind]).pack(torch.ones(3)), Kept)
    assert behind.stored == 0


def test_all_settle_and_the_list_moves_if_any_does() -> None:
    keeps, other = Pins(1), Doubles(2)
    keeps.moves = False
    Savers([keeps, other]).settle()
    assert (keeps.settled, other.settled) == (1, 1)
    assert [Savers(each).moves for each in ([], [keeps], [keeps, other])] == [False, False, True]


@pytest.mark.parametrize("other", ["same", "offset", "shape", "stride", "dtype", "version", "storage"])
def test_only_equal_views_are_stored_once(other: str) -> None:
    """Also where the bytes are the same: a transposed view has other values at the same place."""
    saver, whole = Doubles(16), torch.randn(17)
    tensor = whole[:16].view(4, 4)
    handles = [saver.pack(tensor)]
    if other == "version":
        whole.add_(0)
    again = {
        "offset": whole[1:].view(4, 4),
        "shape": tensor.view(2, 8),
        "stride": tensor.t(),
        "dtype": tensor.view(torch.int32),
        "storage": tensor.clone(),
    }.get(other, whole[:16].view(4, 4))
    handles.append(saver.pack(again))
    assert saver.stored == (1 if other == "same" else 2)
    assert torch.equal(saver.unpack(handles[0]), tensor.double())
    assert torch.equal(saver.unpack(handles[1]), again.double())


def test_a_view_is_forgotten_with_its_handle_and_its_address_is_not_given_out_before() -> None:
    saver = Doubles(16)
    handle = saver.pack(torch.randn(16))  # which nobody else holds
    others = [saver.pack(torch.full((16,), float(n))) for n in range(50)]
    assert saver.stored == 51
    assert [saver.unpack(each)[0].item() for each in others] == [*range(50)]
    del handle, others
    assert len(saver.views._handles) == 0
