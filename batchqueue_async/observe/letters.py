"""Dead letters of the running process, for commands of its own user: asked of the exporters on their own loops.

Only the socket that `serve("unix:")` makes leads here. Over TCP, on a socket of another name, and where the pages are
mounted into an application, none of this exists.
"""

from __future__ import annotations

import asyncio
import contextlib
import http
import os
import socket
import struct
import time
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.applications import Starlette
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from batchqueue_async._support import log
from batchqueue_async._support.log import describe
from batchqueue_async._support.registry import everything
from batchqueue_async.errors import BatchQueueError
from batchqueue_async.observe.connections import Connection
from batchqueue_async.observe.letter_requests import (
    MOST_BODY,
    PATIENCE,
    PREFIX,
    LetterHolder,
    RefusedError,
    Stall,
    choose,
    letter_as_json,
    line,
    missing,
    parse,
    refuse_foreign,
    stalled,
)
from batchqueue_async.observe.snapshot import named_registered
from batchqueue_async.runtime.loop_calls import submit

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence

    from starlette.requests import Request
    from starlette.types import ASGIApp, Receive, Scope, Send

    from batchqueue_async.durable.dead_letters import DeadLetter
    from batchqueue_async.observe.letter_requests import LetterRequest, Verb
    from batchqueue_async.runtime.loop_calls import LoopCall

_EVERY = 0.5
_GLANCE = 0.02
_ENDS = 5.0
_BODY = 10.0
_MOST_LETTERS = 1_000
_NOTHING = {"count": 0, "begun": False}


