import math

import pytest

from zeroshard.errors import ConfigError
from zeroshard.text import (
    DASH,
    format_bytes,
    format_count,
    format_decimal,
    format_difference,
    format_duration,
    format_exact,
    format_seconds,
    parse_bytes,
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
        (4096 * 1024**3, "4,096.00 GiB"),
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


@pytest.mark.parametrize(
    "size, expected",
    [
        (0, 0),
        (123, 123),
        ("123", 123),
        ("7B", 7),
        ("1KB", 1000),
        ("1KiB", 1024),
        ("512MiB", 536_870_912),
        ("2MB", 2_000_000),
        ("1.5GiB", 1_610_612_736),
        ("0.5 GB", 500_000_000),
        ("1TiB", 2**40),
        ("2 TB", 2 * 10**12),
        ("  3 KiB ", 3072),
        (" 3 B ", 3),
        (".5 KB", 500),
        (2**53 + 1, 9_007_199_254_740_993),
    ],
)
def test_parse_bytes(size: str | int, expected: int) -> None:
    assert parse_bytes(size) == expected


NO_SIZES = "|B|1.2.3MiB|.|-1|1e9|1 PB|1mib|1Mi|MiB 1|1 MiB 2|nan|inf|1.5|1.5 B|GiB|1..5GiB|3 XB"


@pytest.mark.parametrize("size", [*NO_SIZES.split("|"), 1.5])
def test_what_is_no_size(size: str) -> None:
    with pytest.raises(ConfigError, match="KiB, MiB, GiB"):
        parse_bytes(size)
