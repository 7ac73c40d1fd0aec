"""What the planner needs of torch and torch does not promise: all of it in this one file.

Fake tensors have shapes, strides, dtypes and a device, and no values; operations on them work out those of the result.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten
DispatchMode = TorchDispatchMode
DEVICE = torch.ops.prim.device.default  # asked of a fake tensor far more often than anything is computed with it
Packet = Any  # an operator of torch.ops


def _one(tensor: torch.Tensor) -> bool | int | float:
    if tensor.dtype is torch.bool:
        return True
    return 1.0 if tensor.dtype.is_floating_point else 1


# The engine asks about values such that yes, or 1, is what a healthy run would hear.
ANSWERS: dict[Packet, Callable[..., Any]] = {
    aten._local_scalar_dense.default: _one,
    aten.equal.default: lambda *_: True,
    aten.allclose.default: lambda *_: True,
    aten.is_nonzero.default: lambda *_: True,
}


@contextmanager
def fakes() -> Iterator[FakeTensorMode]:
    """Inside, what is made has no values, and what is done to it takes no time; tensors from outside are read so."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        yield mode


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no values."""
    return isinstance(tensor, FakeTensor)


def in_backward() -> bool:
    """Whether autograd runs a backward now."""
    return bool(torch._C._current_graph_task_id() != -1)


def device_of(tensor: torch.Tensor) -> torch.device:
    """The device that a tensor is taken to be on."""
    return tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device


_views: dict[Packet, bool] = {}


def is_view(func: Packet) -> bool:
    """Whether an operator only looks at memory in another way, or allocates it, and computes nothing."""
    if func not in _views:
        name = func._schema.name
        _views[func] = func.is_view or name.startswith(("aten::empty", "aten::new_empty", "aten::detach", "prim"))
    return _views[func]


def flops_of(func: Packet, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Floating-point operations of a matrix multiplication, convolution or attention; 0 of anything else."""
    count = flop_registry.get(func.overloadpacket)
    return int(count(*args, **kwargs, out_val=result)) if count is not None else 0
