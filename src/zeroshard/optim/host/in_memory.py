"""Updates of torch.optim.Adam and AdamW in memory on CPUs: the kernel of offloaded updates, under torch's own object.

[Note: one Adam] An update in memory and one of an offloaded slice are the same call, so both have the same bits, on
every processor. The optimizer stays torch's: its groups, hooks, schedules and states ("step", "exp_avg", "exp_avg_sq").
Only the arithmetic of a group is replaced, where torch leaves the choice of a loop to itself. With `foreach=False` (or
True, or `fused=True`) in a group the user has chosen one of torch's loops, and it runs.
"""

import itertools
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.nn import Parameter
from torch.optim import Adam, AdamW, Optimizer

from zeroshard.optim.host.adam import Scalars, fp32_update
from zeroshard.optim.host.devices import on_cpus
from zeroshard.optim.host.host_states import lacks

Kind = TypeVar("Kind", bound=Optimizer)


def fast_on_cpus(optimizer: Kind) -> Kind:
    """Let a torch.optim.Adam or AdamW update its fp32 parameters on CPUs by the kernel ([Note: one Adam]).

    An engine does so with the optimizer that it is given. In a plain loop this gives the engine's bits, and its speed:
    `optimizer = zs.optim.fast_on_cpus(torch.optim.AdamW(model.parameters()))`.

    Returns:
        The optimizer itself; one of another class, a subclass too, is left as it is.
    """
    if type(optimizer) in (Adam, AdamW) and "_init_group" not in vars(optimizer):
        optimizer._init_group = _Groups(optimizer)  # type: ignore[attr-defined]
    return optimizer


class _Groups:
    """In the place of `_init_group`, by which torch's `step` collects the tensors of a group before it updates them.

    Those that the kernel updates are not there for torch afterwards.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._collect = weakref.WeakMethod(optimizer._init_group)  # type: ignore[attr-defined]  # or it were in a ring

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
    """Whether the kernel can update them in memory: plain and dense, on a CPU, of one shape."""
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
    """The same traffic and no memory beside, by torch's fused operation on tensors without values."""
    parameter, gradient, exp_avg, exp_avg_sq, step = ([tensor] for tensor in tensors)
    beta1, beta2 = group["betas"]
    fused = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
    fused(
        parameter, gradient, exp_avg, exp_avg_sq, [], step, lr=float(group["lr"]), beta1=beta1, beta2=beta2,
        weight_decay=group["weight_decay"], eps=group["eps"], amsgrad=False, maximize=False,
    )  # fmt: skip
