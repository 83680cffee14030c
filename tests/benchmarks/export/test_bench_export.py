from __future__ import annotations

import json

from tests.benchmarks.export import steps
from tests.benchmarks.export.__main__ import main


def test_the_bench_runs_and_reports(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, size in (("DELAYED", 400), ("SETTLED", 200), ("FAILED_OVER", 300)):
        monkeypatch.setattr(steps, name, size)
    monkeypatch.setattr(steps.throttled, "__defaults__", (5.0,))
    out = tmp_path / "results" / "export.json"
    sizes = ["--batches", "20", "--times", "3", "--records", "2000", "--batch", "100"]
    main(["--rounds", "1", *sizes, "--out", str(out)])
    assert capsys.readouterr().out.count("target") == 10
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 10
    assert all(row["value"] > 0 for row in rows if "fdatasync" not in row["name"] and "refused" not in row["name"])
