"""The parent of many processes that serve one plan.

It accepts every connection itself and gives it to the process with the fewest: so no process queues what another one
could serve at once.  A process that dies is started again, after a pause that grows while it keeps dying.
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

from ovmstrio.config.specs import ModelSpec
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.isolation.program import signal_name
from ovmstrio.isolation.worker_process import KeptProcess, WorkerProcess
from ovmstrio.models.sequences.store import check_store, locked_folder
from ovmstrio.server.command_line import probe_addresses
from ovmstrio.server.listening import HTTP, HTTP2, Certificates, open_noted_listeners
from ovmstrio.server.plan import read_plan
from ovmstrio.server.readiness_file import ReadinessFile
from ovmstrio.server.signals import obey_renewals, obey_signals
from ovmstrio.telemetry.log_levels import LOG_LEVEL
from ovmstrio.telemetry.log_writer import WRITER
from ovmstrio.transport.accepting import Accepting
from ovmstrio.transport.listeners import address_of
from ovmstrio.util.backoff import Backoff
from ovmstrio.workers.shared_state import Board
from ovmstrio.workers.worker import CHANGED, CUT, DRAIN, WorkerTask

if TYPE_CHECKING:
    from ovmstrio.server.plan import Plan
    from ovmstrio.transport.direct_stream import DirectStream
    from ovmstrio.transport.listeners import Listener

__all__ = ["serve_with_workers"]

log = structlog.get_logger(__name__)

_PROGRAM: Final = "ovmstrio.workers.worker"
_FIRST_PAUSE_SECONDS: Final = 0.25
_LONGEST_PAUSE_SECONDS: Final = 30.0
_STABLE_SECONDS: Final = 60.0
"""A process that has lived so long is started again without a long pause."""
_GENTLE: Final = frozenset({0, -signal.SIGINT, -signal.SIGTERM})
"""How processes end that are told to."""
_RENEWAL_SECONDS: Final = 600.0
"""What a process gets to load everything that takes another one's place."""
_TELL_SECONDS: Final = 1.0
"""What a process gets to take a message."""
_END_SECONDS: Final = 15.0
"""What a process gets to end, besides the grace of its requests."""


async def serve_with_workers(plan: Plan, *, handle_signals: bool = True) -> bool:
    """Serve a plan with as many processes as it says, until it is told to end; True if they ended gently.

    Raises:
        ExceptionGroup: of ``ConfigError``, a process ended before all were ready for the first time, as its own log
            says, or TLS cannot be set up; and of ``OSError``, an address cannot be bound.

    Ownership: the processes and the listeners.
    Cancellation: kills the processes.
    """
    # Worker processes inherit the limit: each may have more connections than the usual soft limit allows.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    # Behind the nursery: a renewal that a stop overtakes says on the board that it is over.
    with closing(_Parent(plan)) as parent:
        await _serve_with(parent, plan, handle_signals=handle_signals)
    return parent.ended_gently


async def _serve_with(parent: _Parent, plan: Plan, *, handle_signals: bool) -> None:
    async with WRITER.in_thread(), trio.open_nursery() as nursery:
        if handle_signals:
            end = partial(parent.drain, nursery.cancel_scope)
            await nursery.start(obey_signals, end, nursery.cancel_scope)
            await nursery.start(obey_renewals, parent.renew)
        nursery.start_soon(plan.notifier.show_life)
        await parent.run()
        nursery.cancel_scope.cancel()


