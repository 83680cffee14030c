"""The ops thread over real sockets: every page, who is let in, and answers while the program's loop is blocked."""

from __future__ import annotations

import asyncio
import json
import math
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path

import pytest
from export_kit import Destination
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open
from starlette.applications import Starlette
from starlette.routing import Mount

import batchqueue_async as bq
from batchqueue_async import observe
from batchqueue_async.observe import connections, web
from batchqueue_async.observe import observer as observer_module
from batchqueue_async.observe import server as server_module
from batchqueue_async.observe.client import OpsClient, find_processes
from batchqueue_async.observe.dashboard import Frame
from batchqueue_async.observe.observer import Observer

pytestmark = pytest.mark.real_time


def ask(url, *, method="GET", **headers):
    request = urllib.request.Request(url, headers=headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers, error.read()


def status_of(url, **headers):
    return ask(url, **headers)[0]


@pytest.fixture
def runtime(tmp_path, monkeypatch):
    """A directory for sockets of this test's own."""
    directory = tmp_path / "run"
    directory.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(directory))
    return directory


@pytest.fixture(scope="module")
def url():
    with observe.serve("127.0.0.1:0") as ops:
        yield ops.urls[0]


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/metrics", "text/plain; version=0.0.4"),
        ("/livez", "application/json"),
        ("/healthz", "application/json"),
        ("/readyz", "application/json"),
        ("/status", "application/json"),
        ("/stats", "application/json"),
        ("/ui", "text/html"),
        ("/", "text/html"),
        ("/favicon.ico", "image/svg+xml"),
        ("/static/dashboard.js", "text/javascript"),
        ("/static/uPlot.min.css", "text/css"),
    ],
)
def test_every_page_is_answered_with_the_headers_that_protect_it(url, path, kind):
    status, headers, body = ask(url + path)
    assert (status, headers["content-type"].startswith(kind), bool(body)) == (200, True, True)
    assert headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'")
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cache-control"] == "no-store"


def test_what_is_not_there_and_what_would_change_something(url):
    assert status_of(url + "/static/no.js") == 404
    assert status_of(url + "/static/..%2fweb.py") == 404
    assert status_of(url + "/nothing") == 404
    for method in ("POST", "PUT", "DELETE"):
        assert ask(url + "/status", method=method)[0] == 405
    assert ask(url + "/status", method="HEAD")[0] == 200


def test_open_metrics_when_it_is_asked_for(url):
    _, headers, body = ask(url + "/metrics", Accept="application/openmetrics-text; version=1.0.0")
    assert headers["content-type"].startswith("application/openmetrics-text")
    assert list(parse_open(body.decode()))


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "localhost:80@evil.example", "localhost:x"),
        *("[::1", "[::1]evil.example", "localhost/evil.example"),
    ],
)
def test_w_3_a_foreign_host_name_is_refused(url, host):
    assert status_of(url + "/status", Host=host) == 421


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "[::1]:9", "127.0.0.1:80"])
def test_this_machines_names_are_served(url, host):
    assert status_of(url + "/status", Host=host) == 200


async def test_the_status_of_components():
    away = Destination(answer=lambda _: bq.RetryableError("connection refused"))
    config = bq.ExportConfig(breaker=bq.BreakerPolicy(threshold=1, reset_timeout=60.0), drain_timeout=0.0)
    async with bq.Exporter(away, config, name="lake") as exporter, observe.serve("127.0.0.1:0") as ops:
        await exporter.consume(["a secret"])
        while exporter.breaker == "closed":
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        answers = await asyncio.gather(
            *(
                asyncio.to_thread(ask, ops.urls[0] + path)
                for path in (
                    "/status?component=exporter/lake", "/status?component=lake", "/status", "/readyz", "/livez",
                    "/stats", "/status?component=leak", "/metrics",
                )
            )
        )  # fmt: skip
        statuses = [status for status, _, _ in answers]
        assert statuses == [503, 503, 200, 200, 200, 200, 404, 200]
        found = json.loads(answers[0][2])
        assert (found["state"], found["problem"], found["last_error"]) == (
            "down", "can't deliver", "RetryableError: connection refused",
        )  # fmt: skip
        whole = json.loads(answers[2][2])
        assert whole["status"]["state"] == "down"
        assert whole["why"][0].startswith("Exporter lake can't deliver")
        assert "exporter/lake" in json.loads(answers[6][2])["error"]
        assert not any(b"a secret" in body for _, _, body in answers)


