"""What a guard calls bad, how long it bears it, where it sends the run back to, and that a resume changes nothing."""

import json
import math
import random
import statistics
from typing import Any

import pytest

from zeroshard.errors import ConfigError, NonFiniteError
from zeroshard.resilience.guard import Guard, GuardVerdict, Origin
from zeroshard.train.keeping import Cursor

GOOD, BAD, BACK = GuardVerdict.GOOD, GuardVerdict.BAD, GuardVerdict.ROLL_BACK
NAN, INF = math.nan, math.inf


def feed(guard: Guard, values: list[float], first: int = 1, rows: int = 4) -> list[GuardVerdict]:
    """The verdicts on values of the steps from `first` on, each of `rows` samples."""
    return [guard.decide(step, value, (step - 1) * rows) for step, value in enumerate(values, first)]


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_what_is_not_finite_is_bad_at_once(bad: float) -> None:
    guard = Guard()
    assert feed(guard, [3.0, 1e30, -5.0, bad]) == [GOOD, GOOD, GOOD, BACK]
    assert guard.origin == Origin(4, 12)


def test_a_spike_is_measured_by_the_median_of_the_last_good_values() -> None:
    draw = random.Random(0)
    values = [draw.uniform(1, 3) for _ in range(200)]
    guard = Guard(spike=1.5, window=11, patience=1000)
    good: list[float] = []
    for step, value in enumerate(values, 1):
        limit = 1.5 * statistics.median(good[-11:]) if len(good) >= 10 else INF
        assert guard.decide(step, value, 0) is (BAD if value > limit else GOOD)
        if value <= limit:
            good.append(value)
    assert 10 < len(values) - len(good) < 100


def test_no_spike_is_called_before_there_is_something_to_compare_with() -> None:
    assert feed(Guard(spike=2.0), [1.0] * 9 + [50.0]) == [GOOD] * 10
    assert feed(Guard(spike=2.0), [1.0] * 10 + [2.0, 2.01]) == [GOOD] * 11 + [BACK]
    assert feed(Guard(spike=2.0, window=3), [1.0] * 3 + [50.0]) == [GOOD] * 3 + [BACK]
    assert feed(Guard(), [1.0] * 20 + [1e6]) == [GOOD] * 21
    assert feed(Guard(spike=2.0), [-1.0] * 20 + [1.0]) == [GOOD] * 21  # no factor above a negative median
    assert feed(Guard(spike=1.1, window=10), [8 * 0.9**n for n in range(60)]) == [GOOD] * 60


def test_patience_bears_bad_steps_and_counts_those_in_a_row() -> None:
    guard = Guard(patience=3)
    assert feed(guard, [1.0, NAN, NAN, 1.0, NAN, INF, NAN]) == [GOOD, BAD, BAD, GOOD, BAD, BAD, BACK]
    assert guard.origin == Origin(5, 16)


@pytest.mark.parametrize(
    "there, chosen",
    [([0, 5, 10, 15, 20], 10), ([13, 14], 13), ([0, 14], 0), ([14, 15, 16], 14), ([15, 16], None), ([], None)],
)
def test_the_checkpoint_to_go_back_to(there: list[int], chosen: int | None) -> None:
    """Steps 15 and 16 are bad; a good loss after checkpoint 13 speaks for it, nothing for or against checkpoint 14."""
    guard = Guard(patience=2)
    feed(guard, [1.0] * 14 + [NAN, NAN])
    assert guard.choose(there) == chosen


def test_after_so_many_roll_backs_it_gives_up_and_says_why() -> None:
    guard = Guard("gradient norm", spike=3.0, rollbacks=2)
    state = guard.state()
    for value in (7.0, NAN):
        guard.rewind(state)
        assert feed(guard, [1.0] * 10 + [value])[-1] is BACK
    guard.rewind(state)
    with pytest.raises(NonFiniteError) as caught:
        feed(guard, [2.0] * 10 + [9.0])
    text = str(caught.value)
    assert text.startswith("The gradient norm went wrong (7 in step 11 compared with a median of 1; nan in step 11")
    assert "9 in step 11 compared with a median of 2; the last good values: 2, 2, 2, 2, 2)" in text
    assert "gone back 2 times, of 2 allowed" in text and "sample 40" in text and "clip_norm" in text
    with pytest.raises(NonFiniteError, match="gone back 0 times, of 0 allowed"):
        feed(Guard(rollbacks=0), [NAN])


