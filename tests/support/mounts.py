"""File systems of their own, so small that they get full."""

from __future__ import annotations

import subprocess
from contextlib import contextmanager

import pytest


@contextmanager
def mounted(path, *options: str):
    """A small tmpfs, where this machine allows one."""
    path.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", str(path)], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip("mounting is not allowed here")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)
