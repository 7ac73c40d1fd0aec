"""Measurement of a chain, layer by layer, with only one layer's weights in memory at a time."""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from zeroshard.pipeline.cut.chain import Chain
from zeroshard.pipeline.cut.layers import Layer
from zeroshard.pipeline.cut.placeholders import stand_in
from zeroshard.pipeline.partition.profile import LayerCost
from zeroshard.platform import accelerator

REPEATS = 5


def measure(
    model: nn.Module,
    chain: Chain,
    forward: Callable[[], Any],
    device: torch.device,
    repeats: int = REPEATS,
    now: Callable[[], float] = time.perf_counter,
) -> list[LayerCost]:
    """Costs of each layer on this machine: medians of `repeats` forwards and backwards after one to warm up.

    Layers on the meta device are given random weights for the measurement.

    Args:
        forward: runs the model on a microbatch on `device`, down to the loss.
        now: seconds of the clock to measure by.
    """
    costs = []
    others = partial(stand_in, chain.frames, lambda parameter: parameter.device.type != device.type, device)
    with accelerator.forked_random([device]), _real_buffers(model, device):
        for layer in chain.layers:
            with others():
                hidden = chain.boundary(layer.number, forward) if layer.number else None
            with _real_parameters(chain, layer, device) as parameters, others():
                costs.append(_Measurement(chain, layer, forward, parameters, hidden, (device, now)).of(repeats))
    return costs


class _Measurement:
    """The runs of one layer."""

    def __init__(
        self,
        chain: Chain,
        layer: Layer,
        forward: Callable[[], Any],
        parameters: list[nn.Parameter],
        hidden: Tensor | None,
        place: tuple[torch.device, Callable[[], float]],
    ) -> None:
        self._chain, self._layer, self._forward = chain, layer, forward
        self._device, self._now = place
        self._parameters = [p for p in parameters if p.requires_grad]
        self._hidden = None if hidden is None else torch.randn(hidden.shape, device=hidden.device).to(hidden.dtype)
        self._weights = {p.untyped_storage()._cdata for p in parameters}
        self._saved: dict[int, int] = {}

    def of(self, repeats: int) -> LayerCost:
        layer = self._layer
        with saved_tensors_hooks(self._count, lambda saved: saved):
            output, _, _ = self._once()
        runs = [self._once()[1:] for _ in range(repeats)]
        nbytes = sum(leaf.nbytes for leaf in tree_leaves(output) if isinstance(leaf, Tensor))
        parameter_bytes = sum(p.numel() * p.element_size() for p in layer.parameters.values())
        forward, backward = (statistics.median(times) for times in zip(*runs, strict=True))
        return LayerCost(layer.name, forward, backward, nbytes, sum(self._saved.values()), parameter_bytes)

    def _once(self) -> tuple[Any, float, float]:
        """The output, and the seconds of one forward and one backward."""
        number = self._layer.number
        hidden = None if self._hidden is None else self._hidden.detach().requires_grad_()
        accelerator.synchronize(self._device)
        start = self._now()
        output = self._chain.run(number, number + 1, self._forward, hidden, by_example=True)
        accelerator.synchronize(self._device)
        middle = self._now()
        ends = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if ends:  # not torch.autograd.grad, which a re-entrant torch.utils.checkpoint in the layer refuses
            torch.autograd.backward(ends, [torch.ones_like(end) for end in ends])
        accelerator.synchronize(self._device)
        end = self._now()
        for parameter in self._parameters:
            parameter.grad = None
        return output, middle - start, end - middle

    def _count(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._weights:
            self._saved[storage._cdata] = storage.nbytes()
        return tensor


@contextmanager
def _real_parameters(chain: Chain, layer: Layer, device: torch.device) -> Iterator[list[nn.Parameter]]:
    """Give a layer real weights on the device inside."""
    changed, real = [], []
    for parameter in layer.parameters.values():
        values = torch.randn(parameter.shape) * 0.02 if parameter.is_meta else parameter.detach()
        copy = nn.Parameter(values.to(device, parameter.dtype), requires_grad=parameter.requires_grad)
        real.append(copy)
        for module, name in list(chain.sites(parameter)):
            changed.append((module, name, parameter))
            module._parameters[name] = copy
    try:
        yield real
    finally:
        for module, name, parameter in changed:
            module._parameters[name] = parameter


@contextmanager
def _real_buffers(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Give the model copies of its buffers on the device inside; ones for buffers on meta."""
    changed = []
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            changed.append((module, name, buffer))
            real = torch.ones_like(buffer, device=device) if buffer.is_meta else buffer.to(device, copy=True)
            module._buffers[name] = real
    try:
        yield
    finally:
        for module, name, buffer in changed:
            module._buffers[name] = buffer
