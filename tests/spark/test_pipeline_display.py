"""What a run shows: counts from Spark's reports, lines and tables of them, and the picture."""

from __future__ import annotations

import io
import itertools
from types import SimpleNamespace
from xml.etree import ElementTree as ET

from batchqueue_async.spark.pipelines.display import Display, bar, line, table
from batchqueue_async.spark.pipelines.picture import draw, nice
from batchqueue_async.spark.pipelines.progress import ProgressListener, QueryProgress, Sample

_numbers = itertools.count()


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def report(*, name="minute", rows=10, seconds=0.5, late=0, behind=None, watermark=None):
    source = SimpleNamespace(metrics={}, endOffset='{"events":{"0":7,"1":9}}')
    if behind is not None:
        source.metrics = {"avgOffsetsBehindLatest": str(behind)}
    return SimpleNamespace(
        progress=SimpleNamespace(
            name=name,
            runId="run",
            batchId=next(_numbers),
            numInputRows=rows,
            batchDuration=seconds * 1000,
            timestamp="1970-01-01T00:01:40.000Z",
            eventTime={"watermark": watermark} if watermark else {},
            stateOperators=[SimpleNamespace(numRowsDroppedByWatermark=late)],
            sources=[source],
        )
    )


def test_reports_are_counted():
    clock = Clock()
    listener = ProgressListener(["minute"], clock=clock, now=lambda: 102.0)
    clock.now = 1.0
    listener.onQueryProgress(report(late=2, behind=4.5, watermark="1970-01-01T00:01:00.000Z"))
    found = listener.queries()["minute"]
    assert (found.batches, found.rows, found.rate, found.batch_seconds, found.lag) == (1, 10, 20.0, 0.5, 2.0)
    assert (found.late, found.behind, found.watermark) == (2, 9.0, 60.0)
    clock.now = 3.0
    listener.onQueryProgress(report(rows=30, late=1))
    clock.now = 4.0
    listener.onQueryProgress(report(rows=0))  # of a watermark alone
    listener.onQueryProgress(report(name="of another pipeline"))
    found = listener.queries()["minute"]
    assert (found.batches, found.rows, found.rate, found.late, found.behind) == (2, 40, 15.0, 3, None)
    assert [(each.at, each.rows) for each in listener.samples()] == [(1.0, 10), (3.0, 30), (4.0, 0)]
    listener.set("minute", state="running", written=5)
    assert (listener.queries()["minute"].state, listener.queries()["minute"].written) == ("running", 5)


class Run:
    is_over = False

    def __init__(self, *queries):
        self._queries = list(queries)

    def queries(self):
        return self._queries


def test_a_file_gets_a_line_per_query_every_few_seconds():
    clock, out = Clock(), io.StringIO()
    display = Display(out, clock=clock, footer=lambda queries: f"{len(queries)} queries")
    run = Run(QueryProgress(name="minute", state="waiting", rows=5, error="KafkaError", restarts=2))
    for clock.now in (0.0, 1.0, 4.9, 5.0, 6.0):
        assert display.watch(run) is False
    shown = out.getvalue().splitlines()
    assert len(shown) == 4
    assert shown[2].startswith("   5 s  minute: waiting, 0 batches, 5 rows")
    assert shown[2].endswith("restarts 2, KafkaError")
    assert shown[3] == "1 queries"
    run.is_over = True
    display.watch(run)
    assert len(out.getvalue().splitlines()) == 6


def test_a_terminal_gets_a_table_that_stays_in_its_place():
    clock, out = Clock(), io.StringIO()
    display = Display(out, live=True, clock=clock)
    run = Run(QueryProgress(name="minute"), QueryProgress(name="five", behind=7.0, dead=1))
    display.watch(run)
    first = out.getvalue()
    assert "\x1b[4F" not in first
    assert first.count("\n") == 4
    clock.now = 1.0
    display.watch(run)
    assert out.getvalue()[len(first) :].startswith("\x1b[4F\x1b[2Kquery")


def test_a_table_is_as_wide_as_what_is_in_it():
    found = table([QueryProgress(name="a long name", state="running", rows=1_234_567, restarts=1)])
    assert found[0].split()[:2] == ["query", "state"]
    assert found[1].startswith("a long name  running (1 restarts)  ")
    assert "1,234,567" in found[1]
    assert "late 3" in line(QueryProgress(name="x", late=3), 1.0)


def test_a_bar_stays_within_its_bounds():
    assert bar(-1.0, 4) == "[----]   0 %"
    assert bar(7.0, 4) == "[####] 100 %"


def test_the_picture_has_a_line_per_query_in_each_chart():
    samples = [
        Sample(at=float(at), query=name, rows=rows, seconds=0.5, lag=0.75)
        for at in range(1, 11)
        for name, rows in (("minute", 100 * at), ("a <b> & c", 50))
    ]
    root = ET.fromstring(draw("what & how", samples))
    space = "{http://www.w3.org/2000/svg}"
    lines = root.findall(f"{space}polyline")
    assert len(lines) == 6
    points = [tuple(map(float, each.split(","))) for each in lines[0].get("points").split()]
    assert [x for x, _ in points] == sorted(x for x, _ in points)
    assert [y for _, y in points] == sorted((y for _, y in points), reverse=True)  # more rows are higher
    width, height = float(root.get("width")), float(root.get("height"))
    assert all(0 <= x <= width and 0 <= y <= height for x, y in points)
    assert {"minute", "a <b> & c", "rows a second", "2,000"} <= {each.text for each in root.findall(f"{space}text")}
    assert draw("nothing", []).count("polyline") == 0


def test_axes_end_at_round_numbers():
    assert [nice(value) for value in (0.031, 1.0, 1.1, 4.5, 99.0, 100.0, 3_901.0)] == [0.04, 1, 2, 5, 100, 100, 4_000]
