"""Bring settings that users wrote by tensor name to the tensors of the model that they are for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from ovmstrio.config.findings import did_you_mean
from ovmstrio.core.errors import ConfigError, Problem

__all__ = ["for_ports"]

_T = TypeVar("_T")


def for_ports(
    option: str,
    settings: Mapping[str, _T],
    names: Sequence[str],
    aliases: Mapping[str, str],
    *,
    origin: str = "",
    anonymous_everywhere: bool = False,
) -> dict[int, _T]:
    """Give each setting with the position of the tensor that it is for.

    Args:
        option: the name of the option, for messages.
        settings: by tensor name; the name ``""`` is for the only tensor.
        names: what callers call the tensors, by position.
        aliases: the alias of each tensor that has one, by its name in the model's file.
        origin: where the settings were written, for messages.
        anonymous_everywhere: a setting without a name may be for several tensors.

    Raises:
        ConfigError: a name is unknown or was replaced by an alias, or a setting without a name has several tensors.
    """
    found: dict[int, _T] = {}
    problems: list[Problem] = []
    for name, setting in settings.items():
        if name in names:
            found[names.index(name)] = setting
        elif name:
            problems.append(_unknown(option, name, names, aliases, origin))
        elif len(names) == 1 or anonymous_everywhere:
            found.update(dict.fromkeys(range(len(names)), setting))
        else:
            message = f"{option} is given without a tensor name, but the model has {len(names)}: {', '.join(names)}"
            problems.append(Problem(message, file=origin, path=option, suggestion=f'write {{"{names[0]}": ...}}'))
    if problems:
        raise ConfigError(problems)
    return found


def _unknown(option: str, name: str, names: Sequence[str], aliases: Mapping[str, str], origin: str) -> Problem:
    if name in aliases:
        message = f"{option} uses the name {name!r}, which mapping_config.json replaces"
        return Problem(message, file=origin, path=option, suggestion=f"write {aliases[name]!r}")
    return Problem(
        f"{option} names a tensor that the model does not have",
        file=origin,
        path=option,
        expected=" or ".join(map(repr, names)),
        found=repr(name),
        suggestion=did_you_mean(name, names),
    )
