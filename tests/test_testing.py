"""The test tools themselves: virtual time, shuffled tasks, settle and the recording handlers."""

from __future__ import annotations

import asyncio
import math
import socket
import threading
from functools import partial

import anyio
import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from batchqueue_async.testing import (
    IdleRecordingHandler,
    RecordingErrorHandler,
    RecordingHandler,
    VirtualTimeError,
    VirtualTimeLoop,
    advance,
    run_virtual,
    settle,
)


def now() -> float:
    return asyncio.get_running_loop().time()


# --- the clock


async def test_the_suite_runs_in_virtual_time():
    assert isinstance(asyncio.get_running_loop(), VirtualTimeLoop)
    assert now() == 0.0
    await asyncio.sleep(3600)
    assert now() == 3600.0


@pytest.mark.real_time
async def test_a_marked_test_runs_on_asyncio_and_uvloop(request):
    expected = {"asyncio": asyncio.SelectorEventLoop, "uvloop": uvloop.Loop}
    assert type(asyncio.get_running_loop()) is expected[request.node.callspec.id]


def test_the_clock_starts_where_told():
    with asyncio.Runner(loop_factory=partial(VirtualTimeLoop, start=5.5)) as runner:
        assert runner.get_loop().time() == 5.5


async def test_timers_fire_at_their_exact_time_in_order_of_time():
    loop = asyncio.get_running_loop()
    fired: list[tuple[str, float]] = []
    for name, when in [("c", 0.3), ("a", 0.1), ("b", 0.2)]:
        loop.call_at(when, lambda name=name: fired.append((name, loop.time())))
    await asyncio.sleep(1)
    assert fired == [("a", 0.1), ("b", 0.2), ("c", 0.3)]


async def test_timers_of_one_time_fire_in_the_order_of_scheduling():
    loop = asyncio.get_running_loop()
    fired: list[int] = []
    for number in range(200):
        loop.call_at(1.0, fired.append, number)
    await asyncio.sleep(1)
    assert fired == list(range(200))


async def test_a_timer_of_the_past_fires_without_moving_the_clock():
    loop = asyncio.get_running_loop()
    await asyncio.sleep(10)
    fired: list[float] = []
    loop.call_at(3, lambda: fired.append(loop.time()))
    await settle()
    assert fired == [10.0]


@given(
    start=st.floats(min_value=0, max_value=1e15),
    delays=st.lists(st.floats(min_value=0, max_value=1e6), min_size=1, max_size=20),
)
def test_no_timer_fires_early_or_is_left_behind_whatever_the_rounding(start, delays):
    async def main() -> None:
        loop = asyncio.get_running_loop()
        fired: list[tuple[float, float]] = []
        for delay in delays:
            when = loop.time() + delay
            loop.call_at(when, lambda when=when: fired.append((when, loop.time())))
        await asyncio.sleep(max(delays))
        await settle()
        assert len(fired) == len(delays)
        assert all(when == fired_at for when, fired_at in fired)

    with asyncio.Runner(loop_factory=partial(VirtualTimeLoop, start=start)) as runner:
        runner.run(main())


def test_neighbouring_floats_are_different_times():
    later = math.nextafter(1e9, math.inf)
    fired: list[tuple[str, float]] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.call_at(later, lambda: fired.append(("later", loop.time())))
        loop.call_at(1e9, lambda: fired.append(("now", loop.time())))
        await asyncio.sleep(1)

    with asyncio.Runner(loop_factory=partial(VirtualTimeLoop, start=1e9)) as runner:
        runner.run(main())
    assert fired == [("now", 1e9), ("later", later)]


async def test_a_cancelled_timer_does_not_hold_up_the_clock():
    loop = asyncio.get_running_loop()
    loop.call_later(1, lambda: None).cancel()
    for _ in range(500):  # enough for asyncio to rebuild its heap
        loop.call_later(2, lambda: None).cancel()
    await asyncio.sleep(5)
    assert now() == 5.0


async def test_timeouts_are_virtual_in_asyncio_and_anyio():
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(60):
            await asyncio.Event().wait()
    assert now() == 60.0
    with anyio.move_on_after(30) as scope:
        await anyio.sleep_forever()
    assert scope.cancelled_caught
    assert now() == 90.0


async def test_advance_ends_at_the_exact_time_with_all_that_is_due_done():
    loop = asyncio.get_running_loop()
    done: list[str] = []

    async def late() -> None:
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        done.append("late")

    advancing = asyncio.create_task(advance(0.25))
    await asyncio.sleep(0)
    loop.call_at(0.25, lambda: done.append("due") or asyncio.ensure_future(late()))
    loop.call_at(math.nextafter(0.25, 1), done.append, "too late")
    await advancing
    assert now() == 0.25
    assert done == ["due", "late"]


