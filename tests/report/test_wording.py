import math

import pytest

from zeroshard.report import format_bytes
from zeroshard.report.wording import (
    DASH,
    format_count,
    format_decimal,
    format_difference,
    format_duration,
    format_exact,
    format_seconds,
)


@pytest.mark.parametrize(
    ("n", "words"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (0.5, "0.50 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (5 * 1024**2, "5.00 MiB"),
        (3 * 1024**3, "3.00 GiB"),
        (4096 * 1024**3, "4096.00 GiB"),
        (-1536, "−1.50 KiB"),
        (math.nan, DASH),
        (math.inf, DASH),
    ],
)
def test_bytes_have_two_decimals_and_a_binary_unit(n: float, words: str) -> None:
    assert format_bytes(n) == words


def test_bytes_never_read_as_1024_of_a_smaller_unit() -> None:
    assert format_bytes(1024**2 - 1) == "1.00 MiB"


def test_counts_are_short_in_headlines_and_exact_in_tables() -> None:
    assert format_count(12_345_678) == "12.35 M"
    assert format_count(999) == "999"
    assert format_exact(12_345_678) == "12,345,678"
    assert format_exact(1234.5, "B") == "1,234.5 B"


def test_a_difference_below_one_unit_is_equal() -> None:
    assert format_difference(0.75) == "equal"
    assert format_difference(256, "B") == "+256 B"
    assert format_difference(-256, "B") == "−256 B"
    assert format_difference(math.nan) == DASH


def test_short_times_are_milliseconds() -> None:
    assert format_duration(0.00325) == "3.25 ms"
    assert format_duration(0.0) == "0.00 ms"
    assert format_duration(75) == "1 min 15 s"
    assert format_duration(math.nan) == DASH


def test_times_and_decimals() -> None:
    assert format_seconds(9.53) == "9.5 s"
    assert format_seconds(75) == "1 min 15 s"
    assert format_seconds(3723) == "1 h 02 min"
    assert format_seconds(3599.9) == "1 h 00 min"
    assert format_decimal(math.nan) == DASH
