"""Two faults at once, odd sinks, cancelled calls: what the parts of an exporter owe each other."""

from __future__ import annotations

import asyncio
from random import Random

import pytest
from export_kit import Destination, check, down, exporter

import batchqueue_async as bq
from batchqueue_async.durable import DurableConfig
from batchqueue_async.sinks.base import SendResult
from batchqueue_async.testing import advance, settle


@pytest.fixture(params=["memory", "disk"])
def place(request, tmp_path):
    return None if request.param == "memory" else tmp_path / "queue"


def items(error: bq.DeliveryError) -> list[object]:
    """What the error names, in the order of its failures."""
    return [item for failure in error.failures for item in failure.items]


# --- deliver: what it names is what was not delivered, no more and no less


@pytest.mark.parametrize("overflow", ["drop_newest", "drop_oldest"])
async def test_deliver_names_the_records_that_the_bounds_dropped(overflow, place):
    sink = Destination()
    durable = DurableConfig(max_records=4)
    options = {} if place is None else {"durable": durable}
    async with exporter(sink, place, max_records=4, overflow=overflow, **options) as export:
        batch = list(range(10))
        named: list[object] = []
        try:
            await export.deliver(batch)
        except bq.DeliveryError as error:
            named = items(error)
        await export.flush()
    assert sorted([*named, *sink.records]) == batch


async def test_deliver_names_dropped_and_refused_records_together():
    sink = Destination(answer=lambda batch: bq.PermanentError("400") if "bad" in batch else None)
    async with exporter(sink, max_records=4, overflow="drop_newest") as export:
        batch = ["a", "bad", *"cdefgh"]
        with pytest.raises(bq.DeliveryError) as caught:
            await export.deliver(batch)
        await export.flush()
    assert sorted([*items(caught.value), *sink.records]) == sorted(batch)


async def test_deliver_waits_for_the_others_of_a_batch_with_a_record_that_has_no_form_on_disk(tmp_path):
    sink = Destination(answer=lambda batch: bq.PermanentError("400") if "bad" in batch else None, latency=1.0)
    strange = object()
    async with exporter(sink, tmp_path / "queue") as export:
        with pytest.raises(bq.DeliveryError) as caught:
            await export.deliver(["a", strange, "bad", "b"])
        assert sorted(sink.records) == ["a", "b"]
        assert items(caught.value) == [strange, "bad"]
        check(export)


async def test_deliver_is_not_told_of_drops_while_a_delivered_record_is_settled(tmp_path):
    sink = Destination(answer=lambda batch: bq.PermanentError("400") if "bad" in batch else None)

    async def slowly(_records, _why):
        await asyncio.sleep(5.0)

    async with exporter(sink, tmp_path / "queue", workers=bq.WorkerPolicy.fixed(4), on_dead_letter=slowly) as export:
        first = asyncio.create_task(export.deliver(["bad"]))
        await advance(1.0)
        await export.deliver(["good"])
        with pytest.raises(bq.DeliveryError, match="1 of 1") as caught:
            await first
        assert "400" in str(caught.value.failures[0].error)


async def test_deliver_of_a_large_batch_in_parts_is_not_told_of_drops(tmp_path):
    def answer(batch):
        return SendResult(rejected={0: bq.PermanentError("400")}) if 0 in batch else None

    sink = Destination(answer=answer)
    async with exporter(sink, tmp_path / "queue", workers=bq.WorkerPolicy.fixed(4), batch_records=5000) as export:
        first = asyncio.create_task(export.deliver(list(range(5000))))
        others = []
        for number in range(200):
            others.append(asyncio.create_task(export.deliver([f"x{number}"])))
            await asyncio.sleep(0)
        await asyncio.gather(*others)
        with pytest.raises(bq.DeliveryError) as caught:
            await first
        assert items(caught.value) == [0]


# --- waits that end when the durable queue drops what is too old


async def test_flush_and_deliver_end_when_what_they_wait_for_grew_too_old(tmp_path):
    sink = Destination(answer=lambda _: bq.AuthError("401"))
    options = {"auth_pause": 1e6, "durable": DurableConfig(max_age=10.0)}
    async with exporter(sink, tmp_path / "queue", drain_timeout=0, **options) as export:
        delivering = asyncio.create_task(export.deliver(["a"]))
        await settle()
        flushing = asyncio.create_task(export.flush())
        await asyncio.wait([flushing, delivering], timeout=1000.0)
        assert export.stats().records == 0
        assert flushing.done()
        with pytest.raises(bq.DeliveryError):
            await asyncio.wait_for(delivering, 1.0)


# --- sinks that answer or fail in odd ways


