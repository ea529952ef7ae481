"""What one server is to serve, and where: what every way to start a server comes down to.

::

    ovms serve --config_path, --model_path ──┐
    ovms serve PROJECT ──────────────────────┤
    ovms serve config.yml --service SCRIPT ──┼─> Plan ─> serve
    ovms run SCRIPT ─────────────────────────┤
    ovmstrio.serve(settings) ────────────────┘
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import structlog
import trio

from ovmstrio.config.ovms_json import parse_config
from ovmstrio.config.specs import ServerSpec
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.runtimes.table import KINDS, Kinds
from ovmstrio.server.command_line import cache_directory, contradictions, listen_addresses, single_servable
from ovmstrio.server.systemd.notifier import Notifier
from ovmstrio.server.worker_count import count_workers
from ovmstrio.util.regular_files import read_regular_bytes

if TYPE_CHECKING:
    from pathlib import Path

    from ovmstrio.server.running import Running
    from ovmstrio.server.settings import ServerSettings

__all__ = ["Plan", "read_plan"]

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One server before it starts.

    Attributes:
        settings: what holds for all that it serves.
        spec: what it serves.
        grpc: addresses for gRPC, as ``ovmstrio.wire.listeners`` takes them; none for no gRPC.
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
