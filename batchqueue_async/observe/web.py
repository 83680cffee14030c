"""The pages and numbers over HTTP, as an ASGI application: read-only, without payloads, and with a strict policy.

/metrics  /livez  /healthz  /readyz  /status  /stats  /events  /ui
"""

from __future__ import annotations

import asyncio
import hmac
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchqueue_async.errors import ConfigError
from batchqueue_async.observe.observer import Observer
from batchqueue_async.observe.prometheus import OPEN_METRICS, TEXT, as_text
from batchqueue_async.observe.sentences import summary, why

try:
    from starlette.applications import Starlette
    from starlette.responses import RedirectResponse, Response, StreamingResponse
    from starlette.routing import Route
except ImportError as error:  # pragma: no cover - the tests have it
    raise ConfigError(
        "batchqueue_async.observe: the web pages need starlette; run: pip install 'batchqueue-async[service]'"
    ) from error

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, MutableMapping, Sequence

    from starlette.requests import Request
    from starlette.types import ASGIApp, Receive, Scope, Send

    from batchqueue_async.observe.dashboard import Frame
    from batchqueue_async.runtime.manager import BatchQueueManager

STATIC = Path(__file__).parent / "static"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
COOKIE = "batchqueue_token"
_HOST = re.compile(r"(?:\[(?P<six>[^\]]+)\]|(?P<name>[^:\[\]@/]+))(?::[0-9]*)?")
# What says nothing of the program but that it lives: probes need no token for it.
_OPEN = ("/livez", "/healthz", "/readyz")
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
MOST_VIEWERS = 64
"""Pages that are sent frames at once."""
_LEAST_WAIT = 0.01


def asgi(
    manager: BatchQueueManager | None = None,
    *,
    token: str | None = None,
    hosts: Sequence[str] | None = None,
    observer: Observer | None = None,
) -> ASGIApp:
    """The pages as an ASGI application, to be mounted in a program's own.

    It runs on the loop of the application that it is mounted in, and so answers only while that loop does; `serve` has
    a thread of its own.

    Args:
        manager: whose queues are shown; those of every manager of the process when None.
        token: what a caller has to show, as `Authorization: Bearer ...` or `/ui?token=...`; None asks for nothing, and
            leaves access to the outer application.
        hosts: the host names by which it may be called; any when None.
        observer: what looks at the process; a new one when None.

    Example:
        >>> from starlette.applications import Starlette
        >>> from starlette.routing import Mount
        >>> application = Starlette(routes=[Mount("/ops", app=asgi())])
    """
    pages = _Pages(observer or Observer(manager))
    routes = [
        Route("/metrics", pages.metrics),
        Route("/livez", pages.livez),
        Route("/healthz", pages.livez),
        Route("/readyz", pages.readyz),
        Route("/status", pages.status),
        Route("/stats", pages.stats),
        Route("/events", pages.events),
        Route("/ui", pages.ui),
        Route("/", pages.index),
        Route("/favicon.ico", pages.favicon),
        Route("/static/{name}", pages.static),
    ]
    return _Guard(Starlette(routes=routes), token, hosts)


class _Guard:
    """Refuses what is not read, callers by a foreign host name, and callers without the token; adds the headers."""

    def __init__(self, app: ASGIApp, token: str | None, hosts: Sequence[str] | None) -> None:
        self._app = app
        self._token = token
        self._hosts = None if hosts is None else {host.lower() for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}

        async def with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                there = {name for name, _ in message["headers"]}
                message["headers"] = [
                    *message["headers"],
                    *(
                        (name.lower().encode(), value.encode())
                        for name, value in HEADERS.items()
                        if name.lower().encode() not in there
                    ),
                ]
            await send(message)

        answer = self._refusal(scope, headers)
        await (self._app if answer is None else answer)(scope, receive, with_headers)

    def _refusal(self, scope: Scope, headers: dict[str, str]) -> Response | None:
        if scope["method"] not in {"GET", "HEAD"}:
            return _text("only GET: nothing can be changed here\n", 405, {"Allow": "GET, HEAD"})
        if self._hosts is not None and _host(headers.get("host", "")) not in self._hosts:
            return _text("this host name is not served; see `hosts` of observe.serve\n", 421)
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if self._token is None or path in _OPEN:
            return None
        given = headers.get("authorization", "").removeprefix("Bearer ")
        if self._matches(given) or self._matches(_cookie(headers.get("cookie", ""))):
            return None
        asked = scope["query_string"].decode("latin-1")
        if path == "/ui" and asked.startswith("token=") and self._matches(_unquoted(asked.removeprefix("token="))):
            # Out of the address, where it would be kept; the page's own requests have the cookie.
            answer = RedirectResponse("ui", status_code=303)
            answer.set_cookie(COOKIE, self._token, httponly=True, samesite="strict")
            return answer
        return _text(
            "a token is needed: Authorization: Bearer TOKEN, or /ui?token=TOKEN\n", 401, {"WWW-Authenticate": "Bearer"}
        )

    def _matches(self, given: str) -> bool:
        return self._token is not None and hmac.compare_digest(given.encode(), self._token.encode())


