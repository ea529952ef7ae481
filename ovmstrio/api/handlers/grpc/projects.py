"""What projects add to a gRPC server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ovmstrio.api.handlers.grpc.service import HandlerService
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.protocol.descriptors import Descriptors

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from ovmstrio.runtimes.handlers.grpc import GrpcProject
    from ovmstrio.wire.grpc.server import Service

__all__ = ["user_descriptors", "user_services"]


def user_services(projects: Sequence[GrpcProject], taken: Collection[str]) -> list[Service]:
    """Make the services of projects.

    Raises:
        ConfigError: some have the same name as others, or as those that the server has ``taken`` for its own.
    """
    problems = list(_clashes(projects, taken))
    if problems:
        raise ConfigError(problems)
    return [HandlerService(project.proto.services, project.handler, project.limit) for project in projects]


def user_descriptors(projects: Sequence[GrpcProject]) -> list[Descriptors]:
    """Give what describes the services of projects and their messages."""
    return [Descriptors.of(project.proto.files) for project in projects]


def _clashes(projects: Sequence[GrpcProject], taken: Collection[str]) -> Iterator[Problem]:
    owners = dict.fromkeys(taken, "the server itself")
    for project in projects:
        source = str(project.proto.source)
        for service in project.proto.services:
            owner = owners.setdefault(service.name, source)
            if owner != source:
                text = f"the service {service.name} is already served by {owner}"
                yield Problem(text, file=source, suggestion="give it another name or package")
