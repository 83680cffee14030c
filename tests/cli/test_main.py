"""The command line: help, version, misspelled names, completion; and texts name only commands that exist."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
from from_tree import PACKAGE, ROOT, fill

import batchqueue_async as bq
from batchqueue_async.cli import main as main_module
from batchqueue_async.cli.commands import Argument
from batchqueue_async.cli.main import COMMANDS, build, main


def commands(command, path=()):
    """Every command with its words."""
    yield path, command
    if isinstance(command, click.Group):
        for name in command.list_commands(click.Context(command)):
            yield from commands(command.get_command(click.Context(command), name), (*path, name))


EVERY = dict(commands(build()))


def ended(*arguments):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    return end.value.code


@pytest.mark.parametrize("path", EVERY, ids=" ".join)
def test_every_command_has_help(path, capsys):
    assert ended(*path, "-h") == ended(*path, "--help") == 0
    said = capsys.readouterr().out
    assert said.startswith(" ".join(["usage: batchqueue", *path]))
    for each in EVERY[path].params:
        assert each.shown[1] if isinstance(each, Argument) else each.help, each


def test_the_version_is_said(capsys):
    assert ended("--version") == 0
    assert capsys.readouterr().out == f"batchqueue {bq.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "where", "message"),
    [
        (["siez"], "batchqueue", "siez is not a command; did you mean size?"),
        (["xyzzy"], "batchqueue", f"xyzzy is not a command; there are {', '.join(COMMANDS)}"),
        (["disk", "verfy", "x"], "batchqueue disk", "verfy is not a command; did you mean verify?"),
        (["disk", "dead-letters", "exprot"], "batchqueue disk dead-letters", "did you mean export?"),
        (["size", "--wrokers", "3"], "batchqueue size", "--wrokers is not an option here; did you mean --workers?"),
        (["size", "--work", "3"], "batchqueue size", "--work is not an option here; did you mean --workers?"),
        (["--versoin"], "batchqueue", "--versoin is not an option here; did you mean --version?"),
        (["size", "-q"], "batchqueue size", "-q is not an option here; "),
        (["size", "--workers", "many", "--latency", "1"], "batchqueue size", "'many' is not a valid integer"),
        (["size", "--workers", "3"], "batchqueue size", "--latency"),
        (["completion", "tcsh"], "batchqueue completion", "'tcsh' is not one of 'bash', 'zsh', 'fish'"),
        ([], "batchqueue", "Missing command"),
        (["disk"], "batchqueue disk", "Missing command"),
        (["disk", "verify"], "batchqueue disk verify", "DIRECTORY"),
    ],
)
def test_what_cannot_be_understood_ends_with_2_and_the_way_out(capsys, arguments, where, message):
    assert ended(*arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    usage, error, hint = said.err.splitlines()
    assert usage.startswith(f"usage: {where} ")
    assert error.startswith(f"{where}: error: ")
    assert message in error
    assert hint == f"`{where} --help` says what there is"


def run(*arguments, **environment):
    command = [sys.executable, "-W", "error", "-m", "batchqueue_async.cli.main", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env={**os.environ, **environment}
    )


def test_the_exit_status_is_that_of_the_process():
    assert run("size", "--workers", "8", "--latency", "0.05").returncode == 0
    assert run("disk", "inspect", "/no/such/directory").returncode == 2
    assert run("siez").returncode == 2


# --- completion


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("batchqueue s", {"schema", "size", "spark", "status"}),
        ("batchqueue disk dead-letters re", {"requeue"}),
        ("batchqueue size --wor", {"--workers"}),
        ("batchqueue completion f", {"fish"}),
        ("batchqueue xyzzy ", set(COMMANDS)),
    ],
)
def test_words_are_completed(words, expected, monkeypatch, capsys):
    given = words.split(" ")
    monkeypatch.setenv("_BATCHQUEUE_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(given) - 1))
    main()
    found = {line.partition(",")[2] for line in capsys.readouterr().out.splitlines()}
    assert found == expected or (words.endswith(" ") and found <= expected)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_a_script(shell, capsys):
    assert main(["completion", shell]) == 0
    assert f"_BATCHQUEUE_COMPLETE={shell}_complete" in capsys.readouterr().out


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_by_the_script(tmp_path):
    (tmp_path / "script").write_text(run("completion", "bash").stdout)
    program = tmp_path / "batchqueue"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m batchqueue_async.cli.main "$@"\n')
    program.chmod(0o755)
    lines = (
        f"PATH={tmp_path}:$PATH; . {tmp_path}/script; COMP_WORDS=(batchqueue st); COMP_CWORD=1; "
        '_batchqueue_completion batchqueue; echo "${COMPREPLY[@]}"'
    )
    done = subprocess.run(["bash", "-c", lines], capture_output=True, text=True, timeout=60, check=True, cwd=ROOT)
    assert done.stdout == "status\n"


# --- texts


NAMED = re.compile(r"(?:`|^ {4}|^|\$\()batchqueue ((?:[a-z][a-z-]+ ?)+)", re.MULTILINE)
TEXTS = [
    *PACKAGE.rglob("*.py"),
    *(path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts),
    *ROOT.glob("*.md"),
]


def misnamed(text):
    """The first words after `batchqueue` that are not a command."""
    for found in NAMED.finditer(text):
        words, path = found[1].split(), ()
        for word in words:
            if not isinstance(EVERY[path], click.Group):
                break
            if (*path, word) not in EVERY:
                yield " ".join(words)
                break
            path = (*path, word)


def test_texts_name_commands_that_exist():
    """A page, a docstring or an advice of `why` that names another sends its reader astray."""
    assert list(misnamed("run `batchqueue disk check` on the directory")) == ["disk check"]
    assert list(misnamed("run `batchqueue disk verify x` and `batchqueue size --workers 2`")) == []
    wrong = {path.relative_to(ROOT).as_posix(): list(misnamed(path.read_text())) for path in TEXTS}
    assert {path: found for path, found in wrong.items() if found} == {}


def test_the_reference_has_every_command():
    page = fill((ROOT / "docs" / "reference" / "command-line.md").read_text())
    assert re.findall(r"^## batchqueue(.*)$", page, re.MULTILINE) == [
        "".join(f" {word}" for word in path) for path in EVERY
    ]
    for path, command in EVERY.items():
        assert " ".join(["usage: batchqueue", *path]) in page
        for each in command.params:
            assert (each.shown[0] if isinstance(each, Argument) else each.opts[0]) in page


def test_a_command_imports_only_what_it_needs():
    code = (
        "import sys; from batchqueue_async.cli.main import main; main(['size', '--workers', '1', '--latency', '1']);"
        "print([name for name in ('uvicorn', 'pyspark', 'batchqueue_async.cli.disk', 'batchqueue_async.cli.live.top')"
        " if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]"
    assert Path(main_module.__file__).parent.name == "cli"
