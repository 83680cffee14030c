from __future__ import annotations

import json

from tests.benchmarks.export.__main__ import main


def test_the_bench_runs_and_reports(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "results" / "export.json"
    sizes = ["--batches", "20", "--times", "3", "--records", "2000", "--batch", "100"]
    main(["--rounds", "1", *sizes, "--out", str(out)])
    assert capsys.readouterr().out.count("target") == 5
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 5
    assert all(row["value"] > 0 for row in rows if "fdatasync" not in row["name"])
