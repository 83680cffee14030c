"""The exporter through its public API, in virtual time: batching, retrying, settling, and its end."""

from __future__ import annotations

import asyncio
import re

import pytest
from export_kit import Destination, Keyed, check, down, exporter, script

import batchqueue_async as bq
from batchqueue_async.sinks.base import SendResult
from batchqueue_async.testing import advance, settle


@pytest.fixture(params=["memory", "disk"])
def place(request, tmp_path):
    """The path of the send queue: none, or a directory."""
    return None if request.param == "memory" else tmp_path / "queue"


def now() -> float:
    return asyncio.get_running_loop().time()


# --- batching


async def test_what_is_consumed_is_delivered(place):
    sink = Destination()
    async with exporter(sink, place) as export:
        await export.consume([b"a", "b", {"c": 1}, 4, None])
        await export.flush()
        stats = check(export)
    assert sink.records == [b"a", "b", {"c": 1}, 4, None]
    assert (stats.accepted, stats.delivered, stats.records, stats.accepted_batches) == (5, 5, 0, 1)
    assert (sink.opens, sink.closes) == (1, 1)
    assert export.report.complete
    assert export.report.delivered == 5


async def test_small_batches_become_one_and_a_large_one_several(place):
    sink = Destination(latency=0.01, concurrent=False)
    async with exporter(sink, place, linger=0.2, batch_records=4) as export:
        for number in range(3):
            await export.consume([number])
        assert sink.calls == []
        await advance(0.199)
        assert sink.calls == []
        await advance(0.02)
        assert sink.calls == [[0, 1, 2]]
        await export.consume(list(range(10)))
        await advance(0.05)
        assert [len(call) for call in sink.calls[1:]] == [4, 4]  # full ones leave at once
        await advance(0.2)
        assert sink.calls[3] == [8, 9]


async def test_a_batch_that_fills_up_leaves_before_its_linger_is_over(place):
    sink = Destination()
    async with exporter(sink, place, linger=10.0, batch_records=4) as export:
        await export.consume([1, 2])
        await advance(1.0)
        await export.consume([3, 4, 5])
        await advance(0.01)
        assert sink.calls == [[1, 2, 3, 4]]


async def test_batches_are_bounded_in_bytes(place):
    sink = Destination()
    policy = bq.BatchPolicy(max_records=100, max_bytes=50, linger=0.1)
    async with exporter(sink, place, batch=policy) as export:
        await export.consume([b"x" * 20] * 5)
        await export.consume([b"y" * 200])
        await export.consume([b"z"])
        await advance(0.5)
        sizes = [sum(map(len, call)) for call in sink.calls]
        assert all(size <= 50 or len(call) == 1 for size, call in zip(sizes, sink.calls, strict=True))
        assert sum(sizes) == 301


async def test_flush_does_not_wait_for_the_linger(place):
    sink = Destination()
    async with exporter(sink, place, linger=100.0) as export:
        await export.consume([1])
        await settle()
        await export.flush(timeout=1.0)
        assert sink.calls == [[1]]
        assert now() < 1.0


async def test_flush_waits_for_what_was_there_before_and_not_for_what_comes_after(place):
    sink = Destination(answer=script(down()))
    async with exporter(sink, place, retry=bq.RetryPolicy(initial=10.0, jitter=False)) as export:
        await export.consume(["late"])
        await settle()
        flushing = asyncio.create_task(export.flush())
        await settle()
        await export.consume(["next"])
        await settle()
        assert sink.records == ["next"]
        assert not flushing.done()
        await advance(10.0)
        assert flushing.done()
        assert sink.records == ["next", "late"]
        sink.answer = lambda _: down()
        await export.consume(["never"])
        with pytest.raises(TimeoutError, match="flush"):
            await export.flush(timeout=3.0)
        await export.shutdown(0)


async def test_a_sink_that_does_not_say_otherwise_gets_one_send_at_a_time(place):
    sink = Destination(latency=0.1, concurrent=False)
    async with exporter(sink, place, workers=bq.WorkerPolicy.fixed(8), batch_records=1) as export:
        await export.consume(list(range(5)))
        await export.flush()
    assert sink.most_active == 1
    assert sink.records == list(range(5))


