"""A project beside models and graphs, as the registry has it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ovmstrio.core.request import ServableMetadata
from ovmstrio.core.servable import GrpcDeclaration
from ovmstrio.runtimes.resident import ResidentService

if TYPE_CHECKING:
    from ovmstrio.core.limits import ConcurrencyLimit
    from ovmstrio.runtimes.handlers.clients import Models
    from ovmstrio.runtimes.handlers.grpc.project import GrpcProject
    from ovmstrio.runtimes.handlers.grpc.services import UserProto
    from ovmstrio.runtimes.handlers.handler import LoadedHandler

__all__ = ["HandlerServable", "declaration_of"]

_PLATFORM: Final = "handler"


class HandlerServable(ResidentService):
    """A loaded project as the registry has it.

    Args:
        name: that it is served under.
        handler: the user's object.
        limit: how many requests may be in flight.
        grpc: its services; None if it is called over HTTP.
        models: of the project.

    Attributes:
        declaration: the services that it brings, None if it is called over HTTP.
    """

    def __init__(
        self, name: str, handler: LoadedHandler, limit: ConcurrencyLimit, grpc: GrpcProject | None, models: Models
    ) -> None:
        super().__init__()
        self.handler = handler
        self.models = models
        self.limit = limit
        self.grpc = grpc
        self.declaration = None if grpc is None else declaration_of(grpc.proto)
        self._metadata = ServableMetadata(name, _PLATFORM, (), ())

    @property
    def metadata(self) -> ServableMetadata:
        """What it tells of itself, which has neither inputs nor outputs."""
        return self._metadata


def declaration_of(proto: UserProto) -> GrpcDeclaration:
    """Give what the server has to know of the services of a project."""
    return GrpcDeclaration(tuple(service.name for service in proto.services), str(proto.source), proto.files)