class SameUserProtocol(Connection):
    """HTTP with processes of this process's user, and with root's; others are cut off before they have said a word."""

    _refused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Look who it is."""
        if not same_user(transport.get_extra_info("socket")):
            self._refused = True
            log.warning("foreign_user_refused")
            transport.close()
            return
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """Take what was sent."""
        if not self._refused:
            super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        if not self._refused:
            super().connection_lost(exc)


def same_user(peer: socket.socket) -> bool:
    """Whether the other end of a unix socket is this user, or root; where the system does not say, its mode must do."""
    if not hasattr(socket, "SO_PEERCRED"):  # pragma: no cover - not Linux
        return True
    _pid, uid, _gid = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return uid in {os.geteuid(), 0}


def with_letters(pages: ASGIApp) -> ASGIApp:
    """The pages, and with them what commands ask about dead letters."""
    letters = _Letters()
    routes = [
        Route(PREFIX, letters.holders, methods=["GET"]),
        Route(f"{PREFIX}/list", letters.list, methods=["GET"]),
        Route(f"{PREFIX}/requeue", letters.requeue, methods=["POST"]),
        Route(f"{PREFIX}/purge", letters.purge, methods=["POST"]),
    ]
    commands = Starlette(routes=routes)

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        chosen: ASGIApp = pages
        if scope["type"] == "http" and (scope["path"] == PREFIX or scope["path"].startswith(f"{PREFIX}/")):
            try:
                refuse_foreign({name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]})
                chosen = commands
            except RefusedError as error:
                chosen = _refusal(error)
        await chosen(scope, receive, send)

    return application


class _ClosingError(BatchQueueError):
    """It was asked for when it was too late."""


class _Operation:
    """Work on the dead letters of one exporter, on its own loop; its counts are read from the ops thread.

    Attributes:
        count: letters that have been dealt with.
        begun: whether the loop has got to it.
        done: their numbers, where some were asked for.
        ended: whether nothing of it runs any more, or ever will.
        fault: why it did not come to its end; None if it did.
    """

    def __init__(
        self,
        holder: LetterHolder,
        loop: asyncio.AbstractEventLoop,
        act: Callable[[Callable[[Sequence[int]], None]], Coroutine[Any, Any, object]],
        *,
        timeout: float,
        keeps_numbers: bool = False,
    ) -> None:
        self.holder = holder
        self.count = 0
        self.done: set[int] = set()
        self.begun = False
        self.ended = False
        self.fault: str | None = None
        self._loop = loop
        self._act = act
        self._timeout = timeout
        self._keeps_numbers = keeps_numbers

    def _progress(self, seqs: Sequence[int]) -> None:
        self.count += len(seqs)
        if self._keeps_numbers:
            self.done.update(seqs)

    async def _run(self) -> None:
        self.begun = True
        try:
            await self._act(self._progress)
        except _ClosingError:
            self.begun = False
            raise
        finally:
            self.ended = True

    async def lines(self) -> AsyncGenerator[bytes]:
        """Lines on how far it is, until it has ended; closed before, the work is ended with it."""
        try:
            call = submit(self._loop, self._run)
        except RuntimeError:
            self.ended, self.fault = True, f"{self.holder.label}: its event loop has ended"
            return
        try:
            async for each in self._wait(call):
                yield each
        finally:
            # What has not begun never does; what has, ends at its next wait.
            if call.cancel() and not call.begun:
                self.ended = True
        end = time.monotonic() + _ENDS
        pause = _GLANCE
        while not self.ended and time.monotonic() < end and not self._loop.is_closed():
            await asyncio.sleep(pause)
            pause = min(2 * pause, _EVERY)
            yield line({"done": self.count})
        if self.fault is not None and not self.ended:
            self.fault += "; it was cancelled and has not ended yet, so that the count may still rise"

    async def _wait(self, call: LoopCall[None]) -> AsyncGenerator[bytes]:
        stall = Stall(time.monotonic())
        mine = asyncio.wrap_future(call)
        try:
            while not call.done() and not self._loop.is_closed():
                if stall.seconds(self.count if call.begun else None, time.monotonic()) >= self._timeout:
                    self.fault = self._stalled(begun=call.begun)
                    return
                yield line({"done": self.count})
                await asyncio.wait((mine,), timeout=_EVERY)
            self.fault = self._fault_of(call)
        finally:
            mine.cancel()
            if mine.done() and not mine.cancelled():
                mine.exception()  # the same as the call's

    def _stalled(self, *, begun: bool) -> str:
        label = self.holder.label
        if not begun:
            return (
                f"{label}: its event loop has been busy for {self._timeout:g} s; "
                f"`batchqueue why {os.getpid()}` says since when"
            )
        return stalled(label, self._timeout)

    def _fault_of(self, call: LoopCall[None]) -> str | None:
        label = self.holder.label
        if not call.done() or call.cancelled():
            return f"{label}: it ended in the midst; what is left stays a dead letter"
        error = call.exception()
        if error is None:
            return None
        if isinstance(error, BatchQueueError | OSError):
            return str(error)
        said = describe(error)
        log.error("dead_letters_command_failed", exporter=self.holder.name, **said)
        return f"{label}: {said['error']}: {said['text']}"


class _Lines(StreamingResponse):
    """Lines as they come; whoever goes away ends what makes them."""

    def __init__(self, lines: AsyncGenerator[bytes]) -> None:
        self._lines = lines
        super().__init__(lines, media_type="application/x-ndjson")

    async def stream_response(self, send: Send) -> None:
        """Send them."""
        async with contextlib.aclosing(self._lines):
            await super().stream_response(send)


class _Letters:
    """What is answered."""

    def __init__(self) -> None:
        self._busy: dict[int, tuple[Verb, _Operation]] = {}

    async def holders(self, _: Request) -> Response:
        found = [msgspec.to_builtins(holder) for holder, _thing in await asyncio.to_thread(holders)]
        return Response(line({"pid": os.getpid(), "holders": found}), media_type="application/json")

    async def list(self, request: Request) -> Response:
        query = request.query_params
        try:
            holder, thing = await _chosen("exporter", query.get("name", ""), None)
        except RefusedError as error:
            return _refusal(error)
        return _Lines(self._list(holder, thing))

    async def _list(self, holder: LetterHolder, thing: Any) -> AsyncGenerator[bytes]:
        letters: list[DeadLetter] = []

        async def read(_: object) -> None:
            letters.extend(await thing.dead_letters(_MOST_LETTERS))

        operation = _Operation(holder, thing.loop, read, timeout=PATIENCE)
        async with contextlib.aclosing(operation.lines()) as lines:
            async for each in lines:
                yield each
        if operation.fault is not None:
            yield line({"error": operation.fault, **_NOTHING})
            return
        for letter in letters:
            yield line({"letter": await asyncio.to_thread(letter_as_json, letter)})
        yield line({"count": len(letters)})

    async def requeue(self, request: Request) -> Response:
        return await self._change(request, "requeue")

    async def purge(self, request: Request) -> Response:
        return await self._change(request, "purge")

    async def _change(self, request: Request, verb: Verb) -> Response:
        try:
            wanted = parse(await _body(request), verb)
            holder, thing = await _chosen(wanted.kind, wanted.name, wanted.path)
        except RefusedError as error:
            return _refusal(error)
        return _Lines(self._work(holder, thing, wanted, verb))

    async def _work(self, holder: LetterHolder, thing: Any, wanted: LetterRequest, verb: Verb) -> AsyncGenerator[bytes]:
        """Lines on how far it is, and at the end what became of it."""
        before, other = self._busy.get(id(thing), (verb, None))
        if other is not None and not other.ended:
            text = f"another command is at work there ({before}, {other.count} letters so far)"
            yield line({"error": f"{holder.label}: {text}; run this again when that has ended", **_NOTHING})
            return

        dropped = 0

        async def act(progress: Callable[[Sequence[int]], None]) -> None:
            nonlocal dropped
            if thing.closed:
                raise _ClosingError(f"{holder.label}: it is closing; run this again when it has closed")
            dropped = -_dropped(thing)
            try:
                if verb == "requeue":
                    await thing.requeue_dead_letters(wanted.seqs, progress=progress)
                else:
                    await thing.purge_dead_letters(wanted.seqs, before=wanted.before, progress=progress)
            finally:
                dropped += _dropped(thing)

        operation = _Operation(holder, thing.loop, act, timeout=wanted.timeout, keeps_numbers=wanted.seqs is not None)
        self._busy[id(thing)] = verb, operation
        try:
            async with contextlib.aclosing(operation.lines()) as lines:
                async for each in lines:
                    yield each
        finally:
            log.info("dead_letters_command", verb=verb, exporter=holder.name, letters=operation.count)
            if operation.ended:
                self._busy.pop(id(thing), None)
        count = {"count": operation.count}
        if operation.fault is not None:
            yield line({"error": operation.fault, **count, "begun": operation.begun})
        else:
            yield line({**count, "missing": missing(wanted.seqs, operation.done), "dropped": max(0, dropped)})


def _dropped(thing: Any) -> int:
    """What its send queue has dropped so far: under `drop_oldest`, letters that go back may push others out."""
    return sum(thing.stats().dropped.values())


def holders() -> list[tuple[LetterHolder, Any]]:
    """What is open in this process and may have dead letters, exporters first."""
    exporters: list[tuple[LetterHolder, Any]] = []
    kept: set[str] = set()
    for name, each in named_registered():
        if each.kind != "exporter":
            continue
        path = each.thing.config.path
        kept |= set() if path is None else {os.path.realpath(path)}
        forward = each.thing.forwards_to
        exporters.append(
            (
                LetterHolder(
                    kind="exporter",
                    name=name,
                    path=None if path is None else os.path.realpath(path),
                    forwards_to=None if forward is None else forward.name,
                ),
                each.thing,
            )
        )
    queues = [
        (LetterHolder(kind="durable_queue", name=each.name, path=os.path.realpath(each.thing.path)), each.thing)
        for each in everything.all("durable_queue")
        # An exporter's own is the exporter's.
        if os.path.realpath(each.thing.path) not in kept
    ]
    return exporters + queues


async def _chosen(kind: str, name: str, path: str | None) -> tuple[LetterHolder, Any]:
    # Not on this thread: a file system that does not answer must not keep the pages from answering.
    known = await asyncio.to_thread(holders)
    return known[choose([holder for holder, _ in known], kind, name, path)]


async def _body(request: Request) -> bytes:
    """What was sent, within bounds of size and time."""
    if not request.headers.get("content-type", "").startswith("application/json"):
        raise RefusedError(http.HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "dead letters: only application/json")
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY):
            async for part in request.stream():
                body += part
                if len(body) > MOST_BODY:
                    raise RefusedError(
                        http.HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                        f"dead letters: a request has at most {MOST_BODY} bytes; ask for fewer numbers at once",
                    )
    except TimeoutError:
        raise RefusedError(http.HTTPStatus.REQUEST_TIMEOUT, "dead letters: the request did not come") from None
    return bytes(body)


def _refusal(error: RefusedError) -> Response:
    return Response(line({"error": str(error), **_NOTHING}), error.status, media_type="application/json")
