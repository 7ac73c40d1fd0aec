"""Tables of bytes and traffic, as people see them in terminals and notebooks."""

from fractions import Fraction

import pytest

from zeroshard.planning.tables import MemoryRow, MemoryTable, TrafficRow, TrafficTable

ROWS = [
    MemoryRow("parameters", "device", Fraction(3000, 2), Fraction(0), 1536, 2048),
    MemoryRow("buffers", "device", None, None, 512, 512),
    MemoryRow("optimizer states", "host", Fraction(8000), Fraction(96), 8096, 8096),
]


def test_memory_prints_rows_and_the_total_of_the_device() -> None:
    table = MemoryTable(ROWS, budget=4096)
    title, header, *rows, note = repr(table).splitlines()
    assert title == "bytes on this rank" and header.split("  ")[0] == "category"
    assert [row.split("  ")[0] for row in rows] == ["parameters", "buffers", "optimizer states, host"]
    assert len({len(row) for row in (header, *rows)}) == 1
    assert table.total == 2048
    assert note == "total on the device: 2,048 bytes (2.00 KiB, 50.0% of 4.00 KiB)"
    assert repr(MemoryTable(ROWS)).endswith("total on the device: 2,048 bytes (2.00 KiB)")


def test_rows_are_found_by_category_and_tier() -> None:
    table = MemoryTable(ROWS)
    assert table["parameters"].measured_bytes == 1536 and table["optimizer states", "host"].peak_bytes == 8096
    with pytest.raises(StopIteration):
        table["optimizer states"]
    assert table.as_dicts()[0]["planned_bytes"] == 1500.0 and list(table) == ROWS


def test_notebooks_show_the_same_cells() -> None:
    shown = MemoryTable(ROWS, budget=4096)._repr_html_()
    assert shown.count("<tr>") == 4 and "<td>optimizer states, host</td><td>8,000</td>" in shown
    assert "50.0% of 4.00 KiB)</p>" in shown
    row = TrafficRow("a <send>", None, 10, 0, 40, 40, 1, 0.5)
    traffic = TrafficTable([row])
    assert "<td>a &lt;send&gt;</td><td>-</td><td>10</td>" in traffic._repr_html_()
    assert "total" not in repr(traffic) and traffic["a <send>"] is row
