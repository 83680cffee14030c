"""Functions that the pipelines of the tests name as `pipeline_parts:...`, and how the tests run them."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from contextlib import closing
from pathlib import Path

from batchqueue_async.errors import PermanentError

LIMIT = 500.0


def rows(path, table, order="1"):
    """All rows of a table; none where there is no such table yet."""
    if not Path(path).exists():
        return []
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as found:
        if not found.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (table,)).fetchone():
            return []
        return found.execute(f"SELECT * FROM {table} ORDER BY {order}").fetchall()


def until(condition):
    """What a run watches: it ends when the condition holds, and fails the test if that takes too long."""
    began = time.monotonic()

    def watch(run):
        if run.failed:
            return True
        if time.monotonic() - began > LIMIT:
            raise AssertionError(f"not there after {LIMIT:.0f} s: {run.queries()}")
        return condition(run)

    return watch


def write_json(directory, name, records):
    """A file of JSON lines, there at once."""
    directory.mkdir(exist_ok=True)
    hidden = directory / f".{name}.new"
    hidden.write_text("".join(f"{json.dumps(each)}\n" for each in records))
    hidden.rename(directory / f"{name}.json")


def counted(frame):
    """The rows as they are; each of them leaves a line in a file when it is computed."""
    path = str(Path(frame.sparkSession.conf.get("spark.test.computed")))

    def note(batches):
        for batch in batches:
            with Path(path).open("a", encoding="ascii") as file:
                file.writelines("x\n" for _ in range(len(batch)))
            yield batch

    return frame.mapInPandas(note, frame.schema)


def not_a_frame(frame):
    return frame.count


def blocked(options):
    """A handler that waits until a file is there."""
    release, begun = Path(options["release"]), Path(options["begun"])

    async def handle(batch):
        begun.touch()
        while not release.exists():
            await asyncio.sleep(0.05)

    return handle


def failing(options):
    """A handler that fails as often as its file says, and then keeps the values in another."""
    left = Path(options["failures"])
    kept = Path(options["kept"])

    async def handle(batch):
        failures = int(left.read_text())
        if failures:
            left.write_text(str(failures - 1))
            raise PermanentError("the destination says no")
        before = kept.read_text() if kept.exists() else ""
        kept.write_text(before + "".join(f"{each['value']}\n" for each in batch))

    return handle
