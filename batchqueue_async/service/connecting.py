"""Whether what a file names can be reached: sinks are opened and closed, the ports of brokers and collectors tried."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from batchqueue_async._support.redaction import without_credentials
from batchqueue_async.errors import ConfigFault
from batchqueue_async.service import spans
from batchqueue_async.service.building import Builder
from batchqueue_async.service.file.rules import is_reference
from batchqueue_async.sinks.secrets import resolve

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from batchqueue_async.service.app import App
    from batchqueue_async.service.file.spec import ServiceSpec

PORTS = {
    "amqp": 5672,
    "amqps": 5671,
    "nats": 4222,
    "tls": 4222,
    "redis": 6379,
    "rediss": 6379,
    "http": 80,
    "https": 443,
}


async def connect(spec: ServiceSpec, app: App, *, timeout: float) -> list[ConfigFault]:
    """Try everything at the same time; what can't be reached."""
    builder = Builder(spec, app)
    sinks = builder.sinks()
    tries = [_Try(f"sinks.{name}", spec.sinks[name].origin, _open(sink)) for name, sink in sinks.items()]
    for name, source in spec.sources.items():
        tries += [_Try(f"sources.{name}", source.origin, _reach(each)) for each in addresses_of(source.values)]
    for host, port in spans.collectors(spec):
        collector = f"sends to {host}:{port}, which "
        origin = spec.origins.get("observe.traces", "")
        tries.append(_Try("observe.traces", origin, _reach((host, port)), collector, spans.ENDPOINT))
    outcomes = await asyncio.gather(*(_within(each.work, timeout) for each in tries))
    return [
        ConfigFault(
            path=each.path,
            rule=f"{each.who}can't be reached: {problem}",
            way_out=f"start it, or correct {each.address}",
            origin=each.origin,
        )
        for each, problem in zip(tries, outcomes, strict=True)
        if problem is not None
    ]


class _Try(NamedTuple):
    path: str
    origin: str
    work: Coroutine[Any, Any, Any]
    who: str = ""
    address: str = "the address"


async def _within(work: Coroutine[Any, Any, Any], timeout: float) -> str | None:
    try:
        async with asyncio.timeout(timeout):
            await work
    except TimeoutError:
        return f"it does not answer within {timeout:g} s"
    except Exception as error:  # noqa: BLE001 - a sink may be the user's: any error says that it can't be reached
        return without_credentials(str(error)) or type(error).__name__
    return None


async def _open(sink: Any) -> None:
    try:
        await sink.open()
        check = getattr(sink, "check", None)
        if check is not None:
            await check()
    finally:
        await sink.close()


async def _reach(address: tuple[str, int]) -> None:
    _, writer = await asyncio.open_connection(*address)
    writer.close()


def addresses_of(values: Any) -> list[tuple[str, int]]:
    """Where a source connects to: hosts and ports.

    Example:
        >>> addresses_of({"url": "amqp://shop@broker/shop"}), addresses_of({"bootstrap": ["one:9092", "two:9092"]})
        ([('broker', 5672)], [('one', 9092), ('two', 9092)])
    """
    if "bootstrap" in values:
        pairs = [each.rpartition(":") for text in values["bootstrap"] for each in text.split(",")]
        return [(host, int(port)) for host, _, port in pairs if port.isdecimal()]
    given: Any = values["url"]
    found: list[tuple[str, int]] = []
    for each in [given] if isinstance(given, str) else given:
        parts = urlsplit(resolve(each) if is_reference(each) else each)
        if parts.hostname and parts.scheme in PORTS:
            found.append((parts.hostname, parts.port or PORTS[parts.scheme]))
    return found
