"""The port of services that take requests over HTTP whole, whatever their paths, and answer with documents."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from ovmstrio.core.servable import Service

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from ovmstrio.core.http import HttpRequest

__all__ = ["Documents", "PayloadDocument", "PayloadService"]


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
