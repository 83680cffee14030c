"""States, sentences and events, from snapshots made by hand: no loop runs."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import observe_snapshots as made
import pytest

import batchqueue_async as bq
from batchqueue_async._support.last_error import LastError
from batchqueue_async.observe.rates import ExporterRates, RateTracker
from batchqueue_async.observe.sentences import summary, why
from batchqueue_async.observe.snapshot import ConsumerView, SparkQueryView
from batchqueue_async.observe.status import EVENTS, StatusTracker


def seen(*snapshots):
    tracker = StatusTracker()
    for snapshot in snapshots:
        status = tracker.see(snapshot)
    return status


def only(*snapshots):
    return seen(*snapshots).components[0]


def test_a_process_that_is_well_says_so():
    status = seen(snapshot := made.process(0, made.loop(), made.queue(), made.exporter()))
    assert (status.state, status.live, status.ready, status.reasons) == ("ok", True, True, ())
    assert summary(status, snapshot) == "All is well: nothing waits."
    assert why(status) == ["All is well."]


def test_without_anything_nothing_runs():
    snapshot = made.process(0)
    assert summary(seen(snapshot), snapshot) == "Nothing runs yet."


def test_rates_and_ages_are_in_the_sentence():
    rates = ExporterRates(accepted=10.0, settled=12_300.0, bytes=0.0)
    snapshot = made.process(0, made.exporter(rates=rates, records=40, oldest_age=0.2))
    assert (
        summary(seen(snapshot), snapshot)
        == "All is well: 12,300 records/s are delivered, 40 records waiting, the oldest for 0.2 s."
    )


def test_an_open_breaker_is_down_with_room_and_advice_and_the_process_is_ready():
    rates = ExporterRates(accepted=100.0, settled=0.0, bytes=100.0)
    broken = {
        "breaker": "open", "records": 1_200_000, "bytes": 0, "max_bytes": 1_140_000, "rates": rates,
        "last_error": "RetryableError: refused", "last_error_at": made.NOW + 239, "last_success_at": made.NOW,
        "next_send_in": 12.0,
    }  # fmt: skip
    first, then = made.process(0, made.exporter(**broken)), made.process(240, made.exporter(**broken))
    status = seen(first, then)
    assert summary(status, then) == (
        "Exporter lake can't deliver, for 4 min now: 1.2 M records wait, room for 3 h 10 min."
    )
    (text,) = why(status, clock=False)
    assert text == (
        "Exporter lake can't deliver, for 4 min now: 1.2 M records wait, room for 3 h 10 min. "
        "It last succeeded 4 min ago. The last error: RetryableError: refused. "
        "What to do: bring the destination back; sending resumes by itself; the next attempt is in 12 s."
    )
    assert (status.ready, status.live, status.of("lake").well) == (True, True, False)
    assert "since " in why(status)[0]


def test_a_pause_comes_before_the_breaker():
    found = only(made.process(0, made.exporter(paused=True, breaker="open", records=1)))
    assert (found.state, "credentials" in found.problem, found.detail) == ("down", True, "1 record waits")


@pytest.mark.parametrize(
    ("before", "after", "state", "words"),
    [
        ({}, {"dropped": {"oldest": 7}}, "down", "dropped 7 records"),
        ({}, {"dead_lettered": 2}, "degraded", "gave 2 records up"),
        ({}, {"stuck": 3}, "down", "fails again and again with 3 records"),
        ({}, {"utilization": 0.95}, "degraded", "is 95% full"),
        ({}, {"records": 5, "last_error_at": made.NOW + 9}, "degraded", "failed with its last send"),
    ],
)
def test_what_is_wrong_with_an_exporter(before, after, state, words):
    found = only(made.process(0, made.exporter(**before)), made.process(10, made.exporter(**after)))
    assert found.state == state
    assert words in found.problem
    assert found.advice


def test_dead_letters_come_with_the_line_that_puts_them_back_where_there_is_one():
    before, after = made.exporter("la ke"), made.exporter("la ke", dead_lettered=2)

    def advice(**more):
        first, last = (replace(made.process(at, each), pid=7, **more) for at, each in ((0, before), (10, after)))
        return only(first, last).advice

    assert advice(commands=True).endswith("put them back: `batchqueue dead-letters requeue 7 '--exporter=la ke'`")
    assert "its code can call exporter.requeue_dead_letters()" in advice()


def test_an_exporter_that_falls_behind_is_named():
    rates = ExporterRates(accepted=100.0, settled=50.0, bytes=50.0)
    found = only(made.process(0, made.exporter(rates=rates, oldest_age=120.0, records=9)))
    assert (found.state, "falls behind" in found.problem) == ("degraded", True)


def test_what_was_lost_before_the_first_look_is_not_news_and_old_losses_are_forgotten():
    lost = made.exporter(dropped={"oldest": 7})
    assert only(made.process(0, lost)).state == "ok"
    tracker = StatusTracker()
    tracker.see(made.process(0, made.exporter()))
    states = [tracker.see(made.process(at, lost)).state for at in range(1, 1_000, 10)]
    assert states[0] == "down"
    assert states[-1] == "ok"
    assert 300 <= 10 * states.count("down") <= 400


ERROR = LastError(error="KeyError", where="app.py:3 in write", text="", at=made.NOW, count=4)


@pytest.mark.parametrize(
    ("after", "state", "words"),
    [
        ({"dropped_after": 3}, "down", "dropped 3 items"),
        ({"failed": 4, "last_error": ERROR}, "down", "handles nothing"),
        ({"failed": 4, "handled": 1, "last_error": ERROR}, "degraded", "failed with 4 items"),
        ({"unhandled": 1}, "degraded", "has no handler for 1 item"),
        ({"refused": 1}, "degraded", "refused 1 item"),
        ({"oldest_age": 90.0, "used": 1}, "degraded", "is behind"),
        ({"used": 95}, "degraded", "is 95% full"),
    ],
)
def test_what_is_wrong_with_a_queue(after, state, words):
    found = only(made.process(0, made.queue()), made.process(10, made.queue(**after)))
    assert (found.component, found.state) == ("queue/rows", state)
    assert words in found.problem
    assert found.advice


def test_a_full_queue_says_whether_producers_wait():
    assert only(made.process(0, made.queue(used=95))).detail == "producers wait"
    assert "lost" in only(made.process(0, made.queue(used=95, waits=False))).detail


@pytest.mark.parametrize(("lag", "state", "live"), [(0.5, "ok", True), (5.0, "degraded", True), (31.0, "down", False)])
def test_a_loop_that_is_late(lag, state, live):
    status = seen(made.process(0, made.loop(lag=lag)))
    assert (status.state, status.live, status.ready) == (state, live, live)


def test_liveness_asks_no_destination():
    assert seen(made.process(0, made.loop(), made.exporter(breaker="open", paused=True))).live


@pytest.mark.parametrize(
    ("views", "ready"),
    [
        ([made.exporter(breaker="open", utilization=0.5)], True),
        ([made.exporter(breaker="open", utilization=1.0, overflow="block")], False),
        ([made.exporter(breaker="open", utilization=1.0, overflow="reject")], False),
        ([made.exporter(breaker="open", utilization=1.0, overflow="drop_oldest")], True),
        ([made.exporter(closed=True)], False),
        ([made.queue(closed=True)], False),
        ([made.queue(used=100)], True),
    ],
)
def test_ready_is_who_accepts(views, ready):
    assert seen(made.process(0, *views)).ready is ready


def test_a_phase_is_a_reason():
    tracker = StatusTracker("starting")
    snapshot = made.process(0, made.queue(used=3))
    status = tracker.see(snapshot)
    assert (status.ready, status.reasons) == (False, ("the process is starting",))
    assert summary(status, snapshot).startswith("Starting")
    tracker.phase = "draining"
    status = tracker.see(made.process(1, made.queue(used=3)))
    assert summary(status, snapshot) == "Draining: 3 records still to be handled."
    assert why(status) == ["Not ready: the process is draining."]


@pytest.mark.parametrize(
    ("before", "after", "state"),
    [
        ({}, {"sync_errors": 1}, "down"),
        ({}, {"disk_full": 1}, "degraded"),
        ({}, {"damaged": 1}, "degraded"),
        ({}, {"free_bytes": 10, "max_bytes": 1_000}, "degraded"),
        ({}, {"free_bytes": 900, "max_bytes": 1_000}, "ok"),
    ],
)
def test_disks(before, after, state):
    found = only(made.process(0, made.disk(**before)), made.process(5, made.disk(**after)))
    assert (found.component, found.state) == ("disk/lake", state)


@pytest.mark.parametrize(
    ("word", "state"), [("running", "ok"), ("done", "ok"), ("waiting", "degraded"), ("failed", "down")]
)
def test_spark_queries(word, state):
    progress = SimpleNamespace(state=word, error="OSError", restarts=0)
    query = SparkQueryView(pipeline="daily", name="orders", progress=progress)
    found = only(made.process(0, queries=(query,)))
    assert (found.component, found.state) == ("spark/daily/orders", state)


@pytest.mark.parametrize(
    ("word", "state"), [("running", "ok"), ("paused", "degraded"), ("connecting", "down"), ("draining", "ok")]
)
def test_consumers(word, state):
    consumer = ConsumerView(name="orders", kind="AmqpConsumer", stats=SimpleNamespace(state=word, last_error="refused"))
    assert only(made.process(0, consumers=(consumer,))).state == state


def test_events_are_changes_of_state_the_newest_first_and_bounded():
    tracker = StatusTracker()
    for at in range(0, 4 * EVENTS, 2):
        tracker.see(made.process(at, made.loop(lag=0.0)))
        status = tracker.see(made.process(at + 1, made.loop(lag=3.0)))
    assert len(status.events) == EVENTS
    newest, before = status.events[:2]
    assert (newest.before, newest.after, before.after, before.text) == ("ok", "degraded", "ok", "works again")
    assert newest.at > before.at
    assert tracker.see(made.process(999)).components == ()


def test_since_is_when_the_state_began():
    tracker = StatusTracker()
    for at in (0, 10, 20):
        status = tracker.see(made.process(at, made.exporter(breaker="open")))
    assert status.of("exporter/lake").since == made.NOW
    assert tracker.see(made.process(30, made.exporter())).of("lake").since == made.NOW + 30
    assert status.of("nobody") is None


def test_rates_are_smoothed_and_say_when_it_is_empty_or_full():
    tracker = RateTracker()
    of = lambda at, accepted, records: tracker.of(  # noqa: E731
        "x", bq.ExporterStats(name="x", accepted=accepted, records=records, bytes=10 * records), at
    )
    assert of(0.0, 0, 0) is None
    assert of(0.05, 10, 10) is None
    rates = of(1.0, 100, 60)
    assert (rates.accepted, rates.settled, rates.bytes) == (100.0, 40.0, 600.0)
    assert rates.full_in(6_000) == 10.0
    assert rates.empty_in(60) == float("inf")
    for at in range(2, 100):
        rates = of(float(at), 100, 60 - min(60, at - 1))
    assert rates.accepted < 1.0
    assert rates.empty_in(0) == 0.0
    assert of(200.0, 5, 5) is None, "another exporter of that name"
