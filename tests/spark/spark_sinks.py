"""Sinks and handlers that the Python workers of the tests' Spark import by name."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import ClassVar

import msgspec

from batchqueue_async.errors import PermanentError
from batchqueue_async.sinks.jsonl import JsonLinesSink
from batchqueue_async.sinks.sqlite import SqliteSink


class FailingPublish(SqliteSink):
    """Fails the first publication into its file."""

    async def publish(self, key, attempts):
        marker = Path(f"{self.path}.failed")
        if not marker.exists():
            marker.touch()
            raise OSError("the commit fails")
        return await super().publish(key, attempts)

    async def publish_sifted(self, key, attempts, bury):
        marker = Path(f"{self.path}.failed")

        def fail_after(refused):
            bury(refused)
            if not marker.exists():
                marker.touch()
                raise OSError("the commit fails")

        return await super().publish_sifted(key, attempts, bury and fail_after)


def failing_publish(options):
    return FailingPublish(options["path"])


class SlowStage:
    """Waits in each send, and tells by a file that it does."""

    def __init__(self, inner, flag):
        self.inner = inner
        self.flag = flag

    async def open(self):
        await self.inner.open()

    async def send(self, batch):
        await self.inner.send(batch)
        fresh = Path(f"{self.flag}.{os.getpid()}")
        fresh.write_text(str(os.getpid()))
        fresh.replace(self.flag)  # whole, or not there
        while Path(f"{self.flag}.wait").exists():
            time.sleep(0.01)

    async def close(self):
        await self.inner.close()


class Slow(SqliteSink):
    flag = ""

    def stage(self, attempt):
        return SlowStage(super().stage(attempt), self.flag)


def slow(options):
    sink = Slow(options["path"])
    sink.flag = options["flag"]
    return sink


def into_a_file_per_worker(options):
    """A handler that writes to a file of its process."""
    directory = Path(options["path"])

    async def handle(batch):
        with (directory / f"{os.getpid()}.txt").open("a") as file:
            file.writelines(f"{each['value']}\n" for each in batch)

    return handle


def failing_handler(options):
    async def handle(batch):
        raise LookupError("the shelf is empty")

    return handle


def choosy_handler(options):
    """Takes no row whose value leaves 3 when divided by 7."""

    async def handle(batch):
        if any(each["value"] % 7 == 3 for each in batch):
            raise PermanentError("no sevens and threes")
        with (Path(options["path"]) / f"{os.getpid()}.txt").open("a") as file:
            file.writelines(f"{each['value']}\n" for each in batch)

    return handle


def dead_table(options):
    return SqliteSink(options["letters"], "dead")


def plain_jsonl(options):
    """JSON lines without staging, one file for each process."""
    sink = JsonLinesSink(Path(options["path"]) / f"{os.getpid()}.jsonl")

    class Plain:
        open = sink.open
        send = sink.send
        close = sink.close

    return Plain()


def neither(options):
    return 7


async def no_op(batch):
    """Does nothing."""


def no_op_factory(options):
    return no_op


def postgres(options):
    from batchqueue_async.sinks.postgres import PostgresSink

    # A task is tried once in these tests, and its first call imports the client too, on a machine that may be busy.
    return PostgresSink(options["dsn"], options["table"], timeout=120, connect_timeout=120)


class Keyed:
    """Keeps what each key came with; made anew for each set of options, its finds are shared."""

    seen: ClassVar[dict[str, object]] = {}

    async def open(self): ...
    async def close(self): ...
    async def send(self, batch):
        raise AssertionError("it was to be sent with keys")

    async def send_keyed(self, batch, keys):
        for record, key in zip(batch, keys, strict=True):
            assert self.seen.setdefault(key, record) == record


def keyed(options):
    return Keyed()


class Reading(msgspec.Struct):
    value: int
    name: str = ""


def note(path, batch):
    with Path(path).open("a") as file:
        file.writelines(f"{each!r}\n" for each in batch)


def types_into_a_file(options):
    """A handler that notes what it was given."""

    async def handle(batch):
        note(options["path"], batch)

    return handle


class OneTransaction(Keyed):
    async def begin(self, key):
        return None


def one_transaction(options):
    return OneTransaction()


def dead_rows(options):
    from batchqueue_async.sinks.postgres import PostgresSink

    return PostgresSink(options["dsn"], "dead_rows", timeout=120, connect_timeout=120)
