"""The part of the device's budget that activations may take, and the first step, which shows whether it is enough.

[Note: the first step] Whether it fits is known after its backwards, and until then nothing may change. Weights and the
optimizer's states change in the update alone, which comes after. Forwards draw random numbers and write into buffers,
such as running statistics; both are put back.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from zeroshard.errors import BudgetExceeded
from zeroshard.memory.ledger import MODEL_STATES, Category, Ledger
from zeroshard.platform import accelerator
from zeroshard.replay.generators import PYTHON_AND_NUMPY
from zeroshard.replay.replay import GeneratorStates


class FirstStep:
    """Random numbers and buffers as they were before the first forward in training ([Note: the first step]).

    Args:
        model: whose buffers are kept, those of its state dict, on the host until the step is over.
        device: whose random numbers are kept, with those of the CPU.
        ledger: enters what is kept.
        reserve: makes the scratch of the update; gives the bytes of scalars that it will make.
        waits: whether no rank updates before all have agreed.

    Attributes:
        reserve, waits: as given.
    """

    def __init__(
        self, model: nn.Module, device: torch.device, ledger: Ledger, reserve: Callable[[], int], waits: bool
    ) -> None:
        self.reserve, self.waits = reserve, waits
        self._model, self._device, self._ledger = model, device, ledger
        self._random: tuple[Tensor, Tensor | None] | None = None
        self._others = GeneratorStates(())
        self._buffers: list[tuple[nn.Module, str, Tensor, Tensor]] = []
        self._nbytes = 0

    def begin(self) -> None:
        """A forward in training begins; the first counts."""
        if self._random is not None:
            return
        self._random = torch.get_rng_state(), accelerator.random_state(self._device)
        self._others = GeneratorStates(PYTHON_AND_NUMPY)
        for module in self._model.modules():
            for name, buffer in module._buffers.items():
                if buffer is None or buffer.is_meta or name in module._non_persistent_buffers_set:
                    continue
                self._buffers.append((module, name, buffer, buffer.detach().to("cpu", copy=True)))
        self._nbytes = sum(copy.nbytes for *_, copy in self._buffers)
        self._ledger.take(Category.BUFFERS, self._nbytes, "buffers before the first step", tier="host")

    @torch.no_grad()
    def undo(self) -> None:
        """Put everything back."""
        if self._random is None:
            return
        torch.set_rng_state(self._random[0])
        accelerator.set_random_state(self._device, self._random[1])
        self._others.put_back()
        for module, name, buffer, copy in self._buffers:
            module._buffers[name] = buffer.copy_(copy)
        self.end()

    def end(self) -> None:
        """The step is over."""
        self._ledger.give(Category.BUFFERS, self._nbytes, "buffers before the first step", tier="host")
        self._random, self._nbytes = None, 0
        self._buffers.clear()


class ActivationBudget:
    """The part of the device's budget that activations may take.

    Args:
        ledger: of the rank; its device has a budget.
        planned: gives the bytes of model states on the device by category, once all are made.
        first: what is undone if the first step shows that the budget is too small.
        scratch: bytes that a first backward may take besides, for what is on its way between ranks.
        by_shape: whether forwards of unlike shapes are decided apart.
        together: whether ranks agree in every step, because blocks hold collectives.

    Attributes:
        ledger, first, by_shape, together: as given.
        forwards: that come before the first backward of the first step, at most; a smaller budget is refused.
        sharing: that came before a backward of the first step or the last one, at most; decisions let them share the
            room if they can.
        seen: the same of the step under way.
        copied: bytes of buffers that each of them keeps for its recomputation, at most.
    """

    def __init__(
        self,
        ledger: Ledger,
        planned: Callable[[], Mapping[Category, int]],
        first: FirstStep,
        scratch: int = 0,
        by_shape: bool = True,
        together: bool = False,
    ) -> None:
        self._planned, self._scratch = planned, scratch
        self.by_shape, self.together, self.copied = by_shape, together, 0
        self.forwards = self.sharing = self.seen = 1
        self.ledger = ledger
        self._budget, self.first = ledger.budgets["device"], first
        self._foreseen: dict[Category, int] = {}
        self._way_out = ledger.way_out
        ledger.measures = True

    @property
    def measures(self) -> bool:
        """Whether the first step is under way."""
        return self.ledger.measures

    def foresee(self) -> None:
        """Count buffers that stay, with those that the update leaves, beside those that each step has for a while.

        A step may find at its peak what the first one made after its own.
        """
        account = self.ledger.account(Category.BUFFERS)
        held, peak = account.current, account.peak
        scalars = self.first.reserve()
        more = account.current - held + scalars
        self._foreseen = {Category.BUFFERS: more + max(peak, held + self.forwards * self.copied)}

    def end_step(self) -> None:
        """Keep within the budget from now on."""
        self.ledger.measures, self.ledger.way_out = False, self._way_out
        self.sharing, self.seen = max(self.seen, self.forwards), 1

    def count(self, forwards: int) -> None:
        """So many forwards wait for their backwards."""
        self.seen = max(self.seen, forwards)
        self.forwards = self.seen if self.measures else self.forwards

    def extend(self, forwards: int, needed: int) -> None:
        """More forwards come before a backward than decisions were made for; they need `needed` bytes at least."""
        least = self._budget - self.room + needed + (forwards - self.forwards) * self.copied
        enough = f"set device_memory={least} or more" if least > self._budget else "device_memory is enough"
        self.ledger.way_out = lambda *_: (  # of any error until the step ends
            f"Decisions were made for fewer forwards than the {forwards} that now come before a backward. Let the "
            f"first step run {forwards} before its backward, and decisions will count on them; {enough} for that. Or "
            f"run a backward after each forward."
        )

    @property
    def activations(self) -> int:
        """Bytes of activations now."""
        return self.ledger.account(Category.ACTIVATIONS).current

    @property
    def room(self) -> int:
        """Bytes that are left for activations in any step, with all else at its highest so far."""
        planned, rest = self._planned(), 0
        for category in Category:
            if category is not Category.ACTIVATIONS:
                known = planned.get(category, 0), self._foreseen.get(category, 0)
                rest += max(self.ledger.account(category).peak, *known)
        return self._budget - rest

    @property
    def left(self) -> int:
        """Bytes that activations may take now beside those that are there."""
        planned = self._planned()
        unmade = sum(max(0, planned.get(each, 0) - self.ledger.account(each).current) for each in MODEL_STATES)
        now = self._budget - self.ledger.total() - unmade
        return now - self._scratch if self.measures else min(now, self.room - self.activations)

    def too_small(self, needed: int, room: int) -> BudgetExceeded:
        """The error of a budget that leaves `room` bytes, of which `needed` are needed."""
        return BudgetExceeded(
            f"device_memory is {self._budget:,} bytes, which leaves {max(0, room):,} for activations, and they need "
            f"{needed:,} with every block computed again that can be.",
            self._enough(needed, room),
        )

    def explain(self, needed: int, room: int) -> None:
        """Set the advice of errors: a budget with `needed` bytes for activations, or the larger refused request."""
        self.ledger.way_out = lambda asked, budget: self._enough(max(needed, asked - budget + room), room)

    def _enough(self, needed: int, room: int) -> str:
        return (
            f"Set device_memory={self._budget - room + needed} or more, or use smaller microbatches, more ranks or a "
            f"higher ZeRO stage."
        )
