"""What systemd is told over its socket, a real one of datagrams."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys

import pytest

import batchqueue_async as bq
from batchqueue_async.runtime.service_manager import ServiceManager

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no unix sockets of datagrams")


class Systemd:
    """The other end of the socket."""

    def __init__(self, path):
        self.path = str(path)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.setblocking(False)
        self.socket.bind(f"\0{self.path[1:]}" if self.path.startswith("@") else self.path)

    def messages(self):
        found = []
        while True:
            try:
                found.append(self.socket.recv(4096).decode())
            except BlockingIOError:
                return found


@pytest.fixture
def systemd(tmp_path):
    opened = Systemd(tmp_path / "notify")
    yield opened
    opened.socket.close()


def test_ready_stopping_and_status_arrive(systemd):
    manager = ServiceManager({"NOTIFY_SOCKET": systemd.path})
    assert manager.ready()
    assert manager.status("one line\nof several")
    assert manager.stopping()
    assert systemd.messages() == ["READY=1", "STATUS=one line of several", "STOPPING=1\nSTATUS=draining"]


@pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets are Linux's")
def test_an_abstract_socket_is_found():
    opened = Systemd(f"@batchqueue-test-{os.getpid()}")
    try:
        assert ServiceManager({"NOTIFY_SOCKET": opened.path}).ready()
        assert opened.messages() == ["READY=1"]
    finally:
        opened.socket.close()


@pytest.mark.parametrize("environ", [{}, {"NOTIFY_SOCKET": ""}, {"NOTIFY_SOCKET": "vsock:2:1234"}])
def test_without_a_socket_nothing_is_said(environ):
    manager = ServiceManager(environ)
    assert (manager.ready(), manager.alive(), manager.watchdog) == (False, False, None)


@pytest.mark.parametrize(
    ("watchdog", "seconds"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({"WATCHDOG_USEC": "30000000"}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, None),
    ],
)
def test_the_watchdog_is_this_processs(watchdog, seconds):
    assert ServiceManager({"NOTIFY_SOCKET": "/nowhere", **watchdog}).watchdog == seconds


async def test_the_loop_feeds_the_watchdog_three_times_in_its_time(systemd):
    manager = ServiceManager({"NOTIFY_SOCKET": systemd.path, "WATCHDOG_USEC": "30000000"})
    with manager.fed(asyncio.get_running_loop()):
        await asyncio.sleep(60.5)
        assert systemd.messages() == ["WATCHDOG=1"] * 7
    await asyncio.sleep(60)
    assert systemd.messages() == []


def test_a_socket_that_is_gone_is_logged_once(tmp_path, logs):
    manager = ServiceManager({"NOTIFY_SOCKET": str(tmp_path / "none")})
    assert [manager.ready(), manager.alive()] == [False, False]
    assert [each["event"] for each in logs] == ["service_manager_unreachable"]
    there = Systemd(tmp_path / "none")
    try:
        assert manager.alive()
    finally:
        there.socket.close()


def test_run_reports_ready_then_stopping(systemd, monkeypatch):
    monkeypatch.setenv("NOTIFY_SOCKET", systemd.path)
    monkeypatch.setenv("WATCHDOG_USEC", "60000000")
    seen = []

    async def main(manager):
        seen.append(systemd.messages())
        await asyncio.sleep(0.01)
        seen.append(systemd.messages())
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.Event().wait()

    bq.run(main, manager=bq.BatchQueueManager())
    assert seen[0] == []
    assert sorted(seen[1]) == ["READY=1", "WATCHDOG=1"]
    assert systemd.messages() == ["STOPPING=1\nSTATUS=draining"]


def test_what_fails_at_once_never_was_ready(systemd, monkeypatch):
    monkeypatch.setenv("NOTIFY_SOCKET", systemd.path)

    async def main(manager):
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        bq.run(main, manager=bq.BatchQueueManager())
    assert "READY=1" not in systemd.messages()
