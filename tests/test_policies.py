"""How many workers and partitions: arithmetic."""

from __future__ import annotations

import copy
import math
import os
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

import batchqueue_async as bq
from batchqueue_async import policies

WORKERS = bq.WorkerPolicy
PARTITIONS = bq.PartitionPolicy


@pytest.mark.parametrize(
    ("policy", "cores", "workers"),
    [
        (WORKERS.fixed(1), 64, 1),
        (WORKERS.fixed(8), 2, 8),
        (WORKERS.cpu_cores(1.0), 8, 8),
        (WORKERS.cpu_cores(0.5), 8, 4),
        (WORKERS.cpu_cores(0.25), 8, 2),
        (WORKERS.cpu_cores(2.0), 8, 16),
        (WORKERS.cpu_cores(0.25), 2, 1),  # half rounds up
        (WORKERS.cpu_cores(0.25), 1, 1),  # never 0
        (WORKERS.cpu_cores(0.5), 3, 2),  # 1.5
        (WORKERS.cpu_cores(0.5), 5, 3),  # 2.5: up, not to even
        (WORKERS.cpu_cores_with_base(1, 0.25), 8, 3),
        (WORKERS.cpu_cores_with_base(2, 0), 8, 2),
        (WORKERS.cpu_cores_with_base(0, 0.1), 1, 1),
        (WORKERS.io_bound(), 1, 4),
        (WORKERS.io_bound(), 16, 64),
        (WORKERS.io_bound(), 50, 200),
        (WORKERS.io_bound(), 128, 200),
    ],
)
def test_workers(policy, cores, workers):
    assert policy.resolve(cores) == workers
    assert policy.resolve(cpu_count=cores) == workers


def test_workers_of_this_machine():
    assert WORKERS.cpu_cores(1.0).resolve() == policies.available_cpus() >= 1


def test_the_cores_are_those_that_the_process_may_use(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 3, 5}, raising=False)
    assert WORKERS.cpu_cores(1.0).resolve() == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert WORKERS.cpu_cores(1.0).resolve() == 1


@given(st.integers(1, 1000), st.floats(0.01, 10), st.integers(0, 50))
def test_there_is_always_a_worker_and_more_cores_never_give_fewer(cores, multiplier, base):
    policy = WORKERS.cpu_cores_with_base(base, multiplier)
    assert 1 <= policy.resolve(cores) <= policy.resolve(cores + 1)
    assert abs(policy.resolve(cores) - max(1, base + multiplier * cores)) <= 0.5 + 1e-9


@pytest.mark.parametrize(
    ("policy", "workers", "weight", "partitions"),
    [
        (PARTITIONS.fixed(4), 8, 1000, 4),
        (PARTITIONS.worker_multiply(2), 8, 1000, 16),
        (PARTITIONS.adaptive(), 8, 0, 8),
        (PARTITIONS.adaptive(), 8, 100, 100),
        (PARTITIONS.adaptive(), 8, 200, 200),
        (PARTITIONS.adaptive(), 8, 201, 200),
        (PARTITIONS.adaptive(), 8, 202, 201),
        (PARTITIONS.adaptive(), 8, 500, 350),
        (PARTITIONS.adaptive(), 8, 704.35, 452),
        (PARTITIONS.adaptive(), 8, 642 * 1.0 + 1247 * 0.05, 452),
        (PARTITIONS.adaptive(), 8, 1889, 1044),
        (PARTITIONS.adaptive(), 8, 0.05, 1),
        (PARTITIONS.adaptive(), 8, 5e-324, 1),
        (PARTITIONS.adaptive(), 8, sum([0.1] * 10), 1),  # 0.9999999999999999
        (PARTITIONS.adaptive(), 8, sum([0.05] * 60), 3),  # 3.0000000000000013
        (PARTITIONS.adaptive(2), 3, 10, 8),
    ],
)
def test_partitions(policy, workers, weight, partitions):
    assert policy.resolve(workers, weight) == partitions


@given(st.integers(1, 64), st.floats(0, 1e4), st.floats(0, 100), st.integers(1, 50))
def test_more_weight_never_gives_fewer_partitions(workers, weight, more, multiplier):
    policy = PARTITIONS.adaptive(multiplier)
    if weight > 0:
        assert 1 <= policy.resolve(workers, weight) <= policy.resolve(workers, weight + more)
    assert policy.resolve(workers) == workers


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: WORKERS.fixed(0), r"WorkerPolicy.fixed: count=0 is below 1; set count to 1 or more"),
        (lambda: WORKERS.fixed(2.0), r"WorkerPolicy.fixed: count=2.0 is not a whole number"),
        (lambda: WORKERS.fixed(True), r"WorkerPolicy.fixed: count=True is not a whole number"),
        (lambda: WORKERS.cpu_cores(0), r"WorkerPolicy.cpu_cores: multiplier=0 is not above 0"),
        (lambda: WORKERS.cpu_cores("1"), r"WorkerPolicy.cpu_cores: multiplier='1' is not a finite number"),
        (lambda: WORKERS.cpu_cores(math.inf), r"multiplier=inf is not a finite number"),
        (lambda: WORKERS.cpu_cores_with_base(-1, 1), r"WorkerPolicy.cpu_cores_with_base: base=-1 is below 0"),
        (lambda: WORKERS.cpu_cores_with_base(0, 0), r"multiplier=0 with base=0 gives no worker; raise either"),
        (lambda: WORKERS.cpu_cores_with_base(1, -0.5), r"multiplier=-0.5 is below 0"),
        (lambda: WORKERS.io_bound().resolve(0), r"WorkerPolicy: cpu_count=0 is below 1"),
        (lambda: PARTITIONS.fixed(0), r"PartitionPolicy.fixed: count=0 is below 1"),
        (lambda: PARTITIONS.worker_multiply(0), r"PartitionPolicy.worker_multiply: multiplier=0 is below 1"),
        (lambda: PARTITIONS.adaptive(0), r"PartitionPolicy.adaptive: multiplier=0 is below 1"),
        (lambda: PARTITIONS.adaptive().resolve(0), r"PartitionPolicy: workers=0 is below 1"),
        (lambda: PARTITIONS.adaptive().resolve(1, -1), r"PartitionPolicy: weight=-1 is below 0"),
        (lambda: PARTITIONS.adaptive().resolve(1, math.nan), r"weight=nan is not a finite number"),
    ],
)
def test_nonsense_is_refused_where_it_is_written(make, message):
    with pytest.raises(bq.ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        (WORKERS.fixed(4), "fixed(4)"),
        (WORKERS.cpu_cores(0.5), "cpu_cores(0.5)"),
        (WORKERS.cpu_cores_with_base(1, 0.25), "cpu_cores_with_base(1, 0.25)"),
        (WORKERS.io_bound(), "io_bound()"),
        (PARTITIONS.fixed(4), "fixed(4)"),
        (PARTITIONS.worker_multiply(2), "worker_multiply(2)"),
        (PARTITIONS.adaptive(), "adaptive(25)"),
    ],
)
def test_policies_read_as_they_are_written(policy, text):
    assert str(policy) == text


# -- copies ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_a_copy_of_round_robin_has_turns_of_its_own(again):
    select = bq.round_robin()
    assert [select("item", 3) for _ in range(4)] == [0, 1, 2, 0]
    other = again(select)
    assert [other("item", 3), other("item", 3), select("item", 3)] == [0, 1, 1]
    assert other == select


def test_round_robin_can_go_to_a_process_without_the_compiled_hot_path():
    assert b"hotpath" not in pickle.dumps(bq.QueueConfig(selector=bq.round_robin()))
