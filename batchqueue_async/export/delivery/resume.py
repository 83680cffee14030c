"""Batches that were under way when the exporter was closed, or its process ended: sent again as they were.

Their destination may have taken them, and knows them again by a key that stands for all of their records together.
"""

from __future__ import annotations

import math
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING

from batchqueue_async.export.delivery.leased_batch import LeasedBatch
from batchqueue_async.export.delivery.part_lease import PartLease

if TYPE_CHECKING:
    from batchqueue_async.export.delivery.context import ExportContext
    from batchqueue_async.export.delivery.kept import KeptBatches
    from batchqueue_async.export.send_queue.attempt_log import Interrupted
    from batchqueue_async.export.send_queue.protocol import QueueLease

# Records that are looked at for those of the batches, besides those: as many may have been given back one by one.
_LOOKED_AT = 50_000
_ALL = 1 << 62


async def resume(context: ExportContext, kept: KeptBatches) -> None:
    """Take the records of these batches out of the send queue, and let the batches wait to be sent."""
    log = context.attempts
    found = [] if log is None else log.interrupted
    if log is None or not found:
        return
    leases: list[QueueLease] = []
    if context.together:
        leases = await _lease(context, {number for batch in found for number in batch.numbers})
    places = {number: (lease, index) for lease in leases for index, number in enumerate(lease.numbers)}
    for batch in found:
        if not _restore(batch, places, kept):
            log.ended(batch.note)  # some of it was settled since, or dropped; or the sink does not ask for it
    for lease in leases:
        others = [index for index, number in enumerate(lease.numbers) if number in places]
        await lease.nack(0.0, others, reason="resumed", counted=False)


async def _lease(context: ExportContext, wanted: set[int]) -> list[QueueLease]:
    """Lease records until all of these are among them, or none of these is to be expected any more."""
    leases: list[QueueLease] = []
    left, last = len(wanted) + _LOOKED_AT, max(wanted, default=-1)
    while left > 0 and wanted:
        lease = await context.queue.lease(left, _ALL, 0)
        if lease is None:
            break
        leases.append(lease)
        left -= len(lease)
        wanted = wanted.difference(lease.numbers)
        if min(lease.numbers) > last:
            break
    return leases


def _restore(found: Interrupted, places: dict[int, tuple[QueueLease, int]], kept: KeptBatches) -> bool:
    """Put a batch together as it was; whether all of its records are still there. They are no more in `places`."""
    if not found.numbers or any(number not in places for number in found.numbers):
        return False
    where = [places.pop(number) for number in found.numbers]
    runs = groupby(where, key=itemgetter(0))
    batch = LeasedBatch([PartLease(lease, [index for _, index in same]) for lease, same in runs])
    batch.apart = True
    batch.note = found.note
    batch.repeats = found.repeats
    batch.attempts += found.repeats
    batch.unrepeat()
    kept.add(batch, -math.inf)
    return True
