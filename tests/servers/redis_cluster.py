"""A Redis cluster of three primaries, and a primary with a replica and a sentinel, from the same package."""

from __future__ import annotations

import contextlib
import socket
import time
from typing import TYPE_CHECKING

from .base import HOST, UnavailableError, free_port
from .redis import RedisServer

if TYPE_CHECKING:
    from collections.abc import Generator

NODES = 3
SLOTS = 16_384


class _Node(RedisServer):
    def __init__(self, *options: str) -> None:
        super().__init__()
        self.options = options

    def command(self) -> list[str]:
        return [*super().command(), *self.options]

    def ask(self, *words: object) -> bytes:
        """What it answers to a command, as it comes."""
        lines = [f"*{len(words)}", *(part for word in words for part in (f"${len(str(word))}", word))]
        with socket.create_connection((HOST, self.port), timeout=5.0) as connection:
            connection.sendall("".join(f"{line}\r\n" for line in lines).encode())
            return connection.recv(65_536)


class _Sentinel(_Node):
    def command(self) -> list[str]:
        return [self.program, str(self.directory / "sentinel.conf"), "--sentinel"]


def _until(condition, what: str, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise UnavailableError(f"redis: {what} within {seconds:.0f} s did not come")
        time.sleep(0.05)


@contextlib.contextmanager
def cluster() -> Generator[list[_Node]]:
    """Three nodes, each with a third of the slots in their order."""
    nodes = []
    try:
        for _ in range(NODES):
            options = ("--cluster-enabled", "yes", "--cluster-node-timeout", "2000", "--cluster-port")
            nodes.append(_Node(*options, str(free_port())))
            nodes[-1].start()
        share = SLOTS // NODES
        for number, node in enumerate(nodes):
            last = SLOTS - 1 if number == NODES - 1 else (number + 1) * share - 1
            node.ask("CLUSTER", "ADDSLOTSRANGE", number * share, last)
            node.ask("CLUSTER", "MEET", HOST, nodes[0].port, nodes[0].options[-1])
        _until(lambda: all(b"cluster_state:ok" in node.ask("CLUSTER", "INFO") for node in nodes), "a cluster")
        yield nodes
    finally:
        for node in nodes:
            node.dispose()


@contextlib.contextmanager
def watched() -> Generator[tuple[_Node, _Node, _Node]]:
    """A primary, its replica, and a sentinel that watches them under the name of `main`."""
    with contextlib.ExitStack() as stack:
        primary = _Node()
        primary.start()
        stack.callback(primary.dispose)
        replica = _Node("--replicaof", f"{HOST} {primary.port}")
        replica.start()
        stack.callback(replica.dispose)
        sentinel = _Sentinel()
        stack.callback(sentinel.dispose)
        (sentinel.directory / "sentinel.conf").write_text(
            f"port {sentinel.port}\nbind {HOST}\ndir {sentinel.directory}\n"
            f"sentinel monitor main {HOST} {primary.port} 1\n"
            "sentinel down-after-milliseconds main 500\nsentinel failover-timeout main 5000\n"
        )
        sentinel.start()
        _until(lambda: b"slave" in sentinel.ask("SENTINEL", "REPLICAS", "main"), "a replica's entry")
        yield primary, replica, sentinel
