"""Commands on click: one made of a function that takes the arguments, its help, and the answer to a misspelled name."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TextIO

import click

from batchqueue_async._support.wording import clip, nearest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

PATH = click.Path(path_type=Path)
FINE, WRONG, FAILED, UNDELIVERED = range(4)
"""The exit statuses; `main` says what they mean."""


class Arguments(SimpleNamespace):
    """The arguments of a command, an attribute each."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


class Argument(click.Argument):
    """A positional argument with a line in the help."""

    def __init__(self, name: str, metavar: str, text: str, **more: Any) -> None:
        super().__init__([name], metavar=metavar, **more)
        self.shown = metavar, text


class _InOneStyle(click.Command):
    """What commands and groups have in common."""

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the usage."""
        formatter.write_usage(ctx.command_path, " ".join(self.collect_usage_pieces(ctx)), "usage: ")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the arguments, then the options."""
        rows = [each.shown for each in self.params if isinstance(each, Argument)]
        if rows:
            with formatter.section("Arguments"):
                formatter.write_dl(rows)
        super().format_options(ctx, formatter)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse; an option that is not there is answered with the nearest one."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            known = [name for each in self.get_params(ctx) for name in each.opts if name.startswith("-")]
            hint = nearest(error.option_name, known)
            raise click.UsageError(f"{clip(error.option_name)} is not an option here; {hint}", ctx) from None


class Command(_InOneStyle):
    """A command without further ones."""


class Group(_InOneStyle, click.Group):
    """A command that has further ones."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a command; one that is not there is answered with the nearest one."""
        name = args[0]  # there is one: `invoke` refuses a group without a command
        if self.get_command(ctx, name) is None and not ctx.resilient_parsing:
            known = self.list_commands(ctx)
            ctx.fail(f"{clip(name)} is not a command; {nearest(name, known)}")
        return super().resolve_command(ctx, args)


def command(
    name: str,
    run: Callable[[Arguments], int],
    text: str,
    params: Sequence[click.Parameter],
    *,
    about: str = "",
    epilog: str = "",
) -> Command:
    """A command; `run` gives its exit status.

    Args:
        name: what it is called.
        run: what it does.
        text: a line for the list of commands.
        params: what it takes.
        about: what its help says; `text` when empty.
        epilog: the end of its help.
    """

    def call(**values: Any) -> int:
        return run(Arguments(**values))

    return Command(
        name, params=list(params), callback=call, help=about or _sentence(text), short_help=text, epilog=epilog
    )


def group(
    name: str, text: str, commands: Sequence[click.Command], *, metavar: str, about: str = "", epilog: str = ""
) -> Group:
    """A command that has further ones."""
    found: Mapping[str, click.Command] = {str(each.name): each for each in commands}
    return Group(
        name,
        commands=dict(found),
        help=about or _sentence(text),
        short_help=text,
        epilog=epilog,
        subcommand_metavar=f"{metavar} ...",
        no_args_is_help=False,
    )


def option(*names: str, text: str, **more: Any) -> click.Option:
    """An option with a value."""
    return click.Option(list(names), help=text, **more)


def flag(name: str, text: str) -> click.Option:
    """An option without a value."""
    return click.Option([name], is_flag=True, help=text)


def raw(text: str) -> str:
    """Paragraphs whose lines stay as they are, in a help that is otherwise filled."""
    return "\n\n".join(f"\b\n{each}" for each in text.strip().split("\n\n"))


def say(text: str) -> None:
    """Print a line."""
    _print(text, sys.stdout)


def complain(text: str) -> None:
    """Print a line on standard error, at once."""
    _print(text, sys.stderr)
    sys.stderr.flush()


def _print(text: str, file: TextIO) -> None:
    try:
        print(text, file=file)
    except UnicodeEncodeError:
        # A file's name that can't be text, or a terminal with few characters: shown as far as possible.
        encoding = file.encoding or "ascii"
        print(text.encode(encoding, "backslashreplace").decode(encoding), file=file)


def plain(text: object) -> str:
    """A text from elsewhere on one line, without what a terminal would obey."""
    return "".join(each if each.isprintable() else " " for each in str(text))


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."
