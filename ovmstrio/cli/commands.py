"""Classes of all commands and groups: one layout of help, earlier spellings of options, options made on first use."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand, TyperGroup

from ovmstrio.cli.console import print_message
from ovmstrio.cli.help_text import Entry, lay_out, parameter_entries, summary, usage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


class App(typer.Typer):
    """Container of commands whose commands and groups have the classes below."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"cls": Group, "no_args_is_help": True, "rich_markup_mode": None, **settings})

    def command(self, name: str | None = None, **settings: Any) -> Any:
        """Add a command; the settings are those of typer."""
        return super().command(name, **{"cls": Command, **settings})


class Command(TyperCommand):
    """Command with its options in groups."""

    def get_usage(self, ctx: Any) -> str:
        """Return the first line of a usage error."""
        return f"Usage: {usage(ctx.command_path, self.get_params(ctx))}"

    def get_help(self, ctx: Any) -> str:
        """Return the help text."""
        params = self.get_params(ctx)
        return lay_out(usage(ctx.command_path, params), self.help or "", parameter_entries(params))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Accept ``--output`` with a format, as in earlier releases."""
        if not ctx.resilient_parsing:
            args = _with_format(self.get_params(ctx), args)
        with _suggesting(ctx):
            return super().parse_args(ctx, args)

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """Complete names of options that are typed with underscores, too."""
        return super().shell_complete(ctx, incomplete.replace("_", "-") if incomplete[:2] == "--" else incomplete)


class Group(TyperGroup):
    """Group of commands."""

    def get_usage(self, ctx: Any) -> str:
        """Return the first line of a usage error."""
        return f"Usage: {usage(ctx.command_path, self.get_params(ctx), has_commands=True)}"

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Suggest similar options for unknown ones."""
        with _suggesting(ctx):
            return super().parse_args(ctx, args)

    def get_help(self, ctx: Any) -> str:
        """Return the help text: the commands, then the options."""
        params = self.get_params(ctx)
        entries = [*self.entries(ctx), *parameter_entries(params)]
        return lay_out(usage(ctx.command_path, params, has_commands=True), self.help or "", entries)

    def entries(self, ctx: Any) -> list[Entry]:
        """Return a row for each command."""
        commands = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        return [
            Entry("Commands", name, summary(command.help or ""))
            for name, command in commands.items()
            if command is not None and not command.hidden
        ]


class LateCommand(Command):
    """Command whose options are created on first use, such as options derived from the server's settings."""

    _has_params = False

    def make(self) -> Callable[..., None]:
        """Create the function that has the options in its signature."""
        raise NotImplementedError

    def get_params(self, ctx: Any) -> Any:
        """Return the options and arguments."""
        if not self._has_params:
            self._has_params = True
            app = typer.Typer(add_completion=False)
            app.command()(self.make())
            command = typer.main.get_command(app)
            self.params, self.callback = command.params, command.callback
        return super().get_params(ctx)


@contextmanager
def _suggesting(ctx: Any) -> Iterator[None]:
    """Name similar options in the error about an unknown one, in one way for every version of typer."""
    try:
        yield
    except Exception as error:
        # The class of the error is in a private package of typer.
        unknown, similar = (getattr(error, name, None) for name in ("option_name", "possibilities"))
        if unknown is None:
            raise
        ctx.fail(f"No such option: {unknown}.{_did_you_mean(similar or ())}")


def suggest(name: str, known: Iterable[str]) -> str:
    """Return the end of an error about an unknown name: similar names, or nothing."""
    from difflib import get_close_matches

    return _did_you_mean(get_close_matches(name, known))


def _did_you_mean(similar: Iterable[str]) -> str:
    named = " or ".join(similar)
    return f" Did you mean {named}?" if named else ""


def _with_format(params: list[Any], args: list[str]) -> list[str]:
    """Replace ``--output FORMAT`` by ``--format FORMAT``; a file named like a format is written as ``./json``."""
    form = next((each for each in params if "--format" in each.opts), None)
    if form is None:
        return args
    has_file = any("--output" in each.opts for each in params)
    formats = form.metavar.split("|")
    spelt: list[str] = []
    ahead = iter(args)
    for arg in ahead:
        option, is_attached, value = arg.partition("=")
        if arg == "--":
            return [*spelt, arg, *ahead]
        if option != "--output":
            spelt.append(arg)
            continue
        given = value if is_attached else next(ahead, None)
        if given in formats:
            print_message(f"--output {given} is deprecated; use --format {given}: --output names a file")
        if given in formats or not has_file:
            option = "--format"
        spelt += [option] if given is None else [option, given]
    return spelt
