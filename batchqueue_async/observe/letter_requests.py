"""What a command may ask a running process about its dead letters, and which exporter it means: decisions alone.

GET  /dead-letters            the exporters and durable queues that are open
GET  /dead-letters/list       the letters of one that keeps them in memory; those on disk are read there
POST /dead-letters/requeue    put letters back, with a line on how far it is every half second
POST /dead-letters/purge      delete them, likewise
"""

from __future__ import annotations

import base64
import http
import json
import shlex
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from batchqueue_async.durable.dead_letters import DeadLetter

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

PREFIX = "/dead-letters"
COMMAND = "batchqueue-command"
"""A header that a command sends: no page of another site can, and no form."""
MOST_BODY = 4 << 20
PATIENCE = 30.0
"""Seconds without any progress, after which a request is ended."""
LONGEST = 86_400.0

own_sockets: set[Path] = set()
"""The sockets of this process at which commands are taken now."""

Kind = Literal["exporter", "durable_queue"]
Verb = Literal["requeue", "purge"]

# What browsers and proxies add, and a command does not.
_FOREIGN = ("origin", "referer", "cookie", "forwarded", "via", "x-real-ip", "access-control-request-method")
_FOREIGN_PREFIXES = ("sec-", "x-forwarded-")


class RefusedError(Exception):
    """A request is refused; `status` is the one of HTTP."""

    def __init__(self, status: http.HTTPStatus, text: str) -> None:
        super().__init__(text)
        self.status = status


class LetterHolder(msgspec.Struct, frozen=True, kw_only=True):
    """An exporter or a durable queue of a process, which may have dead letters.

    Attributes:
        kind: what it is.
        name: what it is called; a durable queue by its directory.
        path: the directory of its send queue; None in memory.
        forwards_to: the exporter that takes its dead letters instead; None where it keeps them.
    """

    kind: Kind
    name: str
    path: str | None = None
    forwards_to: str | None = None

    @property
    def label(self) -> str:
        """How it is named in sentences."""
        return f"exporter {self.name!r}" if self.kind == "exporter" else f"durable queue {self.path}"


class LetterRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A change that a command asks for.

    Attributes:
        kind: of what it is about.
        name: its name.
        path: its directory, as the process named it; None in memory.
        seqs: numbers among the dead letters; all when None.
        before: only those that died before, in seconds since 1970.
        timeout: seconds without progress, after which it is ended.
    """

    kind: Kind
    name: str
    path: str | None = None
    seqs: list[int] | None = None
    before: float | None = None
    timeout: float = PATIENCE


def refuse_foreign(headers: Mapping[str, str]) -> None:
    """Refuse what does not come from a command: a browser, a proxy that passes others on.

    Raises:
        RefusedError: it does not.
    """
    for name in headers:
        if name in _FOREIGN or name.startswith(_FOREIGN_PREFIXES):
            raise RefusedError(
                http.HTTPStatus.FORBIDDEN, f"dead letters: a request with the header {name} is not a command's"
            )
    if headers.get("host") != "localhost" or headers.get(COMMAND) != "dead-letters":
        raise RefusedError(
            http.HTTPStatus.FORBIDDEN, "dead letters: only `batchqueue dead-letters` of the same user may ask"
        )


def parse(body: bytes, verb: Verb) -> LetterRequest:
    """What a command asks for.

    Raises:
        RefusedError: that can't be understood.
    """
    try:
        # The standard library's: a path may hold bytes that UTF-8 does not have, which msgspec's own refuses.
        request = msgspec.convert(json.loads(body), LetterRequest)
    except (ValueError, RecursionError) as error:
        raise RefusedError(http.HTTPStatus.BAD_REQUEST, f"dead letters: not a request ({error})") from None
    if request.before is not None and verb != "purge":
        raise RefusedError(http.HTTPStatus.BAD_REQUEST, "dead letters: `before` belongs to purge alone")
    if not 0 < request.timeout <= LONGEST:
        raise RefusedError(
            http.HTTPStatus.BAD_REQUEST,
            f"dead letters: timeout={request.timeout:g} is not between 0 and {LONGEST:g} seconds",
        )
    return request


def choose(known: Sequence[LetterHolder], kind: str, name: str, path: str | None) -> int:
    """The place of the one that is meant; names are unique within a kind.

    Raises:
        RefusedError: it is not there.
    """
    for at, each in enumerate(known):
        if (each.kind, each.name, each.path) == (kind, name, path):
            return at
    raise RefusedError(http.HTTPStatus.NOT_FOUND, f"{kind} {name!r} is not open here any more")


class Stall:
    """Whether a piece of work goes on.

    Example:
        >>> stall = Stall(now=0.0)
        >>> [stall.seconds(done, now) for done, now in ((None, 3.0), (0, 4.0), (0, 6.0), (500, 8.0))]
        [3.0, 0.0, 2.0, 0.0]
    """

    def __init__(self, now: float) -> None:
        self._done: int | None = None
        self._since = now

    def seconds(self, done: int | None, now: float) -> float:
        """For how long nothing has been done; `done` is None until the work has begun."""
        if done != self._done:
            self._done, self._since = done, now
        return now - self._since


def stalled(label: str, seconds: float) -> str:
    """Why work was ended that did not go on."""
    return (
        f"{label}: nothing has gone on for {seconds:g} s, as where its send queue has no room; what is left stays a "
        "dead letter"
    )


def put_back_command(pid: int, exporter: str) -> str:
    """The line for a shell that puts an exporter's dead letters back while its process runs.

    Example:
        >>> put_back_command(4711, "ware house")
        "batchqueue dead-letters requeue 4711 '--exporter=ware house'"
    """
    return shlex.join(["batchqueue", "dead-letters", "requeue", str(pid), f"--exporter={exporter}"])


def letter_as_json(letter: DeadLetter) -> dict[str, Any]:
    """Everything that is known of a dead letter, for JSON."""
    return {
        "seq": letter.seq,
        "original_seq": letter.original_seq,
        "attempts": letter.attempts,
        "enqueued_at": letter.enqueued_at,
        "died_at": letter.died_at,
        "reason": letter.reason,
        "payload_base64": base64.b64encode(letter.payload).decode(),
    }


def letter_of_json(content: Mapping[str, Any]) -> DeadLetter:
    """The dead letter that `letter_as_json` made something of."""
    known = {name: content[name] for name in DeadLetter.__struct_fields__ if name != "payload"}
    return DeadLetter(payload=base64.b64decode(content["payload_base64"]), **known)


def line(content: Mapping[str, Any]) -> bytes:
    """A line of an answer."""
    return json.dumps(content).encode() + b"\n"


def missing(wanted: Iterable[int] | None, done: set[int]) -> list[int]:
    """The numbers that were asked for, and are not there."""
    return [] if wanted is None else sorted(set(wanted) - done)
