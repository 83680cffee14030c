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
from batchqueue_async._support.registry import Registry


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
