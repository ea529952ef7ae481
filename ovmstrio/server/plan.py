"""What one server is to serve, and where: what every way to start a server comes down to.

::

    ovms serve --config_path, --model_path ──┐
    ovms serve PROJECT ──────────────────────┤
    ovms serve config.yml --service SCRIPT ──┼─> Plan ─> serve
    ovms run SCRIPT ─────────────────────────┤
    ovmstrio.serve(settings) ────────────────┘
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import structlog
import trio

from ovmstrio.config.config_file import parse_config
from ovmstrio.config.specs import HandlerSpec, OpPipelineSpec, ServerSpec
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.ops.config_file import choose_ports
from ovmstrio.ops.kind import OpPipelineKind
from ovmstrio.ops.op_service import NAMELESS
from ovmstrio.ops.prepared_service import PreparedService
from ovmstrio.ops.process_info import record_process
from ovmstrio.server.command_line import (
    UsageProblems,
    cache_directory,
    contradictions,
    listen_addresses,
    read_settings,
    single_servable,
)
from ovmstrio.server.kinds import KINDS, Kinds
from ovmstrio.server.readiness_file import usual_file
from ovmstrio.server.systemd import Notifier
from ovmstrio.server.worker_count import count_workers
from ovmstrio.util.regular_files import read_regular_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ovmstrio.handlers.config.project_spec import ProjectSpec
    from ovmstrio.ops.config_file import Ports
    from ovmstrio.ops.settings import PipelineSettings
    from ovmstrio.ops.web_service import WebService
    from ovmstrio.server.server import Running
    from ovmstrio.server.settings import ServerSettings

__all__ = ["Plan", "own_port", "plan_project", "plan_service", "read_plan", "service_settings"]

# ----------------------------------------------------------------------
# What one server is to serve, and where: what every way to start a server comes down to
# ----------------------------------------------------------------------

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One server before it starts.

    Attributes:
        settings: what holds for all that it serves.
        spec: what it serves.
        grpc: addresses for gRPC, as ``ovmstrio.transport.listeners`` takes them; none for no gRPC.
        rest: those for HTTP.
        metrics: those for scrapers alone.
        port_options: by which other ports are chosen, for messages.
        root: the name of the service that has its paths at the root of the ports, if one has.  It is loaded before
            anything listens, and the server does not start without it.
        readiness_file: what exists while the server is ready; None for nothing.
        processes: how many processes serve it.
        workers_reason: why there are so many, where that was not said but chosen.
        kinds: the kinds of services that there are.
        notifier: tells a service manager how the server does.
        while_serving: is entered once connections are accepted, and left when they are not any more.
    """

    settings: ServerSettings
    spec: ServerSpec
    grpc: tuple[str, ...] = ()
    rest: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    port_options: str = "--port and --rest_port"
    root: str = ""
    readiness_file: Path | None = None
    processes: int = 1
    workers_reason: str = ""
    kinds: Kinds = field(default_factory=lambda: KINDS)
    notifier: Notifier = field(default_factory=Notifier)
    while_serving: Callable[[Running], AbstractContextManager[object]] = nullcontext


async def read_plan(settings: ServerSettings, kinds: Kinds = KINDS) -> Plan:
    """Read what the settings name, of these kinds.

    Raises:
        ConfigError: the configuration file cannot be used at all, or not by as many processes.

    Cancellation: while the file is read.
    """
    spec = await _read_spec(settings, kinds)
    return Plan(
        settings=settings,
        spec=spec,
        grpc=tuple(listen_addresses(settings.grpc_bind_address, settings.port)),
        rest=tuple(listen_addresses(settings.rest_bind_address, settings.rest_port)),
        readiness_file=settings.readiness_file,
        processes=count_workers(settings, spec),
        kinds=kinds,
    )


async def _read_spec(settings: ServerSettings, kinds: Kinds) -> ServerSpec:
    if settings.config_path is None:
        return single_servable(settings)
    try:
        content = await trio.to_thread.run_sync(read_regular_bytes, settings.config_path, abandon_on_cancel=True)
    except OSError as error:
        raise ConfigError([Problem(f"the file cannot be read: {error.strerror}", str(settings.config_path))]) from None
    spec = parse_config(kinds.values(), content, settings.config_path, cache_dir=cache_directory(settings))
    problems = contradictions(settings, spec)
    if problems:
        raise ConfigError(problems)
    for problem in spec.problems:
        log.warning("configuration", problem=str(problem))
    return spec


# ----------------------------------------------------------------------
# A handler project alone, as a server's plan: the project at the root of its port
# ----------------------------------------------------------------------

_PROJECT_REASON: Final = "cannot be used with a project; its nucleus.yaml has the settings of the handler"
_DEFAULTS: Final = {"max_message_size": 2**31 - 1, "file_system_poll_wait_seconds": 0}
"""Messages have any size that protobuf can read and write, and what a handler writes in its folder is no new code."""


