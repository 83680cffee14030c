"""A service of a file as a process of its own, with its words and its signals."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from from_tree import ROOT

PROGRAMS = ROOT / "tests" / "service"
APP = ("--app", "service_program:app")


def write(text, name="s.yaml"):
    Path(name).write_text(text)
    return name


class Running:
    """`batchqueue run` as a process."""

    def __init__(self, text, *arguments, **environment):
        write(text)
        self.said = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "batchqueue_async.cli.main", "run", "s.yaml", *APP, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{PROGRAMS}", **environment},
        )

    def until(self, words):
        for line in self.process.stderr:
            self.said.append(line)
            if words in line:
                return line
        raise AssertionError(f"{words!r} is not in {self.said}")

    def signal(self, number):
        self.process.send_signal(number)

    def end(self):
        """The exit status, and all that was said on standard error."""
        _, rest = self.process.communicate(timeout=100)
        return self.process.returncode, "".join(self.said) + rest

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()
