"""The program of one of many processes that serve a plan: its first request is a ``WorkerTask``."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import trio

from ovmstrio.core.events import CallObserver
from ovmstrio.dataplane.whole_server import leave_last_figures
from ovmstrio.observability.log_level import LOG_LEVEL
from ovmstrio.observability.log_trees import read_log_levels
from ovmstrio.observability.logs import configure_logs
from ovmstrio.observability.worker_number import set_worker_number
from ovmstrio.runtimes.handlers.config.project_file import read_project
from ovmstrio.runtimes.kind import LoadContext
from ovmstrio.runtimes.models.sequences import SequenceManagers
from ovmstrio.runtimes.models.sequences.parts import part_of_store
from ovmstrio.server.certificates import Certificates
from ovmstrio.server.command_line import probe_addresses
from ovmstrio.server.hosting import Hosting
from ovmstrio.server.listening import HTTP, HTTP2
from ovmstrio.server.own_process import serve_in_own_process
from ovmstrio.server.plan import read_plan
from ovmstrio.server.project_environment import enter_project
from ovmstrio.server.project_logs import configure_project_logs
from ovmstrio.server.project_plan import own_port, plan_project
from ovmstrio.server.settings import ServerSettings
from ovmstrio.server.start_failures import log_failures
from ovmstrio.server.workers.bells import Bells
from ovmstrio.server.workers.board import Board, SharedLimit
from ovmstrio.server.workers.engines import WorkerEngines
from ovmstrio.server.workers.passing import ConnectionInbox
from ovmstrio.server.workers.peer_answers import PeerAnswers
from ovmstrio.server.workers.peers import Peers
from ovmstrio.server.workers.sequence_directory import BoardDirectory
from ovmstrio.server.workers.shared_ledger import LedgerLimit, SharedLedger
from ovmstrio.server.workers.steps import PeerOwners
from ovmstrio.server.workers.task import CHANGED, CUT, DRAIN, WorkerTask
from ovmstrio.server.workers.turns import OtherWorkers
from ovmstrio.wire.reloaded_tls import TlsListener
from ovmstrio.work.cores import CORES
from ovmstrio.work.processes import WorkRequest, WorkRequests, run_program

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from ovmstrio.core.events import CallEvent
    from ovmstrio.core.limits import ConcurrencyLimit
    from ovmstrio.core.servable import LeaseServable
    from ovmstrio.dataplane.plane import DataPlane
    from ovmstrio.server.plan import Plan
    from ovmstrio.server.reloading import Reloading
    from ovmstrio.server.running import Running
    from ovmstrio.wire.listeners import Listener

__all__ = ["main"]

_LIFE_SECONDS: Final = 1.0
_FAREWELL_SECONDS: Final = 5.0
"""What other processes get at least to say that they need no more answers when all end."""


async def _serve(first: WorkRequest, requests: WorkRequests) -> None:
    """Serve the connections that the parent gives, until it says that it will give no more, or has ended.

    Raises:
        ConfigError: the plan cannot be served.
        ValueError: the board is missing.
        SystemExit: with ``CUT``, requests did not end in time.

    Ownership: what the server opens.

    Cancellation: at once.
    """
    task = WorkerTask.model_validate(first.value)
    if first.descriptor is None:
        raise ValueError("a process of several needs the board")
    set_worker_number(task.row)
    plan = await _plan_of(task)
    CORES.processes = task.rows
    board = Board(first.descriptor, task.rows)
    worker = _Worker(plan, board, task)

    async def answer(running: Running) -> None:
        await worker.follow(running.plane, first, requests)

    hosting = worker.hosting(requests)
    with LOG_LEVEL.shared(board), worker.listening_to_bells():
        gently = await serve_in_own_process(worker.plan, hosting, show=answer, handle_signals=False)
    if not gently:
        sys.exit(CUT)


async def _plan_of(task: WorkerTask) -> Plan:
    """Make the plan that the parent has as well, and set up the process for it.

    Raises:
        ConfigError: it cannot be served any more.
    """
    if task.file is not None:
        project, _ = read_project(task.file)
        plan = plan_project(project, task.options)
        enter_project(project, own_port(project, plan.settings))
        configure_project_logs(project.log_level, plan.settings)
        return plan
    sys.path[:] = task.search_path
    settings = ServerSettings.model_validate(task.options)
    configure_logs(level=settings.log_level, fmt=settings.log_format, path=settings.log_path)
    LOG_LEVEL.set_parts(read_log_levels(settings.log_levels or ""))
    return replace(await read_plan(settings), workers_reason=task.reason)


class _Worker:
    """What a process has of its own of a server that many processes are."""

    def __init__(self, plan: Plan, board: Board, task: WorkerTask) -> None:
        # The parent has waited, and says by the file whether all are ready.
        settings = plan.settings.model_copy(update={"drain_delay": 0})
        if settings.sequence_store is not None:
            part = part_of_store(settings.sequence_store, task.row, task.rows)
            settings = settings.model_copy(update={"sequence_store": part})
        self.plan = replace(plan, settings=settings, readiness_file=None)
        self._certificates = Certificates(settings)
        self._warned = trio.Event()
        self._board = board
        self._row = row = task.row
        self._drains_until = 0.0
        self._plane: DataPlane | None = None
        self._peers = Peers(task.secret, task.rows, row)
        self._engines = WorkerEngines(self._peers)
        self._others = OtherWorkers(self._peers, board.figures)
        self._bells = Bells(task.secret, row)
        self._ledger = SharedLedger(board, row, self._bells)
        self._has_sequences = trio.Event()
        self._directory = BoardDirectory(board, row, task.secret, self._has_sequences.set)
        addresses = (("gRPC", plan.grpc), ("REST", plan.rest), ("probes", probe_addresses(settings)))
        protocols = [name for name, where in addresses if where]
        closed = partial(board.add_closed_connection, row)
        self._inboxes = {name: ConnectionInbox(closed) for name in protocols}

    def hosting(self, requests: WorkRequests) -> Hosting:
        """Tell how this process takes part."""
        listeners = {name: [self._secured(name, inbox)] for name, inbox in self._inboxes.items()}
        until = partial(self._serve_until_told, requests)
        observers, watches = (_FollowLogLevel(),), (self._certificates.look,)
        warned = self._warned.wait
        return Hosting(
            listeners=listeners,
            lend=self._lend,
            obstacle=self._obstacle,
            until=until,
            warned=warned,
            observers=observers,
            watches=watches,
            serve_peers=self._serve_peers,
            leave=self._leave,
            ledger=self._ledger,
            siblings=self._others,
        )

    async def _serve_peers(self, plane: DataPlane, reloading: Reloading, *, task_status: trio.TaskStatus[None]) -> None:
        answers = PeerAnswers(self._peers, self._engines, self._others, plane, reloading)
        await self._peers.run(answers.answer, task_status=task_status)

    def listening_to_bells(self) -> AbstractContextManager[None]:
        """Have other processes wake this one within the block."""
        return self._bells.hung()

    def _limit(self, maximum: int, name: str) -> ConcurrencyLimit | None:
        """Make the limit of a project, over all processes."""
        if self.plan.root:
            return SharedLimit(self._board, self._row, maximum)
        return LedgerLimit(self._ledger, name, maximum) if maximum else None

    def _lend(self, lease: LeaseServable, tasks: trio.Nursery, **lent: Any) -> LoadContext:
        owners = PeerOwners(self._peers, self._directory)
        context = LoadContext(
            lease, tasks, make_limit=self._limit, sequence_owners=owners, engines=self._engines, **lent
        )
        context.shared(SequenceManagers).directory = self._directory
        return context

    async def _leave(self) -> None:
        """Answer no other process any more; when the whole server ends, not before they need no answers.

        Cancellation: at once.
        """
        others = {row for row in range(self._board.rows) if row != self._row and self._board.is_ready(row)}
        # What those still have may need answers until their grace ends.
        seconds = max(_FAREWELL_SECONDS, self._drains_until - trio.current_time())
        last = partial(self._engines.leave, seconds)
        await self._peers.leave(others if self._board.is_draining else None, seconds, last)
        if self._plane is not None:
            leave_last_figures(self._plane)

    async def _serve_until_told(self, requests: WorkRequests) -> None:
        """Take what the parent gives until that is all.

        Cancellation: at once.
        """
        await requests.handle_all(self._put)
        self._drains_until = trio.current_time() + self.plan.settings.drain_seconds

    async def follow(self, plane: DataPlane, first: WorkRequest, requests: WorkRequests) -> None:
        """Say that the process takes connections, and from then on whether it can answer what comes on them.

        Cancellation: at once.
        """
        self._plane = plane
        if not self.plan.root:
            # Whoever gets a step of one that nobody has yet says that there is no such sequence.
            await self._has_sequences.wait()
        was_ready = plane.registry.readiness.ready
        self._board.set_ready(self._row, ready=was_ready)
        await first.answer(None)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._show_life)
            await self._tell_readiness(plane, requests, was_ready=was_ready)

    async def _show_life(self) -> None:
        """Have the parent see that the event loop runs, until cancelled."""
        while True:
            self._board.show_life(self._row)
            await trio.sleep(_LIFE_SECONDS)

    async def _tell_readiness(self, plane: DataPlane, requests: WorkRequests, *, was_ready: bool) -> None:
        while True:
            while (is_ready := plane.registry.readiness.ready) is not was_ready:
                was_ready = is_ready
                self._board.set_ready(self._row, ready=is_ready)
                await requests.tell(CHANGED)
            await plane.wait_change()

    def _secured(self, name: str, inbox: ConnectionInbox) -> Listener:
        tls = None if name == "probes" else self._certificates.tls(HTTP if name == "REST" else HTTP2)
        return inbox if tls is None else TlsListener(inbox, tls)

    async def _put(self, request: WorkRequest) -> None:
        if request.value == DRAIN:
            self._warned.set()
        elif request.value == CHANGED:
            self._peers.announce()
            # One that has ended has left its places.
            self._ledger.ring((self._row,))
            if self._plane is not None:
                self._plane.announce()
        else:
            await self._inboxes[request.value[0]].put(request)

    def _obstacle(self) -> str:
        return "" if self._board.all_ready() else "not all worker processes are ready"


class _FollowLogLevel(CallObserver):
    """Observes calls, and logs them at the level that another process may have been told."""

    def call_started(self, event: CallEvent) -> None:
        """Take the level over."""
        del event
        LOG_LEVEL.follow()


def main() -> int:
    """Run the process, and give its exit code."""
    failed = False
    try:
        run_program(_serve)
    except* Exception as group:  # noqa: BLE001 - the border of the process
        failed = True
        log_failures(group)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
