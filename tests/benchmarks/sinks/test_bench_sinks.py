from __future__ import annotations

import json

from tests.benchmarks.sinks.__main__ import main
from tests.benchmarks.sinks.measuring import Comparison, compare


async def test_what_takes_turns_is_compared_by_turns():
    calls = []

    def subject(name, rates):
        async def run(batches):
            calls.append((name, batches))
            return next(rates)

        return run

    fast, slow = subject("fast", iter([1, 10.0, 40.0, 20.0])), subject("slow", iter([1, 5.0, 10.0, 20.0]))
    rows = await compare(
        {"fast": fast, "slow": slow},
        [Comparison("fast", "slow", 1.5), Comparison("slow", "fast", 0.9), Comparison("slow", "fast", None)],
        turns=3,
        batches=20,
    )
    assert [(row.rate, row.ratio, row.met) for row in rows] == [
        (20.0, 2.0, True),
        (10.0, 0.5, False),
        (10.0, 0.5, True),
    ]
    assert calls[:4] == [("fast", 2), ("slow", 2), ("fast", 20), ("slow", 20)]


def test_the_bench_runs_and_reports(postgres, kafka, capsys, tmp_path):
    out = tmp_path / "results" / "sinks.json"
    main(["--turns", "1", "--batches", "2", "--out", str(out)])
    printed = capsys.readouterr().out
    assert printed.count("target >=") == 5
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 8
    assert all(row["rate"] > 0 for row in rows)