@pytest.mark.real_time
async def test_advance_in_real_time_is_refused():
    with pytest.raises(VirtualTimeError, match="run_virtual"):
        await advance(1)


def test_a_closed_loop_refuses_timers():
    loop = VirtualTimeLoop()
    loop.close()
    with pytest.raises(RuntimeError, match="closed"):
        loop.call_later(1, lambda: None)


def test_debug_mode_works():
    async def main() -> float:
        await asyncio.sleep(1)
        return now()

    with asyncio.Runner(debug=True, loop_factory=partial(VirtualTimeLoop, seed=1)) as runner:
        assert runner.run(main()) == 1.0


@given(st.floats(min_value=0, max_value=10))
async def test_hypothesis_examples_run_in_virtual_time(delay):
    before = now()
    await asyncio.sleep(delay)
    assert now() == before + delay


# --- threads and I/O


async def test_a_call_in_a_thread_takes_no_virtual_time():
    gate = threading.Event()
    asyncio.get_running_loop().call_soon(threading.Timer(0.02, gate.set).start)
    async with asyncio.timeout(1):
        assert await asyncio.to_thread(gate.wait, 5)
    assert now() == 0.0
    await asyncio.sleep(1)  # and the clock goes on afterwards
    assert now() == 1.0


async def test_hold_clock_keeps_timers_from_firing_while_a_thread_works():
    loop = asyncio.get_running_loop()
    done = asyncio.Event()
    thread = threading.Timer(0.02, loop.call_soon_threadsafe, [done.set])
    thread.start()
    with loop.hold_clock():
        async with asyncio.timeout(0.001):
            await done.wait()
    thread.join()
    assert now() == 0.0


async def test_without_a_timer_the_loop_waits_for_a_thread():
    loop = asyncio.get_running_loop()
    done = asyncio.Event()
    thread = threading.Timer(0.02, loop.call_soon_threadsafe, [done.set])
    thread.start()
    await done.wait()
    thread.join()


async def test_anyio_worker_threads_work_under_a_hold():
    with asyncio.get_running_loop().hold_clock():
        assert await anyio.to_thread.run_sync(lambda: 42) == 42


async def test_sockets_work():
    left, right = socket.socketpair()
    with left, right:
        left.setblocking(False)
        right.setblocking(False)
        loop = asyncio.get_running_loop()
        receiving = asyncio.create_task(loop.sock_recv(right, 100))
        await loop.sock_sendall(left, b"payload")
        assert await receiving == b"payload"
    assert now() == 0.0


async def test_settle_waits_for_local_io():
    left, right = socket.socketpair()
    with left, right:
        left.setblocking(False)
        right.setblocking(False)
        loop = asyncio.get_running_loop()
        receiving = asyncio.create_task(loop.sock_recv(right, 100))
        await settle()
        left.send(b"payload")
        await settle()
        assert receiving.done()
        assert await receiving == b"payload"


# --- tests that would hang


async def wait_for_the_impossible() -> None:
    await asyncio.Event().wait()


def test_a_hang_names_the_tasks_that_wait_and_where():
    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(wait_for_the_impossible(), name="the-one-that-hangs")

    with pytest.raises(VirtualTimeError, match="nothing is ready, no timer can fire") as raised:
        run_virtual(main, stall_timeout=0.01)
    message = str(raised.value)
    assert "pending tasks (2)" in message
    assert "the-one-that-hangs: wait_for_the_impossible (test_testing.py:" in message
    assert "Event.wait (locks.py:" in message


def test_a_hang_under_a_hold_says_so():
    async def main() -> None:
        with asyncio.get_running_loop().hold_clock():
            await asyncio.sleep(1)

    with pytest.raises(VirtualTimeError, match="holds on the clock: 1"):
        run_virtual(main, stall_timeout=0.01)


def test_a_poll_for_ever_ends_at_the_time_limit_and_cleans_up():
    cleaned: list[float] = []

    async def main() -> None:
        try:
            while True:
                await asyncio.sleep(1)
        finally:
            await asyncio.sleep(5)
            cleaned.append(now())

    with pytest.raises(VirtualTimeError, match=r"limit of 10 s is over at 10\.0 s"):
        run_virtual(main, timeout=10)
    assert cleaned == [15.0]


def test_no_time_limit():
    assert run_virtual(lambda: asyncio.sleep(1e9, "done"), timeout=None) == "done"


