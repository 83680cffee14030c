"""Write log lines to OpenSearch or Elasticsearch through outages: each line one document, once, by the exporter's keys.

Start it, kill it, start it again: what was accepted and not delivered is on disk, and comes with the keys that it had.
"""

from __future__ import annotations

import argparse
import logging
import sys
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from destination import status, watching

import batchqueue_async as bq
from batchqueue_async.sinks.opensearch import OpenSearchSink

LEVELS = ("DEBUG", "INFO", "WARNING")


async def run(url: str, index: str, count: int, directory: Path, manager: bq.BatchQueueManager) -> int:
    """Accept the lines, and print what became of them; the exit status."""
    del manager  # one call to `consume` hands everything over
    sink = OpenSearchSink(url, index=index, compression="gzip")
    config = bq.ExportConfig(
        path=directory,
        retry=bq.RetryPolicy(initial=0.5),
        drain_timeout=60,
        on_dead_letter=lambda records, reason: print(f"refused {len(records)}: {reason}"),
    )
    exporter = bq.Exporter(sink, config, name="logs")
    async with watching(exporter), exporter:
        now = datetime.now(UTC)
        lines = [{"at": now, "level": LEVELS[number % 3], "line": f"line {number}"} for number in range(count)]
        await exporter.consume(lines)
    stats = exporter.stats()
    print(f"accepted {stats.accepted}, delivered {stats.delivered}, dead {stats.dead_lettered}")
    return status(exporter)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:9200", help="where OpenSearch is")
    parser.add_argument("--index", default="logs", help="the index, alias or data stream")
    parser.add_argument("--count", type=int, default=1_000, help="how many lines")
    parser.add_argument("--directory", type=Path, default=Path("opensearch-queue"), help="where the queue is on disk")
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    code = bq.run(partial(run, options.url, options.index, options.count, options.directory))
    sys.exit("interrupted" if code is None else code)


if __name__ == "__main__":
    main()
