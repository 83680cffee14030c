"""How the suite runs: async tests in virtual time unless marked, and Hypothesis by profile."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from functools import partial
from typing import TYPE_CHECKING

import pytest
import structlog
from hypothesis import HealthCheck, settings
from servers import base as servers
from structlog.testing import capture_logs
from untraced import untraced

from batchqueue_async.testing import VirtualTimeLoop

pytest_plugins = ["servers.fixtures", "servers.network_fixtures"]

# The tests fork only to start servers. gRPC's handlers start threads in the child, between fork and exec, which abort
# it now and then. This is read when gRPC is imported.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, MutableMapping

if sys.platform != "win32":
    import uvloop

# ci repeats itself exactly; chaos looks for what ci has not met, and prints the blob that replays it.
settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
settings.register_profile(
    "chaos", max_examples=5_000, deadline=None, print_blob=True, suppress_health_check=list(HealthCheck)
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

# A day: long enough for any backoff, and an end for a test that polls for what never comes.
TIME_LIMIT = 24 * 3600.0


# Who starts us in the background, or by `nohup`, may have these ignored, and so would each program that a test starts
# and then interrupts or hangs up.
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seeds", type=int, default=None, help="how many task orders a test marked `seeds` runs under")
    parser.addoption("--seed", type=int, default=None, help="the one seed that tests/queue/test_seeds.py is to replay")


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    real = item.get_closest_marker("real_time")
    if real or item.get_closest_marker("every_loop"):
        factories: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"asyncio": asyncio.new_event_loop}
        if sys.platform != "win32" and not (real and real.kwargs.get("one_loop")):
            factories["uvloop"] = uvloop.new_event_loop
        if item.get_closest_marker("every_loop"):
            factories["virtual"] = partial(VirtualTimeLoop, time_limit=TIME_LIMIT)
        return factories
    if seeds := item.get_closest_marker("seeds"):
        count = config.getoption("seeds") or seeds.args[0]
        return {f"seed-{seed}": partial(VirtualTimeLoop, seed=seed, time_limit=TIME_LIMIT) for seed in range(count)}
    return {"virtual": partial(VirtualTimeLoop, time_limit=TIME_LIMIT)}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # A campaign goes round by round: wherever it is ended, each scenario has been run equally often.
    items.sort(key=lambda item: item.callspec.params.get("repetition", 0) if hasattr(item, "callspec") else 0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    with untraced() if item.get_closest_marker("untraced") else contextlib.nullcontext():
        return (yield)


@pytest.fixture
def logs() -> Iterator[list[MutableMapping[str, object]]]:
    """The library's log events; structlog counts as configured meanwhile."""
    with capture_logs() as events:
        yield events
    structlog.reset_defaults()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for line in servers.closing_lines():
        terminalreporter.write_line(line, yellow=True)
