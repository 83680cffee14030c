"""The compiled hot path: chosen in one place, and in nothing different from the Python that it stands for."""

from __future__ import annotations

import asyncio
import collections.abc
import gc
import inspect
import operator
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

import batchqueue_async as bq
from batchqueue_async import _native
from batchqueue_async._native import pure

ROOT = Path(__file__).parents[2]
SUPPORT = os.pathsep.join(str(ROOT / folder) for folder in ("tests/support", "."))

compiled_only = pytest.mark.skipif(not bq.accelerated, reason="the hot path is not compiled, or not wanted")


def run_python(*arguments: str, **environment: str) -> str:
    paths = os.pathsep.join([SUPPORT, *filter(None, [os.environ.get("PYTHONPATH")])])  # a build with sanitizers, say
    whole = {**os.environ, "PYTHONPATH": paths, "PYTHONHASHSEED": "0", **environment}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=whole, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


async def ignore(batch):
    """Handle nothing."""


@pytest.fixture
async def queue():
    async with bq.BatchQueueManager() as manager:
        queue = manager.create("native", bq.QueueConfig(consumer=ignore, buffer_size=100))
        queue.produce_nowait("the first one opens the fast path")
        yield queue


# -- the choice ----------------------------------------------------------------------------------------------------


def test_where_ci_runs_the_hot_path_is_compiled():
    if "CI" not in os.environ:
        pytest.skip("a machine without a compiler runs the Python")
    code = "import batchqueue_async as bq, sys; print(bq.accelerated or not sys._is_gil_enabled())"
    assert run_python("-c", code, BATCHQUEUE_PURE="0").strip() == "True"


@pytest.mark.parametrize("value", ["1", "yes"])
def test_the_python_is_chosen_at_run_time(value):
    code = (
        "import batchqueue_async as bq, types; print(bq.accelerated, type(bq.BatchQueue.produce) is types.FunctionType)"
    )
    assert run_python("-c", code, BATCHQUEUE_PURE=value).split() == ["False", "True"]


@compiled_only
def test_an_extension_of_older_sources_is_not_used():
    code = (
        "import sys; from importlib import import_module\n"
        "import types; fake = types.ModuleType('f'); fake.API = -1\n"
        "sys.modules['batchqueue_async._native.hotpath'] = fake\n"
        "import batchqueue_async as bq; print(bq.accelerated)"
    )
    assert run_python("-c", code).strip() == "False"


def test_a_free_threaded_python_runs_the_python():
    code = "import sys; sys._is_gil_enabled = lambda: False\nimport batchqueue_async as bq; print(bq.accelerated)"
    assert run_python("-c", code, BATCHQUEUE_PURE="0").strip() == "False"


def test_nothing_is_compiled_for_a_free_threaded_python(tmp_path):
    """As the build's hook is asked by hatchling, for a Python that says that it is free-threaded."""
    code = (
        "import sys, sysconfig, types\n"
        "interface = types.ModuleType('hatchling.builders.hooks.plugin.interface')\n"
        "interface.BuildHookInterface = object\n"
        "sys.modules[interface.__name__] = interface\n"
        "sys.path.insert(0, '.ci')\n"
        "import hatch_build\n"
        "asked = sysconfig.get_config_var\n"
        "told = {'Py_GIL_DISABLED': int(sys.argv[2])}\n"
        "sysconfig.get_config_var = lambda name: told[name] if name in told else asked(name)\n"
        "def build(root): print('built'); raise SystemExit\n"
        "hatch_build.build = build\n"
        "hook = hatch_build.CustomBuildHook()\n"
        "hook.target_name, hook.root = 'wheel', sys.argv[1]\n"
        "hook.initialize('standard', {}); print('nothing')"
    )
    say = {"BATCHQUEUE_NO_EXTENSIONS": "0"}
    for disabled, said in (("0", "built"), ("1", "nothing")):
        assert run_python("-c", code, str(tmp_path), disabled, **say).strip() == said


