"""The ports of services that take requests over HTTP whole, with documents for answers, and of who reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from ovmstrio.core.servable import Service

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from contextlib import AbstractAsyncContextManager

    from ovmstrio.core.generation import TextGenerator
    from ovmstrio.core.http import HttpRequest

__all__ = ["Documents", "PayloadDocument", "PayloadService", "TextApi"]


class PayloadDocument(NamedTuple):
    """A document, or a piece of one, and the type of its content."""

    data: bytes
    media_type: str


class Documents(Protocol):
    """What a service answers, as it comes."""

    async def receive(self) -> PayloadDocument | None:
        """Give the next document; None behind the last one.

        Raises:
            ServerError: the service failed.

        Cancellation: while there is none; nothing is lost.
        """
        ...


class PayloadService(Service, Protocol):
    """A service that may take such requests."""

    @property
    def takes_payloads(self) -> bool:
        """Whether it does; constant for its life."""
        ...

    def open_payload(self, request: HttpRequest, deadline: float) -> AbstractAsyncContextManager[Documents]:
        """Begin to answer a request, whose body has no encoding any more, until a deadline on trio's clock.

        Leaving the block before the end stops what makes the documents.

        Raises:
            NotSupported: on entering, it takes none.
            ServerError: on entering, the request cannot be answered.

        Cancellation: anywhere; what makes the documents is stopped before this returns.
        """
        ...


class TextApi(Protocol):
    """Reads what requests over HTTP ask of models that make text, and writes what these answer."""

    async def answer(
        self,
        model: TextGenerator,
        name: str,
        request: HttpRequest,
        send: Callable[[PayloadDocument], Awaitable[None]],
    ) -> None:
        """Have a model answer: with one document, or with one for each event where the body asks for a stream.

        Args:
            model: makes the text.
            name: what the answer calls it where the body does not name it.
            request: has the path, and a body of JSON without encoding.
            send: is called with each document.

        Raises:
            InvalidRequest: the path is no one of those that ask for text, or the body cannot be read.
            ServerError: as ``TextGenerator.generate``, and as ``send``.

        Cancellation: anywhere; the model stops within a step of its engine.
        """
        ...
