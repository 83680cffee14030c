"""Faults of list X about sending again: batches as they were, parts that get through, attempts over restarts."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from itertools import cycle
from pathlib import Path

import pytest
from export_kit import Destination, Keyed, check, down, exporter, script

import batchqueue_async as bq
from batchqueue_async.export.send_queue.attempt_log import AttemptLog
from batchqueue_async.sinks.base import SendResult
from batchqueue_async.testing import advance, settle


@pytest.fixture(params=["memory", "disk"])
def place(request, tmp_path):
    return None if request.param == "memory" else tmp_path / "queue"


def requests(sink: Keyed) -> list[tuple[str, ...]]:
    return [tuple(keys) for keys in sink.keys]


def check_requests(*sinks: Keyed) -> None:
    """Each record's key went out in one request alone, over and over where that failed."""
    of_key: dict[str, set[tuple[str, ...]]] = {}
    for sink in sinks:
        for request in requests(sink):
            for key in request:
                of_key.setdefault(key, set()).add(request)
    assert {key: len(found) for key, found in of_key.items() if len(found) > 1} == {}


# --- the same request, over restarts, in long outages, and for parts


@pytest.mark.parametrize("end", ["cut off", "killed", "answered"])
async def test_x_7_a_batch_is_the_same_request_after_a_restart(end, tmp_path):
    first = Keyed(latency=1e6 if end != "answered" else 0.0, answer=lambda _: down("the answer was lost"))
    options = {"batch_records": 3, "workers": bq.WorkerPolicy.fixed(4), "drain_timeout": 0}
    export = exporter(first, tmp_path / "queue", **options)
    await export.__aenter__()
    await export.consume([0, 1])
    await settle()  # under way, and not full
    await export.consume(list(range(2, 10)))
    await settle()
    if end == "killed":
        (tmp_path / "copy").mkdir()
        (tmp_path / "copy" / "sending.log").write_bytes((tmp_path / "queue" / "sending.log").read_bytes())
    await export.shutdown(0)
    if end == "killed":
        (tmp_path / "queue" / "sending.log").write_bytes((tmp_path / "copy" / "sending.log").read_bytes())
    before = set(requests(first))
    assert [len(each) for each in requests(first)] == [2, 3, 3, 2]
    second = Keyed(answer=script(bq.AuthError("401"), down()))
    async with exporter(second, tmp_path / "queue", batch_records=10, auth_pause=1.0) as export:
        await export.consume(["new"])
        await export.flush()
        check(export)
    assert before <= set(requests(second))
    check_requests(first, second)
    assert sorted(map(str, second.records)) == sorted([*map(str, range(10)), "new"])


async def test_x_7_a_batch_that_lost_a_record_meanwhile_is_sent_without_it(tmp_path):
    first = Keyed(latency=1e6)
    async with exporter(first, tmp_path / "queue", drain_timeout=0) as export:
        await export.consume(list(range(5)))
        await settle()
    async with bq.DurableQueue.open(tmp_path / "queue") as queue:
        lease = await queue.lease(max_records=2)
        await lease.ack()
    second = Keyed()
    async with exporter(second, tmp_path / "queue") as export:
        await export.flush()
        check(export)
    assert second.records == [2, 3, 4]


async def test_x_7_a_sink_without_keys_takes_batches_as_they_come_after_a_restart(tmp_path):
    async with exporter(Destination(latency=1e6), tmp_path / "queue", batch_records=1, drain_timeout=0) as export:
        await export.consume([1, 2])
        await settle()
    sink = Destination()
    async with exporter(sink, tmp_path / "queue") as export:
        await export.flush()
    assert sink.calls == [[1, 2]]


async def test_x_7_a_batch_is_the_same_request_after_an_outage_that_outlasts_its_lease(place):
    sink = Keyed(answer=lambda _: down())
    options = {"batch_records": 10, "retry": bq.RetryPolicy(max_delay=10.0), "send_timeout": 1.0, "drain_timeout": 0}
    durable = {"durable": bq.DurableConfig(lease_timeout=30.0)}
    async with exporter(sink, place, breaker=bq.BreakerPolicy(reset_timeout=3_000.0), **options, **durable) as export:
        await export.consume(list(range(200)))
        await advance(10_000.0)
        sink.answer = None
        await export.flush()
        check(export)
    check_requests(sink)
    assert sorted(sink.records) == list(range(200))


