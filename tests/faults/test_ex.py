"""The faults of other exporters, each by its id: none may be reproducible here."""

from __future__ import annotations

import asyncio
from random import Random

import pytest
from export_kit import Destination, Keyed, check, down, exporter, script
from hypothesis import given
from hypothesis import strategies as st

import batchqueue_async as bq
from batchqueue_async.export.control.backoff import Backoff
from batchqueue_async.export.control.breaker import REFUSED, Breaker
from batchqueue_async.testing import advance, settle


@pytest.fixture(params=["memory", "disk"])
def place(request, tmp_path):
    return None if request.param == "memory" else tmp_path / "queue"


# --- EX-1: exactly one probe


def test_ex_1_of_fifty_who_ask_a_half_open_breaker_one_may_probe():
    breaker = Breaker(bq.BreakerPolicy(threshold=1, reset_timeout=30.0))
    breaker.failure(breaker.acquire(0.0), 0.0)
    answers = [breaker.acquire(31.0) for _ in range(50)]
    assert sum(answer != REFUSED for answer in answers) == 1
    assert breaker.state == "half_open"


async def test_ex_1_a_backlog_and_fifty_workers_send_one_probe(place):
    sink = Destination(latency=1.0, answer=lambda _: down())
    breaker = bq.BreakerPolicy(threshold=3, reset_timeout=30.0)
    workers = bq.WorkerPolicy.fixed(50)
    retry = bq.RetryPolicy(initial=0.001, max_delay=0.001, budget=None)
    async with exporter(sink, place, workers=workers, breaker=breaker, batch_records=1, retry=retry) as export:
        await export.consume(list(range(500)))
        await advance(29.0)
        before = len(sink.calls)
        for probes in range(1, 4):
            await advance(31.0)
            assert len(sink.calls) == before + probes
        assert check(export).breaker_opens == 4
        await export.shutdown(0)


# --- EX-2: what the destination refuses does not open the breaker


@pytest.mark.parametrize(
    "error", [bq.PermanentError("400"), bq.TooLargeError("413"), bq.AuthError("401"), ValueError("a bug")]
)
async def test_ex_2_an_answer_that_refuses_opens_no_breaker(error, place):
    sink = Destination(answer=lambda _: error)
    async with exporter(sink, place, breaker=bq.BreakerPolicy(threshold=2), auth_pause=1.0) as export:
        for number in range(10):
            await export.consume([number])
            await advance(3.0)
        assert export.breaker == "closed"
        assert check(export).breaker_opens == 0
        await export.shutdown(0)


async def test_ex_2_failures_of_its_health_do():
    sink = Destination(answer=lambda _: down())
    async with exporter(sink, breaker=bq.BreakerPolicy(threshold=5), batch_records=1) as export:
        await export.consume(list(range(20)))
        await settle()
        assert export.breaker == "open"
        assert len(sink.calls) <= 5 + 4 - 1  # those that were under way when it opened
        assert check(export).breaker_rejected == 1
        await export.shutdown(0)


# --- EX-3: Retry-After


async def test_ex_3_nothing_is_sent_before_the_time_that_the_destination_asked_for(place):
    sink = Destination(answer=script(down("429", retry_after=42.0)))
    async with exporter(sink, place, batch_records=1, workers=bq.WorkerPolicy.fixed(1)) as export:
        await export.consume(list(range(5)))
        await advance(41.9)
        assert len(sink.calls) == 1
        await export.flush()
    assert min(sink.times[1:]) >= 42.0
    assert sorted(sink.records) == list(range(5))


async def test_ex_3_what_it_asks_for_is_capped(place):
    sink = Destination(answer=script(down("503", retry_after=1e9)))
    retry = bq.RetryPolicy(max_delay=60.0, jitter=False)
    async with exporter(sink, place, retry=retry) as export:
        await export.consume(["a"])
        await export.flush()
    assert sink.times == pytest.approx([0.0, 60.0])


