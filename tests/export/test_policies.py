"""The exporter's options at work, in virtual time: keys, failover, split, adaptive workers, outages."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections import defaultdict
from random import Random

import pytest
from export_kit import Destination, check, down, exporter, script

import batchqueue_async as bq
from batchqueue_async.sinks.base import SendResult
from batchqueue_async.testing import advance, run_virtual, settle


@pytest.fixture(params=["memory", "disk"])
def place(request, tmp_path):
    return None if request.param == "memory" else tmp_path / "queue"


def now() -> float:
    return asyncio.get_running_loop().time()


# --- order by key


def by_key(records):
    found = defaultdict(list)
    for key, number in records:
        found[key].append(number)
    return found


def order_options(**options):
    return {"ordering": "key", "key": lambda record: record[0], "workers": bq.WorkerPolicy.fixed(8)} | options


async def test_records_of_a_key_wait_for_the_earlier_one(place):
    sink = Destination(answer=lambda batch: down() if now() < 10.0 and ["a", 0] in map(list, batch) else None)
    options = order_options(batch_records=1, retry=bq.RetryPolicy(initial=12.0, jitter=False))
    async with exporter(sink, place, **options) as export:
        await export.consume([["a", 0], ["b", 0], ["a", 1], ["b", 1], ["a", 2]])
        await advance(5.0)
        assert [list(record) for record in sink.records] == [["b", 0], ["b", 1]]
        await export.flush()
        check(export)
    assert by_key(sink.records) == {"a": [0, 1, 2], "b": [0, 1]}


@pytest.mark.parametrize("seed", range(12))
async def test_keys_keep_their_order_through_any_failures(seed, place):
    randomly = Random(seed)

    def answer(batch):
        luck = randomly.random()
        if luck < 0.15:
            return down()
        if luck < 0.25:
            return bq.TooLargeError("413") if len(batch) > 1 else None
        if luck < 0.45:
            places = [place for place in range(len(batch)) if randomly.random() < 0.4]
            return SendResult(rejected=dict.fromkeys(places, down("one by one")))
        if luck < 0.48:
            return bq.AuthError("401")
        return None

    sink = Destination(answer=answer)
    sink.latency = 0.1
    options = order_options(batch_records=randomly.choice([1, 3, 10]), auth_pause=1.0)
    retry = bq.RetryPolicy(initial=1.0, max_delay=4.0)
    breaker = bq.BreakerPolicy(threshold=4, reset_timeout=2.0)
    async with exporter(sink, place, retry=retry, breaker=breaker, **options) as export:
        numbers = dict.fromkeys("abcdef", 0)
        for _ in range(30):
            batch = []
            for _ in range(randomly.randrange(1, 6)):
                key = randomly.choice("abcdef")
                batch.append([key, numbers[key]])
                numbers[key] += 1
            await export.consume(batch)
            await asyncio.sleep(randomly.random())
            check(export)
        await export.flush(timeout=3600.0)
        assert check(export).dead_lettered == 0
    assert by_key(sink.records) == {key: list(range(count)) for key, count in numbers.items() if count}


async def test_a_key_function_that_fails_harms_nobody(place):
    sink = Destination()
    options = order_options(key=lambda record: {}[record])
    async with exporter(sink, place, **options) as export:
        await export.consume([1, 2, 3])
        await export.flush()
    assert sink.records == [1, 2, 3]


async def test_drop_oldest_with_keys():
    sink = Destination(answer=lambda _: down())
    options = order_options(max_records=6, batch_records=2, breaker=bq.BreakerPolicy(enabled=False))
    async with exporter(sink, retry=bq.RetryPolicy(initial=3.0), **options) as export:
        for number in range(40):
            await export.consume([["ab"[number % 2], number // 2]])
            await asyncio.sleep(0.5)
            check(export)
        sink.answer = None
        await export.flush()
        stats = check(export)
        assert stats.dropped["oldest"] + stats.delivered == 40
    for numbers in by_key(sink.records).values():
        assert numbers == sorted(numbers)


# --- failover


async def test_what_ran_out_of_attempts_goes_into_the_failover_queue_and_is_drained():
    sink = Destination(answer=lambda _: down())
    options = {"retry": bq.RetryPolicy(initial=0.1, max_attempts=2, jitter=False), "batch_records": 2}
    failover = bq.FailoverPolicy(interval=5.0, drain=3)
    async with exporter(sink, failover=failover, breaker=bq.BreakerPolicy(enabled=False), **options) as export:
        await export.consume(list(range(20)))
        await advance(4.0)
        stats = check(export)
        assert (stats.records, stats.failover_records, stats.failover_entries) == (0, 20, 10)
        assert stats.failover_in == 20
        assert stats.dead_lettered == 0
        sink.answer = None
        await advance(2.0)
        assert check(export).failover_out == 6  # three entries each look
        flushing = asyncio.create_task(export.flush())
        await advance(5.0)
        assert not flushing.done()
        await advance(10.0)
        assert flushing.done()
        stats = check(export)
        assert (stats.failover_records, stats.failover_bytes, stats.failover_out) == (0, 0, 20)
    assert sorted(sink.records) == list(range(20))


async def test_the_failover_queue_is_bounded_and_evicts_the_oldest():
    sink = Destination(answer=lambda _: down())
    options = {"retry": bq.RetryPolicy(max_attempts=1), "batch_records": 2, "workers": bq.WorkerPolicy.fixed(1)}
    failover = bq.FailoverPolicy(max_entries=3, interval=1e6)
    async with exporter(sink, failover=failover, breaker=bq.BreakerPolicy(enabled=False), **options) as export:
        await export.consume([bytes([number]) for number in range(20)])
        await settle()
        stats = check(export)
        assert (stats.failover_entries, stats.failover_evicted) == (3, 14)
    assert sorted(export.report.undelivered) == [bytes([number]) for number in range(14, 20)]
    failover = bq.FailoverPolicy(max_bytes=9, interval=1e6)
    async with exporter(sink, failover=failover, breaker=bq.BreakerPolicy(enabled=False), **options) as export:
        await export.consume([b"xx"] * 20)
        await settle()
        assert check(export).failover_bytes == 8


async def test_partial_success_from_the_failover_queue():
    answers = [down(), down(), SendResult(rejected={0: down(), 1: bq.PermanentError("400")}), None]
    sink = Destination(answer=script(*answers))
    options = {"retry": bq.RetryPolicy(initial=0.1, max_attempts=2), "failover": bq.FailoverPolicy()}
    async with exporter(sink, **options) as export:
        await export.consume(["a", "b", "c"])
        await export.flush()
        stats = check(export)
        assert (stats.delivered, stats.dead_lettered, stats.failover_out) == (2, 1, 2)
    assert sink.calls[2:] == [["a", "b", "c"], ["a"]]


async def test_a_shutdown_drains_the_failover_queue_too():
    sink = Destination(answer=script(down()))
    options = {"retry": bq.RetryPolicy(max_attempts=1), "failover": bq.FailoverPolicy()}
    async with exporter(sink, **options) as export:
        await export.consume(["a"])
        await settle()
        assert check(export).failover_records == 1
    assert (sink.records, export.report.complete) == (["a"], True)


async def test_the_failover_queue_and_the_send_queue_share_the_sink():
    sink = Destination(answer=script(down()), concurrent=False)
    options = {"retry": bq.RetryPolicy(max_attempts=1), "failover": bq.FailoverPolicy(interval=5.0)}
    async with exporter(sink, **options) as export:
        await export.consume(["a"])
        await advance(1.0)
        sink.latency = 2.0
        await advance(5.0)
        assert sink.active == 1  # the failover queue is being looked into
        await export.consume(["b"])
        await settle()
        await export.flush()
    assert sink.most_active == 1
    assert sink.records == ["a", "b"]


# --- the split pipeline


class Preparing(Destination):
    def __post_init__(self):
        super().__post_init__()
        self.prepared = 0
        self.fail = False

    def prepare(self, batch, keys):
        if self.fail:
            raise ValueError("no")
        assert len(keys) == len(batch)
        self.prepared += 1
        return list(batch)

    async def send_prepared(self, prepared):
        return await self.send(prepared)


async def test_the_sinks_own_preparation_is_used_and_a_split_batch_goes_the_plain_way(place):
    sink = Preparing(answer=lambda batch: bq.TooLargeError("413") if len(batch) > 2 else None)
    async with exporter(sink, place, split=bq.SplitPolicy(preparers=1)) as export:
        await export.consume([1, 2, 3, 4])
        await export.flush()
        assert sink.prepared == 1
        sink.fail = True
        await export.consume([5])
        await export.flush()
        check(export)
    assert sorted(sink.records) == [1, 2, 3, 4, 5]


async def test_records_that_can_not_be_prepared_are_given_up_alone(place):
    sink = Destination()

    def prepare(batch):
        return [100 // record for record in batch]

    async with exporter(sink, place, split=bq.SplitPolicy(prepare=prepare)) as export:
        await export.consume([1, 2, 0, 4])
        await export.flush()
        assert check(export).dead_lettered == 1
    assert sink.records == [100, 50, 25]


async def test_what_is_given_up_is_what_was_handed_over(place):
    told = []
    sink = Destination(answer=lambda _: bq.PermanentError("400"))
    split = bq.SplitPolicy(prepare=lambda batch: [record * 2 for record in batch])
    async with exporter(sink, place, split=split, on_dead_letter=lambda *letter: told.append(letter)) as export:
        await export.consume(["a", "b"])
        await export.flush()
    assert [record for records, _ in told for record in records] == ["a", "b"]


async def test_a_preparation_that_loses_records_is_refused(place):
    sink = Destination()
    async with exporter(sink, place, split=bq.SplitPolicy(prepare=lambda batch: batch[:-1])) as export:
        await export.consume([1, 2])
        await export.flush()
        assert check(export).dead_lettered == 2


async def test_senders_bound_the_sends_and_the_channel_what_is_prepared(place):
    sink = Destination(latency=1.0)
    made = []
    split = bq.SplitPolicy(preparers=2, senders=1, sends_per_sender=3, channel=4, prepare=lambda x: made.append(x) or x)
    async with exporter(sink, place, split=split, batch_records=1) as export:
        await export.consume(list(range(40)))
        await advance(0.5)
        stats = check(export)
        assert stats.sends_in_flight == 3
        assert len(made) == 3 + 4 + 2
        await export.flush()
    assert sink.most_active == 3
    assert sorted(sink.records) == list(range(40))


async def test_an_outage_finds_prepared_batches_and_loses_none(place):
    sink = Destination(latency=0.1)
    split = bq.SplitPolicy(preparers=2, senders=2, channel=16, sends_per_sender=2)
    breaker = bq.BreakerPolicy(threshold=2, reset_timeout=5.0)
    retry = bq.RetryPolicy(initial=1.0)
    async with exporter(sink, place, split=split, batch_records=5, breaker=breaker, retry=retry) as export:
        await export.consume(list(range(500)))
        await advance(0.25)
        sink.answer = lambda _: down()
        await advance(20.0)
        assert check(export).breaker != "closed"
        sink.answer = None
        await export.flush()
        check(export)
    assert sorted(sink.records) == list(range(500))


async def test_what_is_prepared_is_not_sent_while_the_breaker_is_open(place):
    sink = Destination(latency=1.0, answer=lambda _: down())
    options = {"split": bq.SplitPolicy(senders=1, sends_per_sender=1), "batch_records": 1}
    async with exporter(sink, place, breaker=bq.BreakerPolicy(threshold=1, reset_timeout=50.0), **options) as export:
        await export.consume(list(range(10)))
        await advance(40.0)
        assert len(sink.calls) == 1
        sink.answer = None
        await export.flush()
        check(export)
    assert sorted(sink.records) == list(range(10))


async def test_a_sink_that_takes_one_send_at_a_time_gets_no_more_from_a_pipeline():
    sink = Destination(latency=0.1, concurrent=False)
    async with exporter(sink, split=bq.SplitPolicy(senders=4), batch_records=1) as export:
        await export.consume(list(range(10)))
        await export.flush()
    assert sink.most_active == 1


# --- adaptive workers


async def test_workers_follow_a_destination_that_can_take_six(place):
    class Limited(Destination):
        async def send(self, batch):
            self.latency = 0.1 if self.active < 6 else 0.5
            return await super().send(batch)

    sink = Limited()
    adaptive = bq.AdaptivePolicy(min_workers=1, max_workers=40, interval=1.0)
    options = {"workers": bq.WorkerPolicy.fixed(1), "adaptive": adaptive, "batch_records": 1}
    seen = []
    async with exporter(sink, place, **options) as export:
        for _ in range(120):
            await export.consume(list(range(100)))
            await advance(1.0)
            seen.append(check(export).workers_total)
        await export.shutdown(0)
    assert seen[0] <= 2
    assert max(seen) <= 16
    assert min(seen[20:]) >= 3
    assert sink.most_active <= 16


async def test_workers_shrink_in_an_outage(place):
    sink = Destination(answer=lambda _: down(), latency=0.01)
    options = {"workers": bq.WorkerPolicy.fixed(8), "adaptive": bq.AdaptivePolicy(max_workers=8), "batch_records": 1}
    async with exporter(sink, place, breaker=bq.BreakerPolicy(enabled=False), **options) as export:
        await export.consume(list(range(50)))
        await advance(20.0)
        assert check(export).workers_total == 1
        await export.shutdown(0)


# --- recovery, and an hour's outage


async def test_a_backlog_drains_at_workers_by_latency(place):
    """100,000 records, 8 workers, 50 ms: the time of the sizing formula, within a tenth."""
    sink = Destination(answer=lambda _: down())
    options = {"workers": bq.WorkerPolicy.fixed(8), "max_records": 200_000, "batch_records": 100}
    async with exporter(sink, place, **options) as export:
        for start in range(0, 100_000, 1_000):
            await export.consume(list(range(start, start + 1_000)))
        await settle()
        assert export.breaker == "open"
        sink.answer, sink.latency, sink.times = None, 0.05, []
        await export.flush()
        ideal = 100_000 / 100 * 0.05 / 8
        # Those that failed before the breaker opened wait for their delays, which is no part of the drain.
        times = sorted(sink.times)[: 1_000 - 8]
        assert times[-1] - times[0] < 1.1 * ideal
        check(export)


async def test_memory_stays_within_its_bound_in_an_hours_outage():
    sink = Destination(answer=lambda _: down())
    limit = 2_000_000
    options = {"max_bytes": limit, "batch_records": 50, "workers": bq.WorkerPolicy.fixed(8)}
    retry = bq.RetryPolicy(max_attempts=1_000)
    async with exporter(sink, breaker=bq.BreakerPolicy(reset_timeout=5.0), retry=retry, **options) as export:
        sizes, tasks = [], []
        sink.calls = _Count()
        sink.times = _Count()
        tracemalloc.start()
        for second in range(3_600):
            await export.consume([b"%07d" % second + bytes(993)] * 10)
            await asyncio.sleep(1.0)
            if second % 600 == 599:
                gc.collect()
                sizes.append(tracemalloc.get_traced_memory()[0])
                tasks.append(len(asyncio.all_tasks()))
                assert check(export).bytes <= limit
        tracemalloc.stop()
        assert export._engine.queue.most_size <= limit
        assert max(sizes) < limit + 2_000_000
        assert sizes[-1] < sizes[1] * 1.05 + 100_000
        assert max(tasks) < 15
        stats = check(export)
        assert stats.dropped["oldest"] > 30_000
        sink.answer = None
        await export.flush()
        assert check(export).delivered + stats.dropped["oldest"] == 36_000


class _Count(list):
    """Counts what is appended, and keeps none of it."""

    def append(self, _):
        pass


async def test_a_disk_that_fills_up_in_an_outage(tmp_path):
    sink = Destination(answer=lambda _: down())
    options = {"max_bytes": 200_000, "overflow": "reject", "breaker": bq.BreakerPolicy(reset_timeout=5.0)}
    async with exporter(sink, tmp_path, **options) as export:
        taken = refused = 0
        for number in range(400):
            try:
                await export.consume([b"%04d" % number + bytes(1_000)])
                taken += 1
            except bq.QueueFullError:
                refused += 1
            await asyncio.sleep(1.0)
        stats = check(export)
        assert refused > 100
        assert (stats.accepted, stats.refused, stats.disk_full) == (taken, refused, refused)
        sink.answer = None
        await export.flush()
        await export.consume([b"room again"])
        await export.flush()
        assert check(export).delivered == taken + 1


# --- many histories


@pytest.mark.parametrize("seed", range(40))
def test_nothing_is_lost_or_counted_twice_in_any_history(seed, tmp_path):
    """Random outages, refusals, hangs, restarts and cancellations; each record is delivered or accounted for."""
    randomly = Random(seed)
    disk = tmp_path / "queue" if seed % 2 else None
    delivered: set[int] = set()
    given_up: set[int] = set()

    def answer(batch):
        luck = randomly.random()
        if luck < 0.1:
            return down(retry_after=randomly.choice([None, 3.0]))
        if luck < 0.15:
            return bq.TooLargeError("413")
        if luck < 0.2:
            return bq.AuthError("401")
        if luck < 0.25:
            return SendResult(rejected={randomly.randrange(len(batch)): randomly.choice([down(), bq.TooLargeError()])})
        if luck < 0.3:
            return ConnectionResetError()
        return bq.PermanentError("400") if 13 in batch else None

    def options():
        return {
            "batch_records": randomly.choice([1, 4, 50]),
            "linger": randomly.choice([0.0, 0.5]),
            "send_timeout": 2.0,
            "auth_pause": 1.0,
            "drain_timeout": randomly.choice([0.0, 1.0, 10.0]),
            "retry": bq.RetryPolicy(initial=0.5, max_delay=3.0),
            "breaker": bq.BreakerPolicy(threshold=3, reset_timeout=2.0),
            "split": bq.SplitPolicy(preparers=1, senders=2, channel=3) if disk is None and seed % 3 == 0 else None,
            "on_dead_letter": lambda records, _: given_up.update(records),
            "overflow": "block",
        }

    async def history():
        accepted: set[int] = set()
        maybe: set[int] = set()
        number = 0
        left: set[int] = set()
        for _ in range(4):
            sink = Destination(answer=answer)
            export = exporter(sink, disk, seed=seed, **options())
            async with export:
                for _ in range(randomly.randrange(1, 12)):
                    sink.latency = randomly.choice([0.0, 0.1, 0.1, 5.0])
                    batch = list(range(number, number + randomly.randrange(1, 30)))
                    number += len(batch)
                    task = asyncio.create_task(export.consume(batch))
                    if randomly.random() < 0.1:
                        for _ in range(randomly.randrange(4)):
                            await asyncio.sleep(0)
                        task.cancel()
                    await asyncio.wait([task])
                    (maybe if task.cancelled() else accepted).update(batch)
                    await asyncio.sleep(randomly.choice([0.0, 0.3, 2.0]))
                    check(export)
                if randomly.random() < 0.3:
                    flushing = asyncio.create_task(export.flush())
                    await asyncio.sleep(0)
                    flushing.cancel()
            delivered.update(sink.records)
            left.update(export.report.undelivered)
        if disk is not None:
            sink = Destination()
            async with exporter(sink, disk, on_dead_letter=lambda records, _: given_up.update(records)) as export:
                await export.flush()
                check(export)
            delivered.update(sink.records)
        assert accepted <= delivered | given_up | left
        assert delivered | given_up | left <= accepted | maybe
        if disk is not None:
            assert not left

    run_virtual(history, seed=seed)