async def test_x_7_a_part_of_a_batch_is_the_same_request_too(place):
    """The first half of a batch that was too large was taken, or not: nobody knows."""
    sink = Keyed(answer=script(bq.TooLargeError("413"), down("lost"), None, None))
    options = {"workers": bq.WorkerPolicy.fixed(1), "retry": bq.RetryPolicy(initial=5.0, jitter=False)}
    async with exporter(sink, place, **options) as export:
        await export.consume(list(range(8)))
        await advance(1.0)
        await export.consume(list(range(8, 12)))
        await export.flush()
        check(export)
    sent = requests(sink)
    assert [len(request) for request in sent] == [8, 4, 4, 4, 4]
    assert sent[1] == sent[4]


async def test_x_7_a_part_by_key_is_the_same_request_too(place):
    sink = Keyed(answer=script(None, down("lost")))
    async with exporter(sink, place, ordering="key", key=lambda record: record // 10) as export:
        await export.consume([10, 20, 30, 11, 21, 31, 40, 12, 22])
        await settle()
        await export.consume([41, 50])
        await export.flush()
        check(export)
    sent = requests(sink)
    assert sent.count(sent[1]) == 2  # by key, the records of a batch go in waves; the second was lost
    assert [record for record in sink.records if record < 20] == [10, 11, 12]


@pytest.mark.parametrize("senders", [1, 4])
async def test_x_7_a_batch_is_the_same_request_in_a_pipeline_whose_gate_closes(senders, place):
    """A batch that waits for its sender is put back when another one is answered with an error."""
    turns = cycle([None, down("lost"), bq.ThrottledError("429", retry_after=3.0), bq.AuthError("401"), None])
    taken: dict[str, set[tuple[str, ...]]] = {}

    class Noting(Keyed):
        async def send_keyed(self, batch, keys):
            try:
                await super().send_keyed(batch, keys)
            except (bq.ThrottledError, bq.AuthError):
                raise  # it was refused: nothing of it was taken
            except bq.RetryableError:
                note(keys)
                raise
            note(keys)

    def note(keys):
        for key in keys:
            taken.setdefault(key, set()).add(tuple(keys))

    sink = Noting(latency=0.5, answer=lambda _: next(turns))
    split = bq.SplitPolicy(preparers=2, senders=senders, sends_per_sender=1, channel=8)
    options = {"auth_pause": 1.0, "batch_records": 3, "retry": bq.RetryPolicy(initial=0.5, max_delay=2.0)}
    async with exporter(sink, place, split=split, **options) as export:
        for start in range(0, 60, 4):
            await export.consume(list(range(start, start + 4)))
            await asyncio.sleep(0.3)
        await export.flush(36_000.0)
        check(export)
    assert sorted(sink.records) == list(range(60))
    assert {key: len(found) for key, found in taken.items() if len(found) > 1} == {}


# --- attempts and crashes over restarts

KILLED = """
import asyncio, os, sys
import batchqueue_async as bq

class Sink:
    concurrent = True
    async def open(self): ...
    async def send(self, batch):
        await asyncio.sleep(0.001)
        if "poison" in batch:
            os._exit(9)
    async def close(self): ...

async def main(path, first):
    batch = bq.BatchPolicy(linger=0)
    async with bq.Exporter(Sink(), bq.ExportConfig(path=path, batch=batch)) as export:
        if first:
            await export.consume(["good 1", "poison", "good 2"])
        await export.flush(10)
        stats = export.stats()
        letters = await export._engine.disk.queue.dead_letters()
        print(stats.records, [letter.reason for letter in letters])

asyncio.run(main(sys.argv[1], sys.argv[2] == "first"))
"""


@pytest.mark.timeout(400)  # eight processes, one after the other
def test_x_13_by_default_too_a_record_whose_sends_kill_the_process_comes_to_an_end(tmp_path):
    program = tmp_path / "killed.py"
    program.write_text(KILLED)
    codes: list[int] = []
    out = ""
    for life in range(10):
        command = [sys.executable, str(program), str(tmp_path / "queue"), "first" if life == 0 else "again"]
        env = os.environ | {"PYTHONPATH": str(Path(bq.__file__).parents[1])}
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=env)
        codes.append(done.returncode)
        out = done.stdout
        if done.returncode == 0:
            break
        assert done.returncode == 9, done.stderr
    assert codes == [9] * 7 + [0]  # twice with the others, which makes it a suspect, and five times alone
    assert out == "0 ['5 attempts, and max_crashes=5; the process ended in each']\n"


