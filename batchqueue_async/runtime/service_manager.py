"""What systemd is notified of: that a program is ready, alive and stopping, over the socket of sd_notify(3)."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import TYPE_CHECKING

from batchqueue_async._support import log

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Generator, Mapping

SOCKET = "NOTIFY_SOCKET"
INTERVAL = "WATCHDOG_USEC"
PROCESS = "WATCHDOG_PID"
_FEEDS = 3
"""How often the watchdog is fed within its time: one message that comes late must not end the program."""


class ServiceManager:
    """The service manager that started this process, as far as there is one; without one every call does nothing.

    The variables are read once. No socket is kept: a message is one datagram, and there are few.

    Example:
        >>> ServiceManager({}).ready()
        False

    Attributes:
        watchdog: seconds after which systemd ends a program that sent no sign of life; None where it does not watch.
    """

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        variables = os.environ if environ is None else environ
        path = variables.get(SOCKET, "")
        # A leading @ stands for the null byte of an abstract socket. Anything else is no place for datagrams of ours.
        self._address = f"\0{path[1:]}" if path.startswith("@") else path if path.startswith("/") else None
        self.watchdog = self._watchdog_of(variables)
        self._failed = False

    def _watchdog_of(self, variables: Mapping[str, str]) -> float | None:
        microseconds = variables.get(INTERVAL, "")
        if self._address is None or not microseconds.isdecimal() or not int(microseconds):
            return None
        if variables.get(PROCESS, str(os.getpid())) != str(os.getpid()):
            return None  # it watches another process, of which this one is a child
        return int(microseconds) / 1e6

    def ready(self) -> bool:
        """Say that the program has started; whether the message was sent."""
        return self._send("READY=1")

    def stopping(self) -> bool:
        """Say that the program drains and will end."""
        return self._send("STOPPING=1\nSTATUS=draining")

    def status(self, text: str) -> bool:
        """Say in one line how things are, for `systemctl status`."""
        return self._send(f"STATUS={' '.join(text.split())}")

    def alive(self) -> bool:
        """Give a sign of life."""
        return self._send("WATCHDOG=1")

    @contextlib.contextmanager
    def fed(self, loop: asyncio.AbstractEventLoop) -> Generator[None]:
        """Let the loop give signs of life within the block: where it is blocked, they stop, and systemd acts."""
        if self.watchdog is None:
            yield
            return
        every = self.watchdog / _FEEDS
        timer: asyncio.Handle

        def feed() -> None:
            nonlocal timer
            self.alive()
            timer = loop.call_later(every, feed)

        timer = loop.call_soon(feed)
        try:
            yield
        finally:
            timer.cancel()

    def _send(self, message: str) -> bool:
        if self._address is None:
            return False
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.setblocking(False)
                sender.sendto(message.encode(), self._address)
        except OSError as error:
            # A full buffer, or a socket that is gone: the program goes on, and says so once.
            if not self._failed:
                log.warning("service_manager_unreachable", error=type(error).__name__, reason=error.strerror or "")
            self._failed = True
            return False
        self._failed = False
        return True