def test_random_programs_end_the_same_in_lock_step():
    """Each with the calls of handlers in their order, and all counts."""
    program = str(Path(__file__).with_name("lock_step.py"))
    first, *compiled = run_python(program, "0", "30", BATCHQUEUE_PURE="0").splitlines()
    _, *plain = run_python(program, "0", "30", BATCHQUEUE_PURE="1").splitlines()
    assert len(compiled) == 30
    assert compiled == plain, first


# -- a method is what its Python is --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["produce", "produce_nowait"])
def test_inspect_sees_the_python(name):
    method = getattr(bq.BatchQueue, name)
    assert list(inspect.signature(method).parameters) == ["self", "item"]
    assert inspect.getdoc(method).startswith("Put an item in")
    assert method.__name__ == name
    assert method.__qualname__ == f"BatchQueue.{name}"
    assert method.__module__ == "batchqueue_async.queue.batch_queue"


async def test_produce_is_a_coroutine_function(queue):
    assert inspect.iscoroutinefunction(
        bq.BatchQueue.__dict__["produce"].__wrapped__ if bq.accelerated else queue.produce
    )
    assert inspect.iscoroutinefunction(queue.produce)
    assert not inspect.iscoroutinefunction(queue.produce_nowait)


async def test_arguments_are_those_of_the_python(queue):
    assert queue.produce_nowait(item=1)
    assert await queue.produce(item=1)
    assert bq.BatchQueue.produce_nowait(queue, 2)
    for call in (queue.produce_nowait, queue.produce):
        with pytest.raises(TypeError, match="missing 1 required positional argument: 'item'"):
            call()
        with pytest.raises(TypeError, match="takes 2 positional arguments but 3 were given"):
            call(1, 2)
        with pytest.raises(TypeError, match="unexpected keyword argument 'thing'"):
            call(thing=1)
    with pytest.raises(AttributeError):
        bq.BatchQueue.produce_nowait(object(), 1)


async def test_a_subclass_may_override_and_call_what_it_overrides():
    class Counting(bq.BatchQueue[str]):
        seen = 0

        def produce_nowait(self, item):
            self.seen += 1
            return super().produce_nowait(item)

        async def produce(self, item):
            self.seen += 1
            return await super().produce(item)

    queue = Counting("counting", bq.QueueConfig(consumer=ignore))
    for _ in range(3):
        assert queue.produce_nowait("a")
        assert await queue.produce("b")
    assert queue.seen == 6
    assert (await queue.shutdown()).handled == 6


# -- produce's coroutine -------------------------------------------------------------------------------------------


async def test_nothing_is_put_in_before_the_coroutine_runs(queue):
    before = queue.stats().accepted
    call = queue.produce("later")
    assert isinstance(call, collections.abc.Coroutine)
    assert asyncio.iscoroutine(call)
    assert inspect.isawaitable(call)
    assert queue.stats().accepted == before
    call.close()
    assert queue.stats().accepted == before
    with pytest.raises(RuntimeError, match="cannot reuse already awaited coroutine"):
        await call


async def test_every_way_to_run_a_coroutine_runs_it(queue):
    before = queue.stats().accepted
    assert await asyncio.create_task(queue.produce(1))
    assert await asyncio.wait_for(queue.produce(2), 1)
    assert await asyncio.gather(queue.produce(3), queue.produce(4)) == [True, True]
    assert await asyncio.shield(queue.produce(5))
    async with asyncio.TaskGroup() as group:
        task = group.create_task(queue.produce(6), name="six")
    assert task.result() is True
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(queue.produce, 7)
    assert queue.stats().accepted == before + 7


async def test_a_coroutine_steps_as_python_says(queue):
    call = queue.produce("x")
    with pytest.raises(TypeError, match="can't send non-None value to a just-started coroutine"):
        call.send(1)
    with pytest.raises(StopIteration) as done:
        call.send(None)
    assert done.value.value is True
    with pytest.raises(RuntimeError, match="cannot reuse already awaited coroutine"):
        call.send(None)
    with pytest.raises(RuntimeError, match="cannot reuse already awaited coroutine"):
        call.throw(ValueError)
    call.close()
    call = queue.produce("y")
    with pytest.raises(ValueError, match="thrown"):
        call.throw(ValueError("thrown"))
    with pytest.raises(RuntimeError, match="cannot reuse already awaited coroutine"):
        call.send(None)
    call = queue.produce("z")
    assert call.__name__ == "produce"
    assert call.__qualname__ == "BatchQueue.produce"
    assert "BatchQueue.produce" in repr(call)
    assert call.cr_code is inspect.unwrap(bq.BatchQueue.produce).__code__
    assert not call.cr_running
    assert call.cr_await is None
    call.close()


