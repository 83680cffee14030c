"""The exporter's faults of list X, each by its id: what was lost, given up or held up, and is not any more."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
from export_kit import Destination, Keyed, check, down, exporter, script
from steps import STEP_LIMIT, Steps

import batchqueue_async as bq
from batchqueue_async.export import sizing
from batchqueue_async.export.control.concurrency import Scaler
from batchqueue_async.export.delivery.failover import Failover
from batchqueue_async.export.delivery.leased_batch import LeasedBatch
from batchqueue_async.export.send_queue.memory import MemoryQueue
from batchqueue_async.sinks.base import SendResult
from batchqueue_async.testing import advance, run_virtual, settle


@pytest.fixture(params=["memory", "disk"])
def place(request, tmp_path):
    return None if request.param == "memory" else tmp_path / "queue"


def now() -> float:
    return asyncio.get_running_loop().time()


class Panic(BaseException):
    """What an extension written in another language raises."""


# --- producers that wait for room at the end


@pytest.mark.parametrize("drain", [30.0, 0.15, 0.0])
@pytest.mark.parametrize("count", [2, 3, 6])
async def test_x_2_producers_that_wait_for_room_at_shutdown_are_refused_or_their_records_placed(count, drain, place):
    sink = Destination(latency=0.1)
    options = {"max_records": 1, "overflow": "block", "block_timeout": None, "drain_timeout": drain}
    confirmed: list[str] = []
    refused: list[str] = []
    async with exporter(sink, place, **options) as export:

        async def produce(number: int) -> None:
            try:
                await export.consume([f"r{number}"])
                confirmed.append(f"r{number}")
            except bq.QueueClosedError:
                refused.append(f"r{number}")

        tasks = [asyncio.create_task(produce(number)) for number in range(count)]
        await advance(0.05)
        report = await export.shutdown()
        await asyncio.wait_for(asyncio.gather(*tasks), 1.0)
    assert len(confirmed) + len(refused) == count
    if place is None:
        assert refused
        assert sorted(confirmed) == sorted({*sink.records, *report.undelivered})
    else:
        assert len(set(confirmed) - set(sink.records)) <= report.on_disk


async def test_x_2_who_was_granted_room_at_the_end_is_not_confirmed_and_lost():
    sink = Destination(latency=0.1)
    async with exporter(sink, max_records=1, overflow="block", block_timeout=None) as export:
        await export.consume(["a"])
        waiting = asyncio.create_task(export.consume(["b"]))
        await settle()
        queue = export._engine.queue
        lease = next(iter(queue._leases.values()))
        await lease.ack()  # room is reserved for the waiting call, which has not run yet
        queue.close()
        with pytest.raises(bq.QueueClosedError):
            await waiting
        assert queue.take_all() == []
        await export.shutdown(0)


# --- an outcome for every error


@pytest.mark.parametrize("error", [bq.ConfigError("token file '/run/token' can't be read"), bq.AuthError("401")])
async def test_x_3_what_is_set_up_wrong_pauses_and_drops_nothing(error, place, logs):
    sink = Destination(answer=lambda _: error)
    async with exporter(sink, place, auth_pause=1.0, batch_records=5, retry=bq.RetryPolicy(max_attempts=1)) as export:
        await export.consume(list(range(20)))
        await settle()
        stats = check(export)
        assert (stats.paused, stats.healthy, stats.dead_lettered, stats.records) == (True, False, 0, 20)
        assert stats.last_error == f"{type(error).__name__}: {error}"
        sink.answer = None
        await export.flush()
        stats = check(export)
        assert (stats.delivered, stats.dead_lettered, stats.healthy) == (20, 0, True)
    (event,) = [event for event in logs if event["event"] == "exporter_paused"][:1]
    assert str(error) in event["reason"]


async def test_x_3_a_sink_that_can_not_be_opened_for_its_configuration_pauses(place):
    sink = Destination(opening=[bq.ConfigError("ca='/etc/ca.pem' can't be read")] * 3)
    async with exporter(sink, place, auth_pause=5.0) as export:
        await export.consume(["a"])
        await advance(1.0)
        assert (check(export).paused, check(export).records) == (True, 1)
        await export.flush()
    assert sink.records == ["a"]


async def test_x_21_unknown_errors_are_tried_again_and_named_once(place, logs):
    class ClientError(Exception):
        pass

    sink = Destination(answer=script(*[ClientError("secret of a record")] * 4))
    async with exporter(sink, place) as export:
        await export.consume(list(range(10)))
        await export.flush()
        stats = check(export)
        assert (stats.delivered, stats.dead_lettered, stats.breaker_opens) == (10, 0, 0)
        assert stats.failures == {"unexpected": 4}
    named = [event for event in logs if event["event"] == "unknown_error_of_sink"]
    assert [event["error"].rpartition(".")[2] for event in named] == ["ClientError"]


async def test_x_21_within_the_limits_of_the_policy(place):
    sink = Destination(answer=lambda _: KeyError("id"))
    async with exporter(sink, place, retry=bq.RetryPolicy(initial=0.1, max_attempts=3)) as export:
        await export.consume(["a"])
        await export.flush()
        assert check(export).dead_lettered == 1
    assert len(sink.calls) == 3


async def test_x_21_a_record_that_trips_the_sink_holds_up_no_other(place):
    sink = Destination(answer=lambda batch: TypeError("not this") if 7 in batch else None)
    async with exporter(sink, place, retry=bq.RetryPolicy(initial=1.0, max_delay=10.0)) as export:
        await export.consume(list(range(64)))
        await advance(300.0)
        assert sorted(sink.records) == [number for number in range(64) if number != 7]
        assert check(export).records == 1
        await export.shutdown(0)


async def test_x_22_a_base_exception_of_a_sink_is_an_error_like_others(place):
    sink = Destination(answer=script(*[Panic("rust panicked")] * 2))
    async with exporter(sink, place, retry=bq.RetryPolicy(initial=5.0, jitter=False, max_attempts=3)) as export:
        await export.consume(["a"])
        await advance(1.0)
        stats = check(export)
        assert (len(sink.calls), dict(stats.failures), stats.backoff) == (1, {"unexpected": 1}, 5.0)
        await export.flush()
        assert check(export).delivered == 1


async def test_x_22_and_one_of_its_opening_ends_nothing(place):
    sink = Destination(opening=[ConnectionError("not there yet"), Panic("once"), Panic("twice")])
    async with exporter(sink, place, retry=bq.RetryPolicy(initial=0.05)) as export:
        await export.consume(["a"])
        await export.flush()
    assert (sink.opens, sink.records) == (4, ["a"])


# --- isolation


@pytest.mark.parametrize(
    "bad",
    [
        {*range(8), 8, 16, 32, 64, 128, 256},
        set(range(10)),
        {511},
        {number for number in range(512) if number % 2},
        {number for number in range(512) if number % 5},
    ],
)
async def test_x_4_every_good_record_of_a_refused_batch_is_delivered(bad, place):
    sink = Destination(answer=lambda batch: bq.PermanentError("400") if bad & set(batch) else None)
    async with exporter(sink, place, batch_records=512) as export:
        await export.consume(list(range(512)))
        await export.flush()
        stats = check(export)
        assert (stats.delivered, stats.dead_lettered) == (512 - len(bad), len(bad))
    assert sorted(sink.records) == sorted(set(range(512)) - bad)
    assert len(sink.calls) <= 2 * len(bad) * 10 + 1


async def test_x_4_the_extra_sends_in_a_row_are_bounded_and_the_rest_is_kept(place):
    sink = Destination(answer=lambda _: bq.PermanentError("400"))
    retry = bq.RetryPolicy(isolation_sends=20, initial=5.0, jitter=False, max_attempts=1)
    async with exporter(sink, place, retry=retry) as export:
        await export.consume(list(range(200)))
        await advance(1.0)
        assert len(sink.calls) <= 2 * 20 + 1
        assert check(export).records > 150
        await export.shutdown(0)


async def test_x_4_culprits_that_the_destination_names_cost_one_more_send(place):
    def answer(batch):
        bad = [index for index, record in enumerate(batch) if record % 100 == 7]
        return bq.PermanentError("409", culprits=[*bad, 10_000]) if bad else None

    sink = Destination(answer=answer)
    async with exporter(sink, place) as export:
        await export.consume(list(range(500)))
        await export.flush()
        assert check(export).dead_lettered == 5
    assert [len(call) for call in sink.calls] == [500, 495]


# --- the order that a sink needs


class Samples(Destination):
    needs = bq.SinkNeeds(ordering="key", key=lambda record: record[0], atomic=True)


async def test_x_6_a_declared_order_is_kept_without_being_asked_for(place):
    randomly = Random(3)
    sink = Samples(latency=0.1, answer=lambda _: down() if randomly.random() < 0.3 else None)
    retry = bq.RetryPolicy(initial=0.5, max_delay=2.0)
    async with exporter(sink, place, batch_records=7, retry=retry, breaker=bq.BreakerPolicy(enabled=False)) as export:
        for number in range(60):
            await export.consume([[key, number] for key in "abc"])
            await asyncio.sleep(0.05)
        await export.flush()
    for key in "abc":
        assert [number for found, number in sink.records if found == key] == list(range(60))
    assert max(map(len, sink.calls)) > 3  # an atomic sink gets several of a key in one send


async def test_x_6_all_in_order(place):
    randomly = Random(5)

    class Ordered(Destination):
        needs = bq.SinkNeeds(ordering="order")

    sink = Ordered(latency=0.1, answer=lambda _: down() if randomly.random() < 0.3 else None)
    retry = bq.RetryPolicy(initial=0.5, max_delay=2.0)
    async with exporter(sink, place, batch_records=7, retry=retry, breaker=bq.BreakerPolicy(enabled=False)) as export:
        for number in range(100):
            await export.consume([number])
            await asyncio.sleep(0.02)
        await export.flush()
        check(export)
    assert sink.records == list(range(100))
    assert sink.most_active == 1


async def test_x_6_or_the_configuration_is_refused_with_the_way_out():
    class NoKey(Destination):
        needs = bq.SinkNeeds(ordering="key")

    with pytest.raises(bq.ConfigError, match="set ordering='key' and key="):
        await exporter(NoKey()).__aenter__()
    failover = {"failover": bq.FailoverPolicy(), "retry": bq.RetryPolicy(max_attempts=1)}
    with pytest.raises(bq.ConfigError, match="leave out failover"):
        await exporter(Samples(), **failover).__aenter__()
    async with exporter(NoKey(), ordering="order") as export:
        await export.consume([1])


async def test_x_6_limits_of_a_sink_are_kept():
    class Narrow(Destination):
        needs = bq.SinkNeeds(max_records=3, concurrency=2)

    sink = Narrow(latency=1.0)
    async with exporter(sink, workers=bq.WorkerPolicy.fixed(8)) as export:
        await export.consume(list(range(20)))
        await export.flush()
    assert max(map(len, sink.calls)) == 3
    assert sink.most_active == 2


# --- the same request


async def test_x_7_a_repetition_with_keys_is_the_same_request(place):
    sink = Keyed(answer=script(down("the answer was lost"), bq.ThrottledError("429"), None, down()))
    async with exporter(sink, place, linger=0.2, retry=bq.RetryPolicy(initial=0.3, jitter=False)) as export:
        await export.consume(["a", "b", "c"])
        await advance(0.25)
        for number in range(10):
            await export.consume([f"d{number}"])
            await asyncio.sleep(0.1)
        await export.flush()
        check(export)
    requests = [tuple(keys) for keys in sink.keys]
    by_record: dict[str, set[tuple[str, ...]]] = {}
    for request in requests:
        for key in request:
            by_record.setdefault(key, set()).add(request)
    assert len(requests) > len(set(requests))
    assert all(len(found) == 1 for found in by_record.values())
    assert sorted(sink.records) == sorted({*sink.records})
    assert len(sink.records) == 13


async def test_x_7_what_is_kept_together_is_bounded_and_delivered_in_the_end(place):
    sink = Keyed(answer=lambda _: down())
    options = {"batch_records": 1, "breaker": bq.BreakerPolicy(enabled=False), "drain_timeout": 1e6}
    async with exporter(sink, place, workers=bq.WorkerPolicy.fixed(4), **options) as export:
        await export.consume(list(range(500)))
        await advance(4.0)
        assert len(export._engine.kept) <= export._engine.kept.most + 4 < 500
        sink.answer = None
        await export.flush()
        check(export)
    assert sorted(sink.records) == list(range(500))


# --- a cloned directory


async def test_x_9_new_records_of_a_cloned_directory_have_keys_of_their_own(tmp_path):
    image = tmp_path / "image"
    sink = Keyed(answer=lambda _: down())
    async with exporter(sink, image, drain_timeout=0) as export:
        await export.consume(["left over"])
        await settle()
    (old,) = sink.keys[0]
    keys: dict[str, list[str]] = {}
    for name in ("a", "b"):
        shutil.copytree(image, tmp_path / name)
        sink = Keyed()
        async with exporter(sink, tmp_path / name) as export:
            await export.flush()
            await export.consume([f"new {name}"])
            await export.flush()
        keys |= dict(zip(sink.records, [key for part in sink.keys for key in part], strict=True))
    assert keys["left over"] == old  # a repetition is still known as such
    assert len({old, keys["new a"], keys["new b"]}) == 3


async def test_x_9_a_directory_that_stays_where_it_is_keeps_its_keys(tmp_path):
    found = []
    for number in range(2):
        sink = Keyed()
        async with exporter(sink, tmp_path) as export:
            await export.consume([number])
            await export.flush()
        found += [key.partition("/")[0] for part in sink.keys for key in part]
    assert found[0] == found[1]


async def used(path, *records) -> dict[object, str]:
    """Deliver records through this directory; the key of each."""
    sink = Keyed()
    async with exporter(sink, path) as export:
        await export.consume(list(records))
        await export.flush()
    return dict(zip(sink.records, [key for part in sink.keys for key in part], strict=True))


async def test_x_9_a_directory_that_is_restored_in_its_place_gives_no_key_twice(tmp_path):
    place, backup = tmp_path / "queue", tmp_path / "backup"
    keys = await used(place, "before")
    shutil.copytree(place, backup)
    keys |= await used(place, "after 1", "after 2")
    inode = place.stat().st_ino
    for name in place.iterdir():
        name.unlink() if name.is_file() else shutil.rmtree(name)
    for name in backup.iterdir():
        (shutil.copy2 if name.is_file() else shutil.copytree)(name, place / name.name)
    assert place.stat().st_ino == inode
    keys |= await used(place, "restored 1", "restored 2")
    assert len(set(keys.values())) == 5


@pytest.mark.parametrize("jump", [3_600.0, -3_600.0, 1.5])
async def test_x_9_new_records_have_keys_of_their_own_when_a_running_machine_was_copied(jump, tmp_path):
    """Its memory, too: what tells is that the clock of the day is set when the copy runs on."""
    difference = 1_000.0
    sink = Keyed(answer=lambda _: down())
    async with exporter(sink, tmp_path / "queue", batch_records=1) as export:
        export._engine.disk._sources._clocks = lambda: difference
        export._engine.disk._sources._difference = difference
        await export.consume(["before"])
        await settle()
        (old,) = sink.keys[0]
        difference += 0.2  # a clock that is kept in step
        await export.consume(["same"])
        difference += jump
        await export.consume(["new"])
        sink.answer = None
        await export.flush()
        check(export)
    keys = {key for part in sink.keys for key in part}
    assert len(keys) == 3  # what was there before keeps its key
    assert len({key.partition("/")[0] for key in keys}) == 2
    assert old in keys
    assert len(await used(tmp_path / "queue", "again")) == 1


async def test_x_9_names_that_nothing_left_has_are_forgotten(tmp_path):
    sink = Keyed()
    async with exporter(sink, tmp_path / "queue") as export:
        sources = export._engine.disk._sources
        for number in range(50):
            sources._clocks = lambda number=number: number * 3_600.0
            await export.consume([number])
            await export.flush()
        assert len(sources._names) <= 2
    assert len({key for part in sink.keys for key in part}) == 50


# --- throttling


class Limited(Destination):
    """A healthy server that takes 100 requests a second: by a bucket of tokens, or by the calendar's seconds."""

    def __init__(self, burst: float | None = 100.0, retry_after: float | str | None = None):
        super().__init__()
        self.rate = 100.0
        self.burst = burst
        self.retry_after = retry_after
        self.tokens, self.then, self.refused, self.taken = burst or self.rate, 0.0, 0, 0

    async def send(self, batch):
        await asyncio.sleep(0.01)
        if self.burst is not None:
            self.tokens = min(self.burst, self.tokens + (now() - self.then) * self.rate)
        elif int(now()) != int(self.then):
            self.tokens = self.rate
        self.then = now()
        if self.tokens < 1:
            self.refused += 1
            asked = self.retry_after
            raise bq.ThrottledError("429", retry_after=int(now()) + 1 - now() if asked == "the next second" else asked)
        self.tokens -= 1
        self.taken += 1


