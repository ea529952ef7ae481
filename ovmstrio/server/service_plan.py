"""A pipeline of Ops alone, as a server's plan: a script's service at the root of the ports of its configuration."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ovmstrio.config.specs import OpPipelineSpec, ServerSpec
from ovmstrio.core.errors import ConfigError
from ovmstrio.runtimes.ops.config.pipeline_file import choose_ports
from ovmstrio.runtimes.ops.op_kind import OpPipelineKind
from ovmstrio.runtimes.ops.op_service import NAMELESS
from ovmstrio.runtimes.ops.prepared_service import PreparedService
from ovmstrio.runtimes.ops.process_info import record_process
from ovmstrio.runtimes.table import KINDS
from ovmstrio.server.command_line import listen_addresses, read_settings
from ovmstrio.server.plan import Plan

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager

    from ovmstrio.runtimes.ops.config.op_settings import PipelineSettings
    from ovmstrio.runtimes.ops.config.pipeline_file import Ports
    from ovmstrio.runtimes.ops.web_service import WebService
    from ovmstrio.server.running import Running
    from ovmstrio.server.settings import ServerSettings

__all__ = ["plan_service", "service_settings"]

_FOREIGN: Final = "cannot be used with --service; the service's config.yml has its settings"
_MAX_MESSAGE_BYTES: Final = 256 * 2**20
"""How large messages of pipelines may be unless something else is said."""


def service_settings(options: Mapping[str, Any]) -> ServerSettings:
    """Make settings of the command line's options for a service alone.

    Raises:
        UsageProblems: options that do not exist, values out of bounds, or options that exclude or need each other.
    """
    defaults = {"max_message_size": _MAX_MESSAGE_BYTES, "file_system_poll_wait_seconds": 0}
    return read_settings({**defaults, **options}, foreign=_FOREIGN)


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