@pytest.mark.parametrize(("options", "most"), [({}, 3), ({"max_sends": 2}, 2), ({"sends_per_worker": 2}, 6)])
async def test_sends_under_way_are_bounded(options, most, place):
    sink = Destination(latency=0.1)
    async with exporter(sink, place, workers=bq.WorkerPolicy.fixed(3), batch_records=1, **options) as export:
        await export.consume(list(range(40)))
        await advance(0.05)
        assert check(export).workers_active == most
        await export.flush()
    assert sink.most_active == most
    assert sorted(sink.records) == list(range(40))


async def test_every_record_has_a_key_that_stays_the_same(place):
    sink = Keyed(answer=script(down()))
    async with exporter(sink, place, retry=bq.RetryPolicy(initial=1.0)) as export:
        await export.consume(["a", "b"])
        await export.flush()
    assert len(sink.keys) == 2
    assert sink.keys[0] == sink.keys[1]
    queue_id, number = sink.keys[0][0].split("/")
    assert len(queue_id) == 32
    assert sink.keys[0][1] == f"{queue_id}/{int(number) + 1}"


# --- retrying


async def test_a_failed_batch_is_sent_again_after_a_growing_delay(place):
    sink = Destination(answer=script(*[down()] * 4))
    retry = bq.RetryPolicy(initial=5.0, multiplier=2.0, max_delay=15.0, jitter=False)
    async with exporter(sink, place, retry=retry) as export:
        await export.consume(["a"])
        await export.flush()
        stats = check(export)
    assert sink.times == pytest.approx([0.0, 5.0, 15.0, 30.0, 45.0])
    assert (stats.retries, stats.retry_successes, dict(stats.retry_failures)) == (4, 1, {"retryable": 3})
    assert stats.failures == {"retryable": 4}
    assert stats.backoff == 15.0


async def test_retries_do_not_hold_up_the_queue_in_front():
    sink = Destination(answer=lambda _: down())
    export = exporter(sink)
    async with export, bq.BatchQueueManager() as manager:
        queue = manager.create("q", bq.QueueConfig(consumer=export))
        await queue.deliver(list(range(100)))
        assert now() < 1.0
        assert check(export).records == 100
        await export.shutdown(0)
    assert sorted(export.report.undelivered) == list(range(100))


async def test_a_send_that_hangs_times_out_and_is_sent_again(place):
    sink = Destination(latency=1e6)
    async with exporter(sink, place, send_timeout=7.0, retry=bq.RetryPolicy(initial=1.0, jitter=False)) as export:
        await export.consume(["a"])
        await advance(7.5)
        assert sink.cancelled == 1
        sink.latency = 0.0
        await advance(1.0)
        assert sink.records == ["a"]
        assert check(export).failures == {"timeout": 1}


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ConnectionResetError(), "network"),
        (OSError(5, "i/o"), "network"),
        (TimeoutError(), "timeout"),
        (asyncio.IncompleteReadError(b"", 1), "network"),
        (asyncio.CancelledError(), "cancelled"),
    ],
)
async def test_errors_of_a_network_that_a_sink_lets_through_are_tried_again(error, kind, place):
    sink = Destination(answer=script(error))
    async with exporter(sink, place) as export:
        await export.consume(["a"])
        await export.flush()
        assert check(export).failures == {kind: 1}
    assert sink.records == ["a"]


async def test_what_the_sink_refuses_for_good_is_given_up_with_its_reason(place, logs):
    told = []
    sink = Destination(answer=lambda batch: bq.PermanentError("400 bad") if "bad" in batch else None)
    async with exporter(sink, place, on_dead_letter=lambda *letter: told.append(letter)) as export:
        await export.consume(["a", "bad", "c", "d"])
        await export.flush()
        stats = check(export)
        assert (stats.delivered, stats.dead_lettered, stats.isolations) == (3, 1, 2)
        if place is not None:
            letters = await export._engine.disk.queue.dead_letters()
            assert [letter.reason for letter in letters] == ["PermanentError: 400 bad"]
    assert sorted(sink.records) == ["a", "c", "d"]
    assert told == [(["bad"], "PermanentError: 400 bad")]
    assert len(export.report.given_up) == (1 if place is None else 0)
    # The reason is the sink's own words; no event quotes a record.
    assert [event["reason"] for event in logs if event["event"] == "records_given_up"] == ["PermanentError: 400 bad"]