@pytest.mark.parametrize(
    ("burst", "retry_after"),
    [
        pytest.param(100.0, None, marks=pytest.mark.untraced),
        pytest.param(100.0, 1.0, marks=pytest.mark.untraced),
        (100.0, 5.0),
        pytest.param(10.0, None, marks=pytest.mark.untraced),
        pytest.param(1.5, None, marks=pytest.mark.untraced),
        pytest.param(None, None, marks=pytest.mark.untraced),
        pytest.param(None, 1.0, marks=pytest.mark.untraced),
        pytest.param(None, "the next second", marks=pytest.mark.untraced),
    ],
)
async def test_x_11_throttling_slows_down_and_opens_no_breaker(burst, retry_after):
    """8 workers: of the 100 requests that it takes a second at least 95 are used, and at most 5 % are refused."""
    sink = Limited(burst, retry_after)
    async with exporter(sink, workers=bq.WorkerPolicy.fixed(8), batch_records=1, drain_timeout=0) as export:
        await export.consume(list(range(30_000)))
        await advance(60.0)
        taken, refused = sink.taken, sink.refused
        await advance(120.0)
        stats = check(export)
        assert stats.breaker_opens == 0
        assert stats.failures == {"throttled": sink.refused}
        assert stats.learned_rate is not None
        # While it asks to be left alone it takes nothing.
        alone = (sink.refused - refused) * (retry_after if isinstance(retry_after, float) else 0.0)
        used = (sink.taken - taken) / ((120.0 - alone) * sink.rate)
        assert used >= 0.95, used
        assert (sink.refused - refused) / (sink.taken - taken) <= 0.05


