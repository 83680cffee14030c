"""Who may ask a process about its dead letters, over real sockets; and the decisions behind it, without any."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from export_kit import Destination

import batchqueue_async as bq
from batchqueue_async import observe
from batchqueue_async.observe.client import UnixConnection
from batchqueue_async.observe.letter_client import LettersCutOffError, ask, change
from batchqueue_async.observe.letter_requests import (
    COMMAND,
    MOST_BODY,
    LetterHolder,
    LetterRequest,
    RefusedError,
    choose,
    letter_as_json,
    letter_of_json,
    missing,
    own_sockets,
    parse,
    put_back_command,
    refuse_foreign,
)
from batchqueue_async.observe.web import asgi
from batchqueue_async.sinks.memory import MemorySink

COMMANDS = {"host": "localhost", COMMAND: "dead-letters"}


@pytest.fixture
def runtime(monkeypatch):
    with tempfile.TemporaryDirectory() as directory:
        monkeypatch.setenv("XDG_RUNTIME_DIR", directory)
        yield Path(directory)


class GivenUp:
    """An exporter on a loop of its own thread, with letters, and a socket."""

    def __init__(self, *addresses, count=3, path=None, token=None, **config):
        self.ready = threading.Event()
        self.addresses, self.count, self.token = addresses or ("unix:",), count, token
        self.config = bq.ExportConfig(path=path, batch=bq.BatchPolicy(linger=0.0), **config)
        self.thread = threading.Thread(target=lambda: asyncio.run(self.main()))

    async def main(self):
        self.sink = Destination(answer=lambda _: bq.PermanentError("400"))
        self.loop, self.end = asyncio.get_running_loop(), asyncio.Event()
        async with (
            bq.Exporter(self.sink, self.config, name="spans") as self.exporter,
            observe.serve(*self.addresses, token=self.token) as self.ops,
        ):
            await self.exporter.consume([{"n": each} for each in range(self.count)])
            await self.exporter.flush()
            self.ready.set()
            await self.end.wait()

    def __enter__(self):
        self.thread.start()
        assert self.ready.wait(60)
        self.path = self.ops.paths[0] if self.ops.paths else None
        return self

    def __exit__(self, *_):
        self.loop.call_soon_threadsafe(self.end.set)
        self.thread.join(60)

    def letters(self):
        return asyncio.run_coroutine_threadsafe(self.exporter.dead_letters(), self.loop).result(60)

    def change(self, verb, seqs=None, timeout=30.0, progress=lambda _: None):
        process = ask("it", self.path)
        assert not process.fault
        return change(process, process.holders[0], verb, seqs=seqs, before=None, timeout=timeout, progress=progress)


def over(path, method, target, body=None, **headers):
    connection = UnixConnection(path, 60)
    with contextlib.closing(connection):
        connection.putrequest(method, target, skip_host=True)
        given = {"Host": "localhost", COMMAND: "dead-letters", "Content-Type": "application/json", **headers}
        for name, value in {**given, "Content-Length": str(len(body or b""))}.items():
            if value is not None:
                connection.putheader(name, value)
        connection.endheaders(body)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def purging(**changed):
    return json.dumps({"kind": "exporter", "name": "spans", **changed}).encode()


@pytest.mark.real_time
def test_what_is_not_a_command_of_the_same_user_changes_nothing(runtime):
    with GivenUp("unix:", "127.0.0.1:0", f"unix:{runtime}/named.sock", token="secret") as here:
        assert stat_mode(here.path) == 0o600
        for headers in (
            {"Origin": "http://localhost"},
            {"Sec-Fetch-Site": "same-origin"},
            {"Referer": "http://localhost/ui"},
            {"Cookie": "batchqueue_token=secret"},
            {"X-Forwarded-For": "192.0.2.1"},
            {"Via": "1.1 proxy"},
            {"Host": "evil.example"},
            {"Host": None},
            {COMMAND: None},
            {COMMAND: "other"},
        ):
            assert over(here.path, "POST", "/dead-letters/purge", purging(), **headers)[0] in {400, 403}
        for method in ("GET", "PUT", "DELETE", "OPTIONS"):
            assert over(here.path, method, "/dead-letters/purge")[0] == 405
        assert over(here.path, "POST", "/dead-letters/purge", purging(), **{"Content-Type": "text/plain"})[0] == 415
        assert over(here.path, "POST", "/dead-letters/purge", b"x" * (MOST_BODY + 1))[0] == 413
        assert over(here.path, "POST", "/dead-letters/purge", b"[" * 100_000)[0] == 400
        assert over(here.path, "POST", "/dead-letters/purge", purging(name="other"))[0] == 404
        assert over(here.path, "POST", "/dead-letters/purge/x", purging())[0] == 404
        # Neither over TCP, with the token, nor on a socket that a proxy may have been given.
        url = here.ops.urls[0]
        for method in ("GET", "POST"):
            given = {**COMMANDS, "Authorization": "Bearer secret", "Content-Type": "application/json"}
            request = urllib.request.Request(
                f"{url}/dead-letters/purge", purging() if method == "POST" else None, given, method=method
            )
            with pytest.raises(urllib.error.HTTPError) as error:
                urllib.request.urlopen(request, timeout=60)
            assert error.value.code == (405 if method == "POST" else 404)
            error.value.close()
        status, text = over(here.ops.paths[1], "POST", "/dead-letters/purge", purging(), Authorization="Bearer secret")
        assert status == 405
        assert len(here.letters()) == 3
        assert "dead-letters" not in over(here.path, "GET", "/stats", Authorization="Bearer secret")[1]
        # The command itself needs no token: who may open the socket is the process's own user.
        assert here.change("purge").count == 3
    assert not own_sockets
    assert text


def stat_mode(path):
    return path.stat().st_mode & 0o777


async def test_a_mounted_application_takes_no_commands():
    async with bq.Exporter(MemorySink(), name="spans"):
        sent = []

        async def send(message):
            sent.append(message)

        scope = {
            "type": "http", "method": "POST", "path": "/dead-letters/purge", "root_path": "", "query_string": b"",
            "headers": [(name.encode(), value.encode()) for name, value in COMMANDS.items()],
        }  # fmt: skip
        await asgi()(scope, None, send)
    assert sent[0]["status"] == 405


@pytest.mark.real_time
@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_another_user_is_cut_off_whatever_the_modes_say(runtime):
    with GivenUp() as here:
        runtime.chmod(0o755)
        here.path.parent.chmod(0o755)
        here.path.chmod(0o666)
        program = (
            "import os, socket, sys; os.setgid(65534); os.setuid(65534); s = socket.socket(socket.AF_UNIX); "
            "s.connect(sys.argv[1])\n"
            "try:\n s.sendall(b'GET /livez HTTP/1.1\\r\\nHost: localhost\\r\\n\\r\\n')\n print(s.recv(100))\n"
            "except OSError: print(b'')"
        )
        said = subprocess.run(
            [sys.executable, "-c", program, str(here.path)], capture_output=True, text=True, timeout=60, check=True
        )
        assert said.stdout == "b''\n"
        assert over(here.path, "GET", "/livez")[0] == 200


@pytest.mark.real_time
def test_whoever_goes_away_ends_what_was_begun(runtime, tmp_path):
    with GivenUp(path=tmp_path / "q", count=200, max_records=40, overflow="block") as here:
        here.sink.answer = lambda _: bq.RetryableError("away")
        connection = UnixConnection(here.path, 60)
        with contextlib.closing(connection):
            body = purging(path=str(tmp_path / "q"), timeout=300)
            headers = {COMMAND: "dead-letters", "Host": "localhost", "Content-Type": "application/json"}
            connection.request("POST", "/dead-letters/requeue", body, headers)
            answer = connection.getresponse()
            assert "done" in json.loads(answer.readline())
            with pytest.raises(LettersCutOffError, match="another command is at work there") as error:
                here.change("purge")
            assert (error.value.count, error.value.begun) == (0, False)
        end = time.monotonic() + 60
        while True:
            with contextlib.suppress(LettersCutOffError):
                left = here.change("purge").count
                break
            assert time.monotonic() < end
        assert 0 < left <= 200


@pytest.mark.real_time
def test_a_loop_that_gets_to_it_too_late_does_nothing(runtime):
    with GivenUp() as here:
        release = threading.Event()
        here.loop.call_soon_threadsafe(release.wait, 60)
        with pytest.raises(LettersCutOffError, match=r"its event loop has been busy for 0\.2 s") as error:
            here.change("purge", timeout=0.2)
        assert not error.value.begun
        release.set()
        assert len(here.letters()) == 3
        assert here.change("purge", [1, 9]).missing == [9]
        assert [each.seq for each in here.letters()] == [2, 3]


@pytest.mark.real_time
def test_what_goes_back_and_pushes_others_out_is_said(runtime, tmp_path):
    with GivenUp(path=tmp_path / "q", count=30, max_records=40, overflow="drop_oldest") as here:
        here.sink.answer = lambda _: bq.RetryableError("away")
        asyncio.run_coroutine_threadsafe(here.exporter.consume([{"n": -1}] * 40), here.loop).result(60)
        changed = here.change("requeue")
        assert changed.count == 30
        assert changed.dropped > 0


@pytest.mark.real_time
def test_what_is_closing_is_left_alone(runtime):
    with GivenUp(drain_timeout=60.0) as here:
        here.sink.answer = lambda _: bq.RetryableError("away")
        asyncio.run_coroutine_threadsafe(here.exporter.consume([{"n": 9}]), here.loop).result(60)
        process = ask("it", here.path)
        ending = asyncio.run_coroutine_threadsafe(here.exporter.shutdown(), here.loop)
        while not here.exporter.closed:
            time.sleep(0.01)
        with pytest.raises(LettersCutOffError, match="it is closing; run this again") as error:
            change(process, process.holders[0], "purge", seqs=None, before=None, timeout=9.0, progress=lambda _: None)
        assert not error.value.begun
        asyncio.run_coroutine_threadsafe(here.exporter.shutdown(0.0), here.loop).result(60)
        assert sum(len(each.records) for each in ending.result(60).given_up) == 3


@pytest.mark.real_time
def test_what_fails_says_why(runtime):
    with GivenUp() as here:
        here.exporter.purge_dead_letters = None  # a bug
        with pytest.raises(LettersCutOffError, match="exporter 'spans': TypeError"):
            here.change("purge")
        asyncio.run_coroutine_threadsafe(here.exporter.shutdown(), here.loop).result(60)
        process = ask("it", here.path)
        assert process.holders == []


@pytest.mark.real_time
def test_two_of_one_name_are_told_apart(runtime):
    with GivenUp() as here, GivenUp("127.0.0.1:0") as other:
        names = [each.name for each in ask("it", here.path).holders]
        assert sorted(names) == ["spans", "spans#2"]
        del other


@pytest.mark.real_time
async def test_a_socket_that_says_something_else(tmp_path):
    answers = [
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n[]\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nno\n",
        b"SSH-2.0\r\n",
        b"",
        b'HTTP/1.1 200 OK\r\nContent-Length: 24\r\n\r\n{"pid": "x", "holders":0}',
    ]

    async def answer(reader, writer):
        await reader.readline()
        writer.write(answers[0])
        writer.close()

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "s.sock"
        async with await asyncio.start_unix_server(answer, path):
            while answers:
                process = await asyncio.to_thread(ask, "1", path)
                assert process.fault
                assert str(path) in process.fault
                answers.pop(0)
    assert "the connection broke off" in ask("1", path).fault


# -- decisions, without a socket


@pytest.mark.parametrize(
    ("body", "verb", "status"),
    [
        (b"", "purge", 400),
        (b"[]", "purge", 400),
        (b'{"kind": "exporter"}', "purge", 400),
        (b'{"kind": "other", "name": "a"}', "purge", 400),
        (purging(seqs=[1.5]), "purge", 400),
        (purging(seqs="all"), "purge", 400),
        (purging(more=1), "purge", 400),
        (purging(before=1.0), "requeue", 400),
        (purging(timeout=0), "purge", 400),
        (purging(timeout=1e9), "purge", 400),
        (b'{"kind": "exporter", "name": "a", "timeout": NaN}', "purge", 400),
        (b"\xff", "purge", 400),
    ],
)
def test_a_request_that_is_none_is_refused(body, verb, status):
    with pytest.raises(RefusedError) as error:
        parse(body, verb)
    assert error.value.status == status


def test_a_request_is_what_was_asked():
    body = purging(seqs=[1], before=2.5, path="/a\udcff")
    assert parse(body, "purge") == LetterRequest(kind="exporter", name="spans", path="/a\udcff", seqs=[1], before=2.5)


def test_a_command_is_let_in():
    refuse_foreign({**COMMANDS, "content-type": "application/json"})
    with pytest.raises(RefusedError, match="sec-fetch-mode"):
        refuse_foreign({**COMMANDS, "sec-fetch-mode": "cors"})


def test_the_one_that_is_meant():
    known = [LetterHolder(kind="exporter", name="a"), LetterHolder(kind="exporter", name="a", path="/q")]
    assert choose(known, "exporter", "a", "/q") == 1
    with pytest.raises(RefusedError, match="is not open here any more"):
        choose(known, "durable_queue", "a", "/q")


def test_what_is_missing():
    assert missing(None, {1}) == []
    assert missing([3, 1, 2, 3], {2}) == [1, 3]


def test_a_letter_comes_through_json_as_it_was():
    letter = bq.DeadLetter(1, b"\xff\0", "why\n", 2, 3, 4.0, 5.0)
    assert letter_of_json(json.loads(json.dumps(letter_as_json(letter)))) == letter


def test_the_line_for_a_shell_is_quoted():
    assert put_back_command(7, "$(rm -rf ~)") == "batchqueue dead-letters requeue 7 '--exporter=$(rm -rf ~)'"
    assert put_back_command(7, "-x") == "batchqueue dead-letters requeue 7 --exporter=-x"
