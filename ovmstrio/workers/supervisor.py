"""Parent process of the workers: accepts connections, restarts workers, rolling restarts.

Each connection is handed to the ready worker with the fewest connections, so that no worker queues what another
could serve at once.  A dead worker is restarted with exponential backoff.
"""

from __future__ import annotations

import math
import resource
import secrets
import signal
from contextlib import AsyncExitStack, closing
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import structlog
import trio

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.isolation.worker_process import RestartedProcess, WorkerProcess, signal_name
from ovmstrio.models.sequences.store import check_worker_count, lock_folder
from ovmstrio.server.command_line import probe_addresses
from ovmstrio.server.listeners import HTTP, HTTP2, Certificates, open_server_listeners
from ovmstrio.server.plan import check_again
from ovmstrio.server.readiness_file import ReadinessFile
from ovmstrio.server.signals import handle_reopen_signals, handle_restart_signals, handle_stop_signals
from ovmstrio.telemetry.log_levels import LOG_LEVEL
from ovmstrio.telemetry.log_writer import WRITER
from ovmstrio.transport.accept_loop import AcceptLoop
from ovmstrio.transport.listeners import bound_address
from ovmstrio.util.backoff import Backoff
from ovmstrio.workers.handoff import CHANGED, DRAIN, EXIT_CUT, WorkerTask
from ovmstrio.workers.shared_state import SharedState

if TYPE_CHECKING:
    from ovmstrio.server.plan import Plan
    from ovmstrio.transport.direct_stream import DirectStream
    from ovmstrio.transport.listeners import Listener

log = structlog.get_logger(__name__)

_PROGRAM: Final = "ovmstrio.workers.worker"
_MIN_BACKOFF_SECONDS: Final = 0.25
_MAX_BACKOFF_SECONDS: Final = 30.0
_STABLE_SECONDS: Final = 60.0
"""A worker that lived this long is restarted without backoff."""
_NORMAL_EXITS: Final = frozenset({0, -signal.SIGINT, -signal.SIGTERM})
"""Exit codes after a normal stop."""
_REPLACEMENT_SECONDS: Final = 600.0
"""Time limit for the start of a replacement."""
_MESSAGE_SECONDS: Final = 1.0
"""Time limit for a message to a worker."""
_EXIT_SECONDS: Final = 15.0
"""Time limit for an exit, in addition to the drain."""


async def serve_with_workers(plan: Plan, *, handle_signals: bool = True) -> bool:
    """Serve a plan with worker processes until stopped; return whether they drained cleanly.

    Raises:
        ExceptionGroup: of ``ConfigError``, a worker exited before all were ready (see its log), or TLS files are
            invalid;
            and of ``OSError``, an address cannot be bound.
    """
    # Workers inherit the limit, and need more connections than the usual soft limit.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    # Closed after the nursery: an interrupted rolling restart still writes to the shared state.
    with closing(_Parent(plan)) as parent:
        await _serve_with(parent, plan, handle_signals=handle_signals)
    return parent.ended_gently


async def _serve_with(parent: _Parent, plan: Plan, *, handle_signals: bool) -> None:
    async with WRITER.in_thread(), trio.open_nursery() as nursery:
        if handle_signals:
            end = partial(parent.drain, nursery.cancel_scope)
            await nursery.start(handle_stop_signals, end, nursery.cancel_scope)
            await nursery.start(handle_restart_signals, parent.renew)
            await nursery.start(handle_reopen_signals)
        nursery.start_soon(plan.notifier.show_life)
        await parent.run()
        nursery.cancel_scope.cancel()


