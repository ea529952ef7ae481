"""A handler that is called over HTTP, wherever its code runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from ovmstrio.core.http import Callback, HttpAnswer, HttpRequest
from ovmstrio.runtimes.handlers.handler_class import HandlerMethod

__all__ = ["HttpHandler"]


class HttpHandler(Protocol):
    """What the paths of a handler need of it."""

    @property
    def methods(self) -> Mapping[str, HandlerMethod]:
        """Its methods by name."""
        ...

    @property
    def obstacle(self) -> str:
        """Why it cannot be called now, empty if it can."""
        ...

    async def answer(self, name: str, request: HttpRequest) -> HttpAnswer:
        """Have a method answer a request.

        Raises:
            MalformedPayload: the body is not what its content type says.
            UserCodeError: the method raised, which has been logged, or its process ended.
            HTTPError: it raised this, or Starlette's ``HTTPException``.
            ServerError: it raised this, or cannot be called now.

        Ownership: a stream in the answer is the caller's to close.

        Cancellation: while it waits, it is not called; a plain method that runs goes on, and its result is dropped; an
        ``async def`` one is cancelled where it waits.
        """
        ...

    def run_after(self, callbacks: Iterable[Callback]) -> None:
        """Run the callbacks of an answer that has been sent, in the background."""
        ...
