"""Engine sharing: each text engine runs in one worker process, and the others send their requests to it.

::

    owner:   ShownEngine ── engine process ──┬─ its own requests
                                             └─ requests of other workers, with distinct request ids
    others:  RemoteEngine ──(worker RPC)──> owner
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import trio

from ovmstrio.core.errors import ModelFailure, NotReady, ServerError, WorkerRestarting
from ovmstrio.core.worker_peers import StreamedResult
from ovmstrio.inference.engine.messages import REJECTED
from ovmstrio.isolation.worker_process import WorkerExited
from ovmstrio.text.engine_process import PROGRAM, EngineProcess
from ovmstrio.util.truncation import size_of

if TYPE_CHECKING:
    from ovmstrio.config.specs import TextModelSpec
    from ovmstrio.core.worker_peers import EngineDirectory
    from ovmstrio.text.engine_process import RequestActivity

# ----------------------------------------------------------------------
# Engine RPC
# ----------------------------------------------------------------------


def request_ids(engines: EngineDirectory | None) -> Iterator[int]:
    """Return request ids that no other worker uses."""
    return itertools.count(1) if engines is None else itertools.count(engines.rows + engines.row, engines.rows)


class EngineVerbs(NamedTuple):
    """The RPC verbs of an engine program, and the routing of its messages.

    Attributes:
        begins: verb that starts a request, followed by its id.
        ends: verb that cancels or closes a request.
        split: divides a message among workers, given this worker's index (which always gets a part), the message and
            the number of workers.
        ended: returns the ids of requests of which a text has ended with a part.
    """

    begins: str
    ends: str
    split: Callable[[int, Any, int], dict[int, Any]]
    ended: Callable[[Any], Iterable[int]]


def _split_step(own: int, frame: Any, rows: int) -> dict[int, Any]:
    """Split the output of a step; its metrics go to the owner."""
    texts, failures, figures = frame
    found: defaultdict[int, Any] = defaultdict(lambda: [[], [], None])
    found[own][2] = figures
    for number, *rest in texts:
        found[number % rows][0].append([number, *rest])
    for number, failure in failures:
        found[number % rows][1].append([number, failure])
    return found


def _ended_by_step(frame: Any) -> Iterator[int]:
    texts, failures, _ = frame
    yield from (number for number, *_, finish in texts if finish is not None)
    yield from (number for number, _ in failures)


def _split_part(own: int, frame: Any, rows: int) -> dict[int, Any]:
    del own
    return {frame[0] % rows: frame}


GENERATION_VERBS = EngineVerbs("add", "cancel", _split_step, _ended_by_step)
"""Programs that generate step by step."""

CHUNK_VERBS = EngineVerbs("open", "close", _split_part, lambda _: ())
"""Programs that return parts, each of which is requested."""


# ----------------------------------------------------------------------
# The owner's side
# ----------------------------------------------------------------------

READY: Final = "ready"
MESSAGES: Final = "frames"
LOST: Final = "lost"
"""Part kinds: facts of the model, messages of the engine, and the reason why its process has ended."""

ANSWERED: Final = 0
EXITED: Final = 1
LEAVING: Final = 2
"""Outcomes of a call: a result; the engine process has ended, with the reason; another worker takes over."""

_MAX_QUEUED_SIZE: Final = 16 * 2**20
"""Maximum size, about bytes, of the engine's messages that another worker has not read."""
_CANCEL_SECONDS: Final = 5.0
_LEAVE_SECONDS: Final = 60.0