async def test_one_that_is_never_awaited_is_warned_of(queue):
    with pytest.warns(RuntimeWarning, match=r"coroutine 'BatchQueue.produce' was never awaited"):
        queue.produce("forgotten")


async def test_one_that_waits_can_be_cancelled_looked_at_and_not_awaited_twice():
    gate = asyncio.Event()

    async def block(batch):
        await gate.wait()

    async with bq.BatchQueueManager() as manager:
        queue = manager.create("full", bq.QueueConfig(consumer=block, buffer_size=1))
        await queue.produce(1)
        await asyncio.sleep(0.01)
        await queue.produce(2)
        call = queue.produce(3)
        if sys.version_info >= (3, 15):  # before, the state of one that has not begun is guessed from its frame
            assert inspect.getcoroutinestate(call) == inspect.CORO_CREATED
        task = asyncio.create_task(call)
        await asyncio.sleep(0.01)
        assert not task.done()
        assert inspect.getcoroutinestate(call) == inspect.CORO_SUSPENDED
        assert call.cr_await is not None
        with pytest.raises(RuntimeError, match="coroutine is being awaited already"):
            await call
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert inspect.getcoroutinestate(call) == inspect.CORO_CLOSED
        late = asyncio.create_task(queue.produce(4))
        await asyncio.sleep(0.01)
        gate.set()
        assert await late
        assert queue.stats().accepted == 3


async def test_a_closed_coroutine_that_waited_lets_go_of_its_place():
    async with bq.BatchQueueManager() as manager:
        queue = manager.create("full", bq.QueueConfig(consumer=ignore, buffer_size=1))
        queue.produce_nowait(1)
        call = queue.produce(2)
        future = call.send(None)
        assert asyncio.isfuture(future)
        call.close()
        assert queue.stats().accepted == 1


async def test_on_another_thread_it_is_refused_as_ever(queue):
    def elsewhere():
        with pytest.raises(bq.WrongLoopError):
            queue.produce_nowait(1)
        with pytest.raises(bq.WrongLoopError):
            queue.produce(1).send(None)

    await asyncio.to_thread(elsewhere)


# -- odd types and broken objects ------------------------------------------------------------------------------------


class Evil(type):
    """A metaclass whose hash is that of another type, and whose comparison does as it is told."""

    def __hash__(cls):
        return cls.wanted

    def __eq__(cls, other):
        return cls.act()


def evil(wanted, act):
    return Evil("Evil", (), {"wanted": wanted, "act": staticmethod(act)})


@pytest.mark.parametrize("function", ["put_run", "sort_run"])
def test_a_comparison_in_the_midst_of_a_run_may_do_anything(function):
    class Mine:
        pass

    items = [Mine() for _ in range(10)]
    by_type = {}

    def act():
        by_type.clear()
        items.clear()
        return False

    by_type[evil(hash(Mine), act)] = []
    assert getattr(_native, function)(by_type, items, 0) == 0
    assert items == []


def test_an_error_of_a_comparison_comes_out():
    class Mine:
        pass

    def act():
        raise ZeroDivisionError

    for function in (_native.put_run, _native.sort_run, pure.put_run, pure.sort_run):
        with pytest.raises(ZeroDivisionError):
            function({evil(hash(Mine), act): []}, [Mine()], 0)


class Unhashable(type):
    __hash__ = None


async def test_a_type_that_cannot_be_hashed_raises_and_harms_nothing():
    async with bq.BatchQueueManager() as manager:
        queue = manager.create("typed", bq.QueueConfig(partitions=bq.PartitionPolicy.fixed(4)))
        queue.add_handler(int, ignore)
        item = Unhashable("Odd", (), {})()
        for _ in range(3):
            with pytest.raises(TypeError, match="unhashable"):
                queue.produce_nowait(item)
            with pytest.raises(TypeError, match="unhashable"):
                await queue.produce(item)
            with pytest.raises(TypeError, match="unhashable"):
                queue.produce_many_nowait([1, item, 2])
            assert queue.produce_nowait(1)
        await queue.flush()
        assert queue.stats().handled == queue.stats().accepted == 6


