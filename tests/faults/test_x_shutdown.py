"""Faults of list X about the end: a deadline that covers all of it, whatever hangs, and an end while it begins."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from export_kit import Destination, check, down, exporter

import batchqueue_async as bq
from batchqueue_async.testing import advance, settle


@pytest.fixture(params=["memory", "disk"])
def place(request, tmp_path):
    return None if request.param == "memory" else tmp_path / "queue"


def now() -> float:
    return asyncio.get_running_loop().time()


class Hangs(Destination):
    """Does not end when it is cancelled, in the calls that it is told; `release` lets it."""

    def __init__(self, *calls: str) -> None:
        super().__init__()
        self.calls_that_hang = calls
        self.over = False
        self.closing = self.most_closing = 0

    async def hang(self, call: str) -> None:
        while call in self.calls_that_hang and not self.over:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(3_600.0)

    async def open(self) -> None:
        await super().open()
        await self.hang("open")

    async def send(self, batch):
        await self.hang("send")
        return await super().send(batch)

    async def close(self) -> None:
        self.closing += 1
        self.most_closing = max(self.closing, self.most_closing)
        try:
            await self.hang("close")
        finally:
            self.closing -= 1


async def release(*sinks: Hangs) -> None:
    for sink in sinks:
        sink.over = True
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    await advance(1.0)


# --- the deadline covers everything


@pytest.mark.parametrize("timeout", [0.0, 0.1, 1.0, 30.0])
@pytest.mark.parametrize(
    "calls", [(), ("open",), ("send",), ("close",), ("send", "close"), ("open", "send", "close")], ids="-".join
)
async def test_x_23_whatever_hangs_the_shutdown_keeps_its_deadline(calls, timeout, place):
    sink = Hangs(*calls)
    # An opening that hangs is what the first send waits for.
    export = bq.Exporter(sink, bq.ExportConfig(path=place, batch=bq.BatchPolicy(linger=0)), check="off")
    async with export:
        await export.consume(["a", "b"])
        await settle()
        start = now()
        report = await export.shutdown(timeout)
        assert now() - start <= max(timeout, 0.25)
        if "send" in calls or "open" in calls:
            left = report.undelivered if place is None else report.on_disk
            assert left == (["a", "b"] if place is None else 2)
        else:
            assert report.complete
        assert sink.most_closing <= 1
    await release(sink)


async def test_x_23_a_callback_or_another_exporter_that_hangs_is_left_behind(place):
    async def forever(_records, _reason):
        while not over:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(3_600.0)

    over = False
    sink = Destination(answer=lambda _: bq.PermanentError("400"))
    async with exporter(sink, place, on_dead_letter=forever) as export:
        await export.consume(["a"])
        await settle()
        start = now()
        await export.shutdown(2.0)
        assert now() - start <= 2.0
    over = True
    await release()


async def test_x_23_a_dead_letter_exporter_without_room_is_left_behind(place):
    dead = exporter(Destination(answer=lambda _: down()), max_records=1, overflow="block", block_timeout=None)
    sink = Destination(answer=lambda _: bq.PermanentError("400"))
    async with dead:
        await dead.consume(["full"])
        config = bq.ExportConfig(path=place, batch=bq.BatchPolicy(linger=0))
        async with bq.Exporter(sink, config, name="other", dead_letters=dead) as export:
            await export.consume(["a"])
            await settle()
            start = now()
            report = await export.shutdown(2.0)
            assert now() - start <= 2.0
        assert report.undelivered == ["a"] if place is None else report.on_disk == 1
        await dead.shutdown(0)


async def test_x_23_a_disk_that_hangs_at_the_end_is_left_behind(tmp_path, logs):
    export = exporter(Destination(), tmp_path / "queue")
    async with export:
        await export.consume(["a"])
        await export.flush()
        queue = export._engine.disk.queue
        close, stuck = queue.close, asyncio.Event()

        async def hang():
            await stuck.wait()
            await close()

        queue.close = hang
        start = now()
        await export.shutdown(2.0)
        assert now() - start <= 2.0
    assert "send_queue_close_stuck" in [event["event"] for event in logs]
    stuck.set()
    await settle()
    async with exporter(Destination(), tmp_path / "queue") as again:
        check(again)


async def test_x_23_what_drains_in_time_takes_no_more_than_it_needs(place):
    sink = Destination(latency=0.5)
    async with exporter(sink, place) as export:
        await export.consume(["a"])
        report = await export.shutdown(30.0)
    assert report.elapsed == pytest.approx(0.5)
    assert report.complete


# --- the end while it begins


@pytest.mark.parametrize("timeout", [0.0, 5.0])
@pytest.mark.parametrize("calls", [(), ("open",), ("close",)], ids="-".join)
@pytest.mark.parametrize("turns", range(6))
async def test_x_30_a_shutdown_ends_an_opening(turns, calls, timeout, place):
    class Slow(Hangs):
        async def open(self):
            await super().open()
            await asyncio.sleep(10.0)

    sink = Slow(*calls)
    export = exporter(sink, place)
    opening = asyncio.create_task(export.__aenter__())
    for _ in range(turns):
        await asyncio.sleep(0)
    start = now()
    first, second = await asyncio.gather(export.shutdown(timeout), export.shutdown(timeout))
    assert now() - start <= max(timeout, 0.25)
    assert first == second == export.report
    with pytest.raises(bq.QueueClosedError, match="shut down while it was opening"):
        await asyncio.wait_for(opening, 1.0)
    assert export.closed
    with pytest.raises(bq.QueueClosedError):
        await export.consume(["a"])
    await release(sink)
    again = Destination()
    async with exporter(again, place) as other:  # the directory was given back
        await other.consume(["b"])
    assert again.records == ["b"]


@pytest.mark.parametrize("turns", range(12))
async def test_x_30_an_opening_that_is_cancelled_at_any_turn_gives_everything_back(turns, place):
    sink = Destination()
    export = exporter(sink, place)
    opening = asyncio.create_task(export.__aenter__())
    for _ in range(turns):
        await asyncio.sleep(0)
    opening.cancel()
    (result,) = await asyncio.gather(opening, return_exceptions=True)
    if result is export:
        await export.shutdown()
    else:
        assert isinstance(result, asyncio.CancelledError)
        assert export.closed
    async with exporter(sink, place) as again:
        await again.consume(["a"])
    assert sink.records == ["a"]


async def test_x_30_an_opening_whose_error_comes_first_raises_it(place):
    sink = Destination(opening=[bq.PermanentError("no such place")])
    export = exporter(sink, place)
    with pytest.raises(bq.PermanentError, match="no such place"):
        await export.__aenter__()
    assert await export.shutdown() == export.report
