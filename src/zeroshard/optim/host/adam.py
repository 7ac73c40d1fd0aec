"""Adam and AdamW on the host, in one pass over memory: the update of ZeRO-Offload (arXiv 2101.06840, section 5.1).

One call takes the gradient as it came from the device, multiplies clipping and loss scale into it, updates master
parameters and moments, and writes the 16-bit parameters that go back. Updates in memory are the same call.

There are two back ends: "c++", a kernel of our own that is built at first use, and "torch", tiles in torch's own
operations, which need no compiler. Their results are the same, bit for bit, on every processor: each operation is
correctly rounded by itself. From those of torch.optim's loops they differ in last places.

[Note: one rounding each] torch fuses some products and sums into one rounding, and where it is built with MKL, as its
wheels for x86 are, its square root is a function of that library, which on some processors is off by a last place for
one number in six. So its bits depend on the processor, and its roots take more time than the rest of the update. Ours
are those of the plain operations in the order of `tiled.update`.
"""

import ctypes
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

from zeroshard.errors import OptimizerError
from zeroshard.optim.host import kernel, tiled
from zeroshard.optim.host.host_states import HostStates, Moment, Scalars, StateSplit, stands_for
from zeroshard.optim.host.moments import BLOCK, Blockwise, code_map

__all__ = [
    "BACKENDS",
    "Blockwise",
    "HostStates",
    "Scalars",
    "StateSplit",
    "adam_update",
    "backend",
    "fp32_update",
    "stands_for",
    "using",
]