@pytest.mark.untraced
async def test_x_11_a_learned_rate_follows_a_limit_that_is_raised():
    sink = Limited()
    sink.rate = 10.0
    async with exporter(sink, workers=bq.WorkerPolicy.fixed(8), batch_records=1, drain_timeout=0) as export:
        await export.consume(list(range(30_000)))
        await advance(60.0)
        sink.rate = 40.0
        await advance(600.0)
        assert check(export).learned_rate > 25.0


async def test_x_11_configured_limits_of_requests_and_bytes():
    for policy, calls in ((bq.RatePolicy(requests=5.0), 50), (bq.RatePolicy(bytes=1_000.0), 100)):
        sink = Destination()
        async with exporter(sink, rate=policy, batch_records=1, drain_timeout=0) as export:
            await export.consume([b"x" * 100] * 1_000)
            await advance(10.0)
            assert calls - 1 <= len(sink.calls) <= calls + 2


@pytest.mark.parametrize("asked", [0.0, 1.0, 50.0])
async def test_x_12_the_later_of_the_backoff_and_what_was_asked_for(asked):
    sink = Destination(answer=lambda _: bq.RetryableError("503", retry_after=asked))
    retry = bq.RetryPolicy(initial=5.0, jitter=False)
    async with exporter(sink, retry=retry, breaker=bq.BreakerPolicy(enabled=False), drain_timeout=0) as export:
        await export.consume([1])
        await advance(60.0)
        gaps = [late - soon for soon, late in zip(sink.times, sink.times[1:], strict=False)]
        wanted = [max(asked, each) for each in (5.0, 10.0, 20.0)]
        assert gaps == pytest.approx(wanted[: len(gaps)])
        await export.shutdown(0)


