"""CPython's own tests of `asyncio.Queue`, with a partition in its place.

Left out are those that look into private attributes, and what a partition does not have: `maxsize`, `join` and
`task_done`, `shutdown`, the class of `asyncio.Queue[int]`, and the queues of another order.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import re
import sys
import unittest
from typing import Any, TypeVar

import pytest

from batchqueue_async.queue.partition import Partition

cpython: Any = pytest.importorskip("test.test_asyncio.test_queues", reason="this Python comes without its tests")
T = TypeVar("T")

ELSEWHERE = re.compile(r"\._[a-z]|\.join\(|task_done|shutdown|\.maxsize|GenericAlias")
SUITES = (cpython.QueueBasicTests, cpython.QueueGetTests, cpython.QueuePutTests)


class AsyncioQueue(Partition[T]):
    """A partition, made as an `asyncio.Queue` is."""

    def __init__(self, maxsize: float = 0) -> None:
        super().__init__(0, math.ceil(maxsize) if maxsize > 0 else sys.maxsize)


def cases() -> list[Any]:
    found = [(suite, name) for suite in SUITES for name in unittest.defaultTestLoader.getTestCaseNames(suite)]
    return [
        pytest.param(suite, name, id=f"{suite.__name__}.{name}")
        for suite, name in found
        if not ELSEWHERE.search(inspect.getsource(getattr(suite, name)))
    ]


@pytest.mark.real_time
@pytest.mark.parametrize(("suite", "name"), cases())
def test_cpythons_test_of_asyncio_queue(suite, name, monkeypatch):
    monkeypatch.setattr(asyncio, "Queue", AsyncioQueue)
    result = unittest.TestResult()
    suite(name).run(result)
    assert result.testsRun == 1
    assert not [text for _, text in (*result.errors, *result.failures)]


def test_most_of_them_are_run():
    assert len(cases()) >= 18