def plan_project(project: ProjectSpec, options: Mapping[str, Any]) -> Plan:
    """Plan to serve a project; ``options`` are the command line's.

    A project has one port, ``serve_port`` unless ``--port`` says otherwise.  With ``--rest_port`` as well, a project
    over HTTP has gRPC beside it, and one over gRPC has HTTP.

    Raises:
        UsageProblems: options that do not exist, values out of bounds, or options that exclude or need each other.
    """
    settings = read_settings({**_DEFAULTS, **options}, foreign=_PROJECT_REASON)
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


# ----------------------------------------------------------------------
# A pipeline of Ops alone, as a server's plan: a script's service at the root of the ports of its configuration
# ----------------------------------------------------------------------

_SERVICE_REASON: Final = "cannot be used with --service; the service's config.yml has its settings"
_MAX_MESSAGE_BYTES: Final = 256 * 2**20
"""How large messages of pipelines may be unless something else is said."""


def service_settings(options: Mapping[str, Any]) -> ServerSettings:
    """Make settings of the command line's options for a service alone.

    Raises:
        UsageProblems: options that do not exist, values out of bounds, or options that exclude or need each other.
    """
    defaults = {"max_message_size": _MAX_MESSAGE_BYTES, "file_system_poll_wait_seconds": 0}
    return read_settings({**defaults, **options}, foreign=_SERVICE_REASON)


def plan_service(service: WebService, settings: ServerSettings, config: str | None = None) -> Plan:
    """Plan to serve a prepared service; blocking.

    The ports are those of its configuration unless ``--port`` (of gRPC) and ``--rest_port`` (of HTTP) say otherwise,
    and it listens at every address of the machine unless it is told where.

    Args:
        service: of a script that runs.
        settings: of the server.
        config: a file that takes the place of the one that the script names.

    Raises:
        ConfigError: the configuration, the Ops or the ports cannot be used.
    """
    prepared = PreparedService(service, config)
    service.graph()  # what is wrong with the Ops is told before what is wrong with their settings
    configured = prepared.settings()
    ports = _ports(prepared, configured, settings)
    name = service.name or NAMELESS
    grpc = _addresses(settings, "grpc_bind_address", ports.rpc)
    rest_option = "rest_bind_address" if "rest_bind_address" in settings.model_fields_set else "grpc_bind_address"
    rest = () if ports.http is None else _addresses(settings, rest_option, ports.http)
    scrapers = _metrics_port(configured) if settings.metrics_enable else None
    spec = OpPipelineSpec(name=name, base_path=Path.cwd())
    return Plan(
        settings=settings,
        spec=ServerSpec(services=(spec,)),
        kinds={**KINDS, OpPipelineKind.name: OpPipelineKind({name: prepared})},
        grpc=grpc,
        rest=rest,
        metrics=() if scrapers is None else _addresses(settings, rest_option, scrapers),
        root=name,
        readiness_file=settings.readiness_file,
        while_serving=_record,
    )


def _record(running: Running) -> AbstractContextManager[object]:
    """Have the process in the file by which ``ovms stop`` finds it."""
    return record_process([_port_of(running.grpc), _port_of(running.rest)])


def _port_of(addresses: Sequence[str]) -> int | None:
    return next((int(port) for _, _, port in (each.rpartition(":") for each in addresses) if port.isdecimal()), None)


def _ports(prepared: PreparedService, configured: PipelineSettings, settings: ServerSettings) -> Ports:
    given = settings.model_fields_set
    rpc = settings.port if "port" in given else configured.rpc_port
    http = settings.rest_port if "rest_port" in given else configured.http_port
    try:
        return choose_ports(rpc, http)
    except ConfigError as error:
        options = {"rpc_port": "port", "http_port": "rest_port"}
        if any(options.get(problem.path) in given for problem in error.problems):
            # The configuration's lines do not say what the command line does.
            raise
        raise prepared.placed(error.problems) from None


def _addresses(settings: ServerSettings, option: str, port: int) -> tuple[str, ...]:
    if option in settings.model_fields_set:
        return tuple(listen_addresses(getattr(settings, option), port, zero_is_any=True))
    hosts = ("0.0.0.0", "[::]") if _has_ipv6() else ("0.0.0.0",)  # noqa: S104 - a service is for others
    return tuple(f"{host}:{port}" for host in hosts)


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::", 0))
    except OSError:
        return False
    return True


def _metrics_port(configured: PipelineSettings) -> int | None:
    """Give the port that scrapers have for themselves; HTTP's own serves them anyway."""
    port = configured.dag.prometheus_port if configured.dag.enable_prometheus else None
    return None if port == configured.http_port else port
