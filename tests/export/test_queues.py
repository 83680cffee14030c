"""The send queue in memory by itself, and what the exporter does when its own parts fail."""

from __future__ import annotations

import asyncio
import errno
import tracemalloc
from random import Random

import pytest
from durable_kit import RecordingFiles
from export_kit import Destination, check, down, exporter, inline, script

import batchqueue_async as bq
from batchqueue_async.export.send_queue.memory import MemoryQueue
from batchqueue_async.sinks.base import SendResult
from batchqueue_async.testing import advance, settle

# --- the memory queue


def payloads(lease):
    return list(lease.payloads)


@pytest.mark.parametrize("seed", range(60))
async def test_a_memory_queue_beside_a_simple_model(seed):
    randomly = Random(seed)
    keyed = seed % 3 == 0
    queue = MemoryQueue(
        max_records=60, max_bytes=None, overflow="drop_oldest", key=(lambda item: item % 3) if keyed else None
    )
    held: dict[int, object] = {}
    done: set[int] = set()
    number = 0
    for _ in range(300):
        step = randomly.choice(["put", "put", "lease", "lease", "ack", "nack", "part", "bury", "wait"])
        if step == "put":
            count = randomly.choice([1, 1, 5, 30])
            # Where all that is in is leased the older ones of what comes in are dropped, and are never numbered.
            refused = max(0, queue.leased + count - 60)
            before = queue.dropped["newest"]
            numbers = await queue.put([-1] * refused + list(range(number, number + count - refused)))
            assert queue.dropped["newest"] - before == refused
            assert sum(map(len, numbers)) == count - refused
            number += count - refused
        elif step == "lease":
            lease = await queue.lease(randomly.choice([1, 7, 100]), 10_000, 0)
            found = [] if lease is None else payloads(lease)
            assert found == sorted(found)
            assert not done & set(found)
            assert not any(item in payloads(other) for other in held.values() for item in found)
            if keyed:
                under_way = {item % 3 for other in held.values() for item in payloads(other) if item not in done}
                assert not under_way & {item % 3 for item in found}
            if found:
                held[id(lease)] = lease
        elif held and step in {"ack", "nack", "part", "bury"}:
            lease = held.pop(randomly.choice(list(held)))
            seqs = list(lease.numbers)
            some = randomly.sample(range(len(seqs)), randomly.randrange(len(seqs) + 1)) if step == "part" else None
            if step == "nack":
                await lease.nack(randomly.choice([0, 3.0]), counted=randomly.random() < 0.5)
                continue
            done |= {seq for place, seq in enumerate(seqs) if some is None or place in some}
            await (lease.dead_letter("no") if step == "bury" else lease.ack(some))
            if some is not None:
                await lease.nack(1.0)
        elif step == "wait":
            await advance(1.0)
        dropped = queue.dropped["oldest"]
        assert queue.records == number - len(done) - dropped <= 60
        left = [item for other in held.values() for item in payloads(other)]
        assert queue.leased == len(left)
        if queue.records:
            assert 0 <= queue.oldest < number
    queue.close()
    assert len(queue.take_all()) == number - len(done) - queue.dropped["oldest"]


async def test_records_that_come_one_by_one_take_what_they_count_for():
    sink = Destination(answer=lambda _: down())
    async with exporter(sink, drain_timeout=0.0) as export:
        await export.consume([b"first"])
        await settle()
        tracemalloc.start()
        for number in range(20_000):
            await export.consume([b"%020d" % number])
        used = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert used < check(export).bytes + 500_000


async def test_a_record_that_waits_keeps_none_of_its_batch():
    sink = Destination(answer=lambda batch: down() if batch[0][0] == 1 else None)
    retry = bq.RetryPolicy(initial=1e5, max_delay=1e5, jitter=False)
    options = {"batch_records": 1, "breaker": bq.BreakerPolicy(enabled=False), "retry": retry}
    async with exporter(sink, drain_timeout=0.0, **options) as export:
        tracemalloc.start()
        for _ in range(50):
            await export.consume([bytes([1]), *(bytes([2]) * 20_000 for _ in range(10))])
            await advance(0.1)
            sink.records.clear()
            sink.calls.clear()
        used = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert check(export).records == 50
        assert used < 2_000_000


