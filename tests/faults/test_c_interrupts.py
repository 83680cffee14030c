"""C-18: a thread is torn out of a call at any point, by an exception that another thread throws, or by Ctrl-C.

CPython delivers such exceptions as a function is entered, after the call of a built-in function, and as a loop goes
back to its head. A profiler and a tracer are told of just these points: so each of them can be tried in turn, in the
package and in what it calls.
"""

from __future__ import annotations

import contextlib
import dis
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from bridge_tools import PATIENCE, Caller, Held, assert_adds_up, until

import batchqueue_async as bq
from batchqueue_async._support.thread_flag import SafeFuture, ThreadFlag
from batchqueue_async.queue.deadlock import waits

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from types import CodeType, FrameType

CAPACITY = 3


class Hit(BaseException):
    """What a thread is torn out of its call by."""


class Interrupter:
    """Raises `Hit` in the calling thread at the points of these numbers.

    A `Hit` where nothing can raise, as in the end of a generator, goes to `sys.unraisablehook`, and it may be the first
    of two. So the hook is a built-in meanwhile: pytest's own would be torn apart by the second.
    """

    def __init__(self, hits: Collection[int]) -> None:
        self.hits = hits
        self.points = 0
        self._backward: dict[CodeType, set[int]] = {}

    def run(self, call: Callable[[], object]) -> bool:
        """Make the call; whether it was torn apart."""
        tracer, hook = sys.gettrace(), sys.unraisablehook
        unraisable: list[sys.UnraisableHookArgs] = []
        sys.unraisablehook = unraisable.append
        sys.settrace(self._on_call)
        sys.setprofile(self._on_point)
        try:
            call()
        except Hit:
            return True
        finally:
            sys.setprofile(None)
            sys.settrace(tracer)
            sys.unraisablehook = hook
            for each in unraisable:
                if each.exc_type is not Hit:
                    hook(each)
        return False

    def _pass_point(self) -> None:
        self.points += 1
        if self.points - 1 in self.hits:
            raise Hit

    def _on_point(self, frame: FrameType, event: str, arg: object) -> None:
        if frame.f_code is Interrupter.run.__code__:
            return
        if event in {"call", "c_return"}:
            self._pass_point()

    def _on_call(self, frame: FrameType, event: str, arg: object) -> Any:
        frame.f_trace_lines = False
        frame.f_trace_opcodes = True
        return self._in_frame

    def _in_frame(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "exception":
            sys.setprofile(self._on_point)  # a profiler that raises is taken away, and so is a tracer
        elif event == "opcode" and frame.f_lasti in self._loops_of(frame.f_code):
            self._pass_point()
        return self._in_frame

    def _loops_of(self, code: CodeType) -> set[int]:
        if code not in self._backward:
            self._backward[code] = {each.offset for each in dis.get_instructions(code) if "BACKWARD" in each.opname}
        return self._backward[code]


# -- a queue, and the calls on it


class Torn:
    """A queue whose handler holds a batch, so that the buffer is all the room there is, and one call that is torn."""

    def __init__(self, bridge: bq.SyncBridge, name: str, **options: Any) -> None:
        self.handler = Held()
        config: Any = bq.QueueConfig(buffer_size=CAPACITY, max_batch=4, fallback=self.handler, **options)
        self.queue: bq.SyncQueue[Any] = bridge.get_or_create(name, config)

    def prepare(self, *, full: bool) -> None:
        """One item is with the handler; the buffer is empty, or full."""
        self.handler.hold()
        assert self.queue.produce("first", timeout=PATIENCE)
        until(lambda: self.queue.stats(timeout=PATIENCE).in_flight == 1)
        self.queue.stats(timeout=PATIENCE)  # the loop has lent what room there is
        if full:
            self.fill_up()

    def fill_up(self) -> None:
        for item in [1, "a"] * (4 * CAPACITY):
            self.queue.produce(item, timeout=0)

    def check(self) -> None:
        """Nobody holds the lock, no item was lost, and every place is there for the next."""
        inbox: Any = self.queue._inbox
        assert not inbox.is_held_here(), "the lock was left locked"
        Caller(self.queue.produce, 1, 0).outcome()
        assert not inbox.waiting()
        self.fill_up()
        used = [partition.used for partition in self.queue.stats(timeout=PATIENCE).partitions]
        assert set(used) <= {0, CAPACITY}, f"places are gone: {used}"
        self.handler.open()
        self.queue.flush(timeout=PATIENCE)
        stats = self.queue.stats(timeout=PATIENCE)
        assert_adds_up(stats)
        assert stats.handled == len(self.handler.items) == stats.accepted - stats.dropped_after


def produce(queue: bq.SyncQueue[Any]) -> None:
    queue.produce(1)


def produce_many(queue: bq.SyncQueue[Any]) -> None:
    queue.produce_many([1, "a"])


def wait_for_room(queue: bq.SyncQueue[Any]) -> None:
    queue.produce(1, timeout=0.001)


def wait_for_more_room(queue: bq.SyncQueue[Any]) -> None:
    with contextlib.suppress(TimeoutError):
        queue.produce_many([1, "a", 2, "b", 3], timeout=0.001)


def flush(queue: bq.SyncQueue[Any]) -> None:
    with contextlib.suppress(TimeoutError):
        queue.flush(timeout=0.001)


CALLS = {
    "produce": (produce, False),
    "produce_many": (produce_many, False),
    "wait": (wait_for_room, True),
    "wait for more": (wait_for_more_room, True),
    "flush": (flush, True),
}
SHAPES: dict[str, dict[str, Any]] = {
    "one partition": {},
    "by type": {"partitions": bq.PartitionPolicy.fixed(3)},
    "in turns": {"partitions": bq.PartitionPolicy.fixed(3), "selector": bq.round_robin()},
    "by key": {"partitions": bq.PartitionPolicy.fixed(3), "selector": bq.by_key(str)},
    "refuses": {"overflow": "reject"},
    "drops": {"overflow": "drop_oldest"},
}


def tear(shape: str, call: str, *, again_after: int | None = None) -> int:
    """Tear the call apart at each point, and once more on its way out; how many points there were."""
    act, full = CALLS[call]
    with bq.SyncBridge() as bridge:
        torn = Torn(bridge, "q", **SHAPES[shape])
        point, complete = 0, 0
        while complete < 3:  # how many points there are depends on the loop, which goes on meanwhile
            torn.prepare(full=full)
            hits = {point} if again_after is None else {point, point + again_after}
            hit = Interrupter(hits).run(lambda: act(torn.queue))
            torn.check()
            complete = 0 if hit else complete + 1
            point += 1
    return point


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("shape", SHAPES)
def test_c_18_a_call_that_is_torn_apart_at_any_point_leaves_no_trace(shape, call):
    assert tear(shape, call) > 8


@pytest.mark.parametrize("again_after", [1, 2, 3, 5])
@pytest.mark.parametrize("call", ["produce", "wait for more", "flush"])
def test_c_18_a_second_interrupt_on_the_way_out_leaves_no_trace_either(call, again_after):
    assert tear("one partition", call, again_after=again_after) > 8


async def test_c_18_a_wait_whose_thread_was_torn_out_of_it_is_none():
    """It would be found in circles of waits that no longer exist."""
    queue: Any = bq.BatchQueue("q", bq.QueueConfig(consumer=Held(held=False)))
    drain = queue._drains[0]
    kept = waits.begin(drain, lambda: [[drain]])
    waits.begin(drain, lambda: [[drain]])
    assert drain.waits.all() == [kept]
    waits.finish(kept)
    assert drain.waits.all() == []
    await queue.shutdown()


def test_c_18_a_flag_is_set_for_all_who_wait_and_told_once():
    flag = ThreadFlag()
    told: list[str] = []
    flag.when_set(lambda: told.append("before"))
    waiting = [Caller(flag.wait, PATIENCE) for _ in range(3)]
    assert not flag.wait(0.001)
    flag.set()
    assert all(each.outcome() for each in waiting)
    flag.when_set(lambda: told.append("after"))
    flag.set()
    assert told == ["before", "after"]
    flag.clear()
    assert not flag.wait(0.001)


class Ends:
    """Its end raises, where nothing can raise."""

    def __del__(self) -> None:
        raise Hit


class Fails(Ends):
    """Likewise, an error of its own."""

    def __del__(self) -> None:
        raise ValueError


def test_c_18_a_hit_where_nothing_can_raise_is_the_tests_own_and_anything_else_is_reported(monkeypatch):
    """And no later hit tears apart what reports it."""
    reported: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda each: reported.append(each.exc_type))
    before = sys.unraisablehook

    def end() -> None:
        Ends()
        Fails()

    torn = [Interrupter({point}).run(end) for point in range(10)]
    assert True in torn
    assert not torn[-1]
    assert {*reported} == {ValueError}
    assert sys.unraisablehook is before


@pytest.mark.parametrize("act", ["set", "wait"])
def test_c_18_a_flag_that_is_torn_apart_at_any_point_can_still_be_set(act):
    point, hit = 0, True
    while hit:
        flag = ThreadFlag()
        hit = Interrupter({point}).run(flag.set if act == "set" else partial(flag.wait, 0.0001))
        Caller(flag.set).outcome()
        assert flag.wait(PATIENCE)
        point += 1
    assert point > 2


def test_c_18_a_future_that_is_torn_apart_at_any_point_can_still_be_resolved():
    def wait(future: SafeFuture[int]) -> None:
        with contextlib.suppress(TimeoutError):
            future.result(timeout=0.0001)

    point, hit = 0, True
    while hit:
        future: SafeFuture[int] = SafeFuture()
        hit = Interrupter({point}).run(partial(wait, future))
        Caller(future.set_result, 1).outcome()
        assert (future.result(PATIENCE), future.exception(PATIENCE)) == (1, None)
        point += 1
    assert point > 8
