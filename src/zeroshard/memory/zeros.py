"""Zeroed memory on the CPU whose pages are taken when they are first written.

torch.zeros writes every page of a new buffer. A buffer that is filled soon after, from a file or by a reduction, would
be written twice, and one that is not used until the first step takes its pages long before. The ledger counts a buffer
in full from the moment at which it is made.

[Note: pages come with writes] The kernel gives zeroed pages to memory that it has taken back (madvise with
MADV_DONTNEED, for private anonymous memory, of which torch's allocator on the CPU is made). So whole pages of a buffer
are handed back, which costs nothing while they are new, and the bytes before and after them are written. Where the
kernel refuses, as for locked memory, all are written.
"""

import ctypes
import functools
import mmap
from collections.abc import Callable

import torch

LEAST = 2**20  # bytes below which writing costs less than the call
PAGE = mmap.PAGESIZE


def zeros(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A 1-D tensor of `numel` zeros, as torch.zeros gives it; see [Note: pages come with writes]."""
    nbytes = numel * dtype.itemsize
    if device.type != "cpu" or nbytes < LEAST:
        return torch.zeros(numel, dtype=dtype, device=device)
    tensor = torch.empty(numel, dtype=dtype, device=device)
    if type(tensor) is not torch.Tensor or tensor.untyped_storage().device.type != "cpu":
        return tensor.zero_()  # of a rehearsal, without values
    start, stop = tensor.data_ptr(), tensor.data_ptr() + nbytes
    first, last = -(-start // PAGE) * PAGE, stop // PAGE * PAGE
    if not _hand_back(first, last - first):
        return tensor.zero_()
    raw = tensor.view(torch.uint8)
    raw[: first - start].zero_()
    raw[last - start :].zero_()
    return tensor


def _hand_back(start: int, nbytes: int) -> bool:
    """Give whole pages back to the kernel, which reads them as zeros from then on; False where it refuses."""
    return _madvise()(start, nbytes, mmap.MADV_DONTNEED) == 0


@functools.cache
def _madvise() -> Callable[[int, int, int], int]:
    """The C library's function; one that refuses, where there is none."""
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is None or not hasattr(mmap, "MADV_DONTNEED"):
        return lambda start, nbytes, advice: -1
    madvise.argtypes, madvise.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
    return madvise  # type: ignore[no-any-return]  # of ctypes