async def test_it_answers_while_the_loop_is_blocked_and_says_so():
    async with bq.BatchQueueManager() as manager, observe.serve("127.0.0.1:0") as ops:
        manager.create("rows", bq.QueueConfig())
        await asyncio.to_thread(ask, ops.urls[0] + "/status")
        seen: list[tuple[int, bytes]] = []

        def look():
            while not seen or b"blocked" not in seen[-1][1]:
                status, _, body = ask(ops.urls[0] + "/status")
                seen.append((status, body))
                if blocked.is_set():
                    return

        blocked = threading.Event()
        looking = threading.Thread(target=look)
        looking.start()
        end = time.monotonic() + 30
        while looking.is_alive() and time.monotonic() < end:
            time.sleep(0.05)
        blocked.set()
        looking.join()
    assert b"is blocked" in seen[-1][1]


async def test_a_token_is_asked_for_by_header_cookie_or_address(monkeypatch):
    monkeypatch.setenv("OPS_TOKEN", "correct horse")
    async with observe.serve("127.0.0.1:0", token="env:OPS_TOKEN") as ops:
        url = ops.urls[0]

        def look():
            assert status_of(url + "/metrics") == 401
            assert status_of(url + "/ui?token=wrong") == 401
            assert status_of(url + "/status", Authorization="Bearer wrong") == 401
            assert status_of(url + "/livez") == status_of(url + "/readyz") == 200
            assert status_of(url + "/status", Authorization="Bearer correct horse") == 200
            assert OpsClient(url, token="correct horse").status()["status"]["live"]
            with pytest.raises(bq.BatchQueueError, match="401: a token is needed"):
                OpsClient(url).status()

            class Stay(urllib.request.HTTPRedirectHandler):
                def redirect_request(self, *_):
                    return None

            opener = urllib.request.build_opener(Stay)
            with pytest.raises(urllib.error.HTTPError) as moved:
                opener.open(url + "/ui?token=correct+horse")
            with moved.value as answer:
                assert (answer.code, answer.headers["location"]) == (303, "ui")
                cookie = answer.headers["set-cookie"]
            assert "HttpOnly" in cookie
            assert "SameSite=strict" in cookie
            assert status_of(url + "/ui", Cookie=cookie.partition(";")[0]) == 200

        await asyncio.to_thread(look)
        assert "correct horse" not in repr(ops)


def test_beyond_this_machine_a_token_is_needed():
    with pytest.raises(bq.ConfigError, match=r"0\.0\.0\.0:0 can be reached from other machines; give a token"):
        observe.serve("0.0.0.0:0").start()
    with pytest.raises(bq.ConfigError, match="the token is empty"):
        observe.serve("127.0.0.1:0", token="")
    with observe.serve("0.0.0.0:0", token="t", hosts=["ops.example"]) as ops:
        port = ops.urls[0].rpartition(":")[2]
        assert status_of(f"http://127.0.0.1:{port}/livez", Host="ops.example") == 200
        assert status_of(f"http://127.0.0.1:{port}/livez", Host="other.example") == 421


def test_a_port_in_use_is_named():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(bq.ConfigError, match=f"127.0.0.1:{port} is in use by another program; choose another"):
            observe.serve(f"127.0.0.1:{port}").start()


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("9464", "is not HOST:PORT"),
        ("127.0.0.1:x", "is not HOST:PORT"),
        ("127.0.0.1:70000", "is not HOST:PORT"),
        ("192.0.2.1:0", "can be reached from other machines"),
        ("unix:/nowhere/at/all.sock", "in a directory that does not exist"),
    ],
)
def test_addresses_that_cannot_be_had(address, message):
    with pytest.raises(bq.ConfigError, match=message):
        observe.serve(address).start()
    with pytest.raises(bq.ConfigError, match="does not belong to this machine"):
        observe.serve("192.0.2.1:0", token="t").start()


def test_the_socket_is_this_users_alone_and_found_by_the_client(runtime):
    with observe.serve() as ops:
        (path,) = ops.paths
        assert path == runtime / "batchqueue" / f"{os.getpid()}.sock"
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.parent.stat().st_mode & 0o777 == 0o700
        assert find_processes() == [(os.getpid(), path)]
        for target in (None, os.getpid(), str(os.getpid()), path, str(path), f"unix:{path}"):
            assert OpsClient(target).status()["pid"] == os.getpid()
        assert OpsClient().status("nobody")["error"].startswith("component 'nobody' is not here")
    assert not path.exists()
    assert find_processes() == []
    with pytest.raises(bq.ConfigError, match=r"which process.*there is none"):
        OpsClient()
    with pytest.raises(bq.ConfigError, match=f"process {os.getpid()}: has no socket"):
        OpsClient(os.getpid())
    with pytest.raises(bq.BatchQueueError, match="no answer"):
        OpsClient(path).status()
    with pytest.raises(bq.BatchQueueError, match="no answer"):
        next(OpsClient(path).frames())


