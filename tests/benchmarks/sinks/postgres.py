"""The PostgreSQL sink beside asyncpg: rows of four columns, 500 a batch, each batch committed before the next one."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import count

import asyncpg

from batchqueue_async.sinks.postgres import PostgresSink
from tests.servers.postgres import Postgres

from .measuring import Comparison, Row, compare, timed

RECORDS = 500
NOW = datetime(2024, 2, 29, tzinfo=UTC)
BATCH = [{"id": number, "name": "n" * 60, "value": number / 2, "at": NOW} for number in range(RECORDS)]
TUPLES = [tuple(record.values()) for record in BATCH]
COLUMNS = list(BATCH[0])
BARE, SINK = "asyncpg copy_records_to_table loop", "PostgresSink.send, dicts"
AS_TUPLES, ONCE = "PostgresSink.send, tuples", "PostgresSink.send_keyed, each record once"
COLUMN = "PostgresSink.send_keyed, keys in a column"


async def rows(turns: int, batches: int) -> list[Row]:
    """The table's rows."""
    server = Postgres()
    server.start()
    numbers = count()

    async def bare(count: int) -> float:
        connection = await asyncpg.connect(server.dsn)
        try:
            columns = "id bigint, name text, value double precision, at timestamptz"
            await connection.execute(f"DROP TABLE IF EXISTS bare; CREATE TABLE bare ({columns})")

            async def send(_: int) -> None:
                await connection.copy_records_to_table("bare", records=TUPLES, columns=COLUMNS)

            await send(0)
            return await timed(send, count, RECORDS)
        finally:
            await connection.close()

    async def sink(count: int, records: list = BATCH, *, keyed: bool = False, **options: object) -> float:
        server.sql("DROP TABLE IF EXISTS rows")
        subject = PostgresSink(server.dsn, "rows", **options)
        await subject.open()
        try:
            keys = [[f"0123456789abcdef/{next(numbers)}" for _ in records] for _ in range(count + 1)]
            if not keyed:
                await subject.send(records)
                return await timed(lambda _: subject.send(records), count, RECORDS)
            await subject.send_keyed(records, keys[count])
            return await timed(lambda number: subject.send_keyed(records, keys[number]), count, RECORDS)
        finally:
            await subject.close()

    try:
        return await compare(
            {
                BARE: bare,
                SINK: sink,
                AS_TUPLES: lambda count: sink(count, TUPLES, columns=COLUMNS),
                ONCE: lambda count: sink(count, keyed=True),
                COLUMN: lambda count: sink(count, keyed=True, key_column="key"),
            },
            [
                Comparison(SINK, BARE, 0.9),
                Comparison(AS_TUPLES, BARE, 0.9),
                Comparison(ONCE, BARE, None),
                Comparison(COLUMN, BARE, None),
            ],
            turns=turns,
            batches=batches,
        )
    finally:
        server.dispose()
