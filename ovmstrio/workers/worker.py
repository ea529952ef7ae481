"""Main program of a worker: a copy of the server for the connections that the parent hands off.

The first message of the parent, a ``WorkerTask``, has the settings, the worker index and the worker count.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import trio

from ovmstrio.core.events import CallObserver
from ovmstrio.handlers.config.project_file import read_project
from ovmstrio.isolation.worker_program import WorkRequest, WorkRequests, run_program
from ovmstrio.models.sequences import SequenceManagers
from ovmstrio.models.sequences.store import worker_folder
from ovmstrio.server.command_line import probe_addresses
from ovmstrio.server.listeners import HTTP, HTTP2, Certificates
from ovmstrio.server.plan import own_port, plan_project, read_plan
from ovmstrio.server.process_main import serve_in_own_process
from ovmstrio.server.project_process import configure_project_logs, enter_project
from ovmstrio.server.settings import ServerSettings
from ovmstrio.server.start_failures import log_failures
from ovmstrio.server.worker_context import WorkerProcessContext
from ovmstrio.serving.aggregate import save_final_metrics
from ovmstrio.serving.kind import LoadContext
from ovmstrio.serving.records import Readiness
from ovmstrio.telemetry.log_levels import LOG_LEVEL, parse_log_levels
from ovmstrio.telemetry.logs import configure_logs, set_worker_number
from ovmstrio.transport.tls import TlsListener
from ovmstrio.util.cores import CORES
from ovmstrio.workers.handoff import CHANGED, DRAIN, EXIT_CUT, ConnectionInbox, WorkerTask
from ovmstrio.workers.owners import OwnerTimeouts, WorkerEngines, WorkerSequences, answer_step
from ovmstrio.workers.rpc import WorkerRpc
from ovmstrio.workers.shared_state import ServiceLimit, SharedCounters, SharedState, WorkerWakeups
from ovmstrio.workers.worker_group import WorkerGroup

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ovmstrio.core.events import CallEvent
    from ovmstrio.core.limits import ConcurrencyLimit
    from ovmstrio.core.service import ServableLookup
    from ovmstrio.server.plan import Plan
    from ovmstrio.server.reload import Reloader
    from ovmstrio.server.running import Running
    from ovmstrio.serving.data_plane import DataPlane
    from ovmstrio.serving.registry import Registry
    from ovmstrio.transport.listeners import Listener

_LIFE_SECONDS: Final = 1.0
_MIN_PEER_DRAIN_SECONDS: Final = 5.0
"""Minimum time for which a worker answers its peers when all exit."""


async def _serve(first: WorkRequest, requests: WorkRequests) -> None:
    """Serve the connections of the parent until it sends no more or exits."""
    task = WorkerTask.model_validate(first.value)
    if first.descriptor is None:
        raise ValueError("worker started without shared-memory descriptor")
    set_worker_number(task.row)
    plan = await _plan_of(task)
    CORES.processes = task.rows
    state = SharedState(first.descriptor, task.rows)
    worker = _Worker(plan, state, task)

    async def answer(running: Running) -> None:
        await worker.report_readiness(running.plane, first, requests)

    context = worker.make_context(requests)
    trio.lowlevel.add_instrument(worker.calls)
    with LOG_LEVEL.shared(state), worker.wakeups.open():
        is_graceful = await serve_in_own_process(worker.plan, context, show=answer, handle_signals=False)
    if not is_graceful:
        sys.exit(EXIT_CUT)


async def _plan_of(task: WorkerTask) -> Plan:
    if task.file is not None:
        project, _ = read_project(task.file)
        plan = plan_project(project, task.options)
        enter_project(project, own_port(project, plan.settings))
        configure_project_logs(project.log_level, plan.settings)
        return plan
    sys.path[:] = task.search_path
    settings = ServerSettings.model_validate(task.options)
    configure_logs(level=settings.log_level, fmt=settings.log_format, path=settings.log_path)
    LOG_LEVEL.set_logger_levels(parse_log_levels(settings.log_levels or ""))
    return replace(await read_plan(settings), workers_reason=task.reason)


class _Worker:
    def __init__(self, plan: Plan, state: SharedState, task: WorkerTask) -> None:
        # The parent has applied the drain delay and writes the readiness file.
        settings = plan.settings.model_copy(update={"drain_delay": 0})
        if settings.sequence_store is not None:
            part = worker_folder(settings.sequence_store, task.row, task.rows)
            settings = settings.model_copy(update={"sequence_store": part})
        self.plan = replace(plan, settings=settings, readiness_file=None)
        self._certificates = Certificates(settings)
        self._warned = trio.Event()
        self._takes_steps = trio.Event()
        self._state = state
        self._row = row = task.row
        self._drains_until = 0.0
        self._plane: DataPlane | None = None
        self._server_reason = ""
        self._rpc = WorkerRpc(task.secret, task.rows, row)
        # Separate, as steps wait until their owner takes them, and other calls do not.
        self._step_rpc = WorkerRpc(task.secret, task.rows, row, "steps")
        wait = OwnerTimeouts(state, settings.worker_wait_seconds)
        self.calls = _CallsInFlight(state, row)
        self._engines = WorkerEngines(self._rpc, wait)
        self._sequences = WorkerSequences(self._step_rpc, state, wait)
        self._group = WorkerGroup(self._rpc, self._engines, state.metrics)
        self.wakeups = WorkerWakeups(task.secret, row)
        self._counters = SharedCounters(state, row, self.wakeups)
        addresses = (("gRPC", plan.grpc), ("REST", plan.rest), ("probes", probe_addresses(settings)))
        protocols = [name for name, where in addresses if where]
        closed = partial(state.add_closed_connection, row)
        self._inboxes = {name: ConnectionInbox(closed) for name in protocols}

    def make_context(self, requests: WorkRequests) -> WorkerProcessContext:
        listeners = {name: [self._tls_listener(name, inbox)] for name, inbox in self._inboxes.items()}
        wait_drain = partial(self._handle_messages, requests)
        observers, watches = (self.calls,), (self._certificates.look,)
        wait_drain_warning = self._warned.wait
        return WorkerProcessContext(
            listeners=listeners,
            make_load_context=self._make_load_context,
            unready_reason=self._unready_reason,
            wait_drain=wait_drain,
            wait_drain_warning=wait_drain_warning,
            is_restart=lambda: not self._state.is_draining,
            observers=observers,
            watches=watches,
            serve_peers=self._serve_peers,
            worker_deaths=lambda: self._state.deaths,
            leave=self._leave,
            counters=self._counters,
            peers=self._group,
        )

    async def _serve_peers(self, plane: DataPlane, reloading: Reloader, *, task_status: trio.TaskStatus[None]) -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(self._group.run, plane, reloading)
            task_status.started()
            # Until the sequences are restored and their models loaded, steps wait in their workers, in order.
            answer, wait_usable = partial(self._answer_step, plane.registry), plane.registry.wait_loaded
            await nursery.start(partial(self._step_rpc.run, answer, wait_usable=wait_usable))
            self._takes_steps.set()
            plane.announce()

    async def _answer_step(self, registry: Registry, call: Sequence[Any]) -> Any:
        self.calls.add(call)
        try:
            return await answer_step(registry, call)
        finally:
            self.calls.discard(call)

    def _limit(self, maximum: int, name: str) -> ConcurrencyLimit | None:
        return ServiceLimit(self._counters, name, maximum) if maximum else None

    def _make_load_context(self, lease: ServableLookup, tasks: trio.Nursery, **dependencies: Any) -> LoadContext:
        dependencies |= {"sequence_owners": self._sequences, "engines": self._engines}
        context = LoadContext(lease, tasks, make_limit=self._limit, **dependencies)
        context.shared(SequenceManagers).owners = self._sequences
        return context

    async def _leave(self) -> None:
        """Stop answering peers; if all workers exit, wait until the peers need no more answers."""
        others = {row for row in self._group.others if self._state.is_ready(row)}
        # Running requests of other workers may need answers until the drain timeout.
        seconds = max(_MIN_PEER_DRAIN_SECONDS, self._drains_until - trio.current_time())
        if self._state.is_draining:
            with trio.move_on_after(seconds):
                await self._group.wait_peers_drained(others)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._engines.leave, seconds)
            nursery.start_soon(self._step_rpc.leave)
        await self._rpc.leave()
        if self._plane is not None:
            save_final_metrics(self._plane)

    async def _handle_messages(self, requests: WorkRequests) -> None:
        await requests.handle_all(self._handle_message)
        self._drains_until = trio.current_time() + self.plan.settings.drain_seconds

    async def report_readiness(self, plane: DataPlane, first: WorkRequest, requests: WorkRequests) -> None:
        """Report that connections are accepted, and from then on readiness changes."""
        self._plane = plane
        if plane.registry.has_loaded:
            await self._takes_steps.wait()
        self._state.set_ready(self._row, ready=self._own_readiness(plane).ready)
        await first.answer(None)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._send_heartbeats)
            await self._report_readiness(plane, requests)

    def _own_readiness(self, plane: DataPlane) -> Readiness:
        readiness = plane.registry.readiness
        if readiness.ready and not self._takes_steps.is_set():
            return Readiness(ready=False, reason="the worker is starting")
        return readiness

    async def _send_heartbeats(self) -> None:
        while True:
            self._state.show_life(self._row)
            await trio.sleep(_LIFE_SECONDS)

    async def _report_readiness(self, plane: DataPlane, requests: WorkRequests) -> None:
        reported: Readiness | None = None
        while True:
            while (readiness := self._own_readiness(plane)) != reported:
                reported = readiness
                self._state.set_ready(self._row, ready=readiness.ready)
                await requests.notify([CHANGED, readiness.reason])
            await plane.wait_change()

    def _tls_listener(self, name: str, inbox: ConnectionInbox) -> Listener:
        tls = None if name == "probes" else self._certificates.tls(HTTP if name == "REST" else HTTP2)
        return inbox if tls is None else TlsListener(inbox, tls)

    async def _handle_message(self, request: WorkRequest) -> None:
        if request.value == DRAIN:
            self._warned.set()
        elif request.value[0] == CHANGED:
            self._server_reason = request.value[1]
            self._rpc.announce()
            # An exited worker has released its places.
            self._counters.notify((self._row,))
            if self._plane is not None:
                self._plane.announce()
        else:
            await self._inboxes[request.value[0]].put(request)

    def _unready_reason(self) -> str:
        if self._state.all_ready() or self.plan.settings.ready_requires == "none":
            return ""
        return self._server_reason or "not all workers are ready"


class _CallsInFlight(CallObserver, trio.abc.Instrument):
    """Calls in flight, whose number the parent logs if this worker dies; also follows the log level of all workers.

    A call that has ended counts until the event loop waits, because its response is sent after its end.
    """

    def __init__(self, state: SharedState, row: int) -> None:
        self._state = state
        self._row = row
        self._calls: set[int] = set()
        self._has_ended = False

    def call_started(self, event: CallEvent) -> None:
        LOG_LEVEL.follow()
        self.add(event)

    def call_finished(self, event: CallEvent) -> None:
        # Queries, such as for metadata, have an end only.
        self.discard(event)

    def add(self, call: object) -> None:
        self._calls.add(id(call))
        self._state.set_in_flight(self._row, len(self._calls))

    def discard(self, call: object) -> None:
        self._calls.discard(id(call))
        self._has_ended = True

    def before_io_wait(self, timeout: float) -> None:
        del timeout
        if self._has_ended:
            self._has_ended = False
            self._state.set_in_flight(self._row, len(self._calls))


def main() -> int:
    """Run the worker and return its exit code."""
    failed = False
    try:
        run_program(_serve)
    except* Exception as group:  # noqa: BLE001 - top level of the process
        failed = True
        log_failures(group)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
