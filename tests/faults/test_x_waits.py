"""Faults of list X about waits of our own: a put that ends late, a pace, a stage, a callback, a bug meanwhile."""

from __future__ import annotations

import asyncio
import errno
import os

import pytest
from export_kit import Destination, check, down, exporter, inline

import batchqueue_async as bq
from batchqueue_async.export.delivery.waiters import DeliveryWaiter, DeliveryWaiters
from batchqueue_async.export.send_queue.attempt_log import AttemptLog
from batchqueue_async.export.send_queue.protocol import Placed
from batchqueue_async.sinks._shared.payloads import UnderWay
from batchqueue_async.sinks.amqp import AmqpSink
from batchqueue_async.sinks.nats import NatsSink
from batchqueue_async.testing import advance, settle


@pytest.fixture(params=["memory", "disk"])
def place(request, tmp_path):
    return None if request.param == "memory" else tmp_path / "queue"


def slow_disk(seconds: float):
    """What opens a durable queue whose puts are confirmed so much later."""

    async def open_queue(path, config):
        queue = await inline(path, config)
        put_many = queue.put_many

        async def put_later(payloads):
            numbers = await put_many(payloads)
            await asyncio.sleep(seconds)
            return numbers

        queue.put_many = put_later
        return queue

    return open_queue


def plain(**options) -> bq.ExportConfig:
    return bq.ExportConfig(batch=options.pop("batch", bq.BatchPolicy(linger=0)), **options)


# --- who waits for a delivery is answered, and costs what changes


@pytest.mark.parametrize("timeout", [0.0, 1.0, 30.0])
async def test_x_31_deliver_ends_with_a_shutdown_that_its_put_outlasts(timeout, tmp_path):
    sink = Destination(answer=lambda _: down())
    export = bq.Exporter(sink, plain(path=tmp_path / "queue"), open_queue=slow_disk(2.0))
    async with export:
        delivering = asyncio.ensure_future(export.deliver(["a", "b"]))
        await advance(0.1)
        report = await export.shutdown(timeout)
    await advance(5.0)
    assert delivering.done()
    with pytest.raises(bq.QueueClosedError, match="shut down before"):
        await delivering
    assert report.on_disk == 2


async def test_x_31_what_was_delivered_before_the_put_was_confirmed_is_delivered(tmp_path):
    sink = Destination()
    export = bq.Exporter(sink, plain(path=tmp_path / "queue"), open_queue=slow_disk(2.0))
    async with export:
        delivering = asyncio.ensure_future(export.deliver(["a", "b"]))
        await advance(1.0)
        assert sink.records == ["a", "b"]
        await export.shutdown(0.5)
    await delivering


async def test_x_31_calls_that_overlap_without_an_end_leave_nothing_behind(tmp_path):
    export = bq.Exporter(Destination(), plain(path=tmp_path / "queue"), open_queue=slow_disk(1.0))
    async with export:

        async def deliver_all_the_time(offset):
            await asyncio.sleep(offset)
            for _ in range(20):
                await export.deliver(["a"] * 200)

        callers = [asyncio.ensure_future(deliver_all_the_time(offset)) for offset in (0.0, 0.3, 0.6)]
        most = 0
        while not all(caller.done() for caller in callers):
            await advance(0.25)
            most = max(most, len(export._engine.waiters._early))
        await asyncio.gather(*callers)
    assert most <= 2_500  # of 12,000


def test_x_31_finding_what_was_dropped_costs_what_was_dropped():
    loop = asyncio.new_event_loop()
    try:
        waiters = DeliveryWaiters(on_disk=True)
        each = 10
        calls = [DeliveryWaiter(loop.create_future()) for _ in range(10_000)]
        for call, waiter in enumerate(calls):
            mark = waiters.begin(call * each)
            waiters.began(mark, waiter, [Placed(range(each), range(call * each, (call + 1) * each))])
        looked_at = []
        settle = waiters._settle
        waiters._settle = lambda number, why: (looked_at.append(number), settle(number, why))
        waiters.dropped_below(0)
        assert looked_at == []
        with waiters.settling(range(20, 25)):
            waiters.dropped_below(35)
        assert looked_at == [*range(20), *range(25, 35)]
        waiters.dropped_below(35)
        assert looked_at[30:] == [*range(20, 25)]
        assert [waiter.future.done() for waiter in calls[:5]] == [True, True, True, False, False]
        assert calls[0].failed == {"dropped": [*range(10)]}
    finally:
        loop.close()


