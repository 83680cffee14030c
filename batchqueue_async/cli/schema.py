"""`batchqueue schema`: the JSON Schema of a service file, for editors."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from batchqueue_async.cli.commands import command, raw, say

if TYPE_CHECKING:
    from batchqueue_async.cli.commands import Arguments, Command

_EPILOG = """\
for an editor with the YAML language server:
  batchqueue schema > batchqueue.schema.json
  and in the first line of the file: # yaml-language-server: $schema=batchqueue.schema.json
"""


def make() -> Command:
    """The command."""
    return command("schema", _run, "print the JSON Schema of a service's file", [], epilog=raw(_EPILOG))


def _run(_: Arguments) -> int:
    from batchqueue_async.service.file.json_schema import json_schema

    say(json.dumps(json_schema(), indent=2))
    return 0
