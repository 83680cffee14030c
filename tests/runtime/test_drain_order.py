"""Upstream ends first, circles together, whatever feeds whatever."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from batchqueue_async.runtime.drain_order import DrainOrder

NODES = list(range(7))


def stages(nodes, feeds):
    """What may end together, if all that may end does before the next look."""
    order = DrainOrder(nodes, feeds)
    found = []
    while ready := order.take_ready():
        found.append(ready)
        for node in ready:
            order.done(node)
    assert order.complete
    return found


def test_those_that_feed_nobody_end_together():
    assert stages("abc", {}) == [["a", "b", "c"]]


def test_a_pipeline_ends_upstream_first():
    assert stages("cba", {"a": "b", "b": "c"}) == [["a"], ["b"], ["c"]]


def test_a_diamond():
    assert stages("dcba", {"a": "bc", "b": "d", "c": "d"}) == [["a"], ["c", "b"], ["d"]]


def test_a_circle_ends_together_after_what_feeds_it_and_before_what_it_feeds():
    assert stages("zyxab", {"a": "x", "x": "y", "y": "xz"}) == [["a", "b"], ["y", "x"], ["z"]]


def test_a_queue_that_feeds_itself_waits_for_nobody():
    assert stages("a", {"a": "a"}) == [["a"]]


def test_what_is_not_there_does_not_count():
    assert stages("ab", {"a": ["b", "gone"], "gone": "a"}) == [["a"], ["b"]]


def test_one_that_is_fed_by_two_waits_for_both():
    order = DrainOrder("abc", {"a": "c", "b": "c"})
    assert order.take_ready() == ["a", "b"]
    order.done("a")
    assert order.take_ready() == []
    order.done("b")
    assert order.take_ready() == ["c"]


def test_all_at_once_when_the_time_is_over():
    order = DrainOrder("abc", {"a": "b", "b": "c"})
    assert order.take_ready() == ["a"]
    assert order.take_all() == ["b", "c"]
    order.done("a")
    assert order.take_ready() == []
    assert order.complete


def test_a_long_pipeline_needs_no_recursion():
    count = 2_000
    assert stages(range(count), {node: [node + 1] for node in range(count)}) == [[node] for node in range(count)]


@given(st.dictionaries(st.sampled_from(NODES), st.lists(st.sampled_from(NODES), max_size=4)), st.integers())
def test_every_queue_ends_once_and_after_all_that_feed_it_and_that_it_does_not_feed(feeds, seed):
    chance = random.Random(seed)
    order = DrainOrder(NODES, feeds)
    running, ended = [], []
    while True:
        ready = order.take_ready()
        running += ready
        for node in ready:
            for other in NODES:
                if node in reach(other, feeds) and other not in reach(node, feeds):
                    assert other in ended
        if not running:
            break
        node = running.pop(chance.randrange(len(running)))
        ended.append(node)
        order.done(node)
    assert sorted(ended) == NODES


def reach(node, feeds):
    found, ahead = set(), list(feeds.get(node, ()))
    while ahead:
        other = ahead.pop()
        if other not in found:
            found.add(other)
            ahead += feeds.get(other, ())
    return found
