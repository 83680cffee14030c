"""`status`, `why` and `top`, asked of a real process by its socket, and of what is not one."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

from batchqueue_async import BatchQueueError, ConfigError, observe
from batchqueue_async._support.registry import everything
from batchqueue_async.cli.live import top
from batchqueue_async.cli.live.top_view import Columns
from batchqueue_async.cli.main import main
from batchqueue_async.observe import client
from batchqueue_async.observe.client import OpsClient

pytestmark = pytest.mark.real_time

PROGRAM = Path(__file__).with_name("served_program.py")
PATIENCE = 60.0


class Served:
    """The program, and what it is written."""

    def __init__(self, runtime, *addresses):
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), *addresses],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "XDG_RUNTIME_DIR": str(runtime)},
        )
        assert self.process.stdout.readline() == "up\n"
        self.pid = str(self.process.pid)
        self.runtime = str(runtime)

    def write(self, word):
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()

    def end(self):
        if self.process.returncode is None:
            self.process.communicate("end\n", timeout=PATIENCE)


def confine(monkeypatch, directory):
    """Sockets are looked for here alone: other processes of the machine are not found.

    Nor does this process know what earlier tests have left, and the collector has not yet come to.
    """
    monkeypatch.setattr(everything, "_things", {})
    monkeypatch.setenv("XDG_RUNTIME_DIR", directory)
    monkeypatch.setattr(tempfile, "tempdir", directory)
    # A loaded machine is not a reason for another result.
    monkeypatch.setattr(top, "SILENT", PATIENCE)
    monkeypatch.setattr(client, "TIMEOUT", PATIENCE)


@pytest.fixture
def runtime(monkeypatch):
    with tempfile.TemporaryDirectory() as directory:
        confine(monkeypatch, directory)
        yield Path(directory)


@pytest.fixture(scope="module")
def program():
    with tempfile.TemporaryDirectory() as directory:
        program = Served(directory, "unix:")
        yield program
        program.end()


@pytest.fixture
def served(program, monkeypatch):
    """One program for all tests, which leave it as they found it."""
    confine(monkeypatch, program.runtime)
    return program


def until(condition):
    end = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.05)
    return found


def run(capsys, *arguments):
    code = main(arguments)
    said = capsys.readouterr()
    return code, said.out, said.err


def fine(capsys, *arguments):
    """What a command prints once all is well; a loop that is late, as under load, is reported until then."""
    code, out, err = until(lambda: (said := run(capsys, *arguments))[0] == 0 and said)
    assert (code, err) == (0, "")
    return out


def test_a_process_that_is_fine_and_one_whose_destination_stops(served, capsys):
    first, sentence, *components = fine(capsys, "status").splitlines()
    assert first.startswith(f"process {served.pid}: ok, ready, running for ")
    assert sentence.startswith("  All is well")
    assert ["ok", "exporter/warehouse", "for"] in [each.split()[:3] for each in components]
    assert fine(capsys, "why") == "All is well.\n"
    (found,) = json.loads(fine(capsys, "status", "--json"))
    assert (found["pid"], found["status"]["state"]) == (int(served.pid), "ok")

    served.write("stop")
    out = until(lambda: "down  exporter" in (said := run(capsys, "status", served.pid))[1] and said)[1]
    assert f"process {served.pid}: down, ready" in out
    assert ["down", "exporter/warehouse", "for"] in [line.split()[:3] for line in out.splitlines()]
    code, out, _ = run(capsys, "why", served.pid)
    assert code == 1
    assert "Exporter warehouse can't deliver, for " in out
    assert "connection to warehouse:5432 refused" in out
    assert "What to do: bring the destination back" in out
    assert "\x1b" not in out
    (found,) = json.loads(run(capsys, "status", "--json", served.pid)[1])
    assert found["status"]["state"] == "down"

    code, out, _ = run(capsys, "top", "--once")
    assert code == 1
    assert "What to do: bring the destination back" in out
    assert "\x1b" not in out

    served.write("go")
    fine(capsys, "status", served.pid)


def test_top_shows_a_frame_with_rates(served, capsys):
    head, sentence, counts, *tables = fine(capsys, "top", "--once", served.pid).splitlines()
    assert head.startswith(f"process {served.pid}  batchqueue_async ")
    assert sentence.startswith("All is well")
    assert float(counts.split()[1].removesuffix("/s").replace(",", "")) > 0
    names = [line.split()[:2] for line in tables]
    assert names == [["queue", "state"], ["rows", "ok"], ["exporter", "state"], ["warehouse", "ok"]]
    # Not a terminal: one frame, without being asked for one.
    assert fine(capsys, "top").startswith(f"process {served.pid}  ")


def test_several_processes(served, capsys):
    numbers = {served.pid, str(os.getpid())}
    with observe.serve():
        lines = fine(capsys, "status").splitlines()
        assert {line.split(":")[0] for line in lines if line[0] != " "} == {f"process {each}" for each in numbers}
        assert set(fine(capsys, "why").splitlines()) == {f"process {each}: All is well." for each in numbers}
        assert numbers <= {word for line in fine(capsys, "top", "--once").splitlines() for word in line.split()[:1]}


def test_nobody_to_ask(runtime, capsys):
    for command in ("status", "why", "top"):
        code, out, err = run(capsys, command)
        assert (code, out) == (2, "")
        assert err.startswith("batchqueue: no process of this user can be asked; ")
        for target, message in (
            ("1", "process 1: has no socket of this user"),
            (str(runtime / "none.sock"), "no answer"),
            ("http://127.0.0.1:1", "no answer"),
            ("http://127.0.0.1:port", "is not a URL of a process"),
            ("http://", "is not a URL of a process"),
            ("http://[", "is not a URL of a process"),
        ):
            code, out, err = run(capsys, command, target)
            assert code == 2
            assert message in out + err
            assert "Traceback" not in err


@contextlib.contextmanager
def mute(path):
    """A socket whose other end accepts connections, and hangs up without a word."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()

        def hang_up():
            with contextlib.suppress(OSError):
                while True:
                    listening.accept()[0].close()

        hanging = threading.Thread(target=hang_up, daemon=True)
        hanging.start()
        yield
        listening.shutdown(socket.SHUT_RDWR)
        hanging.join()


