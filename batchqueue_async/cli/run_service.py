"""`batchqueue run` and `check` of a service: read, say what is wrong, run until a signal, say how it ended."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from batchqueue_async.cli.commands import FAILED, FINE, WRONG, complain, plain, say
from batchqueue_async.errors import BatchQueueError, ConfigError, ConfigFault
from batchqueue_async.service.app import App, load_app
from batchqueue_async.service.file.reading import read_service, warnings_of, where

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from batchqueue_async.cli.commands import Arguments
    from batchqueue_async.observe.server import OpsServer
    from batchqueue_async.service.file.spec import ServiceSpec
    from batchqueue_async.service.running import Service, ServiceReport

CONNECT_TIMEOUT = 10.0

# -- run -------------------------------------------------------------------------------------------------------------


def run(arguments: Arguments) -> int:
    """Run the service of a file; the exit status."""
    from batchqueue_async.runtime.scheduler import new_event_loop
    from batchqueue_async.service import logs

    # Until the service listens to it: one that comes while it starts must not end it.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        spec = _read(arguments)
        app = load_app(arguments.app, arguments.file)
    except ConfigError as error:
        _complain(error)
        return FAILED
    logs.configure(spec.logs.get("level", "info"), spec.logs.get("format", "text"))
    try:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            report = runner.run(_serve(arguments, spec, app))
    except BatchQueueError as error:
        _complain(error)
        return FAILED
    for line in report.lines():
        complain(f"{spec.name}: {line}")
    return report.code


async def _serve(arguments: Arguments, spec: ServiceSpec, app: App) -> ServiceReport:
    from batchqueue_async.runtime.service_manager import ServiceManager
    from batchqueue_async.service.running import Service
    from batchqueue_async.service.signals import StopSignals

    service = Service(spec, app, read_again=lambda: _read(arguments))
    loop = asyncio.get_running_loop()
    systemd = ServiceManager()
    with StopSignals(lambda: service.spec.drain_timeout) as signals, systemd.fed(loop):
        opening = loop.create_task(service.__aenter__(), name="service-open")
        asked = loop.create_task(signals.asked.wait(), name="service-asked")
        await asyncio.wait({opening, asked}, return_when=asyncio.FIRST_COMPLETED)
        if not opening.done():
            opening.cancel()
        try:
            await opening
        except asyncio.CancelledError:
            if service.report is None:
                raise
            return service.report
        finally:
            asked.cancel()
        _greet(service.spec, service.ops)
        systemd.ready()
        systemd.status(f"running {spec.counts()}")
        try:
            await service.run(signals)
        finally:
            systemd.stopping()
            hurrying = loop.create_task(_hurry(signals.hurry, service), name="service-hurry")
            report = await service.stop()
            hurrying.cancel()
    return report


async def _hurry(hurry: asyncio.Event, service: Service) -> None:
    await hurry.wait()
    service.hurry()


def _greet(spec: ServiceSpec, ops: OpsServer | None) -> None:
    pages = [] if ops is None else [f"{url}/ui" for url in ops.urls]
    complain(f"{spec.name}: running {spec.counts()}{'; the page is ' + ', '.join(pages) if pages else ''}")


def _read(arguments: Arguments, *, secrets: bool = True) -> ServiceSpec:
    return read_service(arguments.file, settings=arguments.set, secrets=secrets)


# -- check -----------------------------------------------------------------------------------------------------------


def check(arguments: Arguments) -> int:
    """Say everything that is wrong with a file; 1 if anything is."""
    no_env = getattr(arguments, "no_env", False)
    as_json = getattr(arguments, "json", False)
    began = time.perf_counter()
    faults: list[ConfigFault] = []
    warnings: list[ConfigFault] = []
    spec: ServiceSpec | None = None
    try:
        spec = _read(arguments, secrets=not no_env)
    except ConfigError as error:
        faults = list(error.faults)
    took = time.perf_counter() - began
    if spec is not None:
        warnings = warnings_of(spec)
        if not no_env:
            faults = _make_all(arguments, spec)
        if not faults and getattr(arguments, "connect", False):
            faults = asyncio.run(_connect_all(spec, load_app(arguments.app, arguments.file)))
    strict = getattr(arguments, "strict", False)
    if as_json:
        said = {
            "file": str(arguments.file),
            "ok": not (faults or (strict and warnings)),
            "milliseconds": round(took * 1e3, 1),
            "errors": [_as_dict(each) for each in faults],
            "warnings": [_as_dict(each) for each in warnings],
        }
        say(json.dumps(said, indent=2))
    else:
        _say_all(arguments, spec, faults, warnings)
    return WRONG if faults or (strict and warnings) else FINE


def _say_all(
    arguments: Arguments, spec: ServiceSpec | None, faults: Sequence[ConfigFault], warnings: Sequence[ConfigFault]
) -> None:
    for each in faults:
        say(line_of(each))
    for each in warnings:
        say(f"{line_of(each)} (warning)")
    if spec is not None and not faults:
        say(f"{arguments.file}: {spec.counts()}; fine")


def line_of(fault: ConfigFault) -> str:
    """A fault as editors and terminals know it: `file:line:column: path=value rule; way out`."""
    file, line, column = where(fault)
    place = file if line is None else f"{file}:{line}:{column}"
    named = fault.path if fault.value is None else f"{fault.path}={fault.value}"
    sentence = f"{named} {fault.rule}" if named else fault.rule
    owner = f"{fault.owner}: " if fault.owner else ""
    return plain(f"{f'{place}: ' if place else ''}{owner}{sentence}; {fault.way_out}")


def _as_dict(fault: ConfigFault) -> dict[str, Any]:
    file, line, column = where(fault)
    return {
        "file": file,
        "line": line,
        "column": column,
        "path": fault.path,
        "value": fault.value,
        "rule": fault.rule,
        "way_out": fault.way_out,
    }


def _make_all(arguments: Arguments, spec: ServiceSpec) -> list[ConfigFault]:
    """What can't be made of the file: names that the program has not registered, addresses, packages."""
    from batchqueue_async.service.building import Builder
    from batchqueue_async.service.spans import faults

    try:
        app = load_app(arguments.app, arguments.file)
    except ConfigError as error:
        rule, _, way_out = str(error).partition("; ")
        return [ConfigFault(path="", rule=rule, way_out=way_out or "correct it", origin="")]
    builder = Builder(spec, app)
    builder.faults += faults(spec)
    exporters = builder.exporters(builder.sinks())
    builder.queue_configs(exporters)
    if not builder.faults:
        # A consumer can be made without its queue: any handler stands for it here.
        builder.consumers(dict.fromkeys((*spec.queues, *spec.exporters), _nothing))
    return builder.faults


