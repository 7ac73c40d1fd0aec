import math

from zeroshard.report.run_records import (
    ActivationRecord,
    ForecastRecord,
    MemoryRecord,
    PredictionRow,
    TrafficRecord,
    TrainingPoint,
)
from zeroshard.report.tables import (
    Row,
    activations_table,
    exposed_table,
    fields_table,
    memory_table,
    prediction_table,
    traffic_table,
)
from zeroshard.text import DASH


def _words(row: Row) -> list[str]:
    return [cell.text for cell in row.cells]


def test_formula_and_padding_are_held_against_the_ledger() -> None:
    table = memory_table((MemoryRecord("gradients", 1000.5, 23.5, 1024, 2048),), {"gradients": "hue1"})
    assert table is not None
    assert _words(table.rows[0]) == ["1000.50 B", "23.50 B", "1.00 KiB", "equal", "2.00 KiB"]
    assert table.rows[0].cells[2].exact == "1,024 B"
    assert table.rows[0].style == "hue1"


def test_a_byte_too_many_is_shown() -> None:
    table = memory_table((MemoryRecord("gradients", 1000, 24, 1025, 1025),), {})
    assert table is not None
    assert _words(table.rows[0])[3] == "+1 B"


def test_sums_leave_out_what_has_no_formula_and_say_so() -> None:
    rows = (MemoryRecord("parameters", 100, 4, 104, 104), MemoryRecord("activations", math.nan, math.nan, 500, 900))
    table = memory_table(rows, {})
    assert table is not None
    assert _words(table.rows[1]) == [DASH, DASH, "500 B", DASH, "900 B"]
    assert [(row.name, _words(row)) for row in table.sums] == [
        ("Categories with a formula", ["100 B", "4 B", "104 B", "equal", DASH]),
        ("All categories", [DASH, DASH, "604 B", DASH, DASH]),
    ]


def test_tiers_below_the_device_are_named_and_summed_apart() -> None:
    rows = (
        MemoryRecord("gradients", 100, 4, 104, 104),
        MemoryRecord("gradients", 4000, 96, 4096, 4096, "host"),
        MemoryRecord("buffers", math.nan, math.nan, 500, 900, "host"),
    )
    table = memory_table(rows, {"gradients": "hue1"})
    assert table is not None
    assert [(row.name, row.style) for row in table.rows] == [
        ("gradients", "hue1"),
        ("gradients, host", ""),
        ("buffers, host", ""),
    ]
    assert [(row.name, _words(row)[2]) for row in table.sums] == [
        ("Categories with a formula, device", "104 B"),
        ("All categories, device", "104 B"),
        ("Categories with a formula, host", "4.00 KiB"),
        ("All categories, host", "4.49 KiB"),
    ]


def test_what_offload_cost_over_all_steps() -> None:
    exposed = ({"update": 0.001}, {"update": 0.003, "disk": 2.0}, {"update": 0.002})
    points = [TrainingPoint(n, 1, 1, 1, 1, 1, False, causes, 3, n - 1) for n, causes in enumerate(exposed, 1)]
    table = exposed_table(points)
    assert table is not None
    assert [(row.name, _words(row)) for row in (*table.rows, *table.sums)] == [
        ("update", ["6.00 ms", "2.00 ms", "3.00 ms"]),
        ("disk", ["2.0 s", "0.00 ms", "2.0 s"]),
        ("All causes", ["2.0 s", "2.00 ms", "2.0 s"]),
    ]
    assert table.note.endswith("9 speculative updates were taken and 3 undone.")
    assert exposed_table([TrainingPoint(1, 1, 1, 1, 1, 1, False)]) is None


def test_traffic_differences_and_sums() -> None:
    table = traffic_table((TrafficRecord("reduce", 1000, 1256, 2512, 2), TrafficRecord("gather", 500, 500, 1000, 1)))
    assert table is not None
    assert _words(table.rows[0]) == ["1,000", "1,256", "+256", "2.45 KiB", "2"]
    assert _words(table.sums[0]) == ["1,500", "1,756", "+256", "3.43 KiB", "3"]


def test_no_rows_make_no_table() -> None:
    assert memory_table((), {}) is None
    assert traffic_table(()) is None


def test_fields_read_as_text() -> None:
    fields = {"zero": 2, "offload": None, "overlap": True, "betas": [0.9, 0.95], "learning_rate": 3e-4}
    assert fields_table({**fields, "train_bytes": 2048, "digest": "ab"}) == (
        ("zero", "2"),
        ("offload", DASH),
        ("overlap", "true"),
        ("betas", "[0.9, 0.95]"),
        ("learning rate", "0.0003"),
        ("train bytes", "2.00 KiB (2,048 B)"),
        ("digest", "ab"),
    )


def test_what_was_predicted_beside_what_was_measured() -> None:
    numbers = (("memory", "peak", 1024, 1024), ("wire", "reduce", 0, 8), ("time", "step", 0.01, 0.0125))
    forecast = ForecastRecord(1, 20, tuple(PredictionRow(*row) for row in numbers), ("a step takes longer.",))
    table = prediction_table(forecast)
    assert table is not None
    assert [(row.name, _words(row)) for row in table.rows] == [
        ("memory: peak", ["1.00 KiB", "1.00 KiB", "equal"]),
        ("wire: reduce", ["0 B", "8 B", DASH]),
        ("time: step", ["10 ms", "12.5 ms", "+25.00 %"]),
    ]
    assert table.note == "Rank 1, up to step 20. Times are medians of a step. Missed: a step takes longer."
    assert prediction_table(None) is None


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
