"""The pure parts of the exporter, without a loop: breaker, backoff, budget, scaling, sizing, codec, configuration."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import json
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

import batchqueue_async as bq
from batchqueue_async.cli.main import main
from batchqueue_async.export import sizing
from batchqueue_async.export.control.backoff import Backoff, Budget
from batchqueue_async.export.control.breaker import REFUSED, Breaker
from batchqueue_async.export.control.concurrency import Scaler
from batchqueue_async.export.control.send_gate import SendGate
from batchqueue_async.export.delivery.classify import Disposition, classify, reason
from batchqueue_async.export.send_queue import codec
from batchqueue_async.export.send_queue.weight import weigh, weights

# --- the breaker


class BreakerMachine(RuleBasedStateMachine):
    """Any order of asking, answers, delays and lost tickets; beside it, what the document says of the states."""

    def __init__(self):
        super().__init__()
        self.breaker = Breaker(bq.BreakerPolicy(threshold=3, reset_timeout=10.0))
        self.now = 0.0
        self.tickets: list[int] = []
        self.probe = None
        self.opened_at = None

    @rule(seconds=st.floats(0.0, 15.0))
    def wait(self, seconds):
        self.now += seconds

    @rule()
    def ask(self):
        state = self.breaker.state
        ticket = self.breaker.acquire(self.now)
        if state == "closed":
            assert ticket != REFUSED
        elif self.probe is not None:
            assert ticket == REFUSED, "two probes"
        elif self.now < self.opened_at + 10.0:
            assert ticket == REFUSED, "open"
        else:
            assert ticket != REFUSED
            assert self.breaker.state == "half_open"
            self.probe = ticket
        if ticket != REFUSED:
            self.tickets.append(ticket)

    def _pop(self, data):
        return self.tickets.pop(data.draw(st.integers(0, len(self.tickets) - 1)))

    @rule(data=st.data(), well=st.booleans())
    def answer(self, data, well):
        if not self.tickets:
            return
        ticket = self._pop(data)
        before = self.breaker.state
        if well:
            self.breaker.success(ticket)
        else:
            self.breaker.failure(ticket, self.now)
        if ticket == self.probe and before == "half_open":
            assert self.breaker.state == ("closed" if well else "open")
            self.probe = None
        elif before != "closed":
            assert self.breaker.state == before, "an answer from before the breaker opened has a say"
        if before != "open" and self.breaker.state == "open":
            self.opened_at = self.now

    @rule(data=st.data())
    def lose(self, data):
        if not self.tickets:
            return
        ticket = self._pop(data)
        before = self.breaker.state
        self.breaker.release(ticket)
        assert self.breaker.state == before
        if ticket == self.probe:
            self.probe = None

    @invariant()
    def waits_make_sense(self):
        wait = self.breaker.wait(self.now)
        if self.breaker.state == "closed":
            assert wait == 0.0
        elif self.probe is not None:
            assert wait is None
        else:
            assert wait == pytest.approx(max(0.0, self.opened_at + 10.0 - self.now))
        assert 1 <= self.breaker.limit(8) <= 8
        assert self.breaker.failures < 3


TestBreaker = BreakerMachine.TestCase
TestBreaker.settings = settings(max_examples=200, stateful_step_count=40)


def test_only_failures_in_a_row_open_the_breaker():
    breaker = Breaker(bq.BreakerPolicy(threshold=3))
    for _ in range(50):
        breaker.failure(breaker.acquire(0.0), 0.0)
        breaker.failure(breaker.acquire(0.0), 0.0)
        breaker.success(breaker.acquire(0.0))
    assert (breaker.state, breaker.opens) == ("closed", 0)


def test_a_disabled_breaker_never_opens():
    breaker = Breaker(bq.BreakerPolicy(enabled=False, threshold=1))
    for _ in range(50):
        breaker.failure(breaker.acquire(0.0), 0.0)
    assert breaker.state == "closed"


def test_the_ramp_lets_one_more_pass_with_each_success_and_can_be_turned_off():
    for ramp, limits in ((True, [1, 2, 3, 4, 4]), (False, [4, 4, 4, 4, 4])):
        breaker = Breaker(bq.BreakerPolicy(threshold=1, reset_timeout=1.0, ramp=ramp))
        breaker.failure(breaker.acquire(0.0), 0.0)
        assert breaker.limit(4) == 1
        found = []
        for _ in range(5):
            breaker.success(breaker.acquire(2.0))
            found.append(breaker.limit(4))
        assert found == limits


def test_the_gate_gives_leave_only_where_all_of_it_does():
    gate = SendGate(bq.ExportConfig(breaker=bq.BreakerPolicy(threshold=1, reset_timeout=10.0), auth_pause=20.0))
    first, second = gate.acquire(0.0), gate.acquire(0.0)
    gate.failed(first, 0.0)
    gate.refused(second, 0.0)
    assert gate.wait(5.0) == 15.0
    assert gate.acquire(15.0) is None  # the breaker would, the pause does not
    probe = gate.acquire(20.0)
    assert probe is not None
    assert gate.wait(20.0) is None
    gate.failed(probe, 20.0, hold=100.0)
    assert gate.wait(31.0) == 89.0
    probe = gate.acquire(120.0)
    gate.answered(probe)
    assert (gate.health.state, gate.auth.state, gate.wait(120.0)) == ("closed", "closed", 0.0)


# --- retrying


@given(
    initial=st.floats(0.001, 100),
    multiplier=st.floats(1.0, 10.0),
    factor=st.floats(1.0, 1e6),
    attempts=st.integers(0, 10**9),
)
def test_delays_never_leave_their_bounds(initial, multiplier, factor, attempts):
    policy = bq.RetryPolicy(initial=initial, multiplier=multiplier, max_delay=initial * factor, jitter=False)
    backoff = Backoff(policy, Random(0))
    assert initial * 0.999 <= backoff.delay(attempts) <= policy.max_delay
    assert backoff.delay(attempts) <= backoff.delay(attempts + 1)


@given(st.lists(st.tuples(st.sampled_from(["take", "earn", "back", "wait"]), st.floats(0.0, 5.0)), max_size=200))
def test_a_budget_never_gives_out_more_than_it_had(steps):
    policy = bq.RetryBudget(per_second=2.0, share=0.5, burst=5)
    budget, now, given_out, came_in = Budget(policy, 0.0), 0.0, 0, 5.0
    for step, seconds in steps:
        if step == "wait":
            now += seconds
        elif step == "earn":
            budget.earn()
            came_in += 0.5
        elif step == "back" and given_out:
            budget.give_back()
            given_out -= 1
        elif step == "take":
            wait = budget.take(now)
            assert 0.0 <= wait <= 10.0 + 1e-3
            given_out += wait == 0.0
        assert given_out <= came_in + 2.0 * now + 1e-3


def test_whoever_is_told_to_wait_finds_a_token_then():
    budget = Budget(bq.RetryBudget(per_second=4.0, burst=1), 0.0)
    assert budget.take(0.0) == 0.0
    waits = [budget.take(0.0) for _ in range(8)]
    assert waits == pytest.approx([0.25 * (number + 1) for number in range(8)])
    for wait in waits:
        assert budget.take(wait) == 0.0


@pytest.mark.parametrize(
    ("error", "disposition", "kind"),
    [
        (bq.RetryableError("x"), Disposition.RETRY, "retryable"),
        (bq.RetryableError("x", retry_after=0), Disposition.SLOW_DOWN, "throttled"),
        (bq.RetryableError("x", retry_after=0, error_type="server"), Disposition.SLOW_DOWN, "server"),
        (bq.ThrottledError("x"), Disposition.SLOW_DOWN, "throttled"),
        (bq.ConfigError("x"), Disposition.PAUSE, "config"),
        (bq.TooLargeError("x"), Disposition.SPLIT, "too_large"),
        (bq.AuthError("x"), Disposition.PAUSE, "auth"),
        (bq.PermanentError("x"), Disposition.GIVE_UP, "permanent"),
        (bq.SinkError("x"), Disposition.UNKNOWN, "unexpected"),
        (KeyError("x"), Disposition.UNKNOWN, "unexpected"),
        (TimeoutError(), Disposition.RETRY, "timeout"),
        (BrokenPipeError(), Disposition.RETRY, "network"),
        (ConnectionRefusedError(), Disposition.RETRY, "refused"),
        (FileNotFoundError(), Disposition.RETRY, "network"),
    ],
)
def test_an_error_is_classified_by_its_class(error, disposition, kind):
    assert classify(error) == (disposition, kind)


def test_a_reason_quotes_only_errors_that_are_meant_for_it():
    assert reason(bq.PermanentError("400: no such field")) == "PermanentError: 400: no such field"
    assert reason(bq.PermanentError()) == "PermanentError"
    assert reason(ValueError("password=hunter2")) == "ValueError"


# --- scaling


def test_workers_grow_one_by_one_while_they_are_busy_and_the_destination_keeps_up():
    scaler = Scaler(bq.AdaptivePolicy(max_workers=5, interval=1.0), 2)
    for step in range(1, 100):
        scaler.success(0.05, step * 0.1, busy=True)
        assert scaler.workers == min(5, 2 + int(step * 0.1 + 1e-9))
    scaler.success(0.05, 100.0, busy=False)
    assert scaler.workers == 5


def test_they_shrink_by_a_share_on_latency_and_on_errors():
    scaler = Scaler(bq.AdaptivePolicy(max_workers=16, interval=1.0, decrease=0.5, alpha=0.5), 16)
    scaler.success(0.05, 0.5, busy=True)
    now = 1.0
    while scaler.workers == 16:
        scaler.success(0.5, now, busy=True)
        now += 0.01
    assert scaler.workers == 8
    scaler.failure(now)
    assert scaler.workers == 8  # once in an interval
    scaler.failure(now + 1.0)
    assert scaler.workers == 4
    for step in range(10):
        scaler.failure(now + 2.0 + step)
    assert scaler.workers == 1


def test_a_destination_that_is_slower_for_good_is_the_new_measure():
    scaler = Scaler(bq.AdaptivePolicy(max_workers=8, interval=1.0), 8)
    for step in range(50):
        scaler.success(0.05, step * 1.0, busy=True)
    for step in range(2_000):
        scaler.success(0.2, 50.0 + step, busy=True)
    assert scaler.workers == 8
    assert scaler.latency == pytest.approx(0.2)


@given(st.lists(st.tuples(st.booleans(), st.floats(0.0, 10.0), st.floats(0.0, 3.0)), max_size=100))
def test_workers_stay_within_their_bounds(steps):
    scaler, now = Scaler(bq.AdaptivePolicy(min_workers=2, max_workers=6), 100), 0.0
    assert scaler.workers == 6
    for well, latency, pause in steps:
        now += pause
        if well:
            scaler.success(latency, now, busy=True)
        else:
            scaler.failure(now)
        assert 2 <= scaler.workers <= 6


# --- sizing


def test_the_documents_example():
    answer = sizing.drain(workers=8, latency=0.05, backlog=10_000)
    assert (answer.batches_per_second, answer.seconds) == (160.0, 62.5)


def test_a_backlog_that_grows_never_drains():
    assert sizing.drain(workers=1, latency=1.0, backlog=1, arrival=2.0).seconds == float("inf")
    assert sizing.drain(workers=1, latency=1.0, backlog=0, arrival=2.0).seconds == 0.0
    assert sizing.drain(workers=2, latency=0.5, backlog=300, batch_records=10, arrival=10.0).seconds == 10.0


@given(st.integers(1, 1000), st.floats(0.001, 10.0), st.integers(1, 1000))
def test_workers_for_a_rate_are_enough_and_one_less_is_not(workers, latency, batch):
    rate = sizing.drain(workers=workers, latency=latency, backlog=0, batch_records=batch).records_per_second
    assert sizing.workers_for(rate=rate, latency=latency, batch_records=batch) == workers


def test_memory_honours_the_limit(monkeypatch):
    monkeypatch.setattr(sizing, "memory_limit", lambda: 1_000_000)
    assert sizing.memory_share(0.10) == 85_000
    assert bq.ExportConfig.for_memory(0.5, limit_ratio=1.0).byte_limit == 500_000


@pytest.mark.parametrize("options", [{"workers": 0}, {"latency": 0.0}, {"backlog": -1}, {"latency": float("nan")}])
def test_numbers_that_make_no_sense_are_refused(options):
    with pytest.raises(bq.ConfigError, match=next(iter(options))):
        sizing.drain(**{"workers": 1, "latency": 1.0, "backlog": 1} | options)
    with pytest.raises(bq.ConfigError, match="share"):
        sizing.memory_share(1.5)


def test_the_command_answers(capsys):
    assert main(["size", "--workers", "8", "--latency", "0.05", "--backlog", "10000"]) == 0
    out = capsys.readouterr().out
    assert "160" in out
    assert "62.5" in out
    options = ["--arrival", "1000", "--record-bytes", "1024", "--outage", "3600", "--memory-percent", "0.1", "--json"]
    assert main(["size", "--workers", "1", "--latency", "1", "--backlog", "5", *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["outage_bytes"] == 3_916_800_000
    assert found["seconds"] is None
    assert found["memory_bytes"] > 0
    assert main(["size", "--workers", "1", "--latency", "1", "--backlog", "5", "--arrival", "9"]) == 0
    assert "never" in capsys.readouterr().out
    assert main(["size", "--workers", "0", "--latency", "1"]) == 2
    assert "workers=0" in capsys.readouterr().err


# --- the codec

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(JSON)
def test_plain_values_come_back_equal(value):
    assert codec.decode(codec.encode(value)) == value


@given(st.lists(st.binary() | st.text()))
def test_batches_are_encoded_as_their_records_are(batch):
    assert codec.encode_all(batch) == [codec.encode(record) for record in batch]
    assert codec.decode_all(codec.encode_all(batch)) == batch


@given(st.binary())
def test_foreign_bytes_give_a_record_or_a_permanent_error(data):
    with contextlib.suppress(bq.PermanentError):
        codec.decode(data)


class Point(msgspec.Struct):
    x: int


@dataclasses.dataclass
class Pair:
    a: int


def test_what_other_records_become():
    when = dt.datetime(2026, 1, 2, tzinfo=dt.UTC)
    assert codec.decode(codec.encode(Point(1))) == {"x": 1}
    assert codec.decode(codec.encode(Pair(1))) == {"a": 1}
    assert codec.decode(codec.encode((1, 2))) == [1, 2]
    assert codec.decode(codec.encode(when)) == when
    assert codec.decode(codec.encode(2**70)) == 2**70
    assert codec.decode(codec.encode(bytearray(b"x"))) == b"x"
    assert codec.decode(codec.encode(memoryview(b"x"))) == b"x"
    with pytest.raises(bq.PermanentError, match="type object has no form"):
        codec.encode(object())
    with pytest.raises(bq.PermanentError, match="begins with"):
        codec.decode(b"\x80\x04pickle")


def test_sizes():
    class Table:
        nbytes = 77

    assert [weigh(record) for record in (b"abc", "abc", Table())] == [3, 3, 77]
    assert weigh("ä") < weigh("ä" * 100) < 200
    assert weigh({"a": "x" * 1_000}) > 1_000
    assert weigh([[b"x" * 500], b"y" * 500]) > 1_000
    assert weigh(object()) > 0
    assert weights([b"a", "bc"]) == [1, 2]


# --- configuration


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (bq.BatchPolicy, {"max_records": 0}, "max_records=0"),
        (bq.BatchPolicy, {"linger": -1}, "linger=-1"),
        (bq.RetryPolicy, {"initial": 0}, "initial=0"),
        (bq.RetryPolicy, {"multiplier": 0.5}, "multiplier=0.5 is below 1"),
        (bq.RetryPolicy, {"initial": 10.0, "max_delay": 5.0}, "raise max_delay"),
        (bq.RetryPolicy, {"max_attempts": True}, "max_attempts=True"),
        (bq.RetryPolicy, {"budget": 5}, "RetryBudget or None"),
        (bq.RetryBudget, {"per_second": 0}, "per_second"),
        (bq.RetryBudget, {"share": float("inf")}, "share"),
        (bq.BreakerPolicy, {"threshold": 0}, "threshold"),
        (bq.BreakerPolicy, {"reset_timeout": "30"}, "reset_timeout='30'"),
        (bq.AdaptivePolicy, {"min_workers": 4, "max_workers": 2}, "min_workers=4 is above"),
        (bq.AdaptivePolicy, {"alpha": 1.5}, "alpha"),
        (bq.AdaptivePolicy, {"tolerance": 1.0}, "tolerance"),
        (bq.SplitPolicy, {"channel": 0}, "channel"),
        (bq.SplitPolicy, {"prepare": 3}, "prepare"),
        (bq.FailoverPolicy, {"drain": 0}, "drain"),
        (bq.ExportConfig, {"overflow": "wait"}, "choose one of block"),
        (bq.ExportConfig, {"ordering": "fifo"}, "choose one of any, key"),
        (bq.ExportConfig, {"ordering": "key"}, "give a function"),
        (bq.ExportConfig, {"key": len}, "ordering='any'"),
        (bq.ExportConfig, {"encode": str}, "without decode"),
        (bq.ExportConfig, {"path": 3}, "path=3"),
        (bq.ExportConfig, {"workers": 3}, "WorkerPolicy"),
        (bq.ExportConfig, {"retry": None}, "RetryPolicy"),
        (bq.ExportConfig, {"max_bytes": 0}, "max_bytes"),
        (bq.ExportConfig, {"on_dead_letter": 3}, "on_dead_letter"),
        (bq.ExportConfig, {"failover": bq.FailoverPolicy()}, "would never be used"),
        (
            bq.ExportConfig,
            {"failover": bq.FailoverPolicy(), "path": "x", "retry": bq.RetryPolicy(max_attempts=1)},
            "given with a path",
        ),
    ],
)
def test_a_value_that_breaks_a_rule_is_named(kind, options, words):
    with pytest.raises(bq.ConfigError) as caught:
        kind(**options)
    assert words in str(caught.value)
    assert str(caught.value).startswith(kind.__name__)


def test_the_documents_defaults():
    config = bq.ExportConfig()
    assert (config.retry.initial, config.retry.multiplier, config.retry.max_delay) == (5.0, 2.0, 300.0)
    assert config.retry.jitter
    assert config.retry.max_attempts is config.retry.max_age is None
    assert (config.breaker.enabled, config.breaker.threshold, config.breaker.reset_timeout) == (True, 5, 30.0)
    assert (config.overflow, config.block_timeout, config.drain_timeout) == ("drop_oldest", 30.0, 30.0)
    assert (config.batch.max_records, config.batch.linger) == (500, 0.2)
    assert config.workers.resolve(cpu_count=4) == 8
    split, failover, adaptive = bq.SplitPolicy(), bq.FailoverPolicy(), bq.AdaptivePolicy()
    assert (split.channel, split.sends_per_sender, split.sender_count) == (256, 4, 2 * split.preparer_count)
    assert (failover.max_entries, failover.max_bytes, failover.interval, failover.drain) == (1000, 256 << 20, 5.0, 10)
    assert adaptive.min_workers == 1
    assert config.send_limit >= 8
    assert bq.ExportConfig(workers=bq.WorkerPolicy.fixed(1_000)).send_limit == 1_000
    assert bq.ExportConfig(path="spool").byte_limit == 1 << 30
