"""What an exporter says of its records' age, its sends and its dead letters."""

from __future__ import annotations

import asyncio

import pytest
from export_kit import Destination, exporter, inline
from hypothesis import given
from hypothesis import strategies as st

import batchqueue_async as bq
from batchqueue_async.export.control.age_marks import MOST, RESOLUTION, AgeMarks


@given(st.lists(st.tuples(st.integers(1, 50), st.floats(0.0, 5.0)), min_size=1, max_size=200), st.data())
def test_an_age_is_never_too_low_and_too_high_by_the_distance_of_two_marks(puts, data):
    marks, now, number, times = AgeMarks(), 0.0, 0, {}
    for count, wait in puts:
        now += wait
        marks.note(number, now)
        times.update(dict.fromkeys(range(number, number + count), now))
        number += count
    oldest = data.draw(st.integers(0, number - 1))
    if data.draw(st.booleans()):
        marks.settled(oldest)
    true = now + 1.0 - times[oldest]
    assert true <= marks.age(oldest, now + 1.0) <= true + RESOLUTION


def test_marks_are_bounded_and_forgotten_when_nothing_needs_them():
    marks = AgeMarks()
    for number in range(20 * MOST):
        marks.note(number, float(number))
        if marks.crowded:
            marks.settled(0)
    assert len(marks._marks) <= MOST
    assert marks.age(0, 100_000.0) == 100_000.0
    marks.settled(None)
    assert (marks._marks, marks.age(None, 1.0), marks.age(5, 1.0)) == ([], 0.0, 0.0)


@pytest.mark.parametrize("on_disk", [False, True])
async def test_the_oldest_record_ages_until_it_is_delivered(tmp_path, on_disk):
    there = asyncio.Event()
    sink = Destination(answer=lambda _: None if there.is_set() else bq.RetryableError("away"))
    retry = bq.RetryPolicy(initial=1.0, max_delay=1.0, jitter=False)
    async with exporter(sink, tmp_path / "q" if on_disk else None, retry=retry) as each:
        assert each.stats().oldest_age == 0.0
        await each.consume([b"a"])
        await asyncio.sleep(10.0)
        await each.consume([b"b"])
        stats = each.stats()
        assert 10.0 <= stats.oldest_age <= 10.5
        assert stats.last_success_at is None
        assert stats.last_error_at is not None
        assert stats.next_send_in is not None
        there.set()
        await each.flush()
        stats = each.stats()
        assert (stats.oldest_age, stats.records, stats.send_seconds.count) == (0.0, 0, stats.delivered_batches)
        assert stats.delivered_bytes >= 2
        assert stats.last_success_at is not None
        assert stats.adds_up


async def test_records_of_an_earlier_run_are_not_younger_than_they_are(tmp_path):
    away = Destination(answer=lambda _: bq.RetryableError("away"))
    async with exporter(away, tmp_path / "q", drain_timeout=0.5) as each:
        await each.consume([b"a"])
        await asyncio.sleep(60.0)
    async with exporter(away, tmp_path / "q", drain_timeout=0.5) as each:
        await asyncio.sleep(5.0)
        assert each.stats().recovered == 1
        assert each.stats().oldest_age >= 5.0


async def test_an_open_breaker_says_when_the_next_attempt_is():
    sink = Destination(answer=lambda _: bq.RetryableError("away"))
    breaker = bq.BreakerPolicy(threshold=1, reset_timeout=30.0)
    async with exporter(sink, breaker=breaker, drain_timeout=0.1) as each:
        await each.consume([b"a"])
        await asyncio.sleep(1.0)
        assert 28.0 <= each.stats().next_send_in <= 30.0


async def test_dead_letters_are_counted_by_the_class_of_their_error_and_the_newest_are_named():
    def answer(batch):
        return bq.PermanentError("no such column") if batch[0] % 2 else bq.RetryableError("away")

    retry = bq.RetryPolicy(initial=0.1, max_attempts=2)
    async with exporter(Destination(answer=answer), retry=retry, batch=bq.BatchPolicy(max_records=1)) as each:
        await each.consume(list(range(6)))
        await each.flush()
        stats = each.stats()
        assert dict(stats.dead_kinds) == {"PermanentError": 3, "exhausted": 3}
        assert {letter.reason.partition(":")[0] for letter in stats.newest_dead} >= {"PermanentError"}
        assert sum(letter.records for letter in stats.newest_dead) == stats.dead_lettered == 6


async def test_another_thread_sees_counts_that_add_up_while_records_flow():
    async with exporter(Destination(latency=0.001)) as each:
        seen: list[bool] = []
        ended = False

        def read():
            while not ended:
                seen.append(each.peek().adds_up)

        reading = asyncio.get_running_loop().run_in_executor(None, read)
        for _ in range(200):
            await each.consume([b"x"] * 50)
        ended = True
        await reading
    assert seen
    assert all(seen)


@pytest.mark.parametrize("forward", [False, True], ids=["letters", "forwarded"])
@pytest.mark.parametrize("said", [bq.PermanentError("no"), bq.RetryableError("later")], ids=["refused", "again"])
async def test_counts_add_up_in_each_turn_of_the_loop_while_a_torn_batch_is_settled(tmp_path, forward, said):
    # Each second record is refused, so that neither what was taken nor what was not is next to each other.
    refused = dict.fromkeys(range(0, 2_000, 2), said)
    sink = Destination(answer=lambda batch: bq.SendResult(rejected=refused) if len(batch) == 2_000 else None)
    config = bq.ExportConfig(path=tmp_path / "q", batch=bq.BatchPolicy(linger=0.0, max_records=2_000))
    async with exporter(Destination()) as letters:
        elsewhere = letters if forward else None
        async with bq.Exporter(sink, config, name="test", dead_letters=elsewhere, open_queue=inline) as each:
            await each.consume([b"%d" % number for number in range(2_000)])
            seen = set()
            for _ in range(400):
                stats = each.stats()
                assert stats.adds_up
                seen.add(stats.delivered)
                await asyncio.sleep(0)
            assert len(seen) > 5  # it was settled in several turns
            await each.flush()
            assert each.stats().adds_up
            assert each.stats().delivered == (1_000 if isinstance(said, bq.PermanentError) else 2_000)