async def test_a_hash_may_call_the_queue_again():
    class Calling(type):
        def __hash__(cls):
            if not cls.busy:
                cls.busy = True
                queue.produce_nowait(1)
                queue.add_handler(str, ignore)
                cls.busy = False
            return type.__hash__(cls)

    async with bq.BatchQueueManager() as manager:
        queue = manager.create("again", bq.QueueConfig(partitions=bq.PartitionPolicy.adaptive()))
        queue.add_handler(int, ignore)
        kind = Calling("Kind", (), {"busy": True})
        queue.add_handler(kind, ignore)
        kind.busy = False
        for _ in range(20):
            assert queue.produce_nowait(kind())
            assert await queue.produce(kind())
            assert queue.produce_many_nowait([kind(), 1, kind()]) == 3
        report = await queue.shutdown()
        assert report.handled == queue.stats().accepted > 100


@compiled_only
def test_objects_with_fields_missing_or_of_odd_classes_are_left_to_the_python():
    place = _native.Place()
    for tail, slots in [(None, None), ([], None), ((), _native.Countdown(None, 5)), ([], iter(())), (1, 2)]:
        place.tail, place.fast_slots = tail, slots
        assert _native.put_run({int: place}, [1], 0) == 0
    del place.tail
    del place.fast_slots
    assert _native.put_run({int: place}, [1], 0) == 0
    assert _native.put_run({int: 5}, [1], 0) == 0
    assert _native.sort_run({int: 5}, [1], 0) == 0
    with pytest.raises(AttributeError):
        place.tail  # noqa: B018
    entrance = _native.Entrance()
    with pytest.raises(AttributeError):
        bq.BatchQueue.produce_nowait(entrance, 1)
    entrance._thread = threading.get_ident()
    for only, by_type in [(None, None), (1, {}), (None, {int: 3}), (place, None), (None, [])]:
        entrance._only, entrance._by_type = only, by_type
        with pytest.raises(AttributeError):
            bq.BatchQueue.produce_nowait(entrance, 1)


@compiled_only
def test_the_countdown_counts_as_repeat_does():
    for count in (-3, 0, 1, 5):
        ours, python = _native.Countdown(None, count), pure.Countdown(None, count)
        assert ours.__length_hint__() == python.__length_hint__()
        assert list(ours) == list(python)
        assert ours.__length_hint__() == 0
    with pytest.raises(TypeError):
        _native.Countdown(None, count=5)
    with pytest.raises(OverflowError):
        _native.Countdown(None, 2**80)


@compiled_only
def test_only_known_steps_are_compiled():
    with pytest.raises(ValueError, match="no compiled step nothing"):
        _native.compiled("nothing")(ignore)
    with pytest.raises(TypeError):
        _native.compiled("produce")(len)


KINDS = [int, str, float, list]


@given(st.lists(st.sampled_from(KINDS)), st.integers(0, 5), st.sets(st.sampled_from(KINDS)), st.integers(0, 9))
def test_bulk_steps_do_what_their_python_does(kinds, start, known, room):
    items = [kind() for kind in kinds]

    def places(place, countdown):
        slots = countdown(None, room)
        found = {kind: place() for kind in KINDS if kind in known}
        for each in found.values():
            each.tail, each.fast_slots = [], slots
        return found

    ours, python = places(_native.Place, _native.Countdown), places(pure.Place, pure.Countdown)
    start = min(start, len(items))
    assert _native.put_run(ours, items, start) == pure.put_run(python, items, start)
    assert [each.tail for each in ours.values()] == [each.tail for each in python.values()]
    lists: list[dict[type, list[object]]] = [{kind: [] for kind in KINDS if kind in known} for _ in range(2)]
    assert _native.sort_run(lists[0], items, start) == pure.sort_run(lists[1], items, start)
    assert lists[0] == lists[1]
    assert _native.one_type(items) == pure.one_type(items) == (len(set(kinds)) < 2)
    assert _native.one_type(tuple(items)) == pure.one_type(tuple(items))