# --- a record that kills the process

KILLED = """
import asyncio, os, sys
import batchqueue_async as bq

class Sink:
    concurrent = False
    async def open(self): ...
    async def send(self, batch):
        if "poison" in batch:
            os._exit(9)
    async def close(self): ...

async def main(path, first):
    retry = bq.RetryPolicy(max_attempts=3)
    async with bq.Exporter(Sink(), bq.ExportConfig(path=path, retry=retry, batch=bq.BatchPolicy(linger=0))) as export:
        if first:
            await export.consume(["good 1", "poison", "good 2"])
        await export.flush(10)
        stats = export.stats()
        letters = await export._engine.disk.queue.dead_letters()
        print(stats.delivered, [letter.reason for letter in letters])

asyncio.run(main(sys.argv[1], sys.argv[2] == "first"))
"""


def test_x_13_a_record_whose_send_kills_the_process_ends_in_the_dead_letters(tmp_path):
    program = tmp_path / "killed.py"
    program.write_text(KILLED)
    codes: list[int] = []
    out = ""
    delivered = 0
    for life in range(8):
        command = [sys.executable, str(program), str(tmp_path / "queue"), "first" if life == 0 else "again"]
        root = str(Path(bq.__file__).parents[1])
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=60, env=os.environ | {"PYTHONPATH": root}
        )
        codes.append(done.returncode)
        if done.returncode == 0:
            out = done.stdout
            break
        assert done.returncode == 9, done.stderr
    assert codes == [9, 9, 9, 0]
    delivered = int(out.split(" ", 1)[0])
    assert delivered >= 1  # the others are delivered, in this life or in the one before
    assert "3 attempts, and max_attempts=3; the process ended in each" in out


# --- what a record weighs


class Plain:
    def __init__(self, data):
        self.data = data


@pytest.mark.parametrize(
    "make",
    [
        lambda number: Plain(bytes(100_000)),
        lambda number: {
            "id": number + 10**6,
            "path": f"/a/{number}" * 2_000,
            "tags": [f"{number}-{at}" for at in range(200)],
        },
        lambda number: [[str(number) * 1_000]] * 20,
        lambda number: "ä" * 50_000 + "€" + str(number),
    ],
)
async def test_x_15_a_record_counts_for_what_it_takes_in_memory(make):
    import tracemalloc

    sink = Destination(answer=lambda _: down())
    limit = 4 << 20
    async with exporter(sink, max_bytes=limit, overflow="reject", drain_timeout=0) as export:
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        while not export.stats().refused:
            with contextlib.suppress(bq.QueueFullError):
                await export.consume([make(export.stats().accepted)])
        used = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        assert used < 1.2 * limit
        await export.shutdown(0)


async def test_x_15_a_protobuf_message_is_no_trifle():
    trace = pytest.importorskip("opentelemetry.proto.trace.v1.trace_pb2")
    from batchqueue_async.export.send_queue.weight import weigh

    assert weigh(trace.Span(name="x" * 20_000)) > 20_000


