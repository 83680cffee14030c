"""What all servers of the tests share: a process that starts, stops, is killed and starts again; and how it is had.

A server that cannot be had raises `UnavailableError` with the reason. Its tests are skipped then, and the run ends with
a line that says which server and why; where the environment variable CI is set, they fail instead.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import os
import pwd
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

CACHE = Path(os.environ.get("BATCHQUEUE_TEST_CACHE") or Path.home() / ".cache" / "batchqueue-tests")
HOST = "127.0.0.1"
MISSING: dict[str, str] = {}
"""The servers that tests asked for and that could not be had, with the reason."""


class UnavailableError(Exception):
    """The server cannot be had on this machine; the text says why."""


def provide(name: str, make):
    """The started server, or the test that asks for it is skipped; under CI it fails."""
    try:
        server = make()
        server.start()
    except UnavailableError as error:
        MISSING[name] = str(error)
        if os.environ.get("CI"):
            pytest.fail(f"{name} cannot be had, and CI demands it: {error}", pytrace=False)
        pytest.skip(f"{name} cannot be had: {error}")
    return server


def closing_lines() -> list[str]:
    return [f"not tested against {name}: {reason}" for name, reason in sorted(MISSING.items())]


_given: set[int] = set()


def free_port() -> int:
    """A port of loopback that nobody listens at, and that the system gives to no connection by itself.

    From its own range it would: to others before the server starts, and to who asks whether it has started, who then is
    connected to himself. Nor is it one that was given before: who has that one may not listen yet.
    """
    while True:
        port = random.randrange(15_000, 30_000)
        if port in _given:
            continue
        with socket.socket() as probe:
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
        _given.add(port)
        return port


class Server:
    """One server process. A subclass says how it is prepared, started and asked whether it serves.

    The port and the data stay the same over `stop`, `kill` and `start`.
    """

    name = "server"
    user: str | None = None  # who runs it, where root may not
    start_timeout = 180.0
    stop_timeout = 20.0
    stop_signal = signal.SIGTERM

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix=f"batchqueue-{self.name}-"))
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self.log = self.directory / "server.log"
        self._prepared = False
        atexit.register(self.dispose)  # for what no fixture ends

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    # -- what a subclass says ------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Install it and make its data; once."""

    def command(self) -> list[str]:
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        return {}

    def ready(self) -> bool:
        """Whether it serves; asked until it does."""
        return can_connect(self.port)

    # -- what everyone uses --------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start it, and return when it serves."""
        if not self._prepared:
            if self.user is not None:
                give(self.directory, self.user)
            self.prepare()
            self._prepared = True
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command(),
                cwd=self.directory,
                env=os.environ | self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C is for pytest, whose fixtures end it in order
                # One system call between fork and exec, which takes no lock.
                preexec_fn=_die_with_parent if _may_be_tied() else None,  # noqa: PLW1509
                **self._identity(),
            )
        self._await_ready(self.process)

    def stop(self) -> None:
        """Ask it to end, and wait until it has; it is killed when it takes too long."""
        process = self.process
        if process is None or process.poll() is not None:
            return
        process.send_signal(self.stop_signal)
        try:
            process.wait(self.stop_timeout)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """SIGKILL it, with all that it has started."""
        process = self.process
        if process is not None and process.poll() is None:
            # Some are leaders of groups of their own, as PostgreSQL's are; and it does not start beside their rest.
            everybody = [process.pid, *descendants(process.pid)]
            for pid in everybody:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
            end = time.monotonic() + self.stop_timeout
            while any(map(alive, everybody)):
                if time.monotonic() > end:
                    raise RuntimeError(f"{self.name}: some of its processes outlive SIGKILL")
                time.sleep(0.01)

    def restart(self) -> None:
        self.stop()
        self.start()

    def dispose(self) -> None:
        """End it, and remove its data."""
        atexit.unregister(self.dispose)
        self.stop()
        shutil.rmtree(self.directory, ignore_errors=True)

    def output(self, characters: int = 2_000) -> str:
        """The end of what it wrote."""
        return self.log.read_text(errors="replace")[-characters:] if self.log.exists() else ""

    def run(self, *command: str, timeout: float = 120.0, env: dict[str, str] | None = None) -> str:
        """Run a command as the server's user; what it wrote."""
        done = subprocess.run(
            command,
            cwd=self.directory,
            env=os.environ | self.environment() | (env or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout,
            check=False,
            text=True,
            **self._identity(),
        )
        if done.returncode:
            raise RuntimeError(f"{command[0]} ended with {done.returncode}: {done.stdout[-2_000:]}")
        return done.stdout

    def _identity(self) -> dict:
        if self.user is None or os.geteuid() != 0:
            return {}
        entry = pwd.getpwnam(self.user)
        return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}

    def _await_ready(self, process: subprocess.Popen[bytes]) -> None:
        end = time.monotonic() + self.start_timeout
        while not self.ready():
            if process.poll() is not None:
                raise RuntimeError(f"{self.name} ended with {process.returncode} at its start: {self.output()}")
            if time.monotonic() > end:
                self.kill()
                raise RuntimeError(f"{self.name} does not serve after {self.start_timeout} s: {self.output()}")
            time.sleep(0.05)


