"""The registry of things with statistics, the last error, and what of an error's text is shown."""

from __future__ import annotations

import gc
import os
import threading

import pytest

import batchqueue_async as bq
from batchqueue_async._support.last_error import ErrorKeeper
from batchqueue_async._support.log import describe
from batchqueue_async._support.redaction import LONGEST, without_payload
from batchqueue_async._support.registry import Registry, looked_at
from batchqueue_async.sinks.memory import MemorySink


class Thing:
    def __init__(self, name):
        self.name = name

    def peek(self):
        return self.name


def test_things_are_listed_in_their_order_by_kind_until_they_are_gone():
    registry = Registry()
    first, second, third = Thing("a"), Thing("b"), Thing("c")
    registry.add("queue", first)
    registry.add("exporter", second)
    registry.add("queue", third)
    assert [(each.kind, each.name) for each in registry.all()] == [("queue", "a"), ("exporter", "b"), ("queue", "c")]
    assert [each.thing for each in registry.all("queue")] == [first, third]
    registry.remove(first)
    registry.remove(first)
    del second
    gc.collect()
    assert [each.name for each in registry.all()] == ["c"]


def test_the_registry_bears_threads_that_come_and_go():
    registry = Registry()
    kept: list[Thing] = []
    errors: list[BaseException] = []

    def churn(number):
        try:
            for turn in range(300):
                thing = Thing(f"{number}-{turn}")
                registry.add("bridge", thing)
                assert all(each.thing.peek() for each in registry.all())
                if turn == 299:
                    kept.append(thing)
        except BaseException as error:  # shown by the assertion below
            errors.append(error)

    threads = [threading.Thread(target=churn, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    gc.collect()
    assert not errors
    assert sorted(each.name for each in registry.all()) == sorted(thing.name for thing in kept)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_the_collector_may_run_amid_every_step():
    registry = Registry()
    kept = [Thing(str(number)) for number in range(50)]
    for thing in kept:
        registry.add("queue", thing)

    def leave_cycles():
        for number in range(20):
            thing = Thing(f"cycle {number}")
            thing.itself = thing
            registry.add("queue", thing)

    before = gc.get_threshold()
    try:
        for turn in range(30):
            other = Thing(str(turn))
            registry.add("queue", other)
            gc.set_threshold(0)
            gc.collect()  # empties the free lists too, so that a walk has to allocate
            leave_cycles()
            gc.set_threshold(gc.get_count()[0] + 3 * turn + 1)
            registry.remove(other)
            assert len(registry.all()) >= len(kept)
    finally:
        gc.set_threshold(*before)
    gc.collect()
    assert [each.thing for each in registry.all()] == kept


def test_a_forked_child_begins_with_an_empty_registry():
    registry, thing = Registry(), Thing("parent")
    registry.add("queue", thing)
    child = os.fork()
    if not child:
        os._exit(len(registry.all()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(registry.all()) == 1


def test_the_last_error_is_counted_and_its_text_hides_what_may_be_payload():
    keeper = ErrorKeeper()
    assert keeper.last() is None
    for number in range(3):
        try:
            raise ValueError(f"row 'Ann Smith' of order-{number} is not valid")
        except ValueError as error:
            keeper.seen(error)
    last = keeper.last()
    assert (last.error, last.count) == ("ValueError", 3)
    assert "test_observing.py" in last.where
    assert last.text == "row *** of *** is not valid"
    assert last.at > 0


def test_an_error_that_cannot_say_what_it_is_is_counted_all_the_same():
    class MuteError(Exception):
        __qualname__ = "MuteError"

        def __str__(self):
            raise RuntimeError("no")

    keeper = ErrorKeeper()
    keeper.seen(MuteError())
    assert (keeper.last().error, keeper.last().text) == ("MuteError", "")
    assert describe(MuteError())["text"] == ""


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("connection refused by 10.0.0.1:5432", "connection refused by ***"),
        ("cannot write {'card': 4111, 'name': 'x'}", "cannot write ***"),
        ('no handler for "the payload', "no handler for ***"),
        ("user=ann is not known", "user=*** is not known"),
        ("mail to ann@example.com failed", "mail to *** failed"),
        ("bad\n\n  value", "bad value"),
        ("can't store 'a secret'", "can't store ***"),
        ("can't store ['a secret']", "can't store ***"),
        ("stored 'it's secret' twice", "stored *** twice"),
        ("column 'a secret' and 'another' clash", "column *** clash"),
        ("postgresql://app:s3cret@db/app is away", "*** is away"),
        ("", ""),
    ],
)
def test_what_may_be_payload_is_hidden(text, shown):
    assert without_payload(text) == shown


def test_a_text_of_any_size_is_cut_before_it_is_looked_at():
    assert len(without_payload("word " * 1_000_000)) == LONGEST
    assert without_payload("a" * 1_000_000) == "***"


def test_a_log_event_shows_the_text_when_it_is_asked_to_but_no_credential():
    error = ValueError("row 17 of host=db password=hunter2")
    assert describe(error)["text"] == "row *** of host=*** password=***"
    assert describe(error, full=True)["text"] == "row 17 of host=db password=***"


async def test_registered_lists_the_queues_of_every_manager():
    async with bq.BatchQueueManager() as one, bq.BatchQueueManager() as other:
        queues = [one.create("spans"), other.create("spans")]
        found = [each.thing for each in bq.registered("queue")]
        assert [thing for thing in found if thing in queues] == queues


def of(kind, things):
    """Those of the things that are registered under the kind, in their order."""
    found = [each.thing for each in bq.registered(kind)]
    return [thing for thing in found if any(thing is each for each in things)]


def peeked(thing):
    """What a thread sees that has no loop; the loop of the thing is held up meanwhile."""
    found = []
    reader = threading.Thread(target=lambda: found.append(thing.peek()))
    reader.start()
    reader.join(60)
    assert found, "peek waits for the loop"
    return found[0]


async def test_exporters_and_durable_queues_are_listed_while_they_are_open(tmp_path):
    config = bq.ExportConfig(path=tmp_path / "send", batch=bq.BatchPolicy(linger=0))
    exporter = bq.Exporter(MemorySink(), config, name="spans")
    assert of("exporter", [exporter]) == []
    async with exporter:
        assert of("exporter", [exporter]) == [exporter]
        (queue,) = [each for each in bq.registered("durable_queue") if each.name == str(tmp_path / "send")]
        await exporter.consume(["a", "b"])
        await exporter.flush()
        stats = peeked(exporter)
        assert (stats.name, stats.accepted, stats.delivered) == ("spans", 2, 2)
        assert peeked(queue.thing).acked == 2
    assert of("exporter", [exporter]) == []
    assert of("durable_queue", [queue.thing]) == []
    assert peeked(exporter).delivered == 2  # whoever holds it may look all the same
    assert peeked(queue.thing).acked == 2


async def test_the_dead_letters_of_a_durable_queue_are_not_listed_beside_it(tmp_path):
    async with bq.DurableQueue.open(tmp_path / "queue") as queue:
        await queue.put(b"a")
        await (await queue.lease(wait=0)).dead_letter("bad")
        listed = [each.name for each in bq.registered("durable_queue") if each.name.startswith(str(tmp_path))]
        assert listed == [queue.name] == [str(tmp_path / "queue")]


async def test_a_durable_queue_that_was_never_open_has_nothing_to_show(tmp_path):
    queue = bq.DurableQueue.open(tmp_path / "queue")
    assert of("durable_queue", [queue]) == []
    with pytest.raises(bq.QueueClosedError, match="never open"):
        queue.peek()


async def test_an_exporter_that_can_not_be_opened_is_not_listed(tmp_path):
    class Shut(MemorySink):
        async def open(self):
            raise bq.PermanentError("never")

    exporter = bq.Exporter(Shut(), bq.ExportConfig(path=tmp_path / "send"), check="fail")
    with pytest.raises(bq.PermanentError):
        await exporter.__aenter__()
    assert of("exporter", [exporter]) == []
    assert [each for each in bq.registered("durable_queue") if each.name == str(tmp_path / "send")] == []


def test_bridges_are_listed_until_they_are_closed():
    bridge = bq.SyncBridge()
    assert of("bridge", [bridge]) == [bridge]
    assert (bridge.peek().running, bridge.peek().closed, bridge.peek().queues) == (False, False, ())
    with bridge:
        bridge.get_or_create("lines", bq.QueueConfig())
        stats = peeked(bridge)
        assert (stats.name, stats.running, stats.queues) == (bridge.name, True, ("lines",))
    assert of("bridge", [bridge]) == []
    assert (bridge.peek().running, bridge.peek().closed) == (False, True)


async def test_readers_on_threads_bear_an_exporter_that_works(tmp_path):
    errors: list[BaseException] = []
    done = threading.Event()

    def read():
        try:
            while not done.is_set():
                for each in bq.registered():
                    each.thing.peek()
        except BaseException as error:  # shown by the assertion below
            errors.append(error)

    config = bq.ExportConfig(path=tmp_path / "send", batch=bq.BatchPolicy(linger=0, max_records=3))
    readers = [threading.Thread(target=read) for _ in range(3)]
    async with bq.Exporter(MemorySink(), config) as exporter:
        for reader in readers:
            reader.start()
        for number in range(200):
            await exporter.consume([number])
        await exporter.flush()
        done.set()
        for reader in readers:
            reader.join(60)
    assert not errors


def test_numbers_that_change_while_they_are_read_are_read_again():
    answers = [RuntimeError("dictionary changed size during iteration")] * 3

    def read():
        if answers:
            raise answers.pop()
        return 7

    assert looked_at(read) == 7
    answers += [RuntimeError("always")] * 9
    with pytest.raises(RuntimeError, match="always"):
        looked_at(read)
