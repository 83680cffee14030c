"""A service from its start to its end: exporters, queues and sources come up in this order, and end in the other.

start:  pages -> traces -> exporters with their sinks -> queues -> sources -> pipelines
stop:   sources and pipelines -> queues -> exporters, each within its share of the deadline -> traces -> pages
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from batchqueue_async._support import log
from batchqueue_async._support.log import describe
from batchqueue_async._support.reloads import reloads
from batchqueue_async.errors import BatchQueueError
from batchqueue_async.runtime.manager import BatchQueueManager
from batchqueue_async.service.building import Builder
from batchqueue_async.service.pipelines import PipelineThread
from batchqueue_async.service.reload import Reloading
from batchqueue_async.service.secret_watch import SecretWatch
from batchqueue_async.service.signals import UNDELIVERED
from batchqueue_async.service.spans import Spans, wanted

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

    from batchqueue_async.export.exporter import Exporter
    from batchqueue_async.export.stats import ExportReport
    from batchqueue_async.intake.stats import IntakeReport
    from batchqueue_async.observe.server import OpsServer
    from batchqueue_async.queue.batch_queue import BatchQueue
    from batchqueue_async.queue.stats import ShutdownReport
    from batchqueue_async.service.app import App
    from batchqueue_async.service.file.spec import ServiceSpec
    from batchqueue_async.service.signals import StopSignals

# The shares of the time that is left which sources, and after them queues, may use: what holds one of them up must
# leave time for those that come after it.
_SOURCES = 0.5
_QUEUES = 0.6
_LEAST = 0.25


@dataclass(slots=True, kw_only=True)
class ServiceReport:
    """What became of everything, when a service has ended.

    Attributes:
        queues: what each queue says.
        exporters: what each exporter says.
        sources: what each source says.
        failed: what ended with an error, by its path in the file.
        seconds: what the stop took.
    """

    queues: Mapping[str, ShutdownReport] = field(default_factory=dict[str, Any])
    exporters: Mapping[str, ExportReport] = field(default_factory=dict[str, Any])
    sources: Mapping[str, IntakeReport] = field(default_factory=dict[str, Any])
    failed: dict[str, str] = field(default_factory=dict[str, str])
    seconds: float = 0.0

    @property
    def lost(self) -> int:
        """Items and records that ended with the process."""
        queued = sum(len(each.undelivered) for each in self.queues.values())
        return queued + sum(len(each.undelivered) for each in self.exporters.values())

    @property
    def on_disk(self) -> int:
        """Records that are on disk, and are sent when the service runs again."""
        return sum(each.on_disk for each in self.exporters.values())

    @property
    def code(self) -> int:
        """The exit status."""
        return UNDELIVERED if self.lost or self.on_disk or self.failed else 0

    def lines(self) -> list[str]:
        """How it ended, in words.

        Example:
            >>> ServiceReport(seconds=1.25).lines()
            ['ended in 1.2 s; nothing is left undelivered']
        """
        said: list[str] = []
        for name, queue in self.queues.items():
            if queue.undelivered:
                said.append(f"queue {name}: {len(queue.undelivered):,} items were not handled and are lost")
        for name, exporter in self.exporters.items():
            if exporter.undelivered:
                said.append(f"exporter {name}: {len(exporter.undelivered):,} records were not delivered and are lost")
            if exporter.on_disk:
                said.append(
                    f"exporter {name}: {exporter.on_disk:,} records stay on disk, and are sent at the next start"
                )
        for name, source in self.sources.items():
            if source.released:
                said.append(f"source {name}: {source.released:,} messages were given back to the broker")
        said += [f"{name}: {text}" for name, text in self.failed.items()]
        left = "" if self.code else "; nothing is left undelivered"
        return [*said, f"ended in {self.seconds:.1f} s{left}"]


class Service:
    """What a `ServiceSpec` describes, made of live objects; for one run, on one loop.

    Example:
        >>> import asyncio, tempfile
        >>> from pathlib import Path
        >>> from batchqueue_async.service import App, Service, read_service
        >>> file = Path(tempfile.mkdtemp()) / "words.yaml"
        >>> _ = file.write_text('''
        ... observe: {enabled: false}
        ... queues: {words: {exporter: kept}}
        ... exporters: {kept: {sink: memory}}
        ... sinks: {memory: {type: memory}}
        ... ''')
        >>> async def main() -> int:
        ...     async with Service(read_service(file), app := App()) as service:
        ...         await app.queue("words").produce_many(["to", "be"])
        ...     return service.report.exporters["kept"].delivered
        >>> asyncio.run(main())
        2

    Attributes:
        spec: what it is made of; another one after a reload.
        report: what became of everything; None while it runs.
        queues: by name, while it runs.
        exporters: by name, likewise.
        consumers: those of the sources, by name, likewise.
        ops: what serves the pages; None where nothing is served.
    """

    def __init__(self, spec: ServiceSpec, app: App, *, read_again: Callable[[], ServiceSpec] | None = None) -> None:
        """Say what runs; nothing is made before `async with`.

        Args:
            spec: what the file says.
            app: what the program has registered.
            read_again: reads the file for a reload.
        """
        self.spec = spec
        self.app = app
        self.report: ServiceReport | None = None
        self.queues: dict[str, BatchQueue[Any]] = {}
        self.exporters: dict[str, Exporter] = {}
        self.consumers: dict[str, Any] = {}
        self.ops: OpsServer | None = None
        self._sinks: dict[str, Any] = {}
        self._manager = BatchQueueManager()
        self._pipelines: dict[str, PipelineThread] = {}
        self._pipeline_ended = asyncio.Event()
        self._reloading = Reloading(self, read_again)
        self._secrets: SecretWatch | None = None
        self._spans: Spans | None = None
        self._watching: asyncio.Task[None] | None = None
        self._hurry = asyncio.Event()
        self._start_timeout: float = spec.service.get("start_timeout", 60.0)

    # -- the start -------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        """Make and open everything.

        Raises:
            ConfigError: something can't be made or opened; what was open is closed again.
            TimeoutError: it took longer than `service.start_timeout`.
        """
        began = time.monotonic()
        try:
            self._serve()
            async with asyncio.timeout(self._start_timeout):
                await self._open()
        except TimeoutError:
            await self._undo()
            raise BatchQueueError(
                f"service {self.spec.name!r}: is not open after start_timeout={self._start_timeout:g} s; raise it, or "
                "look for what does not answer"
            ) from None
        except BaseException:
            await self._undo()
            raise
        if self.ops is not None:
            self.ops.phase = "running"
        reloads.note(ok=True, at=time.time())
        self._secrets = SecretWatch(self.spec, self.exporters)
        self._watching = asyncio.get_running_loop().create_task(self._secrets.run(), name="service-secrets")
        log.info("service_started", service=self.spec.name, pid=os.getpid(), seconds=round(time.monotonic() - began, 3))
        return self

    def _serve(self) -> None:
        observe = self.spec.observe
        if not observe.get("enabled", True):
            return
        from batchqueue_async.observe.server import serve  # noqa: PLC0415 - uvicorn is an extra

        ops = serve(
            *observe.get("listen", ["unix:"]),
            manager=self._manager,
            token=observe.get("token"),
            hosts=observe.get("hosts", ()),
        )
        ops.phase = "starting"
        self.ops = ops.start()

    async def _open(self) -> None:
        if wanted(self.spec):
            self._spans = Spans(self.spec)
        builder = Builder(self.spec, self.app)
        self._sinks = builder.sinks()
        exporters = builder.exporters(self._sinks)
        configs = builder.queue_configs(exporters)
        builder.finish()
        # An exporter that takes another's dead letters comes up before it, and `exporters` has them in that order.
        for name, exporter in exporters.items():
            await exporter.__aenter__()
            self.exporters[name] = exporter
            log.info(
                "exporter_resolved",
                exporter=name,
                sink=self.spec.exporters[name].values["sink"],
                path=None if exporter.config.path is None else str(exporter.config.path),
                max_bytes=exporter.config.byte_limit,
                overflow=exporter.config.overflow,
                workers=exporter.config.worker_count,
            )
        for name, config in configs.items():
            self.queues[name] = queue = self._manager.create(name, config)
            for handler, options in self.spec.queues[name].values.get("handlers", {}).items():
                found = self.app.find("handler", handler)
                queue.add_handler(self.app.type_of(handler) or object, found, **options.values)
        self.app.attach(self.queues, self.exporters)
        consumers = builder.consumers({**self.queues, **self.exporters})
        builder.finish()
        for name, consumer in consumers.items():
            await consumer.__aenter__()
            self.consumers[name] = consumer
        loop = asyncio.get_running_loop()

        def note_end() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the service did not wait for this pipeline
                loop.call_soon_threadsafe(self._pipeline_ended.set)

        for name, each in self.spec.pipelines.items():
            self._pipelines[name] = PipelineThread(name, each.values, note_end)
            self._pipelines[name].start()

    async def _undo(self) -> None:
        """The start has failed: close what is open, without waiting for what may never come."""
        self._hurry.set()
        await self.stop()

    # -- meanwhile -------------------------------------------------------------------------------------------------

    async def run(self, signals: StopSignals) -> None:
        """Reload and watch until a stop is asked for, or everything that ends by itself has ended."""
        loop = asyncio.get_running_loop()
        while not signals.asked.is_set():
            waits = {
                loop.create_task(each.wait(), name="service-wait")
                for each in (signals.asked, signals.reloads, self._pipeline_ended)
            }
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for each in waits:
                    each.cancel()
            if signals.reloads.is_set():
                signals.reloads.clear()
                await self.reload()
            self._pipeline_ended.clear()
            if (reason := self._over()) is not None:
                signals.stop(reason)
        log.info("service_stopping", service=self.spec.name, reason=signals.name, within=self.spec.drain_timeout)

    def _over(self) -> str | None:
        """Why pipelines end the service: one of them has failed, or all have ended and nothing else runs."""
        for name, pipeline in self._pipelines.items():
            if pipeline.problem is not None:
                return f"pipeline {name} failed"
        others = self.consumers or self.queues or self.exporters
        ended = bool(self._pipelines) and all(each.ended for each in self._pipelines.values())
        return "done" if ended and not others else None

    async def reload(self) -> bool:
        """Read the file again, and change what can change in place; whether it was taken."""
        ok = await self._reloading.reload()
        reloads.note(ok=ok, at=time.time())
        return ok

    def hurry(self) -> None:
        """End a stop that is under way at once; what is left is in the report."""
        self._hurry.set()

    # -- the end ---------------------------------------------------------------------------------------------------

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self) -> ServiceReport:
        """Drain everything within the deadline, and close it."""
        if self.report is not None:
            return self.report
        report = self.report = ServiceReport()
        began = time.monotonic()
        deadline = began + self.spec.drain_timeout
        if self.ops is not None:
            self.ops.phase = "draining"
        if self._watching is not None:
            self._watching.cancel()
        for pipeline in self._pipelines.values():
            pipeline.stop()
        report.sources = await self._all(report, "sources", self.consumers, deadline, _SOURCES)
        report.queues = await self._end_queues(deadline)
        report.exporters = await self._end_exporters(report, deadline)
        for name, pipeline in self._pipelines.items():
            left = max(_LEAST, deadline - time.monotonic())
            if (problem := await asyncio.to_thread(pipeline.finish, left)) is not None:
                report.failed[f"pipelines.{name}"] = problem
        self.app.attach({}, {})
        if self._spans is not None:
            await self._spans.end(max(_LEAST, self._time(deadline, 1.0)))
        if self.ops is not None:
            await asyncio.to_thread(self.ops.stop)
        report.seconds = time.monotonic() - began
        (log.warning if report.code else log.info)(
            "service_ended", service=self.spec.name, lost=report.lost, on_disk=report.on_disk, failed=report.failed
        )
        return report

    def _time(self, deadline: float, share: float) -> float:
        return 0.0 if self._hurry.is_set() else max(0.0, deadline - time.monotonic()) * share

    async def _hurried(self, work: Callable[[float], Coroutine[Any, Any, Any]], seconds: float) -> Any:
        """The result of a shutdown; once there is a hurry it is called again without any time, which hastens it."""
        loop = asyncio.get_running_loop()
        first = loop.create_task(work(seconds), name="service-stop")
        hurry = loop.create_task(self._hurry.wait(), name="service-hurry")
        try:
            await asyncio.wait({first, hurry}, return_when=asyncio.FIRST_COMPLETED)
            if not first.done():
                return await work(0.0)
            return await first
        finally:
            hurry.cancel()

    async def _all(
        self, report: ServiceReport, section: str, things: Mapping[str, Any], deadline: float, share: float
    ) -> dict[str, Any]:
        """Shut things down at the same time; what each of them says."""
        seconds = self._time(deadline, share)
        outcomes = await asyncio.gather(
            *(self._hurried(each.shutdown, seconds) for each in things.values()), return_exceptions=True
        )
        found: dict[str, Any] = {}
        for name, outcome in zip(things, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                said = describe(outcome)
                report.failed[f"{section}.{name}"] = f"{said['error']}: {said['text']}"
            else:
                found[name] = outcome
        return found

    async def _end_queues(self, deadline: float) -> dict[str, ShutdownReport]:
        queues: dict[str, ShutdownReport] = await self._hurried(
            self._manager.shutdown_all, self._time(deadline, _QUEUES if self.exporters else 1.0)
        )
        return queues

    async def _end_exporters(self, report: ServiceReport, deadline: float) -> dict[str, ExportReport]:
        """End those first whose dead letters others take."""
        found: dict[str, ExportReport] = {}
        left = dict(self.exporters)
        while left:
            taking = {self.spec.exporters[name].values.get("dead_letters") for name in left}
            now = {name: each for name, each in left.items() if name not in taking} or left
            share = 1.0 if len(now) == len(left) else _QUEUES
            found |= await self._all(report, "exporters", now, deadline, share)
            left = {name: each for name, each in left.items() if name not in now}
        return found
