"""Plan of a server: services, addresses and processes, whatever way it is started.

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


log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One server before it starts.

    Attributes:
        grpc: gRPC addresses, as in ``ovmstrio.transport.listeners``; empty for none.
        metrics: addresses of a separate metrics port.
        port_options: option names for hints in error messages.
        root: service mounted at the root of the ports, or empty; loaded before the server listens, failure is fatal.
        readiness_file: file that exists while the server is ready, or None.
        workers_reason: reason of an automatic number of workers.
        while_serving: context manager entered while connections are accepted.
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
    """Create the plan of the settings.

    Raises:
        ConfigError: the configuration file is unusable, or does not allow that number of workers.
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


# Handler projects

_PROJECT_REASON: Final = "cannot be used with a project; set it in nucleus.yaml"
_DEFAULTS: Final = {"max_message_size": 2**31 - 1, "file_system_poll_wait_seconds": 0}
"""Handlers accept messages of any size that protobuf supports, and files written by a handler are no new code."""


def plan_project(project: ProjectSpec, options: Mapping[str, Any]) -> Plan:
    """Plan a server of one handler project; ``options`` are command-line options.

    A project has one port: ``serve_port`` or ``--port``.  With ``--rest_port`` in addition, an HTTP project also has
    gRPC and a gRPC project also has HTTP.

    Raises:
        UsageProblems: unknown options, invalid values, or conflicting or missing options.
    """
    settings = read_settings({**_DEFAULTS, **options}, foreign=_PROJECT_REASON)
    if settings.probe_port and project.processes > 1:
        message = f"a project with {project.processes} processes has no probe port"
        fix = "use one process, or the readiness file"
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
    """Return the port of a project."""
    given = settings.model_fields_set
    if project.protobuf_path is None and "rest_port" in given:
        return settings.rest_port
    return settings.port if "port" in given else project.serve_port


# Op pipelines

_SERVICE_REASON: Final = "cannot be used with --service; set it in config.yml"
_MAX_MESSAGE_BYTES: Final = 256 * 2**20
"""Default message size of Op pipelines."""


def service_settings(options: Mapping[str, Any]) -> ServerSettings:
    """Create the settings of an Op pipeline service.

    Raises:
        UsageProblems: unknown options, invalid values, or conflicting or missing options.
    """
    defaults = {"max_message_size": _MAX_MESSAGE_BYTES, "file_system_poll_wait_seconds": 0}
    return read_settings({**defaults, **options}, foreign=_SERVICE_REASON)


def plan_service(service: WebService, settings: ServerSettings, config: str | None = None) -> Plan:
    """Plan a server of one Op pipeline service; blocking.

    Ports are those of its configuration unless overridden by ``--port`` (gRPC) and ``--rest_port`` (HTTP).  It listens
    on
    all interfaces by default.

    Args:
        service: service of a user script.
        settings: the settings.
        config: replaces the configuration file named by the script.

    Raises:
        ConfigError: invalid configuration, Ops or ports.
    """
    prepared = PreparedService(service, config)
    service.graph()  # errors of the Ops precede errors of their settings
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
            # The command line caused the error, so lines of the configuration would mislead.
            raise
        raise prepared.placed(error.problems) from None


def _addresses(settings: ServerSettings, option: str, port: int) -> tuple[str, ...]:
    if option in settings.model_fields_set:
        return tuple(listen_addresses(getattr(settings, option), port, zero_is_any=True))
    hosts = ("0.0.0.0", "[::]") if _has_ipv6() else ("0.0.0.0",)  # noqa: S104 - a service is public
    return tuple(f"{host}:{port}" for host in hosts)


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::", 0))
    except OSError:
        return False
    return True


def _metrics_port(configured: PipelineSettings) -> int | None:
    """Return the separate metrics port, or None if it is the HTTP port."""
    port = configured.dag.prometheus_port if configured.dag.enable_prometheus else None
    return None if port == configured.http_port else port
