"""A future without a lock is one for all who know `concurrent.futures.Future`, and is settled once."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import sys
import threading
import weakref

import pytest

from batchqueue_async._support.thread_flag import SafeFuture

PATIENCE = 60.0


@pytest.fixture
def quick_switches():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def settle(future, how):
    if how == "result":
        future.set_result(1)
    elif how == "error":
        future.set_exception(KeyError("gone"))
    else:
        assert future.cancel()


@pytest.mark.parametrize("how", ["result", "error", "cancel"])
@pytest.mark.parametrize("late", [False, True])
def test_it_says_what_a_future_of_the_standard_library_says(how, late):
    seen = []
    for future in (concurrent.futures.Future(), SafeFuture()):
        said = []
        if late:
            settle(future, how)
        for number in range(3):
            future.add_done_callback(lambda each, number=number, said=said: said.append((number, each.done())))
        if not late:
            settle(future, how)
        said += [future.done(), future.cancelled(), future.running(), future.cancel()]
        for ask in (future.result, future.exception):
            try:
                said.append(ask(timeout=0))
            except (KeyError, concurrent.futures.CancelledError) as error:
                said.append(type(error))
        for act, value in ((future.set_result, 2), (future.set_exception, ValueError())):
            with pytest.raises(concurrent.futures.InvalidStateError):
                act(value)
        said = [type(each) if isinstance(each, Exception) else each for each in said]
        seen.append(said)
    assert seen[0] == seen[1]


def test_what_is_not_settled_in_time_says_so():
    future = SafeFuture()
    for ask in (future.result, future.exception):
        with pytest.raises(TimeoutError):
            ask(timeout=0.001)
    assert "pending" in repr(future)


def test_a_callback_that_fails_is_logged_and_the_next_is_called(caplog):
    future, said = SafeFuture(), []
    future.add_done_callback(lambda _: 1 / 0)
    future.add_done_callback(lambda _: said.append(1))
    future.set_result(None)
    assert said == [1]
    assert "exception calling callback" in caplog.text


@pytest.mark.parametrize("how", ["result", "error", "cancel"])
@pytest.mark.parametrize("before", [True, False], ids=["settled before", "settled meanwhile"])
def test_the_standard_library_waits_for_it(how, before):
    futures = [SafeFuture(), SafeFuture()]
    if before:
        for future in futures:
            settle(future, how)
    else:
        for future in futures:
            threading.Timer(0.01, settle, (future, how)).start()
    done, left = concurrent.futures.wait(futures, timeout=PATIENCE)
    assert (done, left) == (set(futures), set())
    assert set(concurrent.futures.as_completed(futures, timeout=PATIENCE)) == set(futures)


def test_c_24_who_waits_for_a_settled_future_and_an_open_one_waits_for_both():
    settled, still_open = SafeFuture(), SafeFuture()
    settled.set_result(1)
    assert concurrent.futures.wait([settled, still_open], timeout=0.01) == ({settled}, {still_open})
    threading.Timer(0.01, still_open.set_result, (2,)).start()
    assert concurrent.futures.wait([settled, still_open], timeout=PATIENCE) == ({settled, still_open}, set())
    one, other = SafeFuture(), SafeFuture()
    one.set_result(1)
    threading.Timer(0.01, other.set_result, (2,)).start()
    assert [each.result() for each in concurrent.futures.as_completed([one, other], timeout=PATIENCE)] == [1, 2]


@pytest.mark.parametrize("look", [1, 2])
def test_c_24_a_future_that_is_settled_between_two_looks_is_counted_once(look):
    """Of those who wait for all, some look at each future more than once before they wait."""
    looks = 0

    class Settled(SafeFuture):
        @property
        def _state(self):
            nonlocal looks
            looks += 1
            if looks == look:
                self.set_result(1)
            return super()._state

    first, second = Settled(), SafeFuture()
    threading.Timer(0.05, second.set_result, (2,)).start()
    done, left = concurrent.futures.wait([first, second], timeout=PATIENCE)
    assert (done, left) == ({first, second}, set())
    assert second.result(0) == 2


def test_a_wait_that_was_given_up_is_told_nothing():
    future = SafeFuture()
    assert concurrent.futures.wait([future], timeout=0.001).not_done == {future}
    future.set_result(1)
    assert concurrent.futures.wait([future], timeout=0).done == {future}


@pytest.mark.parametrize("how", ["result", "error", "cancel"])
async def test_asyncio_wraps_it(how):
    future = SafeFuture()
    wrapped = asyncio.wrap_future(future)
    threading.Thread(target=settle, args=(future, how)).start()
    await asyncio.wait((wrapped,))
    assert wrapped.cancelled() == (how == "cancel")
    if how == "error":
        assert isinstance(wrapped.exception(), KeyError)
    elif how == "result":
        assert wrapped.result() == 1


async def test_cancelling_what_asyncio_made_of_it_cancels_it():
    future = SafeFuture()
    wrapped = asyncio.wrap_future(future)
    wrapped.cancel()
    async with asyncio.timeout(PATIENCE):
        while not future.cancelled():
            await asyncio.sleep(0.001)


def test_one_of_many_threads_settles_it(quick_switches):
    for _ in range(200):
        future, won, told = SafeFuture(), [], []
        begin = threading.Barrier(5)
        future.add_done_callback(told.append)

        def race(number, begin=begin, future=future, won=won):
            begin.wait(PATIENCE)
            if number == 4:
                future.cancel()
            elif future.resolve(number):
                won.append(number)

        threads = [threading.Thread(target=race, args=(number,)) for number in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert told == [future]
        assert ([] if future.cancelled() else [future.result(0)]) == won


def test_an_error_that_is_kept_does_not_keep_its_future():
    gc.disable()
    try:
        future = SafeFuture()
        future.fail(KeyError("x"))
        seen = weakref.ref(future)
        with pytest.raises(KeyError) as kept:
            future.result()
        del future
        assert seen() is None
        assert kept.value.args == ("x",)
    finally:
        gc.enable()
