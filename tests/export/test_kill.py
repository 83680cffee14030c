"""SIGKILL of the whole process under load, with Kafka and PostgreSQL: every confirmed record arrives.

20 kills; `make chaos-export` does more. The counts are printed.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from kafka_tools import read

KILLS = int(os.environ.get("BATCHQUEUE_EXPORT_KILLS", "20"))
WORKER = Path(__file__).with_name("kill_worker.py")


def worker(*arguments):
    return subprocess.Popen(
        [sys.executable, str(WORKER), *map(str, arguments)], bufsize=0, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


async def output_until_killed(process, delay):
    """What it says until it is killed after `delay` seconds."""
    loop = asyncio.get_running_loop()
    loop.call_later(delay, process.kill)
    return await loop.run_in_executor(None, process.stdout.read)


async def delivered(kafka, topic):
    """The records that are in a topic, each with its key."""
    return [(json.loads(message.value)["id"], dict(message.headers)["bq-key"]) for message in await read(kafka, topic)]


@pytest.mark.timeout(120 + 15 * KILLS)
def test_kills_lose_nothing_and_postgresql_holds_each_record_once(kafka, postgres, tmp_path, capsys):
    seed = int(os.environ.get("BATCHQUEUE_SEED", random.SystemRandom().randrange(1 << 30)))
    chance = random.Random(seed)
    name = f"killed{seed}"
    place = (tmp_path, kafka.address, postgres.dsn, name)
    confirmed = {"K": set(), "P": set()}
    for kill in range(KILLS):
        with worker(*place, kill * 1_000_000, chance.randrange(1 << 30)) as process:
            if process.stdout.readline() != b"ready\n":
                pytest.fail(f"seed {seed}, kill {kill}: the worker ended: {process.stderr.read().decode()[-2_000:]}")
            output = asyncio.run(output_until_killed(process, chance.uniform(0.1, 1.0)))
            errors = process.stderr.read().decode()
            process.wait()
        assert process.returncode == -signal.SIGKILL, f"seed {seed}, kill {kill}: {errors[-2_000:]}"
        for line in output.decode().splitlines():
            kind, number = line.split()
            confirmed[kind].add(int(number))
    with worker(*place, 0, 0, "drain") as process:
        output, errors = process.communicate()
    assert output == b"done 0\n", f"seed {seed}: {errors.decode()[-2_000:]}"
    in_kafka = asyncio.run(delivered(kafka, name))
    in_postgres = Counter(map(int, postgres.sql(f"SELECT id FROM {name}")))
    times = Counter(number for number, _ in in_kafka)
    counts = f"{len(confirmed['K'])} confirmed for Kafka, {len(times)} there, {len(in_kafka) - len(times)} repeated"
    counts += f"; {len(confirmed['P'])} for PostgreSQL, {len(in_postgres)} there"
    with capsys.disabled():
        sys.stdout.write(f"\n{KILLS} kills (seed {seed}): {counts}\n")
    assert confirmed["K"] - set(times) == set()
    assert confirmed["P"] - set(in_postgres) == set()
    assert {number: count for number, count in in_postgres.items() if count > 1} == {}
    assert len(set(in_kafka)) == len(times)  # a repetition has the same key
    assert confirmed["K"]
    assert confirmed["P"]
