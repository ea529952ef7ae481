"""The server: start, life cycle and drain, whatever it serves.

::

 serve ── log writer          a thread, flushed at the end
      ├─ traces              exporter threads, if any, flushed at the end
      ├─ signals             the first drains, the second stops at once
      └─ server
          ├─ file watcher     credentials and certificates
          ├─ crash probes     a process each
          ├─ registry         loads, unloads, file watcher
          │  └─ services      background work of services; outlives their calls
          ├─ send budgets     stalled clients are disconnected
          ├─ gRPC             a nursery per connection, a task per RPC that waits
          ├─ HTTP             a nursery per connection
          ├─ first load       after the sequences of an earlier run; starts before the front ends
          ├─ sequence cleaner
          └─ readiness file and service manager notifications
"""

from __future__ import annotations

import math
import os
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, AsyncExitStack, ExitStack, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, Protocol

import structlog
import trio

from ovmstrio.config.config_file import parse_config
from ovmstrio.core.errors import ConfigError, Problem, ServerError
from ovmstrio.core.events import OK, observer_group
from ovmstrio.core.generation import MediaPolicy
from ovmstrio.core.hooks import NULL_METERS
from ovmstrio.core.limits import Limit
from ovmstrio.core.resource_registry import current_resource_registry
from ovmstrio.inference.blob_cache import BlobCache, default_cache_folder, open_blob_cache
from ovmstrio.inference.crash_probe import open_crash_probe, verdicts_folder
from ovmstrio.inference.tuner import recompile_models
from ovmstrio.isolation.print_capture import log_prints
from ovmstrio.models.sequences import SequenceManagers
from ovmstrio.models.sequences.manager import clean_sequences
from ovmstrio.models.sequences.store import SequenceStore, check_worker_count, lock_folder
from ovmstrio.server.command_line import (
    addresses_of,
    cache_directory,
    metric_families,
    probe_addresses,
    with_local_copies,
)
from ovmstrio.server.credentials import CredentialStore, open_credentials
from ovmstrio.server.end_watchdog import SHUTDOWN_WATCHDOG
from ovmstrio.server.kinds import KINDS, Kinds
from ovmstrio.server.listeners import HTTP, HTTP2, Certificates, open_server_listeners
from ovmstrio.server.plan import Plan, check_again, read_plan
from ovmstrio.server.readiness_file import ReadinessFile
from ovmstrio.server.reload import Reloader
from ovmstrio.server.running import Running
from ovmstrio.server.signals import handle_reopen_signals, handle_restart_signals, handle_stop_signals
from ovmstrio.server.target import ConfigReader, settings_of
from ovmstrio.server.worker_context import WorkerProcessContext
from ovmstrio.serving.admission import Admission, SharedAdmission
from ovmstrio.serving.authorization import AuthorizingDataPlane, CallerRecorder
from ovmstrio.serving.broadcast_changes import sync_expected_services, sync_loaded_models, sync_regions
from ovmstrio.serving.data_plane import DataPlane
from ovmstrio.serving.kind import LoadContext
from ovmstrio.serving.model_control import ModelControl
from ovmstrio.serving.periodic_check import PeriodicCheck
from ovmstrio.serving.records import VersionState
from ovmstrio.serving.registry import Registry
from ovmstrio.serving.shared_memory import ClientRegions
from ovmstrio.serving.source import ApplySpecs, ConfigSource
from ovmstrio.telemetry.access_log import RequestLog, open_access_log
from ovmstrio.telemetry.call_tracing import CallTracing, WatchedCallTracing
from ovmstrio.telemetry.log_rate_limit import FAILURE_LINES
from ovmstrio.telemetry.log_writer import WRITER
from ovmstrio.telemetry.loop_utilization import LoopUtilization, current_loop_utilization
from ovmstrio.telemetry.metrics import Metrics
from ovmstrio.telemetry.recent_history import RecentHistory
from ovmstrio.telemetry.recent_traces import RecentTraces
from ovmstrio.telemetry.spans import ALWAYS, sampler_from_environ, warn_unsupported_propagators
from ovmstrio.telemetry.trace_context import is_export_configured
from ovmstrio.transport.send_budget import SendBudget
from ovmstrio.util.container_limits import memory_limit
from ovmstrio.util.deadline_sweeper import watch_overdue
from ovmstrio.util.extras import Extra, install_command
from ovmstrio.util.lazy_import import import_aside, import_limiter
from ovmstrio.util.load_limit import load_limiter

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from ovmstrio.auth.gate import Gate
    from ovmstrio.config.specs import ServerSpec
    from ovmstrio.core.events import CallObserver, RequestObserver
    from ovmstrio.core.payloads import TextApiAdapter
    from ovmstrio.core.service import ServableLookup
    from ovmstrio.core.tracing import StartRootSpan
    from ovmstrio.server.restart import InPlaceRestart
    from ovmstrio.server.settings import ServerSettings
    from ovmstrio.serving.records import VersionStatus
    from ovmstrio.stores.address import Address
    from ovmstrio.transport.listeners import Listener