@compiled_only
@pytest.mark.parametrize("room", [0, 1, 15, 16, 17, 40, 99, 100])
@pytest.mark.parametrize("stranger", [0, 15, 16, 33, 100])
def test_long_lists_are_put_in_up_to_the_first_item_that_is_for_the_python(room, stranger):
    kinds: list[Any] = [type(f"Kind{number}", (), {}) for number in range(7)]
    table = _native.TypeTable()
    slots = _native.Countdown(None, room)
    for kind in kinds:
        table[kind] = place = _native.Place()
        place.tail, place.fast_slots = [], _native.Countdown(None, 9)
        _native.put_run(table, [kind()] * 3, 0)  # from the second look-up on a type is found in the table
        place.tail, place.fast_slots = [], slots
    items = [kinds[number % len(kinds)]() for number in range(100)]
    items.insert(stranger, ...)
    end = _native.put_run(table, items, 0)
    assert end == min(stranger, room)
    assert slots.__length_hint__() == room - end
    for kind, place in table.items():
        assert place.tail == [item for item in items[:end] if type(item) is kind]


@compiled_only
def test_items_come_in_together_or_not_at_all():
    place, items = _native.Place(), [1, 2, 3]
    for tail, slots, some in [
        ([], _native.Countdown(None, 2), items),
        ([], iter(range(5)), items),
        ([], _native.Countdown(None, 5), []),
        ([], _native.Countdown(None, 5), 5),
        ((), _native.Countdown(None, 5), items),
        (items, _native.Countdown(None, 5), items),
    ]:
        place.tail, place.fast_slots = tail, slots
        before = [*tail]
        assert not _native.put_together(place, some)
        assert [*tail] == before
    for some in (items, (1, 2, 3)):
        place.tail, place.fast_slots = [0], _native.Countdown(None, 3)
        assert _native.put_together(place, some)
        assert (place.tail, place.fast_slots.__length_hint__()) == ([0, 1, 2, 3], 0)
    assert not _native.put_together(_native.Place(), items)
    assert not _native.put_together(5, items)
    with pytest.raises(TypeError):
        _native.put_together(place)


@compiled_only
@pytest.mark.parametrize("table", [dict, _native.TypeTable])
@pytest.mark.parametrize("function", ["put_run", "sort_run", "put_credits"])
def test_a_list_that_its_own_items_go_into_is_put_in_once(function, table):
    """It grows as it is read: its memory moves, and what it has got is not its caller's."""
    kinds = [type(f"Kind{number}", (), {}) for number in range(8)]
    items = [kind() for kind in kinds] * 40
    first = list(items)
    place, share = _native.Place(), _native.Share()
    place.tail, place.fast_slots = items, _native.Countdown(None, 10_000)
    share.items, share.free, share.batch = items, 10_000, 0
    by_type = table()
    for kind in kinds:
        by_type[kind] = {"put_run": place, "sort_run": items, "put_credits": share}[function]
    put = getattr(_native, function)(by_type, items, 0)
    assert items == first + first[:put]
    assert put == (0 if function == "put_credits" and not bq.accelerated else len(first))


async def test_a_list_does_not_go_into_itself(queue):
    await queue.produce(0)
    await queue.flush()
    partition, drain = queue._router.partitions[0], queue._drains[0]
    sleeper, drain._sleeper = drain._sleeper, None  # as in a round: only then are first items taken without a wake-up
    partition.tail = [1]
    assert not _native.put_together(partition, partition.tail)
    assert partition.tail == [1]
    partition.tail = []
    drain._sleeper = sleeper


