"""Reports of ranks: their bytes, and the lists in a line of metrics."""

import math

import pytest

from zeroshard.train.rank_reports import MOST_RANKS, RankReport, of_ranks, rank_facts, resident_bytes


def _report(rank: int, exposed: float = 0.0) -> RankReport:
    return RankReport(2.5, rank / 10, rank, 2**40 + rank, 100 + rank, exposed)


def test_a_report_travels_in_bytes_without_a_loss_of_digits() -> None:
    report = _report(3, exposed=1 / 3)
    assert RankReport.unpack(report.pack()) == report
    assert len(report.pack()) == 41
    lost = RankReport.unpack(RankReport(math.nan, 0.0, 15, 0, 0, 0.0).pack())
    assert math.isnan(lost.loss) and lost.stop == 15


def test_a_line_of_metrics_lists_all_ranks_and_leaves_out_what_is_zero_everywhere() -> None:
    assert of_ranks([_report(0), _report(1)]) == {
        "ranks": {"busy_seconds": [0.0, 0.1], "rss_bytes": [2**40, 2**40 + 1], "memory_bytes": [100, 101]}
    }
    assert of_ranks([_report(0), _report(1, 0.5)])["ranks"]["exposed_seconds"] == [0.0, 0.5]


@pytest.mark.parametrize("count", [0, 1])
def test_a_single_rank_has_no_list(count: int) -> None:
    assert of_ranks([_report(0)] * count) == {}


def test_of_many_ranks_the_least_median_and_greatest_are_kept() -> None:
    found = of_ranks([_report(rank) for rank in range(MOST_RANKS + 1)])["ranks"]
    assert found["quantiles"] is True
    assert found["memory_bytes"] == [100, 100 + MOST_RANKS / 2, 100 + MOST_RANKS]


def test_the_facts_of_a_rank_sum_up_its_waits() -> None:
    facts = rank_facts(2, None, {"exposed_seconds": {"update": 0.25, "disk": 0.5}})
    assert (facts["rank"], facts["peak_bytes"], facts["exposed_seconds"]) == (2, None, 0.75)
    assert facts["rss_bytes"] == pytest.approx(resident_bytes(), rel=0.5)
    assert rank_facts(0, 1, {})["exposed_seconds"] == 0