async def test_x_15_dead_letters_in_memory_are_bounded_by_bytes():
    sink = Destination(answer=lambda _: bq.TooLargeError("413"))
    async with exporter(sink, max_bytes=16 << 20) as export:
        for _ in range(20):
            await export.consume([bytes(5 << 20)])
            await export.flush()
            sink.calls.clear()
        assert check(export).dead_lettered == 20
    kept = sum(len(record) for letter in export.report.given_up for record in letter.records)
    assert 5 << 20 <= kept <= 16 << 20


# --- the sizing formula


@pytest.mark.parametrize("size", [10, 100, 1_000])
async def test_x_17_a_queue_of_the_formulas_size_drops_nothing_in_the_planned_outage(size, place):
    need = sizing.bytes_for_outage(arrival=1_000, record_bytes=size, outage=60, on_disk=place is not None)
    sink = Destination(answer=lambda _: down())
    async with exporter(sink, place, max_bytes=need, drain_timeout=0) as export:
        for _ in range(60):
            await export.consume([bytes(size)] * 1_000)
        assert dict(check(export).dropped) == {}
        await export.shutdown(0)


# --- what a call costs


async def test_x_18_dropping_among_many_delayed_records_costs_what_is_dropped():
    costs = []
    for count in (2_000, 16_000):
        answer = SendResult(rejected={index: bq.RetryableError("full") for index in range(0, 500, 2)})
        sink = Destination(answer=lambda batch, answer=answer: answer if len(batch) == 500 else None)
        options = {"max_records": count, "retry": bq.RetryPolicy(initial=1e4, max_delay=1e4), "drain_timeout": 0}
        async with exporter(sink, **options) as export:
            while check(export).records < count - 600:
                await export.consume([b"x"] * 500)
                await advance(0.1)
            for _ in range(3):
                await export.consume([b"x"] * 500)
            with Steps() as steps:
                await export.consume([b"x"] * 500)
            costs.append(steps.most)
            await export.shutdown(0)
    assert costs[1] < 1.5 * costs[0]


async def test_x_18_settling_many_records_gives_way_to_the_loop():
    worst = []
    for count in (1_000, 10_000):
        randomly = Random(1)

        def answer(batch, randomly=randomly):
            return SendResult(rejected={at: down("busy") for at in range(len(batch)) if randomly.random() < 0.5})

        policy = bq.BatchPolicy(max_records=count, max_bytes=1 << 30, linger=0)
        sink = Destination(answer=answer)
        export = exporter(sink, batch=policy, retry=bq.RetryPolicy(initial=0.01, max_delay=0.05))
        async with export:
            await export.consume([b"x%d" % number for number in range(count)])
            sink.calls = _Nothing()
            with Steps() as steps:
                await export.flush()
            check(export)
            worst.append(steps.most)
    # Twenty times as many would be a step over all of them, once for each.
    assert worst[1] < 6 * worst[0]


class _Nothing(list):
    def append(self, _):
        pass


async def test_x_18_thousands_of_records_that_are_due_at_once_wake_in_portions():
    sink = Destination(answer=lambda batch: SendResult(rejected=dict.fromkeys(range(0, len(batch), 2), down())))
    retry = bq.RetryPolicy(initial=100.0, jitter=False, multiplier=1.0)
    async with exporter(sink, retry=retry, drain_timeout=0) as export:
        await export.consume([b"x"] * 20_000)
        await advance(1.0)
        assert check(export).records == 10_000
        sink.answer = None
        with Steps() as steps:
            await export.flush()
        assert steps.most < 40_000
        assert check(export).delivered == 20_000


@pytest.mark.untraced
async def test_x_18_with_40_000_delayed_batches_no_step_is_long():
    """Each a batch of its own that failed: puts that make room, the waking of all, and their sends."""
    queue = MemoryQueue(max_records=40_000, max_bytes=None)
    await queue.put([b"x"] * 40_000)
    for number in range(40_000):
        lease = await queue.lease(1, 1_000, 0)
        await lease.nack(100.0 + number % 7)
    assert (queue.records, queue.leased) == (40_000, 0)
    with Steps() as steps:
        for _ in range(5):
            await asyncio.sleep(0)
            await queue.put([b"y"] * 500)
        assert queue.oldest == 5 * 500
        await asyncio.sleep(200.0)
        while (lease := await queue.lease(500, 1 << 20, 0)) is not None:
            await asyncio.sleep(0)
            await lease.ack()
            await asyncio.sleep(0)
    assert queue.records == 0
    assert steps.most < STEP_LIMIT


@pytest.mark.parametrize("bad", [0, 2, 3])
async def test_x_18_settling_10_000_records_has_no_long_step(bad):
    batch = bq.BatchPolicy(max_records=10_000, max_bytes=1 << 30, linger=0)
    rejected = {at: down("busy") for at in range(0, 10_000, bad)} if bad else {}
    answers = [SendResult(rejected=rejected)]
    sink = Destination(answer=lambda _: answers.pop() if answers else None)
    async with exporter(sink, batch=batch, retry=bq.RetryPolicy(initial=0.01, max_delay=0.05)) as export:
        records = [b"%d" % number for number in range(10_000)]
        with Steps() as steps:
            await export.consume(records)
            await export.flush()
        assert check(export).delivered == 10_000
    assert steps.most < STEP_LIMIT


@pytest.mark.untraced
async def test_x_18_with_100_000_batches_in_the_failover_queue_no_step_is_long():
    failover = Failover(bq.FailoverPolicy(max_entries=100_000))
    queue = MemoryQueue(max_records=None, max_bytes=None)
    await queue.put([b"x"] * 100_100)

    async def fill(count):
        for _ in range(count):
            batch = LeasedBatch([await queue.lease(1, 1_000, 0)])
            failover.add(batch, [0])
            await batch.ack()

    await fill(100_000)
    assert (failover.records, failover.oldest) == (100_000, 0)
    with Steps() as steps:
        for _ in range(100):
            await asyncio.sleep(0)
            await fill(1)  # the oldest makes room
            entry = failover.take()
            await entry.ack()
            failover.put_back()
            assert failover.oldest is not None
    assert (failover.records, failover.evicted) == (99_999, 1)
    assert steps.most < 1_000


