"""Services that answer raw HTTP requests with documents."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Awaitable
    from contextlib import AbstractAsyncContextManager

    from ovmstrio.core.generation import TextGenerator
    from ovmstrio.core.http_messages import HttpRequest
from ovmstrio.core.service import Service


class RawDocument(NamedTuple):
    """A response body, or a part of a streamed one, with its content type."""

    data: bytes
    media_type: str


class DocumentStream(Protocol):
    """Response documents of a service."""

    async def receive(self) -> RawDocument | None:
        """Return the next document, or None at the end.

        Raises:
            ServerError: the service failed.

        Cancellation: no document is lost.
        """


class RawHttpService(Service, Protocol):
    """A service that may accept raw HTTP requests."""

    @property
    def accepts_payloads(self) -> bool:
        """True if raw HTTP requests are accepted; constant for the life of the service."""

    def open_payload(self, request: HttpRequest, deadline: float) -> AbstractAsyncContextManager[DocumentStream]:
        """Process a request with a decoded body; ``deadline`` is on trio's clock.

        Leaving the block early stops the work.

        Raises:
            NotSupported: on entering, raw HTTP requests are not accepted.
            ServerError: on entering, the request failed.
        """


class TextApiAdapter(Protocol):
    """Adapter from text-generation HTTP requests to text models."""

    async def answer(
        self, model: TextGenerator, name: str, request: HttpRequest, send: Callable[[RawDocument], Awaitable[None]]
    ) -> None:
        """Answer with one document, or one per event if the body requests a stream.

        Args:
            model: generates the text.
            name: model name for the response if the body has none.
            request: has the path and an unencoded JSON body.
            send: is called with each document.

        Raises:
            InvalidRequest: unknown path or malformed body.
            ServerError: as ``TextGenerator.generate`` and ``send``.
        """
