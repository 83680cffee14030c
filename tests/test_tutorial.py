"""What the tutorial shows as output is what its code prints."""

from __future__ import annotations

import re
import subprocess
import sys

from test_docs import ROOT, read_page


def test_the_tutorial_prints_what_it_shows(tmp_path):
    text = (ROOT / "docs" / "tutorial.md").read_text()
    program = tmp_path / "tutorial.py"
    program.write_text(read_page(text).code)
    done = subprocess.run(
        [sys.executable, "-W", "error", str(program)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    shown = re.findall(r"^```text\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert len(shown) >= 7
    assert done.stdout == "".join(shown)
