"""See to it that there is a Java for Spark: install it where that is possible, else say how.

python3 .ci/java.py            install it when it is missing and this is root; else the command, and exit code 1
python3 .ci/java.py --check    only look: exit code 0 if it is there
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

JAVA = 17
INSTALL = "apt-get update -qq && apt-get install -y -qq --no-install-recommends default-jre-headless"


def java_version() -> int | None:
    """The major version of the Java that Spark would run on; None where there is none."""
    home = os.environ.get("JAVA_HOME")
    command = str(Path(home, "bin", "java")) if home else "java"
    try:
        told = subprocess.run([command, "-version"], capture_output=True, text=True, check=True).stderr
    except (OSError, subprocess.CalledProcessError):
        return None
    found = re.search(r'version "(\d+)', told)
    return int(found[1]) if found else None


def is_there(version: int | None) -> bool:
    """Whether that Java is new enough."""
    return version is not None and version >= JAVA


def need_java() -> None:
    """Install Java where it is missing and that is possible; exit with the command where it is not."""
    version, home = java_version(), os.environ.get("JAVA_HOME")
    if not is_there(version) and home:
        sys.exit(f"Spark needs Java {JAVA} or newer, and JAVA_HOME={home!r} has none; correct it, or unset it")
    if not is_there(version) and os.geteuid() == 0 and shutil.which("apt-get"):
        print(f"Spark needs Java {JAVA} or newer; installing it: {INSTALL}", flush=True)
        subprocess.run(["/bin/sh", "-c", INSTALL], check=False)
        version = java_version()
    if not is_there(version):
        found = "found none" if version is None else f"found Java {version}"
        sudo = "" if os.geteuid() == 0 else "sudo "
        sys.exit(f"Spark needs Java {JAVA} or newer, and {found}; run:\n  {sudo}sh -c '{INSTALL}'")


if __name__ == "__main__":
    if "--check" in sys.argv[1:]:
        sys.exit(0 if is_there(java_version()) else 1)
    need_java()
