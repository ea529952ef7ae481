"""A project beside models and graphs, as the registry has it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import trio

from ovmstrio.core.errors import NotSupported
from ovmstrio.core.request import ServableMetadata

if TYPE_CHECKING:
    from ovmstrio.core.request import InferRequest, InferResponse
    from ovmstrio.runtimes.handlers.clients import Models
    from ovmstrio.core.limits import LocalLimit
    from ovmstrio.runtimes.handlers.grpc.project import GrpcProject
    from ovmstrio.runtimes.handlers.handler import LoadedHandler

__all__ = ["HandlerServable"]

_PLATFORM: Final = "handler"


class HandlerServable:
    """A loaded project as the registry has it.

    Args:
        name: that it is served under.
        handler: the user's object.
        limit: how many requests may be in flight.
        grpc: its services; None if it is called over HTTP.
        models: of the project.
    """

    def __init__(
        self, name: str, handler: LoadedHandler, limit: LocalLimit, grpc: GrpcProject | None, models: Models
    ) -> None:
        self.handler = handler
        self.models = models
        self.limit = limit
        self.grpc = grpc
        self._name = name
        self._metadata = ServableMetadata(name, _PLATFORM, (), ())
        self.closing = trio.Event()
        self.closed = trio.Event()

    @property
    def metadata(self) -> ServableMetadata:
        """What it tells of itself, which has neither inputs nor outputs."""
        return self._metadata

    async def infer(self, request: InferRequest) -> InferResponse:
        """Refuse, for handlers have no tensors.

        Raises:
            NotSupported: always.
        """
        del request
        way = f"call it at /{self._name}" if self.grpc is None else "call its own gRPC service"
        raise NotSupported(f"{self._name!r} is a handler, which takes no tensors; {way}")

    async def aclose(self) -> None:
        """End the handler and its models.

        Cancellation: nothing is left behind; the handler goes on ending.
        """
        self.closing.set()
        await self.closed.wait()