__all__ = [
    "FrontEnd",
    "ServerTraces",
    "WorkerProcessContext",
    "make_send_budgets",
    "serve",
    "serve_plan",
    "trace_calls",
]


log = structlog.get_logger(__name__)

# Memory

_SEND_BUDGET_DIVISOR: Final = 4


def make_send_budgets(settings: ServerSettings, processes: int = 1) -> SendBudget:
    """Create the send budgets of one of several processes that share the memory."""
    quota = settings.grpc_memory_quota or memory_limit() // _SEND_BUDGET_DIVISOR
    return SendBudget(
        quota / processes if quota else math.inf, settings.max_pending_response_bytes, settings.client_stall_timeout
    )


# Traces

_OTEL: Final = "ovmstrio.telemetry.otel"
_FLUSH_SECONDS: Final = 5.0
_SERVER_ERROR: Final = 500


@dataclass(frozen=True, slots=True)
class ServerTraces:
    """Tracing of one server."""

    recent: RecentTraces | None = None
    calls: tuple[CallObserver, ...] = ()
    requests: tuple[RequestObserver, ...] = ()
    start_root_span: StartRootSpan | None = None


@asynccontextmanager
async def trace_calls(
    *, is_watched: bool = False, failures_per_second: float = math.inf
) -> AsyncIterator[ServerTraces]:
    """Trace calls within the block if OpenTelemetry's environment variables request it.

    Args:
        is_watched: whether the console may watch recent traces, which records some calls while watched.
        failures_per_second: largest number of unsampled failed calls that are recorded.

    Cancellation: recorded spans are flushed, for a bounded time.
    """
    otel = await _opentelemetry() if is_export_configured(os.environ) else None
    recent = RecentTraces()
    if otel is None:
        if not is_watched:
            yield ServerTraces()
            return
        # Requests are not observed here, as that has a cost per request.
        tracing = CallTracing(ALWAYS, [recent], is_failure=_is_failure, observes_requests=False)
        yield ServerTraces(recent, (WatchedCallTracing(tracing, recent),))
        return
    warn_unsupported_propagators(os.environ)
    export = await trio.to_thread.run_sync(otel.SpanExport, os.environ, recent)
    tracing = CallTracing(
        sampler_from_environ(os.environ),
        [recent, export],
        is_failure=_is_failure,
        server_sinks=[export],
        user=otel.UserSpans(),
        has_user_code=_has_user_code,
        failures_per_second=failures_per_second,
    )
    try:
        yield ServerTraces(recent, (tracing,), (tracing,), tracing.trace_server_request)
    finally:
        with trio.move_on_after(_FLUSH_SECONDS, shield=True) as scope:
            await trio.to_thread.run_sync(export.close, abandon_on_cancel=True)
        if scope.cancelled_caught:
            log.warning("trace export timed out", seconds=_FLUSH_SECONDS)


async def _opentelemetry() -> Any:
    try:
        return await import_aside(_OTEL)
    except ImportError as error:
        log.warning(
            "tracing disabled: OpenTelemetry not installed", reason=str(error), install=install_command(Extra.OTEL)
        )
        return None


