"""How often a reader of the core has to change the file; `tests/support/walks.py` shows the walks step by step."""

from __future__ import annotations

import asyncio

import pytest
import walks


@pytest.mark.real_time
def test_a_producer_that_waits_changes_the_file_seldom():
    walk = asyncio.run(walks.waiting_produce()).of("producer")
    assert {step[1] for step in walk.steps} >= {"queue/batch_queue.py", "queue/intake.py", "queue/waiters.py"}
    assert walk.changes <= 15, walk


@pytest.mark.real_time
def test_an_item_of_a_thread_changes_the_file_seldom_on_its_way_to_the_handler():
    walk = walks.thread_to_handler()
    assert (walk.steps[0][2], walk.steps[-1][1]) == ("produce", "queue/dispatch.py")
    assert walk.changes <= 19, walk
