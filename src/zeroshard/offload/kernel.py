"""The C++ kernel of the host Adam: built at first use, called through ctypes, which releases the GIL."""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

from zeroshard.comm.mesh import user_cache
from zeroshard.errors import OptimizerError

SOURCE = Path(__file__).with_name("host_adam.cpp")
COMPILERS = ("c++", "g++", "clang++")
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
NATIVE = ("-march=native", "-mcpu=native")  # the second where the first is not known
PATIENCE = 300.0  # seconds
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


def compiler() -> str | None:
    """The C++ compiler of this machine, if it has one."""
    return next(filter(None, map(shutil.which, COMPILERS)), None)


@cache
def library() -> ctypes.CDLL:
    """The kernel, built if no earlier process has done so.

    Raises:
        OptimizerError: there is no C++ compiler, or it fails.
    """
    command = compiler()
    if command is None:
        raise OptimizerError(f"No C++ compiler was found ({', '.join(COMPILERS)}). Install one.")
    parts = [SOURCE.read_bytes(), " ".join(FLAGS).encode(), _target(command).encode()]
    built = _folder() / f"host_adam-{hashlib.sha256(b'|'.join(parts)).hexdigest()[:16]}.so"
    if not built.exists():
        _build(command, built)
    try:
        kernel = ctypes.CDLL(str(built))
    except OSError as error:
        raise OptimizerError(f"The host Adam's kernel cannot be loaded: {error}. Delete {built}.") from error
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


def _folder() -> Path:
    cache_folder = user_cache() or "~/.cache"
    return Path(cache_folder).expanduser() / "zeroshard"


def _target(compiler: str) -> str:
    """What the kernel's machine code depends on besides source and flags: the compiler and this CPU."""
    cpu = platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        parts = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU implementer", "CPU part")
        lines = info.read_text().split("\n\n")[0].splitlines()
        cpu += "\n".join(line for line in lines if line.split("\t")[0].split(":")[0].strip() in parts)
    return f"{Path(compiler).resolve()} {os.path.getmtime(compiler)} {cpu}"


def _build(compiler: str, built: Path) -> None:
    """Compile into a file of this process's own, then rename: several ranks may build at once."""
    try:
        built.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=built.parent) as folder:
            result = Path(folder) / built.name
            for native in NATIVE:
                command = [compiler, *FLAGS, native, "-o", str(result), str(SOURCE)]
                done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
                if done.returncode == 0:
                    result.rename(built)
                    return
    except (OSError, subprocess.SubprocessError) as error:
        raise OptimizerError(f"The host Adam's kernel could not be built in {built.parent}: {error}.") from error
    raise OptimizerError(f"{compiler} could not build the host Adam's kernel: {done.stderr.strip()[:500]}")
