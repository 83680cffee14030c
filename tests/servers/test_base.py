"""The servers' common part, with the smallest server there is."""

from __future__ import annotations

import os
import pwd
import sys
from pathlib import Path

import pytest

from servers import base


class Listener(base.Server):
    name = "listener"

    def prepare(self):
        (self.directory / "data").write_text("kept")

    def command(self):
        # It says so first: it is killed as soon as it can be connected to.
        code = f"import socket; print('up', flush=True); s = socket.create_server(('{base.HOST}', {self.port}))"
        return [sys.executable, "-c", code + "\nwhile True: s.accept()[0].close()"]


@pytest.fixture
def listener():
    server = Listener()
    yield server
    server.dispose()


def test_a_server_starts_dies_and_comes_back_at_the_same_place(listener):
    for end in (listener.stop, listener.kill):
        listener.start()
        assert listener.running
        assert base.can_connect(listener.port)
        end()
        assert not listener.running
        assert not base.can_connect(listener.port)
    listener.start()
    listener.restart()
    assert listener.output() == "up\n" * 4
    assert (listener.directory / "data").read_text() == "kept"


def test_a_disposed_server_leaves_nothing(listener):
    listener.start()
    listener.dispose()
    assert not listener.running
    assert not listener.directory.exists()


def test_a_server_that_ends_at_its_start_says_why(listener):
    listener.command = lambda: [sys.executable, "-c", "raise SystemExit('no such option')"]
    with pytest.raises(RuntimeError, match="no such option"):
        listener.start()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may run a server as someone else")
def test_a_server_may_run_as_someone_else():
    server = Listener()
    server.user = "nobody"
    server.command = lambda: ["/bin/sleep", "60"]  # this test's Python may be out of its reach
    server.ready = lambda: True
    server.start()
    try:
        assert Path(f"/proc/{server.process.pid}").stat().st_uid == pwd.getpwnam("nobody").pw_uid
        assert server.run("id", "-un").strip() == "nobody"
    finally:
        server.dispose()


def test_a_command_that_fails_is_told_with_its_output(listener):
    with pytest.raises(RuntimeError, match="ended with 3: oh"):
        listener.run("sh", "-c", "echo oh; exit 3")


def test_a_server_that_cannot_be_had_is_skipped_with_a_closing_line_and_fails_under_ci(monkeypatch):
    def nowhere():
        raise base.UnavailableError("needs root")

    monkeypatch.setattr(base, "MISSING", {})
    monkeypatch.delenv("CI", raising=False)
    assert base.closing_lines() == []
    with pytest.raises(pytest.skip.Exception, match="needs root"):
        base.provide("some server", nowhere)
    assert base.closing_lines() == ["not tested against some server: needs root"]
    monkeypatch.setenv("CI", "1")
    with pytest.raises(pytest.fail.Exception, match="CI demands it: needs root"):
        base.provide("some server", nowhere)


def test_what_only_root_can_install_is_named_with_its_command(monkeypatch):
    monkeypatch.setattr(base.shutil, "which", lambda name: f"/usr/bin/{name}" if name == "apt-get" else None)
    monkeypatch.setattr(base.os, "geteuid", lambda: 1000)
    with pytest.raises(base.UnavailableError, match="sudo apt-get install nosuchserver"):
        base.apt_program("nosuchserver", "nosuchserver", "/usr/lib/nosuch*/bin")
    monkeypatch.setattr(base.shutil, "which", lambda name: None)
    with pytest.raises(base.UnavailableError, match="no apt-get here"):
        base.apt_install("nosuchserver")


def test_a_program_is_found_in_the_newest_place(tmp_path):
    for version in ("15", "16"):
        (tmp_path / version / "bin").mkdir(parents=True)
        (tmp_path / version / "bin" / "nosuchserver").touch()
    assert base.find_program("nosuchserver", f"{tmp_path}/*/bin") == f"{tmp_path}/16/bin/nosuchserver"