async def test_what_waits_for_its_key_can_be_dropped_too():
    sink = Destination(latency=1e6)
    options = {"ordering": "key", "key": lambda _: 0, "max_records": 5, "send_timeout": 1e7, "drain_timeout": 0.0}
    async with exporter(sink, batch_records=1, **options) as export:
        for number in range(10):
            await export.consume([number])
            await settle()
        assert check(export).dropped == {"oldest": 5}
    assert export.report.undelivered == [0, 6, 7, 8, 9]


async def test_a_closed_queue_sends_away_who_waits():
    sink = Destination(latency=1e6)
    async with exporter(sink, max_records=1, overflow="block", block_timeout=None, send_timeout=1e7) as export:
        await export.consume([1])
        waiting = asyncio.create_task(export.consume([2]))
        await settle()
        await export.shutdown(1.0)
        with pytest.raises(bq.QueueClosedError):
            await waiting
    assert export.report.undelivered == [1]


async def test_a_cancelled_wait_for_room_leaves_the_others_in_line():
    sink = Destination(latency=1.0, concurrent=False)
    async with exporter(sink, max_records=1, overflow="block", batch_records=1) as export:
        await export.consume([1])
        waiting = [asyncio.create_task(export.consume([number])) for number in (2, 3, 4)]
        await settle()
        waiting[0].cancel()
        waiting[2].cancel()
        await export.flush()
        await waiting[1]
        await export.flush()
    assert sink.records == [1, 3]


async def test_an_empty_batch_is_nothing():
    async with exporter(Destination()) as export:
        await export.consume([])
        await export.flush()
        assert check(export).accepted == 0


async def test_a_put_that_makes_room_among_single_records_gives_way_to_the_loop():
    queue = MemoryQueue(max_records=2_000, max_bytes=None, overflow="drop_oldest")
    await queue.put(list(range(2_000)))
    for _ in range(2_000):
        await (await queue.lease(1, 1_000, 0)).nack(3_600.0)
    turns = 0

    async def tick():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    ticking = asyncio.create_task(tick())
    await asyncio.sleep(0)
    before = turns
    await queue.put(list(range(2_000, 4_000)))
    assert turns - before >= 5
    ticking.cancel()
    lease = await queue.lease(2_000, 1 << 30, 0)
    assert payloads(lease) == list(range(2_000, 4_000))
    assert queue.dropped["oldest"] == 2_000


async def test_a_batch_of_single_records_is_full_though_a_lease_has_no_more_than_some_runs():
    fails = SendResult(rejected=dict.fromkeys(range(0, 3_000, 2), down()))
    sink = Destination(answer=script(fails))
    retry = bq.RetryPolicy(initial=10.0, jitter=False)
    async with exporter(sink, batch_records=3_000, retry=retry, workers=bq.WorkerPolicy.fixed(1)) as export:
        await export.consume(list(range(3_000)))
        await advance(5.0)
        # While this one is sent, all others become due.
        sink.latency = 20.0
        await export.consume([3_000])
        await export.flush(60.0)
    assert [len(call) for call in sink.calls] == [3_000, 1, 1_500]
    assert sorted(sink.records) == list(range(3_001))


# --- when the parts fail


async def test_a_shutdown_in_the_middle_of_a_linger():
    sink = Destination()
    async with exporter(sink, linger=1e4) as export:
        await export.consume([1])
        await settle()
    assert sink.records == [1]
    async with exporter(sink, linger=1e4, drain_timeout=0.0) as export:
        await export.consume([2])
        await settle()
    assert sink.records[1:] + export.report.undelivered == [2]


async def test_a_shutdown_while_the_sink_is_being_opened(tmp_path):
    class Slow(Destination):
        async def open(self):
            await super().open()
            await asyncio.sleep(1e6)

    sink = Slow(opening=[down()])
    async with exporter(sink, tmp_path, drain_timeout=5.0, send_timeout=1e3) as export:
        await export.consume([1])
        await settle()
    assert export.report.on_disk == 1
    assert sink.opens == 2


