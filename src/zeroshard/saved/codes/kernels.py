"""The codes' kernels in C++ (codes.cpp), for tensors on a CPU; each has an equivalent in torch's operations."""

import ctypes
import warnings
from functools import cache

from torch import Tensor

from zeroshard.kernels import build

SOURCE = build.SOURCES / "codes.cpp"
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared")
POINTER, NUMEL, SIZE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
ARGUMENTS = {
    "encode": (SIZE, SIZE, POINTER, NUMEL, POINTER),
    "decode": (SIZE, SIZE, POINTER, NUMEL, POINTER),
    "count": (SIZE, POINTER, NUMEL),
    "to_sparse": (SIZE, POINTER, NUMEL, NUMEL, POINTER, POINTER, POINTER),
    "from_sparse": (SIZE, POINTER, POINTER, POINTER, NUMEL, POINTER),
    "pack_bits": (POINTER, NUMEL, POINTER),
    "unpack_bits": (POINTER, NUMEL, POINTER),
}


class Kernels:
    """The functions of the library; tensors are given by their addresses, and must be contiguous."""

    def __init__(self) -> None:
        library = build.library(SOURCE, FLAGS)
        self._functions = {name: getattr(library, f"zeroshard_{name}") for name in ARGUMENTS}
        for name, function in self._functions.items():
            function.argtypes, function.restype = ARGUMENTS[name], NUMEL if name == "count" else None

    def call(self, name: str, *arguments: Tensor | int) -> int:
        """Call a function; returns the result of "count", else 0."""
        found = self._functions[name](*(a.data_ptr() if isinstance(a, Tensor) else a for a in arguments))
        return int(found or 0)


class RehearsedKernels:
    """Replacement of the kernels for tensors without values: a rehearsal allocates as much as a run."""

    def call(self, name: str, *arguments: Tensor | int) -> int:
        """Compute nothing."""
        return 0


def kernels_for(tensor: Tensor) -> Kernels | RehearsedKernels | None:
    """The kernels, for a tensor on a CPU, unless they cannot be built."""
    if tensor.device.type != "cpu":
        return None
    return RehearsedKernels() if tensor.untyped_storage().device.type == "meta" else _kernels()


@cache
def _kernels() -> Kernels | None:
    try:
        return Kernels()
    except OSError as error:
        warnings.warn(f"Activations are compressed in torch's operations, which are slower: {error}", stacklevel=4)
        return None
