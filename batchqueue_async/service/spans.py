"""Spans of a service's batches, where `observe.traces` of its file asks for them.

They go to the tracer provider that the program has set, or to one that OpenTelemetry's own variables describe.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from weakref import WeakSet

from batchqueue_async._support import log, tracing
from batchqueue_async._support.log import describe
from batchqueue_async._support.wording import nearest, short
from batchqueue_async.errors import ConfigError, ConfigFault

if TYPE_CHECKING:
    from collections.abc import Iterable
    from importlib.metadata import EntryPoint

    from batchqueue_async.observe.traces import Traces
    from batchqueue_async.service.file.spec import ServiceSpec

LAST_SPANS = 5.0
"""The most seconds that the end of a service waits for spans that are not sent yet: their collector may be away."""
_EXPORTERS = "OTEL_TRACES_EXPORTER"
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_BY_PROTOCOL = {"grpc": "otlp_proto_grpc", "http/protobuf": "otlp_proto_http"}
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", ENDPOINT)
# Where there is no variable, and where a URL has no port; gRPC has the one port for both.
_DEFAULTS = {"otlp_proto_grpc": "http://localhost:4317", "otlp_proto_http": "http://localhost:4318"}
_PORTS = {"otlp_proto_grpc": {"http": 4317, "https": 4317}, "otlp_proto_http": {"http": 80, "https": 443}}

_ended: WeakSet[Any] = WeakSet()
"""Providers of services that have ended: OpenTelemetry keeps the first that is set for as long as the process runs."""


def faults(spec: ServiceSpec) -> list[ConfigFault]:
    """Why the tracing that a file asks for can't begin here; nothing is sent."""
    if not wanted(spec):
        return []
    try:
        _check()
        if _provider_of_the_program() is None:
            for each in _exporters():
                each.shutdown()
    except ConfigError as error:
        return [_fault(spec, error)]
    return []


def wanted(spec: ServiceSpec) -> bool:
    """Whether the file asks for traces."""
    section = spec.observe.get("traces")
    return section is not None and bool(section.get("enabled", True))


class Spans:
    """The tracing of one service, from before its parts are made until they have ended."""

    def __init__(self, spec: ServiceSpec) -> None:
        """Begin.

        Raises:
            ConfigError: a package is missing, the program traces by itself, or a variable says what can't be done.
        """
        self._own: Any = None
        try:
            _check()
            provider = _provider_of_the_program()
            if provider is None:
                provider = self._own = _made(spec.name)
        except ConfigError as error:
            raise ConfigError.of([_fault(spec, error)]) from error
        from opentelemetry import trace as api  # noqa: PLC0415 - an extra

        from batchqueue_async.observe.traces import trace  # noqa: PLC0415 - needs the extra

        if isinstance(api.get_tracer_provider(), api.ProxyTracerProvider):
            # The spans that handlers make, and those of instrumented clients, go the same way.
            api.set_tracer_provider(provider)
        self._traces: Traces = trace(provider, skip=frozenset(spec.observe["traces"].get("skip", ())))

    async def end(self, seconds: float) -> None:
        """Make no more spans, and send those that are left if it does not take longer than this."""
        self._traces.stop()
        if self._own is None:
            return
        _ended.add(self._own)
        loop, sent = asyncio.get_running_loop(), asyncio.Event()

        def shut_down(provider: Any) -> None:
            try:
                provider.shutdown()
            except Exception as error:  # noqa: BLE001 - an exporter may be anybody's
                log.warning("traces_not_sent", **describe(error))
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(sent.set)

        # A daemon: an exporter whose collector does not answer must not keep the process.
        threading.Thread(target=shut_down, args=(self._own,), name="batchqueue-spans", daemon=True).start()
        within = min(seconds, LAST_SPANS)
        try:
            async with asyncio.timeout(within):
                await sent.wait()
        except TimeoutError:
            log.warning("traces_not_sent", reason=f"the collector has not taken the last spans within {within:.3g} s")