async def test_a_sink_that_ends_as_cancelled_while_it_is_opened_again():
    sink = Destination(opening=[down(), asyncio.CancelledError(), down(retry_after=7.0)])
    async with exporter(sink) as export:
        await export.consume([1])
        await export.flush()
    assert sink.records == [1]


async def test_failing_to_open_counts_for_the_breaker():
    sink = Destination(opening=[down() for _ in range(6)])
    retry = bq.RetryPolicy(initial=1.0, jitter=False, max_delay=1.0)
    async with exporter(sink, breaker=bq.BreakerPolicy(threshold=3, reset_timeout=20.0), retry=retry) as export:
        await export.consume([1])
        await advance(15.0)
        assert (export.breaker, sink.opens) == ("open", 4)
        await export.flush()
        assert check(export).breaker_opens == 3  # and two more by the probes
    assert sink.records == [1]


async def test_an_on_dead_letter_that_fails_is_logged(logs):
    def tell(records, reason):
        raise KeyError(records)

    sink = Destination(answer=lambda _: bq.PermanentError("400"))
    async with exporter(sink, on_dead_letter=tell) as export:
        await export.consume(["secret"])
        await export.flush()
        assert check(export).dead_lettered == 1
    assert "on_dead_letter_failed" in [event["event"] for event in logs]
    assert not any("secret" in str(value) for event in logs for value in event.values())


async def test_the_report_keeps_a_bounded_number_of_what_was_given_up():
    sink = Destination(answer=lambda _: bq.PermanentError("400"))
    async with exporter(sink, batch_records=100, retry=bq.RetryPolicy(isolate=False)) as export:
        for number in range(30):
            await export.consume([number] * 100)
        await export.flush()
        assert check(export).dead_lettered == 3_000
    kept = [record for letter in export.report.given_up for record in letter.records]
    assert len(kept) == 1_000
    assert kept[-1] == 29


async def test_a_disk_that_is_full_for_dead_letters_keeps_the_records(tmp_path, logs):
    files = RecordingFiles()

    def open_queue(path, config):
        return inline(path, config, files=files)

    sink = Destination(answer=lambda _: bq.PermanentError("400"))
    batch = bq.BatchPolicy(linger=0.0)
    export = bq.Exporter(sink, bq.ExportConfig(path="/queue", batch=batch), name="test", open_queue=open_queue)
    async with export:
        await export.consume(["a"])
        files.fault = lambda call, path: (
            OSError(errno.ENOSPC, "full") if "dead" in str(path) and call in {"create", "make_directory"} else None
        )
        await advance(1.0)
        stats = check(export)
        assert (stats.dead_lettered, stats.records) == (0, 1)
        files.fault = None
        await export.flush(timeout=1e4)
        assert check(export).dead_lettered == 1
    assert "dead_letters_failed" in [event["event"] for event in logs]


async def test_a_disk_that_fills_up_amid_dead_letters_keeps_the_others_and_counts_those_that_went(logs):
    """They are moved in several steps when they are apart from each other: a part may be, when one fails."""
    files = RecordingFiles()
    syncs = 0

    def full(call, path):
        nonlocal syncs
        syncs += call == "sync" and path.parent.name == "dead"
        # The first sync is of the segment's header.
        return OSError(errno.ENOSPC, "full") if path.parent.name == "dead" and call != "read" and syncs > 2 else None

    reported = []
    refused = SendResult(rejected=dict.fromkeys(range(0, 1_000, 2), bq.PermanentError("400")))
    sink = Destination(answer=script(refused))
    config = bq.ExportConfig(
        path="/queue",
        batch=bq.BatchPolicy(max_records=1_000, linger=60.0),
        retry=bq.RetryPolicy(isolate=False),
        on_dead_letter=lambda records, _: reported.extend(records),
    )
    export = bq.Exporter(sink, config, name="test", open_queue=lambda path, config: inline(path, config, files=files))
    async with export:
        files.fault = full
        await export.consume(list(range(1_000)))
        await advance(61.0)
        assert "dead_letters_failed" in [event["event"] for event in logs]
        assert check(export).dead_lettered == len(reported) == 150
        files.fault = None
        await export.flush(timeout=1e4)
        stats = check(export)
        assert (stats.delivered, stats.dead_lettered) == (850, 150)
        assert reported == list(range(0, 300, 2))
        assert sorted(sink.calls[1]) == list(range(300, 1_000, 2))


