"""The examples and the demo, as a user runs them; and the listener that the demo shows."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = pytest.mark.timeout(1300)


def run(name, *arguments):
    command = [sys.executable, str(EXAMPLES / name), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_rate_to_sqlite_goes_on_and_stays_exact(tmp_path):
    found = [re.search(r"(\d+) rows; none missing or doubled: True", run("spark_rate_to_sqlite.py", tmp_path, 60))]
    found.append(re.search(r"(\d+) rows; none missing or doubled: True", run("spark_rate_to_sqlite.py", tmp_path, 60)))
    first, second = (int(each[1]) for each in found)
    assert second >= first + 60


def test_batch_to_json_lines(tmp_path):
    assert "1000 lines in 4 files" in run("spark_batch_to_jsonl.py", tmp_path)


def test_the_demo_goes_on_after_interruptions(tmp_path):
    """It is interrupted when its first table is there, killed when it went on, and then left alone."""
    command = [sys.executable, str(EXAMPLES / "spark_demo.py"), "--directory", str(tmp_path / "demo")]
    command += ["--minutes", "5", "--rows-per-batch", "2000"]
    deadline = time.monotonic() + 600
    for how, reached in ((signal.SIGINT, "results.db"), (signal.SIGKILL, "state/checkpoints/minute/commits/2")):
        demo = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        while not (tmp_path / "demo" / reached).exists():
            assert demo.poll() is None, demo.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.02)
        demo.send_signal(how)
        told = demo.communicate(timeout=600)[0]
        assert demo.returncode != 0
        assert how is signal.SIGKILL or "run it again to go on" in told
    again = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "going on with" in again.stdout
    assert len(re.findall(r"^(?:minute|service|slow) .* yes$", again.stdout, re.MULTILINE)) == 3
    assert "event time [" in again.stdout
    assert (tmp_path / "demo" / "pipeline.svg").read_text().startswith("<svg ")
