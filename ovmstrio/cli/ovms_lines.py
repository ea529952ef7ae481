"""Command lines of OpenVINO Model Server: options without a command, flags with values, unsupported options."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final

import typer
from typer.core import TyperCommand, TyperGroup

from ovmstrio.cli.console import EX_USAGE, fail

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

OWN_OPTIONS: Final = frozenset({"--help", "--version", "--install-completion", "--show-completion"})
"""Options of ``ovms`` itself, which do not mean ``serve``."""

_VALUES: Final = {"true": True, "false": False}


class Commands(TyperGroup):
    """Group of the commands; options of a server in place of a command mean ``serve``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert ``serve`` before arguments that begin with an option of a server."""
        return super().parse_args(ctx, ["serve", *args] if _begin_like_ovms(args) else args)


class LateCommand(TyperCommand):
    """Command whose options are created on first use, such as options derived from the server's settings.

    Attributes:
        make: creates the function that has the options in its signature.
    """

    make: ClassVar[Callable[[], Callable[..., None]]]
    _has_params = False

    def get_params(self, ctx: Any) -> Any:
        """Return the options and arguments."""
        if not self._has_params:
            self._has_params = True
            app = typer.Typer(add_completion=False)
            app.command()(type(self).make())
            command = typer.main.get_command(app)
            self.params, self.callback = command.params, command.callback
        return super().get_params(ctx)


class ServeCommand(LateCommand):
    """The ``serve`` command, with hints for options of OVMS that are not supported.

    Options that are commands in OVMS, such as ``--list_models``, are commands here, too.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Refuse all unsupported options together, and accept flags with values, as in ``--metrics_enable=true``.

        During shell completion, nothing is executed or refused.
        """
        if ctx.resilient_parsing:
            return super().parse_args(ctx, args)
        from ovmstrio.server.command_line import CONFIG_COMMANDS, unsupported_options, use_local_source_model

        if {_name(each) for each in args} & CONFIG_COMMANDS:
            from ovmstrio.cli.ovms_config import manage_config

            manage_config(args)
            raise typer.Exit
        args = use_local_source_model(args)
        refused = unsupported_options(args)
        if refused:
            fail("\n       ".join(refused), EX_USAGE)
        flags = {str(each.name) for each in self.get_params(ctx) if getattr(each, "is_flag", False)}
        return super().parse_args(ctx, _spell_flags(args, flags))


def _spell_flags(arguments: Sequence[str], flags: Collection[str]) -> list[str]:
    """Replace flags that have a value, attached or as the next argument, by ``--name`` or ``--no_name``."""
    spelt: list[str] = []
    for argument in arguments:
        option, _, value = argument.partition("=")
        if argument in _VALUES and spelt and _name(spelt[-1]) in flags:
            option, value = spelt.pop(), argument
        if value in _VALUES and _name(option) in flags:
            spelt.append(option if _VALUES[value] else f"--no_{_name(option)}")
        else:
            spelt.append(argument)
    return spelt


def _name(option: str) -> str:
    return option[2:].replace("-", "_") if option.startswith("--") else ""


def _begin_like_ovms(arguments: Sequence[str]) -> bool:
    if not arguments or not arguments[0].startswith("--") or arguments[0] in OWN_OPTIONS:
        return False
    from ovmstrio.server.command_line import CONFIG_COMMANDS, UNSUPPORTED_HINTS
    from ovmstrio.server.settings import ServerSettings
    from ovmstrio.util.deprecation import RENAMED_SETTINGS

    name = _name(arguments[0].partition("=")[0])
    return (
        name in UNSUPPORTED_HINTS
        or name in CONFIG_COMMANDS
        or name in {*ServerSettings.model_fields, *RENAMED_SETTINGS}
    )
