"""Adam and AdamW on the host, in one pass over memory: the update of ZeRO-Offload (2101.06840, section 5.1).

One call takes the device's gradient, multiplies clipping and loss scale into it, updates master parameters and
moments, and writes the 16-bit parameters for the device.

Two back ends have the same results, bit for bit, on every processor: "c++", a kernel that is built at first use and
called through ctypes, which releases the GIL; and "torch", tiles in torch's own operations, without a compiler.

[Note: one rounding each] Every operation is correctly rounded by itself, in the order of `tiled.update`. torch fuses
some products and sums into one rounding, and where it is built with MKL its square root is off by a last place on some
processors, for one number in six. So its bits depend on the processor, and its roots cost more than the rest.

[Note: one Adam] Updates in memory (`fast_on_cpus`) and of offloaded slices are the same call, with the same bits. The
optimizer stays torch's: its groups, hooks, schedules and states ("step", "exp_avg", "exp_avg_sq"). Only the arithmetic
of a group is replaced, if the group leaves the choice of a loop to torch; `foreach=False`, `foreach=True` or
`fused=True` in a group choose one of torch's loops.
"""

import ctypes
import itertools
import math
import platform
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.nn import Parameter
from torch.optim import Adam, AdamW, Optimizer

from zeroshard.errors import OptimizerError
from zeroshard.kernels import build
from zeroshard.optim.host import tiled
from zeroshard.optim.host.states import BLOCK, Blockwise, HostStates, Moment, Scalars, StateSplit, code_map, lacks
from zeroshard.platform.accelerator import on_cpus

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
    # compilers prefer 256-bit vectors with AVX-512, for the clock of its first processors; memory is the limit here
    *(("-mprefer-vector-width=512",) if platform.machine() in ("x86_64", "AMD64") else ()),
)
NONE, FP32, BF16, FP16, SPLIT, SIGNED, UNSIGNED = range(7)


class Values(ctypes.Structure):
    """A vector of the kernel: data, and remainders or scales."""

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
        """An update of n elements in place, all in fp32, without the scalars of the step.

        Args:
            gradient: the address of the gradient.
            states: addresses of parameters, first and second moment.
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
        built = build.library(SOURCE, FLAGS)
    except OSError as error:
        raise OptimizerError(str(error)) from error
    for function in (built.zeroshard_adam, built.zeroshard_traffic):
        function.argtypes, function.restype = [ctypes.POINTER(KernelUpdate), ctypes.c_int32], None
    return built


BACKENDS = ("c++", "torch")
KINDS = {torch.float32: FP32, torch.bfloat16: BF16, torch.float16: FP16}
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
        factor: factor on the gradient: clipping over loss scale.
        scalars: the numbers of this step.
        before: the states to read.
        after: the states to write, in the same layout: `before` itself, or others, which leave `before` unchanged; None
            to write only `out`.
        out: bf16 or fp16 [n], for the new parameters rounded to nearest even, or fp32 without `after`; None for a split
            master, whose `after.master.hi` has them, or if they are not needed.
        threads: number of threads of the kernel; by default torch's.

    Raises:
        OptimizerError: tensors of the wrong size, dtype or device.
    """
    _check(gradient, before, after, out)
    if gradient.numel() == 0 or gradient.untyped_storage().device.type == "meta":
        return  # nothing to do, or a rehearsal, whose tensors have no values
    if backend() == "c++":
        update = describe(gradient, factor, scalars, before, after, out)
        library().zeroshard_adam(ctypes.byref(update), threads or torch.get_num_threads())
    else:
        tiled.update(gradient, factor, scalars, before, after, out)


@torch.no_grad()
def fp32_update(gradient: Tensor, scalars: Scalars, parameter: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
    """As `adam_update`, in place and in fp32, without its checks, which are slow for small tensors.

    Args:
        gradient, parameter, exp_avg, exp_avg_sq: fp32 and contiguous on the CPU, of one shape.
    """
    tensors = (parameter, exp_avg, exp_avg_sq)
    if backend() == "c++" and gradient.numel():
        update = KernelUpdate.in_fp32(gradient.numel(), gradient.data_ptr(), [t.data_ptr() for t in tensors])
        for name in Scalars.__slots__:
            setattr(update, name, getattr(scalars, name))
        library().zeroshard_adam(ctypes.byref(update), torch.get_num_threads())
    else:
        states = HostStates(*(tensor.view(-1) for tensor in tensors))
        tiled.update(gradient.view(-1), 1.0, scalars, states, states)


def backend() -> str:
    """The back end in use: of `using`, else the first that works on this machine."""
    return _chosen or _first()


@contextmanager
def using(name: str) -> Iterator[None]:
    """Use a back end inside the block, on any machine; for tests and benchmarks."""
    global _chosen
    before, _chosen = _chosen, name
    try:
        yield
    finally:
        _chosen = before


@cache
def _first() -> str:
    """The first back end that works here; warns if it is not the kernel."""
    try:
        library()
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
    library().zeroshard_adam(ctypes.byref(describe(gradient, 0.5, PROOF, before, ours)), 1)
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
) -> KernelUpdate:
    """The update in the kernel's struct; the tensors must outlive it."""
    names = ("master", "exp_avg", "exp_avg_sq")
    written = {} if after is None else {f"new_{name}": _values(getattr(after, name)) for name in names}
    if after is None and out is not None and out.dtype == torch.float32:
        written, out = {"new_master": _values(out)}, None
    coded = any(isinstance(getattr(before, name), Blockwise) for name in names)
    signed, unsigned = (_map(s) if coded else Map() for s in (True, False))
    return KernelUpdate(
        n=gradient.numel(),
        gradient=gradient.data_ptr(),
        out=None if out is None else out.data_ptr(),
        gradient_kind=KINDS[gradient.dtype],
        out_kind=NONE if out is None else KINDS[out.dtype],
        signed_map=signed,
        unsigned_map=unsigned,
        factor=factor,
        **{name: _values(getattr(before, name)) for name in names},
        **written,
        **{f"{name}_kind": _kind(getattr(before, name)) for name in names},
        **{name: getattr(scalars, name) for name in Scalars.__slots__},
    )


