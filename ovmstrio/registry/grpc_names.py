"""Names of gRPC services, each of which only one entry can have, and none that is the server's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.core.servable import GrpcServices
from ovmstrio.protocol.descriptors import OWN_SERVICES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ovmstrio.core.servable import GrpcDeclaration, Service
    from ovmstrio.registry.records import ServiceRecord

__all__ = ["check_grpc_names"]


def check_grpc_names(name: str, service: Service, records: Iterable[ServiceRecord]) -> None:
    """See to it that nothing else has the gRPC services of what is loaded for an entry; what is about to go does not.

    Raises:
        ConfigError: another entry or the server has one of them.
    """
    brought = _declaration(service)
    if brought is None:
        return
    owners = dict.fromkeys(OWN_SERVICES, "the server itself")
    for record in records:
        found = record.serving.get("") if record.name != name and record.spec is not None else None
        other = None if found is None else _declaration(found.servable)
        if other is not None:
            owners |= dict.fromkeys(other.names, other.source)
    problems = [
        Problem(
            f"the service {each} is already served by {owners[each]}",
            file=brought.source,
            suggestion="give it another name or package",
        )
        for each in brought.names
        if each in owners
    ]
    if problems:
        raise ConfigError(problems)


def _declaration(service: Service) -> GrpcDeclaration | None:
    return service.declaration if isinstance(service, GrpcServices) else None
