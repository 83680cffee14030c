"""The registry of queues, and the order in which everything ends."""

from __future__ import annotations

import asyncio

import pytest
from queue_tools import now

import batchqueue_async as bq
from batchqueue_async.runtime import manager as manager_module
from batchqueue_async.testing import RecordingHandler, VirtualTimeLoop, advance, settle


async def test_create_find_and_forget():
    async with bq.BatchQueueManager() as manager:
        assert manager.names() == []
        assert manager.get("a") is None
        queue = manager.create("a", bq.QueueConfig(buffer_size=5))
        other = manager.create("b")
        assert (manager.get("a"), manager.get("b"), manager.names()) == (queue, other, ["a", "b"])
        assert (queue.name, queue.config.buffer_size, other.config) == ("a", 5, bq.QueueConfig())
        report = await manager.shutdown("a")
        assert report.name == "a"
        assert queue.closed
        assert not other.closed
        assert (manager.get("a"), manager.names()) == (None, ["b"])
        assert manager.create("a") is not queue


async def test_create_refuses_a_taken_name():
    async with bq.BatchQueueManager() as manager:
        manager.create("a")
        with pytest.raises(bq.QueueExistsError, match=r"queue 'a': the name is taken; .* get_or_create"):
            manager.create("a")


async def test_get_or_create_shares_one_queue():
    async with bq.BatchQueueManager() as manager:
        queue = manager.get_or_create("a", bq.QueueConfig(buffer_size=7))
        assert manager.get_or_create("a", bq.QueueConfig(buffer_size=7)) is queue
        handlers = [RecordingHandler(), RecordingHandler()]
        for kind, handler in zip((int, str), handlers, strict=True):
            manager.get_or_create("a", bq.QueueConfig(buffer_size=7)).add_handler(kind, handler)
        assert await queue.produce_many([1, "x"]) == 2
        await queue.flush()
        assert [handler.handled for handler in handlers] == [[1], ["x"]]


async def test_get_or_create_warns_of_other_settings_and_the_first_wins(logs):
    async with bq.BatchQueueManager() as manager:
        queue = manager.get_or_create("a", bq.QueueConfig(buffer_size=7))
        assert manager.get_or_create("a", bq.QueueConfig(buffer_size=8, linger=1.0)) is queue
        assert queue.config.buffer_size == 7
    (event,) = [event for event in logs if event["log_level"] == "warning"]
    assert (event["event"], event["queue"]) == ("queue_config_ignored", "a")
    assert sorted(event["fields"]) == ["buffer_size", "linger"]


@pytest.mark.parametrize("single_first", [True, False])
async def test_get_or_create_refuses_the_other_consumption_mode(single_first):
    configs = [bq.QueueConfig(consumer=RecordingHandler()), bq.QueueConfig()]
    first, second = configs if single_first else configs[::-1]
    modes = ["a single consumer", "handlers by type"]
    has, wants = modes if single_first else modes[::-1]
    async with bq.BatchQueueManager() as manager:
        manager.get_or_create("a", first)
        with pytest.raises(bq.ConfigError) as caught:
            manager.get_or_create("a", second)
        assert str(caught.value).startswith("queue 'a': consumer=")
        assert f"asks for {wants}, but the queue exists with {has}" in str(caught.value)


async def test_shutdown_of_an_unknown_name_says_which_there_are():
    async with bq.BatchQueueManager() as manager:
        manager.create("a")
        with pytest.raises(bq.ConfigError, match=r"queue 'b': there is none of that name; the manager has \['a'\]"):
            await manager.shutdown("b")


async def test_shutdown_all_closes_every_gate_before_it_drains():
    handlers = {name: RecordingHandler(delay=1.0) for name in "ab"}
    manager = bq.BatchQueueManager()
    queues = {name: manager.create(name, bq.QueueConfig(consumer=handler)) for name, handler in handlers.items()}
    for queue in queues.values():
        assert await queue.produce(1)
    await settle()
    ending = asyncio.create_task(manager.shutdown_all())
    await settle()
    assert all(queue.closed for queue in queues.values())
    assert not any([await queue.produce(2) for queue in queues.values()])
    reports = await ending
    assert {name: (report.handled, report.name) for name, report in reports.items()} == {"a": (1, "a"), "b": (1, "b")}
    assert now() == 1.0  # together, not one after the other
    assert manager.names() == []


async def test_one_deadline_for_all():
    manager = bq.BatchQueueManager()
    for name in "abc":
        handler = RecordingHandler()
        handler.hold()
        assert await manager.create(name, bq.QueueConfig(consumer=handler)).produce(name)
    reports = await manager.shutdown_all(timeout=2.0)
    assert now() == 2.0
    assert {name: report.undelivered for name, report in reports.items()} == {name: [name] for name in "abc"}


async def test_shutdown_all_of_nothing():
    assert await bq.BatchQueueManager().shutdown_all() == {}


async def test_shutdown_all_beside_a_shutdown_of_one():
    manager = bq.BatchQueueManager()
    handler = RecordingHandler(delay=1.0)
    assert await manager.create("a", bq.QueueConfig(consumer=handler)).produce(1)
    one = asyncio.create_task(manager.shutdown("a"))
    await settle()
    reports = await manager.shutdown_all()
    assert reports["a"] is await one


async def test_a_name_is_free_again_after_the_shutdown():
    manager = bq.BatchQueueManager()
    for _ in range(3):
        queue = manager.create("a", bq.QueueConfig(consumer=RecordingHandler()))
        assert await queue.produce(1)
        assert (await manager.shutdown_all())["a"].handled == 1


def test_a_queue_whose_loop_has_ended_is_reported_all_the_same(logs):
    manager = bq.BatchQueueManager()

    async def first() -> None:
        handler = RecordingHandler()
        handler.hold()
        queue = manager.create("a", bq.QueueConfig(consumer=handler, max_batch=2))
        assert await queue.produce_many(range(5)) == 5
        await settle()

    async def second() -> dict[str, bq.ShutdownReport]:
        return await manager.shutdown_all()

    for main in (first, second):
        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            result = runner.run(main())
    assert result["a"].undelivered == [0, 1, 2, 3, 4]
    assert manager.names() == []
    assert [event["event"] for event in logs if event["log_level"] == "error"] == ["queue_abandoned"]


def test_the_default_manager_is_one_for_the_process(monkeypatch):
    monkeypatch.setattr(manager_module, "_default", None)
    manager = bq.default_manager()
    assert isinstance(manager, bq.BatchQueueManager)
    assert bq.default_manager() is manager


async def test_the_tail_of_one_queue_may_feed_another_before_both_end():
    """L1 to L2: the gates close together, so the last hand-over is refused, and that is counted."""
    async with bq.BatchQueueManager() as manager:
        second = manager.create("l2", bq.QueueConfig(consumer=RecordingHandler()))

        async def forward(batch: list[int]) -> None:
            await asyncio.sleep(1.0)
            for item in batch:
                await second.produce(item)

        first = manager.create("l1", bq.QueueConfig(consumer=forward))
        assert await first.produce(1)
        await advance(1.0)
        assert second.stats().handled == 1
        assert await first.produce(2)
        await settle()
        reports = await manager.shutdown_all()
        assert (reports["l1"].handled, reports["l2"].handled) == (2, 1)
        assert second.stats().refused == 1
