"""The dependencies: pin what resolves today, or test the core with the oldest and the newest that are allowed.

python3 .ci/dependencies.py constraints          writes the pins of examples/deploy, without the addresses of any index
python3 .ci/dependencies.py lowest [TEST ...]    an environment with every lower bound of pyproject.toml, and its tests
python3 .ci/dependencies.py newest [TEST ...]    one with the newest of everything, and its tests
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import pythons

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ROOT / "examples" / "deploy" / "constraints.txt"
NAME = "batchqueue-async"
TESTS = (
    "tests/queue",
    "tests/runtime",
    "tests/bridge",
    "tests/export",
    "tests/durable",
    "tests/observe/test_metrics.py",
    "tests/observe/test_traces.py",
    "tests/test_config_file.py",
    "tests/service",
    # the sinks and consumers, as far as no broker or database has to be started
    "tests/sinks/test_sinks.py",
    "tests/sinks/test_doors.py",
    "tests/sinks/test_grpc.py",
    "tests/sinks/test_http.py",
    "tests/sinks/test_otlp_http.py",
    "tests/sinks/test_remote_write.py",
    "tests/intake/test_flow.py",
    "tests/intake/test_kafka_decisions.py",
    "tests/intake/test_lane_contract.py",
    "tests/intake/test_model.py",
    "tests/intake/test_pool.py",
)
LOWER = re.compile(r"(?P<name>[\w.-]+)(?:\[[\w,-]+\])?>=(?P<version>[\w.]+)")
HEAD = """\
# What `pip install ".[all,spark]"` resolves to, by `make constraints`. Installing with it repeats an environment:
#   pip install --constraint examples/deploy/constraints.txt ".[all]"
"""


def requirements() -> list[str]:
    """Everything that the package and its extras ask for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [each for group in project["optional-dependencies"].values() for each in group]
    return [each for each in [*project["dependencies"], *extras] if not each.startswith(NAME)]


def lowest(wanted: list[str]) -> list[str]:
    """Pins at the lower bounds; the highest of them where a dependency is named more than once."""
    bounds: dict[str, tuple[tuple[int, ...], str]] = {}
    for each in wanted:
        found = LOWER.match(each)
        if found is None:
            raise SystemExit(f"{each}: has no lower bound; give one, as 'name>=1.2'")
        bound = (tuple(int(part) for part in found["version"].split(".")), found["version"])
        name = found["name"].lower()
        bounds[name] = max(bound, bounds.get(name, bound))
    return [f"{name}=={version}" for name, (_, version) in sorted(bounds.items())]


def resolved() -> list[str]:
    """Pins of what pip would install now."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--report", "-"]
    done = subprocess.run([*command, ".[all,spark]"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    found = [each["metadata"] for each in json.loads(done.stdout)["install"]]
    pins = {re.sub(r"[-_.]+", "-", each["name"]).lower(): each["version"] for each in found}
    pins.pop(NAME, None)
    return [f"{name}=={version}" for name, version in sorted(pins.items())]


def run(kind: str, tests: list[str]) -> int:
    """Make an environment, and run the tests in it; the exit code of pytest."""
    folder = pythons.VENVS / kind
    python = folder / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    pip = [python, "-m", "pip", "install", "--quiet"]
    if (uv := pythons.runs("uv", "--version") and shutil.which("uv")) is not None:
        pip = [uv, "pip", "install", "--quiet", "--python", python]  # seconds, where pip's resolver takes many minutes
    else:
        subprocess.run([*pip, "--upgrade", "pip>=25.1"], check=True)
    with tempfile.NamedTemporaryFile("w", suffix=".txt", delete=False) as file:
        file.write("\n".join(lowest(requirements()) if kind == "lowest" else []))
    bounds = ["--constraint", file.name] if kind == "lowest" else ["--upgrade"]
    subprocess.run([*pip, *bounds, "--editable", ".[all]", "--group", "test"], cwd=ROOT, check=True)
    Path(file.name).unlink()
    return subprocess.run([python, "-m", "pytest", "-q", *tests], cwd=ROOT, check=False).returncode


def main() -> int:
    """Do what is asked."""
    kind, *tests = sys.argv[1:] or [""]
    if kind == "constraints":
        CONSTRAINTS.write_text(HEAD + "\n".join(resolved()) + "\n", encoding="utf-8")
        pythons.say(f"wrote {CONSTRAINTS.name}")
        return 0
    if kind in {"lowest", "newest"}:
        return run(kind, tests or list(TESTS))
    sys.exit(__doc__)


if __name__ == "__main__":
    sys.exit(main())