@pytest.mark.parametrize("typed", [False, True])
async def test_a_list_that_changes_as_it_comes_in_is_counted_as_it_was_put_in(typed):
    seen: list[object] = []

    async def collect(batch):
        seen.extend(batch)

    partitions = bq.PartitionPolicy.fixed(4 if typed else 1)
    queue: Any = bq.BatchQueue("changing", bq.QueueConfig(partitions=partitions, fallback=collect))
    queue.produce_nowait(0)
    await queue.flush()
    items: list[int] = [1, 2, 3]
    clock = queue._drains[0].clock

    def tick():
        items[1:] = []
        return clock()

    for drain in queue._drains:
        drain.clock = tick
    queue.produce_many_nowait(items)
    await queue.flush()
    stats = queue.stats()
    assert stats.accepted == stats.handled == len(seen)
    assert seen[:2] == [0, 1]
    await queue.shutdown()


# -- from threads ----------------------------------------------------------------------------------------------------


def test_threads_put_everything_in_once_and_in_their_order():
    seen: dict[int, list[int]] = {}

    async def note(batch):
        for thread, number in batch:
            seen.setdefault(thread, []).append(number)

    def work(thread):
        for number in range(0, 3_000, 3):
            assert queue.produce((thread, number))
            assert queue.produce_many([(thread, number + 1), (thread, number + 2)]) == 2

    with bq.SyncBridge() as bridge:
        queue = bridge.get_or_create("threads", bq.QueueConfig(consumer=note, buffer_size=100))
        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        queue.flush()
    assert seen == {number: list(range(3_000)) for number in range(8)}


def test_many_types_from_a_thread_keep_their_order():
    kinds = [type(f"Kind{number}", (int,), {}) for number in range(20)] + [MetaKind("Odd", (int,), {})]
    seen: dict[type, list[int]] = {}

    async def note(batch):
        for item in batch:
            seen.setdefault(type(item), []).append(int(item))

    items = [kind(number) for number in range(200) for kind in kinds]
    with bq.SyncBridge() as bridge:
        config = bq.QueueConfig(partitions=bq.PartitionPolicy.fixed(4), buffer_size=64, fallback=note)
        queue = bridge.get_or_create("types", config)
        for start in range(0, len(items), 500):
            assert queue.produce_many(items[start : start + 500]) == len(items[start : start + 500])
        for kind in kinds:
            assert queue.produce(kind(200))
        queue.flush()
    assert list(seen.values()) == [list(range(201))] * len(kinds)


class MetaKind(type):
    """A metaclass with a hash and a comparison of its own."""

    def __hash__(cls):
        return 7

    def __eq__(cls, other):
        return cls is other


def test_the_lock_of_an_inbox_is_that_of_a_thread_and_may_be_taken_again():
    lock = _native.InboxLock()
    is_held_here = operator.attrgetter("_is_owned")(lock)
    with lock, lock:
        assert is_held_here()
        other = threading.Thread(target=lambda: answers.append(is_held_here()))
        answers: list[bool] = []
        other.start()
        other.join()
        assert answers == [False]
        waiting = threading.Thread(target=lambda: [lock.acquire(), answers.append(True), lock.release()])
        waiting.start()
        assert answers == [False]
    waiting.join()
    assert answers == [False, True]
    assert not is_held_here()
    with pytest.raises(RuntimeError, match="cannot release un-acquired lock"):
        lock.release()


def test_while_somebody_is_in_the_inbox_a_thread_waits_for_the_lock():
    with bq.SyncBridge() as bridge:
        queue = bridge.get_or_create("held", bq.QueueConfig(consumer=ignore))
        assert queue.produce(0)
        inbox = queue._inbox
        with inbox.lock:
            inbox.waking = True
            before = inbox.uncollected()
            other = threading.Thread(target=lambda: queue.produce_many([queue.produce(1)]))
            other.start()
            other.join(0.05)
            assert other.is_alive()
            assert inbox.uncollected() == before
            inbox.waking = False
        other.join()


