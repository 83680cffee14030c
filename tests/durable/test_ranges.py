"""Counts of sequence numbers as ranges, against one count per number."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchqueue_async.durable.disk.acklog import attempts_left
from batchqueue_async.durable.state import ranges
from batchqueue_async.durable.state.ranges import RangeMap, RangeSet

PARTS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12), st.integers(0, 3)), max_size=30)

STEPS = st.lists(st.tuples(st.booleans(), st.integers(0, 60), st.integers(0, 15)), max_size=40)


@pytest.fixture(autouse=True, params=[2, 512])
def _chunks(request, monkeypatch):
    monkeypatch.setattr(ranges, "_CHUNK", request.param)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parts=PARTS, low=st.integers(0, 30), size=st.integers(1, 30))
def test_the_last_count_of_each_number_holds(parts, low, size):
    found, model = RangeMap(), {}
    for start, length, count in parts:
        found.put(start, start + length, count)
        model |= dict.fromkeys(range(start, start + length), count)
    model = {number: count for number, count in model.items() if count}
    assert list(reversed(found)) == list(found)[::-1]
    assert len(found) == len(list(found))
    assert list(found.copy()) == list(found)
    assert {number: count for start, stop, count in found for number in range(start, stop)} == model
    assert all(
        before[1] < after[0] or (before[1] == after[0] and before[2] != after[2]) for before, after in pairwise(found)
    )
    within = list(found.within(low, low + size))
    assert {n: count for start, stop, count in within for n in range(start, stop)} == {
        number: model.get(number, 0) for number in range(low, low + size)
    }
    assert within[0][0] == low
    assert within[-1][1] == low + size
    assert all(before[1] == after[0] for before, after in pairwise(within))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 60), st.integers(0, 15)), max_size=40), at=st.integers(0, 70)
)
def test_a_set_is_what_was_put_in_and_not_taken_out(steps, at):
    found, model = RangeSet(), set()
    for adding, low, size in steps:
        numbers = set(range(low, low + size))
        if adding:
            assert found.add(low, low + size) == len(numbers - model)
            model |= numbers
        else:
            assert found.remove(low, low + size) == len(numbers & model)
            model -= numbers
        assert found.count == len(model)
    assert {n for low, high in found for n in range(low, high)} == model
    assert {n for low, high in found.present(5, 50) for n in range(low, high)} == model & set(range(5, 50))
    assert {n for low, high in found.missing(5, 50) for n in range(low, high)} == set(range(5, 50)) - model
    below = [(low, min(high, at)) for low, high in found if low < at]
    assert found.last_before(at) == (below[-1] if below else None)
    tail = found.split(at)
    assert {n for low, high in tail for n in range(low, high)} == {n for n in model if n >= at}
    assert {n for low, high in found for n in range(low, high)} == {n for n in model if n < at}
    assert found.count + tail.count == len(model)


def test_leases_in_order_are_one_range():
    found = RangeMap()
    for low in range(0, 100_000, 100):
        found.put(low, low + 100, 1)
        found.put(low, low + 100, 1)
    assert list(found) == [(0, 100_000, 1)]
    found.put(7, 8, 70_000)
    assert list(found) == [(0, 7, 1), (7, 8, 65_535), (8, 100_000, 1)]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parts=PARTS, steps=STEPS, low=st.integers(0, 20), size=st.integers(0, 60))
def test_the_attempts_of_what_is_not_settled(parts, steps, low, size):
    attempts, settled = RangeMap((start, start + length, count) for start, length, count in parts), RangeSet()
    for adds, start, length in steps:
        if adds and low <= start and start + length <= low + size:
            settled.add(start, start + length)
    records = range(low, low + size)
    found = {
        (number, entry.attempts)
        for entry in attempts_left(records, settled, attempts)
        for number in range(entry.low, entry.high)
    }
    assert found == {(number, attempts.get(number)) for number in records if number not in settled} - {
        (number, 0) for number in records
    }
