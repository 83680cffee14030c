"""Files of others are what their registry has, with their licences."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from batchqueue_async import observe

STATIC = Path(observe.__file__).parent / "static"
AXE = Path(__file__).parent / "vendor"

# The SHA-256 of files of the packages uplot 1.6.32 and axe-core 4.14.0, as npm has them.
FILES = {
    STATIC / "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    STATIC / "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    STATIC / "LICENSE-uPlot": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
    AXE / "axe.min.js": "20c09fe157a8a34a30e241aaa1fcdade657734f08ab379ecfbeb7d45cc46e878",
    AXE / "LICENSE-axe-core": "af175b9d96ee93c21a036152e1b905b0b95304d4ae8c2c921c7609100ba8df7e",
}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_vendored_file_is_unchanged(path):
    assert hashlib.sha256(path.read_bytes()).hexdigest() == FILES[path]


def test_the_licences_are_those_that_allow_it():
    assert "MIT" in (STATIC / "LICENSE-uPlot").read_text()
    assert "Mozilla Public License" in (AXE / "LICENSE-axe-core").read_text()


def test_the_page_names_nothing_outside_itself():
    for path in STATIC.glob("*.*"):
        if path.name.startswith(("dashboard", "index")):
            text = path.read_text().replace("http://www.w3.org/2000/svg", "")
            assert "http" not in text
            assert "style=" not in text
            assert "innerHTML" not in text