@pytest.mark.parametrize("odd", [float("nan"), -5.0, float("inf")])
async def test_ex_3_nonsense_is_no_time(odd):
    sink = Destination(answer=script(down("503", retry_after=odd)))
    async with exporter(sink, retry=bq.RetryPolicy(max_delay=60.0)) as export:
        await export.consume(["a"])
        await export.flush()
    assert sink.times[1] <= 66.0


# --- EX-4: the stages of a split pipeline are drained


async def test_ex_4_a_graceful_stop_drains_every_stage(place):
    sink = Destination(latency=0.5)
    split = bq.SplitPolicy(preparers=2, senders=1, sends_per_sender=2, channel=256, prepare=lambda batch: batch)
    async with exporter(sink, place, split=split, batch_records=1) as export:
        await export.consume(list(range(300)))
        await advance(1.0)
        assert check(export).workers_active > 200  # most of them prepared, and waiting for a sender
        report = await export.shutdown(1_000.0)
    assert report.complete
    assert sorted(sink.records) == list(range(300))


async def test_ex_4_what_the_deadline_finds_in_the_stages_is_kept(place):
    sink = Destination(latency=100.0)
    split = bq.SplitPolicy(preparers=1, senders=1, sends_per_sender=1, channel=8)
    async with exporter(sink, place, split=split, batch_records=1) as export:
        await export.consume(list(range(30)))
        await advance(1.0)
        report = await export.shutdown(2.0)
    assert len(report.undelivered) + report.on_disk == 30


# --- EX-5: attempts are kept, and end


async def test_ex_5_a_poison_record_ends_in_the_dead_letters_over_restarts(tmp_path):
    """It kills its exporter at each attempt."""
    retry = bq.RetryPolicy(initial=0.1, jitter=False, max_attempts=4)
    for attempt in range(1, 4):
        sink = Destination(latency=1e6)
        async with exporter(sink, tmp_path, retry=retry, drain_timeout=0) as export:
            if attempt == 1:
                await export.consume(["poison"])
            await settle()
        assert sink.calls == [["poison"]]
    sink = Destination(answer=lambda _: down("boom"))
    async with exporter(sink, tmp_path, retry=retry) as export:
        await export.flush()
        (letter,) = await export._engine.disk.queue.dead_letters()
        assert (letter.attempts, export.stats().records) == (4, 0)
        assert letter.reason == "4 attempts, and max_attempts=4; the last was RetryableError: boom"


async def test_ex_5_it_does_not_hold_up_the_others(place):
    def answer(batch):
        return down("poison") if "poison" in batch else None

    sink = Destination(answer=answer)
    async with exporter(sink, place, batch_records=1, retry=bq.RetryPolicy(initial=1.0, max_attempts=5)) as export:
        await export.consume(["poison", *range(100)])
        await advance(0.5)
        assert sink.records == list(range(100))
        await export.flush()
        assert check(export).dead_lettered == 1


async def test_ex_5_what_waits_long_does_not_make_wait_what_came_beside_it(place):
    sink = Destination(answer=lambda _: down())
    retry = bq.RetryPolicy(initial=1.0, max_delay=1_000.0, jitter=False)
    async with exporter(sink, place, retry=retry, breaker=bq.BreakerPolicy(enabled=False)) as export:
        await export.consume(["old"])
        await advance(511.5)  # its tenth attempt comes at 511 s
        assert len(sink.calls) == 10
        await export.consume(["new"])
        await advance(1.0)
        assert sink.calls[10:] == [["new"], ["new"]]
        await advance(1_023 - 512.5 - 0.1 - 0.5)
        await export.consume(["newest"])  # the eleventh attempt of the old one has all three in it, or some of them
        sink.answer = None
        await export.flush()
    assert sorted(sink.records) == ["new", "newest", "old"]


# --- EX-6: no end by default


async def test_ex_6_an_outage_of_a_day_loses_nothing(place):
    sink = Destination(answer=lambda _: down())
    async with exporter(sink, place, batch_records=2) as export:
        await export.consume(list(range(20)))
        await advance(20 * 3600.0)
        assert check(export).records == 20
        sink.answer = None
        await export.flush(timeout=3600.0)
    assert sorted(sink.records) == list(range(20))