def test_x_37_a_process_that_is_killed_time_and_again_gives_up_no_record_for_that(tmp_path):
    """Whatever is first in the queue is under way each time; only sends of a suspect alone say anything of it."""
    for _ in range(50):
        AttemptLog(tmp_path).started(range(1, 4))
    log = AttemptLog(tmp_path)
    assert (log.crashes, log.alone) == ({1: 50, 2: 50, 3: 50}, {})
    for _ in range(3):
        log.started([2])
        log = AttemptLog(tmp_path)
    assert log.alone == {2: 3}
    log = AttemptLog(tmp_path)
    assert log.alone == {2: 3}
    log.survived([2])
    assert log.alone == {}
    assert AttemptLog(tmp_path).alone == {}


async def test_x_37_nor_does_an_exporter_whose_destination_is_away_meanwhile(tmp_path):
    for _ in range(10):
        AttemptLog(tmp_path / "queue").started([0, 1])  # one more life that was killed
        sink = Destination(answer=lambda _: down())
        async with exporter(sink, tmp_path / "queue", drain_timeout=0) as export:
            if export.stats().records == 0:
                await export.consume(["a", "b"])
            await advance(1.0)
            assert check(export).dead_lettered == 0
    sink = Destination()
    async with exporter(sink, tmp_path / "queue") as export:
        await export.flush()
    assert sorted(sink.records) == ["a", "b"]


async def test_x_13_attempts_of_a_batch_that_is_kept_together_are_counted_over_restarts(tmp_path):
    retry = bq.RetryPolicy(initial=1.0, jitter=False, multiplier=1.0, max_attempts=7)
    sends = 0
    for _ in range(5):
        sink = Keyed(answer=lambda _: down("boom"))
        async with exporter(sink, tmp_path / "queue", retry=retry, drain_timeout=0) as export:
            if not sends:
                await export.consume(["a", "b"])
            await advance(1.5)
            sends += len(sink.calls)
            letters = await export._engine.disk.queue.dead_letters()
    assert sends == 7
    assert [letter.reason for letter in letters][:1] == [
        "7 attempts, and max_attempts=7; the last was RetryableError: boom"
    ]


async def test_x_13_attempts_of_a_batch_that_was_kept_are_counted_when_its_records_are_given_back(place):
    """It is sent as it is for some times, and then in parts."""
    answers = [down(), down(), SendResult(rejected={0: down(), 1: down()}), *[down()] * 9]
    sink = Keyed(answer=script(*answers))
    retry = bq.RetryPolicy(initial=1.0, jitter=False, max_attempts=5)
    async with exporter(sink, place, retry=retry) as export:
        await export.consume(["a", "b", "c"])
        await export.flush()
        stats = check(export)
    assert (len(sink.calls), stats.delivered, stats.dead_lettered) == (5, 1, 2)


def test_x_13_a_send_that_ended_otherwise_clears_a_record_of_the_crashes_before(tmp_path):
    for _ in range(3):
        AttemptLog(tmp_path).started([7])
    log = AttemptLog(tmp_path)
    assert log.crashes == {7: 3}
    log.survived([7])
    log.started([7])
    assert AttemptLog(tmp_path).crashes == {7: 1}


def test_x_13_a_line_that_was_cut_off_says_nothing(tmp_path):
    log = AttemptLog(tmp_path)
    log.started(range(100, 300))
    text = (tmp_path / "sending.log").read_text()
    for end in range(len(text)):
        (tmp_path / "sending.log").write_text(text[:end])
        assert AttemptLog(tmp_path).crashes == {}


def test_x_13_the_log_of_attempts_stays_small(tmp_path):
    log = AttemptLog(tmp_path)
    waiting = log.started(range(0, 1_000, 2))
    log.kept(waiting)
    for number in range(30_000):
        log.ended(log.started(range(number, number + 500)))
    assert (tmp_path / "sending.log").stat().st_size < 600_000
    assert [list(each.numbers) for each in AttemptLog(tmp_path).interrupted] == [list(range(0, 1_000, 2))]


