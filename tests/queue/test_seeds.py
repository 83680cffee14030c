"""Hundreds of the programs of `queue_programs.py`, each in its own task order; `make chaos` runs thousands."""

from __future__ import annotations

import collections
import logging

import pytest
from queue_programs import run_seed

SLICE = 50
"""How many seeds one test takes."""


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="batchqueue_async")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "first_seed" in metafunc.fixturenames:
        others = [pytest.param(first, marks=pytest.mark.untraced) for first in range(SLICE, 300, SLICE)]
        metafunc.parametrize("first_seed", [0, *others])


def test_guarantees_hold_in_task_orders_by_chance(first_seed: int, request: pytest.FixtureRequest) -> None:
    only = request.config.getoption("--seed")
    if only is not None:
        if first_seed == 0:
            run_seed(only)
        return
    for seed in range(first_seed, first_seed + SLICE):
        run_seed(seed)


@pytest.mark.untraced
def test_the_programs_do_what_they_are_for() -> None:
    """Waits, moves, drops, failures and leftovers do occur: a driver that never gets there proves nothing."""
    met: collections.Counter[str] = collections.Counter()
    for seed in range(1000, 1060):
        world = run_seed(seed)
        stats = world.queue.stats()
        for name in ("handled", "failed", "unhandled", "refused", "dropped_before", "dropped_after", "undelivered"):
            met[name] += getattr(stats, name)
        met["moves"] += world.parts._rebalancer.moves if world.parts._rebalancer else 0
        met["grown"] += world.queue.partition_count > world.queue.worker_count
    assert min(met.values()) > 0, met