async def test_ex_6_an_age_limit_is_the_users_choice(place):
    sink = Destination(answer=lambda _: down())
    async with exporter(sink, place, retry=bq.RetryPolicy(max_age=300.0)) as export:
        await export.consume(["a"])
        await export.flush()
        assert 300.0 <= asyncio.get_running_loop().time() <= 300.0 + 330.0
        assert check(export).dead_lettered == 1


# --- EX-7: retries don't fire together


@given(st.integers(1, 10_000), st.integers(0, 2**32))
def test_ex_7_jitter_is_full_and_within_the_ceiling(attempts, seed):
    backoff = Backoff(bq.RetryPolicy(), Random(seed))
    ceiling = backoff.ceiling(attempts)
    assert 0.0 <= backoff.delay(attempts) <= ceiling <= 300.0
    assert ceiling == min(300.0, 5.0 * 2.0 ** min(attempts - 1, 60))


async def test_ex_7_batches_that_failed_together_return_apart(place):
    failing = True
    sink = Destination(answer=lambda _: down() if failing else None)
    options = {"batch_records": 1, "breaker": bq.BreakerPolicy(enabled=False), "workers": bq.WorkerPolicy.fixed(50)}
    async with exporter(sink, place, max_sends=50, **options) as export:
        await export.consume(list(range(50)))
        await settle()
        assert len(sink.calls) == 50
        failing = False
        await export.flush()
    returns = sorted(sink.times[50:])
    assert returns[0] < 1.0
    assert returns[-1] > 4.0
    assert max(sum(start <= time < start + 0.5 for time in returns) for start in range(5)) < 15


async def test_ex_7_a_budget_bounds_what_fails_again(place):
    sink = Destination(answer=lambda _: down())
    retry = bq.RetryPolicy(initial=0.01, max_delay=0.01, budget=bq.RetryBudget(per_second=2.0, burst=10), jitter=False)
    options = {"batch_records": 1, "breaker": bq.BreakerPolicy(enabled=False), "workers": bq.WorkerPolicy.fixed(8)}
    async with exporter(sink, place, retry=retry, **options) as export:
        await export.consume(list(range(50)))
        await advance(100.0)
        assert 50 + 200 <= len(sink.calls) <= 50 + 10 + 200 + 1
        sink.answer = None
        await export.flush()
    assert sorted(sink.records) == list(range(50))


async def test_ex_7_recovery_ramps_up(place):
    sink = Destination(answer=lambda _: down())
    options = {"batch_records": 1, "workers": bq.WorkerPolicy.fixed(16), "max_sends": 16}
    retry = bq.RetryPolicy(initial=0.001, max_delay=0.001)
    async with exporter(sink, place, breaker=bq.BreakerPolicy(threshold=1), retry=retry, **options) as export:
        await export.consume([-1])
        await settle()
        await export.consume(list(range(100)))
        sink.answer, sink.latency, sink.times = None, 1.0, []
        await export.flush()
    per_second = [sum(int(time) == second for time in sink.times) for second in range(30, 36)]
    assert per_second == [1, 1, 2, 4, 8, 16]


# --- EX-8: shutdown leaves time, and what is cut off is not lost


async def test_ex_8_sends_under_way_are_not_cancelled_before_the_deadline(place):
    sink = Destination(latency=20.0)
    async with exporter(sink, place, drain_timeout=30.0) as export:
        await export.consume(["a"])
        await settle()
    assert (sink.cancelled, sink.records) == (0, ["a"])


async def test_ex_8_what_is_cut_off_is_not_acknowledged(place):
    sink = Destination(latency=20.0)
    async with exporter(sink, place, drain_timeout=5.0) as export:
        await export.consume(["a"])
        await settle()
    assert sink.cancelled == 1
    assert 4.5 < export.report.elapsed <= 5.0
    assert (export.report.undelivered, export.report.on_disk) == ((["a"], 0) if place is None else ([], 1))
    if place is not None:
        again = Keyed()
        async with exporter(again, place):
            pass
        assert again.records == ["a"]


# --- EX-9: too large


