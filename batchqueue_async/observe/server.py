"""The ops thread: a loop of its own, which answers while the program's loops are blocked, on sockets that it binds.

serve("127.0.0.1:9464", "unix:")    a port of loopback, and a unix socket that only this user can open
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import os
import socket
import stat
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

from batchqueue_async._support import forks, log
from batchqueue_async._support.log import describe
from batchqueue_async._support.thread_flag import ThreadFlag
from batchqueue_async.errors import ConfigError
from batchqueue_async.observe.letter_requests import own_sockets
from batchqueue_async.observe.letters import SameUserProtocol, with_letters
from batchqueue_async.observe.observer import Observer
from batchqueue_async.observe.web import asgi
from batchqueue_async.sinks.secrets import Secret

try:
    import uvicorn

    from batchqueue_async.observe.connections import Connection
except ImportError as error:  # pragma: no cover - the tests have it
    raise ConfigError(
        "batchqueue_async.observe: serve() needs uvicorn; run: pip install 'batchqueue-async[service]'"
    ) from error

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from starlette.types import ASGIApp

    from batchqueue_async.observe.status import Phase
    from batchqueue_async.runtime.manager import BatchQueueManager

_START = 10.0
_STOP = 5.0
LOOK_EVERY = 1.0
"""Seconds between two looks of the ops thread, by which it knows since when something is what it is."""
LOOKS_SHARE = 100.0
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


def runtime_directory() -> Path:
    """The directory of this user's sockets: in `$XDG_RUNTIME_DIR`, else in the directory for temporary files."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    if base and Path(base).is_dir() and os.access(base, os.W_OK):
        return Path(base) / "batchqueue"
    return Path(tempfile.gettempdir()) / f"batchqueue-{os.getuid()}"


def own_socket() -> Path:
    """The socket of this process, in a directory that only this user may enter.

    Raises:
        ConfigError: the directory belongs to somebody else, or others may enter it.
    """
    directory = runtime_directory()
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    about = directory.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & 0o077:
        raise ConfigError(
            f"observe: {directory} must be a directory of this user with mode 0700; remove it, or set XDG_RUNTIME_DIR"
        )
    return directory / f"{os.getpid()}.sock"


class OpsServer:
    """The ops thread of a process; made by `serve`, and ended by leaving its `with` or `async with`.

    Example:
        >>> with serve("127.0.0.1:0") as ops:
        ...     print(ops.urls[0].startswith("http://127.0.0.1:"))
        True

    Attributes:
        urls: where the pages are over TCP.
        paths: the unix sockets.
        observer: what looks at the process.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        manager: BatchQueueManager | None = None,
        token: str | None = None,
        hosts: Sequence[str] = (),
    ) -> None:
        self.observer = Observer(manager)
        self.urls: list[str] = []
        self.paths: list[Path] = []
        self._addresses = list(addresses) or ["unix:"]
        self._token = None if token is None else Secret(token).reveal()
        if self._token == "":
            raise ConfigError("observe.serve: the token is empty; give one that nobody guesses, or None")
        self._hosts = [*LOCAL_NAMES, *hosts]
        self._pid = os.getpid()
        self._sockets: list[socket.socket] = []
        # The socket that commands of the same user find; one of `_sockets`, and the only one that takes changes.
        self._own: socket.socket | None = None
        self._servers: list[tuple[uvicorn.Server, list[socket.socket]]] = []
        self._thread: threading.Thread | None = None
        self._started = ThreadFlag()
        self._ended = ThreadFlag()
        self._error: BaseException | None = None
        forks.watch(self)

    def after_fork(self) -> None:
        """In a forked child there is no ops thread; the sockets are the parent's."""
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.close()
        self._sockets, self.urls, self.paths, self._servers = [], [], [], []
        self._thread = self._own = None
        own_sockets.clear()
        self._ended.set()

    @property
    def phase(self) -> Phase:
        """The phase of the program, "starting", "running" or "draining", which `/readyz` goes by; set by its owner."""
        return self.observer.phase

    @phase.setter
    def phase(self, phase: Phase) -> None:
        self.observer.phase = phase

    # -- the beginning -------------------------------------------------------------------------------------------

    def start(self) -> Self:
        """Bind the addresses and start the thread; returns when it answers.

        Raises:
            ConfigError: an address can't be had: it is in use, not this machine's, or open to others without a token.
        """
        try:
            for address in self._addresses:
                self._bind(address)
        except BaseException:
            self._close_sockets()
            raise
        pages = asgi(token=self._token, hosts=None if self._all_unix() else self._hosts, observer=self.observer)
        own = [] if self._own is None else [self._own]
        others = [each for each in self._sockets if each is not self._own]
        # Two servers, so that no way leads from a port to what changes something.
        if others:
            self._servers.append((_server(pages, Connection), others))
        if own:
            self._servers.append((_server(with_letters(pages), SameUserProtocol), own))
        self._thread = threading.Thread(target=self._run, name="batchqueue-ops", daemon=True)
        self._thread.start()
        self._started.wait(_START)
        if self._error is not None:
            self.stop()
            raise ConfigError(f"observe.serve: the ops thread could not start ({self._error})") from self._error
        log.info("ops_started", urls=self.urls, sockets=[str(path) for path in self.paths])
        return self

    def _all_unix(self) -> bool:
        return not self.urls

    def _bind(self, address: str) -> None:
        if address.startswith("unix:"):
            self._bind_unix(address.removeprefix("unix:"))
            return
        host, port = _host_and_port(address)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        if not _is_loopback(host):
            if self._token is None:
                raise ConfigError(
                    f"observe.serve: {address} can be reached from other machines; give a token='env:NAME' or "
                    "'file:/path', or serve on 127.0.0.1 or a unix socket"
                )
            self._hosts += [host, socket.gethostname(), socket.getfqdn()]
        bound = socket.socket(family, socket.SOCK_STREAM)
        self._sockets.append(bound)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind((host, port))
            bound.listen(64)
        except OSError as error:
            raise ConfigError(f"observe.serve: {address} {_bind_fault(error)}") from None
        shown = f"[{host}]" if family is socket.AF_INET6 else host
        self.urls.append(f"http://{shown}:{bound.getsockname()[1]}")

    def _bind_unix(self, place: str) -> None:
        path = Path(place) if place else own_socket()
        if not place and self._own is not None:
            raise ConfigError("observe.serve: 'unix:' is given twice; give it once")
        if path.is_socket() and not _answers(path):
            path.unlink()  # of a process that was killed
        bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sockets.append(bound)
        before = os.umask(0o177)
        try:
            bound.bind(str(path))
            bound.listen(64)
        except OSError as error:
            raise ConfigError(f"observe.serve: unix:{path} {_bind_fault(error)}") from None
        finally:
            os.umask(before)
        self.paths.append(path)
        if not place:
            self._own = bound
            own_sockets.add(path)

    def _run(self) -> None:
        servers = list(self._servers)
        if not servers:  # pragma: no cover - forked in this very moment
            return

        async def main() -> None:
            looking = asyncio.create_task(self._look(), name="batchqueue-ops-look")
            try:
                await asyncio.gather(*(server.serve(sockets=sockets) for server, sockets in servers))
            finally:
                looking.cancel()

        try:
            with asyncio.Runner() as runner:
                runner.run(main())
        except BaseException as error:  # noqa: BLE001 - a daemon thread: whoever started it is to hear of it
            self._error = error
            log.error("ops_ended", **describe(error))
        finally:
            self._started.set()
            self._ended.set()

    async def _look(self) -> None:
        while not all(server.started for server, _ in self._servers):  # noqa: ASYNC110 - uvicorn sets a flag, and no event
            await asyncio.sleep(0.005)
        self._started.set()
        while True:
            began = time.thread_time()
            try:
                self.observer.frame()
            except Exception as error:  # noqa: BLE001 - a look that fails must not end the others
                log.error("ops_look_failed", **describe(error))
            # With hundreds of queues a look takes milliseconds: while nobody watches, one percent of a core is enough.
            await asyncio.sleep(max(LOOK_EVERY, LOOKS_SHARE * (time.thread_time() - began)))

    # -- the end -------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """End the thread and remove the sockets; pages that are open end with it."""
        for server, _ in self._servers:
            server.should_exit = True
        if self._thread is not None and self._thread is not threading.current_thread():
            self._ended.wait(_STOP)
            self._thread.join(_STOP)
        self._close_sockets()

    def _close_sockets(self) -> None:
        for each in self._sockets:
            each.close()
        self._sockets = []
        self._own = None
        if os.getpid() == self._pid:
            for path in self.paths:
                own_sockets.discard(path)
                path.unlink(missing_ok=True)
        self.paths = []

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        return await asyncio.to_thread(self.start)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.stop)

    def __repr__(self) -> str:
        return f"<OpsServer {[*self.urls, *map(str, self.paths)]}>"


