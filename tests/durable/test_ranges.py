"""Counts of sequence numbers as ranges, against one count per number."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from batchqueue_async.durable.state.ranges import RangeMap

PARTS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12), st.integers(1, 3)), max_size=20)


@given(parts=PARTS, low=st.integers(0, 30), size=st.integers(1, 30))
def test_the_last_count_of_each_number_holds(parts, low, size):
    found, model = RangeMap(), {}
    for start, length, count in parts:
        found.put(start, start + length, count)
        model |= dict.fromkeys(range(start, start + length), count)
    assert {number: count for start, stop, count in found for number in range(start, stop)} == model
    assert all(before[1] <= after[0] for before, after in pairwise(found))
    within = list(found.within(low, low + size))
    assert {n: count for start, stop, count in within for n in range(start, stop)} == {
        number: model.get(number, 0) for number in range(low, low + size)
    }
    assert within[0][0] == low
    assert within[-1][1] == low + size
    assert all(before[1] == after[0] for before, after in pairwise(within))


def test_leases_in_order_are_one_range():
    found = RangeMap()
    for low in range(0, 100_000, 100):
        found.put(low, low + 100, 1)
        found.put(low, low + 100, 1)
    assert list(found) == [(0, 100_000, 1)]
    found.put(7, 8, 70_000)
    assert list(found) == [(0, 7, 1), (7, 8, 65_535), (8, 100_000, 1)]