async def test_settle_on_a_busy_loop_says_so():
    async def spin() -> None:
        while True:
            await asyncio.sleep(0)

    spinning = asyncio.create_task(spin(), name="spinner")
    with pytest.raises(VirtualTimeError, match=r"not settled after 100 rounds[^$]*spinner"):
        await settle(100)
    spinning.cancel()


# --- settle


async def count_down(steps: int) -> None:
    for _ in range(steps):
        await asyncio.sleep(0)


async def test_settle_runs_all_that_is_ready_and_nothing_else():
    chain = asyncio.create_task(count_down(500))
    due = asyncio.create_task(asyncio.sleep(0.001))
    await settle()
    assert chain.done()
    assert not due.done()
    assert now() == 0.0
    await due


async def test_two_settle_at_once():
    chain = asyncio.create_task(count_down(50))
    await asyncio.gather(settle(), settle(), settle())
    assert chain.done()


@pytest.mark.real_time
async def test_settle_on_other_loops_gives_some_turns():
    chain = asyncio.create_task(count_down(40))
    await settle()
    assert chain.done()
    chain = asyncio.create_task(count_down(40))
    await settle(3)
    assert not chain.done()
    await chain


# --- shuffled tasks


def task_order(seed: int | None) -> tuple[str, ...]:
    async def main() -> tuple[str, ...]:
        seen: list[str] = []

        async def worker(name: str) -> None:
            for step in range(3):
                seen.append(f"{name}{step}")
                await asyncio.sleep(0)
            await asyncio.sleep(1)
            seen.append(f"{name}!")

        async with asyncio.TaskGroup() as group:
            for name in "abcd":
                group.create_task(worker(name))
        return tuple(seen)

    return run_virtual(main, seed=seed)


def test_a_seed_replays_and_seeds_differ():
    orders = {seed: task_order(seed) for seed in range(50)}
    assert len(set(orders.values())) > 25
    assert all(task_order(seed) == order for seed, order in orders.items())


def test_every_task_order_turns_up():
    async def main() -> str:
        seen: list[str] = []

        async def worker(name: str) -> None:
            seen.append(name)

        await asyncio.gather(*(worker(name) for name in "abc"))
        return "".join(seen)

    assert {run_virtual(main, seed=seed) for seed in range(200)} == {"abc", "acb", "bac", "bca", "cab", "cba"}
    assert run_virtual(main) == "abc"


@pytest.mark.seeds(20)
async def test_one_task_keeps_its_own_order():
    seen: list[int] = []

    async def worker() -> None:
        for step in range(10):
            seen.append(step)
            await asyncio.sleep(0)

    await asyncio.gather(worker(), *(count_down(10) for _ in range(5)))
    assert seen == list(range(10))


@pytest.mark.seeds(20)
async def test_callbacks_keep_their_order_and_cancel_is_a_callback():
    loop = asyncio.get_running_loop()
    seen: list[object] = []
    tasks = [asyncio.create_task(count_down(5)) for _ in range(5)]
    victims = [loop.create_task(wait_for_the_impossible()) for _ in range(5)]
    await asyncio.sleep(0)
    for number, victim in enumerate(victims):
        loop.call_soon(seen.append, number)
        loop.call_soon(victim.cancel)
        loop.call_soon(lambda number=number: seen.append([victim.cancelling() for victim in victims].count(1) - number))
    await settle()
    assert seen == [0, 1, 1, 1, 2, 1, 3, 1, 4, 1]
    assert all(victim.cancelled() for victim in victims)
    await asyncio.gather(*tasks)


@pytest.mark.seeds(5)
async def test_pure_python_tasks_are_shuffled_and_run(request):
    loop = asyncio.get_running_loop()
    seen: list[str] = []

    async def worker(name: str) -> None:
        await asyncio.sleep(0)
        seen.append(name)

    tasks = [asyncio.tasks._PyTask(worker(name), loop=loop) for name in "abcdefgh"]
    await settle()
    assert all(task.done() for task in tasks)
    assert sorted(seen) == list("abcdefgh")


@pytest.mark.seeds(3)
async def test_a_seeds_test_runs_on_its_seed(request):
    seed = asyncio.get_running_loop().seed
    assert request.node.name.endswith(f"[seed-{seed}]") or seed == 0  # pytest-asyncio hides the id of a single one


def test_an_error_carries_its_seed():
    async def main() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no") as raised:
        run_virtual(main, seed=7)
    assert raised.value.__notes__ == ["in the task order of seed=7; run_virtual(..., seed=7) replays it"]
    with pytest.raises(ValueError, match="no") as raised:
        run_virtual(main)
    assert not hasattr(raised.value, "__notes__")


