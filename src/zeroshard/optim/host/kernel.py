"""The C++ kernel of the host Adam: built at first use, called through ctypes, which releases the GIL."""

import ctypes
import platform
from collections.abc import Sequence
from functools import cache

from zeroshard.errors import OptimizerError
from zeroshard.kernels import build

SOURCE = build.SOURCES / "host_adam.cpp"
FLAGS = (
    "-std=c++17",
    "-O3",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fPIC",
    "-shared",
    "-pthread",
    # compilers prefer half of a vector with AVX-512, for the clock of its first processors; memory is the limit here
    *(("-mprefer-vector-width=512",) if platform.machine() in ("x86_64", "AMD64") else ()),
)
NONE, FP32, BF16, FP16, SPLIT, SIGNED, UNSIGNED = range(7)


class Values(ctypes.Structure):
    """A vector as the kernel knows it: data, and remainders or scales."""

    _fields_ = (("data", ctypes.c_void_p), ("rest", ctypes.c_void_p))


class Map(ctypes.Structure):
    """An 8-bit map: three tables."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("values", "bounds", "lowest"))


class KernelUpdate(ctypes.Structure):
    """One update; field by field the struct of the same name in the source."""

    _fields_ = (
        ("n", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("gradient", "out")),
        *((name, Values) for name in ("master", "exp_avg", "exp_avg_sq")),
        *((f"new_{name}", Values) for name in ("master", "exp_avg", "exp_avg_sq")),
        *((f"{name}_map", Map) for name in ("signed", "unsigned")),
        *((f"{name}_kind", ctypes.c_int32) for name in ("gradient", "master", "exp_avg", "exp_avg_sq", "out")),
        *((name, ctypes.c_float) for name in ("factor", "decay", "l2", "beta1", "weight1")),
        *((name, ctypes.c_float) for name in ("beta2", "weight2", "eps", "step_size")),
    )

    @classmethod
    def in_fp32(cls, n: int, gradient: int, states: Sequence[int]) -> "KernelUpdate":
        """One of n elements in place, all in fp32, without the numbers of the step.

        Args:
            gradient: the address of the gradient.
            states: those of parameters, first and second moment.
        """
        update = cls(n=n, gradient=gradient, gradient_kind=FP32, master_kind=FP32, factor=1.0)
        update.exp_avg_kind = update.exp_avg_sq_kind = FP32
        update.master.data = update.new_master.data = states[0]
        update.exp_avg.data = update.new_exp_avg.data = states[1]
        update.exp_avg_sq.data = update.new_exp_avg_sq.data = states[2]
        return update


@cache
def library() -> ctypes.CDLL:
    """The kernel, built if no earlier process has done so.

    Raises:
        OptimizerError: there is no C++ compiler, or it fails.
    """
    try:
        kernel = build.library(SOURCE, FLAGS)
    except OSError as error:
        raise OptimizerError(str(error)) from error
    for function in (kernel.zeroshard_adam, kernel.zeroshard_traffic):
        function.argtypes, function.restype = [ctypes.POINTER(KernelUpdate), ctypes.c_int32], None
    return kernel