async def test_a_batch_of_which_all_is_refused_costs_few_sends(place):
    """All of it ends in the dead letters, with a bound on the sends in a row."""
    sink = Destination(answer=lambda _: bq.PermanentError("400"))
    async with exporter(sink, place, retry=bq.RetryPolicy(isolation_sends=40)) as export:
        await export.consume(list(range(500)))
        await settle()
        assert 40 <= len(sink.calls) <= 80
        assert check(export).dead_lettered + check(export).records == 500
        await export.flush()
        assert check(export).dead_lettered == 500
    assert len(sink.calls) < 3 * 500


async def test_without_isolation_the_whole_batch_is_given_up(place):
    sink = Destination(answer=lambda batch: bq.PermanentError("no") if 3 in batch else None)
    async with exporter(sink, place, retry=bq.RetryPolicy(isolate=False)) as export:
        await export.consume(list(range(10)))
        await export.flush()
        assert check(export).dead_lettered == 10
    assert len(sink.calls) == 1


async def test_partial_success_settles_each_record_by_its_own_reason(place):
    first = SendResult(rejected={1: bq.PermanentError("schema"), 2: down(), 3: bq.TooLargeError("1 MB")}, skipped=1)
    sink = Destination(answer=script(first))
    async with exporter(sink, place, retry=bq.RetryPolicy(initial=5.0, jitter=False)) as export:
        await export.consume(["a", "b", "c", "d", "e"])
        await settle()
        stats = check(export)
        assert (stats.delivered, stats.dead_lettered, stats.records, stats.skipped) == (2, 2, 1, 1)
        await export.flush()
        stats = check(export)
    assert sink.calls == [["a", "b", "c", "d", "e"], ["c"]]
    assert (stats.delivered, stats.dead_lettered, stats.records) == (3, 2, 0)


async def test_max_age_counts_from_consume(place):
    sink = Destination(answer=lambda _: down())
    retry = bq.RetryPolicy(initial=10.0, max_delay=10.0, jitter=False, max_age=25.0)
    async with exporter(sink, place, retry=retry, breaker=bq.BreakerPolicy(enabled=False)) as export:
        await export.consume(["a"])
        await export.flush()
        assert now() == pytest.approx(30.0)
        assert check(export).dead_lettered == 1
    assert len(sink.calls) == 4


# --- full


async def test_drop_oldest_makes_room_and_counts():
    sink = Destination(answer=lambda _: down())
    async with exporter(sink, max_records=10, breaker=bq.BreakerPolicy(threshold=1)) as export:
        for start in range(0, 30, 3):
            await export.consume([start, start + 1, start + 2])
            await settle()
        stats = check(export)
        assert stats.dropped == {"oldest": 20}
        await export.shutdown(0)
    assert export.report.undelivered == list(range(20, 30))
    assert export.report.dropped == {"oldest": 20}


async def test_drop_newest_counts_what_it_does_not_take():
    sink = Destination(answer=lambda _: down())
    async with exporter(sink, max_records=4, overflow="drop_newest") as export:
        await export.consume([1, 2, 3])
        await export.consume([4, 5])
        await export.consume([6])
        stats = check(export)
        assert (stats.accepted, dict(stats.dropped), stats.records) == (4, {"newest": 2}, 4)
        await export.shutdown(0)


async def test_reject_raises_and_puts_nothing(place):
    sink = Destination(answer=lambda _: down())
    async with exporter(sink, place, max_records=4, overflow="reject") as export:
        await export.consume([1, 2, 3])
        with pytest.raises(bq.QueueFullError, match="no room for 2 records"):
            await export.consume([4, 5])
        stats = check(export)
        assert (stats.accepted, stats.refused, stats.records) == (3, 2, 3)
        with pytest.raises(bq.BatchQueueError):
            await export.consume([0] * 5)
        await export.shutdown(0)


