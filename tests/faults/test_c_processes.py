"""List C, the faults of handlers that run in worker processes."""

from __future__ import annotations

import asyncio
import os
import subprocess

import process_functions
import pytest

import batchqueue_async as bq


def processes():
    """The children of this process that work for handlers."""
    command = ["ps", "-o", "pid=,args=", "--ppid", str(os.getpid())]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return {int(line.split()[0]) for line in done.stdout.splitlines() if "anyio.to_process" in line}


@pytest.mark.real_time
async def test_c_22_a_timeout_amid_the_start_of_a_process_leaves_none_behind():
    """Whenever it comes."""
    before = processes()
    handler = bq.in_process(process_functions.spin)
    for turns in range(0, 24, 3):
        calls = [asyncio.ensure_future(handler.consume([number])) for number in range(2)]
        await asyncio.sleep(0.01 * turns)
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
        assert all(call.cancelled() for call in calls)
    # What there is now is idle, and waits for the next call.
    idle = processes() - before
    assert len(idle) <= 2
    answer = await bq.in_process(process_functions.own_pid_of).consume([1])
    assert not idle or answer in idle
