"""The methods of a handler that requests reach."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

__all__ = ["GRPC_ARGUMENTS", "HTTP_ARGUMENTS", "VERBS", "HandlerMethod"]

VERBS: Final = ("post", "get", "put", "patch", "delete")
"""The verbs of HTTP that a handler may have a method for: ``handle_post`` and so on."""
HTTP_ARGUMENTS: Final = frozenset({"payload", "headers", "query_params"})
GRPC_ARGUMENTS: Final = frozenset({"payload", "context"})


@dataclass(frozen=True, slots=True)
class HandlerMethod:
    """One method, bound to the handler.

    Attributes:
        name: of the method.
        call: the method.
        wanted: the arguments that it asks for, of those that the server has.
        is_generator: whether calling it only makes a generator, asynchronous or not.
        is_batched: whether it gets lists of arguments, and gives a list of results.
    """

    name: str
    call: Callable[..., Any]
    wanted: frozenset[str]
    is_generator: bool = False
    is_batched: bool = False

    @property
    def wants_payload(self) -> bool:
        """Whether the body has to be read for it."""
        return "payload" in self.wanted

    @classmethod
    def of(cls, instance: Any, name: str, known: frozenset[str], *, is_batched: bool = False) -> HandlerMethod:
        """Take a method of an object, whose signature has been checked."""
        method = getattr(instance, name)
        wanted = known & set(inspect.signature(method).parameters)
        is_generator = inspect.isgeneratorfunction(method) or inspect.isasyncgenfunction(method)
        return cls(name, method, frozenset(wanted), is_generator, is_batched)
