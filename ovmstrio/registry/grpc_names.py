"""Names of gRPC services, each of which only one entry can have, and none that is the server's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.protocol.descriptors import OWN_SERVICES
from ovmstrio.runtimes.kind import Takes

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from ovmstrio.core.servable import GrpcDeclaration, GrpcServices, Service
    from ovmstrio.registry.records import ServiceRecord
    from ovmstrio.runtimes.kind import Kind

__all__ = ["check_grpc_names", "declaration_of"]


def check_grpc_names(name: str, kind: Kind[Any], service: Service, records: Iterable[ServiceRecord]) -> None:
    """See to it that nothing else has the gRPC services of what is loaded for an entry; what is about to go does not.

    Raises:
        ConfigError: another entry or the server has one of them.
    """
    brought = declaration_of(kind, service)
    if brought is None:
        return
    owners = dict.fromkeys(OWN_SERVICES, "the server itself")
    for record in records:
        found = record.serving.get("") if record.name != name and record.spec is not None else None
        other = None if found is None else declaration_of(record.kind, found.servable)
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


def declaration_of(kind: Kind[Any], service: Service) -> GrpcDeclaration | None:
    """Give the gRPC services that a service brings, None for none."""
    return cast("GrpcServices", service).declaration if Takes.GRPC in kind.takes else None