def test_a_process_that_does_not_answer_does_not_hide_the_others(served, capsys):
    with mute(Path(served.runtime) / "batchqueue" / "1.sock"):
        code, out, err = run(capsys, "status")
        assert code == 2
        assert f"process {served.pid}: " in out
        assert "1.sock: no answer" in err
        code, out, err = run(capsys, "why")
        assert (code, out.endswith(".\n")) == (2, True)
        assert "1.sock: no answer" in err
        (first, second) = json.loads(run(capsys, "status", "--json")[1])
        assert "1.sock: no answer" in first["error"]
        assert second["pid"] == int(served.pid)
        code, out, _ = run(capsys, "top", "--once")
        assert code == 2
        assert {"1", served.pid} <= {word for line in out.splitlines() for word in line.split()[:1]}
    (Path(served.runtime) / "batchqueue" / "1.sock").unlink()


def test_a_process_that_is_stopped_is_not_waited_for(runtime, capsys, monkeypatch):
    """As by a debugger: its socket accepts connections all the same."""
    monkeypatch.setattr(top, "SILENT", 0.2)
    monkeypatch.setattr(client, "TIMEOUT", 0.2)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(runtime / "silent.sock"))
        silent.listen()
        for command in (["status"], ["why"], ["top", "--once"]):
            code, out, err = run(capsys, *command, str(runtime / "silent.sock"))
            assert code == 2
            assert "silent.sock" in out + err


def test_something_else_that_answers(capsys):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection:
                        connection.recv(10_000)
                        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]")

        threading.Thread(target=answer, daemon=True).start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        code, _, err = run(capsys, "status", url)
        assert code == 2
        assert "answers, and not as batchqueue_async's status does" in err
        code, out, err = run(capsys, "top", "--once", url)
        assert code == 2
        assert "ended before it answered" in out
        server.shutdown(socket.SHUT_RDWR)


def test_a_token_is_given_by_reference(runtime, capsys, monkeypatch):
    monkeypatch.setenv("OPS_TOKEN", "correct horse")
    monkeypatch.setenv("TWO_LINES", "correct\nhorse")
    with observe.serve("127.0.0.1:0", token="env:OPS_TOKEN") as ops:
        (url,) = ops.urls
        for command in (["status"], ["why"], ["top", "--once"]):
            assert run(capsys, *command, url, "--token", "env:OPS_TOKEN")[0] == 0
            code, out, err = run(capsys, *command, url)
            assert code == 2
            assert "answered 401: a token is needed" in out + err
        for reference, message in (
            ("correct horse", "--token: is not env:NAME or file:/path"),
            ("env:NOT_THERE", "NOT_THERE"),
            ("env:TWO_LINES", "--token env:TWO_LINES: holds what no header may"),
        ):
            code, out, err = run(capsys, "status", url, "--token", reference)
            assert code == 2
            assert message in err
            assert "horse" not in out + err
        with pytest.raises(BatchQueueError, match="/events answered 401"):
            next(OpsClient(url).frames())
    for wrong in ("http://", "https://:9/", "http://host:x", "http://host:0"):
        with pytest.raises(ConfigError, match="is not a URL of a process"):
            OpsClient(wrong)