def test_a_directory_that_others_may_enter_is_refused(runtime):
    (runtime / "batchqueue").mkdir(mode=0o755)
    with pytest.raises(bq.ConfigError, match="mode 0700"):
        observe.serve().start()


def test_without_a_runtime_directory_there_is_one_of_temporary_files(tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(server_module.tempfile, "gettempdir", lambda: str(tmp_path))
    assert server_module.runtime_directory() == tmp_path / f"batchqueue-{os.getuid()}"


PROGRAM = """
import os, sys
from batchqueue_async import observe
with observe.serve() as ops:
    print("up", flush=True)
    if sys.argv[1] == "kill":
        os.kill(os.getpid(), 9)
    if os.fork() == 0:
        assert ops.paths == [] and not ops.urls
        ops.stop()
        os._exit(0)
    os.wait()
    print(ops.paths[0].exists(), flush=True)
"""


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_socket_of_a_killed_process_is_removed_and_a_forked_child_leaves_its_parents(runtime):
    assert run("kill").stdout == "up\n"
    assert len(list((runtime / "batchqueue").iterdir())) == 1
    assert find_processes() == []
    assert list((runtime / "batchqueue").iterdir()) == []
    assert run("fork").stdout == "up\nTrue\n"


def test_a_socket_that_was_left_behind_is_used_again(runtime):
    path = runtime / "left.sock"
    with socket.socket(socket.AF_UNIX) as old:
        old.bind(str(path))
    with observe.serve(f"unix:{path}") as ops:
        assert OpsClient(ops.paths[0]).get("/livez")[0] == 200
        with pytest.raises(bq.ConfigError, match="is in use by another program"):
            observe.serve(f"unix:{path}").start()
        assert OpsClient(ops.paths[0]).get("/livez")[0] == 200


def test_the_phase_decides_over_readiness():
    with observe.serve("127.0.0.1:0") as ops:
        for phase, status in (("starting", 503), ("running", 200), ("draining", 503)):
            ops.phase = phase
            assert ops.phase == phase
            assert ask(ops.urls[0] + "/readyz")[0] == status
            assert ask(ops.urls[0] + "/livez")[0] == 200


def test_frames_come_once_a_second_with_the_history_before_them():
    with observe.serve("127.0.0.1:0") as ops:
        frames = OpsClient(ops.urls[0]).frames()
        first, second = next(frames), next(frames)
        frames.close()
        assert second["t"] > first["t"]
        assert first["state"] in {"ok", "degraded", "down"}
        history = ops.observer.history()
        assert [len(point) for point in history] == [13] * len(history)


async def test_mounted_in_an_application_of_the_programs_own():
    import uvicorn

    with socket.create_server(("127.0.0.1", 0)) as bound:
        inner = Starlette(routes=[Mount("/ops", app=observe.asgi(token="t"))])
        server = uvicorn.Server(uvicorn.Config(inner, log_config=None, lifespan="off", ws="none"))
        serving = asyncio.create_task(server.serve(sockets=[bound]))
        url = f"http://127.0.0.1:{bound.getsockname()[1]}/ops"

        def look():
            return [
                status_of(url + "/livez"),
                status_of(url + "/metrics"),
                *(
                    status_of(url + path, Authorization="Bearer t")
                    for path in ("/metrics", "/ui", "/static/dashboard.css")
                ),
            ]

        while not server.started:
            await asyncio.sleep(0.01)
        assert await asyncio.to_thread(look) == [200, 401, 200, 200, 200]
        server.should_exit = True
        await serving


async def test_what_is_no_http_is_not_answered():
    async def never(*_):
        raise AssertionError

    await observe.asgi()({"type": "websocket"}, never, never)


def test_one_look_serves_all_who_ask_at_once():
    now = 0.0
    observer = Observer(clock=lambda: now)
    first = observer.look()
    assert observer.look() is first or observer.look()[0] is first[0]
    frame = observer.frame()
    assert observer.frame() is frame
    now = 5.0
    assert observer.look()[0] is not first[0]
    assert observer.frame() is not frame


async def test_w_1_a_viewer_gets_each_frame_once_however_often_they_come(monkeypatch):
    """Frames of a busy process come up to 1.5 s apart."""
    monkeypatch.setattr(observer_module, "FRAMES_SHARE", math.inf)
    monkeypatch.setattr(observer_module, "SLOWEST_FRAMES", 1.3)
    observer = Observer()
    monkeypatch.setattr(observer_module, "FRAME_EVERY", 0.0)
    application, times, parted = observe.asgi(observer=observer), [], asyncio.Event()

    async def receive():
        await parted.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        if message.get("body", b"").startswith(b"data: "):
            times.append(json.loads(message["body"].removeprefix(b"data: "))["t"])
        if len(times) >= 3:
            parted.set()

    scope = {"type": "http", "method": "GET", "path": "/events", "query_string": b"", "headers": []}
    await application(scope, receive, send)
    assert times == sorted(set(times))
    assert len(observer.history()) - len(times) in {0, 1}  # nothing was left out either


@pytest.fixture
def connect():
    """Connections to an ops thread, which are closed at the end."""
    opened = []

    def open_one(url, text=b""):
        host, _, port = url.removeprefix("http://").rpartition(":")
        connection = socket.create_connection((host, int(port)))
        opened.append(connection)
        connection.settimeout(60)
        connection.sendall(text)
        return connection

    yield open_one
    for each in opened:
        each.close()


@pytest.mark.parametrize(
    "sent", [b"", b"GET /livez HTTP/1.1\r\nHost: loc", b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\nGET"]
)
def test_w_2_probes_are_answered_however_many_connections_say_nothing(connect, sent):
    with observe.serve("127.0.0.1:0") as ops:
        silent = [connect(ops.urls[0], sent) for _ in range(connections.MOST_CONNECTIONS + 20)]
        assert ask(ops.urls[0] + "/livez")[0] == 200
        if sent.endswith(b"GET"):
            assert silent[0].recv(1) == b"H"  # what was asked whole has its answer
        while silent[0].recv(65536):  # the oldest made room
            pass


def test_w_2_a_request_may_not_take_for_ever(connect, monkeypatch):
    monkeypatch.setattr(connections, "REQUEST_WITHIN", 0.2)
    with observe.serve("127.0.0.1:0") as ops:
        for sent in (b"", b"GET /li", b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\nGE"):
            silent = connect(ops.urls[0], sent)
            try:
                while silent.recv(65536):
                    pass
            except ConnectionResetError:
                pass
        viewer = connect(ops.urls[0], b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        seen = b""
        while seen.count(b"\ndata: ") < 3:  # longer than that, and still there
            seen += viewer.recv(65536)


def test_w_2_viewers_have_a_bound_and_leave_their_places(connect, monkeypatch):
    monkeypatch.setattr(web, "MOST_VIEWERS", 3)
    asked = b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with observe.serve("127.0.0.1:0") as ops:
        viewers = [connect(ops.urls[0], asked) for _ in range(20)]
        firsts = [each.recv(12) for each in viewers]
        assert sorted(firsts) == [b"HTTP/1.1 200"] * 3 + [b"HTTP/1.1 503"] * 17
        assert ask(ops.urls[0] + "/livez")[0] == 200
        for each in viewers:
            each.close()
        while connect(ops.urls[0], asked).recv(12) != b"HTTP/1.1 200":
            time.sleep(0.05)  # the thread hears of it in its own time


async def test_w_4_probes_read_of_each_queue_its_totals_alone(monkeypatch):
    """With thousands of queues everything takes seconds to read, which a probe does not wait."""
    asked = []
    real = bq.BatchQueue.peek
    monkeypatch.setattr(
        bq.BatchQueue, "peek", lambda self, *, totals=False: asked.append(totals) or real(self, totals=totals)
    )
    async with bq.BatchQueueManager() as manager:
        manager.create("probed", bq.QueueConfig(consumer=taken))
        for path in ("/livez", "/healthz", "/readyz", "/status", "/status?component=queue/probed"):
            pages = observe.asgi(observer=Observer(manager))
            answers = []

            async def send(message, answers=answers):
                answers.append(message.get("status"))

            where, _, query = path.partition("?")
            scope = {"type": "http", "method": "GET", "path": where, "query_string": query.encode(), "headers": []}
            await pages(scope, None, send)
            assert answers[0] == 200
        assert asked == [True] * 5


async def test_viewers_share_a_frame_and_its_text(monkeypatch):
    observer = Observer()
    made = []
    real = observer.as_json
    monkeypatch.setattr(observer, "as_json", lambda value: made.append(value) or real(value))
    application, bodies, parted = observe.asgi(observer=observer), [], asyncio.Event()

    async def receive():
        await parted.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        if message.get("body", b"").startswith(b"data: "):
            bodies.append(message["body"])
            if len(bodies) == 50:
                parted.set()

    scope = {"type": "http", "method": "GET", "path": "/events", "query_string": b"", "headers": []}
    await asyncio.gather(*(application(scope, receive, send) for _ in range(50)))
    frames = [each for each in made if isinstance(each, Frame)]
    assert len(frames) == len(set(bodies)) < 3  # a second one where they took longer than a frame


async def test_a_frame_looks_at_no_partition_of_a_queue_that_rests():
    """What is looked at by each frame, counted: with hundreds of queues that is what a page costs."""
    async with bq.BatchQueueManager() as manager:
        config = bq.QueueConfig(
            consumer=taken, partitions=bq.PartitionPolicy.fixed(16), selector=bq.round_robin(), max_idle=60.0
        )
        queues = [manager.create(f"rest-{number}", config) for number in range(100)]
        now = 0.0
        observer = Observer(manager, clock=lambda: now)
        observer.frame()
        counts = {}
        for fed in (True, False):
            if fed:
                for queue in queues:
                    await queue.produce_many(range(20))
                    await queue.flush()
            calls: Counter[str] = Counter()
            now += 10.0

            def count(frame, event, _, calls=calls):
                if event == "call":
                    calls[frame.f_code.co_name] += 1

            sys.setprofile(count)
            try:
                observer.frame()
            finally:
                sys.setprofile(None)
            counts[fed] = calls
        for calls in counts.values():
            assert calls["qsize"] == 24 * 16  # of those that are shown
            assert calls["peek"] == 2 * 100
        assert max(calls.total() for calls in counts.values()) / 100 < 70


async def taken(batch):
    pass


def test_the_package_says_what_it_has():
    with pytest.raises(AttributeError, match="has no attribute 'server_'"):
        observe.server_  # noqa: B018
    assert all(getattr(observe, name) is not None for name in observe.__all__)


def test_importing_the_package_or_the_metrics_brings_no_web_server():
    code = (
        "import sys, batchqueue_async; from batchqueue_async import observe; observe.take_snapshot;"
        "extras = ('starlette', 'uvicorn', 'prometheus_client', 'opentelemetry');"
        "print([name for name in extras if name in sys.modules],"
        " 'batchqueue_async.observe.server' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[] False\n"
    assert Path(observe.__file__).parent.name == "observe"


async def test_a_frame_reads_in_detail_what_it_shows_and_its_totals_are_those_of_all():
    now = 0.0
    observer = Observer(clock=lambda: now)

    async def handle(batch):
        await asyncio.sleep(3600)

    async with bq.BatchQueueManager() as manager:
        queues = [manager.create(f"frame-{number}", bq.QueueConfig(consumer=handle)) for number in range(40)]
        observer = Observer(manager, clock=lambda: now)
        first = observer.frame()
        assert (len(first.queues), first.more_queues) == (24, 16)
        # One that was not shown gets the most to do: it is shown from now on, and with its details from the next on.
        busy = queues[-1]
        assert busy.name not in {row["name"] for row in first.queues}
        rows = []
        for _ in range(2):
            await busy.produce_many(range(500))
            now += 10.0
            frame = observer.frame()
            assert sum(queue.peek(totals=True).used for queue in queues) == frame.cards["waiting"]
            rows.append(next(row for row in frame.queues if row["name"] == busy.name))
        assert rows[0]["parts"] == []
        assert len(rows[1]["parts"]) == busy.partition_count
        # Whoever asks for everything is not given what was read for the page.
        snapshot, _status = observer.look()
        assert all(view.stats.partitions and view.close_up is None for view in snapshot.queues)
        for queue in queues:
            await queue.shutdown(timeout=0.0)


async def test_totals_are_those_of_the_whole():
    async def handle(batch):
        await asyncio.sleep(3600)

    async with bq.BatchQueueManager() as manager:
        config = bq.QueueConfig(consumer=handle, buffer_bytes="1MiB", size_of=lambda item: 10, buffer_size=8)
        queue = manager.create("totals", replace(config, overflow="reject", workers=bq.WorkerPolicy.fixed(2)))
        for number in range(100):
            await queue.produce(number)
        await asyncio.sleep(1.0)
        whole, totals = queue.peek(), queue.peek(totals=True)
        assert totals.adds_up
        assert totals.refused > 0
        empty = {"partitions", "workers", "handlers", "batch_sizes", "queue_latency", "age", "loop_lag"}
        for each in fields(whole):
            if each.name not in empty:
                assert getattr(whole, each.name) == getattr(totals, each.name), each.name
        assert totals.partitions == totals.workers == totals.handlers == ()
        await queue.shutdown(timeout=0.0)
