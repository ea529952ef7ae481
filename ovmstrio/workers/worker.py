"""The program of one of many processes that serve a plan: its first request is a ``WorkerTask``."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import trio
from pydantic import BaseModel

from ovmstrio.core.events import CallObserver
from ovmstrio.handlers.config.project_file import read_project
from ovmstrio.isolation.worker_program import WorkRequest, WorkRequests, run_program
from ovmstrio.models.sequences import SequenceManagers
from ovmstrio.models.sequences.store import part_of_store
from ovmstrio.server.command_line import probe_addresses
from ovmstrio.server.listening import HTTP, HTTP2, Certificates
from ovmstrio.server.plan import own_port, plan_project, read_plan
from ovmstrio.server.process_main import serve_in_own_process
from ovmstrio.server.project_logs import configure_project_logs, enter_project
from ovmstrio.server.settings import ServerSettings
from ovmstrio.server.start_failures import log_failures
from ovmstrio.server.worker_context import Hosting
from ovmstrio.serving.aggregate import leave_last_figures
from ovmstrio.serving.kind import LoadContext
from ovmstrio.telemetry.log_levels import LOG_LEVEL, read_log_levels
from ovmstrio.telemetry.logs import configure_logs, set_worker_number
from ovmstrio.transport.tls import TlsListener
from ovmstrio.util.cores import CORES
from ovmstrio.workers.changes import OtherWorkers
from ovmstrio.workers.engines import WorkerEngines
from ovmstrio.workers.handoff import ConnectionInbox
from ovmstrio.workers.rpc import Peers
from ovmstrio.workers.rpc_handlers import PeerAnswers
from ovmstrio.workers.sequences import BoardDirectory, PeerOwners
from ovmstrio.workers.shared_state import Bells, Board, LedgerLimit, SharedLedger, SharedLimit

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from ovmstrio.core.events import CallEvent
    from ovmstrio.core.limits import ConcurrencyLimit
    from ovmstrio.core.service import LeaseServable
    from ovmstrio.server.plan import Plan
    from ovmstrio.server.reloading import Reloading
    from ovmstrio.server.server import Running
    from ovmstrio.serving.data_plane import DataPlane
    from ovmstrio.transport.listeners import Listener

__all__ = ["CHANGED", "CUT", "DRAIN", "WorkerTask", "main"]

# ----------------------------------------------------------------------
# What a process that is to serve a plan with others is told, and what it tells by its end
# ----------------------------------------------------------------------

CUT: Final = 3
"""The exit code of a process that had to cut requests, which its own log tells of."""


DRAIN: Final = "drain"
"""What a process is told when the server begins to drain; until it is dismissed it is given further connections."""


CHANGED: Final = "changed"
"""What a process tells when its readiness has changed, and what the others are told then."""


class WorkerTask(BaseModel):
    """What a worker process is told, and the board's descriptor with it.

    Attributes:
        file: of a project that is served alone; None where the options say what is served.
        options: of the command line.
        rows: how many processes there are.
        row: the number of this one.
        secret: what all of them know, and nobody else.
        search_path: where the parent imports from.
        reason: why there are so many, where nobody has said how many there are to be.
    """

    file: Path | None
    options: dict[str, Any]
    rows: int
    row: int
    secret: str
    search_path: list[str] = []
    reason: str = ""

    @classmethod
    def of(cls, plan: Plan, rows: int, row: int, secret: str) -> WorkerTask:
        """Make the task of one process of a plan."""
        options = plan.settings.model_dump(mode="json", exclude_unset=True)
        file = Path(plan.spec.services[0].origin) if plan.root else None
        if file is None:
            options["workers"] = rows
        told: dict[str, Any] = {"search_path": sys.path, "reason": plan.workers_reason}
        return cls(file=file, options=options, rows=rows, row=row, secret=secret, **told)


# ----------------------------------------------------------------------
# The program of one of many processes that serve a plan: its first request is a ``WorkerTask``
# ----------------------------------------------------------------------

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
