"""Server plan: services, addresses and number of processes, the same for every start command.

::

    ovms serve PATH, --config-path, ... ─────┐
    ovms serve PROJECT ──────────────────────┤
    ovms serve config.yml --service SCRIPT ──┼─> Plan ─> serve
    ovms paddle run SCRIPT ──────────────────┤
    ovmstrio.serve(settings) ────────────────┘
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import structlog
import trio

from ovmstrio.config.config_file import parse_config
from ovmstrio.config.specs import HandlerSpec, ServerSpec
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.server.command_line import (
    UsageError,
    addresses_of,
    cache_directory,
    config_conflicts,
    listen_addresses,
    read_settings,
    single_model_policy,
    single_problems,
    single_servable_spec,
    with_local_copies,
)
from ovmstrio.server.kinds import KINDS, Kinds
from ovmstrio.server.readiness_file import default_file
from ovmstrio.server.systemd import Notifier, inherited_addresses
from ovmstrio.server.target import read_config
from ovmstrio.server.worker_count import count_workers
from ovmstrio.serving.mirrors import update_mirror
from ovmstrio.stores.mirror import Mirror
from ovmstrio.util.progress import Progress, no_progress

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

    from ovmstrio.handlers.config.project_spec import ProjectSpec
    from ovmstrio.server.running import Running
    from ovmstrio.server.settings import ServerSettings

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
    port_options: str = "--port and --rest-port"
    root: str = ""
    readiness_file: Path | None = None
    processes: int = 1
    workers_reason: str = ""
    kinds: Kinds = field(default_factory=lambda: KINDS)
    notifier: Notifier = field(default_factory=Notifier)
    while_serving: Callable[[Running], AbstractContextManager[object]] = nullcontext


def with_service_manager(plan: Plan, environ: MutableMapping[str, str]) -> Plan:
    """Return the plan with inherited sockets and the notifier; their variables are removed from the environment.

    Raises:
        ConfigError: the name of a socket is no protocol.
    """
    named = inherited_addresses(environ)
    return replace(
        plan,
        grpc=named.get("grpc") or plan.grpc,
        rest=named.get("rest") or plan.rest,
        notifier=Notifier.from_environ(environ),
    )


async def read_plan(settings: ServerSettings, kinds: Kinds = KINDS, progress: Progress = no_progress) -> Plan:
    """Create the plan of the settings; download a remote model or configuration file that has no local copy.

    Raises:
        ConfigError: the configuration file is unusable, or does not allow that number of workers.
        StorageFailure: a download failed.
        UsageError: options do not fit the downloaded model.
    """
    addresses = addresses_of(settings)
    missing = [mirror for mirror in map(Mirror, addresses.values()) if not mirror.is_usable]
    for mirror in missing:
        log.info("download started", address=str(mirror.address))
        await update_mirror(mirror, (single_model_policy(settings),), progress)
        log.info("files downloaded", address=str(mirror.address), path=str(mirror.address.path))
    if missing and (problems := single_problems(settings)):
        raise UsageError(problems)
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


async def check_again(plan: Plan) -> None:
    """Check the configuration of a running server before its restart.

    Raises:
        ConfigError: the configuration file or an entry is invalid.
    """
    if plan.root:
        return
    read = await read_plan(plan.settings.model_copy(update={"workers": plan.processes}), plan.kinds)
    errors = [problem for service in read.spec.services for problem in service.errors]
    if errors:
        raise ConfigError(errors)


async def _read_spec(settings: ServerSettings, kinds: Kinds) -> ServerSpec:
    path = with_local_copies(settings).config_path
    if path is None:
        return await trio.to_thread.run_sync(single_servable_spec, settings)
    try:
        content = await trio.to_thread.run_sync(read_config, path, abandon_on_cancel=True)
    except OSError as error:
        raise ConfigError([Problem(f"the file cannot be read: {error.strerror}", str(settings.config_path))]) from None
    address = addresses_of(settings).get("config_path")
    spec = parse_config(kinds.values(), content, path, cache_dir=cache_directory(settings), address=address)
    problems = config_conflicts(settings, spec)
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

    A project has one port: ``serve_port`` or ``--port``.  With ``--rest-port`` in addition, an HTTP project also has
    gRPC and a gRPC project also has HTTP, each unless its port is 0.

    Raises:
        UsageError: unknown options, invalid values, or conflicting or missing options.
    """
    settings = read_settings({**_DEFAULTS, **options}, model_option_error=_PROJECT_REASON)
    if settings.probe_port and project.processes > 1:
        message = f"a project with {project.processes} processes has no probe port"
        fix = "use one process, or the readiness file"
        raise UsageError([Problem(message, path="--probe-port", suggestion=fix)])
    given = settings.model_fields_set
    is_http = project.protobuf_path is None
    port = own_port(project, settings)
    # 0 is any free port for the project's own protocol, and disables the other one.
    grpc = listen_addresses(settings.grpc_bind_address, settings.port if is_http else port, zero_is_any=not is_http)
    rest = listen_addresses(settings.rest_bind_address, port if is_http else settings.rest_port, zero_is_any=is_http)
    spec = HandlerSpec(name=project.name, base_path=project.directory, path=project.file, origin=str(project.file))
    return Plan(
        settings=settings,
        spec=ServerSpec(services=(spec,)),
        grpc=tuple(grpc) if not is_http or {"port", "rest_port"} <= given else (),
        rest=tuple(rest) if is_http or "rest_port" in given else (),
        port_options="--port or 'serve_port'",
        root=project.name,
        readiness_file=settings.readiness_file or default_file(),
        processes=project.processes,
    )


def own_port(project: ProjectSpec, settings: ServerSettings) -> int:
    """Return the port of a project."""
    given = settings.model_fields_set
    if project.protobuf_path is None and "rest_port" in given:
        return settings.rest_port
    return settings.port if "port" in given else project.serve_port


# Op pipelines
