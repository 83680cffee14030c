"""Sizing a fleet: the arithmetic, the simulation, and both held against real exporters, in virtual time."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import replace
from random import Random

import pytest

import batchqueue_async as bq
from batchqueue_async.cli.main import main
from batchqueue_async.export.fleet import Fleet, plan
from batchqueue_async.export.fleet_simulation import Course, play

FLEET = Fleet(rate=1e6, record_bytes=300, outage=600, latency=0.05)


def test_each_limit_decides_where_it_is_the_lowest():
    assert plan(FLEET).because == "cpu"
    slow = plan(replace(FLEET, latency=1.0))
    assert slow.because == "sends"
    assert slow.processes == math.ceil(2e6 / (8 * 500 / 1.0 * 0.7))
    disk = plan(replace(FLEET, disk_rate=1e6))
    assert disk.because == "disk"
    assert disk.processes == math.ceil(1e6 * 300 / (1e6 * 0.7))


def test_the_fleet_catches_up_in_the_time_that_is_asked_for():
    asked = replace(FLEET, outage=600, catch_up=1_200)
    assert plan(asked).peak_rate == 1e6 * 1.5
    assert plan(replace(FLEET, outage=0)).peak_rate == 1e6
    assert plan(asked).processes < plan(FLEET).processes


def test_partitions_are_a_multiple_of_processes_and_none_is_too_busy():
    for rate in (1e3, 1e5, 1e7):
        found = plan(replace(FLEET, rate=rate, record_bytes=2_000))
        assert found.partitions % found.processes == 0
        assert rate * 2_000 / found.partitions <= 10e6 * 0.7


def test_a_machine_has_no_more_cores_and_network_than_it_has():
    assert plan(FLEET).machines == math.ceil(plan(FLEET).processes / 8)
    fat = plan(replace(FLEET, record_bytes=20_000, disk_rate=1e12, partition_rate=1e9))
    assert fat.network_out <= 1.25e9 * 0.7
    assert fat.machines > math.ceil(fat.processes / 8)


def test_the_directories_hold_the_outage_with_one_process_away():
    found = plan(FLEET)
    assert found.disk_bytes * (found.processes - 1) >= 1e6 * 600 * 300


def test_it_says_what_breaks_first_on_the_way_to_a_hundred_million():
    big = replace(FLEET, rate=1e8, destination_connections=50_000)
    limit, rate = plan(big).breaks_at
    assert limit == "consumer group"
    assert rate < 1e8
    assert plan(big).processes > big.group_limit
    assert plan(replace(big, destination_rate=2e6)).breaks_at == ("destination", 1e6)
    assert list(plan(big).limits.values()) == sorted(plan(big).limits.values())


@pytest.mark.parametrize("name", ["rate", "latency", "busy", "workers"])
def test_nonsense_is_refused_by_name(name):
    with pytest.raises(bq.ConfigError, match=name):
        replace(FLEET, **{name: -1})


SMALL = Fleet(rate=9_000, record_bytes=300, outage=6, latency=0.05, batch_records=100, workers=4)


def test_the_same_seed_plays_the_same_fleet():
    course = Course(seconds=20.0, outages=((5.0, 9.0),))
    assert play(SMALL, 3, course, seed=3) == play(SMALL, 3, course, seed=3)
    assert play(SMALL, 3, course, seed=3) != play(SMALL, 3, course, seed=4)


@pytest.mark.parametrize("seed", range(20))
def test_nothing_is_lost_whatever_happens(seed):
    chance = Random(seed)
    begin = chance.uniform(1, 10)
    course = Course(
        seconds=30.0,
        outages=((begin, begin + chance.uniform(0, 8)),),
        restarts=tuple((chance.uniform(0, 25), chance.randrange(3)) for _ in range(chance.randrange(4))),
        spread=chance.uniform(0, 1),
    )
    played = play(replace(SMALL, restart=3.0, rebalance=1.0), 3, course, seed=seed)
    assert played.arrived == played.delivered == 270_000
    assert math.isfinite(played.drained_at)


def test_a_fleet_that_is_too_small_never_drains():
    played = play(replace(SMALL, workers=1, latency=0.5), 1, Course(seconds=10.0))
    assert played.delivered < played.arrived
    assert played.drained_at == math.inf


@pytest.mark.parametrize("outage", [30.0, 60.0])
def test_the_plan_holds_when_it_is_played(outage):
    fleet = replace(SMALL, rate=20_000, outage=outage, process_rate=5_000, restart=5.0, rebalance=1.0)
    found = plan(fleet)
    course = Course(seconds=4 * outage, outages=((10.0, 10.0 + outage),))
    played = play(fleet, found.processes, course)
    # The backlog of the outage is gone in the time that was asked for, and fits the directories.
    assert played.peak_process * fleet.record_bytes <= found.disk_bytes
    assert played.peak_backlog == pytest.approx(fleet.rate * outage, rel=0.1)
    calm = play(fleet, found.processes, Course(seconds=10.0 + 2 * outage, outages=course.outages))
    assert calm.drained_at <= (10.0 + 2 * outage) * 1.05


def test_a_rolling_restart_costs_the_backlog_that_the_plan_says():
    fleet = replace(SMALL, outage=0, restart=5.0, rebalance=1.0, process_rate=10_000)
    found = plan(fleet)
    restarts = tuple((10.0 + 20.0 * number, number) for number in range(3))
    still, rolled = (play(fleet, 3, Course(seconds=80.0, restarts=each)) for each in ((), restarts))
    assert rolled.delivered == rolled.arrived
    assert rolled.peak_backlog > 2 * still.peak_backlog
    # All partitions stand still during a rebalance at worst: more than the one process's own share.
    assert rolled.peak_backlog <= found.restart_backlog + 3 * fleet.rate * fleet.rebalance


class Destination:
    """Takes a batch in `latency`, with the simulation's spread, and nothing while it is away."""

    concurrent = True

    def __init__(self, latency, spread, away, seed):
        self.latency, self.away, self.taken = latency, away, 0
        self._random = Random(seed)
        self._sigma = math.sqrt(math.log(1 + spread**2))

    async def open(self):
        pass

    async def send(self, records):
        loop = asyncio.get_running_loop()
        if any(begin <= loop.time() < end for begin, end in self.away):
            raise bq.RetryableError("away")
        await asyncio.sleep(self._random.lognormvariate(math.log(self.latency) - self._sigma**2 / 2, self._sigma))
        self.taken += len(records)

    async def close(self):
        pass


