"""What the library logs names queue, worker and partition, and never an item or what quotes one."""

from __future__ import annotations

import asyncio
import logging

import pytest
import structlog
from queue_tools import Item, make

import batchqueue_async as bq
from batchqueue_async._support import log
from batchqueue_async.testing import RecordingHandler, advance, settle

SECRET = "s3cr3t-payload"


class Secretive(Item):
    """An item that gives itself away wherever it is printed."""

    def __repr__(self) -> str:
        return SECRET

    __str__ = __repr__


class Unknown(Secretive):
    pass


def secret_error() -> Exception:
    """An error that quotes the item, down to its cause and its notes."""
    try:
        raise KeyError(SECRET)
    except KeyError as cause:
        error = ValueError(f"cannot write {SECRET}")
        error.__cause__ = cause
        error.add_note(SECRET)
        return error


async def everything_goes_wrong() -> None:
    """One of each event that the queue can log."""

    async def fail(batch: list[Item]) -> None:
        raise secret_error()

    class Idler:
        async def consume(self, batch: list[Item]) -> None:
            raise secret_error()

        async def on_idle(self) -> None:
            raise secret_error()

    class BadBalancer:
        def assign(self, throughput, owners, workers):
            raise secret_error()

    def on_error(batch: list[Item], error: BaseException) -> None:
        raise secret_error()

    two = {"workers": bq.WorkerPolicy.fixed(2), "partitions": bq.PartitionPolicy.fixed(2)}
    queue = make(on_error=on_error, balancer=BadBalancer(), balance_interval=1.0, **two)
    queue.add_handler(Secretive, Idler())
    other = make(consumer=fail, selector=bq.type_hash(), on_error=on_error, **two)
    reduced = make(workers=bq.WorkerPolicy.fixed(3))
    growing = make(partitions=bq.PartitionPolicy.adaptive(), drain_timeout=1.0)
    held = RecordingHandler[Item]()
    held.hold()
    growing.add_handler(Secretive, held, weight=5.0)
    for number in range(3):
        assert await queue.produce(Secretive(number))
        assert await queue.produce(Item(number))  # nobody takes it
        assert await other.produce(Secretive(number))
        assert await growing.produce(Secretive(number))
    await advance(2.0)
    await growing.shutdown()
    with pytest.raises(bq.DeliveryError) as caught:
        await queue.deliver([Secretive(1), Unknown(2), Item(3)])
    assert SECRET not in str(caught.value)
    for made in (queue, other, reduced):
        assert SECRET not in repr(made)
        assert SECRET not in repr(made.stats())
        assert SECRET not in repr(await made.shutdown())
    async with bq.BatchQueueManager() as manager:
        shared = manager.create("q", bq.QueueConfig())
        manager.get_or_create("q", bq.QueueConfig(buffer_size=7))
        assert await shared.produce(Secretive(1))
    abandoned = make(consumer=held)
    assert await abandoned.produce(Secretive(1))
    abandoned._drains[0].task.cancel()
    await settle()


EVENTS = {
    "balancer_failed",
    "handler_failed",
    "on_error_failed",
    "on_idle_failed",
    "queue_abandoned",
    "queue_closed",
    "queue_closed_undelivered",
    "queue_config_ignored",
    "queue_created",
    "queue_grown",
    "type_hash_cannot_spread",
    "type_unhandled",
    "workers_reduced",
}


async def test_structlog_events_name_the_place_and_never_the_item(logs):
    await everything_goes_wrong()
    assert SECRET not in repr(logs)
    assert {event["event"] for event in logs} >= EVENTS
    assert all(event["queue"] == "q" for event in logs)
    for event in logs:
        if event["event"] in {"handler_failed", "on_error_failed", "on_idle_failed", "type_unhandled"}:
            assert event["worker"] in {0, 1}
        if event["event"] in {"handler_failed", "type_unhandled"}:
            assert event["partitions"] in ([0], [1], [0, 1])
        if event["event"] == "handler_failed":
            assert (event["error"], event["items"]) == ("ValueError", 1) or event["items"] > 1
            assert "test_logs.py" in event["where"]
            assert event["handler"] in {"Secretive", "consumer"}


async def test_without_structlog_the_events_go_to_logging(caplog):
    assert not structlog.is_configured()
    caplog.set_level(logging.DEBUG, "batchqueue_async")
    await everything_goes_wrong()
    assert SECRET not in caplog.text
    events = {record.message.split()[0] for record in caplog.records if record.name == "batchqueue_async"}
    assert events >= EVENTS
    handler_failed = next(record for record in caplog.records if record.message.startswith("handler_failed"))
    assert handler_failed.levelno == logging.WARNING
    assert "queue='q' worker=" in handler_failed.message


def test_levels_go_through_on_both_ways(logs, caplog):
    for name in ("debug", "info", "warning", "error"):
        getattr(log, name)("event", queue="q", number=3)
    assert [(event["log_level"], event["number"]) for event in logs] == [
        ("debug", 3),
        ("info", 3),
        ("warning", 3),
        ("error", 3),
    ]
    structlog.reset_defaults()
    caplog.set_level(logging.WARNING, "batchqueue_async")
    for name in ("debug", "info", "warning", "error"):
        getattr(log, name)("event", queue="q", number=3)
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("WARNING", "event queue='q' number=3"),
        ("ERROR", "event queue='q' number=3"),
    ]


@pytest.mark.parametrize("step", ["produce", "deliver", "flush"])
async def test_error_messages_quote_no_item(step):
    handler = RecordingHandler[Item]()
    handler.hold()
    queue = make(consumer=handler, buffer_size=1, max_batch=1, block_timeout=1.0)
    for _ in range(2):
        assert await queue.produce(Secretive(1))
        await settle()
    messages: list[str] = []
    try:
        if step == "produce":
            assert not await queue.produce(Secretive(2))
        elif step == "deliver":
            await queue.deliver([Secretive(2)])
        else:
            await queue.flush(timeout=1.0)
    except (bq.DeliveryError, TimeoutError) as error:
        messages.append(str(error))
        failures = getattr(error, "failures", ())
        messages += [str(failure.error) for failure in failures]
    assert not any(SECRET in message for message in messages)
    await asyncio.sleep(0)
