"""Write events to ClickHouse through outages: a batch is one INSERT, and is in once, by its token.

The table is made if it is not there. One event has a number that its column can't hold: it is printed, and the others
are in.
"""

from __future__ import annotations

import argparse
import logging
import sys
import urllib.request
from datetime import UTC, datetime
from functools import partial

from destination import status, watching

import batchqueue_async as bq
from batchqueue_async.sinks.clickhouse import ClickHouseSink

TABLE = """
CREATE TABLE IF NOT EXISTS events (id UInt64, at DateTime64(3, 'UTC'), name LowCardinality(String), size UInt32)
ENGINE = MergeTree ORDER BY id SETTINGS non_replicated_deduplication_window = 1000
"""


async def run(url: str, count: int, manager: bq.BatchQueueManager) -> int:
    """Send the events, and print what became of them; the exit status."""
    del manager  # one call to `consume` hands everything over
    config = bq.ExportConfig(
        batch=bq.BatchPolicy(max_records=10_000),
        retry=bq.RetryPolicy(initial=0.5),
        drain_timeout=60,
        on_dead_letter=lambda records, reason: print(f"refused {len(records)}: {reason}"),
    )
    exporter = bq.Exporter(ClickHouseSink(url, "events"), config, name="events")
    async with watching(exporter), exporter:
        now = datetime.now(UTC).replace(microsecond=0)
        events = [{"id": number, "at": now, "name": "opened", "size": number} for number in range(count)]
        events[-1]["size"] = 2**32  # 0, if ClickHouse were asked
        await exporter.consume(events)
    stats = exporter.stats()
    print(f"accepted {stats.accepted}, delivered {stats.delivered}, dead {stats.dead_lettered}")
    return status(exporter)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8123", help="where ClickHouse is")
    parser.add_argument("--count", type=int, default=1_000, help="how many events")
    options = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)  # what is refused is printed
    try:
        with urllib.request.urlopen(options.url, TABLE.encode(), timeout=30):  # noqa: S310 - the user's own URL
            pass
    except OSError as error:
        sys.exit(f"ClickHouse at {options.url}: {error}")
    code = bq.run(partial(run, options.url, options.count))
    sys.exit("interrupted" if code is None else code)


if __name__ == "__main__":
    main()