async def test_block_waits_for_room_first_come_first_served(place):
    sink = Destination(latency=1.0, concurrent=False)
    async with exporter(sink, place, max_records=2, overflow="block", batch_records=1) as export:
        await export.consume([1, 2])
        waiting = [asyncio.create_task(export.consume([number])) for number in (3, 4)]
        await advance(0.5)
        assert not any(task.done() for task in waiting)
        await advance(0.6)
        assert [task.done() for task in waiting] == [True, False]
        await asyncio.gather(*waiting)
        await export.flush()
    assert sink.records == [1, 2, 3, 4]


async def test_block_gives_up_after_its_timeout(place):
    sink = Destination(answer=lambda _: down())
    async with exporter(sink, place, max_records=2, overflow="block", block_timeout=30.0) as export:
        await export.consume([1, 2])
        with pytest.raises(bq.QueueFullError, match="block_timeout"):
            await export.consume([3])
        assert now() == pytest.approx(30.0)
        await export.shutdown(0)


async def test_a_bound_in_bytes(place):
    sink = Destination(answer=lambda _: down())
    limit = 100_000
    async with exporter(sink, place, max_bytes=limit, breaker=bq.BreakerPolicy(threshold=1)) as export:
        for number in range(300):
            await export.consume([bytes([number % 250]) * 1_000])
        stats = check(export)
        assert stats.bytes <= limit
        assert stats.dropped["oldest"] > 150
        await export.shutdown(0)


# --- the disk


async def test_what_was_confirmed_is_delivered_after_a_restart(tmp_path):
    sink = Destination(answer=lambda _: down())
    async with exporter(sink, tmp_path, drain_timeout=0) as export:
        await export.consume(["a", "b"])
        await settle()
    assert export.report.on_disk == 2
    assert export.report.undelivered == []
    sink = Keyed()
    async with exporter(sink, tmp_path) as export:
        await export.flush()
        assert check(export).recovered == 2
    assert sink.records == ["a", "b"]


async def test_attempts_are_counted_over_restarts(tmp_path):
    retry = bq.RetryPolicy(initial=1.0, jitter=False, max_attempts=3)
    for _ in range(2):
        sink = Destination(answer=lambda _: down())
        async with exporter(sink, tmp_path, retry=retry, drain_timeout=0) as export:
            if not export.stats().recovered:
                await export.consume(["a"])
            await settle()
        assert len(sink.calls) == 1
    sink = Destination(answer=lambda _: down("still"))
    async with exporter(sink, tmp_path, retry=retry) as export:
        await export.flush()
        assert check(export).dead_lettered == 1
        (letter,) = await export._engine.disk.queue.dead_letters()
    assert letter.reason == "3 attempts, and max_attempts=3; the last was RetryableError: still"
    assert letter.attempts == 3


async def test_records_that_have_no_form_on_disk_are_named_and_the_others_kept(tmp_path):
    sink = Destination()
    bad = object()
    async with exporter(sink, tmp_path, durable=bq.ExportConfig().durable) as export:
        with pytest.raises(bq.DeliveryError, match="1 of 3") as caught:
            await export.consume(["a", bad, "b"])
        await export.flush()
    (failure,) = caught.value.failures
    assert failure.items == (bad,)
    assert isinstance(failure.error, bq.PermanentError)
    assert sink.records == ["a", "b"]


async def test_encode_and_decode_of_ones_own(tmp_path):
    sink = Destination()
    options = {"encode": lambda number: str(number).encode(), "decode": int}
    async with exporter(sink, tmp_path, **options) as export:
        await export.consume([1, 22])
        await export._engine.disk.queue.put(b"no number")
        await export.flush()
        stats = export.stats()
        assert stats.dead_lettered == 1
        (letter,) = await export._engine.disk.queue.dead_letters()
        assert letter.payload == b"no number"
    assert sink.records == [1, 22]


async def test_a_directory_belongs_to_one_exporter(tmp_path):
    async with exporter(Destination(), tmp_path):
        sink = Destination()
        with pytest.raises(bq.LockedError):
            async with exporter(sink, tmp_path):
                pass
        assert sink.opens == 0


