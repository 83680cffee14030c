"""What the parts of one exporter share: made once by the engine, before them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from batchqueue_async._support import log
from batchqueue_async._support.log import describe
from batchqueue_async.export.delivery.classify import reason
from batchqueue_async.export.delivery.stuck import StuckRecords

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Hashable, Sequence

    from batchqueue_async.export.config import ExportConfig
    from batchqueue_async.export.control.backoff import Backoff, Budget
    from batchqueue_async.export.control.rate import SendRate
    from batchqueue_async.export.control.send_gate import SendGate, SendPermit
    from batchqueue_async.export.delivery.lease_keeper import LeaseKeeper
    from batchqueue_async.export.send_queue.attempt_log import AttemptLog
    from batchqueue_async.export.send_queue.protocol import SendQueue
    from batchqueue_async.export.stats import Counters
    from batchqueue_async.sinks.base import Sink


@dataclass(slots=True, kw_only=True)
class ExportContext:
    """One exporter, as its parts see it.

    Attributes:
        loop: the event loop.
        name: what logs and counts call the exporter.
        sink: where batches go.
        config: how, with what the sink needs in it.
        queue: the send queue.
        gate: whether anything may be sent.
        rate: how fast.
        keeper: what keeps the leases of batches that wait on our side.
        backoff: when again.
        budget: how often again; None sets no bound.
        counts: what has been counted.
        key: from a record to its key, where order by key is kept and a send may be taken in part.
        decode: what makes records of what the queue holds; None where it holds records.
        attempts: which records are being sent, where there is a directory.
        together: whether a batch that failed is sent again as it is.
        strict: whether the sink asks for that in so many words.
        warned: the classes of unknown errors and answers that have been named in the log.
        stuck: records that fail again and again with such errors.
    """

    loop: asyncio.AbstractEventLoop
    name: str
    sink: Sink
    config: ExportConfig
    queue: SendQueue
    gate: SendGate
    rate: SendRate
    keeper: LeaseKeeper
    backoff: Backoff
    budget: Budget | None
    counts: Counters
    key: Callable[[Any], Hashable] | None
    decode: Callable[[Sequence[bytes]], list[Any]] | None
    attempts: AttemptLog | None
    together: bool
    strict: bool
    warned: set[type] = field(default_factory=set[type])
    stuck: StuckRecords = field(default_factory=StuckRecords)

    def now(self) -> float:
        """The loop's time."""
        return self.loop.time()

    def pause(self, error: BaseException, permit: SendPermit) -> None:
        """Nothing can be sent as we are set up: the credentials are refused, or something can't be read."""
        was = self.gate.auth.state
        self.gate.refused(permit, self.now())
        self.counts.failed(reason(error))
        if was == "closed" and self.gate.auth.state == "open":
            self.counts.pauses += 1
            log.error(
                "exporter_paused",
                exporter=self.name,
                pause=self.config.auth_pause,
                reason=reason(error),
                way_out="repair the credentials or the configuration; nothing is dropped meanwhile",
                **describe(error),
            )

    def warn_of_answer(self, answer: object) -> None:
        """A send returned neither None nor a `SendResult`: named once by its class, and taken as delivered."""
        if type(answer) not in self.warned:
            self.warned.add(type(answer))
            log.warning(
                "unknown_answer_of_sink",
                exporter=self.name,
                answer=type(answer).__qualname__,
                way_out="the batch counts as delivered; let send return None or a SendResult",
            )

    def warn_of(self, error: BaseException) -> None:
        """An error of a class that says nothing of repetition: named once."""
        if type(error) not in self.warned:
            self.warned.add(type(error))
            log.warning(
                "unknown_error_of_sink",
                exporter=self.name,
                way_out="the batch is sent again; let the sink raise a SinkError, which says what is to be done",
                **describe(error),
            )

    def is_stuck(self, numbers: Sequence[int], attempts: int, error: BaseException) -> None:
        """These records fail again and again, nobody knows why, and no other way of sending them is left."""
        if self.stuck.add(numbers, oldest=self.queue.oldest):
            log.error(
                "records_stuck",
                exporter=self.name,
                records=len(numbers),
                attempts=attempts,
                reason=reason(error),
                way_out="let the sink raise a SinkError, which says what to do, or set RetryPolicy.max_attempts",
                **describe(error),
            )