class _Parent:
    """The process that accepts the connections."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._readiness = ReadinessFile(plan.readiness_file)
        self._board = Board.create(plan.processes, _most_sequences(plan))
        self._nursery: trio.Nursery | None = None
        self._changed = trio.Event()
        self._accepting = {name: Accepting() for name in ("gRPC", "REST", "probes")}
        self._listening: dict[str, list[Listener]] = {}
        self._giving = 0
        self._stuck: set[int] = set()
        self._draining = trio.Event()
        self._secret = secrets.token_hex(16)
        self._kept = [self._place(row) for row in range(plan.processes)]
        self._has_been_ready = False
        self._has_cut = False
        self.ended_gently = False

    async def run(self) -> None:
        """Serve until drained; see :func:`serve_with_workers`."""
        started = perf_counter()
        try:
            async with AsyncExitStack() as opened, trio.open_nursery() as nursery:
                opened.enter_context(LOG_LEVEL.shared(self._board))
                self._nursery = nursery
                self._lock_store(opened)
                listeners = self._listening = await self._listen(opened)
                for kept in self._kept:
                    nursery.start_soon(kept.keep)
                await self._until_ready()
                if not self._draining.is_set():
                    grpc, rest = (list(map(address_of, listeners.get(name, ()))) for name in ("gRPC", "REST"))
                    seconds = round(perf_counter() - started, 3)
                    what = {"name": self._plan.root} if self._plan.root else {"workers": len(self._kept)}
                    log.info("serving", **what, grpc=grpc, rest=rest, seconds=seconds)
                await self._accept_all(listeners, nursery)
        finally:
            self._nursery = None
            self._readiness.show(ready=False)

    def close(self) -> None:
        """Give the board back, once nothing of this one runs any more."""
        self._board.close()

    def _lock_store(self, opened: AsyncExitStack) -> None:
        """Keep other servers out of the folder of sequences, of which each process has a part.

        Raises:
            ConfigError: another server has it, or what is kept there is for another number of processes.
        """
        folder = self._plan.settings.sequence_store
        if folder is not None and not self._plan.root:
            check_store(folder, self._board.rows)
            opened.enter_context(locked_folder(folder, self._origin))

    async def _listen(self, opened: AsyncExitStack) -> dict[str, list[Listener]]:
        plan = self._plan
        listeners: dict[str, list[Listener]] = {}
        probes = tuple(probe_addresses(plan.settings))
        for name, where, protocol in (("gRPC", plan.grpc, HTTP2), ("REST", plan.rest, HTTP), ("probes", probes, HTTP)):
            if where:
                # The processes do it; what is wrong is told once here.
                await trio.to_thread.run_sync(Certificates(plan.settings).tls, protocol)
                opening = open_noted_listeners(where, None, "--probe_port" if name == "probes" else plan.port_options)
                listeners[name] = await opened.enter_async_context(opening)
        return listeners

    async def _accept_all(self, listeners: dict[str, list[Listener]], nursery: trio.Nursery) -> None:
        async with trio.open_nursery() as accepting:
            for name, some in listeners.items():
                accepting.start_soon(self._accepting[name].run, some, partial(self._give, name), nursery)

    async def drain(self, everything: trio.CancelScope) -> None:
        """End gently: processes get the grace for their requests, and some time to end; ``everything`` if they do not.

        Cancellation: leaves the drain where it is.
        """
        LOG_LEVEL.follow()
        self._draining.set()
        self._plan.notifier.stop()
        self._readiness.show(ready=False)
        self._board.set_draining()
        if self._has_been_ready:
            # One that is stuck may not take it.
            with trio.move_on_after(_TELL_SECONDS):
                await self._tell_all(DRAIN)
            await trio.sleep(self._plan.settings.drain_delay)
        self._tell_change()
        with trio.move_on_after(self._plan.settings.drain_seconds + _END_SECONDS):
            await self._give_the_last()
            for kept in self._kept:
                kept.dismiss()
            while any(kept.process for kept in self._kept):
                await self._changed.wait()
            self.ended_gently = not self._has_cut
            if self.ended_gently:
                log.info("drained")
            await trio.sleep_forever()
        everything.cancel()

    async def renew(self) -> None:
        """Start another process in the place of each, one after the other, with what is configured now.

        None is ended before its predecessor's successor can answer; nothing is done where the configuration cannot be
        used, and no more once a process does not become ready.

        Cancellation: leaves it where it is.
        """
        if self._draining.is_set():
            return
        if not self._has_been_ready:
            log.warning("processes not renewed", reason="not all have been ready yet")
            return
        try:
            await self._check()
        except ConfigError as error:
            log.error("processes not renewed", reason=error.message)  # noqa: TRY400 - told, not unforeseen
            return
        for kept in self._kept:
            is_replaced = await self._replace(kept)
            if self._draining.is_set():
                return
            if not is_replaced:
                log.error("processes not renewed", worker=kept.row, reason="the new process is not ready")
                return
        log.info("processes renewed", count=len(self._kept))

    async def _check(self) -> None:
        """See that what is configured can be served.

        Raises:
            ConfigError: it cannot.
        """
        plan = self._plan
        if not plan.root:
            read = await read_plan(plan.settings.model_copy(update={"workers": self._board.rows}), plan.kinds)
            errors = [problem for service in read.spec.services for problem in service.errors]
            if errors:
                raise ConfigError(errors)

    async def _replace(self, kept: KeptProcess) -> bool:
        """Have a process end gently and another one take its place; tells whether that can answer.

        One that has ended by itself is followed by another one anyway.
        """
        old = kept.process
        self._board.replaced = kept.row
        kept.is_replaced = True
        try:
            # From here on it gets no connections.
            if old is not None:
                await self._dismiss(kept, old)
            with trio.move_on_after(_RENEWAL_SECONDS):
                while kept.process in (None, old):
                    await self._changed.wait()
                kept.is_replaced = False
                while not (kept.is_ready and self._board.is_ready(kept.row)):
                    await self._changed.wait()
                return True
        finally:
            kept.is_replaced = False
            self._board.replaced = -1
            self._hear(None)
        return False

    async def _dismiss(self, kept: KeptProcess, old: WorkerProcess) -> None:
        """Have a process end gently; one that takes much longer than its requests may is killed."""
        with trio.move_on_after(_TELL_SECONDS):
            await kept.tell(DRAIN)
        kept.dismiss()
        with trio.move_on_after(self._plan.settings.drain_seconds + _END_SECONDS):
            while kept.process is old:
                await self._changed.wait()
            return
        log.warning("a worker process does not end, and is killed", worker=kept.row, pid=old.pid)
        old.kill()

    # Connections

    async def _give_the_last(self) -> None:
        """Accept what has come, close the listeners, and have it all given."""
        for accepting in self._accepting.values():
            accepting.stop()
        for name in self._listening:
            await self._accepting[name].ended.wait()
        while self._giving:
            await self._changed.wait()

    async def _give(self, protocol: str, stream: DirectStream) -> None:
        """Hand a connection over to the worker with the fewest connections; wait while no worker is ready.

        Ownership: the caller closes the descriptor of this process.
        """
        # The address goes along: the socket of a client that has reset the connection has none any more.
        address = stream.peer_address
        message = [protocol, address.host, address.port]
        self._giving += 1
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
            self._giving -= 1
            if self._draining.is_set():
                self._tell_change()

    def _least_busy(self) -> KeptProcess | None:
        ready = [kept for kept in self._kept if kept.is_ready and not kept.is_replaced]
        stuck = {kept.row for kept in ready if self._board.is_stuck(kept.row)}
        for row in stuck - self._stuck:
            log.warning("a worker process is stuck, and others get its connections", worker=row)
        self._stuck = stuck
        # Where all of them are, one is as good as the other.
        return min(ready, key=lambda kept: (kept.row in stuck, *self._load(kept)), default=None)

    def _load(self, kept: KeptProcess) -> tuple[int, int]:
        return kept.given - self._board.closed_connections(kept.row), kept.given

    # Processes

    def _place(self, row: int) -> KeptProcess:
        task = WorkerTask.of(self._plan, self._board.rows, row, self._secret)
        return KeptProcess(
            row,
            partial(WorkerProcess, _PROGRAM, own_group=True, heard=self._hear, stopped_seconds=math.inf),
            task.model_dump(mode="json"),
            self._board.descriptor,
            backoff=Backoff(_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS, _STABLE_SECONDS),
            stopping=self._draining,
            changed=partial(self._hear, None),
            ended=self._notice_end,
        )

    def _notice_end(self, kept: KeptProcess, process: WorkerProcess) -> None:
        """Log the end of a worker that ended by itself, and clear its state on the board.

        Raises:
            ConfigError: not all have been ready yet.
        """
        LOG_LEVEL.follow()
        code = process.status or 0
        is_draining = self._draining.is_set()
        was_cut = is_draining and kept.is_ready and code not in _GENTLE
        self._has_cut = self._has_cut or was_cut
        is_wanted = kept.is_replaced and code in _GENTLE
        if not (is_draining or is_wanted) or (was_cut and code != CUT):
            self._log_end(kept, process.pid, code)
        self._board.clear(kept.row, keeps_sequences=self._plan.settings.sequence_store is not None)
        self._hear(None)
        if not (is_draining or self._has_been_ready):
            text = f"a worker process ended before it was ready, by {_cause(code)}; its log says why"
            raise ConfigError([Problem(text, file=self._origin)])

    def _log_end(self, kept: KeptProcess, pid: int | None, code: int) -> None:
        # Only the workers of a project count the requests in flight on the board.
        requests = {"requests_lost": self._board.in_flight(kept.row)} if self._plan.root else {}
        log.error(
            "a worker process has ended",
            name=self._plan.root,
            worker=kept.row,
            pid=pid,
            cause=_cause(code),
            signal=signal_name(-code) if code < 0 else None,
            exit_code=code if code >= 0 else None,
            connections_lost=self._load(kept)[0],
            **requests,
        )

    @property
    def _origin(self) -> str:
        services = self._plan.spec.services
        return services[0].origin if services else ""

    # Readiness

    def _hear(self, _: Any) -> None:
        """Pass on that the readiness of a process has changed."""
        if self._nursery is not None:
            self._nursery.start_soon(self._tell_all, CHANGED)
        self._tell_change()

    async def _tell_all(self, value: str) -> None:
        # One that is stuck keeps no other waiting.
        async with trio.open_nursery() as nursery:
            for kept in self._kept:
                nursery.start_soon(kept.tell, value)

    async def _until_ready(self) -> None:
        while not (self._has_been_ready or self._draining.is_set()):
            await self._changed.wait()

    def _tell_change(self) -> None:
        """Wake whoever waits for processes, and let readiness be the truth."""
        self._has_been_ready = self._has_been_ready or (
            not self._draining.is_set() and all(kept.is_ready for kept in self._kept)
        )
        is_ready = not self._draining.is_set() and self._has_been_ready and self._are_enough_ready()
        self._readiness.show(ready=is_ready)
        self._plan.notifier.show(ready=is_ready, reason="no worker process is ready")
        self._changed.set()
        self._changed = trio.Event()

    def _are_enough_ready(self) -> bool:
        # Of a project, those that are left serve on when one has died.
        return any(kept.is_ready for kept in self._kept) if self._plan.root else self._board.all_ready()


def _most_sequences(plan: Plan) -> int:
    return sum(each.max_sequence_number for each in plan.spec.services if isinstance(each, ModelSpec) and each.stateful)


def _cause(code: int) -> str:
    return signal_name(-code) if code < 0 else f"exit code {code}"