def _is_failure(error: BaseException) -> bool:
    # Imported late, so that gRPC is imported during the first loads and not before.
    from ovmstrio.transport.statuses import error_status  # noqa: PLC0415 - as said

    return not isinstance(error, ServerError) or error_status(error).http >= _SERVER_ERROR


def _has_user_code(kind: str) -> bool:
    known = KINDS.get(kind)
    return known is None or known.runs_user_code


# Server

_ABANDONED_LOADS_SECONDS: Final = 5.0
_POLL_SECONDS: Final = 1.0
"""Poll interval for credentials and certificates if file polling is disabled."""


class FrontEnd(Protocol):
    """Connections of one protocol."""

    @property
    def open_connections(self) -> int:
        """Number of open connections."""

    async def serve_listeners(
        self, listeners: list[Listener], *, task_status: trio.TaskStatus[list[str]] = ...
    ) -> None:
        """Serve until drained or cancelled; reports the bound addresses once connections are accepted."""

    def begin_drain(self) -> None:
        """Ask clients in responses to use another server; everything is still served."""

    async def drain(self, grace_seconds: float) -> int:
        """Close the listeners, wait for running calls, cancel the rest and return their number."""


async def serve(
    settings: ServerSettings | str | os.PathLike[str],
    *,
    kinds: Kinds = KINDS,
    handle_signals: bool = True,
    task_status: trio.TaskStatus[Running] = trio.TASK_STATUS_IGNORED,
) -> bool:
    """Run one server until a signal or cancellation; return whether it drained cleanly.

    Reports a :class:`Running` once connections are accepted, before models are loaded.

    Args:
        settings: the settings, or a path: what ``ovms serve PATH`` takes. ``settings_of(path, rest_port=8001)`` are
            the settings of a path.
        kinds: service kinds that ``config.json`` may list; ``{**KINDS, **table_of(Own())}`` adds one.
        handle_signals: whether the first SIGINT or SIGTERM drains and the second stops at once; main thread only.
        task_status: for ``nursery.start``.

    Raises:
        ConfigError: the configuration file is unusable, or the settings request several workers.
        OSError: an address cannot be bound, or a certificate cannot be read.

    Errors after the start are in an exception group.

    Cancellation: no drain; models are unloaded, for a bounded time.
    """
    if isinstance(settings, str | os.PathLike):
        settings = await trio.to_thread.run_sync(settings_of, settings)
    if settings.workers > 1:
        text = "an embedded server cannot have several workers"
        raise ConfigError([Problem(text, path="--workers", suggestion="use `ovms serve`")])
    plan = await read_plan(settings, kinds)
    return await serve_plan(plan, handle_signals=handle_signals, task_status=task_status)


async def serve_plan(
    plan: Plan,
    worker_context: WorkerProcessContext | None = None,
    *,
    handle_signals: bool = True,
    restart: InPlaceRestart | None = None,
    task_status: trio.TaskStatus[Running] = trio.TASK_STATUS_IGNORED,
) -> bool:
    """Run the server of a plan, as :func:`serve`; a service at the root is loaded before the start is reported.

    A ``restart`` is requested by SIGHUP, and its caller makes it; SIGUSR1 then opens log files again.

    Raises:
        ConfigError: the service at the root cannot be loaded, or as :func:`serve`.
    """
    counters = None if worker_context is None else worker_context.counters
    limit = plan.settings.trace_failures_per_second
    async with WRITER.in_thread(), trace_calls(is_watched=_has_console(plan), failures_per_second=limit) as traces:
        access = await open_credentials(plan.settings, counters, traces.start_root_span)
        with open_access_log(plan.settings.access_log) as lines:
            every = replace(traces, requests=(*traces.requests, *lines))
            server = _Server(plan, worker_context or WorkerProcessContext(), access, every, restart)
            try:
                await server.live(worker_context, handle_signals=handle_signals, task_status=task_status)
            finally:
                await _wait_for_abandoned_loads()
    return server.ended_gently


async def _wait_for_abandoned_loads() -> None:
    """Wait for the threads of cancelled loads and imports, as the exit of the interpreter under native code crashes."""
    with trio.move_on_after(_ABANDONED_LOADS_SECONDS, shield=True):
        for limiter in (import_limiter(), load_limiter()):
            with ExitStack() as acquired:
                for _ in range(int(limiter.total_tokens)):
                    borrower = object()
                    await limiter.acquire_on_behalf_of(borrower)
                    acquired.callback(limiter.release_on_behalf_of, borrower)


