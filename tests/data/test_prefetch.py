"""Items made ahead in a thread: in order, few at a time, and with errors in their turn."""

import time
from collections.abc import Iterator

import pytest

from zeroshard.data.prefetch import Prefetch


def test_items_come_in_order_and_few_are_made_ahead() -> None:
    made = []

    def items() -> Iterator[int]:
        for number in range(100):
            made.append(number)
            yield number

    ahead = Prefetch(items, 3)
    assert [ahead.next() for _ in range(5)] == [0, 1, 2, 3, 4]
    time.sleep(0.05)
    assert 7 <= len(made) <= 13  # five taken, and up to two beside them, three in the queue, three that wait
    ahead.stop()
    assert not ahead._thread.is_alive()


def test_an_error_is_raised_after_the_items_before_it() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise ValueError("no more")

    ahead = Prefetch(items, 3)
    assert ahead.next() == 1
    with pytest.raises(ValueError, match="no more"):
        ahead.next()
