from __future__ import annotations

from tests.benchmarks.bridge.__main__ import main


def test_the_bench_runs_and_reports(capsys):
    main(["--rounds", "1", "--items", "2000"])
    printed = capsys.readouterr().out
    assert "bridge / in loop" in printed
    assert "target: at most 2.5" in printed
