"""F17: every sample of an epoch is taken once, over kills, other world sizes and other batch sizes."""

import json
import random
from collections import Counter

import pytest
import torch

from zeroshard.train.corpus import Batches
from zeroshard.train.cursor import Cursor

SEQUENCE, WINDOWS = 10, 97  # a prime, so that no batch divides an epoch


def make() -> Batches:
    """A text of numbers, each once: a row's first token tells which window it is."""
    batches = Batches(torch.arange((WINDOWS + 1) * SEQUENCE + 3, dtype=torch.int32), SEQUENCE, seed=5)
    assert batches.windows_per_epoch == WINDOWS
    return batches


def starts(batches: Batches, samples: list[int], data_ranks: int) -> list[int]:
    """First tokens of a global batch, put together from its lanes."""
    return [int(row[0]) for data_rank in range(data_ranks) for row in batches.rows(samples, data_rank, data_ranks)]


def test_the_order_depends_on_the_seed_and_the_position_alone() -> None:
    whole = [starts(make(), [sample], 1)[0] for sample in range(3 * WINDOWS)]
    for data_ranks, size in ((1, 7), (2, 3), (3, 1), (4, 5)):
        batches, cursor, seen = make(), Cursor(), []
        while cursor.position < 2 * WINDOWS:
            seen += starts(batches, cursor.take(data_ranks * size), data_ranks)
        assert seen == whole[: len(seen)]
    other = Batches(torch.arange((WINDOWS + 1) * SEQUENCE + 3, dtype=torch.int32), SEQUENCE, seed=6)
    assert [starts(other, [sample], 1)[0] for sample in range(WINDOWS)] != whole[:WINDOWS]


@pytest.mark.parametrize("seed", range(8))
def test_epochs_are_exact_over_kills_and_changes_of_the_world_and_the_batch(seed: int) -> None:
    """Kills at any step; what was done after the last checkpoint is done again, perhaps by another number of ranks."""
    draw = random.Random(seed)
    kept = json.dumps(Cursor().state())
    safe: list[int] = []  # first tokens that the surviving line of the run has seen
    wasted = 0
    while len(safe) < 4 * WINDOWS:
        data_ranks, size, every = draw.randint(1, 4), draw.randint(1, 6), draw.randint(1, 3)
        batches, cursor, since = make(), Cursor(), []  # a new process
        cursor.load(json.loads(kept))
        for step in range(1, draw.randint(1, 12)):
            since += starts(batches, cursor.take(data_ranks * size), data_ranks)
            if step % every == 0:
                safe, since, kept = safe + since, [], json.dumps(cursor.state())
        wasted += len(since)
    assert wasted
    for epoch in range(4):
        counts = Counter(safe[epoch * WINDOWS : (epoch + 1) * WINDOWS])
        first = min(counts)
        assert counts == Counter(range(first, first + WINDOWS * SEQUENCE, SEQUENCE))


@pytest.mark.parametrize("seed", range(8))
def test_left_out_samples_are_missing_and_no_others(seed: int) -> None:
    draw = random.Random(seed)
    cursor, gone, taken = Cursor(), set(), []
    for _ in range(40):
        if draw.random() < 0.5:
            start = cursor.position + draw.randint(-5, 30)
            stop = start + draw.randint(-2, 12)
            cursor.leave_out(start, stop)
            gone |= set(range(max(start, cursor.position), stop))
        again = Cursor()
        again.load(json.loads(json.dumps(cursor.state())))
        rows = draw.randint(1, 9)
        samples = cursor.take(rows)
        assert samples == again.take(rows) and len(samples) == rows
        assert again.state() == cursor.state()
        taken += samples
    assert taken == [sample for sample in range(cursor.position) if sample not in gone]


def test_going_back_leaves_out_the_bad_batches_and_takes_the_rest_again() -> None:
    cursor = Cursor()
    cursor.take(4)
    kept = cursor.state()
    good = cursor.take(4)
    before = cursor.position
    bad = cursor.take(4)
    after = cursor.position
    cursor.leave_out(before, after)
    cursor.rewind(kept)
    assert cursor.take(4) == good
    assert cursor.take(4) == [sample + 4 for sample in bad]
    assert cursor.left_out == [(8, 12)]


def test_intervals_are_kept_disjoint_and_in_order() -> None:
    cursor = Cursor()
    for start, stop in ((20, 30), (5, 8), (8, 10), (25, 40), (1, 1), (3, 2)):
        cursor.leave_out(start, stop)
    assert cursor.left_out == [(5, 10), (20, 40)]
    assert cursor.take(8) == [0, 1, 2, 3, 4, 10, 11, 12]
    assert cursor.take(10) == [*range(13, 20), 40, 41, 42]