def serve(
    *addresses: str,
    manager: BatchQueueManager | None = None,
    token: str | None = None,
    hosts: Sequence[str] = (),
) -> OpsServer:
    """Serve metrics, health, status and the live page from a thread of its own.

    Args:
        addresses: where: "127.0.0.1:9464", "[::1]:9464", "unix:/run/app/ops.sock"; "unix:" is the socket that
            `batchqueue top` finds, and what is served when no address is given. Port 0 takes a free one.
        manager: whose queues are shown; those of every manager of the process when None.
        token: what callers have to show, as text, "env:NAME" or "file:/path"; needed for an address that other
            machines can reach. `/livez` and `/readyz` ask for none.
        hosts: further host names by which it may be called, as behind a proxy.

    Returns:
        The server, for `with` or `async with`.

    Example:
        >>> import urllib.request
        >>> with serve("127.0.0.1:0") as ops:
        ...     with urllib.request.urlopen(f"{ops.urls[0]}/livez") as answer:
        ...         print(answer.status, answer.read().decode())
        200 {"live":true}
    """
    return OpsServer(addresses, manager=manager, token=token, hosts=hosts)


def _server(application: ASGIApp, protocol: type[Connection]) -> uvicorn.Server:
    config = uvicorn.Config(
        application,
        http=protocol,
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        proxy_headers=False,
        ws="none",
        timeout_graceful_shutdown=1,
    )
    return uvicorn.Server(config)


def _host_and_port(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or int(port) > 65_535:  # noqa: PLR2004 - the highest port
        raise ConfigError(
            f"observe.serve: address {address!r} is not HOST:PORT; write '127.0.0.1:9464', '[::1]:9464', "
            "'unix:/path' or 'unix:'"
        )
    return host, int(port)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _bind_fault(error: OSError) -> str:
    known = {
        errno.EADDRINUSE: "is in use by another program; choose another address, or port 0 for a free one",
        errno.EACCES: "is not allowed for this user; choose a port above 1023, or another path",
        errno.EADDRNOTAVAIL: "does not belong to this machine; choose 127.0.0.1, or 0.0.0.0 with a token",
        errno.ENOENT: "is in a directory that does not exist; create it",
    }
    return known.get(error.errno or 0, f"can't be bound ({error.strerror or error})")


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True
