"""What a kind of service brings to a worker process, so that it can host the kind's code of users."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["Hosted", "Invocation", "MakeHosted"]


def _nothing() -> None:
    """Do nothing."""


def _itself(value: Any) -> Any:
    return value


@dataclass(slots=True)
class Invocation:
    """One call of a method of the user's.

    Attributes:
        function: the method; may be ``async``, and may give a generator of either kind.
        arguments: its arguments.
        variables: the contextvars that it runs with.
        convert: makes of what it gives what is sent; what it raises counts as the method's.
        convert_item: the same of each value of a generator; None where generators are values like others.
        stop: tells code that runs that nobody waits for it any more; is called from any thread, maybe twice.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    variables: Context | None = None
    convert: Callable[[Any], Any] = _itself
    convert_item: Callable[[Any], Any] | None = None
    stop: Callable[[], None] = _nothing


class Hosted(Protocol):
    """The user's object in a worker process."""

    def invoke(self, method: str, value: Any) -> Invocation:
        """Say what is to be called for a request.

        Raises:
            Exception: there is no such method; told as if the method had raised it.
        """
        ...

    def forget(self, value: Any) -> None:
        """Give up what was kept between calls; must not take long."""
        ...


MakeHosted = Callable[[Any], Hosted]
"""Makes the object of what the server says of it; the server calls methods for everything that may fail or wait."""