def _host(header: str) -> str:
    """The host's name without its port; empty where there is none."""
    found = _HOST.fullmatch(header)
    return "" if found is None else (found["six"] or found["name"]).lower()


def _cookie(header: str) -> str:
    for each in header.split(";"):
        name, _, value = each.strip().partition("=")
        if name == COOKIE:
            return value.strip('"')
    return ""


def _unquoted(text: str) -> str:
    from urllib.parse import unquote_plus  # noqa: PLC0415 - asked once per visitor

    return unquote_plus(text)


def _text(text: str, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(text, status, headers, media_type="text/plain")


class _Viewers:
    """How many pages are sent frames now."""

    def __init__(self) -> None:
        self.count = 0


class _Frames(StreamingResponse):
    """Frames for one page, or the answer that there are too many."""

    def __init__(self, frames: AsyncIterator[bytes], viewers: _Viewers) -> None:
        super().__init__(frames, media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})
        self._viewers = viewers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._viewers.count >= MOST_VIEWERS:
            refusal = _text(f"{MOST_VIEWERS} viewers are sent frames already; close one of them\n", 503)
            await refusal(scope, receive, send)
            return
        self._viewers.count += 1
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._viewers.count -= 1


class _Pages:
    """What is answered to whom asks; everything is read from the observer."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        # The frame that was sent last, as text: a hundred viewers are sent the same.
        self._sent: tuple[Frame, bytes] | None = None
        self._viewers = _Viewers()

    def _json(self, value: object, status: int = 200) -> Response:
        return Response(self._observer.as_json(value), status, media_type="application/json")

    async def index(self, _: Request) -> Response:
        return RedirectResponse("ui", status_code=307)

    async def metrics(self, request: Request) -> Response:
        snapshot, _status = self._observer.look()
        open_metrics = "application/openmetrics-text" in request.headers.get("accept", "")
        text = as_text(snapshot, open_metrics=open_metrics)
        return Response(text, headers={"Content-Type": OPEN_METRICS if open_metrics else TEXT})

    async def livez(self, _: Request) -> Response:
        status = self._observer.glance()[1]
        return self._json({"live": status.live}, 200 if status.live else 503)

    async def readyz(self, _: Request) -> Response:
        status = self._observer.glance()[1]
        return self._json({"ready": status.ready, "phase": status.phase}, 200 if status.ready else 503)

    async def status(self, request: Request) -> Response:
        snapshot, status = self._observer.glance()
        wanted = request.query_params.get("component")
        if wanted is None:
            return self._json(
                {
                    "sentence": summary(status, snapshot),
                    "why": why(status),
                    "pid": snapshot.pid,
                    "version": snapshot.version,
                    "started": snapshot.started,
                    "status": status,
                }
            )
        found = status.of(wanted)
        if found is None:
            known = ", ".join(each.component for each in status.components) or "there is none yet"
            return self._json({"error": f"component {wanted!r} is not here; there are: {known}"}, 404)
        return self._json(found, 200 if found.well else 503)

    async def stats(self, _: Request) -> Response:
        snapshot, _status = self._observer.look()
        return self._json(snapshot)

    async def events(self, _: Request) -> Response:
        return _Frames(self._frames(), self._viewers)

    async def _frames(self) -> AsyncIterator[bytes]:
        observer = self._observer
        yield b"retry: 1000\n\nevent: history\ndata: " + observer.as_json(observer.history()) + b"\n\n"
        last: Frame | None = None
        while True:
            frame = observer.frame()
            if frame is not last:
                yield self._event(frame)
                last = frame
            await asyncio.sleep(max(_LEAST_WAIT, observer.next_frame_in()))

    def _event(self, frame: Frame) -> bytes:
        if self._sent is None or self._sent[0] is not frame:
            self._sent = frame, b"data: " + self._observer.as_json(frame) + b"\n\n"
        return self._sent[1]

    async def ui(self, _: Request) -> Response:
        return _file("index.html")

    async def favicon(self, _: Request) -> Response:
        return _file("favicon.svg")

    async def static(self, request: Request) -> Response:
        return _file(request.path_params["name"])


_files: dict[str, tuple[bytes, str]] = {}


def _file(name: str) -> Response:
    """A file of the page; there are a few, and they are read once."""
    if not _files:
        for path in STATIC.iterdir():
            if path.suffix in _TYPES:
                _files[path.name] = (path.read_bytes(), _TYPES[path.suffix])
    found = _files.get(name)
    if found is None:
        return _text("there is no such file\n", 404)
    return Response(found[0], media_type=found[1])
