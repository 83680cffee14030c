"""Which partition an item goes to."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

import batchqueue_async as bq
from batchqueue_async.policies import stable_type_hash

ITEMS = st.one_of(st.none(), st.integers(), st.text(), st.binary(), st.tuples(st.integers(), st.text()))
COUNTS = st.integers(1, 1000)


@given(ITEMS, COUNTS)
def test_every_selector_names_a_partition(item, count):
    for selector in (bq.type_hash(), bq.round_robin(), bq.by_key(lambda each: each)):
        assert 0 <= selector(item, count) < count


@given(ITEMS, ITEMS, COUNTS)
def test_type_hash_keeps_a_type_together(one, other, count):
    select = bq.type_hash()
    if type(one) is type(other):
        assert select(one, count) == select(other, count)


def test_type_hash_is_the_same_in_every_process():
    code = "import batchqueue_async as bq; print([bq.type_hash()(item, 997) for item in (1, 'a', b'', None, 2.0)])"
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert outputs == {f"{[bq.type_hash()(item, 997) for item in (1, 'a', b'', None, 2.0)]}\n"}


def test_type_hash_spreads_types():
    types = [type(f"Metric{number}", (), {}) for number in range(10_000)]
    counts = Counter(stable_type_hash(kind) % 100 for kind in types)
    assert len(counts) == 100
    assert max(counts.values()) < 150


@given(st.integers(1, 50), st.integers(1, 20))
def test_round_robin_is_perfectly_even(count, rounds):
    select = bq.round_robin()
    assert [select(None, count) for _ in range(count * rounds)] == list(range(count)) * rounds


@given(st.lists(st.integers()), COUNTS)
def test_by_key_keeps_equal_keys_together(numbers, count):
    select = bq.by_key(lambda item: item["key"])
    for number in numbers:
        assert select({"key": number, "other": 1}, count) == select({"key": number, "other": 2}, count)


def test_selectors_tell_what_they_are():
    assert [str(each) for each in (bq.type_hash(), bq.round_robin(), bq.by_key(len))] == [
        "type_hash()",
        "round_robin()",
        "by_key(len)",
    ]
    assert bq.type_hash() == bq.type_hash()
    assert bq.round_robin() == bq.round_robin()
    assert bq.by_key(len) == bq.by_key(len) != bq.by_key(str)


def test_by_key_needs_a_function():
    with pytest.raises(bq.ConfigError, match=r"by_key: key='name' is not callable; give a function of \(item\)"):
        bq.by_key("name")