@pytest.mark.parametrize("way", ["memory", "disk"])
async def test_x_31_calls_that_are_cancelled_amid_refusals_and_a_pace_cost_no_record(way, tmp_path):
    refused = iter([down(), bq.AuthError("401"), bq.ThrottledError("429"), *[None] * 5] * 50)
    sink = Destination(answer=lambda _: next(refused, None), latency=0.01)
    path = None if way == "memory" else tmp_path / "queue"
    async with exporter(sink, path, rate=bq.RatePolicy(requests=50.0), batch_records=7, auth_pause=0.5) as export:
        calls = [asyncio.ensure_future(export.deliver([f"{call}-{at}" for at in range(5)])) for call in range(40)]
        await advance(0.3)
        for call in calls[::3]:
            call.cancel()
        await advance(4_000.0)
        assert check(export).delivered == 200
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(answer) for answer in answers} <= {type(None), asyncio.CancelledError}
    assert sorted(set(sink.records)) == sorted(f"{call}-{at}" for call in range(40) for at in range(5))


# --- a batch that waits on our side keeps its lease


@pytest.mark.parametrize("workers", [1, 4])
async def test_x_32_a_pace_that_is_slower_than_a_lease_sends_each_record_once(workers, place):
    sink = Destination()
    config = plain(
        path=place,
        batch=bq.BatchPolicy(linger=0, max_records=2),
        rate=bq.RatePolicy(bytes=1.0),
        workers=bq.WorkerPolicy.fixed(workers),
    )
    async with bq.Exporter(sink, config, open_queue=inline) as export:
        await export.consume(["x" * 1_000] * 6)
        await advance(20_000.0)
        assert len(sink.records) == 6
        assert check(export).delivered == 6


async def test_x_32_a_linger_that_is_longer_than_a_lease_sends_each_record_once(place):
    sink = Destination()
    config = plain(path=place, batch=bq.BatchPolicy(linger=3_000.0, max_records=20))
    async with bq.Exporter(sink, config, open_queue=inline) as export:
        await export.consume(["a"] * 6)
        await advance(4_000.0)
        assert len(sink.records) == 6
        assert check(export).delivered == 6


async def test_x_32_a_wait_for_a_free_sender_sends_each_record_once(place):
    sink = Destination(latency=25.0)
    config = plain(
        path=place,
        batch=bq.BatchPolicy(linger=0, max_records=1),
        split=bq.SplitPolicy(preparers=1, senders=1, sends_per_sender=1, channel=256),
        max_sends=1,
        rate=bq.RatePolicy(requests=0.01),
    )
    async with bq.Exporter(sink, config, open_queue=inline) as export:
        await export.consume([str(number) for number in range(200)])
        await advance(30_000.0)
        assert len(sink.records) == 200
        assert check(export).delivered == 200


async def test_x_32_a_shutdown_ends_a_wait_for_the_pace(place):
    config = plain(path=place, rate=bq.RatePolicy(bytes=1.0))
    async with bq.Exporter(Destination(), config, open_queue=inline) as export:
        await export.consume(["x" * 1_000])
        await export.consume(["x" * 1_000])
        await advance(1.0)
        start = asyncio.get_running_loop().time()
        report = await export.shutdown(5.0)
        assert asyncio.get_running_loop().time() - start <= 5.0
    assert report.on_disk + len(report.undelivered) + report.delivered == 2


# --- the failover queue hands back what was handed over, and outlives a bug


async def test_x_33_what_the_failover_queue_has_left_is_reported_as_it_was_handed_over():
    config = plain(
        split=bq.SplitPolicy(prepare=lambda records: [f"<{record}>" for record in records]),
        retry=bq.RetryPolicy(initial=0.1, max_attempts=1),
        failover=bq.FailoverPolicy(interval=1.0),
        breaker=bq.BreakerPolicy(enabled=False),
    )
    sink = Destination(answer=lambda batch: bq.TooLargeError("413") if len(batch) > 1 else down())
    async with bq.Exporter(sink, config) as export:
        await export.consume(["a", "b", "c"])
        await advance(5.0)
        assert export.stats().failover_records == 3
        report = await export.shutdown(1.0)
    assert sink.calls[-1] in (["<a>"], ["<b>"], ["<c>"])
    assert sorted(report.undelivered) == ["a", "b", "c"]


async def test_x_33_a_dead_letter_of_the_failover_queue_is_the_record_that_was_handed_over():
    config = plain(
        split=bq.SplitPolicy(prepare=lambda records: [f"<{record}>" for record in records]),
        retry=bq.RetryPolicy(initial=0.1, max_attempts=1),
        failover=bq.FailoverPolicy(interval=1.0),
    )
    answers = [down()]
    sink = Destination(answer=lambda _: answers.pop() if answers else bq.PermanentError("400"))
    async with bq.Exporter(sink, config) as export:
        await export.consume(["a"])
        await advance(5.0)
        report = await export.shutdown(1.0)
    assert [list(letter.records) for letter in report.given_up] == [["a"]]


class _Odd(dict):
    """A mapping, as a sink's author may have written one."""

    def items(self):
        raise RuntimeError("odd")

    def __bool__(self):
        return True


