"""The table of activations: what was done with each block, with sums of what is measured."""

import math

from zeroshard.report.activations_table import activations_table
from zeroshard.report.run_folder import ActivationRecord

ROWS = [
    ActivationRecord("blocks.0", "computed again", 4096.0, 1024.0, 1024.0, 1.0, 1.0, 0.002, 0.0025, 0.0, 0.0),
    ActivationRecord("blocks.1", "kept", 4096.0, 4096.0, math.nan, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0),
    ActivationRecord("blocks.2", "sent to the host", 4096.0, 512.0, math.nan, 0.0, 0.0, 0.0, 0.0, 0.0015, math.nan),
]


def test_each_block_has_a_row_and_seconds_are_added_up() -> None:
    table = activations_table(ROWS)
    assert table is not None
    cells = [[cell.text for cell in row.cells] for row in (*table.rows, *table.sums)]
    assert [row[:4] for row in cells] == [
        ["computed again", "4.00 KiB", "1.00 KiB", "1.00 KiB"],
        ["kept", "4.00 KiB", "4.00 KiB", "–"],
        ["sent to the host", "4.00 KiB", "512 B", "–"],
        ["–", "12.00 KiB", "5.50 KiB", "–"],
    ]
    assert [row[4:] for row in cells] == [
        ["1 / 1.0", "2.0 ms", "2.5 ms", "0.0 ms / 0.0 ms"],
        ["0 / 0.0", "0.0 ms", "0.0 ms", "0.0 ms / 0.0 ms"],
        ["0 / 0.0", "0.0 ms", "0.0 ms", "1.5 ms / –"],
        ["1 / 1.0", "2.0 ms", "2.5 ms", "1.5 ms / –"],
    ]
    assert all(len(row) == len(table.heads) - 1 for row in cells)


def test_without_decisions_there_is_none() -> None:
    assert activations_table([]) is None
