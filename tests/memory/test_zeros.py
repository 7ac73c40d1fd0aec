"""Zeroed memory whose pages come with writes."""

import resource
from collections.abc import Callable

import pytest
import torch

from zeroshard.memory import zeros as module
from zeroshard.memory.zeros import LEAST, PAGE, zeros

CPU = torch.device("cpu")


def faults(call: Callable[[], object]) -> int:
    """Pages that a call takes."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    call()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("more", [-1, 0, 1, 3001])
def test_used_memory_is_zero_again(dtype: torch.dtype, more: int) -> None:
    """Also where the allocator gives memory that was written before, and the pages at both ends."""
    numel = LEAST // dtype.itemsize + more
    for _ in range(3):
        buffer = zeros(numel, dtype, CPU)
        assert buffer.shape == (numel,) and buffer.dtype is dtype and not buffer.any()
        buffer.fill_(1)
        del buffer
        torch.empty(numel, dtype=dtype).fill_(1)


def test_pages_come_with_writes() -> None:
    pages = 2**26 // PAGE
    kept: list[torch.Tensor] = []
    assert faults(lambda: kept.append(zeros(2**26, torch.uint8, CPU))) < pages // 8
    assert faults(lambda: kept[0].fill_(1)) > pages // 600  # huge pages have 512


def test_all_is_written_where_the_kernel_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_madvise", lambda: lambda start, nbytes, advice: -1)
    torch.empty(4 * LEAST, dtype=torch.uint8).fill_(1)
    assert not zeros(4 * LEAST, torch.uint8, CPU).any()
    assert zeros(4 * LEAST, torch.uint8, torch.device("meta")).is_meta
