"""The table of what was done with each block's activations under a budget: predicted beside measured."""

import math
from collections.abc import Sequence

from zeroshard.report.run_folder import ActivationRecord
from zeroshard.report.tables import Cell, Row, Table
from zeroshard.text import DASH, format_bytes, format_decimal, format_exact


def activations_table(rows: Sequence[ActivationRecord]) -> Table | None:
    """Action, bytes and seconds of each block; None without decisions."""
    if not rows:
        return None
    total = Row(
        "All blocks",
        (
            Cell(DASH),
            _bytes(sum(row.saved_bytes for row in rows)),
            _bytes(sum(row.kept_bytes for row in rows)),
            Cell(DASH),
            _times(sum(row.again for row in rows), sum(row.measured_again for row in rows)),
            _seconds(sum(row.again_seconds for row in rows)),
            _seconds(sum(row.measured_again_seconds for row in rows)),
            _both(sum(row.stored_seconds for row in rows), sum(row.measured_stored_seconds for row in rows)),
        ),
    )
    return Table(
        "Activations of each block",
        ("Block", "Action", "Saves", "Kept, predicted", "Kept, measured", "Again", "Predicted", "Measured", "Stored"),
        tuple(Row(row.block, _cells(row)) for row in rows),
        (total,),
        "Saves: what the block would keep of itself. Kept: between forward and backward, with the input of the next"
        " block. Again: how often its forward is computed again, predicted and measured, and the time that this takes"
        " in one forward and backward of the model. Stored: the time that compressing a block, sending it to the host,"
        " or making tensors of it again takes in one, predicted and, for the last of these, measured.",
    )


def _cells(row: ActivationRecord) -> tuple[Cell, ...]:
    return (
        Cell(row.action),
        _bytes(row.saved_bytes),
        _bytes(row.kept_bytes),
        _bytes(row.measured_kept_bytes),
        _times(row.again, row.measured_again),
        _seconds(row.again_seconds),
        _seconds(row.measured_again_seconds),
        _both(row.stored_seconds, row.measured_stored_seconds),
    )


def _bytes(n: float) -> Cell:
    return Cell(format_bytes(n), format_exact(n, "B")) if math.isfinite(n) else Cell(DASH)


def _times(predicted: float, measured: float) -> Cell:
    return Cell(f"{predicted:g} / {format_decimal(measured, 1)}")


def _both(predicted: float, measured: float) -> Cell:
    return Cell(f"{_seconds(predicted).text} / {_seconds(measured).text}")


def _seconds(n: float) -> Cell:
    return Cell(f"{format_decimal(1e3 * n, 1)} ms") if math.isfinite(n) else Cell(DASH)