def descendants(pid: int) -> list[int]:
    """The processes that a process has started, and those that they have."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*"):
        if fields := _status(int(path.name)):
            children.setdefault(int(fields[1]), []).append(int(path.name))
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return found[1:]


def alive(pid: int) -> bool:
    """Whether it runs; one that ended and waits to be asked for its result does not."""
    fields = _status(pid)
    return bool(fields) and fields[0] not in "ZX"


def _status(pid: int) -> list[str]:
    """The process's state, its parent, and more; nothing if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def can_connect(port: int) -> bool:
    try:
        with socket.create_connection((HOST, port), timeout=1.0):
            return True
    except OSError:
        return False


def give(directory: Path, user: str) -> None:
    """Let the server's user own a directory."""
    if os.geteuid() == 0:
        entry = pwd.getpwnam(user)
        os.chown(directory, entry.pw_uid, entry.pw_gid)


def find_program(name: str, *places: str) -> str | None:
    """A program on the PATH or in one of the places, which may hold a `*`; the newest where several match."""
    if found := shutil.which(name):
        return found
    for place in places:
        matches = sorted(Path("/").glob(f"{place.lstrip('/')}/{name}"))
        if matches:
            return str(matches[-1])
    return None


def apt_program(name: str, package: str, *places: str) -> str:
    """A program, which is installed from a Debian package if it is not there.

    Raises:
        UnavailableError: it is not there, and cannot be installed.
    """
    found = find_program(name, *places)
    if found is None:
        apt_install(package)
        found = find_program(name, *places)
    if found is None:
        raise UnavailableError(f"the Debian package {package} has no {name}")
    return found


def apt_install(*packages: str) -> None:
    """Install Debian packages, without starting the services that they bring."""
    apt = shutil.which("apt-get")
    if apt is None:
        raise UnavailableError(f"{', '.join(packages)} would come from Debian's packages, and there is no apt-get here")
    if os.geteuid() != 0:
        raise UnavailableError(
            f"installing {', '.join(packages)} needs root; run: sudo apt-get install {' '.join(packages)}"
        )
    with lock("apt"), _no_services():
        install = [apt, "install", "--yes", "--quiet", "--no-install-recommends", *packages]
        if not _succeeds(install):
            _succeeds(["dpkg", "--configure", "-a"])  # after an installation that was cut off
            _succeeds([apt, "update", "--quiet"])
            if not _succeeds(install):
                raise UnavailableError(f"apt-get install {' '.join(packages)} fails")


@contextmanager
def lock(name: str):
    """One process at a time: several test runs may want the same download."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _no_services():
    """Debian asks this file before it starts a service; the tests start servers of their own."""
    policy = Path("/usr/sbin/policy-rc.d")
    if policy.exists():
        yield
        return
    policy.write_text("#!/bin/sh\nexit 101\n")
    policy.chmod(0o755)
    try:
        yield
    finally:
        policy.unlink(missing_ok=True)


def _succeeds(command: list[str]) -> bool:
    env = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=600, check=False)
    return done.returncode == 0


_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1


def _may_be_tied() -> bool:
    # The system counts the thread that started the process as its parent: only the main one lives long enough.
    return _libc is not None and threading.current_thread() is threading.main_thread()


def _die_with_parent() -> None:
    """A killed pytest leaves no server behind."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
