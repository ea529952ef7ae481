"""The functions that the Python file of a custom node must have, and may have."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.runtimes.pipelines.custom_nodes.python.file_failures import UserFile
from ovmstrio.work.user_code.places import place_of

__all__ = ["Functions", "UserFunction", "find_functions"]

_CODE: Final = "NODE_LIBRARY_LOAD_FAILED_SYM"


@dataclass(frozen=True, slots=True)
class UserFunction:
    """A function of the file; ``takes_manager`` tells whether it wants the manager as its last argument."""

    name: str
    call: Callable[..., Any]
    takes_manager: bool

    def arguments(self, manager: Any, *others: Any) -> tuple[Any, ...]:
        """Give the arguments to call it with."""
        return (*others, manager) if self.takes_manager else others


@dataclass(frozen=True, slots=True)
class Functions:
    """All functions of the file; None where one that may be left out is."""

    execute: UserFunction
    get_inputs_info: UserFunction
    get_outputs_info: UserFunction
    initialize: UserFunction | None
    deinitialize: UserFunction | None


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What a function is called with; ``optional_manager`` if it may leave the manager out."""

    arguments: tuple[str, ...]
    optional_manager: bool = True
    is_required: bool = True

    def signature(self, name: str) -> str:
        """Show how to write it."""
        shown = ", ".join(self.arguments) + ("[, manager]" if self.optional_manager else "")
        return f"def {name}({shown})"


_WANTED: Final = {
    "execute": _Wanted(("inputs", "params")),
    "get_inputs_info": _Wanted(("params",)),
    "get_outputs_info": _Wanted(("params",)),
    "initialize": _Wanted(("params",), optional_manager=False, is_required=False),
    "deinitialize": _Wanted(("manager",), optional_manager=False, is_required=False),
}


def find_functions(module: ModuleType, file: UserFile) -> Functions:
    """Find the functions of a file.

    Raises:
        ConfigError: some are missing, or take other arguments; all are listed.
    """
    found: dict[str, Any] = {}
    problems: list[Problem] = []
    for name, wanted in _WANTED.items():
        function = getattr(module, name, None)
        found[name] = None
        if function is None:
            if wanted.is_required:
                fix = f"write {wanted.signature(name)}"
                problems.append(file.problem(_CODE, f"{name} is missing", suggestion=fix))
            continue
        made = _made(name, function, wanted)
        if made is None:
            line = file.line_of(place_of(function) if callable(function) else None)
            text = f"{name} is no function of the right arguments"
            problems.append(file.problem(_CODE, text, line=line, suggestion=f"write {wanted.signature(name)}"))
        found[name] = made
    if problems:
        raise ConfigError(problems)
    return Functions(**found)


def _made(name: str, function: Any, wanted: _Wanted) -> UserFunction | None:
    if not callable(function):
        return None
    count = len(wanted.arguments)
    if wanted.optional_manager and _accepts(function, count + 1):
        return UserFunction(name, function, takes_manager=True)
    return UserFunction(name, function, takes_manager=False) if _accepts(function, count) else None


def _accepts(function: Callable[..., Any], count: int) -> bool:
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        return False
    except ValueError:
        # Functions of compiled modules may have no signature to look at.
        return True
    return True
