"""The host Adam in torch's own operations, which need no compiler, on any device: tile by tile, to stay in cache."""

import torch
from torch import Tensor

from zeroshard.optim.host.states import Blockwise, HostStates, Moment, Scalars, StateSplit
from zeroshard.platform.accelerator import on_cpus

TILE = 2**16  # elements, on CPUs
LARGE = 2**18  # on devices, where each operation has a fixed cost


def update(
    gradient: Tensor,
    factor: float,
    scalars: Scalars,
    before: HostStates,
    after: HostStates | None,
    out: Tensor | None = None,
) -> None:
    """As `adam.adam_update`, on any device, and in fp64 for an fp64 master.

    Operations whose number of roundings depends on the platform (`lerp_`, `addcmul_`, `add_` with a factor) are not
    used, and square roots are taken in fp64: torch's in fp32 are not always correctly rounded.
    """
    n, tile = gradient.numel(), TILE if on_cpus(gradient) else LARGE
    dtype = (
        torch.float64 if isinstance(before.master, Tensor) and before.master.dtype == torch.float64 else torch.float32
    )
    scratch = gradient.new_empty(2, min(tile, n), dtype=dtype)
    for start in range(0, n, tile):
        stop = min(start + tile, n)
        old = before.part(start, stop)
        new = old if after is before else None if after is None else after.part(start, stop)
        p, m, v = (opened(getattr(old, name), getattr(new, name, None), dtype) for name in HostStates.__slots__)
        g, term = scratch[:, : stop - start]
        g.copy_(gradient[start:stop])
        if factor != 1.0:
            g.mul_(factor)
        if scalars.l2:
            g.add_(torch.mul(p, scalars.l2, out=term))
        if scalars.beta1 >= 0.5:
            m.add_(torch.sub(g, m, out=term).mul_(scalars.weight1))
        else:
            m.sub_(g).mul_(scalars.beta1).add_(g)
        v.mul_(scalars.beta2).add_(torch.mul(g, scalars.weight2, out=term).mul_(g))
        g.copy_(v.to(torch.float64, copy=True).sqrt_()).add_(scalars.eps)
        p.mul_(scalars.decay).sub_(torch.mul(m, scalars.step_size, out=term).div_(g))
        if new is not None:
            for values, place in ((p, new.master), (m, new.exp_avg), (v, new.exp_avg_sq)):
                close(values, place)
        if out is not None:
            out[start:stop].copy_(p)


def opened(
    old: Tensor | StateSplit | Blockwise, new: Tensor | StateSplit | Blockwise | None, dtype: torch.dtype
) -> Tensor:
    """The values of `old` in a dtype, to be updated in place: in `new` if it has that dtype, else in a copy."""
    if isinstance(old, StateSplit):
        return old.values()
    if isinstance(old, Blockwise):
        return old.decode().to(dtype)
    if isinstance(new, Tensor) and new.dtype == dtype:
        return new if new is old else new.copy_(old)
    return old.to(dtype, copy=True)


def close(values: Tensor, place: Tensor | StateSplit | Moment) -> None:
    """Write updated values to `place`, unless they were updated there."""
    if isinstance(place, StateSplit | Blockwise):
        place.write(values.float())
    elif place.dtype != values.dtype:
        place.copy_(values)