# --- the deadline


class Stuck(Destination):
    async def close(self):
        while self.opens:
            try:
                await asyncio.sleep(3_600)
            except asyncio.CancelledError:
                if now() > 1e6:
                    raise


async def test_x_23_a_close_that_ignores_its_cancellation_does_not_hold_up_the_shutdown(place, logs):
    async with exporter(Stuck(), place, drain_timeout=0.2) as export:
        await export.consume([1])
    assert export.report.elapsed <= 0.25
    assert "sink_close_stuck" in [event["event"] for event in logs]
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        export.sink.opens = 0
        task.cancel()


async def test_x_23_nor_does_a_slow_one():
    class Slow(Destination):
        async def close(self):
            await asyncio.sleep(25.0)

    async with exporter(Slow(), drain_timeout=3.0) as export:
        await export.consume([1])
    assert export.report.elapsed <= 3.0


# --- drop_oldest


@pytest.mark.parametrize("split", [None, bq.SplitPolicy(preparers=1, senders=1)])
async def test_x_24_drop_oldest_never_raises(split):
    sink = Destination(latency=50.0)
    options = {"max_records": 1_000, "workers": bq.WorkerPolicy.fixed(4), "drain_timeout": 0, "split": split}
    async with exporter(sink, **options) as export:
        for number in range(10):
            await export.consume([number] * 500)
            await asyncio.sleep(0.01)
        await export.consume([0] * 2_500)
        stats = check(export)
        assert (stats.records, stats.refused) == (1_000, 0)
        assert stats.accepted + stats.dropped.get("newest", 0) == 7_500


# --- the key


async def test_x_25_the_key_is_asked_of_the_original_records():
    sink = Destination(latency=0.001)
    split = bq.SplitPolicy(prepare=lambda records: [str(record).encode() for record in records])
    async with exporter(sink, ordering="key", key=lambda record: record["account"], split=split) as export:
        await export.consume([{"account": number} for number in range(1_000)])
        await export.flush()
    assert len(sink.calls) == 2


# --- adaptive workers


async def test_x_26_full_batches_are_no_slow_destination_and_a_burst_meets_all_workers():
    class Sized(Destination):
        async def send(self, batch):
            await asyncio.sleep(0.002 + 0.001 * len(batch))
            self.calls.append(len(batch))

    sink = Sized()
    adaptive = bq.AdaptivePolicy(max_workers=16)
    options = {"workers": bq.WorkerPolicy.fixed(16), "max_sends": 16, "adaptive": adaptive, "drain_timeout": 0}
    async with exporter(sink, **options) as export:
        for _ in range(200):
            await export.consume([0])
            await asyncio.sleep(0.05)
        await export.consume(list(range(200_000)))
        seen = []
        for _ in range(10):
            await asyncio.sleep(2.0)
            seen.append(check(export).workers_total)
        assert min(seen) == 16


def test_x_26_after_a_lull_the_workers_are_back():
    scaler = Scaler(bq.AdaptivePolicy(max_workers=16), 8)
    for second in range(10):
        scaler.failure(float(second))
    assert scaler.workers == 1
    scaler.success(0.1, 60.0, busy=False)
    assert scaler.workers == 8


def test_x_26_a_destination_that_is_slower_whatever_we_do_keeps_its_workers():
    scaler = Scaler(bq.AdaptivePolicy(max_workers=16), 16)
    clock = 0.0
    for step in range(4_000):
        clock += 0.05
        scaler.success(0.01 if step < 200 else 0.1, clock, busy=True)
    assert scaler.workers == 16


# --- one sink, two exporters


async def test_x_27_a_sink_has_one_exporter():
    sink = Destination()
    async with exporter(sink) as first:
        with pytest.raises(bq.ConfigError, match="in use by exporter 'test'"):
            await exporter(sink).__aenter__()
        assert sink.closes == 0
        await first.consume([1])
    assert sink.records == [1]
    async with exporter(sink) as again:
        await again.consume([2])
    assert sink.records == [1, 2]


# --- counts, and what goes with them


async def test_x_28_refused_is_what_did_not_come_in():
    sink = Destination(answer=lambda _: down())
    options = {"max_records": 10, "overflow": "block", "block_timeout": 0.05, "drain_timeout": 0}
    async with exporter(sink, **options) as export:
        with pytest.raises(bq.QueueFullError) as caught:
            await export.consume(list(range(20)))
        stats = check(export)
        assert (stats.accepted, stats.refused, caught.value.accepted) == (10, 10, 10)
        assert stats.accepted_batches == 1  # a part of it came in


@pytest.mark.parametrize("overflow", ["drop_oldest", "drop_newest", "reject"])
async def test_x_28_accepted_batches_are_those_of_which_anything_came_in(overflow, place):
    sink = Destination(answer=lambda _: down())
    async with exporter(sink, place, max_records=10, overflow=overflow, drain_timeout=0) as export:
        for start in range(0, 35, 5):
            with contextlib.suppress(bq.QueueFullError):
                await export.consume(list(range(start, start + 5)))
        stats = check(export)
    assert stats.accepted_batches == (7 if overflow == "drop_oldest" else 2)
    assert stats.accepted == 5 * stats.accepted_batches


