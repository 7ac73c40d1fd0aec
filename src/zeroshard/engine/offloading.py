"""Updates below the device: when they run, when the new weights come up, and which of them are guesses.

[Note: after the norm] A step ends when its updates are begun, in the order of the forward. The next forward waits for
each unit's weights where it needs them. What other ranks need of a slice is spread then, in one fixed order.

[Note: speculation] As soon as a slice's gradient is on the host, its update can run beside the backward, on shadow
pages, as if nothing were to be clipped or skipped. If the step's verdict is what was guessed, the pages change places;
else they are forgotten and the update runs again. After too many wrong guesses nothing is guessed for a while.

[Note: delayed update] ZeRO-Offload's one-step delay (2101.06840, section 5): after a warm-up, the update of step t runs
beside step t+1, and its weights come up when that one ends. Everything about it (rate, decay, clipping) is step t's.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from zeroshard.counts import UPDATE, Purpose
from zeroshard.engine.assembly import Assembly, Shard
from zeroshard.engine.judge import Judge
from zeroshard.errors import OptimizerError
from zeroshard.link import Task
from zeroshard.offload.gradients import HostGradients
from zeroshard.offload.host_adam import Scalars
from zeroshard.offload.slices import HostSlice, Pages, Part
from zeroshard.optim import Span
from zeroshard.plan import Plan

WINDOW, MOST_WRONG = 50, 5  # steps that are remembered, and wrong guesses among them, beyond which nothing is guessed


@dataclass(slots=True)
class Update:
    """One slice's update under way: its task, and where the new weights are on the host."""

    shard: Shard
    task: Task
    out: torch.Tensor | None
    staging: torch.Tensor | None


@dataclass(slots=True)
class Guess:
    """An update that ran before it was known whether it should: as it was begun, and the pages that it wrote."""

    update: Update
    parts: Sequence[Part]
    factor: float
    puts: int
    shadow: Pages


@dataclass(slots=True)
class Guesses:
    """How guessing went.

    Attributes:
        taken: updates that ran beside the backward and were right.
        undone: those that were not.
    """

    taken: int = 0
    undone: int = 0