@pytest.mark.parametrize("limit", [1, 7, 100])
async def test_ex_9_a_batch_that_is_too_large_is_split_down_to_the_record(limit, place):
    sink = Destination(answer=lambda batch: bq.TooLargeError("413") if sum(map(len, batch)) > limit else None)
    records = ["x" * size for size in (1, 5, 2, 8, 1, 1, 200, 3)]
    async with exporter(sink, place) as export:
        await export.consume(records)
        await export.flush()
        stats = check(export)
        assert sorted(sink.records) == sorted(record for record in records if len(record) <= limit)
        assert stats.dead_lettered == sum(len(record) > limit for record in records)
        assert stats.splits > 0
        if place is not None:
            assert {letter.reason for letter in await export._engine.disk.queue.dead_letters()} == {
                "TooLargeError: 413"
            }


async def test_ex_9_a_destination_that_goes_down_while_a_batch_is_split(place):
    sink = Destination(answer=script(bq.TooLargeError("413"), None, down()))
    async with exporter(sink, place, retry=bq.RetryPolicy(initial=1.0, jitter=False)) as export:
        await export.consume([1, 2, 3, 4])
        await settle()
        assert (sink.records, check(export).records) == ([1, 2], 2)
        await export.flush()
    assert sink.records == [1, 2, 3, 4]
    assert sink.calls[-1] == [3, 4]


async def test_ex_9_what_was_not_tried_counts_no_attempt(place):
    """The half that the outage kept from being sent goes back as it came."""
    sink = Destination(answer=script(bq.TooLargeError("413"), down(), down()))
    retry = bq.RetryPolicy(initial=100.0, jitter=False, max_attempts=2)
    async with exporter(sink, place, retry=retry, workers=bq.WorkerPolicy.fixed(1)) as export:
        await export.consume([1, 2, 3, 4])
        await settle()
        assert sink.calls == [[1, 2, 3, 4], [1, 2], [3, 4]]
        await export.flush()
        assert check(export).dead_lettered == 0  # for none of them it was the second attempt that failed
    assert sorted(sink.records) == [1, 2, 3, 4]


# --- EX-10: refused credentials


async def test_ex_10_refused_credentials_pause_and_alarm_and_drop_nothing(place, logs):
    sink = Destination(answer=lambda _: bq.AuthError("401"))
    retry = bq.RetryPolicy(max_attempts=2)
    async with exporter(sink, place, auth_pause=30.0, batch_records=1, retry=retry) as export:
        await export.consume(list(range(10)))
        await advance(1.0)
        sent = len(sink.calls)
        stats = check(export)
        assert stats.paused
        assert (stats.pauses, stats.dead_lettered, stats.records) == (1, 0, 10)
        await advance(300.0)
        assert len(sink.calls) == sent + 10  # one try in each pause, and no more
        assert [event["event"] for event in logs if event["log_level"] == "error"] == ["exporter_paused"]
        sink.answer = None
        export.resume()
        await advance(1.0)
        assert not check(export).paused
        assert sorted(sink.records) == list(range(10))
    # The pauses were no attempts: max_attempts=2 has not given anything up.
    assert export.report.dead_lettered == 0


async def test_ex_10_a_pause_is_no_attempt(place):
    answers = [bq.AuthError("401")] * 5 + [down()]
    sink = Destination(answer=script(*answers))
    async with exporter(sink, place, auth_pause=1.0, retry=bq.RetryPolicy(max_attempts=2)) as export:
        await export.consume(["a"])
        await export.flush()
        assert check(export).dead_lettered == 0
    assert sink.records == ["a"]


async def test_ex_10_a_record_refused_for_the_credentials_alone(place):
    from batchqueue_async.sinks.base import SendResult

    sink = Destination(answer=script(SendResult(rejected={1: bq.AuthError("403 for this topic")})))
    async with exporter(sink, place) as export:
        await export.consume(["a", "b"])
        await settle()
        stats = check(export)
        assert (stats.paused, stats.delivered, stats.records) == (True, 1, 1)
        await export.flush()
    assert sink.records == ["a", "b"]