async def run_really(fleet, processes, course):
    """As many real exporters, on the test's virtual clock."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    away = [(began + begin, began + end) for begin, end in course.outages]
    sinks = [Destination(fleet.latency, course.spread, away, number) for number in range(processes)]

    def taken():
        return sum(sink.taken for sink in sinks)

    config = bq.ExportConfig(
        workers=bq.WorkerPolicy.fixed(fleet.workers),
        batch=bq.BatchPolicy(max_records=fleet.batch_records, linger=course.linger),
        retry=bq.RetryPolicy(initial=0.2, max_delay=course.probe),
        breaker=bq.BreakerPolicy(threshold=3, reset_timeout=course.probe),
        max_bytes="1GiB",
    )
    exporters = [bq.Exporter(sink, config, name=f"p{number}") for number, sink in enumerate(sinks)]
    for exporter in exporters:
        await exporter.__aenter__()
    peak, step, produced = 0, 0.1, 0
    while produced < fleet.rate * course.seconds:
        each = int(fleet.rate * step / processes)
        for exporter in exporters:
            await exporter.consume(list(range(each)))
        produced += each * processes
        peak = max(peak, produced - taken())
        await asyncio.sleep(max(0.0, began + produced / fleet.rate - loop.time()))
    while taken() < produced:
        peak = max(peak, produced - taken())
        await asyncio.sleep(0.02)
    drained = loop.time() - began
    for exporter in exporters:
        await exporter.shutdown()
    return produced, peak, drained


@pytest.mark.parametrize(("workers", "outage"), [(4, 4.0), (2, 2.0)])
async def test_the_simulation_agrees_with_real_exporters(workers, outage):
    # 3 exporters, 2,000 to 4,000 records per second each at most, and 1,200 that come in.
    fleet = replace(SMALL, rate=3_600, workers=workers, latency=0.1, process_rate=1e9)
    course = Course(seconds=12.0, outages=((4.0, 4.0 + outage),), probe=0.5, linger=0.05)
    produced, peak, drained = await run_really(fleet, 3, course)
    played = play(fleet, 3, course)
    assert played.delivered == produced
    assert played.peak_backlog == pytest.approx(peak, rel=0.2)
    assert played.drained_at == pytest.approx(drained, rel=0.2)


OPTIONS = ("--workers", "8", "--latency", "0.05", "--batch", "500", "--arrival", "1000000", "--record-bytes", "300")


def test_the_command_sizes_a_fleet(capsys):
    assert main(["size", *OPTIONS, "--outage", "600", "--fleet", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["processes"] == plan(FLEET).processes
    assert said["limits"] == plan(FLEET).limits


def test_the_command_plays_it_and_says_where_it_breaks(capsys):
    options = ("--outage", "5", "--fleet", "--played", "20", "--restart", "2", "--rebalance", "1")
    assert main(["size", *OPTIONS, *options]) == 0
    said = capsys.readouterr().out
    assert "breaks at" in said
    assert "consumer group" in said
    assert "played, delivered" in said
    assert main(["size", *OPTIONS, *options, "--json", "--spark"]) == 0
    played = json.loads(capsys.readouterr().out)["played"]
    assert played["arrived"] == played["delivered"] > 0


def test_the_command_speaks_of_executors_for_spark(capsys):
    assert main(["size", *OPTIONS, "--fleet", "--spark", "--outage", "60", "--cores", "4"]) == 0
    said = capsys.readouterr().out
    assert "executor cores" in said
    assert "maxOffsetsPerTrigger" in said


def test_the_command_names_what_is_missing(capsys):
    assert main(["size", "--workers", "8", "--latency", "0.05", "--fleet"]) == 2
    assert "rate" in capsys.readouterr().err