class _Server:
    """Parts of one server.

    Attributes:
        ended_gently: whether the server drained without cancelled calls or lost sequences, or was stopped before it
            served.
    """

    def __init__(
        self,
        plan: Plan,
        worker_context: WorkerProcessContext,
        access: CredentialStore | None,
        traces: ServerTraces,
        restart: InPlaceRestart | None,
    ) -> None:
        self._plan = plan
        self._settings = plan.settings
        self._hosting = worker_context
        self._restart = restart
        self._listening: dict[str, tuple[Sequence[str], list[Listener]]] = {}
        self._started = perf_counter()
        self.ended_gently = False
        self._drained = trio.Event()
        self._access = access
        self._certificates = Certificates(plan.settings)
        self._metrics = _metrics_of(plan)
        self._history = RecentHistory(plan.settings.console_body_bytes) if _has_console(plan) else None
        self._registry = self._make_registry(traces.start_root_span)
        if restart is not None and restart.expected is not None:
            self._registry.expect(restart.expected)
        self._admission = self._make_admission()
        self._control = self._make_control()
        self._source = self._make_source()
        self._reloading = Reloader(self._source, self._registry, plan.notifier, worker_context.peers)
        if self._source is not None:
            self._registry.on_poll(self._reloading.poll)
        gate = None if access is None else access.gate
        if self._metrics is not None:
            self._metrics.expose_resources(current_resource_registry(), _iterations_reader(current_loop_utilization()))
            self._show_states(self._metrics)
            self._registry.subscribe(partial(remove_ended_metrics, self._metrics, self._registry))
            if gate is not None:
                gate.refused = self._metrics.refused
        self._plane = self._make_plane(traces, gate)
        self._request_observer = observer_group(
            (*traces.requests, *(() if self._history is None else self._history.requests))
        )
        self._readiness = ReadinessFile(plan.readiness_file)
        self._pending = make_send_budgets(plan.settings, plan.processes if worker_context.is_multi_worker else 1)
        self._front_ends: dict[str, FrontEnd] = {}
        self._store: SequenceStore | None = None
        self._is_serving = False
        self._is_draining = False

    def _make_plane(self, traces: ServerTraces, gate: Gate | None) -> DataPlane:
        context, settings = self._hosting, self._settings
        guards_calls = gate is not None and gate.guards_everything
        plane = (AuthorizingDataPlane if guards_calls else DataPlane)(
            self._registry,
            reload=self._reloading.reload,
            observers=(
                *((CallerRecorder(),) if gate is not None else ()),
                *context.observers,
                RequestLog(),
                *(() if self._history is None else (self._history.failures,)),
                # Last, as earlier observers need the span of the finished call.
                *traces.calls,
            ),
            metrics=self._metrics,
            unready_reason=context.unready_reason,
            max_response_bytes=settings.max_message_size,
            admission=self._admission,
            regions=ClientRegions(is_allowed=settings.allow_shared_memory),
            control=self._control,
            server_name=settings.server_name,
            traces=traces.recent,
        )
        if gate is not None:
            gate.denials = plane.denials
        plane.peers = context.peers
        plane.workers_reason = self._plan.workers_reason
        return plane

    def _show_states(self, metrics: Metrics) -> None:
        metrics.register_gauge(
            "ovmstrio_service_state", lambda: {_state_row(each): 1 for each in self._registry.current_states()}
        )
        metrics.register_gauge("ovmstrio_certificate_expiry_timestamp_seconds", self._certificates.expiry_times)
        metrics.register_gauge("ovmstrio_worker_deaths", lambda: {(): self._hosting.worker_deaths()})
        if (source := self._source) is not None:
            metrics.register_gauge(
                "ovmstrio_config_reloads", lambda: {(name,): count for name, count in source.reloads.items()}
            )
            metrics.register_gauge(
                "ovmstrio_config_last_reload_success_timestamp_seconds",
                lambda: {(): source.last_success} if source.last_success else {},
            )

    def _make_admission(self) -> Admission:
        settings = self._settings
        limit = Limit(settings.max_concurrency, settings.max_queue, settings.max_queue_time)
        if self._hosting.counters is None:
            return Admission(limit, self._registry.limit_of)
        return SharedAdmission(self._hosting.counters, limit, self._registry.limit_of)

    def _make_registry(self, start_root_span: StartRootSpan | None) -> Registry:
        settings = self._settings
        make_context = partial(
            self._make_load_context,
            meters=NULL_METERS if self._metrics is None else self._metrics,
            hide_errors=settings.hide_errors,
            isolates_python=settings.python_isolation == "process",
            python_memory_limit=settings.python_memory_limit,
            isolates_nodes=settings.custom_node_isolation == "process",
            is_alone=bool(self._plan.root),
            text_api=_text_api,
            start_root_span=start_root_span,
            queue_timeout=settings.queue_timeout,
            max_queue_time=settings.max_queue_time,
            media=MediaPolicy(
                tuple(filter(None, map(str.strip, (settings.allowed_media_domains or "").split(",")))),
                settings.allowed_local_media_path,
            ),
        )
        return Registry(
            self._plan.kinds,
            make_context,
            # Explicit model control never loads by itself.
            poll_seconds=0 if self._is_explicit else settings.file_system_poll_wait_seconds,
            ready_requires=settings.ready_requires,
            ready_when_empty=settings.allow_empty or self._is_explicit,
            store_poll_seconds=0 if self._is_explicit else settings.store_poll_seconds,
            download_cache_bytes=settings.download_cache_gb * 1e9 or math.inf,
        )

    @property
    def _is_explicit(self) -> bool:
        return self._settings.model_control == "explicit"

    def _make_control(self) -> ModelControl | None:
        if not self._is_explicit:
            return None
        first = [name.strip() for name in (self._settings.load_model or "").split(",") if name.strip()]
        return ModelControl(
            self._registry,
            cache_dir=cache_directory(self._settings),
            initial_names=first,
            can_undo=self._hosting.is_multi_worker,
        )

    def _make_load_context(self, lease: ServableLookup, tasks: trio.Nursery, **dependencies: Any) -> LoadContext:
        return self._hosting.make_load_context(self._admission.around(lease), tasks, **dependencies)

    def _make_source(self) -> ConfigSource | None:
        path = with_local_copies(self._settings).config_path
        if path is None:
            return None
        if self._config_address is not None:
            self._registry.mirrors.add(self._config_address)
        return ConfigSource(path, self._registry, self._parse, self._apply, ConfigReader())

    def _parse(self, content: bytes, path: Path) -> ServerSpec:
        cache, address = cache_directory(self._settings), self._config_address
        return parse_config(self._plan.kinds.values(), content, path, cache_dir=cache, address=address)

    @property
    def _config_address(self) -> Address | None:
        return addresses_of(self._settings).get("config_path")

    @property
    def _apply(self) -> ApplySpecs:
        return self._registry.apply if self._control is None else self._control.apply

    async def _import_for_loads(self) -> None:
        """Import what loading needs first, so that OpenVINO compiles while the rest is imported.

        Import errors are reported by the load that needs the module.
        """
        for module in {self._plan.kinds[spec.kind].loads_with for spec in self._plan.spec.services} - {""}:
            with suppress(Exception):
                await import_aside(module)

    async def _make_front_ends(self) -> dict[str, FrontEnd]:
        """Create the front ends; their imports follow those of :meth:`_import_for_loads`."""
        await self._import_for_loads()
        made = await import_aside("ovmstrio.server.front_ends")
        plan, plane, gate = self._plan, self._plane, None if self._access is None else self._access.gate
        front_ends: dict[str, FrontEnd] = {}
        if plan.grpc:
            front_ends["gRPC"] = made.grpc_front_end(plane, plan, self._pending, gate, self._request_observer)
        if plan.rest:
            front_ends["REST"] = made.rest_front_end(
                plane, plan, self._pending, gate, history=self._history, observer=self._request_observer
            )
        if plan.metrics:
            front_ends["metrics"] = made.metrics_front_end(plane, gate)
        if self._settings.probe_port:
            front_ends["probes"] = made.probe_front_end(plane)
        return front_ends

    def _count_connections(self) -> None:
        for name, front_end in self._front_ends.items():
            if self._metrics is not None and name in ("gRPC", "REST"):
                gauge = self._metrics.child("ovmstrio_connections", name)
                gauge.set_function(partial(getattr, front_end, "open_connections"))

    async def live(
        self,
        worker_context: WorkerProcessContext | None,
        *,
        handle_signals: bool,
        task_status: trio.TaskStatus[Running],
    ) -> None:
        async with trio.open_nursery() as nursery:
            if handle_signals:
                end = partial(self.end, nursery.cancel_scope)
                await nursery.start(handle_stop_signals, end, nursery.cancel_scope)
                if self._restart is not None:
                    await nursery.start(handle_restart_signals, partial(self.end_and_restart, self._restart))
                    await nursery.start(handle_reopen_signals)
            if worker_context is not None and worker_context.wait_drain is not None:
                nursery.start_soon(self.end_when, worker_context.wait_drain, nursery.cancel_scope)
            if worker_context is not None and worker_context.wait_drain_warning is not None:
                nursery.start_soon(self.begin_drain_when, worker_context.wait_drain_warning)
            with log_prints():
                await self.run(task_status)
            nursery.cancel_scope.cancel()

    async def run(self, task_status: trio.TaskStatus[Running]) -> None:
        """Serve until drained."""
        log_tail = nullcontext() if self._history is None else self._history.log.listening()
        kept_gb = 0.0 if cache_directory(self._settings) is not None else self._settings.compile_cache_gb
        keeping = open_blob_cache(default_cache_folder(), int(kept_gb * 10**9))
        with (
            self._locked_store(),
            self._control or nullcontext(),
            log_tail,
            keeping as blobs,
        ):
            await self._serve(blobs, task_status)

    def _locked_store(self) -> AbstractContextManager[None]:
        """Lock the sequence store; a server with a service at the root has none."""
        folder = self._settings.sequence_store
        if folder is None or self._plan.root:
            return nullcontext()
        if not self._hosting.is_multi_worker:
            check_worker_count(folder, 1)
        return lock_folder(folder, str(self._settings.config_path or self._settings.model_name or "nothing"))

    async def _serve(self, blobs: BlobCache | None, task_status: trio.TaskStatus[Running]) -> None:
        async with trio.open_nursery() as nursery:
            trials = verdicts_folder(self._settings.cache_dir)
            with open_crash_probe(nursery, self._settings.crash_probe, trials) as probe:
                await nursery.start(self._registry.run)
            self._registry.context.share(probe, blobs)
            await nursery.start(recompile_models, self._settings.cpu_pinning)
            await nursery.start(watch_overdue)
            if self._plan.root:
                await self._load_root()
            nursery.start_soon(self._pending.watch)
            nursery.start_soon(FAILURE_LINES.run, self._settings.log_failures_per_second)
            nursery.start_soon(self._plane.denials.log_repetitions)
            nursery.start_soon(self._admission.follow_others)
            if self._hosting.serve_peers is not None:
                await nursery.start(self._hosting.serve_peers, self._plane, self._reloading)
            pause = self._settings.file_system_poll_wait_seconds or _POLL_SECONDS
            if self._access is not None or self._settings.tls_cert is not None:
                nursery.start_soon(partial(PeriodicCheck(self._reload_changed_files, pause).run, pauses_first=True))
            async with AsyncExitStack() as opened:
                listeners = await self._listen(opened)
                if not self._plan.root:
                    self._begin_loading(nursery)
                self._front_ends = await self._make_front_ends()
                self._count_connections()
                if self._history is not None and self._history.sample is not None:
                    nursery.start_soon(self._history.sample)
                addresses = {
                    name: await nursery.start(front_end.serve_listeners, listeners[name])
                    for name, front_end in self._front_ends.items()
                }
                running = self._begin(nursery, addresses)
                with self._plan.while_serving(running):
                    if not self._hosting.is_multi_worker:
                        seconds = round(running.seconds, 3)
                        log.info("serving", name=self._plan.root, grpc=running.grpc, rest=running.rest, seconds=seconds)
                    task_status.started(running)
                    await self._drained.wait()
            nursery.cancel_scope.cancel()

    async def _reload_changed_files(self) -> bool:
        for look in (self._certificates.look, *self._hosting.watches):
            await look()
        return self._access is None or await self._access.look()

    async def _load_root(self) -> None:
        await self._registry.apply(self._plan.spec.services)
        errors = [problem for problem in self._registry.findings() if problem.severity == "error"]
        if errors:
            raise ConfigError(errors)

    async def _listen(self, opened: AsyncExitStack) -> dict[str, list[Listener]]:
        listeners: dict[str, list[Listener]] = {}
        plan, given = self._plan, self._hosting.listeners
        for name, where, protocol in (
            ("gRPC", plan.grpc, HTTP2),
            ("REST", plan.rest, HTTP),
            ("metrics", plan.metrics, HTTP),
            ("probes", tuple(probe_addresses(self._settings)), HTTP),
        ):
            if not where:
                continue
            if given is None:
                is_plain = name == "probes"
                tls = None if is_plain else await trio.to_thread.run_sync(self._certificates.tls, protocol)
                places = where if self._restart is None else self._restart.sockets(name, where)
                opening = open_server_listeners(places, tls, "--probe-port" if is_plain else plan.port_options)
                listeners[name] = await opened.enter_async_context(opening)
                self._listening[name] = where, listeners[name]
            else:
                listeners[name] = list(given[name])
        return listeners

    def _begin_loading(self, nursery: trio.Nursery) -> None:
        """Start the first load, which runs while the front ends are created."""
        if self._settings.sequence_store is not None:
            sequences = self._registry.context.shared(SequenceManagers)
            self._store = SequenceStore(
                sequences,
                self._settings.sequence_store,
                self._settings.sequence_flush_seconds,
                is_strict=self._settings.sequence_restore == "strict",
            )
            nursery.start_soon(self._store.run)
        nursery.start_soon(self._first_load)

    def _begin(self, nursery: trio.Nursery, addresses: dict[str, list[str]]) -> Running:
        plane = self._plane
        plane.begin_serving()
        self._readiness.show(ready=plane.readiness().ready)
        nursery.start_soon(self._readiness.follow, plane)
        nursery.start_soon(self._plan.notifier.follow, plane.readiness, plane.wait_change)
        nursery.start_soon(self._plan.notifier.show_life)
        sequences = self._registry.context.shared(SequenceManagers)
        if self._metrics is not None:
            self._metrics.register_gauge(
                "ovmstrio_sequences", lambda: {(each.name, str(each.version)): len(each) for each in sequences}
            )
        nursery.start_soon(clean_sequences, sequences, self._settings.sequence_cleaner_poll_wait_minutes)
        self._is_serving = True
        grpc, rest, metrics, probes = (addresses.get(name, []) for name in ("gRPC", "REST", "metrics", "probes"))
        for protocol, bound in (("grpc", grpc), ("rest", rest)):
            ports = [each.rpartition(":")[2] for each in bound if not each.startswith("unix:")]
            # A listener in memory has no port.
            plane.ports |= {protocol: int(ports[0])} if ports and ports[0].isdecimal() else {}
        return Running(plane, grpc, rest, metrics, self._started, probes)

    async def _first_load(self) -> None:
        """Load the configuration; failures are states of the registry and do not stop the server."""
        if self._store is not None:
            await self._store.restore()
        await sync_regions(self._plane)
        await sync_loaded_models(self._plane)
        await sync_expected_services(self._plane)
        try:
            if self._source is not None:
                await self._source.reload(force=True)
            else:
                await self._apply(self._plan.spec.services)
        except ServerError as error:
            log.error("initial load failed", reason=error.message)  # noqa: TRY400 - an expected error
        if self._control is not None:
            await self._control.load_adopted()

    async def end(self, everything: trio.CancelScope) -> None:
        """Drain the server once; before it serves, cancel ``everything``.

        Does not return after a drain: a second signal must still stop the server while services are closed.
        """
        if not self._is_serving:
            self.ended_gently = True
            everything.cancel()
            return
        if self._restart is not None:
            self._restart.cancel()
        await self._end()

    async def _end(self) -> None:
        if not self._is_draining:
            self._is_draining = True
            await self._drain()
            self._drained.set()
        await trio.sleep_forever()

    async def end_and_restart(self, restart: InPlaceRestart) -> None:
        """Drain the server and request its restart; nothing with an invalid configuration."""
        if not self._is_serving:
            log.warning("rolling restart aborted", reason="the server is starting")
            return
        try:
            await check_again(self._plan)
        except ConfigError as error:
            log.error("rolling restart aborted", reason=error.message)  # noqa: TRY400 - an expected error
            return
        if not self._is_draining:
            restart.request(self._listening, self._registry.expected_services())
            SHUTDOWN_WATCHDOG.start()
            await self._end()

    async def end_when(self, wait_drain: Callable[[], Awaitable[None]], everything: trio.CancelScope) -> None:
        await wait_drain()
        await self.end(everything)

    async def begin_drain_when(self, wait_drain_warning: Callable[[], Awaitable[None]]) -> None:
        await wait_drain_warning()
        self._begin_drain()

    def _begin_drain(self) -> None:
        is_in_place = self._restart is not None and self._restart.is_requested
        (self._plan.notifier.restart if is_in_place else self._plan.notifier.stop)()
        is_restart = is_in_place or self._hosting.is_restart()
        self._plane.begin_drain(is_restart=is_restart)
        if not is_restart:
            self._registry.begin_drain()
        for front_end in self._front_ends.values():
            front_end.begin_drain()

    async def _drain(self) -> None:
        """Drain: not ready, delay, close listeners, wait for calls, save sequences."""
        self._begin_drain()
        if self._restart is None or not self._restart.is_requested:
            await trio.sleep(self._settings.drain_delay)
        cut = 0

        async def drain(front_end: FrontEnd) -> None:
            nonlocal cut
            cut += await front_end.drain(self._settings.drain_seconds)

        async with trio.open_nursery() as nursery:
            for front_end in self._front_ends.values():
                nursery.start_soon(drain, front_end)
        if cut:
            log.warning("requests cut", count=cut, drain_seconds=self._settings.drain_seconds)
        elif not self._hosting.is_multi_worker:
            log.info("drained")
        if self._hosting.leave is not None:
            await self._hosting.leave()
        saved = self._store is None or await self._store.save_at_end()
        self.ended_gently = saved and not cut