def _map(signed: bool) -> Map:
    tables = code_map(signed)
    return Map(tables.values.data_ptr(), tables.bounds.data_ptr(), tables.lowest.data_ptr())


def _values(vector: Tensor | StateSplit | Moment) -> Values:
    if isinstance(vector, StateSplit):
        return Values(vector.hi.data_ptr(), vector.lo.data_ptr())
    if isinstance(vector, Blockwise):
        return Values(vector.codes.data_ptr(), vector.scales.data_ptr())
    return Values(vector.data_ptr(), None)


def _kind(vector: Tensor | StateSplit | Moment) -> int:
    if isinstance(vector, StateSplit):
        return SPLIT
    if isinstance(vector, Blockwise):
        return SIGNED if vector.signed else UNSIGNED
    return KINDS[vector.dtype]


def _check(gradient: Tensor, before: HostStates, after: HostStates | None, out: Tensor | None) -> None:
    """Refuse tensors that the kernel, which checks nothing, cannot update."""
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


Kind = TypeVar("Kind", bound=Optimizer)


def fast_on_cpus(optimizer: Kind) -> Kind:
    """Make a torch.optim.Adam or AdamW update its fp32 parameters on CPUs by the kernel ([Note: one Adam]).

    An engine does so with its optimizer. In a plain loop this gives the engine's bits, and its speed:
    `optimizer = zs.optim.fast_on_cpus(torch.optim.AdamW(model.parameters()))`.

    Returns:
        The optimizer itself; one of another class, or of a subclass, is left as it is.
    """
    if type(optimizer) in (Adam, AdamW) and "_init_group" not in vars(optimizer):
        optimizer._init_group = _Groups(optimizer)  # type: ignore[attr-defined]
    return optimizer


class _Groups:
    """Replacement of `_init_group`, by which torch's `step` collects the tensors of a group before it updates them.

    The tensors that the kernel has updated are removed from torch's lists.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._collect = weakref.WeakMethod(optimizer._init_group)  # type: ignore[attr-defined]  # no reference cycle

    def __call__(self, group: Mapping[str, Any], *lists: list[Tensor]) -> bool:
        collect = self._collect()
        assert collect is not None  # the optimizer lives, as it calls
        has_complex: bool = collect(group, *lists)
        if lacks(group) is None:
            parameters, gradients, exp_avgs, exp_avg_sqs, _, steps = lists
            kept = [parameters, gradients, exp_avgs, exp_avg_sqs, steps]
            rows = list(zip(*kept, strict=True))
            ours = [all(map(_fp32, row[:-1])) and on_kernel(*row[:-1]) for row in rows]
            _update(group, list(itertools.compress(rows, ours)))
            for each, values in zip(kept, zip(*rows, strict=True), strict=False):
                each[:] = [value for value, taken in zip(values, ours, strict=True) if not taken]
        return has_complex


def on_kernel(*tensors: Tensor) -> bool:
    """Whether the kernel can update the tensors in memory: plain and dense, on a CPU, of one shape."""
    for tensor in tensors:
        plain = type(tensor) in (Tensor, Parameter) or isinstance(tensor, FakeTensor)
        if not plain or not on_cpus(tensor) or tensor.shape != tensors[0].shape:
            return False
        if tensor.layout != torch.strided or not tensor.is_contiguous():
            return False
    return True


def _fp32(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float32


def is_hollow(tensor: Tensor) -> bool:
    """Whether a tensor has no values, as in a rehearsal."""
    return tensor.untyped_storage().device.type == "meta"


def _update(group: Mapping[str, Any], rows: Sequence[Sequence[Tensor]]) -> None:
    known: dict[int, Scalars] = {}
    for parameter, gradient, exp_avg, exp_avg_sq, step in rows:
        if is_hollow(parameter):
            _rehearse(group, parameter, gradient, exp_avg, exp_avg_sq, step)
            continue
        step += 1
        number = int(step.item())
        if number not in known:
            known[number] = Scalars.of(group, number, group["decoupled_weight_decay"])
        fp32_update(gradient, known[number], parameter, exp_avg, exp_avg_sq)
        torch.autograd.graph.increment_version(parameter)  # a backward over old values is refused, as after torch's


def _rehearse(group: Mapping[str, Any], *tensors: Tensor) -> None:
    """The same traffic without further memory, by torch's fused operation on tensors without values."""
    parameter, gradient, exp_avg, exp_avg_sq, step = ([tensor] for tensor in tensors)
    beta1, beta2 = group["betas"]
    fused = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
    fused(
        parameter, gradient, exp_avg, exp_avg_sq, [], step, lr=float(group["lr"]), beta1=beta1, beta2=beta2,
        weight_decay=group["weight_decay"], eps=group["eps"], amsgrad=False, maximize=False,
    )  # fmt: skip