class _Parent:
    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._readiness = ReadinessFile(plan.readiness_file)
        self._state = SharedState.create(plan.processes)
        self._nursery: trio.Nursery | None = None
        self._changed = trio.Event()
        self._accepting = {name: AcceptLoop() for name in ("gRPC", "REST", "probes")}
        self._listening: dict[str, list[Listener]] = {}
        self._pending_handoffs = 0
        self._stuck_workers: set[int] = set()
        self._reasons: dict[int, str] = {}
        self._draining = trio.Event()
        self._secret = secrets.token_hex(16)
        self._slots = [self._make_slot(row) for row in range(plan.processes)]
        self._has_been_ready = False
        self._has_cut_requests = False
        self.ended_gently = False

    async def run(self) -> None:
        started = perf_counter()
        try:
            async with AsyncExitStack() as opened, trio.open_nursery() as nursery:
                opened.enter_context(LOG_LEVEL.shared(self._state))
                self._nursery = nursery
                self._lock_store(opened)
                listeners = self._listening = await self._listen(opened)
                for kept in self._slots:
                    nursery.start_soon(kept.keep)
                await self._until_ready()
                if not self._draining.is_set():
                    grpc, rest = (list(map(bound_address, listeners.get(name, ()))) for name in ("gRPC", "REST"))
                    seconds = round(perf_counter() - started, 3)
                    what = {"name": self._plan.root} if self._plan.root else {"workers": len(self._slots)}
                    log.info("serving", **what, grpc=grpc, rest=rest, seconds=seconds)
                await self._accept_all(listeners, nursery)
        finally:
            self._nursery = None
            self._readiness.show(ready=False)

    def close(self) -> None:
        self._state.close()

    def _lock_store(self, opened: AsyncExitStack) -> None:
        """Lock the sequence store, of which each worker has a part."""
        folder = self._plan.settings.sequence_store
        if folder is not None and not self._plan.root:
            check_worker_count(folder, self._state.rows)
            opened.enter_context(lock_folder(folder, self._origin))

    async def _listen(self, opened: AsyncExitStack) -> dict[str, list[Listener]]:
        plan = self._plan
        listeners: dict[str, list[Listener]] = {}
        probes = tuple(probe_addresses(plan.settings))
        for name, where, protocol in (("gRPC", plan.grpc, HTTP2), ("REST", plan.rest, HTTP), ("probes", probes, HTTP)):
            if where:
                # TLS is done by the workers; errors are reported once here.
                await trio.to_thread.run_sync(Certificates(plan.settings).tls, protocol)
                opening = open_server_listeners(where, None, "--probe-port" if name == "probes" else plan.port_options)
                listeners[name] = await opened.enter_async_context(opening)
        return listeners

    async def _accept_all(self, listeners: dict[str, list[Listener]], nursery: trio.Nursery) -> None:
        async with trio.open_nursery() as accepting:
            for name, some in listeners.items():
                accepting.start_soon(self._accepting[name].run, some, partial(self._hand_off, name), nursery)

    async def drain(self, everything: trio.CancelScope) -> None:
        """Drain the workers; cancel ``everything`` if they do not exit in time."""
        LOG_LEVEL.follow()
        self._draining.set()
        self._plan.notifier.stop()
        self._readiness.show(ready=False)
        self._state.set_draining()
        if self._has_been_ready:
            # A stuck worker may not receive it.
            with trio.move_on_after(_MESSAGE_SECONDS):
                await self._broadcast(DRAIN)
            await trio.sleep(self._plan.settings.drain_delay)
        self._update_readiness()
        with trio.move_on_after(self._plan.settings.drain_seconds + _EXIT_SECONDS):
            await self._drain_listeners()
            for kept in self._slots:
                kept.dismiss()
            while any(kept.process for kept in self._slots):
                await self._changed.wait()
            self.ended_gently = not self._has_cut_requests
            if self.ended_gently:
                log.info("drained")
            await trio.sleep_forever()
        everything.cancel()

    async def renew(self) -> None:
        """Restart the workers one after the other with the current configuration.

        A worker is stopped before its replacement starts, and the next one only after the replacement is ready.
        Nothing is done with an invalid configuration, and the restart stops at the first worker that does not become
        ready.
        """
        if self._draining.is_set():
            return
        if not self._has_been_ready:
            log.warning("rolling restart aborted", reason="not all workers have been ready yet")
            return
        with self._plan.notifier.reloading():
            try:
                await check_again(self._plan)
            except ConfigError as error:
                log.error("rolling restart aborted", reason=error.message)  # noqa: TRY400 - an expected error
                return
            for kept in self._slots:
                is_replaced = await self._replace(kept)
                if self._draining.is_set():
                    return
                if not is_replaced:
                    log.error("rolling restart aborted", worker=kept.row, reason="replacement not ready")
                    return
            log.info("rolling restart finished", count=len(self._slots))

    async def _replace(self, kept: RestartedProcess) -> bool:
        """Replace a worker; return whether the replacement is ready."""
        old = kept.process
        self._state.replaced = kept.row
        kept.is_replaced = True
        try:
            # The worker gets no connections from now on.
            if old is not None:
                await self._dismiss(kept, old)
            with trio.move_on_after(_REPLACEMENT_SECONDS):
                while kept.process in (None, old):
                    await self._changed.wait()
                kept.is_replaced = False
                while not (kept.is_ready and self._state.is_ready(kept.row)):
                    await self._changed.wait()
                return True
        finally:
            kept.is_replaced = False
            self._state.replaced = -1
            self._on_readiness_change()
        return False

    async def _dismiss(self, kept: RestartedProcess, old: WorkerProcess) -> None:
        with trio.move_on_after(_MESSAGE_SECONDS):
            await kept.notify(DRAIN)
        kept.dismiss()
        with trio.move_on_after(self._plan.settings.drain_seconds + _EXIT_SECONDS):
            while kept.process is old:
                await self._changed.wait()
            return
        log.warning("worker killed: drain timeout", worker=kept.row, pid=old.pid)
        old.kill()

    async def _drain_listeners(self) -> None:
        """Accept pending connections, close the listeners, and wait until all connections are handed off."""
        for accepting in self._accepting.values():
            accepting.stop()
        for name in self._listening:
            await self._accepting[name].ended.wait()
        while self._pending_handoffs:
            await self._changed.wait()

    async def _hand_off(self, protocol: str, stream: DirectStream) -> None:
        """Hand a connection to the ready worker with the fewest connections; wait while there is no worker.

        While no worker is ready, as at the start, any worker gets it: clients learn why from its answers.

        The caller closes the descriptor of this process.
        """
        # The address is sent too: a socket that the client has reset has none any more.
        address = stream.peer_address
        message = [protocol, address.host, address.port]
        self._pending_handoffs += 1
        try:
            while True:
                kept = self._least_busy()
                if kept is not None:
                    if await kept.give(message, stream.socket.fileno()):
                        return
                elif self._draining.is_set():
                    return
                else:
                    await self._changed.wait()
        finally:
            self._pending_handoffs -= 1
            if self._draining.is_set():
                self._update_readiness()

    def _least_busy(self) -> RestartedProcess | None:
        ready = [kept for kept in self._slots if kept.is_ready and not kept.is_replaced]
        # A restarted worker that still loads would refuse calls that others answer.
        ready = [kept for kept in ready if self._state.is_ready(kept.row)] or ready
        stuck = {kept.row for kept in ready if self._state.is_stuck(kept.row)}
        for row in stuck - self._stuck_workers:
            log.warning("worker stuck", worker=row)
        self._stuck_workers = stuck
        # If all are stuck, any will do.
        return min(ready, key=lambda kept: (kept.row in stuck, *self._load(kept)), default=None)

    def _load(self, kept: RestartedProcess) -> tuple[int, int]:
        return kept.given - self._state.closed_connections(kept.row), kept.given

    def _make_slot(self, row: int) -> RestartedProcess:
        task = WorkerTask.of(self._plan, self._state.rows, row, self._secret)
        return RestartedProcess(
            row,
            partial(
                WorkerProcess,
                _PROGRAM,
                on_message=partial(self._on_message, row),
                stopped_seconds=math.inf,
            ),
            task.model_dump(mode="json"),
            self._state.descriptor,
            cannot_start=partial(self._on_start_error, row),
            backoff=Backoff(_MIN_BACKOFF_SECONDS, _MAX_BACKOFF_SECONDS, _STABLE_SECONDS),
            stopping=self._draining,
            changed=self._on_readiness_change,
            ended=self._on_exit,
        )

    def _on_start_error(self, row: int, error: OSError) -> None:
        """Log that a worker could not be restarted, as for lack of descriptors; raise it at the first start."""
        if not self._has_been_ready:
            raise error
        log.error("worker not started", name=self._plan.root, worker=row, reason=error.strerror or str(error))

    def _on_exit(self, kept: RestartedProcess, process: WorkerProcess) -> None:
        """Log the unexpected exit of a worker, and clear its row."""
        LOG_LEVEL.follow()
        code = process.status or 0
        is_draining = self._draining.is_set()
        was_cut = is_draining and kept.is_ready and code not in _NORMAL_EXITS
        self._has_cut_requests = self._has_cut_requests or was_cut
        is_wanted = kept.is_replaced and code in _NORMAL_EXITS
        if not (is_draining or is_wanted) or (was_cut and code != EXIT_CUT):
            self._state.add_death()
            self._log_exit(kept, process.pid, code)
        self._state.clear(kept.row)
        self._reasons[kept.row] = "restarting"
        self._on_readiness_change()
        if not (is_draining or self._has_been_ready):
            text = f"a worker exited before it was ready ({_cause(code)}); see its log"
            raise ConfigError([Problem(text, file=self._origin)])

    def _log_exit(self, kept: RestartedProcess, pid: int | None, code: int) -> None:
        log.error(
            "worker exited",
            name=self._plan.root,
            worker=kept.row,
            pid=pid,
            cause=_cause(code),
            signal=signal_name(-code) if code < 0 else None,
            exit_code=code if code >= 0 else None,
            connections_lost=self._load(kept)[0],
            requests_lost=self._state.unanswered(kept.row),
        )

    @property
    def _origin(self) -> str:
        services = self._plan.spec.services
        return services[0].origin if services else ""

    def _on_message(self, row: int, message: Any) -> None:
        """Note why a worker is not ready; it has nothing else to tell."""
        self._reasons[row] = message[1]
        self._on_readiness_change()

    def _on_readiness_change(self) -> None:
        if self._nursery is not None:
            self._nursery.start_soon(self._broadcast, [CHANGED, self._unready_reason()])
        self._update_readiness()

    async def _broadcast(self, value: Any) -> None:
        # Concurrently, so that a stuck worker does not delay others.
        async with trio.open_nursery() as nursery:
            for kept in self._slots:
                nursery.start_soon(kept.notify, value)

    async def _until_ready(self) -> None:
        while not (self._has_been_ready or self._draining.is_set()):
            await self._changed.wait()

    def _update_readiness(self) -> None:
        """Wake waiting tasks and update the readiness."""
        self._has_been_ready = self._has_been_ready or (
            not self._draining.is_set() and all(kept.is_ready for kept in self._slots)
        )
        is_ready = not self._draining.is_set() and self._has_been_ready and self._are_enough_ready()
        self._readiness.show(ready=is_ready)
        self._plan.notifier.show(ready=is_ready, reason=self._unready_reason())
        self._changed.set()
        self._changed = trio.Event()

    def _are_enough_ready(self) -> bool:
        # A project is served by the remaining workers.
        if self._plan.root or self._plan.settings.ready_requires == "none":
            return any(kept.is_ready for kept in self._slots)
        return self._state.all_ready()

    def _unready_reason(self) -> str:
        """Return why the first worker that is not ready is not; empty if all are ready."""
        rows = (row for row in range(self._state.rows) if row != self._state.replaced and not self._state.is_ready(row))
        return next((f"worker {row}: {self._reasons.get(row) or 'starting'}" for row in rows), "")


def _cause(code: int) -> str:
    return signal_name(-code) if code < 0 else f"exit code {code}"