@compiled_only
def test_a_bridge_with_fields_missing_or_of_odd_classes_is_left_to_the_python():
    door: Any = _native.Door()
    for inbox in (None, 5, _native.Inbox()):
        door._inbox = inbox
        for call in (bq.SyncQueue.produce, bq.SyncQueue.produce_many):
            with pytest.raises(AttributeError):
                call(door, [1])
    inbox, share = _native.Inbox(), _native.Share()
    inbox.waking, door._inbox = True, inbox
    for lock, only, by_type in [(5, share, None), (_native.InboxLock(), 5, {}), (_native.InboxLock(), None, {list: 5})]:
        inbox.lock, inbox.only, inbox.by_type = lock, only, by_type
        with pytest.raises(AttributeError):
            bq.SyncQueue.produce(door, [1])
    for free, items in [(1, ()), (0, []), (-1, [])]:
        share.free, share.items = free, items
        assert _native.put_credits({int: share}, [1], 0) == 0
    share.free, share.items = 2, []
    assert _native.put_credits({int: share}, [1, 2, 3], 0) == 2
    assert (share.free, share.items) == (0, [1, 2])


def test_items_are_grouped_by_type():
    mixed = [1, "a", 2.5, "b", 3]
    assert _native.group_by_type(mixed) in ([[1, 3], ["a", "b"], [2.5]], None)
    assert _native.group_by_type([*mixed, MetaKind("M", (), {})()]) is None
    same = [1, 2]
    groups = _native.group_by_type(same)
    assert groups is not None
    assert groups[0] is same


# -- memory ----------------------------------------------------------------------------------------------------------


async def test_cycles_through_a_queue_are_collected():
    class Item:
        pass

    queue = bq.BatchQueue[Item]("cycle", bq.QueueConfig(consumer=ignore))
    item = Item()
    item.queue = queue
    queue.produce_nowait(item)
    item.call = queue.produce(item)
    item.call.close()
    item.again = queue.produce(item)
    gone = weakref.ref(item)
    assert weakref.ref(item.again)() is item.again
    await item.again
    await queue.shutdown()
    del item, queue
    await asyncio.sleep(0)
    gc.collect()
    assert gone() is None


async def test_no_block_of_memory_stays_behind(queue):
    async def use():
        for _ in range(50):
            queue.produce_nowait(object())
            await queue.produce(object())
            queue.produce_many_nowait([object(), "", 1, 2])
            queue.produce(1).close()
            _native.put_run({}, [1], 0)
            _native.sort_run({int: []}, [1, ""], 0)
            _native.one_type([1, 2])
            await queue.flush()

    for _ in range(3):
        await use()
    gc.collect()
    before = sys.getallocatedblocks()
    for _ in range(20):
        await use()
    gc.collect()
    assert sys.getallocatedblocks() - before < 600, "of 20,000 objects, some stayed"


@compiled_only
@pytest.mark.parametrize("kind", ["typed", "one"])
@pytest.mark.parametrize("amid", ["drain", "put", "left"])
def test_an_interpreter_that_ends_amid_a_call_ends_in_peace(amid, kind):
    late = "called late\n" if amid == "left" else ""
    assert run_python("-X", "faulthandler", "tests/_native/endings.py", amid, kind) == f"ends now, True\n{late}"


# -- types in a table ------------------------------------------------------------------------------------------------


class _OddMeta(type):
    """A metaclass with a hash and a comparison of its own."""

    def __hash__(cls) -> int:
        return 5

    def __eq__(cls, other: object) -> bool:
        return cls is other


def put_all(table, items):
    """Put items into the lists of their types; the index of the first that has none."""
    return _native.sort_run(table, items, 0)


def test_a_table_of_types_is_a_dict_whose_changes_are_seen_at_once():
    table = _native.TypeTable()
    kinds: list[Any] = [type(f"Listed{number}", (), {}) for number in range(300)]
    items = [kind() for kind in kinds]
    for number, kind in enumerate(kinds):
        assert put_all(table, items) == number
        table[kind] = []
    for _ in range(3):
        assert put_all(table, items) == 300
    assert len(table[kinds[0]]) == 299 + 3  # of the first, an item for each that was missing behind it
    assert len(table[kinds[-1]]) == 3
    before = table[kinds[3]]
    count = len(before)
    table[kinds[3]] = after = []
    assert put_all(table, items) == 300
    assert (len(before), len(after)) == (count, 1)
    assert table.pop(kinds[5], None) is not None
    assert table.pop(kinds[5], None) is None
    assert put_all(table, items) == 5
    table[kinds[5]] = []
    del table[kinds[2]]
    assert put_all(table, items) == 2
    assert (len(table), kinds[2] in table, table.get(kinds[2])) == (299, False, None)
    assert dict(table).keys() == {*kinds} - {kinds[2]}
    table.clear()
    assert put_all(table, items) == 0
    assert not table
    odd = _OddMeta("Odd", (), {})
    table[odd] = []
    assert put_all(table, [odd()]) == (0 if bq.accelerated else 1)  # its hash is the user's
    assert len(table.pop(odd)) == (0 if bq.accelerated else 1)


