"""Where batches are traced when a program asks for it: calls are wrapped as they are set up, and nothing asks later.

Without tracing a handler is called as ever. A send to a destination asks once for its headers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence


class Tracing(Protocol):
    """Makes spans of calls; nothing that goes wrong in it reaches a call."""

    def handler(
        self, queue: str, handler: str, call: Callable[[list[Any]], Awaitable[Any]], /
    ) -> Callable[[list[Any]], Awaitable[Any]]:
        """A queue's handler, with a span for each batch."""
        ...

    def message(self, consumer: str, call: Callable[[Any], Awaitable[Any]], /) -> Callable[[Any], Awaitable[Any]]:
        """A consumer's handler of single messages, with a span for each, in the trace of who has sent it."""
        ...

    def messages(
        self, consumer: str, call: Callable[[Sequence[Any]], Awaitable[Any]], /
    ) -> Callable[[Sequence[Any]], Awaitable[Any]]:
        """A consumer's handler of batches, with a span for each, linked to the spans of those who have sent them."""
        ...

    def sends(
        self, exporter: str, sink: str, /
    ) -> Callable[[Callable[[], Awaitable[Any]], int, int], Awaitable[Any]] | None:
        """What makes an exporter's sends with a span for each: of the call, its records and the attempt's number."""
        ...

    def headers(self) -> dict[str, str]:
        """The headers that carry the trace of the running task to a destination."""
        ...


active: Tracing | None = None
"""What traces; the process's own, set by `observe.trace`."""


def headers(taken: Iterable[str] = ()) -> dict[str, str]:
    """The headers for a request that is made now, but for names that are taken; empty without tracing.

    Example:
        >>> headers()
        {}
    """
    if active is None:
        return {}
    found: Mapping[str, str] = active.headers()
    if not found:
        return {}
    names = {name.lower() for name in taken}
    return {name: value for name, value in found.items() if name.lower() not in names}
