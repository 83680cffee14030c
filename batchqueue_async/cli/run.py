"""`batchqueue run`: a service, or a pipeline of Spark, from its file, until it is stopped or done."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchqueue_async.cli import run_service, run_spark
from batchqueue_async.cli.commands import PATH, Argument, command, flag, option, raw
from batchqueue_async.errors import ConfigError
from batchqueue_async.service.file.reading import is_service_file

if TYPE_CHECKING:
    import click

    from batchqueue_async.cli.commands import Arguments, Command

_TEXT = "run a service, or a pipeline of Spark, from its file"
_SPARK_ALONE = ("explain", "once", "since", "until", "picture", "quiet")
_EPILOG = """\
exit status:
  0  it ended in order, and nothing is left
  1  --check found something wrong
  2  it could not begin: the file is wrong, a package is missing, a port is taken, something refused to open
  3  something was not done: records are left, on disk or not at all; a query or a batch job of Spark was given up

signals:
  SIGTERM, SIGINT  drain within service.drain_timeout (timeouts.stop for Spark), and end; a second one ends at once
  SIGHUP           a service reads its file again: it changes what can change in place, or refuses the whole file and
                   goes on as before; Spark ends as by SIGTERM
"""


def make() -> Command:
    """The command."""
    params = [
        *file_params(),
        flag("--check", "only look for errors, without starting anything"),
        flag("--print", "print the values that hold, each with where it was set, and end"),
        *run_spark.params(),
    ]
    return command("run", _run, _TEXT, params, epilog=raw(_EPILOG))


def file_params() -> list[click.Parameter]:
    """The arguments that name a file, the program's code, and what of the file is set otherwise."""
    return [
        Argument("file", "FILE", "the service or pipeline, in YAML", type=PATH),
        option("--app", metavar="MODULE:NAME", text="the App with the handlers that the file names"),
        option("--set", multiple=True, metavar="NAME=VALUE", text="set a value: --set exporters.rows.max_bytes=2GiB"),
    ]


def is_service(arguments: Arguments) -> bool:
    """Whether the file is a service's.

    Raises:
        ConfigError: it is not, and an option is given that only services have.
    """
    found = is_service_file(arguments.file)
    if not found and arguments.app is not None:
        raise ConfigError(
            f"--app: {arguments.file} is a pipeline of Spark, whose functions stand in the file; leave it out"
        )
    return found


def _run(arguments: Arguments) -> int:
    if not is_service(arguments):
        return run_spark.check(arguments) if arguments.check else run_spark.run(arguments)
    given = [f"--{'from' if each == 'since' else each}" for each in _SPARK_ALONE if getattr(arguments, each)]
    if given:
        raise ConfigError(
            f"{', '.join(given)}: is for pipelines of Spark, and {arguments.file} is a service; leave it out"
        )
    if arguments.check:
        return run_service.check(arguments)
    if arguments.print:
        return run_service.show(arguments)
    return run_service.run(arguments)
