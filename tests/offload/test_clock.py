"""What of offload is exposed in whole steps, on a clock that modules and tasks let go on by given seconds."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from inside import late_updates_of
from offload.offloaded import ADAMW
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.memory.transfers import Modelled, Task
from zeroshard.offload.updates import HostUpdates
from zeroshard.platform import real
from zeroshard.platform.rehearsed import Clock
from zeroshard.traffic import UPDATE, Purpose

DOWN, UP = Purpose.GRADIENTS_DOWN, Purpose.PARAMETERS_UP
ACTIVATIONS_DOWN, ACTIVATIONS_UP = Purpose.ACTIVATIONS_DOWN, Purpose.ACTIVATIONS_UP
FORWARD, BACKWARD = 2.0, 4.0  # seconds of a block
BLOCKS = 4
COMPUTE = BLOCKS * (FORWARD + BACKWARD)
Seconds = dict[str, float]  # of a task, by cause


class Blocks(nn.Module):
    """Four equal blocks, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(BLOCKS)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Clocked:
    """An engine whose blocks take seconds of a clock for each forward and backward, and its tasks theirs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: Seconds, **plan: Any) -> None:
        self.clock = Clock()
        executor: Callable[..., Modelled] = lambda device, timeout: Modelled(self.clock, self._task)  # noqa: E731
        monkeypatch.setattr(real, "executor_of", executor)
        self._seconds = seconds
        model = Blocks()
        self.engine = zs.Engine(model, ADAMW, zs.Plan.from_dict({"offload": "optimizer", **plan}))
        late = late_updates_of(self.engine)
        assert isinstance(late, HostUpdates)
        late.link.now = lambda: self.clock.now
        for block in model.blocks:
            block.register_forward_hook(self._computed)

    def steps(self, count: int) -> dict[str, float]:
        """Take steps; returns the exposed seconds of the last."""
        for _ in range(count):
            began, computed = self.clock.now, self.clock.spent["compute"]
            self.engine.train_step(torch.ones(4, 512, 8))
            stood = self.clock.now - began - (self.clock.spent["compute"] - computed)
            assert self.clock.spent["compute"] - computed == COMPUTE * self.engine.plan.microbatches
            assert sum(self.engine.exposed.values()) == stood
        return {cause: seconds for cause, seconds in self.engine.exposed.items() if seconds}

    def _computed(self, block: nn.Module, inputs: Any, output: Tensor) -> None:
        self.clock.spend(FORWARD)
        output.register_hook(lambda gradient: self.clock.spend(BACKWARD))

    def _task(self, task: Task) -> float:
        return self._seconds[task.cause]


def serial(seconds: Seconds) -> float:
    """All gradients down, then all updates, then all parameters up: nothing is hidden."""
    return BLOCKS * (seconds[DOWN] + seconds[UPDATE] + seconds[UP])


@pytest.mark.parametrize(
    "update, exposed",
    [
        (3, {DOWN: 2, UPDATE: 3, UP: 1}),  # of the block whose gradient comes last, and which is needed first
        (4, {DOWN: 2, UPDATE: 5, UP: 1}),  # the host has no pause: weights and states of four blocks, in 32 s
        (6, {DOWN: 2, UPDATE: 21, UP: 1}),  # likewise, in 48 s
    ],
)
def test_speculation_hides_all_but_the_way_of_one_block(
    monkeypatch: pytest.MonkeyPatch, update: float, exposed: dict[str, float]
) -> None:
    """Here the weights alone take as long as the states."""
    seconds = {DOWN: 2, UPDATE: update, UP: 1}
    run = Clocked(monkeypatch, seconds)
    assert run.steps(4) == exposed
    assert run.engine.speculation_counts.taken == 3 * BLOCKS  # in the first step nobody knows yet what a step is
    assert sum(exposed.values()) < serial(seconds)


def test_a_host_that_is_behind_speculates_less(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds, ends = {DOWN: 2, UPDATE: 12, UP: 1}, []
    for speculate in (True, False):
        run = Clocked(monkeypatch, seconds, **{"offload.speculate": speculate})
        run.steps(9)
        ends.append(run.clock.now)
        assert run.engine.speculation_counts.taken == (17 if speculate else 0)  # of 32
    assert ends[0] < 1.1 * ends[1]


@pytest.mark.parametrize(
    "update, exposed",
    [
        (2, {DOWN: 2, UPDATE: 2, UP: 1}),  # as long as a forward: the first block's, and no other
        (5, {DOWN: 2, UPDATE: 5 + 3 * 2, UP: 1 + 3 * 1}),  # each next one ends 5 s later, after 2 s of forward
    ],
)
def test_after_the_norm_updates_hide_behind_the_next_forward(
    monkeypatch: pytest.MonkeyPatch, update: float, exposed: dict[str, float]
) -> None:
    seconds = {DOWN: 2, UPDATE: update, UP: 1}
    assert Clocked(monkeypatch, seconds, **{"offload.speculate": False}).steps(3) == exposed
    assert sum(exposed.values()) < serial(seconds)


@pytest.mark.parametrize("update", [3.0, 6.0, 9.0])
def test_delayed_updates_hide_behind_a_whole_step(monkeypatch: pytest.MonkeyPatch, update: float) -> None:
    """A step takes its compute and the way of one block's gradient and weights, or all updates if these take longer."""
    run = Clocked(
        monkeypatch,
        {DOWN: 2, UPDATE: update, UP: 1},
        **{"offload.delayed_update": True, "offload.delayed_warmup": 1},
    )
    run.steps(4)
    began = run.clock.now
    exposed = run.steps(1)
    own = COMPUTE + 2 + 1
    assert run.clock.now - began == max(own, BLOCKS * update)
    if BLOCKS * update <= own:
        assert exposed == {DOWN: 2, UP: 1}


@pytest.mark.parametrize(
    "plan, causes",
    [
        ({"microbatches": 2}, {DOWN, UPDATE, UP}),
        ({"clip_norm": 1e-4}, {DOWN, UPDATE, UP}),  # every guess is wrong
        ({"offload": "optimizer,parameters", "zero": 3}, {DOWN, UPDATE, UP}),
        ({"offload": "activations"}, {ACTIVATIONS_DOWN, ACTIVATIONS_UP}),
        ({"offload": "optimizer,parameters,activations", "zero": 3}, {DOWN, UPDATE, UP}),  # which queue up with UP
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_what_is_exposed_has_a_cause(monkeypatch: pytest.MonkeyPatch, plan: dict[str, Any], causes: set[str]) -> None:
    """Where every lane is too slow; `steps` compares the sum over the causes with the clock."""
    seconds = {DOWN: 5, UPDATE: 7, UP: 3, ACTIVATIONS_DOWN: 5, ACTIVATIONS_UP: 16}
    assert Clocked(monkeypatch, seconds, **plan).steps(4).keys() == causes
