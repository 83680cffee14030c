"""What the services of the tests name: handlers, keys, sinks; run by `batchqueue run --app service_program:app`."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from pathlib import Path

from opentelemetry import trace

import batchqueue_async as bq
from batchqueue_async.service import App
from batchqueue_async.sinks.sqlite import SqliteSink

app = App()


@app.handler("rows")
async def rows(batch):
    """Pass on to the queue that leads to the table."""
    await app.queue("rows").produce_many([{"n": int(each)} for each in batch])


@app.handler("messages")
async def messages(batch):
    """As `rows`, of a broker's messages."""
    for each in batch:
        await app.exporter("table").consume([{"n": int(each.body)}])


@app.handler("blocks")
async def blocks(batch):
    """Hold the event loop for as long as the test lasts."""
    sys.stdout.write("blocked\n")
    sys.stdout.flush()
    time.sleep(300)


@app.handler("texts", type=str)
async def texts(batch):
    await app.exporter("table").consume([{"n": len(each)} for each in batch])


@app.handler("numbers", type=int)
async def numbers(batch):
    await app.exporter("table").consume([{"n": each} for each in batch])


@app.handler("typeless")
async def typeless(batch):
    await app.exporter("table").consume([{"n": -1} for each in batch])


@app.handler("fails")
async def fails(batch):
    raise ValueError("no")


@app.error_handler("kept")
def kept(batch, error):
    app.kept = [*getattr(app, "kept", ()), *batch]


@app.key("itself")
def itself(item):
    return item


@app.decoder("number")
def number(message):
    return {"n": int(message.body)}


@app.sink("table")
def table(path, **options):
    return SqliteSink(path, **options)


@app.sink("away")
class Away:
    """A destination that is not there."""

    async def open(self):
        pass

    async def send(self, batch):
        raise bq.RetryableError("the destination is away")

    async def close(self):
        pass


@app.sink("closed")
class Closed(Away):
    """A destination that can't be opened."""

    async def open(self):
        raise bq.RetryableError("connection to warehouse:5432 refused")


@app.sink("of_two")
class OfTwo(Away):
    """A sink with a wrong signature."""

    async def send(self, records, keys):
        pass


@app.sink("feeder")
class Feeder(Away):
    """Puts one item into the queue `q` as soon as the service runs."""

    async def open(self):
        self.feeding = asyncio.create_task(self.feed())

    async def feed(self):
        while True:
            with contextlib.suppress(bq.QueueClosedError):
                await app.queue("q").produce({"n": 1})
                return
            await asyncio.sleep(0.01)


@app.handler("spanned")
async def spanned(batch):
    """As `rows`, in a span of the handler's own."""
    with trace.get_tracer("program").start_as_current_span("own"):
        await app.queue("rows").produce_many([{"n": int(each)} for each in batch])


@app.handler("rows_written")
async def rows_written(batch):
    sys.stdout.write("written\n")
    sys.stdout.flush()


@app.sink("feeds_one")
class FeedsOne(Feeder):
    """As `Feeder`, a number."""

    async def feed(self):
        while True:
            with contextlib.suppress(bq.QueueClosedError):
                await app.queue("q").produce(1)
                return
            await asyncio.sleep(0.01)


@app.handler("stuck")
async def stuck(batch):
    """Never return."""
    await asyncio.Event().wait()


@app.sink("moody")
class Moody(Away):
    """Does what the file `mood` says: refuses what is sent until there is one, and notes what it takes in `taken`."""

    def __init__(self, feeds, count=3, size=0, name="mood"):
        self.feeds, self.count, self.size, self.mood = feeds, count, size, Path(name)

    async def open(self):
        self.feeding = asyncio.create_task(self.feed())

    async def feed(self):
        """Hand over what is to be given up, once the service runs."""
        exporter = None
        while exporter is None:
            with contextlib.suppress(bq.QueueClosedError):
                exporter = app.exporter(self.feeds)
            await asyncio.sleep(0.01)
        for first in range(0, self.count, 500):
            await exporter.consume([self.record(n) for n in range(first, min(first + 500, self.count))])

    def record(self, number):
        return {"n": number, "text": "x" * self.size} if self.size else {"n": number}

    async def send(self, batch):
        mood = self.mood.read_text() if self.mood.exists() else "refuse"
        if mood == "refuse":
            raise bq.PermanentError("refused by the table\x1b[31m")
        if mood == "away":
            raise bq.RetryableError("the destination is away")
        if mood == "block":
            Path("blocking").touch()
            while self.mood.read_text() == "block":
                time.sleep(0.05)
        with Path("taken").open("a") as file:  # noqa: ASYNC230 - a few bytes, in a test
            file.writelines(f"{each['n']}\n" for each in batch)


not_an_app = object()
