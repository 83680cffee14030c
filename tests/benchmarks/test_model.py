from __future__ import annotations

import pytest

from .model import Check, Row, judge, percentile, spread
from .rows import ROWS, row_named


def row(*checks: Check) -> Row:
    return Row(name="r", title="t", unit="s/item", reference="base", measure=lambda *_: {}, checks=checks)


def test_a_ratio_is_taken_within_each_run_and_then_the_median_of_the_runs():
    check = Check(what="w", subject="ours", reference="base", bound="<=", target=5.0)
    # the machine was ten times slower in the second run: the ratio does not move
    runs = [{"ours": [4.0], "base": [1.0]}, {"ours": [40.0], "base": [10.0]}, {"ours": [60.0], "base": [10.0]}]
    (verdict,) = judge(row(check), "uvloop", runs)
    assert verdict.ratio == 4.0
    assert verdict.per_run == [4.0, 4.0, 6.0]
    assert verdict.met
    assert (verdict.figure, verdict.reference) == (40.0, 10.0)


def test_faster_turns_the_ratio_round():
    check = Check(what="w", subject="ours", reference="queue", bound=">=", target=6.0, faster=True)
    (verdict,) = judge(row(check), "uvloop", [{"ours": [1.0], "queue": [5.0]}])
    assert verdict.ratio == 5.0
    assert not verdict.met


def test_a_check_without_a_reference_holds_the_figure_against_the_target():
    check = Check(what="w", subject="ours", bound="<", target=3.0, percentile=99.0, pooled=True)
    runs = [{"ours": [1.0] * 50}, {"ours": [1.0] * 49 + [9.0]}]
    (verdict,) = judge(row(check), "uvloop", runs)
    assert verdict.ratio is None
    assert verdict.figure == pytest.approx(1.0 + 0.01 * 8, abs=0.1)
    assert verdict.met


@pytest.mark.parametrize(
    ("bound", "value", "met"),
    [("<=", 5.0, True), ("<=", 5.1, False), ("<", 5.0, False), ("<", 4.9, True), (">=", 5.0, True), (">=", 4.9, False)],
)
def test_bounds(bound, value, met):
    assert Check(what="w", subject="s", bound=bound, target=5.0).met(value) is met


def test_an_unknown_bound_is_an_error():
    with pytest.raises(ValueError, match="bound '=='"):
        Check(what="w", subject="s", bound="==", target=5.0).met(1.0)


def test_percentiles_lie_between_the_closest_ranks():
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile([0.0, 10.0], 25) == 2.5
    assert percentile([7.0], 99) == 7.0
    with pytest.raises(ValueError, match="no samples"):
        percentile([], 50)


def test_the_spread_tells_between_runs_from_within_a_run():
    between, within = spread([{"base": [1.0, 1.0]}, {"base": [1.5, 1.5]}], "base")
    assert (between, within) == (0.5, 0.0)


def test_every_row_has_its_own_name_and_each_of_the_issues_targets():
    assert len({row.name for row in ROWS}) == len(ROWS)
    targets = {(row.name, check.what): (check.bound, check.target) for row in ROWS for check in row.checks}
    assert targets["nowait", "consumer, x baseline"] == ("<=", 5.0)
    assert targets["nowait", "consumer, faster than asyncio.Queue"] == (">=", 6.0)
    assert targets["produce", "consumer, faster than asyncio.Queue"] == (">=", 4.0)
    assert targets["types", "100 types, x baseline"] == ("<=", 7.0)
    assert targets["types", "2,000 types, x 100 types"] == ("<=", 1.3)
    assert targets["many", "one type, x baseline"] == ("<=", 1.0)
    assert targets["many", "100 types mixed, x baseline"] == ("<=", 3.5)
    assert targets["sparse", "p50"] == ("<", 0.0002)
    assert targets["sparse", "p99"] == ("<", 0.002)
    assert targets["idle", "share of a core"] == ("<", 0.01)
    assert targets["memory", "bytes a queue"] == ("<", 20_000.0)
    assert targets["rebalance", "max/min worker load"] == ("<=", 1.05)
    assert targets["rebalance", "throughput, x static"] == (">=", 1.21)


def test_an_unknown_row_is_an_error_that_lists_the_rows():
    with pytest.raises(ValueError, match="no row is named 'nowat'; there are: nowait, "):
        row_named("nowat")