async def test_x_33_a_bug_does_not_end_the_looks_into_the_failover_queue(logs):
    answers = [down(), bq.SendResult(rejected=_Odd())]
    taken = []

    class Sink(Destination):
        async def send(self, batch):
            answer = answers.pop(0) if answers else None
            if isinstance(answer, BaseException):
                raise answer
            if answer is None:
                taken.extend(batch)
            return answer

    config = plain(retry=bq.RetryPolicy(initial=0.1, max_attempts=1), failover=bq.FailoverPolicy())
    async with bq.Exporter(Sink(), config) as export:
        await export.consume(["a", "b"])
        await advance(60.0)
        assert taken == ["a", "b"]
        check(export)
    assert "export_delivery_failed" in [event["event"] for event in logs]


# --- a callback, or another exporter, that hangs takes no worker for ever


async def test_x_34_a_callback_that_hangs_does_not_hold_up_the_good_records(place, logs):
    async def hang(records, reason):
        await asyncio.Event().wait()

    sink = Destination(answer=lambda batch: bq.PermanentError("400") if "bad" in batch else None)
    config = plain(
        path=place,
        batch=bq.BatchPolicy(linger=0, max_records=1),
        workers=bq.WorkerPolicy.fixed(2),
        on_dead_letter=hang,
    )
    async with bq.Exporter(sink, config, open_queue=inline) as export:
        await export.consume(["bad"] * 10 + ["good"] * 10)
        await advance(10 * config.send_timeout)
        assert sink.records == ["good"] * 10
        assert check(export).dead_lettered == 10
    assert [event["error"] for event in logs if event["event"] == "on_dead_letter_failed"] == ["TimeoutError"] * 10


async def test_x_34_nor_does_an_exporter_of_dead_letters_without_room(place):
    away = Destination(answer=lambda _: down())
    letters = bq.Exporter(away, plain(max_records=1, overflow="block", block_timeout=None), name="letters")
    sink = Destination(answer=lambda batch: bq.PermanentError("400") if "bad" in batch else None)
    config = plain(path=place, batch=bq.BatchPolicy(linger=0, max_records=1), workers=bq.WorkerPolicy.fixed(1))
    async with letters, bq.Exporter(sink, config, dead_letters=letters, open_queue=inline) as export:
        await export.consume(["bad", "bad", "bad", "good"])
        await advance(600.0)
        assert sink.records == ["good"]
        check(export)
        away.answer = None  # and when there is room again they get there
        letters.resume()
        await advance(3_600.0)
        assert check(export).dead_lettered == 3
        await letters.flush()
    assert [letter["record"] for letter in away.records] == ["bad"] * 3


# --- the log of what is being sent comes back when the disk has room again


def test_x_35_after_a_full_disk_what_is_being_sent_is_written_again(tmp_path, monkeypatch):
    full = True
    write = os.write

    def writing(descriptor, data):
        if full:
            raise OSError(errno.ENOSPC, "no space left")
        return write(descriptor, data)

    log = AttemptLog(tmp_path)
    monkeypatch.setattr(os, "write", writing)
    log.started([1, 2])
    full = False
    for number in range(200):
        log.ended(log.started([number + 10]))
    log.started([7])
    assert [list(each.numbers) for each in AttemptLog(tmp_path).interrupted] == [[1, 2], [7]]


# --- a batch of messages is late when its line answers nothing, not when it waits behind others


def slow_line(kind, **address):
    """A sink of this kind whose line confirms messages in their order, each after two seconds, and those."""
    line, confirmed = asyncio.Lock(), []

    class Slow(kind):
        async def _connect(self):
            return line

        @staticmethod
        async def _disconnect(line):
            pass

        def _is_broken(self, line):
            return False

        async def _publish(self, line, record, body, key, traced):
            async with line:
                await asyncio.sleep(2)
            confirmed.append(body)
            return False

    return Slow(timeout=3, **address), confirmed


@pytest.mark.parametrize(
    ("kind", "address"),
    [
        (AmqpSink, {"url": "amqp://localhost/", "queue": "rows"}),
        (NatsSink, {"url": "nats://localhost:4222", "subject": "rows"}),
    ],
)
async def test_x_46_a_batch_is_not_late_while_those_before_it_are_answered(kind, address):
    sink, confirmed = slow_line(kind, **address)
    batches = [[b"%d" % number for number in range(first, first + 3)] for first in (0, 3, 6)]
    await sink.open()
    answers = await asyncio.gather(*(sink.send(batch) for batch in batches))
    assert answers == [None] * 3  # all is taken
    assert confirmed == [body for batch in batches for body in batch]
    assert asyncio.get_running_loop().time() == 18
    await sink.close()


async def test_x_46_what_is_never_answered_is_late_though_later_batches_are():
    under_way = UnderWay()

    async def later():
        for _ in range(20):
            await under_way.all_of([asyncio.sleep(1)], timeout=3)

    task = asyncio.create_task(under_way.all_of([asyncio.sleep(1_000)], timeout=3))
    await settle()
    behind = asyncio.create_task(later())
    (answer,) = await task
    assert isinstance(answer, TimeoutError)
    assert asyncio.get_running_loop().time() == 3
    await behind
    assert not under_way._batches