BACKENDS = ("c++", "torch")
KINDS = {torch.float32: kernel.FP32, torch.bfloat16: kernel.BF16, torch.float16: kernel.FP16}
PROOF = Scalars.of({"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}, 3, decoupled=False)
_chosen: str | None = None


@torch.no_grad()
def adam_update(
    gradient: Tensor,
    factor: float,
    scalars: Scalars,
    before: HostStates,
    after: HostStates | None,
    out: Tensor | None = None,
    threads: int | None = None,
) -> None:
    """One step of Adam or AdamW on n elements.

    The gradient is widened to fp32 and multiplied by `factor`, in fp32, before anything else. bf16 moments are computed
    in fp32 and rounded to nearest even; 8-bit ones are encoded anew, after the fp32 values have moved the parameters.

    Args:
        gradient: bf16, fp16 or fp32 [n].
        factor: what to multiply the gradient by: clipping over loss scale.
        scalars: the numbers of this step.
        before: the states to read.
        after: the states to write, in the same layout: `before` itself, or others; then `before` stays as it was. None
            for new parameters in `out` alone.
        out: bf16 or fp16 [n], for the new parameters rounded to nearest even, or fp32 if there is no `after`; None if
            they are not wanted, as with a split master, whose `after.master.hi` they are.
        threads: how many threads may work; by default as many as torch uses. The back end in torch uses torch's.

    Raises:
        OptimizerError: tensors of the wrong size, dtype or device.
    """
    _check(gradient, before, after, out)
    if gradient.numel() == 0 or gradient.untyped_storage().device.type == "meta":
        return  # nothing to do, or a rehearsal, whose tensors have no values
    if backend() == "c++":
        update = describe(gradient, factor, scalars, before, after, out)
        kernel.library().zeroshard_adam(ctypes.byref(update), threads or torch.get_num_threads())
    else:
        tiled.update(gradient, factor, scalars, before, after, out)


@torch.no_grad()
def fp32_update(gradient: Tensor, scalars: Scalars, parameter: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
    """As `adam_update`, in place and of fp32 alone, for small tensors too: the caller knows that they fit.

    Args:
        gradient, parameter, exp_avg, exp_avg_sq: fp32 and contiguous on the CPU, of one shape.
    """
    tensors = (parameter, exp_avg, exp_avg_sq)
    if backend() == "c++" and gradient.numel():
        update = kernel.KernelUpdate.in_fp32(gradient.numel(), gradient.data_ptr(), [t.data_ptr() for t in tensors])
        for name in Scalars.__slots__:
            setattr(update, name, getattr(scalars, name))
        kernel.library().zeroshard_adam(ctypes.byref(update), torch.get_num_threads())
    else:
        states = HostStates(*(tensor.view(-1) for tensor in tensors))
        tiled.update(gradient.view(-1), 1.0, scalars, states, states)


def backend() -> str:
    """The back end in use: the one that `using` says, else the first that works on this machine."""
    return _chosen or _first()


@contextmanager
def using(name: str) -> Iterator[None]:
    """Let a back end be used inside the block, whatever the machine has; for tests and benchmarks."""
    global _chosen
    before, _chosen = _chosen, name
    try:
        yield
    finally:
        _chosen = before


@cache
def _first() -> str:
    """The first back end that works here; a warning says why it is not the kernel."""
    try:
        kernel.library()
        _prove()
        return "c++"
    except OptimizerError as error:
        warnings.warn(f"Adam's updates on CPUs run in torch's operations, which are slower: {error}", stacklevel=4)
        return "torch"


def _prove() -> None:
    """Compare one update by the kernel with one in torch's operations.

    Raises:
        OptimizerError: they differ in a bit.
    """
    random = torch.Generator().manual_seed(0)
    values = torch.randn(4, 1003, generator=random, dtype=torch.float32, device="cpu")
    gradient, master, exp_avg, exp_avg_sq = values
    before = HostStates(master, exp_avg, exp_avg_sq.square())
    ours, plain = (HostStates(*(torch.empty_like(master) for _ in HostStates.__slots__)) for _ in range(2))
    kernel.library().zeroshard_adam(ctypes.byref(describe(gradient, 0.5, PROOF, before, ours)), 1)
    tiled.update(gradient, 0.5, PROOF, before, plain)
    if not all(torch.equal(getattr(ours, name), getattr(plain, name)) for name in HostStates.__slots__):
        raise OptimizerError("On this machine the kernel's results are not those of plain operations, bit for bit.")


def describe(
    gradient: Tensor,
    factor: float,
    scalars: Scalars,
    before: HostStates,
    after: HostStates | None,
    out: Tensor | None = None,
) -> kernel.KernelUpdate:
    """The update as the kernel takes it; the tensors must outlive it."""
    names = ("master", "exp_avg", "exp_avg_sq")
    written = {} if after is None else {f"new_{name}": _values(getattr(after, name)) for name in names}
    if after is None and out is not None and out.dtype == torch.float32:
        written, out = {"new_master": _values(out)}, None
    coded = any(isinstance(getattr(before, name), Blockwise) for name in names)
    signed, unsigned = (_map(s) if coded else kernel.Map() for s in (True, False))
    return kernel.KernelUpdate(
        n=gradient.numel(),
        gradient=gradient.data_ptr(),
        out=None if out is None else out.data_ptr(),
        gradient_kind=KINDS[gradient.dtype],
        out_kind=kernel.NONE if out is None else KINDS[out.dtype],
        signed_map=signed,
        unsigned_map=unsigned,
        factor=factor,
        **{name: _values(getattr(before, name)) for name in names},
        **written,
        **{f"{name}_kind": _kind(getattr(before, name)) for name in names},
        **{name: getattr(scalars, name) for name in Scalars.__slots__},
    )


def _map(signed: bool) -> kernel.Map:
    tables = code_map(signed)
    return kernel.Map(tables.values.data_ptr(), tables.bounds.data_ptr(), tables.lowest.data_ptr())


def _values(vector: Tensor | StateSplit | Moment) -> kernel.Values:
    if isinstance(vector, StateSplit):
        return kernel.Values(vector.hi.data_ptr(), vector.lo.data_ptr())
    if isinstance(vector, Blockwise):
        return kernel.Values(vector.codes.data_ptr(), vector.scales.data_ptr())
    return kernel.Values(vector.data_ptr(), None)


def _kind(vector: Tensor | StateSplit | Moment) -> int:
    if isinstance(vector, StateSplit):
        return kernel.SPLIT
    if isinstance(vector, Blockwise):
        return kernel.SIGNED if vector.signed else kernel.UNSIGNED
    return KINDS[vector.dtype]


def _check(gradient: Tensor, before: HostStates, after: HostStates | None, out: Tensor | None) -> None:
    """The kernel trusts what it is given, so nothing wrong may reach it."""
    n = gradient.numel()
    half, full = (torch.bfloat16, torch.float16), (torch.float32,)
    _check_one("the gradient", gradient, n, half + full)
    if out is not None:
        _check_one("out", out, n, half if after is not None else half + full)
    for states in (before,) if after is None else (before, after):
        if isinstance(states.master, StateSplit):
            _check_one("the master's upper half", states.master.hi, n, (torch.bfloat16,))
            _check_one("the master's lower half", states.master.lo, n, (torch.int16,))
        else:
            _check_one("the master", states.master, n, full)
        for name, moment, signed in (("exp_avg", states.exp_avg, True), ("exp_avg_sq", states.exp_avg_sq, False)):
            if isinstance(moment, Tensor):
                _check_one(name, moment, n, (*full, torch.bfloat16))
                continue
            _check_one(f"the codes of {name}", moment.codes, n, (torch.uint8,))
            _check_one(f"the scales of {name}", moment.scales, math.ceil(n / BLOCK), full)
            if moment.signed is not signed:
                raise OptimizerError(f"{name} has signed={moment.signed}; it needs signed={signed}.")
    if after is None and out is None:
        raise OptimizerError("The update writes nothing: it has neither states to write nor `out`. Pass one of them.")
    if after and any(_kind(getattr(before, name)) != _kind(getattr(after, name)) for name in HostStates.__slots__):
        raise OptimizerError("States before and after an update differ in layout; give both the same dtypes.")
    if out is not None and isinstance(before.master, StateSplit):
        raise OptimizerError("A split master leaves nothing for `out`: its upper half is the parameter. Pass no `out`.")


def _check_one(name: str, tensor: Tensor, n: int, dtypes: tuple[torch.dtype, ...]) -> None:
    fine = tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.shape == (n,) and tensor.dtype in dtypes
    if not fine:
        found = f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
        contiguous = "" if tensor.is_contiguous() else ", not contiguous"
        raise OptimizerError(
            f"{name} is {found}{contiguous}; a host update of {n} elements needs a contiguous vector of as many on the "
            f"CPU, of {' or '.join(map(str, dtypes))}."
        )
