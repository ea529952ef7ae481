"""One server from its start to its end, whatever it serves.

::

    serve ── log writer          a thread that writes lines, flushed at the end
          ├─ traces              threads that export them, where there are any, flushed likewise
          ├─ signals             the first drains, the second stops at once
          └─ server
             ├─ watcher          of the files of callers and certificates
          ├─ trials           a process each, of models that were never seen to run
             ├─ registry         loads, retirements, the watcher
             │  └─ services      what each runs besides its calls; outlives them
             ├─ pending answers  clients that take none are looked for
             ├─ gRPC             a nursery a connection, a task an RPC that waits
             ├─ HTTP             a nursery a connection
             ├─ first load       of what is configured, behind the sequences of an earlier run; begins before the others
             ├─ sequence cleaner removes what nobody goes on with
             └─ readiness file, and news for a service manager
"""

from __future__ import annotations

import math
import os
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol
from weakref import WeakSet

import structlog
import trio

from ovmstrio.auth.revocable_streams import long_requests
from ovmstrio.config.config_file import parse_config
from ovmstrio.core.errors import ConfigError, Problem, ServerError
from ovmstrio.core.events import all_of
from ovmstrio.core.hooks import NULL_METERS
from ovmstrio.core.limits import Limit
from ovmstrio.core.resource_registry import current_census
from ovmstrio.core.tracing import spans_of_server
from ovmstrio.inference.blob_cache import compiled_folder, keeping_compiled_files
from ovmstrio.inference.crash_probe import trials_folder, trying_models
from ovmstrio.isolation.printing import prints_logged
from ovmstrio.models.sequences import SequenceManagers
from ovmstrio.models.sequences.manager import clean_sequences
from ovmstrio.models.sequences.store import SequenceStore, check_store, locked_folder
from ovmstrio.server.access import Access, open_access
from ovmstrio.server.command_line import cache_directory, metric_families, probe_addresses
from ovmstrio.server.kinds import KINDS, Kinds
from ovmstrio.server.listening import HTTP, HTTP2, Certificates, open_noted_listeners
from ovmstrio.server.memory_limit import memory_limit, pending_answers
from ovmstrio.server.plan import Plan, read_plan
from ovmstrio.server.readiness_file import ReadinessFile
from ovmstrio.server.reloading import Reloading
from ovmstrio.server.signals import obey_signals
from ovmstrio.server.worker_context import Hosting
from ovmstrio.serving.admission import Admission
from ovmstrio.serving.authorization import CallerNames, GuardedPlane
from ovmstrio.serving.broadcast_changes import adopt_loads, adopt_regions
from ovmstrio.serving.data_plane import DataPlane
from ovmstrio.serving.file_watcher import FileWatcher
from ovmstrio.serving.kind import LoadContext
from ovmstrio.serving.model_control import ModelControl
from ovmstrio.serving.records import VersionState
from ovmstrio.serving.registry import Registry
from ovmstrio.serving.shared_admission import SharedAdmission
from ovmstrio.serving.shared_memory import ClientRegions
from ovmstrio.serving.source import ApplySpecs, ConfigSource
from ovmstrio.telemetry.access_log import RequestLog, open_access_log
from ovmstrio.telemetry.call_tracing import CallTracing, WatchedCalls
from ovmstrio.telemetry.denied_admin_log import bounded_refusals
from ovmstrio.telemetry.log_writer import WRITER
from ovmstrio.telemetry.loop_load import LoopLoad, current_loop_load
from ovmstrio.telemetry.metrics import Metrics
from ovmstrio.telemetry.process_metrics import resident_bytes
from ovmstrio.telemetry.recent_history import RecentPast
from ovmstrio.telemetry.recent_traces import RecentTraces
from ovmstrio.telemetry.spans import ALWAYS, asks_for_traces, sampling_of, unrecorded_spans, warn_of_propagators
from ovmstrio.util.cores import CORES
from ovmstrio.util.deadline_sweeper import watch_overdue
from ovmstrio.util.extras import Extra, way_to_install
from ovmstrio.util.lazy_import import import_aside

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from ovmstrio.config.specs import ServerSpec
    from ovmstrio.core.events import CallObserver, RequestObserver
    from ovmstrio.core.service import LeaseServable, TextApi
    from ovmstrio.server.settings import ServerSettings
    from ovmstrio.serving.records import VersionStatus
    from ovmstrio.telemetry.log_rate_limit import RepeatedFaults
    from ovmstrio.transport.listeners import Listener
    from ovmstrio.util.cores import CoreShare, CoreUser