class EngineServer(EngineProcess):
    """An engine process that also serves requests of other workers.

    Args:
        engines: RPC to the other workers.
        key: key under which others look up the engine.
        verbs: RPC verbs of the program.
        options: see :class:`EngineProcess` for this and the other arguments.

    Attributes:
        last_asked: trio time of the last start or end of another worker's request.
    """

    def __init__(
        self,
        engines: EngineDirectory,
        key: str,
        verbs: EngineVerbs,
        *,
        options: Any,
        name: str,
        on_message: Callable[[Any], None],
        on_exit: Callable[[str], None],
        program: str,
        on_drained: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(options, name, self._on_message, self._on_exit, program, on_drained=on_drained)
        self._engines = engines
        self._key = key
        self._on_own_message = on_message
        self._on_own_exit = on_exit
        self._asking = verbs
        self._streams: dict[int, _MessageStream] = {}
        self._open_texts: dict[int, dict[int, int]] = {}
        self._forgotten_lot = trio.lowlevel.ParkingLot()
        self._loaded = trio.Event()
        self._failure: ServerError | None = None
        self._abandoned: trio.MemorySendChannel[tuple[int, int]] | None = None
        self._is_leaving = False
        self.last_asked = -math.inf

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run the engine and serve the other workers; see :meth:`EngineProcess.run`.

        Raises:
            ModelFailure: the model cannot be loaded the first time.
        """
        self._abandoned, abandoned = trio.open_memory_channel[tuple[int, int]](math.inf)
        with self._engines.exported(self._key, self):
            try:
                async with trio.open_nursery() as nursery:
                    await nursery.start(super().run)
                    nursery.start_soon(self._cancel_abandoned, abandoned)
                    self._loaded.set()
                    task_status.started()
            except* ServerError as group:
                self._failure = group.exceptions[0] if isinstance(group.exceptions[0], ServerError) else None
                if self._failure is not None:
                    # Workers that ask slightly later must get the error, too.
                    self._engines.set_load_error(self._key, self._failure)
                raise
            finally:
                self._failure = self._failure or NotReady("the engine is closed")
                self._loaded.set()
                self._end_streams("the engine is closed")
                self._open_texts.clear()
                self._forgotten_lot.unpark_all()

    async def sleep(self) -> None:
        """Wait a bounded time for other workers' requests, then end the process; see :meth:`EngineProcess.sleep`."""
        with trio.move_on_after(_LEAVE_SECONDS):
            await self.idle()
        await super().sleep()

    # Calls of other workers
    async def call(self, row: int, value: Any) -> Any:
        """Handle a call of another worker.

        Raises:
            NotReady: there is no process and none is starting.
        """
        what, *rest = value
        self.last_asked = trio.current_time()
        if what == self._asking.ends:
            try:
                return await self._ask(value)
            finally:
                self._forget(row, rest[0])
        if what != self._asking.begins:
            return await self._ask(value)
        if self._is_leaving or row not in self._streams:
            return [LEAVING, None]
        number, asked, *_ = rest
        self._open_texts.setdefault(row, {})[number] = asked["n"] if isinstance(asked, dict) else 1
        try:
            answer = await self._ask(value)
        except trio.Cancelled:
            # The program may have the request already, and the cancellation by its worker may not arrive.
            self._abandon(row, number)
            raise
        except Exception:
            self._forget(row, number)
            raise
        if _is_refusal(answer):
            self._forget(row, number)
        return answer

    async def _ask(self, value: Any) -> Any:
        try:
            process = await self.ready()
            if value[0] == self._asking.ends:
                await process.notify(value)
                return [ANSWERED, None]
            return [ANSWERED, await process.call(value)]
        except WorkerExited as ended:
            return [EXITED, ended.why]

    async def listen(self, row: int) -> StreamedResult:
        """Return the stream of engine messages for another worker, once the model is loaded.

        Raises:
            ServerError: the model cannot be loaded.
        """
        await self._loaded.wait()
        old = self._streams.get(row)
        if old is not None:
            old.end()
            self.left(old, row)
        # A worker that has started again uses the request ids of its predecessor again.
        while self._open_texts.get(row):
            await self._forgotten_lot.park()
        if self._failure is not None:
            raise self._failure
        if self._is_leaving:
            raise NotReady("the engine is being closed")
        session = _MessageStream(self, row)
        session.put(READY, self.facts)
        self._streams[row] = session
        return session

    def left(self, session: _MessageStream, row: int) -> None:
        """Cancel the requests of another worker, whose stream has ended."""
        if self._streams.get(row) is session:
            del self._streams[row]
            for number in self._open_texts.get(row, ()):
                self._abandon(row, number)

    def _abandon(self, row: int, number: int) -> None:
        """Cancel a request that no worker waits for."""
        if self._abandoned is not None:
            self._abandoned.send_nowait((row, number))

    async def _cancel_abandoned(self, requests: trio.MemoryReceiveChannel[tuple[int, int]]) -> None:
        async for row, number in requests:
            if number in self._open_texts.get(row, ()):
                with trio.move_on_after(_CANCEL_SECONDS):
                    await self._ask([self._asking.ends, number])
                self._forget(row, number)

    def _forget(self, row: int, number: int) -> None:
        self._open_texts.get(row, {}).pop(number, None)
        self.last_asked = trio.current_time()
        self._forgotten_lot.unpark_all()

    @property
    def open(self) -> int:
        """Number of open requests of other workers."""
        return sum(map(len, self._open_texts.values()))

    async def idle(self) -> None:
        """Wait until other workers have no request."""
        while self.open:
            await self._forgotten_lot.park()

    def watched(self, requests: RequestActivity) -> RequestActivity:
        """Return a view of all requests, including other workers'."""
        return _AllRequests(requests, self)

    async def leave(self, seconds: float) -> None:
        """Refuse new requests of other workers, which retry at the next owner, and wait for the open ones."""
        self._is_leaving = True
        with trio.move_on_after(seconds):
            await self.idle()
        self._end_streams("the engine's worker has shut down")

    def _end_streams(self, reason: str) -> None:
        for row, session in list(self._streams.items()):
            if self._open_texts.get(row):
                session.put(LOST, reason)
            session.end()

    # Messages of the engine
    def _on_message(self, frame: Any) -> None:
        """Route an engine message.

        Raises:
            ValueError, LookupError, TypeError: the message is malformed.
        """
        if not self._streams:
            self._on_own_message(frame)
            return
        for row, part in self._asking.split(self._engines.row, frame, self._engines.rows).items():
            session = self._streams.get(row)
            if row == self._engines.row:
                self._on_own_message(part)
            elif session is not None:
                session.put_frame(part)
                for number in self._asking.ended(part):
                    self._count_ended_text(row, number)

    def _count_ended_text(self, row: int, number: int) -> None:
        """Count down the texts of a request."""
        left = self._open_texts.get(row, {}).get(number)
        if left is not None:
            if left > 1:
                self._open_texts[row][number] = left - 1
            else:
                self._forget(row, number)

    def _on_exit(self, reason: str) -> None:
        self._on_own_exit(reason)
        for session in self._streams.values():
            session.put(LOST, reason)
        self._open_texts.clear()
        self._forgotten_lot.unpark_all()


class _AllRequests:
    """Requests of this and of other workers."""

    def __init__(self, own: RequestActivity, others: EngineServer) -> None:
        self._own = own
        self._others = others

    @property
    def open(self) -> int:
        return self._own.open + self._others.open

    @property
    def last_asked(self) -> float:
        return max(self._own.last_asked, self._others.last_asked)

    @last_asked.setter
    def last_asked(self, when: float) -> None:
        self._own.last_asked = when

    async def idle(self) -> None:
        while self.open:
            await self._own.idle()
            await self._others.idle()


class _MessageStream(StreamedResult):
    """Message stream to one other worker."""

    def __init__(self, engine: EngineServer, row: int) -> None:
        self._engine = engine
        self._row = row
        self._parts: deque[list[Any]] = deque()
        self._queued_size = 0
        self._is_over = False
        self._wakeup_lot = trio.lowlevel.ParkingLot()

    def put(self, kind: str, payload: Any) -> None:
        self._parts.append([kind, payload])
        self._wakeup_lot.unpark_all()

    def put_frame(self, frame: Any) -> None:
        """Append an engine message to the previous unsent ones; drop a worker that does not read."""
        if self._is_over:
            return
        if not self._parts or self._parts[-1][0] != MESSAGES:
            self.put(MESSAGES, [frame])
            return
        self._parts[-1][1].append(frame)
        self._queued_size += size_of(frame, _MAX_QUEUED_SIZE)
        if self._queued_size > _MAX_QUEUED_SIZE:
            self._parts.clear()
            self.put(LOST, "the worker does not read the engine's messages")
            self.end()
            self.close()

    def end(self) -> None:
        self._is_over = True
        self._wakeup_lot.unpark_all()

    async def __anext__(self) -> Any:
        while not self._parts:
            if self._is_over:
                raise StopAsyncIteration
            await self._wakeup_lot.park()
        part = self._parts.popleft()
        if not self._parts:
            self._queued_size = 0
        return part

    def close(self) -> None:
        self._engine.left(self, self._row)


def _is_refusal(answer: Any) -> bool:
    outcome, payload = answer
    return outcome != ANSWERED or bool(payload and payload[0] == REJECTED)


# ----------------------------------------------------------------------
# The other workers' side
# ----------------------------------------------------------------------

_STARTING: Final = "the worker that has the model's engine is being started; send the request again"


class RemoteEngine:
    """An engine in another worker, with the interface of :class:`EngineProcess`.

    Args:
        owner: index of the worker that runs the engine.
        key: key under which the owner exports it.
        on_message: called with each engine message for this worker.
        on_exit: called with the reason when the engine has ended.
        on_drained: called after the messages that have arrived together.

    Attributes:
        facts: facts of the loaded model.
        unready_reason: why the engine is unavailable; empty if it is available.
    """

    def __init__(
        self,
        engines: EngineDirectory,
        owner: int,
        key: str,
        on_message: Callable[[Any], None],
        on_exit: Callable[[str], None],
        *,
        on_drained: Callable[[], None] | None = None,
    ) -> None:
        self.facts: dict[str, Any] = {}
        self.unready_reason = _STARTING
        self.pid: int | None = None
        self._engines = engines
        self._owner = owner
        self._key = key
        self._on_message_callback = on_message
        self._on_exit_callback = on_exit
        self._on_drained_callback = on_drained
        self._changes = trio.lowlevel.ParkingLot()
        self._started: trio.TaskStatus[None] | None = None
        self._generation = 0

    @property
    def place(self) -> str:
        """Location, for introspection."""
        return f"worker {self._owner}'s"

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Receive messages of the engine and of its successors; started once the model is loaded.

        Raises:
            ModelFailure: the model cannot be loaded the first time.
        """
        self._started = task_status
        while True:
            # A stream that ended normally has already reported lost requests.
            why = ""
            try:
                await self._engines.listen(self._owner, self._key, self._on_message)
            except NotReady as error:
                why = error.message
            except ServerError as error:
                self._check_ever_started(error)
                why = error.message
            self._mark_unavailable(why)
            await self._engines.wait_change()

    def _check_ever_started(self, error: ServerError) -> None:
        """Raise ``ModelFailure`` if the engine has never been available."""
        if self._started is not None:
            raise ModelFailure(error.message) from error

    def _mark_unavailable(self, reason: str) -> None:
        if not self.unready_reason:
            self.unready_reason = _STARTING
            if reason:
                self._on_exit_callback(reason)

    def _on_message(self, part: Any) -> None:
        """Handle a part.

        Raises:
            ValueError, LookupError, TypeError: the part is malformed.
        """
        kind, payload = part
        if kind == MESSAGES:
            for frame in payload:
                self._on_message_callback(frame)
            if self._on_drained_callback is not None:
                self._on_drained_callback()
        elif kind == LOST:
            self._on_exit_callback(payload)
        elif kind == READY:
            self.facts, self.unready_reason = payload, ""
            self._generation += 1
            started, self._started = self._started, None
            if started is not None:
                started.started()
            self._changes.unpark_all()
        else:
            raise ValueError(f"unknown engine message: {kind!r:.40}")

    async def ready(self) -> RemoteEngine:
        """Return the engine, waiting a bounded time for a new owner.

        Raises:
            WorkerRestarting: there is none.
        """
        if self.unready_reason:
            with trio.move_on_after(self._engines.wait_seconds(self._owner)):
                while self.unready_reason:
                    await self._changes.park()
            if self.unready_reason:
                raise WorkerRestarting(self.unready_reason)
        return self

    async def sleep(self) -> None:
        """Do nothing: the owner decides."""

    async def call(self, value: Any) -> Any:
        """Call the engine as a local process.

        Raises:
            WorkerExited: its process ended before it answered.
            WorkerRestarting: the owner cannot be reached in time.
            NotReady: the owner exited before it answered.
        """
        while True:
            times = self._generation
            try:
                outcome, payload = await self._engines.call(self._owner, self._key, value)
            except WorkerRestarting:
                outcome, payload = LEAVING, None
            if outcome == EXITED:
                raise WorkerExited(payload, was_called=True)
            if outcome != LEAVING:
                return payload
            with trio.move_on_after(self._engines.wait_seconds(self._owner)) as waiting:
                while times == self._generation:
                    await self._changes.park()
            if waiting.cancelled_caught:
                raise WorkerRestarting(_STARTING)

    async def notify(self, value: Any) -> None:
        """Send a message without a result; an engine that has exited need not get it.

        Raises:
            WorkerExited: its process has ended.
        """
        try:
            await self.call(value)
        except ServerError as error:
            raise WorkerExited(error.message, was_called=False) from error


# ----------------------------------------------------------------------
# Selection
# ----------------------------------------------------------------------

Engine = EngineProcess | RemoteEngine


def create_engine(
    engines: EngineDirectory | None,
    spec: TextModelSpec,
    options: Any,
    on_message: Callable[[Any], None],
    on_exit: Callable[[str], None],
    *,
    failed: Callable[[str], None] | None = None,
    program: str = PROGRAM,
    verbs: EngineVerbs = GENERATION_VERBS,
    on_drained: Callable[[], None] | None = None,
) -> Engine:
    """Create the engine of a model: local, exported, or remote; it must be run.

    Workers with the same ``spec`` share an engine.  ``failed`` replaces ``on_exit`` for a remote engine, whose restarts
    the owner counts.  The other arguments are those of :class:`EngineProcess`.
    """
    if engines is None:
        return EngineProcess(options, spec.name, on_message, on_exit, program, on_drained=on_drained)
    key = f"{spec.name} {sha256(repr(spec.loaded_settings()).encode()).hexdigest()}"
    owner = engines.owner(spec.name)
    if owner is not None:
        return RemoteEngine(engines, owner, key, on_message, failed or on_exit, on_drained=on_drained)
    return EngineServer(
        engines,
        key,
        verbs,
        options=options,
        name=spec.name,
        on_message=on_message,
        on_exit=on_exit,
        program=program,
        on_drained=on_drained,
    )
