"""A handler project alone, as a server's plan: the project at the root of its port."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from ovmstrio.config.specs import HandlerSpec, ServerSpec
from ovmstrio.core.errors import Problem
from ovmstrio.server.command_line import UsageProblems, listen_addresses, read_settings
from ovmstrio.server.plan import Plan
from ovmstrio.server.readiness_file import usual_file

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ovmstrio.runtimes.handlers.config.project_spec import ProjectSpec
    from ovmstrio.server.settings import ServerSettings

__all__ = ["own_port", "plan_project"]

_FOREIGN: Final = "cannot be used with a project; its nucleus.yaml has the settings of the handler"
_DEFAULTS: Final = {"max_message_size": 2**31 - 1, "file_system_poll_wait_seconds": 0}
"""Messages have any size that protobuf can read and write, and what a handler writes in its folder is no new code."""


def plan_project(project: ProjectSpec, options: Mapping[str, Any]) -> Plan:
    """Plan to serve a project; ``options`` are the command line's.

    A project has one port, ``serve_port`` unless ``--port`` says otherwise.  With ``--rest_port`` as well, a project
    over HTTP has gRPC beside it, and one over gRPC has HTTP.

    Raises:
        UsageProblems: options that do not exist, values out of bounds, or options that exclude or need each other.
    """
    settings = read_settings({**_DEFAULTS, **options}, foreign=_FOREIGN)
    if settings.probe_port and project.processes > 1:
        message = f"a project of {project.processes} processes has no port for probes"
        fix = "give it one process, or look for the readiness file"
        raise UsageProblems([Problem(message, path="--probe_port", suggestion=fix)])
    given = settings.model_fields_set
    is_http = project.protobuf_path is None
    port = own_port(project, settings)
    grpc = listen_addresses(settings.grpc_bind_address, settings.port if is_http else port, zero_is_any=True)
    rest = listen_addresses(settings.rest_bind_address, port if is_http else settings.rest_port, zero_is_any=True)
    spec = HandlerSpec(name=project.name, base_path=project.directory, path=project.file, origin=str(project.file))
    return Plan(
        settings=settings,
        spec=ServerSpec(services=(spec,)),
        grpc=tuple(grpc) if not is_http or {"port", "rest_port"} <= given else (),
        rest=tuple(rest) if is_http or "rest_port" in given else (),
        port_options="--port or 'serve_port'",
        root=project.name,
        readiness_file=settings.readiness_file or usual_file(),
        processes=project.processes,
    )


def own_port(project: ProjectSpec, settings: ServerSettings) -> int:
    """Give the port that a project is called at."""
    given = settings.model_fields_set
    if project.protobuf_path is None and "rest_port" in given:
        return settings.rest_port
    return settings.port if "port" in given else project.serve_port
