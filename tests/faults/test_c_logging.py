"""C-10: logging runs the program's own code, and a fault in it stops no work."""

from __future__ import annotations

import logging

import pytest
import structlog
from queue_tools import Item, check, check_report, make

import batchqueue_async as bq
from batchqueue_async.testing import RecordingErrorHandler

LOGGER = logging.getLogger("batchqueue_async")


class LoggingError(Exception):
    """What the program's logging raises."""


class RaisingFilter(logging.Filter):
    """A filter, for a logger or for a handler, with a fault in it."""

    met = 0

    def filter(self, record):
        type(self).met += 1
        raise LoggingError


class RaisingHandler(logging.Handler):
    met = 0

    def emit(self, record):
        type(self).met += 1
        raise LoggingError


class ShowlessError(Exception):
    """An error that can't be shown."""

    def __str__(self):
        raise LoggingError

    __repr__ = __str__


@pytest.fixture
def met():
    """Counts what the program's logging has seen: a test in which nothing was logged would prove nothing."""
    RaisingFilter.met = RaisingHandler.met = 0
    return lambda: RaisingFilter.met + RaisingHandler.met


@pytest.fixture
def structured():
    yield
    structlog.reset_defaults()


async def failed_batch_goes_on(error=ConnectionError):
    """A batch fails, is tried again, fails for good and reaches `on_error`; the queue then does what it always does."""
    on_error, handled = RecordingErrorHandler(), []

    async def handle(batch):
        if batch[0].number < 0:
            raise error
        handled.extend(batch)

    def bad_on_error(batch, error):
        on_error(batch, error)
        raise error

    class Handler:
        consume = staticmethod(handle)

        async def on_idle(self):
            raise error

        async def on_close(self):
            raise error

    class Unknown(Item):
        pass

    queue = make(
        on_error=bad_on_error,
        retry=bq.HandlerRetry(initial=0.1, max_attempts=2),
        min_idle=0.01,
        max_idle=0.02,
        workers=bq.WorkerPolicy.fixed(1),
    )
    queue.add_handler(Item, Handler())
    queue.add_handler(Unknown, handle)
    with pytest.raises(bq.DeliveryError):
        await queue.deliver([Item(-1), Item(-2)])
    assert [items for items, _ in on_error.failures] == [[Item(-1), Item(-2)]]
    queue.remove_handler(Unknown)
    queue.remove_handler(Item)
    await queue.produce(Unknown(3))
    await queue.flush()
    assert check(queue).unhandled == 1
    queue.add_handler(Item, Handler())
    await queue.deliver([Item(4)])
    assert handled == [Item(4)]
    report = await queue.shutdown()
    check_report(report)
    assert (report.handled, report.failed, report.unhandled) == (1, 2, 1)


@pytest.mark.parametrize("error", [ConnectionError, bq.RetryableError, ShowlessError])
async def test_c_10_a_filter_that_raises_stops_no_work(error, met):
    raising = RaisingFilter()
    LOGGER.addFilter(raising)
    try:
        await failed_batch_goes_on(error)
    finally:
        LOGGER.removeFilter(raising)
    assert met()


@pytest.mark.parametrize("raises", [True, False], ids=["raiseExceptions", "silent"])
@pytest.mark.parametrize("by_filter", [True, False], ids=["its filter", "its emit"])
async def test_c_10_a_handler_that_raises_stops_no_work(raises, by_filter, met, monkeypatch):
    monkeypatch.setattr(logging, "raiseExceptions", raises)
    raising = RaisingHandler()
    if by_filter:
        raising.addFilter(RaisingFilter())
    LOGGER.addHandler(raising)
    try:
        await failed_batch_goes_on()
    finally:
        LOGGER.removeHandler(raising)
    assert met()


@pytest.mark.usefixtures("structured")
async def test_c_10_a_structlog_processor_that_raises_stops_no_work():
    seen = []

    def raising(logger, method, event):
        seen.append(event["event"])
        raise LoggingError

    structlog.configure(processors=[raising], cache_logger_on_first_use=False)
    await failed_batch_goes_on()
    assert "handler_failed" in seen


@pytest.mark.usefixtures("structured")
async def test_c_10_a_plain_bound_logger_takes_every_event():
    seen = []

    def keep(logger, method, event):
        seen.append((method, event["event"]))
        raise structlog.DropEvent

    structlog.configure(processors=[keep], wrapper_class=structlog.BoundLogger, cache_logger_on_first_use=False)
    await failed_batch_goes_on()
    assert ("warning", "handler_failed") in seen
    assert ("error", "on_error_failed") in seen
    assert ("error", "on_close_failed") in seen
    assert ("info", "queue_closed") in seen


@pytest.mark.usefixtures("structured")
async def test_c_10_a_bound_logger_without_the_levels_methods_stops_no_work():
    class Bare(structlog.BoundLogger):
        def __getattr__(self, name):
            raise LoggingError

    structlog.configure(wrapper_class=Bare, cache_logger_on_first_use=False)
    await failed_batch_goes_on()
