"""SIGKILL at random moments: producers and consumers in a process of their own, an oracle here.

30 kills here; `make chaos-durable` does 1,000. The count and the losses are printed.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from batchqueue_async.durable import DurableConfig, DurableQueue

KILLS = int(os.environ.get("BATCHQUEUE_KILLS", "30"))
WORKER = Path(__file__).with_name("kill_worker.py")

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL here")


class Oracle:
    """What was promised: put and confirmed, and asked to be acknowledged."""

    def __init__(self) -> None:
        self.confirmed: set[int] = set()
        self.released: set[int] = set()
        self.lost: set[int] = set()
        self.checked = 0

    def read(self, output: bytes) -> None:
        for line in output.decode().splitlines():
            kind, number = line.split()
            (self.confirmed if kind == "P" else self.released).add(int(number))

    async def check(self, path: Path, number_of) -> None:
        """Everything that is owed is in the queue."""
        there: set[int] = set()
        async with DurableQueue.open(path, DurableConfig(lease_timeout=1_000)) as queue:
            assert queue.recovery.damaged_records == 0
            while lease := await queue.lease(500, wait=0):
                there |= {number_of(record.payload) for record in lease.records}
            assert queue.stats().records == queue.stats().leased
        self.lost |= self.confirmed - self.released - there
        self.checked += len(there)


@pytest.mark.timeout(60 + KILLS * 20)
def test_kills_lose_nothing(tmp_path, capsys):
    pytest.importorskip("cramjam")
    seed = int(os.environ.get("BATCHQUEUE_SEED", random.SystemRandom().randrange(1 << 30)))
    chance = random.Random(seed)
    oracle = Oracle()
    number_of = _number_of()
    for kill in range(KILLS):
        numbers = (kill * 1_000_000, chance.randrange(1 << 30))
        command = [sys.executable, str(WORKER), str(tmp_path / "queue"), *map(str, numbers)]
        # Unbuffered: what follows the first line belongs to `_collect`.
        with subprocess.Popen(command, bufsize=0, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            ready = process.stdout.readline()
            if ready != b"ready\n":
                pytest.fail(f"seed {seed}, kill {kill}: the worker ended: {process.stderr.read().decode()[-2_000:]}")
            output = bytearray()
            asyncio.run(_collect(process, output, chance.uniform(0.0, 0.25)))
            errors = process.stderr.read().decode()
        assert process.returncode == -signal.SIGKILL, f"seed {seed}, kill {kill}: {errors[-2_000:]}"
        oracle.read(bytes(output))
        asyncio.run(oracle.check(tmp_path / "queue", number_of))
        assert not oracle.lost, f"seed {seed}, kill {kill}: lost {sorted(oracle.lost)[:10]}"
    counts = f"{len(oracle.confirmed)} records confirmed, {oracle.checked} checked, {len(oracle.lost)} lost"
    with capsys.disabled():
        sys.stdout.write(f"\n{KILLS} kills (seed {seed}): {counts}\n")
    assert oracle.confirmed
    assert oracle.released


async def _collect(process, output: bytearray, delay: float) -> None:
    """Read what the worker says, kill it after `delay` seconds, and read the rest."""
    loop = asyncio.get_running_loop()
    loop.call_later(delay, process.kill)
    end = loop.create_future()

    def readable() -> None:
        data = os.read(process.stdout.fileno(), 1 << 20)
        output.extend(data)
        if not data and not end.done():
            end.set_result(None)

    loop.add_reader(process.stdout.fileno(), readable)
    await end
    loop.remove_reader(process.stdout.fileno())
    process.wait()


def _number_of():
    # The worker is a script: only its function is wanted here.
    source = WORKER.read_text().split("asyncio.run(main(")[0]
    namespace: dict = {"__name__": "kill_worker"}
    exec(compile(source, str(WORKER), "exec"), namespace)
    return namespace["number_of"]