__all__ = [
    "FrontEnd",
    "Hosting",
    "Running",
    "ServerTraces",
    "Sharing",
    "open_traces",
    "serve",
    "serve_plan",
    "share_cores",
]

# ----------------------------------------------------------------------
# A server that runs, as whoever started it sees it
# ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Running:
    """A server that accepts connections, as it is reported to whoever started it.

    Attributes:
        plane: through which every call goes.
        grpc: the addresses that gRPC is at, as ``host:port`` or ``unix:/path``.
        rest: those of HTTP.
        metrics: those for scrapers alone.
        started: when the server was, on the clock of ``time.perf_counter``.
        probes: the addresses for probes of its health alone.
    """

    plane: DataPlane
    grpc: list[str]
    rest: list[str]
    metrics: list[str]
    started: float
    probes: Sequence[str] = ()

    @property
    def seconds(self) -> float:
        """How long the server has been running."""
        return perf_counter() - self.started

    async def wait_loaded(self) -> None:
        """Return once everything that is configured was loaded or has failed to.

        Cancellation: at once; nothing is held.
        """
        await self.plane.registry.wait_loaded()


# ----------------------------------------------------------------------
# Which models have their threads bound to cores, chosen again as models come and go
# ----------------------------------------------------------------------

log = structlog.get_logger(__name__)

Sharing = Literal["auto", "off"]

_LOOK_SECONDS: Final = 5.0
_SHARED_SECONDS: Final = 10.0
"""How long several have to be there before one that had the cores for itself is compiled again."""
_ALONE_SECONDS: Final = 120.0
"""How long one has to be alone before it has them for itself again: others may come back, and it loses little."""
_COPIES: Final = 2
"""As how many times its weights a model is taken to need beside what it has while it is compiled again."""


def _room() -> float:
    """Tell how many bytes of memory this process may have beside what it has."""
    return (memory_limit() or math.inf) - resident_bytes()