# --- the sink's own life


async def test_a_destination_that_is_down_at_the_start_keeps_nobody_from_handing_over(place, logs):
    sink = Destination(opening=[down(), ConnectionRefusedError(), bq.AuthError("password")])
    async with exporter(sink, place, auth_pause=10.0) as export:
        await export.consume(["a"])
        assert sink.calls == []
        await export.flush()
    assert sink.opens == 4
    assert sink.records == ["a"]
    assert sum(event["event"] == "sink_not_open" for event in logs) == 3


async def test_a_sink_that_can_never_be_opened_ends_the_exporter_at_once(place):
    sink = Destination(opening=[bq.PermanentError("topic='' is empty")])
    with pytest.raises(bq.PermanentError, match="topic"):
        async with exporter(sink, place):
            pytest.fail("opened")
    assert sink.closes == 1
    async with exporter(Destination(), place):  # the directory is free again
        pass


async def test_an_open_that_hangs_is_given_up(place):
    class Hanging(Destination):
        async def open(self):
            await super().open()
            if self.opens == 1:
                await asyncio.sleep(1e9)

    sink = Hanging()
    async with exporter(sink, place, send_timeout=5.0) as export:
        assert now() == pytest.approx(5.0)
        await export.consume(["a"])
        await export.flush()
    assert sink.records == ["a"]


async def test_a_close_that_fails_or_hangs_does_not_keep_the_exporter_open(place, logs):
    class Bad(Destination):
        async def close(self):
            await super().close()
            if self.opens:
                await asyncio.sleep(1e9)

    sink = Bad()
    async with exporter(sink, place) as export:
        await export.consume(["a"])
    assert export.report.delivered == 1
    assert [event["event"] for event in logs if event["log_level"] == "error"] == ["sink_close_failed"]


# --- the end


async def test_shutdown_delivers_what_is_left(place):
    sink = Destination(latency=1.0)
    async with exporter(sink, place, batch_records=1, workers=bq.WorkerPolicy.fixed(2)) as export:
        await export.consume(list(range(6)))
    assert sorted(sink.records) == list(range(6))
    assert export.report.complete
    assert export.report.elapsed == pytest.approx(3.0)


async def test_shutdown_does_not_wait_where_nothing_can_happen(place):
    sink = Destination(answer=lambda _: down())
    async with exporter(sink, place, breaker=bq.BreakerPolicy(threshold=1, reset_timeout=100.0)) as export:
        await export.consume(["a"])
        await settle()
        assert export.breaker == "open"
    assert export.report.elapsed < 1.0
    assert (export.report.undelivered, export.report.on_disk) == ((["a"], 0) if place is None else ([], 1))


async def test_shutdown_twice_and_at_once_and_consume_after_it(place):
    sink = Destination(latency=1.0)
    async with exporter(sink, place) as export:
        await export.consume(["a"])
        await settle()
        first, second = asyncio.create_task(export.shutdown()), asyncio.create_task(export.shutdown())
        await settle()
        with pytest.raises(bq.QueueClosedError, match="closing"):
            await export.consume(["b"])
        first.cancel()
        report = await second
        assert await export.shutdown() is report
    assert sink.records == ["a"]
    with pytest.raises(bq.QueueClosedError, match="closed"):
        await export.consume(["b"])
    with pytest.raises(bq.QueueClosedError):
        async with export:
            pass


async def test_shutdown_ends_a_flush(place):
    sink = Destination(answer=lambda _: down())
    async with exporter(sink, place) as export:
        await export.consume(["a"])
        flushing = asyncio.create_task(export.flush())
        await settle()
        await export.shutdown(0)
        with pytest.raises(bq.QueueClosedError):
            await flushing


async def test_an_exporter_that_was_never_opened(place):
    export = exporter(Destination(), place)
    with pytest.raises(bq.QueueClosedError, match="new"):
        await export.consume(["a"])
    assert export.stats().records == 0
    assert (await export.shutdown()).complete
    assert repr(export) == "Exporter('test', closed)"