class Offloaded:
    """The shards whose updates run below the device.

    Args:
        judge: knows the loss scale of the step under way.
        ranks: that slice among themselves.
    """

    def __init__(self, assembly: Assembly, plan: Plan, judge: Judge, ranks: int) -> None:
        assert assembly.below is not None
        self._assembly, self._below, self._plan, self._judge = assembly, assembly.below, plan, judge
        # Where units are gathered for use, that waits for their updates; else new weights must come to the other ranks.
        self._gathers = any(shard.parameters.sliced for shard in assembly.all_shards)
        self._spreads = ranks > 1 and not self._gathers
        root = len(assembly.units) - 1
        self._units = [root, *range(root)]  # in the order of a forward
        self._place = {id(shard): self._units.index(n) for n, shards in enumerate(assembly.shards) for shard in shards}
        self._rising: list[tuple[Shard, Task, torch.Tensor | None]] = []
        self._used: list[tuple[Task, torch.Tensor]] = []
        self._late: list[Update] = []
        self._ahead: dict[int, Guess] = {}
        self._wrong: deque[bool] = deque(maxlen=WINDOW)
        self._puts: dict[int, int] = {}
        self._began: set[int] = set()  # shards that were updated
        self.guesses = Guesses()
        for shard in assembly.all_shards:
            if shard.home is not None:
                shard.home.rebind = partial(self._rebind, shard)
                shard.home.rebind(None if shard.home.on_disk else shard.home.pages)
                self.lay_out(shard)
                _sink(shard).on_put = partial(self._guess, shard)
        if any(shard.home is not None for shard in assembly.all_shards):
            assembly.optimizer.optimizer.register_load_state_dict_pre_hook(_refuse_states)

    @classmethod
    def of(cls, assembly: Assembly, plan: Plan, judge: Judge, ranks: int) -> "Offloaded | None":
        """Those of an assembly, if there are any."""
        return cls(assembly, plan, judge, ranks) if any(shard.below for shard in assembly.all_shards) else None

    def start(self, todo: Sequence[tuple[Shard, bytes]], factor: float, step: int) -> None:
        """Begin the updates of a step, with gradients times `factor`.

        Args:
            todo: shards, each with which of its parameters got a gradient.
            step: how many were taken before.
        """
        self.commit()
        self._tidy()
        self._wrong.append(factor != 1.0 / self._judge.scale)
        late = self._plan.delayed_update and step >= self._plan.delayed_warmup
        for shard, written in sorted(todo, key=lambda item: self._place[id(item[0])]):
            update = self._begin(shard, written, factor, late)
            self._late.append(update) if late else self._lift(update)
        self.forget()
        self._assembly.optimizer.touch()

    def skip(self) -> None:
        """Count a step without an update."""
        self.commit()
        self._wrong.append(True)
        self.forget()

    def forget(self) -> None:
        """Drop what was guessed and not taken over."""
        for guess in self._ahead.values():
            guess.update.task.wait()
            self._below.shadows.give(guess.shadow)
            self._return(guess.update.staging)
            self.guesses.undone += 1
        self._ahead.clear()

    def commit(self) -> None:
        """Bring the weights of delayed updates up ([Note: delayed update])."""
        for update in self._late:
            self._lift(update)
        self._late.clear()

    def flush(self) -> None:
        """Have all new weights here."""
        self.commit()
        self.finish()

    def entering(self, root: int, trains: bool) -> None:
        """A forward begins, which to train uses weights that may be one update old, and else the latest."""
        if not trains:
            self.commit()
        if not self._gathers:
            self.need(root)

    def need(self, unit: int) -> None:
        """Have the new weights of a unit here, and of all before it."""
        last = self._units.index(unit)
        self._settle([item for item in self._rising if self._place[id(item[0])] <= last])

    def finish(self) -> None:
        """Have all new weights here, but for those of delayed updates."""
        self._settle(list(self._rising))

    def raise_weights(self, shard: Shard) -> None:
        """Bring the weights up that the user's own optimizer has updated on the host."""
        staging = self._below.host.borrow(shard.owned.numel() * shard.flat.dtype.itemsize)
        out = staging.view(shard.flat.dtype)
        out.copy_(shard.owned)
        self._rise(shard, out, staging, [])

    def _begin(self, shard: Shard, written: bytes, factor: float, late: bool) -> Update:
        home, sink = _home(shard), _sink(shard)
        spans = self._spans(shard, written)
        parts = self._parts(shard, spans)
        guess = self._ahead.pop(id(shard), None)
        self._puts[id(shard)] = sink.puts if all(written) else 0
        if guess is not None and (guess.parts, guess.factor, guess.puts) == (parts, factor, sink.puts):
            update, before = guess.update, home.take_over(guess.shadow)
            before.reader = update.task
            self._below.shadows.give(before)
            self.guesses.taken += 1
        else:
            if guess is not None:
                self._ahead[id(shard)] = guess  # to be forgotten
            update = self._update(shard, parts, factor, aside=late)
        self._began.add(id(shard))
        for span in spans:
            self._assembly.optimizer.optimizer.state[span.tensor]["step"] += 1
        sink.read_by(update.task)
        return update

    def _update(
        self, shard: Shard, parts: Sequence[Part], factor: float, aside: bool, shadow: Pages | None = None
    ) -> Update:
        """Begin one update.

        Args:
            aside: do not write where the device reads.
        """
        home, sink, parameters = _home(shard), _sink(shard), shard.parameters
        staging, out = None, parameters.own if parameters.lives_below and not aside else None
        if out is None and (aside or home.on_disk or shard.flat.dtype.itemsize < 4):
            staging = self._below.host.borrow(shard.owned.numel() * shard.flat.dtype.itemsize)
            out = staging.view(shard.flat.dtype)
        after = [*sink.arrived, *([shadow.reader] if shadow is not None and shadow.reader is not None else [])]
        task = home.update(parts, sink.sum, factor, out, after, shadow)
        return Update(shard, task, out, staging)

    def _lift(self, update: Update) -> None:
        """Let new weights come to where forwards find them."""
        shard, out = update.shard, update.out
        if shard.parameters.lives_below and update.staging is None:
            shard.parameters.update = update.task
            self._rising.append((shard, update.task, None))
        else:
            self._rise(shard, shard.owned if out is None else out, update.staging, [update.task])

    def _rise(self, shard: Shard, source: torch.Tensor, staging: torch.Tensor | None, after: Sequence[Task]) -> None:
        index, parameters, link = shard.flat.index, shard.parameters, self._below.link
        padding = index.padding_in(shard.start, shard.start + source.numel())
        if parameters.lives_below:
            own = parameters.own
            task = link.run(lambda: _copy(own, source), UPDATE, shard.flat.label, own.nbytes, after)
        else:
            task = link.copy(source, parameters.own, Purpose.PARAMETERS_UP, shard.flat.label, after, padding)
        parameters.update = task
        self._rising.append((shard, task, staging))

    def _settle(self, items: Sequence[tuple[Shard, Task, torch.Tensor | None]]) -> None:
        for item in items:
            shard, task, staging = item
            self._rising.remove(item)
            task.wait()
            if staging is not None:
                self._used.append((task, staging))
            if shard.parameters.update is task:
                shard.parameters.update = None
            if self._spreads:
                shard.parameters.start_spread()
        if self._spreads:
            for shard, _, _ in items:
                shard.parameters.finish_spread()

    def _guess(self, shard: Shard) -> None:
        """Begin an update on shadow pages, if its gradient seems complete ([Note: speculation])."""
        home, sink = _home(shard), _sink(shard)
        expected = self._puts.get(id(shard), 0)
        off = not self._plan.speculate or self._plan.delayed_update or home.on_disk
        if off or sink.puts != expected or sum(self._wrong) > MOST_WRONG or id(shard) in self._ahead:
            return
        shadow = self._below.shadows.take(home.form)
        if shadow is None:
            return
        spans = self._assembly.optimizer.spans(shard.spans)
        parts, factor = self._parts(shard, spans), 1.0 / self._judge.scale
        update = self._update(shard, parts, factor, aside=True, shadow=shadow)
        self._ahead[id(shard)] = Guess(update, parts, factor, sink.puts, shadow)

    def _spans(self, shard: Shard, written: bytes) -> list[Span]:
        """The spans that got a gradient, cut so that each got it whole or not at all."""
        optimizer, index = self._assembly.optimizer, shard.flat.index
        if not all(written):
            ends = zip(written, written[1:], index.entries[1:], strict=False)
            optimizer.split(shard.spans, [entry.offset for before, after, entry in ends if before != after])
            self.lay_out(shard)
        return [span for span in optimizer.spans(shard.spans) if written[index.number_at(span.start)]]

    def _parts(self, shard: Shard, spans: Sequence[Span]) -> list[Part]:
        """What an update does with each of some spans; states that are not there yet begin at zero."""
        optimizer = self._assembly.optimizer.optimizer
        parts = []
        for span in spans:
            state = optimizer.state[span.tensor]
            if not state:
                if id(shard) in self._began:  # the user has cleared it
                    with _home(shard).fetched(writes=True):
                        _home(shard).forget_moments(span.start - shard.start, span.stop - shard.start)
                state["step"] = torch.tensor(0.0)
                state.update(self._moments(shard, span))
            group = optimizer.param_groups[span.group]
            for option in ("maximize", "amsgrad"):
                if group.get(option):
                    raise OptimizerError(
                        f"{option}=True was set after the engine was made, and the host's own Adam updates without it. "
                        f"Set it when the optimizer is made, which then runs on the host itself."
                    )
            scalars = Scalars.of(group, int(state["step"]) + 1, group["decoupled_weight_decay"])
            start, stop = span.start - shard.start, span.stop - shard.start
            parts.append(Part(start, stop, _home(shard).block_of(start), scalars))
        return parts

    def lay_out(self, shard: Shard) -> None:
        """Let a slice follow its spans, where these were cut."""
        home, spans = _home(shard), self._assembly.optimizer.spans(shard.spans)
        home.lay_out([(span.start - shard.start, span.stop - shard.start) for span in spans])
        if not home.on_disk:
            self._rebind(shard, home.pages)

    def _moments(self, shard: Shard, span: Span) -> dict[str, Any]:
        return dict(_home(shard).moments(span.start - shard.start, span.stop - shard.start))

    def _rebind(self, shard: Shard, pages: Pages | None) -> None:
        """Let the optimizer's tensors be views of where a slice is now."""
        if pages is None:  # on the disk: nothing may read it
            shard.owned = torch.full((), float("nan")).expand(_home(shard).form.numel)
        else:
            shard.owned = pages.master
        optimizer = self._assembly.optimizer
        optimizer.rebind(shard.spans, shard.owned, shard.start)
        for span in optimizer.spans(shard.spans):
            if optimizer.optimizer.state.get(span.tensor):
                optimizer.optimizer.state[span.tensor].update(self._moments(shard, span))

    def _tidy(self) -> None:
        """Take staging back that weights came up from, which on a GPU nobody waited for until now."""
        for task, staging in self._used:
            task.wait_here()
            self._return(staging)
        self._used.clear()

    def _return(self, staging: torch.Tensor | None) -> None:
        if staging is not None:
            self._below.host.give_back(staging)


def _refuse_states(optimizer: torch.optim.Optimizer, states: Any) -> None:
    raise OptimizerError(
        f"load_state_dict of the {type(optimizer).__name__} was called, and its states are in the host's memory, where "
        f"the engine updates them. Save and load them with engine.save(folder) and engine.load(folder)."
    )


def _copy(into: torch.Tensor, source: torch.Tensor) -> None:
    into.copy_(source)


def _home(shard: Shard) -> HostSlice:
    assert shard.home is not None
    return shard.home


def _sink(shard: Shard) -> HostGradients:
    assert shard.gradients is not None and isinstance(shard.gradients.sink, HostGradients)
    return shard.gradients.sink
