"""The other end: finds this user's processes by their sockets, and asks one of them; needs no extra."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlencode, urlsplit

import msgspec

from batchqueue_async.errors import BatchQueueError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

TIMEOUT = 5.0


class FoundProcess(NamedTuple):
    """A process of this user that answers on its socket."""

    pid: int
    path: Path


def socket_directories() -> list[Path]:
    """Where sockets of this user may be: a process may have been started with or without `$XDG_RUNTIME_DIR`."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    found = [Path(base) / "batchqueue"] if base else []
    return [*found, Path(tempfile.gettempdir()) / f"batchqueue-{os.getuid()}"]


def find_processes() -> list[FoundProcess]:
    """The processes of this user that can be asked, by rising number; sockets of those that ended are removed.

    Example:
        >>> import os
        >>> from batchqueue_async.observe import serve
        >>> with serve("unix:"):
        ...     os.getpid() in [each.pid for each in find_processes()]
        True
    """
    found: list[FoundProcess] = []
    for directory in socket_directories():
        if not _is_own(directory):
            continue
        for path in sorted(directory.glob("*.sock")):
            if not path.stem.isdecimal() or not _is_own(path):
                continue
            if _answers(path):
                found.append(FoundProcess(int(path.stem), path))
            elif not _runs(int(path.stem)):
                path.unlink(missing_ok=True)
    return sorted(found)


def _is_own(path: Path) -> bool:
    """Whether it is this user's, and not a link: in a directory for all, others may have put one of the same name."""
    try:
        about = path.lstat()
    except OSError:
        return False
    return about.st_uid == os.getuid() and not stat.S_ISLNK(about.st_mode)


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a unix socket."""

    def __init__(self, path: Path, timeout: float | None) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        """Open the socket."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


class OpsClient:
    """Asks the ops thread of one process.

    Example:
        >>> from batchqueue_async.observe import serve
        >>> with serve("127.0.0.1:0") as ops:
        ...     print(OpsClient(ops.urls[0]).status()["status"]["live"])
        True

    Attributes:
        target: the process's number, its socket, or its URL; None is the only process of this user that answers.
    """

    def __init__(self, target: str | int | Path | None = None, *, token: str | None = None) -> None:
        self.target = _resolved(target)
        self._token = token

    def get(self, path: str, **query: str) -> tuple[int, bytes]:
        """Ask for a page: its HTTP status and its bytes.

        Raises:
            BatchQueueError: the process does not answer.
        """
        connection, headers, prefix = self._connect(TIMEOUT)
        with contextlib.closing(connection):
            try:
                connection.request("GET", f"{prefix}{path}{'?' if query else ''}{urlencode(query)}", headers=headers)
                answer = connection.getresponse()
                return answer.status, answer.read()
            except (OSError, http.client.HTTPException) as error:
                raise self._silent(error) from None

    def json(self, path: str, **query: str) -> Any:
        """Ask for a page of JSON, whichever HTTP status it comes with.

        Raises:
            BatchQueueError: the process does not answer, or not with JSON, as where a token is needed.
        """
        status, body = self.get(path, **query)
        try:
            return json.loads(body)
        except ValueError:
            raise self._refused(path, status, body) from None

    def status(self, component: str | None = None) -> Any:
        """What `/status` says of the process, or of one component."""
        return self.json("/status") if component is None else self.json("/status", component=component)

    def frames(self, *, timeout: float | None = None) -> Iterator[Any]:
        """The frames of the live page, one per second, until the process ends or the iterator is closed.

        Args:
            timeout: for how many seconds nothing may come; None waits without a limit.

        Raises:
            BatchQueueError: the process does not answer, or not with frames, as where a token is needed.
        """
        connection, headers, prefix = self._connect(timeout)
        with contextlib.closing(connection):
            try:
                connection.request("GET", f"{prefix}/events", headers=headers)
                answer = connection.getresponse()
                if answer.status != http.HTTPStatus.OK:
                    raise self._refused("/events", answer.status, answer.read())
                event = "message"
                while line := answer.readline().decode():
                    name, _, value = line.rstrip("\n").partition(": ")
                    if name == "event":
                        event = value
                    elif name == "data":
                        if event == "message":
                            yield msgspec.json.decode(value)
                        event = "message"
            except (OSError, http.client.HTTPException) as error:
                raise self._silent(error) from None

    def _connect(self, timeout: float | None) -> tuple[http.client.HTTPConnection, dict[str, str], str]:
        headers = {} if self._token is None else {"Authorization": f"Bearer {self._token}"}
        if isinstance(self.target, Path):
            return UnixConnection(self.target, timeout), headers, ""
        parts = urlsplit(self.target)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        return kind(parts.netloc, timeout=timeout), headers, parts.path.rstrip("/")

    def _refused(self, path: str, status: int, body: bytes) -> BatchQueueError:
        return BatchQueueError(f"{self.target}: {path} answered {status}: {body.decode(errors='replace').strip()}")

    def _silent(self, error: Exception) -> BatchQueueError:
        return BatchQueueError(f"{self.target}: no answer ({error}); does the process run, and with observe.serve?")


def _resolved(target: str | int | Path | None) -> str | Path:
    if isinstance(target, Path):
        return target
    if isinstance(target, str) and target.startswith(("http://", "https://")):
        return _checked(target)
    if isinstance(target, str) and not target.isdecimal():
        return Path(target.removeprefix("unix:"))
    found = find_processes()
    shown = ", ".join(str(each.pid) for each in found) or "there is none"
    if target is None:
        if len(found) != 1:
            raise ConfigError(f"which process? give its number, its socket or its URL; those that answer: {shown}")
        return found[0].path
    for each in found:
        if each.pid == int(target):
            return each.path
    raise ConfigError(f"process {target}: has no socket of this user; those that answer: {shown}")


def _checked(url: str) -> str:
    """A URL that names a host, and a port that can be one."""
    try:
        parts = urlsplit(url)
        named = parts.hostname and parts.port != 0
    except ValueError:
        named = False
    if not named:
        raise ConfigError(f"{url}: is not a URL of a process; give one such as http://127.0.0.1:9464")
    return url
