"""Running a service of a script: its configuration, its Ops, its ports and its end."""

from __future__ import annotations

import sys
import traceback
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import structlog
import trio

from ovmstrio.core.errors import ConfigError, ServerError
from ovmstrio.observability.logs import configure_logs
from ovmstrio.ops_server.serving import Listening, RunningPipeline, serve_pipeline
from ovmstrio.runtimes.ops.op_kind import open_service
from ovmstrio.runtimes.ops.ports import choose_ports
from ovmstrio.runtimes.ops.prepared_service import PreparedService
from ovmstrio.runtimes.ops.process_info import record_process
from ovmstrio.runtimes.resident import host
from ovmstrio.server.freed_memory import keep_freed_memory
from ovmstrio.server.signals import obey_signals

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ovmstrio.runtimes.ops import WebService
    from ovmstrio.runtimes.ops.config.op_settings import PipelineSettings
    from ovmstrio.runtimes.ops.op_service import OpService
    from ovmstrio.runtimes.ops.ports import Ports

__all__ = ["Life", "ServiceOptions", "run_script_service", "run_service", "serve_service"]

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceOptions:
    """How a service is run.

    Attributes:
        config: a file that takes the place of the one that the script names; a dictionary of the script stays.
        rpc_port: takes the place of the configuration's.
        http_port: takes the place of the configuration's.
        grpc_hosts: addresses of this machine for gRPC; None for every one.
        http_hosts: those for HTTP; None for those for gRPC.
        drain_seconds: how long requests get when the server ends.
        handle_signals: whether SIGINT and SIGTERM end the server.
    """

    config: str | None = None
    rpc_port: int | None = None
    http_port: int | None = None
    grpc_hosts: Sequence[str] | None = None
    http_hosts: Sequence[str] | None = None
    drain_seconds: float = 30.0
    handle_signals: bool = True


def run_script_service(service: WebService) -> None:
    """Serve the service of a script that Python runs and no command of ours.

    Raises:
        SystemExit: with 1, the server could not start or had to be cut; why is on standard error.
    """
    configure_logs()
    run_service(service)


def run_service(service: WebService, options: ServiceOptions | None = None) -> None:
    """Serve a prepared service until it is told to end.

    Raises:
        SystemExit: with 1, the server could not start or had to be cut; why is on standard error.
    """
    keep_freed_memory()
    try:
        gently = trio.run(serve_service, service, options or ServiceOptions())
    except* (ServerError, OSError) as group:
        for error in _leaves(group):
            sys.stderr.write(_explained(error))
        raise SystemExit(1) from None
    if not gently:
        raise SystemExit(1)


async def serve_service(
    service: WebService,
    options: ServiceOptions,
    *,
    task_status: trio.TaskStatus[RunningPipeline] = trio.TASK_STATUS_IGNORED,
) -> bool:
    """Read the configuration, start the Ops and serve; True if the server ended gently, or before it served.

    Raises:
        ConfigError: the configuration, the Ops or the ports cannot be used, or an Op cannot be prepared.
        OSError: a port cannot be bound, or ``ProcessInfo.json`` cannot be written.

    They are in an exception group, as errors of a nursery are.

    Ownership: everything is closed when this returns.

    Cancellation: ends everything at once.
    """
    life = Life()
    async with trio.open_nursery() as nursery:
        if options.handle_signals:
            await nursery.start(obey_signals, partial(life.end, nursery.cancel_scope), nursery.cancel_scope)
        await _open_and_serve(service, options, life, task_status)
        nursery.cancel_scope.cancel()
    return life.gently


class Life:
    """What is known of a server as it comes and goes.

    Attributes:
        running: the server, once it accepts requests.
        ended: whether it does no more.
        gently: whether it ended as it should; a server that is told to end before it serves does.
    """

    def __init__(self) -> None:
        self.running: RunningPipeline | None = None
        self.ended = trio.Event()
        self.gently = False

    async def end(self, everything: trio.CancelScope) -> None:
        """Drain the server; what has not begun to serve is cancelled with ``everything``.

        Returns only in the latter case: for as long as workers are closed, another signal is to stop at once.

        Cancellation: leaves the drain where it is.
        """
        if self.running is None:
            self.gently = True
            everything.cancel()
            return
        if not self.ended.is_set():
            self.running.drain()
        await trio.sleep_forever()


async def _open_and_serve(
    service: WebService, options: ServiceOptions, life: Life, task_status: trio.TaskStatus[RunningPipeline]
) -> None:
    prepared = PreparedService(service, options.config)
    service.graph()  # what is wrong with the Ops is told before what is wrong with their settings
    settings = _overridden(await trio.to_thread.run_sync(prepared.settings), options)
    ports = await trio.to_thread.run_sync(_ports, prepared, options, settings)
    name = service.name or None
    async with trio.open_nursery() as nursery:
        opened = await host(nursery, open_service(name, prepared, settings), kind="op pipeline", name=service.name)
        running = await nursery.start(_serve, opened, _listening(settings, ports, options), life)
        with record_process([_port_of(running.grpc), _port_of(running.http)]):
            log.info("serving", service=service.name, grpc=running.grpc, http=running.http)
            life.running = running
            task_status.started(running)
            await life.ended.wait()


def _ports(prepared: PreparedService, options: ServiceOptions, settings: PipelineSettings) -> Ports:
    try:
        return choose_ports(settings.rpc_port, settings.http_port)
    except ConfigError as error:
        chosen = {"rpc_port": options.rpc_port, "http_port": options.http_port}
        if any(chosen.get(problem.path) is not None for problem in error.problems):
            raise  # the configuration's lines do not say what the command line does
        raise prepared.placed(error.problems) from None


async def _serve(
    service: OpService,
    listening: Listening,
    life: Life,
    *,
    task_status: trio.TaskStatus[RunningPipeline],
) -> None:
    life.gently = await serve_pipeline(service, listening, task_status=task_status)
    life.ended.set()


def _port_of(addresses: Sequence[str]) -> int | None:
    return int(addresses[0].rpartition(":")[2]) if addresses else None


def _overridden(settings: PipelineSettings, options: ServiceOptions) -> PipelineSettings:
    rpc_port = settings.rpc_port if options.rpc_port is None else options.rpc_port
    http_port = settings.http_port if options.http_port is None else options.http_port
    return replace(settings, rpc_port=rpc_port, http_port=http_port)


def _listening(settings: PipelineSettings, ports: Ports, options: ServiceOptions) -> Listening:
    listening = Listening(
        ports=ports,
        http_status=settings.http_status,
        drain_seconds=options.drain_seconds,
        metrics_port=_metrics_port(settings),
    )
    listening = replace(listening, http_hosts=options.http_hosts)
    return listening if options.grpc_hosts is None else replace(listening, hosts=options.grpc_hosts)


def _metrics_port(settings: PipelineSettings) -> int | None:
    """Give the port that scrapers have for themselves; HTTP's own serves them anyway."""
    port = settings.dag.prometheus_port if settings.dag.enable_prometheus else None
    return None if port == settings.http_port else port


def _leaves(group: BaseExceptionGroup[Any]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error


def _explained(error: BaseException) -> str:
    """Say why a server could not start; what user code raised, with where it did."""
    if isinstance(error, ConfigError) and error.__cause__ is not None:
        return "".join(traceback.format_exception(error.__cause__)) + f"error: {error}\n"
    problems = error.problems if isinstance(error, ConfigError) else [error]
    return "error: " + "\n       ".join(str(problem).rstrip() for problem in problems) + "\n"
