from __future__ import annotations

import json
import pstats
import subprocess
import sys
from pathlib import Path

import pytest

from . import page
from .rows import ROWS

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.timeout(600)  # each row has a process of its own


def run_bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.benchmarks", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=500)


def test_every_row_is_measured_judged_and_written(tmp_path):
    done = run_bench("--quick", "--runs", "1", "--loop", "asyncio", "--output", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert [row["name"] for row in results["rows"]] == [row.name for row in ROWS]
    for row, expected in zip(results["rows"], ROWS, strict=True):
        assert row["error"] is None
        assert len(row["runs"]) == 1
        assert [check["what"] for check in row["checks"]] == [check.what for check in expected.checks]
        assert all(check["figure"] >= 0 for check in row["checks"])
        for check in expected.checks:
            assert check.what in done.stdout
    assert "The machine's noise" in done.stdout
    check_page(results, tmp_path)


def check_page(results, directory):
    """The page of figures has each check and each case of the plotted loop, and says which run it is."""
    for row in results["rows"]:
        row["loop"] = page.LOOP
    text = page.page(results, "abc1234")
    assert "commit `abc1234`" in text
    assert results["when"][:10] in text
    for row in ROWS:
        for check in row.checks:
            assert f"| {row.name} | {check.what} |" in text
    for case in results["rows"][0]["runs"][0]:
        assert f"| {case} |" in text
    pytest.importorskip("matplotlib")
    for name in ("one.svg", "two.svg"):
        page.draw(results, directory / name)
    assert (directory / "one.svg").read_bytes() == (directory / "two.svg").read_bytes()
    assert "batchqueue produce_nowait" in (directory / "one.svg").read_text()


def test_fewer_than_five_runs_are_refused():
    done = run_bench("--runs", "4")
    assert done.returncode == 2
    assert "--runs=4 is below 5" in done.stderr


def test_a_row_can_be_profiled(tmp_path):
    done = run_bench("--quick", "--profile", "many", "--loop", "asyncio", "--output", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Ordered by: internal time" in done.stdout
    # Not in what was printed: among the calls that cost most, the compiled queue's need not be.
    calls = pstats.Stats(str(tmp_path / "profile-many-asyncio.prof")).stats
    assert any(Path(file).name == "batch_queue.py" for file, _, _ in calls)


@pytest.mark.parametrize("arguments", [("--only", "nowat"), ("--profile", "nowat")])
def test_an_unknown_row_is_refused(arguments):
    done = run_bench(*arguments)
    assert done.returncode == 2
    assert "nowait" in done.stderr
