"""Hooks of Ops: what each of them takes, looked at once, and calls of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from inspect import Parameter
from typing import Any, Final

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.work.user_code.calls import is_async

__all__ = ["Hook"]

_IDS: Final = ("data_id", "log_id")
_OTHER_NAMES: Final = {"logid": "log_id", "typical_logid": "data_id", "dataid": "data_id"}
_POSITIONAL: Final = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


class Hook:
    """One hook of one Op, which may leave out the numbers of the sample, or take them by name.

    Args:
        owner: the Op's name, for messages.
        method: the hook of an instance.
        values: how many arguments come before the numbers.
        default: the hook that the Op would have if it did not override it.

    Attributes:
        is_async: whether it runs on the loop.
        is_default: whether it is the one of the base class.

    Raises:
        ConfigError: it cannot be called with what hooks of its kind are called with.
    """

    __slots__ = ("_by_name", "_by_position", "_method", "is_async", "is_default")

    def __init__(self, owner: str, method: Callable[..., Any], values: int, default: Callable[..., Any]) -> None:
        self._method = method
        self.is_async = is_async(method)
        self.is_default = getattr(method, "__func__", None) is default
        by_position, self._by_name = _numbers_taken(owner, method, values, default)
        self._by_position = _IDS if by_position == _IDS else by_position

    def __call__(self, *values: Any, data_id: int, log_id: int) -> Any:
        """Call it, or give its coroutine."""
        if self._by_position is _IDS and not self._by_name:
            return self._method(*values, data_id, log_id)
        numbers = {"data_id": data_id, "log_id": log_id}
        by_name = {name: numbers[_OTHER_NAMES.get(name, name)] for name in self._by_name}
        return self._method(*values, *[numbers[name] for name in self._by_position], **by_name)


def _numbers_taken(
    owner: str, method: Callable[..., Any], values: int, default: Callable[..., Any]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Tell which numbers a hook takes by position, and which by name."""
    parameters = inspect.signature(method).parameters
    if any(one.kind is Parameter.VAR_POSITIONAL for one in parameters.values()):
        return _IDS, ()
    positional = [name for name, one in parameters.items() if one.kind in _POSITIONAL]
    given = _in_order(positional[values:])
    required = [name for name in positional[values + len(given) :] if parameters[name].default is Parameter.empty]
    if len(positional) < values or required:
        raise _wrong_arity(owner, method, default)
    left = [name for name in _IDS if name not in given]
    return given, _by_name(parameters, left)


def _in_order(names: list[str]) -> tuple[str, ...]:
    """Tell the number for each of the first names: the one it is called after, or else the next one."""
    left, taken = list(_IDS), []
    for name in names[: len(_IDS)]:
        known = _OTHER_NAMES.get(name, name)
        taken.append(left.pop(left.index(known) if known in left else 0))
    return tuple(taken)


def _by_name(parameters: Mapping[str, Parameter], left: list[str]) -> tuple[str, ...]:
    if any(one.kind is Parameter.VAR_KEYWORD for one in parameters.values()):
        return tuple(left)
    only = [name for name, one in parameters.items() if one.kind is Parameter.KEYWORD_ONLY]
    return tuple(name for name in only if _OTHER_NAMES.get(name, name) in left)


def _wrong_arity(owner: str, method: Callable[..., Any], default: Callable[..., Any]) -> ConfigError:
    name = default.__name__
    given, usual = (", ".join(inspect.signature(each).parameters) for each in (method, default))
    given = given if getattr(method, "__self__", None) is None else ", ".join(filter(None, ("self", given)))
    code = getattr(inspect.unwrap(method), "__code__", None)
    problem = Problem(
        f"{name} of Op {owner} cannot be called",
        file="" if code is None else code.co_filename,
        line=None if code is None else code.co_firstlineno,
        expected=f"{name}({usual}), whose numbers may be left out",
        found=f"{name}({given})",
    )
    return ConfigError([problem])