async def test_a_fault_of_ours_costs_one_delivery_and_is_told(logs):
    sink = Destination()
    async with exporter(sink) as export:
        courier = export._engine.sender
        answered, faults = courier.answered, [KeyError("a fault of ours")]

        def once(leave):
            if faults:
                raise faults.pop()
            answered(leave)

        courier.answered = once
        await export.consume([1])
        await settle()
        await export.consume([2])
        await export.flush()
        assert sink.records == [1, 2, 1]  # it went back into the queue, and was sent again after a delay
        assert "export_delivery_failed" in [event["event"] for event in logs]
        real, export._engine.queue.lease = export._engine.queue.lease, None
        await export.consume([3])
        await settle()
        export._engine.queue.lease = real
        await export.consume([4])
        await export.flush()
    assert sink.records[-1] == 4


async def test_a_rejected_place_that_does_not_exist_is_a_fault_of_the_sink():
    from batchqueue_async.sinks.base import SendResult

    sink = Destination(answer=script(SendResult(rejected={7: down(), -1: bq.PermanentError("x")})))
    async with exporter(sink) as export:
        await export.consume(["a", "b"])
        await export.flush()
        stats = check(export)
        assert stats.delivered + stats.dead_lettered == 2


async def test_encode_that_fails_and_records_too_large_for_the_disk(tmp_path):
    sink = Destination()
    durable = bq.DurableConfig(max_record=100)

    def encode(record):
        return str(record).encode() if record != "bad" else 1 / 0

    options = {"encode": encode, "decode": bytes.decode, "durable": durable}
    async with exporter(sink, tmp_path, **options) as export:
        with pytest.raises(bq.DeliveryError) as caught:
            await export.consume(["a", "bad", "x" * 101, "b"])
        assert [type(failure.error) for failure in caught.value.failures] == [ZeroDivisionError, bq.RecordTooLargeError]
        await export.flush()
    assert sink.records == ["a", "b"]


@pytest.mark.parametrize("overflow", ["block", "drop_oldest"])
async def test_a_batch_larger_than_the_queue_comes_in_in_parts(overflow, tmp_path):
    for place in (None, tmp_path / "queue"):
        sink = Destination(latency=0.1)
        async with exporter(sink, place, max_records=10, overflow=overflow) as export:
            await export.consume(list(range(45)))
            await export.flush()
            stats = check(export)
            assert stats.accepted == 45
        assert sink.records == sorted(sink.records)
        if overflow == "block":
            assert sink.records == list(range(45))
        else:
            assert sink.records[-1] == 44


async def test_a_batch_larger_than_a_frame_is_put_in_parts(tmp_path, monkeypatch):
    from batchqueue_async.export.send_queue import disk as send_queue

    monkeypatch.setattr(send_queue, "_PUT_BYTES", 1_000)
    sink = Destination()
    async with exporter(sink, tmp_path) as export:
        await export.consume([bytes([number]) * 300 for number in range(20)])
        await export.flush()
    assert len(sink.records) == 20


async def test_the_newest_first(tmp_path):
    sink = Destination(answer=script(down()))
    options = {"durable": bq.DurableConfig(order="freshest"), "batch_records": 2}
    async with exporter(sink, tmp_path, breaker=bq.BreakerPolicy(threshold=1, reset_timeout=5.0), **options) as export:
        await export.consume([0])
        await settle()
        await export.consume([1, 2, 3])
        await export.flush()
    assert sink.records == [3, 2, 1, 0]