async def _nothing(_batch: object) -> None:
    """Stands for a queue."""


async def _connect_all(spec: ServiceSpec, app: App) -> list[ConfigFault]:
    """Open each sink, and connect to each source's address; nothing is sent and nothing consumed."""
    from batchqueue_async.service.connecting import connect

    return await connect(spec, app, timeout=CONNECT_TIMEOUT)


# -- print -----------------------------------------------------------------------------------------------------------


def show(arguments: Arguments) -> int:
    """Print the values that hold, each with where it was set."""
    spec = _read(arguments, secrets=False)

    def rows(content: Any, path: str = "") -> Iterable[tuple[str, str]]:
        for name, value in content.items():
            if isinstance(value, Mapping) and value:
                yield from rows(value, f"{path}{name}.")
            else:
                text = "null" if value is None else json.dumps(value, ensure_ascii=False, default=str)
                yield f"{path}{name}: {text}", spec.origins.get(f"{path}{name}", "")

    for text, origin in rows({name: each for name, each in spec.content.items() if name != "defaults"}):
        say(f"{plain(text)}  # {plain(origin)}")
    return FINE


def _complain(error: BatchQueueError) -> None:
    faults = error.faults if isinstance(error, ConfigError) else ()
    for fault in faults:
        complain(line_of(fault))
    if not faults:
        complain(f"batchqueue: {error}")
