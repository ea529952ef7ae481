"""Interface between a kind of service and the worker process that hosts its user code."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass
from typing import Any, Protocol


def _nothing() -> None:
    pass


def _itself(value: Any) -> Any:
    return value


@dataclass(slots=True)
class Invocation:
    """One call of a user method.

    Attributes:
        function: the method; may be ``async`` and may return a generator of either kind.
        arguments: its arguments.
        variables: its context.
        convert: converts the result for sending; its exceptions count as the method's.
        convert_item: converts each value of a generator; None if generators are ordinary results.
        stop: signals running code that its caller was cancelled; thread-safe, may be called twice.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    variables: Context | None = None
    convert: Callable[[Any], Any] = _itself
    convert_item: Callable[[Any], Any] | None = None
    stop: Callable[[], None] = _nothing


class HostedObject(Protocol):
    """The user's object in a worker process."""

    def invoke(self, method: str, value: Any) -> Invocation:
        """Return the call for a request; an exception counts as raised by the method."""
        ...

    def forget(self, value: Any) -> None:
        """Drop state kept between calls; must not take long."""
        ...


MakeHosted = Callable[[Any], HostedObject]
"""Creates the object from the server's argument; anything that may fail or block belongs into its methods."""
