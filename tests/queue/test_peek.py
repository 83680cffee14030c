"""Statistics that any thread reads without waiting for the loop."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import threading
import time

import pytest
from queue_tools import Item, make

import batchqueue_async as bq
from batchqueue_async.queue import observer
from batchqueue_async.queue.partition import Partition
from batchqueue_async.testing import RecordingHandler, advance, settle


def elsewhere(call):
    """What a call returns on another thread, while this one waits for it."""
    answers = []
    thread = threading.Thread(target=lambda: answers.append(call()))
    thread.start()
    thread.join(30)
    return answers[0]


async def test_a_thread_reads_the_same_numbers_as_the_loop():
    handler = RecordingHandler[Item]()
    queue = make(consumer=handler, partitions=bq.PartitionPolicy.fixed(3))
    await queue.produce_many([Item(number) for number in range(10)])
    await queue.flush()
    await queue.produce_many([Item(number) for number in range(4)])
    seen = elsewhere(queue.peek)
    own = queue.stats()
    assert (seen.accepted, seen.handled, seen.used, seen.age) == (14, 10, 4, 0.0)
    assert seen.adds_up
    assert seen.partitions == own.partitions
    assert seen.handlers == own.handlers
    report = await queue.shutdown()
    assert elsewhere(queue.peek).handled == report.handled == 14


@pytest.mark.real_time
async def test_a_thread_reads_while_a_handler_blocks_the_loop():
    entered, leave = threading.Event(), threading.Event()
    seen = []

    async def block(batch):
        entered.set()
        leave.wait(30)

    def read():
        assert entered.wait(30)
        seen.append(queue.peek())
        time.sleep(0.05)
        seen.append(queue.peek())
        leave.set()

    queue = make(consumer=block)
    reader = threading.Thread(target=read)
    reader.start()
    assert await queue.produce(Item(1))
    await queue.flush()
    reader.join(30)
    assert all((stats.accepted, stats.in_flight, stats.handled) == (1, 1, 0) for stats in seen)
    assert seen[1].loop_lag >= 0.05  # the loop did not answer meanwhile: the sleep is the least that it was late
    await queue.shutdown()


async def test_numbers_that_do_not_add_up_are_replaced_by_older_ones_with_their_age(monkeypatch):
    queue = make(consumer=RecordingHandler[Item]())
    await queue.produce(Item(1))
    good = queue.peek()
    monkeypatch.setattr(observer.QueueStats, "adds_up", property(lambda stats: False))
    stale = queue.peek()
    assert stale.age > 0
    assert (stale.accepted, stale.used) == (good.accepted, good.used)
    monkeypatch.undo()
    assert queue.peek().age == 0
    await queue.shutdown()


async def test_a_first_reader_who_comes_amid_every_step_gets_the_empty_queue_and_its_age(monkeypatch):
    queue = make(consumer=RecordingHandler[Item]())
    await queue.produce(Item(1))
    monkeypatch.setattr(observer.QueueStats, "adds_up", property(lambda stats: False))
    stale = queue.peek()
    monkeypatch.undo()
    assert (stale.accepted, stale.used) == (0, 0)
    assert stale.age > 0
    assert stale.adds_up
    await queue.shutdown()


async def test_a_table_that_grows_while_it_is_read_is_read_again(monkeypatch):
    queue = make(consumer=RecordingHandler[Item]())
    turns = iter([RuntimeError("dictionary changed size during iteration")])
    real = observer.QueueObserver.read

    def read(self, lag=0.0, *, totals=False):
        error = next(turns, None)
        if error is not None:
            raise error
        return real(self, lag, totals=totals)

    monkeypatch.setattr(observer.QueueObserver, "read", read)
    assert queue.peek().adds_up
    await queue.shutdown()


@pytest.mark.parametrize("totals", [False, True])
async def test_c_23_items_that_are_taken_amid_a_look_are_not_counted_twice(monkeypatch, totals):
    """A reader of another thread may be stopped between any two numbers, here after the first size that it reads."""
    queue = make(consumer=RecordingHandler[Item](), partitions=bq.PartitionPolicy.fixed(1))
    await queue.produce_many([Item(number) for number in range(10)])
    (partition,), (drain, *_) = queue._router.partitions, queue._drains
    real = Partition.qsize

    def qsize(self):
        size = real(self)
        if drain.round is None:
            monkeypatch.undo()
            drain._take(drain._begin_round(), 0.0)
        return size

    monkeypatch.setattr(Partition, "qsize", qsize)
    assert drain.ready  # else nobody asks for its size
    stats = queue.peek(totals=totals)
    assert (stats.accepted, stats.used, stats.in_flight) == (10, 0, 10)
    drain.round.close()
    drain.round, partition.in_flight = None, 0
    queue.abandon()


async def test_a_partition_on_its_way_from_one_worker_to_another_is_not_overlooked():
    """Between the two nobody has anything to do, and what waits has no outcome."""
    queue = make(consumer=RecordingHandler[Item](), workers=bq.WorkerPolicy.fixed(2), selector=bq.round_robin())
    await queue.produce_many([Item(number) for number in range(10)])
    before = queue.peek(totals=True)
    held = [(drain, list(drain.ready)) for drain in queue._drains]
    for drain, ready in held:
        drain.ready.clear()
        assert ready
    assert queue.peek(totals=True) == before
    for drain, ready in held:
        drain.ready.extend(ready)
    await queue.flush()
    done = queue.peek(totals=True)
    assert (done.accepted, done.handled, done.used) == (10, 10, 0)
    assert queue.peek(totals=True) is done  # nothing has changed
    await queue.shutdown()


@pytest.mark.real_time
async def test_every_snapshot_that_a_thread_gets_under_load_adds_up():
    queue = make(partitions=bq.PartitionPolicy.adaptive(), workers=bq.WorkerPolicy.fixed(2), buffer_size=50)
    kinds = [type(f"Kind{number}", (Item,), {}) for number in range(20)]
    for kind in kinds:
        queue.add_handler(kind, RecordingHandler())
    over = threading.Event()
    bad, looks = [], [0]

    def read():
        while not over.is_set():
            stats = queue.peek()
            looks[0] += 1
            if not stats.adds_up:
                bad.append(stats)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # so that the reader comes amid the loop's steps
    reader = threading.Thread(target=read)
    reader.start()
    try:
        for turn in range(60):
            for number in range(100):
                await queue.produce(kinds[(turn + number) % 20](number))
            await asyncio.sleep(0)
        await queue.flush()
    finally:
        over.set()
        reader.join(30)
        sys.setswitchinterval(interval)
    assert looks[0]
    assert not bad
    assert elsewhere(queue.peek).handled == 6_000
    await queue.shutdown()


async def test_handlers_are_timed_and_their_failures_counted():
    async def slow(batch):
        await asyncio.sleep(2)

    async def fail(batch):
        await asyncio.sleep(1)
        raise ValueError(f"cannot write '{batch[0]}'")

    class Other(Item):
        pass

    queue = make()
    queue.add_handler(Item, slow)
    queue.add_handler(Other, fail)
    await queue.produce_many([Item(1), Item(2)])
    await queue.flush()
    await queue.produce(Other(3))
    await queue.flush()
    stats = {each.name: each for each in queue.peek().handlers}
    assert stats["Item"] == bq.HandlerStats("Item", calls=1, items=2, failed=0, seconds=pytest.approx(2.0))
    assert stats[Other.__qualname__].failed == 1
    assert stats[Other.__qualname__].seconds == pytest.approx(1.0)
    last = queue.peek().last_error
    assert (last.error, last.text, last.count) == ("ValueError", "cannot write ***", 1)
    await queue.shutdown()


async def test_rounds_of_many_calls_are_timed_by_sample():
    kinds = [type(f"Kind{number}", (Item,), {}) for number in range(100)]
    handler = RecordingHandler()
    queue = make()
    for kind in kinds:
        queue.add_handler(kind, handler)
    for _ in range(64):
        queue.produce_many_nowait([kind(1) for kind in kinds])
        await queue.flush()
    calls = [each.calls for each in queue.peek().handlers]
    assert sum(calls) == pytest.approx(6_400, rel=0.2)
    assert queue.peek().handled == 6_400
    await queue.shutdown()


@pytest.mark.parametrize(("mode", "text"), [("redacted", "row *** is bad"), ("full", "row 17 is bad")])
async def test_log_errors_says_what_of_an_error_is_logged(caplog, mode, text):
    async def fail(batch):
        raise ValueError("row 17 is bad")

    caplog.set_level(logging.WARNING, "batchqueue_async")
    queue = make(consumer=fail, log_errors=mode)
    await queue.produce(Item(1))
    await queue.flush()
    await queue.shutdown()
    assert f"text={text!r}" in caplog.text


async def test_the_lag_of_a_loop_that_has_ended_is_none():
    probe = observer.LoopProbe(asyncio.new_event_loop())
    probe._loop.close()
    assert probe.lag() == 0.0


async def test_the_queues_of_a_loop_ask_it_once(monkeypatch):
    loop, asked = asyncio.get_running_loop(), []
    queues = [make() for _ in range(5)]
    await settle()
    monkeypatch.setattr(loop, "call_soon_threadsafe", asked.append)
    for queue in queues:
        queue.peek()
    assert len(asked) == 1
    asked.pop()()
    for queue in queues:
        queue.peek()
    assert len(asked) == 1
    asked.pop()()
    monkeypatch.undo()
    for queue in queues:
        await queue.shutdown()


def test_a_probe_belongs_to_one_loop_and_goes_with_its_queues():
    one, other = asyncio.new_event_loop(), asyncio.new_event_loop()
    first = observer.LoopProbe.of(one)
    assert observer.LoopProbe.of(one) is first
    assert observer.LoopProbe.of(other) is not first
    del first
    gc.collect()
    assert not {id(one), id(other)} & set(observer._probes)
    one.close()
    other.close()


async def test_the_age_of_the_oldest_item_grows_until_it_is_taken():
    handler = RecordingHandler[Item]()
    handler.hold()
    queue = make(consumer=handler, max_batch=1)
    await queue.produce_many([Item(1), Item(2)])
    await settle()
    await advance(5)
    assert queue.peek().oldest_age == pytest.approx(5.0, abs=0.1)
    handler.release()
    await queue.flush()
    assert queue.peek().oldest_age == 0.0
    await queue.shutdown()
