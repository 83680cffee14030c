"""The script that sees to the Java of Spark: `make java`."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

import pytest

PATH = Path(__file__).parents[1] / ".ci" / "java.py"


@pytest.fixture
def java(monkeypatch):
    spec = importlib.util.spec_from_file_location("ci_java", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setattr(module.shutil, "which", lambda command: f"/usr/bin/{command}")
    return module


def machine(java, monkeypatch, versions, *, root):
    """A machine on which Java is found so, before and after an installation; returns what was run to install it."""
    ran = []
    found = iter(versions)
    monkeypatch.setattr(java, "java_version", lambda: next(found))
    monkeypatch.setattr(java.os, "geteuid", lambda: 0 if root else 1000)
    monkeypatch.setattr(java.subprocess, "run", lambda command, **_: ran.append(command[-1]))
    return ran


def test_a_java_that_is_there_is_left_alone(java, monkeypatch):
    ran = machine(java, monkeypatch, [17], root=True)
    java.need_java()
    assert ran == []


@pytest.mark.parametrize("before", [None, 11])
def test_root_has_it_installed(java, monkeypatch, before):
    ran = machine(java, monkeypatch, [before, 17], root=True)
    java.need_java()
    assert ran == [java.INSTALL]


def test_others_are_told_the_command(java, monkeypatch):
    ran = machine(java, monkeypatch, [11], root=False)
    with pytest.raises(SystemExit, match="found Java 11; run:\n  sudo sh -c 'apt-get update"):
        java.need_java()
    assert ran == []


def test_an_installation_that_brings_none_is_told(java, monkeypatch):
    machine(java, monkeypatch, [None, None], root=True)
    with pytest.raises(SystemExit, match="found none; run:\n  sh -c"):
        java.need_java()


def test_a_wrong_java_home_is_named(java, monkeypatch):
    ran = machine(java, monkeypatch, [None], root=True)
    monkeypatch.setenv("JAVA_HOME", "/no/such")
    with pytest.raises(SystemExit, match="JAVA_HOME='/no/such' has none"):
        java.need_java()
    assert ran == []


@pytest.mark.parametrize(
    ("told", "version"), [('openjdk version "17.0.15" 2025-04-15', 17), ('openjdk version "25" x', 25), ("?", None)]
)
def test_the_version_is_read_from_what_java_says(java, monkeypatch, told, version):
    done = subprocess.CompletedProcess([], 0, "", f"Picked up JAVA_TOOL_OPTIONS: -Xss1m\n{told}\n")
    monkeypatch.setattr(java.subprocess, "run", lambda *_, **__: done)
    assert java.java_version() == version


def test_a_machine_without_java_has_no_version(java, monkeypatch):
    monkeypatch.setenv("JAVA_HOME", "/no/such")
    assert java.java_version() is None