@pytest.mark.parametrize("answer", [3, True, "ok", {"errors": False}, object(), (1, 2)])
async def test_a_sink_that_returns_something_else_has_taken_the_batch_once(answer, place, logs):
    class Odd(Destination):
        async def send(self, batch):
            await super().send(batch)
            return answer

    sink = Odd()
    async with exporter(sink, place) as export:
        await export.consume(["a"])
        await export.flush(100.0)
        await export.consume(["b"])
        await export.flush(100.0)
        assert check(export).delivered == 2
    assert sink.records == ["a", "b"]
    assert [event["event"] for event in logs].count("unknown_answer_of_sink") == 1


class MuteError(bq.RetryableError):
    def __str__(self):
        raise RuntimeError("no words")


class MuteForGoodError(bq.PermanentError):
    def __str__(self):
        raise RuntimeError("no words")


async def test_an_error_that_can_not_say_what_it_is_keeps_its_class(place):
    sink = Destination(answer=lambda batch: MuteForGoodError() if "bad" in batch else None, opening=[MuteError()])
    async with exporter(sink, place) as export:
        await export.consume(["a", "bad"])
        await export.flush(1000.0)
        assert (check(export).delivered, check(export).dead_lettered) == (1, 1)


@pytest.mark.parametrize("retry_after", ["5", "soon", float("nan"), -1.0, float("inf"), 1e300, b"2"])
async def test_a_retry_after_that_makes_no_sense_is_no_bug_of_the_exporter(retry_after, place, logs):
    errors = [bq.ThrottledError("429", retry_after=retry_after)] * 3
    sink = Destination(answer=lambda _: errors.pop() if errors else None)
    async with exporter(sink, place, retry=bq.RetryPolicy(initial=1.0, max_delay=10.0)) as export:
        await export.consume(["a"])
        await export.flush(200.0)
        assert check(export).failures == {"throttled": 3}
    assert "export_delivery_failed" not in [event["event"] for event in logs]


@pytest.mark.parametrize("culprits", [["x"], [None], [1.5], [-1], [10**9], [True, "1"], [[1]]])
async def test_culprits_that_make_no_sense_cost_no_good_record(culprits, place, logs):
    def answer(batch):
        return bq.PermanentError("400", culprits=culprits) if 7 in batch else None

    sink = Destination(answer=answer)
    async with exporter(sink, place) as export:
        await export.consume(list(range(20)))
        await export.flush(1000.0)
        assert 7 not in sink.records
        assert check(export).delivered + check(export).dead_lettered == 20
        assert check(export).dead_lettered <= 2
    assert "export_delivery_failed" not in [event["event"] for event in logs]


@pytest.mark.parametrize("rejected", [{0: "no"}, {0: ValueError("no")}, {0: None}, {"0": bq.PermanentError("no")}])
async def test_a_rejection_that_is_no_error_of_a_sink_ends_nothing(rejected, place, logs):
    answers = [SendResult(rejected=rejected)]
    sink = Destination(answer=lambda _: answers.pop() if answers else None)
    async with exporter(sink, place) as export:
        await export.consume(["a", "b"])
        await export.flush(1000.0)
        assert check(export).delivered + check(export).dead_lettered == 2
    assert "export_delivery_failed" not in [event["event"] for event in logs]


# --- putting back what was given up


@pytest.mark.parametrize("how", ["cancelled", "closed"])
async def test_putting_back_that_is_cut_off_loses_no_dead_letter(how):
    sink = Destination(answer=lambda _: bq.PermanentError("400"))
    async with exporter(sink) as export:
        await export.consume(["a", "b"])
        await export.flush()
        putting = asyncio.create_task(export.requeue_dead_letters())
        await asyncio.sleep(0)
        if how == "cancelled":
            putting.cancel()
        report = await export.shutdown()
        with pytest.raises((asyncio.CancelledError, bq.QueueClosedError)):
            await putting
    assert sorted(record for letter in report.given_up for record in letter.records) == ["a", "b"]


async def test_putting_back_into_a_full_queue_keeps_what_did_not_come_in():
    sink = Destination(answer=lambda _: bq.PermanentError("400"))
    async with exporter(sink, max_records=4, overflow="reject") as export:
        await export.consume(["a", "b"])
        await export.flush()
        await export.consume(["c", "d"])
        await export.flush()
        sink.answer = lambda _: down()
        await export.consume(["e"])
        with pytest.raises(bq.QueueFullError):
            await export.requeue_dead_letters()
        sink.answer = None
        await export.flush()
        assert await export.requeue_dead_letters() == 4
        await export.flush()
        check(export)
    assert sorted(sink.records) == list("abcde")


# --- the end


async def test_an_exporter_whose_closing_is_cancelled_gives_its_sink_and_directory_back(place):
    sink = Destination(answer=lambda _: down())
    export = exporter(sink, place)
    await export.__aenter__()
    await export.consume(["a"])
    shutting = asyncio.create_task(export.shutdown())
    await settle()
    for task in asyncio.all_tasks():
        if task.get_name() == "export-test-shutdown":
            task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await shutting
    assert export.closed
    sink.answer = None
    async with exporter(sink, place) as again:
        await again.flush()
    assert sink.closes >= 1
    if place is not None:
        assert sink.records == ["a"]


