"""The C++ kernel of the host Adam: built at first use, called through ctypes, which releases the GIL."""

import ctypes
from functools import cache
from pathlib import Path

import torch

from zeroshard.errors import OptimizerError
from zeroshard.native import build

SOURCE = Path(__file__).with_name("host_adam.cpp")
FLAGS = (
    "-std=c++17",
    "-O3",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fPIC",
    "-shared",
    "-pthread",
)
ROOTS_MODE = 0x140102  # as torch calls it: VML_HA | VML_FTZDAZ_OFF | VML_ERRMODE_IGNORE
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
        *((name, ctypes.c_void_p) for name in ("roots", "set_threads")),
        ("roots_mode", ctypes.c_int64),
        *((f"{name}_kind", ctypes.c_int32) for name in ("gradient", "master", "exp_avg", "exp_avg_sq", "out")),
        *((name, ctypes.c_float) for name in ("factor", "decay", "l2", "weight1", "beta2", "weight2")),
        *((name, ctypes.c_float) for name in ("root", "eps", "step_size")),
    )


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


@cache
def torch_roots() -> tuple[int | None, int | None, int]:
    """The fields `roots`, `set_threads` and `roots_mode` with which an update takes square roots as torch does.

    Where torch is built with MKL it calls `vmsSqrt`, which is found here; elsewhere it uses the instruction.
    """
    if not torch.backends.mkl.is_available():
        return None, None, 0
    try:
        torch_cpu = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        functions = (torch_cpu.vmsSqrt, torch_cpu.MKL_Set_Num_Threads_Local)
    except (OSError, AttributeError):
        return None, None, 0
    roots, set_threads = (ctypes.cast(function, ctypes.c_void_p).value for function in functions)
    return roots, set_threads, ROOTS_MODE