async def share_cores(
    sharing: Sharing,
    cores: CoreShare = CORES,
    *,
    room: Callable[[], float] = _room,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Have models choose their cores again when others have come or gone for good, or their calls want them shared out.

    This takes as long as the server lives.  One is compiled at a time, and for others that come or go each once for a
    change; one for which there is no ``room``, in bytes, stays as it is.  With ``off`` nothing is chosen, now or later.

    Cancellation: at once; the model that is being compiled stays as it is.
    """
    cores.chooses = sharing == "auto"
    task_status.started()
    is_shared, since = cores.is_shared, trio.current_time()
    asked: WeakSet[CoreUser] = WeakSet()
    cramped: WeakSet[CoreUser] = WeakSet()
    while cores.chooses:
        await trio.sleep(_LOOK_SECONDS)
        if cores.is_shared != is_shared:
            is_shared, since = cores.is_shared, trio.current_time()
            asked.clear()
        # Models that are retired meanwhile must neither stay in memory nor count as ones that compute.
        wanting = WeakSet([each for each in cores.users if each.wants_others()])
        wanting -= cramped
        while wanting:
            await _choose_cores(wanting.pop(), room, cramped)
        if trio.current_time() - since >= (_SHARED_SECONDS if is_shared else _ALONE_SECONDS):
            while (user := _next_user(cores, asked)) is not None and cores.is_shared is is_shared:
                asked.add(user)
                await _choose_cores(user, room, cramped)
            del user


async def _choose_cores(user: CoreUser, room: Callable[[], float], cramped: WeakSet[CoreUser]) -> None:
    if _COPIES * user.weight_bytes <= room():
        await user.choose_cores()
    else:
        cramped.add(user)
        log.info("a model keeps its cores: there is no memory for it twice", weights=user.weight_bytes)


def _next_user(cores: CoreShare, asked: WeakSet[CoreUser]) -> CoreUser | None:
    """Find somebody whose threads are bound and should not be, or the other way round, and who was not asked."""
    is_shared = cores.is_shared
    return next((each for each in cores.users if each.is_pinned is is_shared and each not in asked), None)


# ----------------------------------------------------------------------
# The traces of one server: recorded while it runs, exported where the environment says so, and flushed at its end
# ----------------------------------------------------------------------

_OTEL: Final = "ovmstrio.telemetry.otel"
_FLUSH_SECONDS: Final = 5.0
_SERVERS_FAULT: Final = 500


@dataclass(frozen=True, slots=True)
class ServerTraces:
    """What a server has of traces.

    Attributes:
        recent: the last ones; None where none are kept.
        calls: is told of calls.
        requests: is told of requests.
    """

    recent: RecentTraces | None = None
    calls: tuple[CallObserver, ...] = ()
    requests: tuple[RequestObserver, ...] = ()


@asynccontextmanager
async def open_traces(*, is_watched: bool = False) -> AsyncIterator[ServerTraces]:
    """Have calls be traced within the block, if the environment asks for it by OpenTelemetry's variables.

    Args:
        is_watched: whether somebody may look at recent traces, so that some calls are recorded meanwhile in any case.

    Ownership: exporters and their threads, until the block is left.
    Cancellation: what has been recorded is exported all the same, with a bound of some seconds.
    """
    otel = await _opentelemetry() if asks_for_traces(os.environ) else None
    recent = RecentTraces()
    if otel is None:
        if not is_watched:
            yield ServerTraces()
            return
        # Nobody is told of requests meanwhile, as that would cost something of each.
        tracing = CallTracing(ALWAYS, [recent], is_failure=_is_failure, is_told_of_requests=False)
        yield ServerTraces(recent, (WatchedCalls(tracing, recent),))
        return
    warn_of_propagators(os.environ)
    export = await trio.to_thread.run_sync(otel.Export, os.environ, recent)
    tracing = CallTracing(
        sampling_of(os.environ),
        [recent, export],
        is_failure=_is_failure,
        of_server=[export],
        user=otel.UserSpans(),
        has_user_code=_has_user_code,
    )
    before, quiet_before = spans_of_server.set(tracing.of_server), unrecorded_spans.set(tracing.unrecorded_span)
    try:
        yield ServerTraces(recent, (tracing,), (tracing,))
    finally:
        unrecorded_spans.reset(quiet_before)
        spans_of_server.reset(before)
        with trio.move_on_after(_FLUSH_SECONDS, shield=True) as scope:
            await trio.to_thread.run_sync(export.close, abandon_on_cancel=True)
        if scope.cancelled_caught:
            log.warning("traces could not be exported in time", seconds=_FLUSH_SECONDS)


async def _opentelemetry() -> Any:
    try:
        return await import_aside(_OTEL)
    except ImportError as error:
        log.warning(
            "OTEL_ variables ask for traces, and OpenTelemetry is not installed: there are none",
            reason=str(error),
            install=way_to_install(Extra.OTEL),
        )
        return None


def _is_failure(error: BaseException) -> bool:
    # What speaks gRPC is imported beside the first loads, and not before them.
    from ovmstrio.transport.statuses import status_of  # noqa: PLC0415 - as said

    return not isinstance(error, ServerError) or status_of(error).http >= _SERVERS_FAULT


def _has_user_code(kind: str) -> bool:
    known = KINDS.get(kind)
    return known is None or known.runs_user_code


# ----------------------------------------------------------------------
# One server from its start to its end, whatever it serves
# ----------------------------------------------------------------------

_POLL_SECONDS: Final = 1.0
"""How often the files of callers and certificates are looked at where no others are."""


class FrontEnd(Protocol):
    """The connections of one protocol."""

    @property
    def open_connections(self) -> int:
        """Count the connections that are open."""
        ...

    async def serve_listeners(
        self, listeners: list[Listener], *, task_status: trio.TaskStatus[list[str]] = ...
    ) -> None:
        """Serve until drained or cancelled; reports the bound addresses once connections are accepted."""
        ...

    def begin_drain(self) -> None:
        """Let clients know by answers that they had better come to another server; everything is still served."""
        ...

    async def drain(self, grace_seconds: float) -> int:
        """Close listeners, let calls in flight finish within the grace, end the rest and tell how many those were."""
        ...


async def serve(
    settings: ServerSettings,
    *,
    kinds: Kinds = KINDS,
    handle_signals: bool = True,
    task_status: trio.TaskStatus[Running] = trio.TASK_STATUS_IGNORED,
) -> bool:
    """Run one server until a signal or its caller ends it; True if it ended gently.

    Reports a :class:`Running` once connections are accepted, which is before models are loaded.

    Args:
        settings: what is served, and where.
        kinds: the kinds of services that ``config.json`` may list; ``{**KINDS, **table_of(Own())}`` adds one.
        handle_signals: the first SIGINT or SIGTERM drains, the second stops at once; only in the main thread.
        task_status: for ``nursery.start``.

    Raises:
        ConfigError: the configuration file cannot be used at all, or the settings ask for several processes.
        OSError: an address cannot be bound, or a certificate cannot be read.

    Those that come once the server's nursery is open are in an exception group.

    Ownership: everything that the server opens is closed when this returns.

    Cancellation: ends everything at once, without drain; models are still unloaded, with a bound.
    """
    if settings.workers > 1:
        text = "a server in a program of yours is one process"
        raise ConfigError([Problem(text, path="--workers", suggestion="run `ovms serve` for several")])
    plan = await read_plan(settings, kinds)
    return await serve_plan(plan, handle_signals=handle_signals, task_status=task_status)


async def serve_plan(
    plan: Plan,
    hosting: Hosting | None = None,
    *,
    handle_signals: bool = True,
    task_status: trio.TaskStatus[Running] = trio.TASK_STATUS_IGNORED,
) -> bool:
    """Run the server of a plan; as :func:`serve`.  What has its paths at the root is loaded before this reports.

    Raises:
        ConfigError: what has its paths at the root cannot be loaded, or as :func:`serve`.
    """
    ledger = None if hosting is None else hosting.ledger
    access = await open_access(plan.settings, ledger)
    async with WRITER.in_thread(), open_traces(is_watched=_has_console(plan)) as traces:
        with open_access_log(plan.settings.access_log) as lines:
            server = _Server(plan, hosting or Hosting(), access, replace(traces, requests=(*traces.requests, *lines)))
            await server.live(hosting, handle_signals=handle_signals, task_status=task_status)
    return server.ended_gently


class _Server:
    """The parts of one server, wired to each other.

    Attributes:
        ended_gently: whether it was told to end, cut nothing off and lost no sequence; one that was told before it
            served did.
    """

    def __init__(self, plan: Plan, hosting: Hosting, access: Access | None, traces: ServerTraces) -> None:
        self._plan = plan
        self._settings = plan.settings
        self._hosting = hosting
        self._started = perf_counter()
        self.ended_gently = False
        self._drained = trio.Event()
        self._access = access
        self._certificates = Certificates(plan.settings)
        self._metrics = _metrics_of(plan)
        self._past = RecentPast(plan.settings.console_bodies) if _has_console(plan) else None
        self._registry = self._make_registry()
        self._admission = self._make_admission()
        self._control = self._make_control()
        self._source = self._make_source()
        self._reloading = Reloading(self._source, self._registry, plan.notifier, hosting.siblings)
        if self._source is not None:
            self._registry.on_poll(self._reloading.poll)
        gate = None if access is None else access.gate
        if self._metrics is not None:
            self._metrics.watch(current_census(), _turns_of(current_loop_load()))
            self._registry.subscribe(partial(_show_no_more, self._metrics))
            if gate is not None:
                gate.refused = self._metrics.refused
        guards_calls = gate is not None and gate.guards_everything
        self._plane = (GuardedPlane if guards_calls else DataPlane)(
            self._registry,
            reload=self._reloading.reload,
            observers=(
                *((CallerNames(),) if gate is not None else ()),
                *hosting.observers,
                RequestLog(),
                *(() if self._past is None else (self._past.failures,)),
                # The others still see the span of a call that has ended.
                *traces.calls,
            ),
            metrics=self._metrics,
            obstacle=hosting.obstacle,
            most_answer_bytes=plan.settings.max_message_size,
            admission=self._admission,
            regions=ClientRegions(is_allowed=plan.settings.allow_shared_memory),
            control=self._control,
            server_name=plan.settings.server_name,
            traces=traces.recent,
        )
        self._told = all_of((*traces.requests, *(() if self._past is None else self._past.requests)))
        self._plane.siblings = hosting.siblings
        self._plane.workers_reason = plan.workers_reason
        self._readiness = ReadinessFile(plan.readiness_file)
        self._pending = pending_answers(plan.settings, plan.processes if hosting.is_part else 1)
        self._front_ends: dict[str, FrontEnd] = {}
        self._store: SequenceStore | None = None
        self._is_serving = False
        self._is_draining = False

    def _make_admission(self) -> Admission:
        limit = Limit(self._settings.max_concurrency, self._settings.max_queue)
        if self._hosting.ledger is None:
            return Admission(limit, self._registry.limit_of)
        return SharedAdmission(self._hosting.ledger, limit, self._registry.limit_of)

    def _make_registry(self) -> Registry:
        settings = self._settings
        lend = partial(
            self._lend,
            meters=NULL_METERS if self._metrics is None else self._metrics,
            hide_errors=settings.hide_errors,
            isolates_python=settings.python_isolation == "process",
            python_memory_limit=settings.python_memory_limit,
            isolates_nodes=settings.custom_node_isolation == "process",
            is_alone=bool(self._plan.root),
            text_api=_text_api,
            queue_timeout=settings.queue_timeout,
        )
        return Registry(
            self._plan.kinds,
            lend,
            # Where names are loaded when somebody asks for them, nothing happens by itself.
            poll_seconds=0 if self._is_explicit else settings.file_system_poll_wait_seconds,
            ready_when_empty=settings.allow_empty or self._is_explicit,
        )

    @property
    def _is_explicit(self) -> bool:
        return self._settings.model_control == "explicit"

    def _make_control(self) -> ModelControl | None:
        """Make what loads by name, where that is how things are loaded."""
        if not self._is_explicit:
            return None
        first = [name.strip() for name in (self._settings.load_model or "").split(",") if name.strip()]
        return ModelControl(
            self._registry, cache_dir=cache_directory(self._settings), first=first, keeps_before=self._hosting.is_part
        )

    def _lend(self, lease: LeaseServable, tasks: trio.Nursery, **lent: Any) -> LoadContext:
        return self._hosting.lend(self._admission.around(lease), tasks, **lent)

    def _make_source(self) -> ConfigSource | None:
        path = self._settings.config_path
        if path is None:
            return None
        return ConfigSource(path, self._registry, self._parse, self._apply)

    def _parse(self, content: bytes, path: Path) -> ServerSpec:
        """Read a configuration.

        Raises:
            ConfigError: it cannot be used.
        """
        return parse_config(self._plan.kinds.values(), content, path, cache_dir=cache_directory(self._settings))

    @property
    def _apply(self) -> ApplySpecs:
        """What takes over a configuration."""
        return self._registry.apply if self._control is None else self._control.apply

    async def _import_for_loads(self) -> None:
        """Import what loading needs before anything else, so that OpenVINO compiles while the rest is imported.

        What cannot be imported is told by the load that needs it.
        """
        for module in {self._plan.kinds[spec.kind].loads_with for spec in self._plan.spec.services} - {""}:
            with suppress(Exception):
                await import_aside(module)

    async def _make_front_ends(self) -> dict[str, FrontEnd]:
        """Make the front end of each protocol that has an address, which needs much that loading does without."""
        await self._import_for_loads()
        made = await import_aside("ovmstrio.server.front_ends")
        plan, plane, gate = self._plan, self._plane, None if self._access is None else self._access.gate
        front_ends: dict[str, FrontEnd] = {}
        if plan.grpc:
            front_ends["gRPC"] = made.grpc_front_end(plane, plan, self._pending, gate, self._told)
        if plan.rest:
            front_ends["REST"] = made.rest_front_end(
                plane, plan, self._pending, gate, past=self._past, observer=self._told
            )
        if plan.metrics:
            front_ends["metrics"] = made.metrics_front_end(plane, gate)
        if self._settings.probe_port:
            front_ends["probes"] = made.probe_front_end(plane)
        return front_ends

    def _count_connections(self) -> None:
        """Have the metrics tell how many connections there are; those of probes and of scrapers' own port are not."""
        for name, front_end in self._front_ends.items():
            if self._metrics is not None and name in ("gRPC", "REST"):
                gauge = self._metrics.child("ovmstrio_connections", name)
                gauge.set_function(partial(getattr, front_end, "open_connections"))

    # Life

    async def live(
        self, hosting: Hosting | None, *, handle_signals: bool, task_status: trio.TaskStatus[Running]
    ) -> None:
        """Serve as :meth:`run`, and obey signals and what hosts the server.

        Raises, Ownership and Cancellation: as :meth:`run`.
        """
        async with trio.open_nursery() as nursery:
            if handle_signals:
                end = partial(self.end, nursery.cancel_scope)
                await nursery.start(obey_signals, end, nursery.cancel_scope)
            if hosting is not None and hosting.until is not None:
                nursery.start_soon(self.end_when, hosting.until, nursery.cancel_scope)
            if hosting is not None and hosting.warned is not None:
                nursery.start_soon(self.begin_drain_when, hosting.warned)
            with prints_logged():
                await self.run(task_status)
            nursery.cancel_scope.cancel()

    async def run(self, task_status: trio.TaskStatus[Running]) -> None:
        """Serve until drained.

        Raises:
            ConfigError: what is at the root cannot be loaded, TLS cannot be set up, or another server keeps its
                sequences in the same folder.
            OSError: an address cannot be bound.

        Ownership: everything that the server opens.
        Cancellation: ends everything at once.
        """
        log_tail = nullcontext() if self._past is None else self._past.remembering()
        kept_gb = 0.0 if cache_directory(self._settings) is not None else self._settings.compiled_gb
        keeping = keeping_compiled_files(compiled_folder(), int(kept_gb * 10**9))
        if self._access is not None:
            long_requests.set(self._access.gate.long_requests)
        with self._locked_store(), self._control or nullcontext(), log_tail, keeping, bounded_refusals() as refusals:
            await self._serve(refusals, task_status)

    def _locked_store(self) -> AbstractContextManager[None]:
        """Keep the folder of the sequences, where there are any; what has the root of the ports has none.

        Raises:
            ConfigError: another server has it, or what is kept there is for another number of processes.
        """
        folder = self._settings.sequence_store
        if folder is None or self._plan.root:
            return nullcontext()
        if not self._hosting.is_part:
            check_store(folder, 1)
        return locked_folder(folder, str(self._settings.config_path or self._settings.model_name or "nothing"))

    async def _serve(self, refusals: RepeatedFaults, task_status: trio.TaskStatus[Running]) -> None:
        async with trio.open_nursery() as nursery:
            with trying_models(nursery, self._settings.trial_load, trials_folder(self._settings.cache_dir)):
                await nursery.start(self._registry.run)
            await nursery.start(share_cores, self._settings.core_sharing)
            await nursery.start(watch_overdue)
            if self._plan.root:
                await self._load_root()
            nursery.start_soon(self._pending.watch)
            nursery.start_soon(refusals.sum_up)
            nursery.start_soon(self._admission.follow_others)
            if self._hosting.serve_peers is not None:
                await nursery.start(self._hosting.serve_peers, self._plane, self._reloading)
            pause = self._settings.file_system_poll_wait_seconds or _POLL_SECONDS
            if self._access is not None or self._settings.tls_cert is not None:
                nursery.start_soon(partial(FileWatcher(self._look_at_files, pause).run, pauses_first=True))
            async with AsyncExitStack() as opened:
                listeners = await self._listen(opened)
                if not self._plan.root:
                    self._begin_loading(nursery)
                self._front_ends = await self._make_front_ends()
                self._count_connections()
                addresses = {
                    name: await nursery.start(front_end.serve_listeners, listeners[name])
                    for name, front_end in self._front_ends.items()
                }
                running = self._begin(nursery, addresses)
                with self._plan.while_serving(running):
                    if not self._hosting.is_part:
                        seconds = round(running.seconds, 3)
                        log.info("serving", name=self._plan.root, grpc=running.grpc, rest=running.rest, seconds=seconds)
                    task_status.started(running)
                    await self._drained.wait()
            nursery.cancel_scope.cancel()

    async def _look_at_files(self) -> bool:
        """Look at the files of callers and certificates."""
        for look in (self._certificates.look, *self._hosting.watches):
            await look()
        return self._access is None or await self._access.look()

    async def _load_root(self) -> None:
        await self._registry.apply(self._plan.spec.services)
        errors = [problem for problem in self._registry.findings() if problem.severity == "error"]
        if errors:
            raise ConfigError(errors)

    async def _listen(self, opened: AsyncExitStack) -> dict[str, list[Listener]]:
        """Open the listeners of each protocol that has an address, or take those that are given."""
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
                opening = open_noted_listeners(where, tls, "--probe_port" if is_plain else plan.port_options)
                listeners[name] = await opened.enter_async_context(opening)
            else:
                listeners[name] = list(given[name])
        return listeners

    def _begin_loading(self, nursery: trio.Nursery) -> None:
        """Begin the first load, which goes on while the front ends are made."""
        if self._settings.sequence_store is not None:
            sequences = self._registry.context.shared(SequenceManagers)
            self._store = SequenceStore(sequences, self._settings.sequence_store, self._settings.sequence_store_seconds)
            nursery.start_soon(self._store.run)
        nursery.start_soon(self._first_load)

    def _begin(self, nursery: trio.Nursery, addresses: dict[str, list[str]]) -> Running:
        """Turn ready as soon as everything is loaded, and start what runs beside the calls."""
        plane = self._plane
        plane.begin_serving()
        self._readiness.show(ready=plane.readiness().ready)
        nursery.start_soon(self._readiness.follow, plane)
        nursery.start_soon(self._plan.notifier.follow, plane.readiness, plane.wait_change)
        nursery.start_soon(self._plan.notifier.show_life)
        sequences = self._registry.context.shared(SequenceManagers)
        if self._metrics is not None:
            self._metrics.show(
                "ovmstrio_sequences", lambda: {(each.name, str(each.version)): len(each) for each in sequences}
            )
        nursery.start_soon(clean_sequences, sequences, self._settings.sequence_cleaner_poll_wait_minutes)
        self._is_serving = True
        grpc, rest, metrics, probes = (addresses.get(name, []) for name in ("gRPC", "REST", "metrics", "probes"))
        return Running(plane, grpc, rest, metrics, self._started, probes)

    async def _first_load(self) -> None:
        """Load what is configured; what fails is a state of the registry and leaves the server up."""
        if self._store is not None:
            await self._store.restore()
        self._registry.context.shared(SequenceManagers).settle()
        await adopt_regions(self._plane)
        await adopt_loads(self._plane)
        try:
            if self._source is not None:
                await self._source.reload(force=True)
            else:
                await self._apply(self._plan.spec.services)
        except ServerError as error:
            log.error("not everything could be loaded", reason=error.message)  # noqa: TRY400 - told, not unforeseen
        if self._control is not None:
            await self._control.load_adopted()

    async def end(self, everything: trio.CancelScope) -> None:
        """Drain the server, once; what has not begun to serve is cancelled with ``everything``.

        Returns only in the latter case: for as long as services are closed, another signal is to stop at once.

        Cancellation: leaves the drain where it is.
        """
        if not self._is_serving:
            self.ended_gently = True
            everything.cancel()
            return
        if not self._is_draining:
            self._is_draining = True
            await self._drain()
            self._drained.set()
        await trio.sleep_forever()

    async def end_when(self, until: Callable[[], Awaitable[None]], everything: trio.CancelScope) -> None:
        """Drain the server, as :meth:`end`, when ``until`` returns."""
        await until()
        await self.end(everything)

    async def begin_drain_when(self, warned: Callable[[], Awaitable[None]]) -> None:
        """Begin to drain when ``warned`` returns."""
        await warned()
        self._begin_drain()

    def _begin_drain(self) -> None:
        self._plan.notifier.stop()
        self._plane.begin_drain()
        self._registry.begin_drain()
        for front_end in self._front_ends.values():
            front_end.begin_drain()

    async def _drain(self) -> None:
        """Turn not ready, answer what comes, close listeners, let calls end, keep sequences."""
        self._begin_drain()
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
        elif not self._hosting.is_part:
            log.info("drained")
        if self._hosting.leave is not None:
            await self._hosting.leave()
        saved = self._store is None or await self._store.save_at_end()
        self.ended_gently = saved and not cut


def _show_no_more(metrics: Metrics, status: VersionStatus) -> None:
    """Take a version that has ended off the gauges."""
    if status.state is VersionState.END:
        metrics.retired(status.name, str(status.version))


def _turns_of(load: LoopLoad) -> Callable[[], tuple[Sequence[int], float]]:
    """Give what reads how long the loop's turns take; from any thread."""
    return lambda: (tuple(load.turns), load.turn_seconds)


def _has_console(plan: Plan) -> bool:
    return plan.settings.console != "off" and bool(plan.rest)


def _metrics_of(plan: Plan) -> Metrics | None:
    configured, has_vllm_names = plan.spec.metrics, plan.settings.llm_metrics == "vllm"
    if configured is not None:
        return Metrics(configured.families, vllm_names=has_vllm_names) if configured.enable else None
    if not plan.settings.metrics_enable:
        return None
    return Metrics(*metric_families(plan.settings), vllm_names=has_vllm_names)


def _text_api() -> TextApi:
    """Make what reads and writes texts for nodes of graphs, which few servers have."""
    from ovmstrio.protocols.openai.text_documents import OpenAITexts  # noqa: PLC0415 - imports take long while servers start

    return OpenAITexts()
