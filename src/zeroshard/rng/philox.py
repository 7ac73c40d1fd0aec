"""Philox4x32-10, a random number generator without a state (Salmon, Moraes, Dror and Shaw, SC'11, section 3.3).

A block of four 32-bit words is a function of a 64-bit key and a 128-bit counter, so any element of any row can be drawn
without those before it. `blocks` is the definition, in torch's operations, for every device. On a CPU a kernel in C++
computes the same words about eight times as fast; `blocks` replaces it without a compiler, or if a word differs.
"""

import ctypes
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from zeroshard.kernels import build
from zeroshard.platform.accelerator import is_accelerator

ROUNDS, PER_BLOCK, BITS = 10, 4, 32
MASK = 2**BITS - 1
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)  # added to the key after each round: the golden ratio, and sqrt(3) - 1
SOURCE = build.SOURCES / "philox.cpp"
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared")
AT_ONCE = 2**15  # blocks per pass of `random_bits` in torch's operations


@dataclass(frozen=True, slots=True)
class Elements:
    """Elements of several rows, laid out as [outer, rows, runs, inner]: outer x runs runs of each row.

    Attributes:
        first: number of the first run's first element in its row.
        row: number of the first row, below 2^32.
        stride: elements from the start of a run to that of the next; 0 where they lie one after the other.
    """

    outer: int
    rows: int
    inner: int
    first: int = 0
    row: int = 0
    runs: int = 1
    stride: int = 0


def blocks(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four words of each block.

    Args:
        counter: four words per block, int64 tensors of values below 2^32 that broadcast to one shape.
        key: 64 bits.

    Returns:
        int64 tensors of that shape, of values below 2^32.
    """
    c0, c1, c2, c3 = torch.broadcast_tensors(*counter)
    key0, key1 = key & MASK, key >> BITS
    for _ in range(ROUNDS):
        product0, product1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]  # the masks undo wrap-around at 2^64
        c0, c2 = (product1 >> BITS & MASK) ^ c1 ^ key0, (product0 >> BITS & MASK) ^ c3 ^ key1
        c1, c3 = product1 & MASK, product0 & MASK
        key0, key1 = key0 + WEYL[0] & MASK, key1 + WEYL[1] & MASK
    return c0, c1, c2, c3


def random_bits(key: int, step: int, elements: Elements, device: torch.device) -> Tensor:
    """One word per element: word e % 4 of the block whose counter is (e // 4, its upper half, row, step).

    Args:
        key: 64 bits.
        step: modulo 2^32.

    Returns:
        int32 [outer, rows, runs, inner], of which all 32 bits are random.
    """
    if is_accelerator(device):
        return _in_torch(key, step, elements, device)
    out = torch.empty((elements.outer, elements.rows, elements.runs, elements.inner), dtype=torch.int32, device=device)
    if out.untyped_storage().device.type == "meta":
        return out  # a rehearsal, whose tensors have no values
    kernel = _kernel()
    if kernel is None:
        return out.copy_(_in_torch(key, step, elements, device))
    _call(kernel, out, key, step, elements)
    return out


def _in_torch(key: int, step: int, elements: Elements, device: torch.device) -> Tensor:
    outer, rows, runs, inner = elements.outer, elements.rows, elements.runs, elements.inner
    count, length, stride = outer * runs, inner, elements.stride or inner
    if stride == inner:
        count, length = 1, count * inner
    out = torch.empty(rows, count, length, dtype=torch.int32, device=device)
    at_once = max(2, AT_ONCE // max(1, rows))
    longest = (at_once - 1) * PER_BLOCK
    for begin in range(0, length, longest):
        width = min(longest, length - begin)
        several = max(1, at_once // -(-width // PER_BLOCK))
        for run in range(0, count, several):
            part = out[:, run : run + several, begin : begin + width]
            part.copy_(_runs_in_torch(key, step, elements, (elements.first + run * stride + begin, stride), part))
    return out.view(rows, outer, runs, inner).transpose(0, 1).contiguous()


def _runs_in_torch(key: int, step: int, elements: Elements, place: tuple[int, int], like: Tensor) -> Tensor:
    """The words [rows, runs, width] of runs at `place`: the first element of the first run, and their distance."""
    (_, runs, width), (first, stride), device = like.shape, place, like.device
    even = runs == 1 or stride % PER_BLOCK == 0  # whether all runs start at the same word of a block
    skipped = first % PER_BLOCK if even else PER_BLOCK - 1
    rows = torch.arange(elements.row, elements.row + elements.rows, device=device).view(-1, 1, 1) & MASK
    firsts = torch.arange(runs, device=device).mul_(stride).add_(first).view(-1, 1)
    number = firsts // PER_BLOCK + torch.arange(-(-(skipped + width) // PER_BLOCK), device=device)
    found = blocks((number & MASK, number >> BITS, rows, rows.new_tensor(step & MASK)), key)
    words = torch.stack(found, dim=-1).to(torch.int32).flatten(2)
    if even:
        return words[..., skipped : skipped + width]
    own = firsts % PER_BLOCK + torch.arange(width, device=device)
    return words.gather(2, own.expand(len(words), -1, -1))


@cache
def _kernel() -> Callable[..., None] | None:
    """The kernel; None, with a warning, if it cannot be built or its words differ."""
    try:
        function = build.library(SOURCE, FLAGS).zeroshard_philox
        function.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * 6, *[ctypes.c_uint32] * 2, ctypes.c_void_p]
        function.restype = None
        cpu = torch.device("cpu")
        for runs, stride in ((1, 0), (3, 310)):
            elements = Elements(2, 2, 271, first=2**34 - 5, row=2**32 - 1, runs=runs, stride=stride)
            out = torch.empty(2, 2, runs, 271, dtype=torch.int32)
            _call(function, out, 2**63 + 5, 7, elements)
            if not torch.equal(out, _in_torch(2**63 + 5, 7, elements, cpu)):
                raise OSError("On this machine the kernel's words are not those of Philox.")
    except OSError as error:
        warnings.warn(f"Exact random numbers are drawn in torch's operations, which are slower: {error}", stacklevel=4)
        return None
    return function


def _call(kernel: Callable[..., None], out: Tensor, key: int, step: int, elements: Elements) -> None:
    halves = (ctypes.c_uint32 * 2)(key & MASK, key >> BITS)
    stride = elements.stride or elements.inner
    e = elements
    kernel(out.data_ptr(), e.outer, e.rows, e.runs, e.inner, e.first, stride, e.row & MASK, step & MASK, halves)
