"""The judgement of the soak: what it counts, and what it draws. The run itself is `make soak`."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest
from test_docs import ROOT

SPEC = importlib.util.spec_from_file_location("soak_report", ROOT / "tests" / "soak" / "report.py")
report = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(report)


def test_a_slope_is_that_of_the_line():
    assert report.slope([(0, 10.0), (1, 12.0), (2, 14.0)]) == pytest.approx(2.0)
    assert report.slope([(0, 1.0), (1, 3.0), (2, 1.0), (3, 3.0)]) == pytest.approx(0.4)
    assert report.slope([(3, 1.0)]) == report.slope([]) == report.slope([(1, 1), (1, 2)]) == 0.0


def test_the_report_has_the_verdict_the_plots_and_the_faults(tmp_path):
    samples = [{"t": float(t), "rss": 50.0 + t, "redis waiting": t * 10.0, "redis delivered": t} for t in range(5)]
    verdict = SimpleNamespace(
        samples=samples,
        faults=[(1.5, "redis", "kill <2.0 s>")],
        lost={"redis": 3},
        repeated={"redis": 1},
        passed=False,
        accepted=1_000,
        minutes=0.5,
        seed=7,
        memory_slope=0.25,
        machine="a machine",
    )
    report.write_report(tmp_path / "soak.html", verdict)
    text = (tmp_path / "soak.html").read_text()
    assert "FAILED: 1,000 events in 0.5 minutes" in text
    assert text.count("<polyline") == 3
    assert "kill &lt;2.0 s&gt;" in text
    assert "<td>redis</td><td>3</td><td>1</td>" in text