def test_only_getting_past_the_bad_step_counts_afresh() -> None:
    """Good steps that merely repeat the way to the same bad step do not, or the run would go on for ever."""
    guard = Guard(window=5, rollbacks=1)
    state = guard.state()
    assert feed(guard, [1.0] * 20 + [NAN])[-1] is BACK
    guard.rewind(state)
    with pytest.raises(NonFiniteError):
        feed(guard, [1.0] * 20 + [NAN])
    guard = Guard(window=5, rollbacks=1)
    assert feed(guard, [1.0] * 20 + [NAN])[-1] is BACK
    guard.rewind(state)
    assert feed(guard, [1.0] * 25)[-1] is GOOD
    with pytest.raises(NonFiniteError):  # one step too early
        feed(guard, [NAN], 26)
    guard = Guard(window=5, rollbacks=1)
    assert feed(guard, [1.0] * 20 + [NAN])[-1] is BACK
    guard.rewind(state)
    assert feed(guard, [1.0] * 26 + [NAN])[-1] is BACK


class Job:
    """A run in miniature: the loss is a function of the sample; checkpoints hold the step, the cursor and the guard.

    Samples in `bad` give a bad loss. What is written to a checkpoint passes through JSON.
    """

    def __init__(self, bad: dict[int, float], settings: dict[str, Any]) -> None:
        self.bad, self.settings = bad, settings
        self.disk: dict[int, str] = {}
        self.lines: dict[int, Any] = {}

    def start(self, steps: int, dies_after: int | None = None) -> None:
        """Run to the end, or die once so many steps have been made in this process."""
        guard, cursor, step, made = Guard(**self.settings), Cursor(), 0, 0
        if self.disk:
            step, state, position = json.loads(self.disk[max(self.disk)])
            guard.load(state)
            cursor.load(position)
        while step < steps and made != dies_after:
            if step % 4 == 0 and step not in self.disk:
                self.disk[step] = json.dumps([step, guard.state(), cursor.state()], allow_nan=False)
            before = cursor.position
            (sample,) = cursor.take(1)
            value = self.bad.get(sample, 2.0 + math.sin(sample))
            step, made = step + 1, made + 1
            verdict = guard.decide(step, value, before)
            self.lines[step] = (repr(value), verdict, sample)
            if verdict is BACK:
                assert guard.origin is not None
                cursor.leave_out(guard.origin.position, cursor.position)
                chosen = guard.choose(self.disk)
                assert chosen is not None
                self.disk = {number: text for number, text in self.disk.items() if number <= chosen}
                step, state, position = json.loads(self.disk[chosen])
                guard.rewind(state)
                cursor.rewind(position)


@pytest.mark.parametrize("patience", [1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_killed_anywhere_and_resumed_it_decides_the_same(patience: int, seed: int) -> None:
    draw = random.Random(seed)
    bad = {first + n: draw.choice([NAN, INF, 40.0, 90.0]) for first in draw.sample(range(12, 60), 5) for n in range(3)}
    settings = {"spike": 4.0, "window": 12, "patience": patience, "rollbacks": 20}
    whole = Job(bad, settings)
    whole.start(70)
    assert len(whole.lines) == 70
    for _ in range(12):
        killed = Job(bad, settings)
        for _ in range(4):
            killed.start(70, dies_after=draw.randrange(1, 30))
        killed.start(70)
        assert killed.lines == whole.lines
    verdicts = [verdict for _, verdict, _ in whole.lines.values()]
    assert BACK not in verdicts and (BAD in verdicts or patience != 2)  # the last word on each step
    seen = [sample for _, _, sample in whole.lines.values()]
    assert seen == sorted(set(seen)) and len(seen) < 1 + seen[-1]
    if patience == 1:
        assert [sample for sample in range(seen[-1]) if sample not in seen] == sorted(s for s in bad if s < seen[-1])


def test_a_smaller_window_takes_over_what_it_needs() -> None:
    guard = Guard(spike=2.0, window=50)
    feed(guard, [float(n) for n in range(1, 51)])
    smaller = Guard(spike=2.0, window=10)
    smaller.load(json.loads(json.dumps(guard.state())))
    assert feed(smaller, [91.0, 91.1], 51) == [GOOD, GOOD]
    assert smaller.state()["values"] == [*map(float, range(43, 51)), 91.0, 91.1]


@pytest.mark.parametrize(
    "settings", [{"spike": 1.0}, {"spike": NAN}, {"window": 0}, {"patience": 0}, {"rollbacks": -1}]
)
def test_settings_that_make_no_sense(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        Guard(**settings)
