"""The host Adam in torch's own operations, which need no compiler: tile by tile, so that a tile stays in cache."""

import torch
from torch import Tensor

from zeroshard.offload.host_states import HostStates, Moment, Scalars, StateSplit
from zeroshard.offload.moments import Blockwise

TILE = 2**18  # elements


def update(
    gradient: Tensor, factor: float, scalars: Scalars, before: HostStates, after: HostStates, out: Tensor | None = None
) -> None:
    """As `host_adam.adam_update`."""
    n = gradient.numel()
    scratch = gradient.new_empty(2, min(TILE, n), dtype=torch.float32)
    for start in range(0, n, TILE):
        stop = min(start + TILE, n)
        old, new = before.part(start, stop), after.part(start, stop)
        p = opened(old.master, new.master)
        m, v = opened(old.exp_avg, new.exp_avg), opened(old.exp_avg_sq, new.exp_avg_sq)
        g, denominator = scratch[:, : stop - start]
        g.copy_(gradient[start:stop]).mul_(factor)
        if scalars.decay != 1.0:
            p.mul_(scalars.decay)
        if scalars.l2:
            g.add_(p, alpha=scalars.l2)
        m.lerp_(g, scalars.weight1)
        v.mul_(scalars.beta2).addcmul_(g, g, value=scalars.weight2)
        torch.sqrt(v, out=denominator).div_(scalars.root).add_(scalars.eps)
        p.addcdiv_(m, denominator, value=-scalars.step_size)
        for values, place in ((p, new.master), (m, new.exp_avg), (v, new.exp_avg_sq)):
            close(values, place)
        if out is not None:
            out[start:stop].copy_(p)


def opened(old: Tensor | StateSplit | Blockwise, new: Tensor | StateSplit | Blockwise) -> Tensor:
    """The values of `old` in fp32, to be updated in place: in `new` itself where that is fp32."""
    if isinstance(old, StateSplit):
        return old.values()
    if isinstance(old, Blockwise):
        return old.decode()
    if isinstance(new, Tensor) and new.dtype == torch.float32:
        return new if new.data_ptr() == old.data_ptr() else new.copy_(old)
    return old.float()


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