def test_without_rich_the_pip_command_is_named(runtime, capsys, monkeypatch):
    for name in [each for each in sys.modules if each.split(".")[0] == "rich" or each.endswith("live.top_view")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert run(capsys, "top") == (
        2, "", "batchqueue: batchqueue top: needs rich; run: pip install 'batchqueue-async[service]'\n",
    )  # fmt: skip
    assert run(capsys, "status")[0] == 2


def test_the_numbers_of_processes_are_completed(served, monkeypatch, capsys):
    monkeypatch.setenv("_BATCHQUEUE_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", "batchqueue why ")
    monkeypatch.setenv("COMP_CWORD", "2")
    main()
    assert capsys.readouterr().out == f"plain,{served.pid}\n"


# --- in a terminal


class Terminal:
    """A pseudo-terminal, read all the time."""

    def __init__(self):
        self._master, self.end = pty.openpty()
        self.text = ""
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        with contextlib.suppress(OSError):
            while data := os.read(self._master, 65_536):
                self.text += data.decode(errors="replace")


def drawn(table, width, *, terminal):
    console = Console(width=width, file=io.StringIO(), force_terminal=terminal, color_system=None, _environ={})
    console.print(table, crop=terminal)
    return console.file.getvalue().splitlines()


def test_a_table_of_top_is_aligned_and_its_names_are_cut_where_a_terminal_is_narrow():
    table = Columns("queue", "state", "in/s")
    table.add_row("rows-of-the-warehouse", ("ok", "green"), "1,200")
    table.add_row("\u5009\u5eab", ("down", "red"), "0")
    whole = [
        "queue                  state   in/s  ",
        "rows-of-the-warehouse  ok     1,200  ",
        "\u5009\u5eab                   down       0  ",
    ]
    assert drawn(table, 80, terminal=True) == whole
    assert drawn(table, 10, terminal=False) == whole
    assert [line.rstrip() for line in drawn(table, 26, terminal=True)] == [
        "queue         state   in/s",
        "rows-of-the\u2026  ok     1,200",
        "\u5009\u5eab          down       0",
    ]


def test_a_sentence_in_a_table_of_top_has_what_is_left():
    table = Columns("process", "state", "")
    table.add_row("4242", ("down", "red"), "warehouse is down for 4 min")
    assert [line.rstrip() for line in drawn(table, 30, terminal=True)] == [
        "process  state",
        "4242     down   warehouse is \u2026",
    ]
    assert drawn(table, 30, terminal=False)[1].rstrip().endswith("is down for 4 min")


def test_top_in_a_terminal_until_ctrl_c(served):
    terminal = Terminal()
    watching = subprocess.Popen(
        [sys.executable, "-m", "batchqueue_async.cli.main", "top"],
        stdin=terminal.end,
        stdout=terminal.end,
        stderr=terminal.end,
        env={**os.environ, "COLUMNS": "150", "LINES": "40", "TERM": "xterm", "TMPDIR": served.runtime},
        start_new_session=True,
    )
    until(lambda: "warehouse" in terminal.text)
    other = Served(served.runtime, "unix:")
    until(lambda: other.pid in terminal.text)
    other.end()
    seen = len(terminal.text)
    until(lambda: "exporter" in terminal.text[seen:])
    watching.send_signal(signal.SIGINT)
    assert watching.wait(PATIENCE) == 0
    assert "Traceback" not in terminal.text


def test_top_ends_with_the_process_that_was_named(runtime, monkeypatch):
    served = Served(runtime, "unix:")
    terminal = Terminal()
    monkeypatch.setenv("COLUMNS", "150")
    monkeypatch.setenv("LINES", "40")
    monkeypatch.setenv("TERM", "xterm")

    def end():
        until(lambda: "warehouse" in terminal.text)
        served.end()

    ending = threading.Thread(target=end)
    ending.start()
    with open(terminal.end, "w", closefd=False) as out:
        monkeypatch.setattr(sys, "stdout", out)
        code = main(["top", served.pid])
        monkeypatch.undo()
    ending.join()
    assert code == 0
    until(lambda: f"process {served.pid} ended" in terminal.text)


def test_top_in_a_terminal_without_an_answer(runtime, capsys, monkeypatch):
    terminal = Terminal()
    with open(terminal.end, "w", closefd=False) as out:
        monkeypatch.setattr(sys, "stdout", out)
        code = main(["top", str(runtime / "none.sock")])
        monkeypatch.undo()
    assert code == 2
    assert "none.sock: no answer" in capsys.readouterr().err