async def test_x_28_accepted_batches_count_a_call_with_a_record_that_has_no_form_on_disk(tmp_path):
    async with exporter(Destination(), tmp_path / "queue") as export:
        with pytest.raises(bq.DeliveryError):
            await export.consume(["a", object()])
        with pytest.raises(bq.DeliveryError):
            await export.consume([object()])
        assert (check(export).accepted, check(export).accepted_batches) == (1, 1)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (bq.ThrottledError("429"), "throttled"),
        (bq.RetryableError("503", error_type="server"), "server"),
        (bq.RetryableError("no answer", error_type="timeout"), "timeout"),
        (bq.RetryableError("connect: refused", error_type="refused"), "refused"),
        (bq.RetryableError("429", retry_after=1.0), "throttled"),
        (bq.RetryableError("503", retry_after=1.0, error_type="server"), "server"),
        (bq.RetryableError("no more to say"), "retryable"),
        (TimeoutError(), "timeout"),
        (ConnectionRefusedError(), "refused"),
        (ConnectionResetError(), "network"),
        (OSError("no route"), "network"),
        (EOFError(), "network"),
        (bq.AuthError("401"), "auth"),
        (bq.ConfigError("no table"), "config"),
        (bq.TooLargeError("413"), "too_large"),
        (bq.PermanentError("400"), "permanent"),
        (KeyError("x"), "unexpected"),
    ],
)
async def test_x_28_errors_are_told_apart_in_the_counts(error, kind, place):
    sink = Destination(answer=script(error))
    async with exporter(sink, place, auth_pause=1.0) as export:
        await export.consume(["a"])
        await export.flush()
        assert check(export).failures == {kind: 1}


async def test_x_28_a_send_that_takes_too_long_counts_as_timeout(place):
    sink = Destination(latency=100.0)
    async with exporter(sink, place, send_timeout=5.0, drain_timeout=0) as export:
        await export.consume(["a"])
        await advance(6.0)
        assert check(export).failures == {"timeout": 1}


async def test_x_28_a_coroutine_is_told_of_dead_letters(place):
    found = []

    async def on_dead_letter(records, reason):
        await asyncio.sleep(0)
        found.append((records, reason))

    sink = Destination(answer=lambda _: bq.PermanentError("x"))
    async with exporter(sink, place, on_dead_letter=on_dead_letter) as export:
        await export.consume([1])
        await export.flush()
    assert found == [([1], "PermanentError: x")]


async def test_x_28_the_counts_add_up_at_each_turn_of_the_loop_and_after_the_end(place):
    sink = Destination(answer=lambda _: bq.PermanentError("x"))
    async with exporter(sink, place, batch_records=100) as export:
        task = asyncio.create_task(export.consume(list(range(500))))
        while not task.done() or export.stats().records:
            check(export)
            await asyncio.sleep(0)
    sink = Destination(answer=lambda _: down())
    async with exporter(sink, drain_timeout=0) as export:
        await export.consume([1, 2, 3])
    stats = export.stats()
    assert (stats.accepted, stats.records, stats.undelivered) == (3, 0, 3)


async def test_x_28_concurrent_forgotten_is_a_warning(logs):
    class Forgotten:
        async def open(self): ...
        async def send(self, batch): ...
        async def close(self): ...

    async with exporter(Forgotten()):
        pass
    assert "sink_sends_one_at_a_time" in [event["event"] for event in logs]
    logs.clear()
    async with exporter(Destination(concurrent=False)):
        pass
    assert "sink_sends_one_at_a_time" not in [event["event"] for event in logs]


# --- what callers miss


async def test_deliver_returns_when_the_sink_took_it(place):
    sink = Destination(latency=2.0, answer=script(down()))
    async with exporter(sink, place, linger=100.0, retry=bq.RetryPolicy(initial=3.0, jitter=False)) as export:
        await export.deliver(["a", "b"])
        assert now() == pytest.approx(7.0, abs=0.1)
        assert sink.records == ["a", "b"]
        await export.deliver([])


async def test_deliver_names_what_was_not_delivered(place):
    sink = Destination(answer=lambda batch: bq.PermanentError("400") if "bad" in batch else None)
    async with exporter(sink, place) as export:
        with pytest.raises(bq.DeliveryError) as caught:
            await export.deliver(["a", "bad", "c"])
        assert [failure.items for failure in caught.value.failures] == [("bad",)]
        assert "PermanentError: 400" in str(caught.value.failures[0].error)
    assert sorted(sink.records) == ["a", "c"]


async def test_deliver_ends_with_drops_and_with_the_shutdown():
    sink = Destination(answer=lambda _: down())
    async with exporter(sink, max_records=3, breaker=bq.BreakerPolicy(threshold=1), drain_timeout=0) as export:
        first = asyncio.create_task(export.deliver(["a", "b"]))
        await settle()
        await export.consume([1, 2, 3])
        with pytest.raises(bq.DeliveryError, match="2 of 2"):
            await first
        last = asyncio.create_task(export.deliver(["c"]))
        await settle()
    with pytest.raises(bq.QueueClosedError, match="shut down before"):
        await last


@pytest.mark.parametrize("seed", range(8))
def test_deliver_many_at_once_each_gets_its_own(seed, tmp_path):
    randomly = Random(seed)

    async def run():
        sink = Destination(answer=lambda batch: bq.PermanentError("odd") if any(map(_odd, batch)) else None)
        async with exporter(sink, tmp_path / "queue" if seed % 2 else None, linger=0.05) as export:

            async def one(number):
                await asyncio.sleep(randomly.random())
                records = [number * 10 + at for at in range(randomly.randrange(1, 5))]
                try:
                    await export.deliver(records)
                except bq.DeliveryError as error:
                    return {item for failure in error.failures for item in failure.items} == set(filter(_odd, records))
                return not any(map(_odd, records))

            assert all(await asyncio.gather(*(one(number) for number in range(50))))
            check(export)

    run_virtual(run(), seed=seed)


def _odd(number: int) -> bool:
    return number % 7 == 3


async def test_the_check_at_the_start(place):
    for check_at_start, error, raises in [
        ("warn", bq.AuthError("401"), False),
        ("warn", down(), False),
        ("fail", bq.AuthError("401"), True),
        ("fail", bq.ConfigError("no such table"), True),
        ("fail", ValueError("bug"), True),
        ("fail", down(), False),
        ("fail", TimeoutError(), False),
        ("off", bq.PermanentError("never"), False),
    ]:
        sink = Destination(opening=[error])
        export = bq.Exporter(sink, bq.ExportConfig(auth_pause=1.0), check=check_at_start)
        if raises:
            with pytest.raises(type(error)):
                await export.__aenter__()
        else:
            async with export:
                assert sink.opens == (check_at_start != "off")
        assert sink.opens >= 1