@compiled_only
def test_a_table_of_types_refuses_what_it_could_not_see():
    table = _native.TypeTable()
    for change in (lambda: table.update({int: 1}), lambda: table.setdefault(int, 1), table.popitem):
        with pytest.raises(TypeError, match="pop and clear alone"):
            change()
    with pytest.raises(TypeError):
        _native.TypeTable({int: 1})
    with pytest.raises(KeyError):
        table.pop(int)
    with pytest.raises(KeyError):
        del table[int]
    table[int] = []
    assert put_all(table, [1, 2]) == 2
    dict.clear(table)  # behind its back: old answers, but no harm
    assert put_all(table, [1]) == 1


class Nesting(type):
    """A metaclass whose comparison puts an item of the other type with the same hash in, so many calls deep."""

    put: Any = None
    depth = 0

    def __hash__(cls) -> int:
        return type.__hash__(Compared)

    def __eq__(cls, other: object) -> bool:
        Nesting.depth += 1
        if Nesting.put is not None and Nesting.depth in {2, 4, 6}:  # as what was found is asked for once more
            Nesting.put()
        return cls is other


class Compared:
    """A plain type with a neighbour in the dict that is not."""


def test_a_type_that_is_looked_up_while_it_is_looked_up_stands_in_a_table_once():
    table: Any = _native.TypeTable()
    table[Nesting("Odd", (), {})] = []
    table[Compared] = before = []
    for _ in range(2):
        assert put_all(table, [Compared()]) == 1
    table[Compared] = before
    Nesting.depth, Nesting.put = 0, lambda: put_all(table, [Compared()])
    try:
        assert put_all(table, [Compared()]) == 1
    finally:
        Nesting.put = None
    count = len(before)
    table[Compared] = after = []
    assert put_all(table, [Compared()]) == 1
    assert (len(before), len(after)) == (count, 1)


@pytest.mark.parametrize("kinds", [1, 3])
def test_a_list_that_items_go_into_as_it_is_read_is_read_to_its_old_end(kinds):
    """Its memory moves as it grows."""
    table: Any = _native.TypeTable()
    known = [type(f"Grown{number}", (), {}) for number in range(kinds)]
    items = [known[number % kinds]() for number in range(60)]
    for kind in known:
        table[kind] = []
    for _ in range(3):
        assert put_all(table, items) == 60
    for kind in known:
        table[kind] = items
    for size in (60, 120):
        assert put_all(table, items) == size
        assert items == [*items[:size], *items[:size]]
    plain: dict[type, Any] = dict.fromkeys(known, items)
    assert put_all(plain, items) == 240
    assert len(items) == 480


@compiled_only
def test_a_table_that_has_itself_is_collected():
    class Kind:
        """Kept by the table, and keeps it."""

    table: Any = _native.TypeTable()
    table[Kind] = []
    assert put_all(table, [Kind()]) == 1
    Kind.table = table  # type: ignore[attr-defined]  # the circle that is to be collected
    gone = weakref.ref(Kind)
    del Kind, table
    gc.collect()
    assert gone() is None


@compiled_only
def test_a_type_leaves_no_reference_behind_in_a_table():
    table: Any = _native.TypeTable()
    for _ in range(3):
        kinds: Any = [type("Passing", (), {}) for _ in range(200)]
        for kind in kinds:
            table[kind] = []
        assert put_all(table, [kind() for kind in kinds]) == 200
        gone = [weakref.ref(kind) for kind in kinds]
        for kind in kinds:
            table.pop(kind)
        del kind, kinds
        gc.collect()
        assert [each for each in gone if each() is not None] == []
