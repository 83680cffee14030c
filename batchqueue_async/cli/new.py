"""`batchqueue new`: a commented service file to begin with."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from batchqueue_async.cli.commands import Argument, command, flag, option, raw, say
from batchqueue_async.errors import ConfigError
from batchqueue_async.service.file.templates import CODE, FROM, TO, program, template

if TYPE_CHECKING:
    from batchqueue_async.cli.commands import Arguments, Command

_EPILOG = f"""\
SOURCE is one of {", ".join(FROM)}; SINK is one of {", ".join(TO)}.

for example:
  batchqueue new redis sqlite --name orders     writes orders.yaml
  batchqueue new code postgres --name shop      writes shop.yaml and shop.py, with the handler it names
"""


def make() -> Command:
    """The command."""
    params = [
        Argument("source", "SOURCE", "where items come from; `code` is your own program"),
        Argument("sink", "SINK", "where they end"),
        option("--name", default="service", metavar="NAME", text="what the files and what is in them are called"),
        flag("--print", "print the file, write nothing"),
        flag("--force", "replace files that are there"),
    ]
    return command("new", _run, "write a commented service file to begin with", params, epilog=raw(_EPILOG))


def _run(arguments: Arguments) -> int:
    name = arguments.name
    if not name.isidentifier():
        raise ConfigError(f"--name {name}: is not a name; use letters, digits and _")
    text = template(arguments.source, arguments.sink, name)
    if arguments.print:
        say(text.rstrip("\n"))
        return 0
    files = {Path(f"{name}.yaml"): text}
    if arguments.source == CODE:
        files[Path(f"{name}.py")] = program(name)
    there = [str(path) for path in files if path.exists()]
    if there and not arguments.force:
        raise ConfigError(f"{', '.join(there)}: is there already; give another --name, or --force to replace it")
    for path, content in files.items():
        path.write_text(content, encoding="utf-8")
    app = f" --app {name}:app" if arguments.source == CODE else ""
    say(f"wrote {' and '.join(map(str, files))}; next:")
    say(f"  batchqueue check {name}.yaml{app}")
    say(f"  batchqueue run {name}.yaml{app}")
    return 0
