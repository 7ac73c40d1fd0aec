"""Replay: what a forward depends on beside weights and inputs, so that it can be computed again just as it was.

A forward that is recomputed meets the random numbers, the buffers and the plain attributes (`training` among them) that
it met the first time, and what it writes into buffers and attributes the second time is dropped: statistics and
counters stand after a step as after one forward of each microbatch, in order (Chen et al., 1604.06174, leave that to
the framework). What it depends on besides shows in its values ([Note: other values]).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from zeroshard.errors import PlanError
from zeroshard.memory.ledger import Category, Ledger
from zeroshard.platform import accelerator
from zeroshard.platform.accelerator import is_accelerator
from zeroshard.replay.attributes import PlainAttributes
from zeroshard.replay.generators import PYTHON_AND_NUMPY, GeneratorStates, ReachedGenerators, Source, held_by
from zeroshard.replay.samples import OTHER_VALUES, agrees, sample_of, spacing

Values = dict[str, Tensor | None]


class Replay:
    """One forward's random numbers, buffers and plain attributes. Made before it; `end` is called after it.

    Args:
        modules: those whose buffers and attributes the forward may read and change.
        ledger: enters the copies that are kept.
        often: whether the forward may be computed again several times, so that it must not write into the copies.
        sources: of random numbers beside torch's own, which are replayed too.

    Attributes:
        device: whose random numbers are replayed, with those of the CPU.
        nbytes: of the buffers that are kept.
        others: the states of the other sources.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        device: torch.device,
        ledger: Ledger,
        often: bool = False,
        sources: Sequence[Source] = PYTHON_AND_NUMPY,
    ) -> None:
        self._modules, self._ledger, self._often = modules, ledger, often
        self.device = device
        self._random, self._device_random = torch.get_rng_state(), accelerator.random_state(device)
        self.others = GeneratorStates(sources)
        self._attributes = PlainAttributes(modules)
        copies: dict[int, Tensor] = {}  # one for a buffer that several modules share
        self._before: dict[nn.Module, Values] = {}
        self._copies: dict[nn.Module, Values] = {}
        for module in filter(_has_buffers, modules):
            self._before[module] = dict(module._buffers)
            self._copies[module] = {name: _copy(buffer, copies) for name, buffer in module._buffers.items()}
        self.nbytes = 0

    def end(self) -> None:
        """Keep the buffers that the forward has changed, as they were, and no others."""
        self.others.end()
        kept: dict[int, Tensor] = {}
        for module in (m for m in self._modules if m._buffers or m in self._before):
            before, copies = self._before.get(module, {}), self._copies.pop(module, {})
            changed: Values = {}
            for name in {**before, **module._buffers}:
                now, copy = module._buffers.get(name), copies.get(name)
                if now is not before.get(name) or name not in before or not _same(now, copy):
                    changed[name] = copy
            if changed:
                # Buffers that are not to be there again are left out; the rest is as it is.
                self._copies[module] = {name: changed.get(name, before[name]) for name in before}
                kept |= {id(copy): copy for copy in changed.values() if copy is not None}
        self._before.clear()
        self.nbytes = sum(copy.nbytes for copy in kept.values())
        if self.nbytes:
            self._ledger.take(Category.BUFFERS, self.nbytes, "buffers for a recomputation")

    @contextmanager
    def again(self) -> Iterator[None]:
        """Have everything as it was inside; afterwards buffers, attributes and random numbers are as they are now."""
        now = {module: dict(module._buffers) for module in self._copies}
        try:
            again: dict[int, Tensor] = {}
            for module, values in self._copies.items():
                _install(module, {n: _copy(v, again) for n, v in values.items()} if self._often else values)
            with accelerator.forked_random([self.device]), self.others.again(), self._attributes.again():
                torch.set_rng_state(self._random)
                accelerator.set_random_state(self.device, self._device_random)
                yield
        finally:
            for module, current in now.items():
                _install(module, current)

    def drop(self) -> None:
        """The backward is done."""
        self._copies.clear()
        if self.nbytes:
            self._ledger.give(Category.BUFFERS, self.nbytes, "buffers for a recomputation")
            self.nbytes = 0


class Replays:
    """Makes the replays of forwards of one model, and compares outputs with those of the recomputations.

    Args:
        modules: of the model, down to the innermost.
        device: as for `Replay`.
        ledger: likewise.
    """

    def __init__(self, modules: Sequence[nn.Module], device: torch.device, ledger: Ledger) -> None:
        self._modules, self._device, self._ledger = modules, device, ledger
        self._reached = ReachedGenerators(modules)
        self._forwards = 0

    def begin(self) -> Replay:
        """The replay of a forward that is about to begin."""
        sources = (*PYTHON_AND_NUMPY, *held_by(self._modules), *self._reached.look())
        return Replay(self._modules, self._device, self._ledger, sources=sources)

    def sample(self, output: Tensor) -> bytes | None:
        """A sample of what the forward gave; None where it is not to be compared."""
        self._forwards += 1
        return sample_of(output.detach()) if spacing(self._forwards - 1, is_accelerator(self._device)) else None

    def compare(self, output: Tensor, sample: bytes | None, label: str) -> None:
        """Compare what a recomputation gave.

        Raises:
            PlanError: it has other values.
        """
        if sample is not None and not agrees(output.detach(), sample):
            raise PlanError(
                f"{label} computed another output in its recomputation than in its forward: {OTHER_VALUES}; or keep "
                f"its activations with recompute='off'."
            )


def _has_buffers(module: nn.Module) -> bool:
    return bool(module._buffers)


def _copy(buffer: Tensor | None, copies: dict[int, Tensor]) -> Tensor | None:
    if buffer is None or buffer.is_meta:
        return buffer
    if id(buffer) not in copies:
        copies[id(buffer)] = buffer.detach().clone()
    return copies[id(buffer)]


def _same(now: Tensor | None, copy: Tensor | None) -> bool:
    if now is None or copy is None:
        return now is copy
    return now is copy or (now.shape == copy.shape and torch.equal(now, copy))


def _install(module: nn.Module, values: Values) -> None:
    for name in module._buffers.keys() - values.keys():
        del module._buffers[name]
    module._buffers.update(values)