# --- two errors in turn


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("kind", [Destination, Keyed])
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (bq.TooLargeError("413"), bq.ThrottledError("429")),
        (bq.TooLargeError("413"), bq.ThrottledError("429", retry_after=1.0)),
        (bq.TooLargeError("413"), bq.AuthError("401")),
        (bq.TooLargeError("413"), down("503")),
        (bq.PermanentError("400"), bq.ThrottledError("429")),
        (bq.PermanentError("400"), down("503")),
        (bq.TooLargeError("413"), SendResult(rejected={place: bq.ThrottledError("429") for place in range(500)})),
    ],
    ids=["413-429", "413-429-after", "413-401", "413-503", "400-429", "400-503", "413-each"],
)
async def test_x_29_a_destination_that_answers_with_two_errors_in_turn_gets_its_records(
    first, second, kind, workers, place
):
    turns = cycle([False, True])
    bad = {77}

    def answer(batch):
        if next(turns):
            return _cut(second, len(batch))
        if isinstance(first, bq.TooLargeError):
            return first if len(batch) > 20 else None
        return first if bad & set(batch) else None

    sink = kind(answer=answer)
    options = {"auth_pause": 1.0, "workers": bq.WorkerPolicy.fixed(workers), "drain_timeout": 0}
    retry = bq.RetryPolicy(initial=0.5, max_delay=5.0)
    async with exporter(sink, place, retry=retry, breaker=bq.BreakerPolicy(enabled=False), **options) as export:
        await export.consume(list(range(500)))
        await advance(3_600.0)
        stats = check(export)
        assert stats.records == 0
        lost = set() if isinstance(first, bq.TooLargeError) else bad
        assert sorted(set(sink.records)) == sorted(set(range(500)) - lost)
        assert stats.dead_lettered == len(lost)
    assert len(sink.calls) < 500


def _cut(answer, count):
    if isinstance(answer, SendResult):
        return SendResult(rejected={place: answer.rejected[place] for place in range(count)})
    return answer


@pytest.mark.parametrize("ordering", ["key", "order"])
async def test_x_29_with_its_order_kept(ordering, place):
    flips = cycle([False, True])

    def answer(batch):
        return bq.ThrottledError("429") if next(flips) else bq.TooLargeError("413") if len(batch) > 4 else None

    sink = Destination(answer=answer)
    options = {"key": lambda record: record % 7} if ordering == "key" else {}
    retry = bq.RetryPolicy(initial=0.5, max_delay=5.0)
    async with exporter(sink, place, ordering=ordering, retry=retry, batch_records=32, **options) as export:
        for start in range(0, 200, 10):
            await export.consume(list(range(start, start + 10)))
            await asyncio.sleep(0.1)
        await export.flush(36_000.0)
        check(export)
    assert sorted(sink.records) == list(range(200))
    for key in range(7 if ordering == "key" else 1):
        mine = [record for record in sink.records if ordering == "order" or record % 7 == key]
        assert mine == sorted(mine)


async def test_x_29_isolation_with_very_few_sends_in_a_row_gets_there(place):
    sink = Destination(answer=lambda batch: bq.PermanentError("400") if 333 in batch else None)
    retry = bq.RetryPolicy(isolation_sends=2, initial=1.0)
    async with exporter(sink, place, retry=retry) as export:
        await export.consume(list(range(500)))
        await export.flush(3_600.0)
        assert (check(export).delivered, check(export).dead_lettered) == (499, 1)


async def test_x_29_so_do_batches_of_the_failover_queue():
    turns = cycle([False, True])
    sink = Destination(answer=lambda _: down())
    retry = bq.RetryPolicy(initial=0.1, max_attempts=1)
    failover = bq.FailoverPolicy(interval=1.0)
    options = {"breaker": bq.BreakerPolicy(enabled=False), "drain_timeout": 0}
    async with exporter(sink, retry=retry, failover=failover, **options) as export:
        await export.consume(list(range(64)))
        await advance(0.5)
        assert check(export).failover_records == 64
        sink.answer = lambda batch: (
            bq.ThrottledError("429") if next(turns) else bq.TooLargeError("413") if len(batch) > 4 else None
        )
        await advance(600.0)
        assert check(export).failover_records == 0
    assert sorted(sink.records) == list(range(64))
