"""Arguments of ``ovms serve`` in the forms of OpenVINO Model Server, with hints for unsupported options."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import typer

from ovmstrio.cli.console import EX_USAGE, fail
from ovmstrio.cli.settings_options import SHOW_ALL, ServerCommand, is_flag

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

OWN_OPTIONS: Final = frozenset({"--help", "--version", "-h", "--install-completion", "--show-completion"})
"""Options of ``ovms`` itself, which do not mean ``serve``."""

_HELP: Final = frozenset({"--help", "-h", SHOW_ALL})
_VALUES: Final = {"true": True, "false": False}
_ATTACHED: Final = {**_VALUES, "t": True, "f": False, "1": True, "0": False}
"""Values of flags in any case; OVMS takes the short ones only after an equals sign."""


class ServeCommand(ServerCommand):
    """The ``serve`` command, with hints for options of OVMS that are not supported.

    Options that are commands in OVMS, such as ``--list-models``, are commands here, too.

    Attributes:
        given: settings that the arguments name; None for all. Only their options are created, as 150 take 40 ms.
    """

    given: Collection[str] | None = None

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Refuse all unsupported options together, and accept flags with values, as in ``--metrics-enable=true``.

        During shell completion and for help, nothing is executed or refused.
        """
        if ctx.resilient_parsing or not _HELP.isdisjoint(args):
            return super().parse_args(ctx, args)
        from ovmstrio.cli.serving import usage
        from ovmstrio.server.command_line import (
            CONFIG_COMMANDS,
            DOWNLOAD_FLAGS,
            read_source_models,
            unsupported_options,
        )
        from ovmstrio.server.settings import ServerSettings

        if {_name(each) for each in args} & CONFIG_COMMANDS:
            from ovmstrio.cli.ovms_config import manage_config

            manage_config(args)
            raise typer.Exit
        refused = unsupported_options(args)
        if refused:
            fail("\n       ".join(refused), EX_USAGE)
        flags = {name for name, field in ServerSettings.model_fields.items() if is_flag(field)}
        with usage():
            models = read_source_models(_spell_flags(args, {*flags, *DOWNLOAD_FLAGS}))
        self.given = _given_settings(models.arguments)
        rest = super().parse_args(ctx, models.arguments)
        if models.downloads or models.is_pull:
            from ovmstrio.cli.pull import pull_models

            pull_models(models)
        return rest


def _given_settings(arguments: Sequence[str]) -> Collection[str] | None:
    """Return the settings that arguments name; None if one is unknown, because its error names similar ones."""
    from ovmstrio.server.settings import ServerSettings
    from ovmstrio.util.deprecation import RENAMED_SETTINGS

    known = {*ServerSettings.model_fields, "service"}
    names = {_name(each.partition("=")[0]) for each in arguments if each.startswith("-")}
    names = {RENAMED_SETTINGS.get(each, each) for each in names}
    names = {each if each in known else each.removeprefix("no_") for each in names}
    return names if names <= known else None


def _spell_flags(arguments: Sequence[str], flags: Collection[str]) -> list[str]:
    """Replace flags that have a value, attached or as the next argument, by ``--name`` or ``--no-name``.

    Raises:
        UsageError: the attached value of a flag is neither true nor false.
    """
    from ovmstrio.core.errors import Problem
    from ovmstrio.server.command_line import UsageError

    spelt: list[str] = []
    for argument in arguments:
        option, is_attached, value = argument.partition("=")
        if argument.lower() in _VALUES and spelt and _name(spelt[-1]) in flags:
            option, is_attached, value = spelt.pop(), "=", argument
        if not is_attached or _name(option) not in flags:
            spelt.append(argument)
        elif value.lower() in _ATTACHED:
            spelt.append(option if _ATTACHED[value.lower()] else f"--no-{option[2:]}")
        else:
            problem = Problem("the value cannot be used", path=option, expected="true or false", found=value)
            raise UsageError([problem])
    return spelt


def _name(option: str) -> str:
    return option[2:].partition("=")[0].replace("-", "_") if option.startswith("--") else ""


def begins_like_ovms(arguments: Sequence[str]) -> bool:
    """Return whether the first argument is an option of a server."""
    if not arguments or not arguments[0].startswith("--") or arguments[0] in OWN_OPTIONS:
        return False
    from ovmstrio.server.command_line import CONFIG_COMMANDS, DOWNLOAD_FLAGS, DOWNLOAD_OPTIONS, UNSUPPORTED_HINTS
    from ovmstrio.server.settings import ServerSettings
    from ovmstrio.util.deprecation import RENAMED_SETTINGS

    name = _name(arguments[0])
    return (
        name in UNSUPPORTED_HINTS
        or name in {*CONFIG_COMMANDS, *DOWNLOAD_OPTIONS, *DOWNLOAD_FLAGS}
        or name in {*ServerSettings.model_fields, *RENAMED_SETTINGS}
    )
