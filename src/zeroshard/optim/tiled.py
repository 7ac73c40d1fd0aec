"""The host Adam in torch's own operations, which need no compiler: tile by tile, so that a tile stays in cache."""

import torch
from torch import Tensor

from zeroshard.optim.host_states import HostStates, Moment, Scalars, StateSplit
from zeroshard.optim.moments import Blockwise

TILE = 2**16  # elements


def update(
    gradient: Tensor,
    factor: float,
    scalars: Scalars,
    before: HostStates,
    after: HostStates | None,
    out: Tensor | None = None,
) -> None:
    """As `host_adam.adam_update`.

    Operations that round twice in one place and once in another (`lerp_`, `addcmul_`, `add_` with a factor) are not
    used, and square roots are taken in fp64: those of torch in fp32 are not always correctly rounded.
    """
    n = gradient.numel()
    scratch = gradient.new_empty(2, min(TILE, n), dtype=torch.float32)
    for start in range(0, n, TILE):
        stop = min(start + TILE, n)
        old, new = before.part(start, stop), None if after is None else after.part(start, stop)
        p, m, v = (opened(getattr(old, name), getattr(new, name, None)) for name in HostStates.__slots__)
        g, term = scratch[:, : stop - start]
        g.copy_(gradient[start:stop]).mul_(factor)
        if scalars.l2:
            g.add_(torch.mul(p, scalars.l2, out=term))
        if scalars.beta1 >= 0.5:
            m.add_(torch.sub(g, m, out=term).mul_(scalars.weight1))
        else:
            m.sub_(g).mul_(scalars.beta1).add_(g)
        v.mul_(scalars.beta2).add_(torch.mul(g, scalars.weight2, out=term).mul_(g))
        g.copy_(v.double().sqrt_()).add_(scalars.eps)
        p.mul_(scalars.decay).sub_(torch.mul(m, scalars.step_size, out=term).div_(g))
        if new is not None:
            for values, place in ((p, new.master), (m, new.exp_avg), (v, new.exp_avg_sq)):
                close(values, place)
        if out is not None:
            out[start:stop].copy_(p)


def opened(old: Tensor | StateSplit | Blockwise, new: Tensor | StateSplit | Blockwise | None) -> Tensor:
    """The values of `old` in fp32, to be updated in place: in `new` itself where that is fp32, else in a copy."""
    if isinstance(old, StateSplit):
        return old.values()
    if isinstance(old, Blockwise):
        return old.decode()
    if isinstance(new, Tensor) and new.dtype == torch.float32:
        return new if new.data_ptr() == old.data_ptr() else new.copy_(old)
    return old.to(torch.float32, copy=True)


def close(values: Tensor, place: Tensor | StateSplit | Moment) -> None:
    """Write updated fp32 values where they belong, unless they were updated there."""
    if isinstance(place, StateSplit):
        place.write(values)
    elif isinstance(place, Blockwise):
        made = Blockwise.encode(values, place.signed)
        place.codes.copy_(made.codes)
        place.scales.copy_(made.scales)
    elif place.dtype != torch.float32:
        place.copy_(values)