async def test_a_sinks_own_check_runs_at_the_start_with_a_timeout():
    class Checked(Destination):
        async def check(self):
            await asyncio.sleep(100.0)

    async with bq.Exporter(Checked(), check="fail", check_timeout=3.0):
        assert now() == pytest.approx(3.0)


async def test_dead_letters_go_to_another_sink_and_back(place, tmp_path):
    graveyard = Destination()
    sink = Destination(answer=lambda batch: bq.PermanentError("400") if "bad" in batch else None)
    async with exporter(graveyard) as dead:
        config = bq.ExportConfig(path=place, batch=bq.BatchPolicy(linger=0))
        async with bq.Exporter(sink, config, name="orders", dead_letters=dead) as export:
            await export.consume(["a", "bad"])
            await export.flush()
            assert check(export).dead_lettered == 1
        await dead.flush()
    assert graveyard.records == [{"exporter": "orders", "reason": "PermanentError: 400", "record": "bad"}]


async def test_dead_letters_are_put_back_while_it_runs(place):
    sink = Destination(answer=lambda batch: bq.PermanentError("400"))
    async with exporter(sink, place) as export:
        await export.consume(["a", "b"])
        await export.flush()
        assert check(export).dead_lettered == 2
        sink.answer = None
        assert await export.requeue_dead_letters() == 2
        await export.flush()
        assert sorted(sink.records) == ["a", "b"]


def test_the_exporter_in_memory_needs_nothing_of_the_disk():
    program = (
        "import sys; sys.modules['fcntl'] = None\n"
        "import asyncio, batchqueue_async as bq\n"
        "from batchqueue_async.sinks.memory import MemorySink\n"
        "async def main():\n"
        "    async with bq.Exporter(MemorySink()) as export:\n"
        "        await export.consume(['a'])\n"
        "asyncio.run(main())\n"
        "assert 'batchqueue_async.durable.queue' not in sys.modules\n"
    )
    root = str(Path(bq.__file__).parents[1])
    env = os.environ | {"PYTHONPATH": root}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr


# --- several destinations


async def test_fan_out_gives_each_record_to_all_each_at_its_own_pace(place):
    good, away = Destination(), Destination(answer=lambda _: down())
    first = bq.Exporter(good, bq.ExportConfig(path=place, batch=bq.BatchPolicy(linger=0)), name="good")
    second = bq.Exporter(away, bq.ExportConfig(max_records=2, overflow="reject", drain_timeout=0), name="away")
    async with bq.FanOut(first, second) as both:
        await both.consume([1, 2])
        with pytest.raises(bq.DeliveryError, match="away did not take") as caught:
            await both.consume([3])
        assert [failure.items for failure in caught.value.failures] == [(3,)]
        await first.flush()
        assert good.records == [1, 2, 3]
        assert both.stats()["away"].records == 2
        reports = await both.shutdown()
    assert reports["away"].undelivered == [1, 2]


async def test_router_takes_the_first_match(place):
    small, large, rest = Destination(), Destination(), Destination()
    router = bq.Router(
        [
            (lambda number: number < 10, bq.Exporter(small, name="small")),
            (lambda number: number < 100, bq.Exporter(large, name="large")),
        ],
        otherwise=bq.Exporter(rest, name="rest"),
    )
    async with router:
        await router.deliver([1, 500, 50, 2])
    assert (small.records, large.records, rest.records) == ([1, 2], [50], [500])


async def test_router_refuses_what_no_route_takes():
    sink = Destination()
    async with bq.Router({"a": bq.Exporter(sink)}, by="tenant") as router:
        with pytest.raises(bq.DeliveryError, match="no route takes 1 of 2") as caught:
            await router.consume([{"tenant": "a"}, {"tenant": "b"}])
        assert caught.value.failures[0].items == ({"tenant": "b"},)
    assert sink.records == [{"tenant": "a"}]


def test_destinations_that_make_no_sense_are_refused():
    with pytest.raises(bq.ConfigError, match="named 'Destination'"):
        bq.FanOut(bq.Exporter(Destination()), bq.Exporter(Destination()))
    with pytest.raises(bq.ConfigError, match="by is missing"):
        bq.Router({"a": bq.Exporter(Destination())})
    with pytest.raises(bq.ConfigError, match="no exporter"):
        bq.FanOut()


# --- dead letters by their numbers


async def test_x_47_numbers_choose_dead_letters_without_a_path_too(place):
    sink = Destination(answer=lambda batch: bq.PermanentError("400"))
    async with exporter(sink, place) as export:
        await export.consume(["a", "b", "c", "d"])
        await export.flush()
        letters = await export.dead_letters()
        assert [letter.reason for letter in letters] == ["PermanentError: 400"] * 4
        assert [letter.payload for letter in letters] == [b"\x01a", b"\x01b", b"\x01c", b"\x01d"]
        assert len(await export.dead_letters(2)) == 2
        sink.answer = None
        told = []
        assert await export.requeue_dead_letters([letters[1].seq, 99], progress=told.extend) == 1
        assert await export.purge_dead_letters([letters[0].seq], progress=told.extend) == 1
        assert await export.purge_dead_letters(before=letters[0].died_at - 1) == 0
        assert told == [letters[1].seq, letters[0].seq]
        await export.flush()
        assert sink.records == ["b"]
        assert [letter.seq for letter in await export.dead_letters()] == [letters[2].seq, letters[3].seq]


async def test_a_record_that_has_no_form_on_disk_is_listed_by_its_repr():
    sink = Destination(answer=lambda batch: bq.PermanentError("400"))
    async with exporter(sink) as export:
        await export.consume([3 + 4j, object])
        await export.flush()
        assert [letter.payload for letter in await export.dead_letters()] == [b"\x01(3+4j)", b"\x01<class 'object'>"]