async def test_a_sink_that_ignores_its_cancellation_is_left_behind(place, logs):
    class Stubborn(Destination):
        async def send(self, batch):
            for _ in range(3):
                try:
                    await asyncio.sleep(50.0)
                except asyncio.CancelledError:
                    continue

    async with exporter(Stubborn(), place, drain_timeout=1.0) as export:
        await export.consume(["a"])
        await settle()
    assert export.report.elapsed < 2.0
    assert (export.report.undelivered, export.report.on_disk) == ((["a"], 0) if place is None else ([], 1))
    assert "exporter_send_stuck" in [event["event"] for event in logs]
    await advance(200.0)


def test_another_loop_is_refused():
    async def make():
        return await exporter(Destination()).__aenter__()

    runner = asyncio.Runner()
    export = runner.run(make())

    async def use():
        with pytest.raises(bq.WrongLoopError, match="bridge"):
            await export.consume(["a"])

    asyncio.run(use())
    runner.run(export.shutdown())
    runner.close()


async def test_a_forked_child_is_told(place):
    async with exporter(Destination(), place) as export:
        export.after_fork()
        with pytest.raises(bq.ForkedError, match="fork"):
            await export.consume(["a"])
        export._phase = "open"


@pytest.mark.parametrize("sink", [None, object(), "sink"])
def test_what_is_no_sink_is_refused(sink):
    with pytest.raises(bq.ConfigError, match="is not a sink"):
        bq.Exporter(sink)
    with pytest.raises(bq.ConfigError, match="ExportConfig"):
        bq.Exporter(Destination(), {"path": "x"})


def plain(self, batch): ...


async def two(self, records, keys): ...


async def in_pieces(self, batch):
    yield batch


@pytest.mark.parametrize(
    ("name", "method", "words"),
    [
        ("send", two, "has a send that takes (records, keys); make it async def send(self, batch)"),
        ("send", plain, "has a send that is not async, and would block the event loop; make it async def send"),
        ("send", in_pieces, "has a send that is an async generator function; write an async def without yield"),
        ("open", two, "has an open that takes (records, keys); make it async def open(self)"),
        ("close", two, "has a close that takes (records, keys); make it async def close(self)"),
        ("send_keyed", in_pieces, "has a send_keyed that is an async generator function"),
        ("send_prepared", two, "has a send_prepared that takes (records, keys); make it async def send_prepared"),
    ],
)
def test_a_sink_that_no_exporter_could_call_is_refused(name, method, words):
    kind = type("Wrong", (Destination,), {name: method})
    with pytest.raises(bq.ConfigError, match=re.escape(f"Exporter: sink=Wrong {words}")):
        bq.Exporter(kind())


def test_the_class_of_a_sink_is_not_a_sink():
    with pytest.raises(bq.ConfigError, match=re.escape("sink=Destination is a class; make an object of it")):
        bq.Exporter(Destination)


# --- cancellation


@pytest.mark.parametrize("turns", range(6))
async def test_a_cancelled_consume_has_put_all_or_nothing(turns):
    sink = Destination()
    async with exporter(sink) as export:
        task = asyncio.create_task(export.consume(["a", "b"]))
        for _ in range(turns):
            await asyncio.sleep(0)
        cancelled = task.cancel()
        await asyncio.wait([task])
        assert task.cancelled() == cancelled
        await export.flush()
        assert sink.records == ([] if cancelled else ["a", "b"])


@pytest.mark.parametrize("turns", range(10))
async def test_a_cancelled_opening_leaves_nothing_behind(turns, place):
    sink = Destination()
    task = asyncio.create_task(exporter(sink, place).__aenter__())
    for _ in range(turns):
        await asyncio.sleep(0)
    if task.cancel():
        with pytest.raises(asyncio.CancelledError):
            await task
        await settle()
    else:
        await (await task).shutdown()
    async with exporter(Destination(), place):  # the directory is free
        pass


async def test_a_cancelled_flush_leaves_the_others(place):
    sink = Destination(latency=1.0)
    async with exporter(sink, place) as export:
        await export.consume(["a"])
        first, second = asyncio.create_task(export.flush()), asyncio.create_task(export.flush())
        await settle()
        first.cancel()
        await second
        assert sink.records == ["a"]
