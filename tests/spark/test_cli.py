"""`batchqueue spark`, on what real sinks and ledgers left."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from contextlib import closing

import pytest

from batchqueue_async.cli.main import main
from batchqueue_async.sinks.base import Attempt, BatchKey
from batchqueue_async.sinks.jsonl import JsonLinesSink
from batchqueue_async.sinks.postgres import PostgresSink
from batchqueue_async.sinks.sqlite import SqliteSink
from batchqueue_async.spark.writes.ledger import FileLedger

QUERY = "8f14e45f"
SOURCES = [QUERY, f"{QUERY}/write-1", f"orders@{QUERY}", "orders/claim", "other"]


@pytest.fixture(params=["sqlite", "file", "postgres"])
def ledger(request, tmp_path, monkeypatch):
    """A ledger with a note for each of the sources, and what names it on the command line."""
    if request.param == "file":
        made = FileLedger(tmp_path / "ledger.json")
        for source in SOURCES:
            made.note(BatchKey(source, 7))
        return [str(tmp_path / "ledger.json")]
    if request.param == "postgres":
        postgres = request.getfixturevalue("postgres")
        postgres.sql("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
        monkeypatch.setenv("SPARK_TEST_DSN", postgres.dsn)
        asyncio.run(note(PostgresSink(postgres.dsn, "out")))
        return ["env:SPARK_TEST_DSN", "--table", "out"]
    asyncio.run(note(SqliteSink(tmp_path / "out.db", "out")))
    return [str(tmp_path / "out.db"), "--table", "out"]


async def note(sink):
    await sink.open()
    for source in SOURCES:
        transaction = await sink.begin(BatchKey(source, 7))
        await transaction.commit()
    await sink.close()


def run(capsys, *arguments):
    status = main(["spark", *arguments])
    said = capsys.readouterr()
    return status, (json.loads(said.out) if "--json" in arguments and status != 2 else said.out + said.err)


def listed(capsys, ledger):
    status, rows = run(capsys, "ledger", "list", *ledger, "--json")
    assert status == 0
    return [row["source"] for row in rows]


def test_a_ledger_is_listed_with_the_last_batch_and_its_time(ledger, capsys):
    status, rows = run(capsys, "ledger", "list", *ledger, "--json")
    assert status == 0
    assert [(row["source"], row["batch"]) for row in rows] == [(source, 7) for source in sorted(SOURCES)]
    assert all(row["noted"].startswith(time.strftime("%Y-%m-", time.gmtime())) for row in rows)
    assert f"source={QUERY}  batch=7  noted=20" in run(capsys, "ledger", "list", *ledger)[1]


@pytest.mark.parametrize(
    ("source", "left"), [(QUERY, SOURCES[2:]), ("orders", [QUERY, f"{QUERY}/write-1", "other"]), ("order", SOURCES)]
)
def test_a_source_is_forgotten_with_its_writes_and_claims(ledger, capsys, source, left):
    status, said = run(capsys, "ledger", "reset", *ledger, "--source", source)
    assert status == (1 if left == SOURCES else 0)
    assert ("no source is 'order'" in said) == (status == 1)
    assert listed(capsys, ledger) == sorted(left)


async def test_a_batch_that_was_forgotten_is_delivered_again(tmp_path, capsys):
    sink = SqliteSink(tmp_path / "out.db")
    await note(sink)
    await asyncio.to_thread(run, capsys, "ledger", "reset", str(sink.path), "--source", QUERY)
    await sink.open()
    assert await sink.begin(BatchKey("other", 7)) is None
    transaction = await sink.begin(BatchKey(QUERY, 7))
    assert transaction is not None
    await transaction.rollback()
    await sink.close()


def test_old_notes_are_pruned_and_those_without_a_time_stay(ledger, capsys, request):
    assert run(capsys, "ledger", "prune", *ledger)[0] == 1
    assert run(capsys, "ledger", "prune", *ledger, "--older-than", "0s", "--dry-run")[0] == 0
    assert len(listed(capsys, ledger)) == len(SOURCES)
    status, said = run(capsys, "ledger", "prune", *ledger, "--older-than", "0s")
    assert (status, said.count("forgotten: ")) == (0, len(SOURCES))
    assert listed(capsys, ledger) == []


def test_a_ledger_of_an_earlier_version_has_no_times_and_is_not_pruned(tmp_path, capsys):
    path = tmp_path / "out.db"
    with closing(sqlite3.connect(path)) as database:
        database.execute(
            "CREATE TABLE batchqueue_ledger (target TEXT, source TEXT, number INTEGER NOT NULL, "
            "PRIMARY KEY (target, source)) WITHOUT ROWID"
        )
        database.execute("INSERT INTO batchqueue_ledger VALUES ('rows', 'old', 3)")
        database.commit()
    assert run(capsys, "ledger", "list", str(path), "--json") == (
        0,
        [{"source": "old", "batch": 3, "noted": None}],
    )
    assert run(capsys, "ledger", "prune", str(path), "--older-than", "0s")[0] == 1
    (tmp_path / "ledger").write_text('{"version": 1, "delivered": {"old": 3}}')
    assert run(capsys, "ledger", "prune", str(tmp_path / "ledger"), "--older-than", "0s")[0] == 1


async def test_notes_of_batch_jobs_go_by_themselves_after_a_month(tmp_path):
    sink = SqliteSink(tmp_path / "out.db")
    await sink.open()
    for source in ("job-old", "query", "job-new"):
        transaction = await sink.begin(BatchKey(source, 1))
        await transaction.commit()
        with closing(sqlite3.connect(sink.path)) as database:
            if source != "job-new":
                database.execute("UPDATE batchqueue_ledger SET noted_at = 1e9")
                database.commit()
    assert [each.key.source for each in await sink.delivered()] == ["job-new", "query"]
    await sink.close()


# --- what is staged


@pytest.fixture(params=["sqlite", "jsonl", "postgres"])
def staged(request, tmp_path, monkeypatch):
    async def stage(sink):
        for key in (BatchKey(QUERY, 3), BatchKey(QUERY, 4), BatchKey("other", 0)):
            part = sink.stage(Attempt(key, 2, "a7"))
            await part.open()
            await part.send([{"v": 1}])
            await part.close()

    if request.param == "postgres":
        postgres = request.getfixturevalue("postgres")
        postgres.sql("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
        monkeypatch.setenv("SPARK_TEST_DSN", postgres.dsn)
        asyncio.run(stage(PostgresSink(postgres.dsn, "out")))
        return ["env:SPARK_TEST_DSN", "--table", "out"]
    if request.param == "jsonl":
        asyncio.run(stage(JsonLinesSink(tmp_path / "out")))
        return [str(tmp_path / "out")]
    (tmp_path / "out.db").write_bytes(b"SQLite format 3\0")
    asyncio.run(stage(SqliteSink(tmp_path / "out.db")))
    return [str(tmp_path / "out.db")]


def batches(capsys, staged):
    return sorted((row["source"], row["batch"]) for row in run(capsys, "staging", "list", *staged, "--json")[1])


def test_what_is_staged_is_listed_reset_and_pruned(staged, capsys):
    status, rows = run(capsys, "staging", "list", *staged, "--json")
    assert (status, len(rows)) == (0, 3)
    assert {(row["part"], row["name"], row["state"]) for row in rows} == {(2, "a7", "staged")}
    assert all(row["bytes"] > 0 and row["changed"].startswith("20") for row in rows)

    assert run(capsys, "staging", "reset", *staged, "--source", "nobody")[0] == 1
    assert run(capsys, "staging", "reset", *staged, "--source", QUERY, "--batch", "3")[0] == 0
    assert batches(capsys, staged) == [(QUERY, 4), ("other", 0)]
    assert run(capsys, "staging", "reset", *staged, "--source", QUERY)[0] == 0

    assert run(capsys, "staging", "prune", *staged)[0] == 1
    assert run(capsys, "staging", "prune", *staged, "--older-than", "0s", "--dry-run")[0] == 0
    assert batches(capsys, staged) == [("other", 0)]
    assert run(capsys, "staging", "prune", *staged, "--older-than", "0s")[0] == 0
    assert batches(capsys, staged) == []


def test_what_is_staged_and_old_is_found(tmp_path, capsys):
    import os

    sink = JsonLinesSink(tmp_path / "out")

    async def stage():
        part = sink.stage(Attempt(BatchKey("lost", 0), 0, "a"))
        await part.open()
        await part.close()

    asyncio.run(stage())
    (path,) = (tmp_path / "out").rglob("*.jsonl")
    os.utime(path, (1e9, 1e9))
    assert run(capsys, "staging", "list", str(tmp_path / "out"))[0] == 1


# --- what can't be done


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ledger", "list", "no such file"], "'no such file' does not exist"),
        (["staging", "list", "{home}/ledger"], "neither a SQLite file nor a directory"),
        (["ledger", "list", "{home}"], "has no ledger: the name of each published batch"),
        (["ledger", "list", "{home}/ledger"], "is not one"),
        (["ledger", "list", "postgresq://u:hunter2@h/d"], "does not exist"),
        (["ledger", "list", "env:NOT_THERE"], "NOT_THERE"),
    ],
)
def test_what_can_not_be_done_is_told_with_status_2_and_no_secret(tmp_path, capsys, arguments, message):
    (tmp_path / "ledger").write_text("{")
    status, said = run(capsys, *(each.format(home=tmp_path) for each in arguments))
    assert status == 2
    assert message in said
    assert "hunter2" not in said


def test_help_says_what_each_command_does_and_its_exit_status(capsys):
    for arguments in ([], ["ledger"], ["staging"], ["ledger", "reset"], ["staging", "prune"]):
        with pytest.raises(SystemExit) as ended:
            main(["spark", *arguments, "--help"])
        assert ended.value.code == 0
        said = " ".join(capsys.readouterr().out.split())
        assert "usage: batchqueue spark" in said
        assert "exit status: 0" in said
    with pytest.raises(SystemExit) as ended:
        main(["spark", "ledger", "prune", "x", "--older-than", "soon"])
    assert ended.value.code == 2
    assert "'soon' is not a time" in capsys.readouterr().err