def remove_ended_metrics(metrics: Metrics, registry: Registry, status: VersionStatus) -> None:
    """Remove the gauges of an unloaded version, and those of its service if that was removed."""
    if status.state is VersionState.END:
        metrics.retired(status.name, str(status.version))
        if registry.is_removed(status.name):
            metrics.removed(status.name)


def _state_row(status: VersionStatus) -> tuple[str, ...]:
    """Return name, version and state; ``failed`` if nothing is served because of an error."""
    is_failed = status.error_code != OK and status.state is not VersionState.AVAILABLE
    return status.name, str(status.version or ""), "failed" if is_failed else status.state.name.lower()


def _iterations_reader(load: LoopUtilization) -> Callable[[], tuple[Sequence[int], float]]:
    return lambda: (tuple(load.iterations), load.iteration_seconds)


def _has_console(plan: Plan) -> bool:
    return plan.settings.console != "off" and bool(plan.rest)


def _metrics_of(plan: Plan) -> Metrics | None:
    configured, has_vllm_names = plan.spec.metrics, plan.settings.llm_metrics == "vllm"
    if configured is not None:
        return Metrics(configured.families, vllm_names=has_vllm_names) if configured.enable else None
    if not plan.settings.metrics_enable:
        return None
    return Metrics(*metric_families(plan.settings), vllm_names=has_vllm_names)


def _text_api() -> TextApiAdapter:
    """Create the adapter for text nodes of graphs; imported only if needed."""
    from ovmstrio.protocols.graph_text_api import GraphTextApi  # noqa: PLC0415 - imports take long while servers start

    return GraphTextApi()