# --- run_virtual


def test_run_virtual_takes_a_coroutine_and_cleans_up():
    ended: list[str] = []

    async def generate():
        try:
            yield 1
        finally:
            ended.append("generator")

    async def leftover() -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            ended.append("task")

    async def main() -> int:
        asyncio.get_running_loop().leftovers = [asyncio.create_task(leftover()), generator := generate()]
        await asyncio.sleep(1)
        return await anext(generator)

    assert run_virtual(main()) == 1
    assert ended == ["task", "generator"]


def test_run_virtual_waits_in_real_time_for_the_threads_of_the_executor():
    started, gate = threading.Event(), threading.Event()
    finished: list[bool] = []

    def work() -> None:
        started.set()
        finished.append(gate.wait(60))

    async def main() -> None:
        call = asyncio.get_running_loop().run_in_executor(None, work)
        await asyncio.to_thread(started.wait, 5)
        call.cancel()  # so that only the shutdown waits for the thread
        threading.Timer(0.02, gate.set).start()

    run_virtual(main)
    assert finished == [True]


# --- recording handlers


async def test_a_handler_records_batches_times_and_results():
    handler = RecordingHandler[int](delay=lambda batch: float(len(batch)))
    await handler.consume((1, 2))
    handler.fail = lambda batch: ValueError("odd") if batch == [3] else None
    with pytest.raises(ValueError, match="odd"):
        await handler.consume([3])
    await handler.consume([4])
    assert handler.batches == [[1, 2], [3], [4]]
    assert handler.items == [1, 2, 3, 4]
    assert handler.handled == [1, 2, 4]
    assert handler.times == [0.0, 2.0, 3.0]
    assert handler.calls == 3
    assert (handler.active, handler.max_active, handler.cancelled, handler.idle_calls) == (0, 1, 0, 0)
    assert not hasattr(handler, "on_idle")


async def test_a_handler_fails_with_a_given_error():
    error = RuntimeError("down")
    with pytest.raises(RuntimeError) as raised:
        await RecordingHandler[int](fail=error).consume([1])
    assert raised.value is error


async def test_a_handler_records_a_copy_of_the_batch():
    handler, batch = RecordingHandler[int](), [1]
    await handler.consume(batch)
    batch.clear()
    assert handler.batches == [[1]]


async def test_a_held_handler_waits_and_a_cancelled_call_is_counted():
    handler = RecordingHandler[int]()
    handler.hold()
    calls = [asyncio.create_task(handler.consume([number])) for number in range(3)]
    await settle()
    assert (handler.active, handler.max_active, handler.handled) == (3, 3, [])
    calls[1].cancel()
    await settle()
    assert (handler.active, handler.cancelled) == (2, 1)
    handler.release()
    await settle()
    assert (handler.active, sorted(handler.handled)) == (0, [0, 2])
    await handler.consume([3])
    assert handler.handled[-1] == 3


async def test_wait_for_counts_items_and_tells_how_many_came():
    handler = RecordingHandler[int]()
    waiting = asyncio.create_task(handler.wait_for(3))
    await handler.consume([1, 2])
    await settle()
    assert not waiting.done()
    await handler.consume([3, 4])
    await settle()
    assert waiting.done()
    await handler.wait_for(4)
    with pytest.raises(TimeoutError, match="4 of 5 items arrived within 2 s"):
        await handler.wait_for(5, timeout=2)
    assert now() == 2.0


@pytest.mark.real_time
async def test_a_handler_on_another_threads_loop_is_awaited_held_and_released():
    handler = RecordingHandler[int]()
    handler.hold()
    thread = threading.Thread(target=lambda: asyncio.run(handler.consume([1, 2])))
    thread.start()
    await handler.wait_for(2)
    assert handler.handled == []
    handler.release()
    await asyncio.to_thread(thread.join)
    assert handler.handled == [1, 2]


async def test_idle_calls_beside_a_consume_show_in_max_active():
    handler = IdleRecordingHandler[int]()
    await handler.consume([1])
    await handler.on_idle()
    assert (handler.idle_calls, handler.max_active) == (1, 1)
    handler.hold()
    call = asyncio.create_task(handler.consume([2]))
    await settle()
    await handler.on_idle()
    handler.release()
    await call
    assert (handler.idle_calls, handler.max_active) == (2, 2)


def test_an_error_handler_records_items_and_errors():
    on_error, first, second = RecordingErrorHandler(), ValueError("a"), ValueError("b")
    on_error((1, 2), first)
    on_error([3], second)
    assert on_error.failures == [([1, 2], first), ([3], second)]