def collectors(spec: ServiceSpec) -> list[tuple[str, int]]:
    """Where the spans of a file go over the network: hosts and ports, as far as OpenTelemetry's variables say it.

    None for spans that go to the program's own provider, or to exporters of other protocols.
    """
    if not wanted(spec) or _provider_of_the_program() is not None:
        return []
    found: list[tuple[str, int]] = []
    for name in [each.name for each in _entries() if each.name in _DEFAULTS]:
        given = _variable(_ENDPOINTS) or _DEFAULTS[name]
        parts = urlsplit(given if "://" in given else f"http://{given}")
        if parts.hostname and parts.scheme in _PORTS[name]:
            found.append((parts.hostname, parts.port or _PORTS[name][parts.scheme]))
    return found


def _variable(names: Iterable[str]) -> str | None:
    """The first of OpenTelemetry's variables that is set."""
    return next((os.environ[each].strip() for each in names if os.environ.get(each, "").strip()), None)


def _fault(spec: ServiceSpec, error: ConfigError) -> ConfigFault:
    rule, _, way_out = str(error).rpartition("; ")
    return ConfigFault(path="observe.traces", rule=rule, way_out=way_out, origin=spec.origins.get("observe.traces", ""))


def _check() -> None:
    """That OpenTelemetry is there, and nothing in this process traces."""
    try:
        import_module("opentelemetry.trace")
    except ImportError:
        raise ConfigError("needs opentelemetry-api; run: pip install 'batchqueue-async[otel]'") from None
    if tracing.active is not None:
        raise ConfigError("is given, and the program traces by itself, with observe.trace(); remove one of the two")


def _provider_of_the_program() -> Any:
    from opentelemetry import trace as api  # noqa: PLC0415 - an extra

    found: Any = api.get_tracer_provider()
    return None if isinstance(found, api.ProxyTracerProvider) or found in _ended else found


def _made(name: str) -> Any:
    """A provider as OpenTelemetry's variables describe it; without OTEL_SERVICE_NAME it has the name of the service."""
    exporters = _exporters()
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource  # noqa: PLC0415 - `_exporters` has seen to it
    from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415 - likewise
    from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415 - likewise

    resource = Resource.create()
    if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: name}))
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    for each in exporters:
        provider.add_span_processor(BatchSpanProcessor(each))
    return provider


def _exporters() -> list[Any]:
    """The exporters that OTEL_TRACES_EXPORTER names; `otlp` without it."""
    try:
        import_module("opentelemetry.sdk.trace")
    except ImportError:
        raise ConfigError(
            "needs OpenTelemetry's SDK and an exporter, or a tracer provider that the program sets; run: "
            "pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
        ) from None
    made: list[Any] = []
    for entry in _entries():
        try:
            made.append(entry.load()())
        except Exception as error:
            said = describe(error)
            raise ConfigError(
                f"can't make the exporter {entry.name} ({said['error']}: {said['text']}); correct its variables OTEL_*"
            ) from error
    return made


def _entries() -> list[EntryPoint]:
    names = [each.strip() for each in (os.environ.get(_EXPORTERS, "").strip() or "otlp").split(",")]
    return [_entry(name) for name in names if name != "none"]


def _entry(name: str) -> EntryPoint:
    known = {each.name: each for each in entry_points(group="opentelemetry_traces_exporter")}
    protocol = _variable(_PROTOCOLS)
    if name == "otlp":
        if protocol is not None and protocol not in _BY_PROTOCOL:
            raise ConfigError(
                f"can't use the protocol {short(protocol)} of {_PROTOCOLS[1]}; {nearest(protocol, _BY_PROTOCOL)}"
            )
        # Where nothing is said it is gRPC, as OpenTelemetry's SDK has it, or HTTP where only that is there.
        choices = [*_BY_PROTOCOL.values()] if protocol is None else [_BY_PROTOCOL[protocol]]
        name = next((each for each in choices if each in known), choices[-1])
    if name in known:
        return known[name]
    if name in _BY_PROTOCOL.values():
        package = f"opentelemetry-exporter-{name.replace('_', '-')}"
        raise ConfigError(f"needs an exporter of OpenTelemetry; run: pip install {package}")
    raise ConfigError(
        f"can't use the exporter {short(name)} of {_EXPORTERS}: it is not installed; "
        f"{nearest(name, ['otlp', 'none', *known])}"
    )
