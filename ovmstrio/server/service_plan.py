"""Plans of servers with one pipeline of Ops at the root of their ports."""

from __future__ import annotations

import os
import socket
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ovmstrio.config.specs import OpPipelineSpec, ServerSpec
from ovmstrio.core.errors import ConfigError
from ovmstrio.ops.config_file import choose_ports
from ovmstrio.ops.kind import OpPipelineKind
from ovmstrio.ops.op_service import DEFAULT_NAME
from ovmstrio.ops.prepared_service import PreparedService
from ovmstrio.ops.process_info import record_process
from ovmstrio.server.command_line import (
    listen_addresses,
    read_settings,
)
from ovmstrio.server.kinds import KINDS
from ovmstrio.server.restart import own_ports

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ovmstrio.ops.config_file import Ports
    from ovmstrio.ops.graph import WebService
    from ovmstrio.ops.settings import PipelineSettings
    from ovmstrio.server.running import Running
    from ovmstrio.server.settings import ServerSettings
from ovmstrio.server.plan import Plan

_SERVICE_REASON: Final = "cannot be used with --service; set it in config.yml"


_MAX_MESSAGE_BYTES: Final = 256 * 2**20
"""Default message size of Op pipelines."""


def service_settings(options: Mapping[str, Any]) -> ServerSettings:
    """Create the settings of an Op pipeline service.

    Raises:
        UsageError: unknown options, invalid values, or conflicting or missing options.
    """
    defaults = {"max_message_size": _MAX_MESSAGE_BYTES, "file_system_poll_wait_seconds": 0}
    return read_settings({**defaults, **options}, model_option_error=_SERVICE_REASON)


def plan_service(service: WebService, settings: ServerSettings, config: str | None = None) -> Plan:
    """Plan a server of one Op pipeline service; blocking.

    Ports are those of its configuration unless overridden by ``--port`` (gRPC) and ``--rest-port`` (HTTP).  It listens
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
    name = service.name or DEFAULT_NAME
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
        return choose_ports(rpc, http, own_ports(os.environ))
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
