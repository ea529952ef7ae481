"""Options that are written once for a model, or tensor by tensor as an object."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ovmstrio.config.findings import wrong
from ovmstrio.config.json_text import parse_json
from ovmstrio.config.located import InvalidSyntax
from ovmstrio.core.errors import ConfigError, Problem

__all__ = ["by_tensor", "object_in_text"]

_T = TypeVar("_T")


def by_tensor(option: str, value: Any, parse: Callable[[str, str], _T]) -> dict[str, _T]:
    """Read an option that is a text, an object of texts, or a text that holds such an object (command line).

    Args:
        option: its name, for messages.
        value: what the user wrote.
        parse: reads one text; is given the option's name with that of the tensor, and the text.

    Returns:
        The settings by tensor name; one that was written without a name has the key ``""``.

    Raises:
        ConfigError: with every text that cannot be read.
    """
    if isinstance(value, str) and value.lstrip().startswith("{"):
        value = object_in_text(option, value)
    if isinstance(value, str):
        return {"": parse(option, value)}
    if not isinstance(value, Mapping):
        raise wrong(option, value, "a text, or an object with a text for each tensor")
    settings: dict[str, _T] = {}
    problems: list[Problem] = []
    for name, text in value.items():
        try:
            settings[name] = _parse_member(f"{option}.{name}", text, parse)
        except ConfigError as error:
            problems.extend(error.problems)
    if problems:
        raise ConfigError(problems)
    return settings


def object_in_text(option: str, text: str) -> dict[str, Any]:
    """Read an option of the command line that is a JSON object.

    Raises:
        ConfigError: it is none.
    """
    try:
        document = parse_json(text)
    except InvalidSyntax as error:
        raise wrong(option, text, "a JSON object", message=error.message, suggestion=error.suggestion) from None
    value = document.root.plain()
    if not isinstance(value, dict):
        raise wrong(option, text, "a JSON object")
    if document.repeated:
        raise wrong(option, text, "each key once", message=f"{document.repeated[0].path!r} is given twice")
    return value


def _parse_member(option: str, text: Any, parse: Callable[[str, str], _T]) -> _T:
    if not isinstance(text, str):
        raise wrong(option, text, "a text")
    return parse(option, text)
