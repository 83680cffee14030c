"""The script that runs the suite in parts: `make unit`."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def suite():
    spec = importlib.util.spec_from_file_location("ci_suite", ROOT / ".ci" / "suite.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_test_is_in_one_part(suite):
    given = [Path(path) for part in suite.PARTS if part != "pure" for path in suite.paths(part)]
    assert len(given) == len(set(given))
    tests = {path.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py")}
    assert {path for path in tests if sum(path == each or each in path.parents for each in given) != 1} == set()


def test_what_runs_twice_is_there(suite):
    assert all((ROOT / path).is_dir() for path in suite.paths("pure"))


@pytest.mark.parametrize(("failing", "gate", "told"), [([], 0, None), (["spark"], 0, "spark"), ([], 2, "coverage")])
def test_a_part_or_the_gate_fails_the_run(suite, monkeypatch, failing, gate, told):
    found = {part: int(part in failing) for part in suite.PARTS}
    monkeypatch.setattr(suite, "install_servers", lambda: None)
    monkeypatch.setattr(suite, "run", found.__getitem__)
    monkeypatch.setattr(suite, "gate", lambda *, enforce: gate)
    monkeypatch.setattr(suite, "ROOT", Path("/nonexistent"))
    monkeypatch.setattr(suite.sys, "argv", ["suite.py"])
    with pytest.raises(SystemExit) as end:
        suite.main()
    assert end.value.code == (0 if told is None else f"failed: {told}")