# --- several destinations


async def test_router_names_what_no_route_takes_even_if_a_destination_failed_as_well():
    full = bq.Exporter(
        Destination(answer=lambda _: down()), bq.ExportConfig(max_records=1, overflow="reject"), name="a"
    )
    async with bq.Router({"a": full}, by="tenant") as router:
        batch = [{"tenant": "a"}, {"tenant": "a"}, {"tenant": "b"}]
        with pytest.raises(bq.DeliveryError) as caught:
            await router.consume(batch)
        assert sorted(item["tenant"] for item in items(caught.value)) == ["a", "a", "b"]
        await router.shutdown(0)


@pytest.mark.parametrize("by", ["mapping", "functions"])
async def test_router_refuses_a_record_that_its_routes_fail_for_and_that_one_alone(by):
    sink = Destination()
    export = bq.Exporter(sink)
    good, poison = {"tenant": "a"}, {"tenant": ["not", "hashable"]}
    router = (
        bq.Router({"a": export}, by="tenant")
        if by == "mapping"
        else bq.Router([(lambda record: {record["tenant"]: 1}, export)])
    )
    async with router:
        with pytest.raises(bq.DeliveryError) as caught:
            await router.consume([good, poison, good])
        assert items(caught.value) == [poison]
        assert isinstance(caught.value.failures[0].error, TypeError)
    assert sink.records == [good, good]


# --- two faults at once


@pytest.mark.parametrize("named", [True, False])
async def test_a_poison_record_among_500_while_credentials_go_and_come(named, place):
    bad, state = 377, {"calls": 0}

    def answer(batch):
        state["calls"] += 1
        if state["calls"] % 3 == 1 and state["calls"] < 30:
            return bq.AuthError("401")
        if bad in batch:
            return bq.PermanentError("400", culprits=[batch.index(bad)] if named else ())
        return None

    sink = Destination(answer=answer)
    async with exporter(sink, place, auth_pause=1.0, workers=bq.WorkerPolicy.fixed(4)) as export:
        await export.consume(list(range(500)))
        for number in range(10):
            await export.consume([f"x{number}"])
            await asyncio.sleep(0.5)
        await export.flush(10_000.0)
        stats = check(export)
        assert (stats.dead_lettered, stats.delivered) == (1, 509)
    assert len(set(sink.records)) == 509


@pytest.mark.parametrize("retry_after", [0.0, 1e9])
async def test_throttled_and_too_large_at_once(retry_after, place):
    state, randomly = {"calls": 0}, Random(3)

    def answer(batch):
        state["calls"] += 1
        if randomly.random() < 0.3:
            return bq.ThrottledError("429", retry_after=retry_after)
        return bq.TooLargeError("413") if len(batch) > 10 else None

    sink = Destination(answer=answer)
    async with exporter(sink, place, retry=bq.RetryPolicy(initial=1.0, max_delay=20.0)) as export:
        await export.consume(list(range(100)))
        await export.flush(100_000.0)
        assert check(export).delivered == 100
        assert state["calls"] < 1000
    assert sorted(sink.records) == list(range(100))


async def test_shutdown_with_a_stuck_send_and_a_stuck_close_keeps_its_deadline(place):
    class Stuck(Destination):
        async def send(self, batch):
            while True:
                try:
                    await asyncio.sleep(1e6)
                except asyncio.CancelledError:
                    self.cancelled += 1
                    if self.cancelled > 50:
                        raise

        async def close(self):
            while self.cancelled <= 50:
                try:
                    await asyncio.sleep(1e6)
                except asyncio.CancelledError:
                    continue

    sink = Stuck()
    async with exporter(sink, place) as export:
        await export.consume(["a"])
        await advance(1.0)
        begin = asyncio.get_running_loop().time()
        report = await export.shutdown(1.0)
        assert asyncio.get_running_loop().time() - begin <= 1.0
        assert report.undelivered == ["a"] if place is None else report.on_disk == 1
    sink.cancelled = 100
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    await advance(1.0)


@pytest.mark.parametrize("call", ["consume", "deliver", "flush"])
@pytest.mark.parametrize("after", range(6))
async def test_a_call_that_is_cancelled_at_any_turn_leaves_nothing_behind(call, after, place):
    sink = Destination(latency=0.01)
    async with exporter(sink, place) as export:
        await export.consume(["first"])
        task = asyncio.create_task(export.flush() if call == "flush" else getattr(export, call)(["a", "b"]))
        for _ in range(after):
            await asyncio.sleep(0)
        task.cancel()
        done = (await asyncio.gather(task, return_exceptions=True))[0]
        await export.flush(10.0)
        stats = check(export)
        assert stats.records == 0
        if done is None and call != "flush":
            assert {"a", "b"} <= set(sink.records)
        assert not export._engine.waiters
        assert not export._engine.puller.hurry
