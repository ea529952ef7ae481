"""Engines of a server of several processes: one process has each of them.

::

    the owner:  ShownEngine ── a process, as alone ──┬─ its own requests
                                                     └─ those of others, which have numbers of their own
    others:     RemoteEngine ──(a link between processes)──> the owner
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import trio

from ovmstrio.core.errors import ModelFailure, NotReady, ServerError
from ovmstrio.core.worker_peers import PartedAnswer
from ovmstrio.inference.engine.messages import REFUSED
from ovmstrio.isolation.worker_process import WorkerEnded
from ovmstrio.text.engine_process import PROGRAM, EngineProcess

if TYPE_CHECKING:
    from ovmstrio.config.specs import TextModelSpec
    from ovmstrio.core.worker_peers import EngineSharing
    from ovmstrio.text.engine_process import KnowsRequests

__all__ = [
    "ANSWERED",
    "ENDED",
    "FRAMES",
    "LEAVING",
    "LOST",
    "PARTS",
    "READY",
    "TEXTS",
    "Asking",
    "Engine",
    "RemoteEngine",
    "ShownEngine",
    "engine_of",
    "numbers_of",
]

# ----------------------------------------------------------------------
# How the programs of engines are asked, as far as those have to know who pass questions and answers on
# ----------------------------------------------------------------------


def numbers_of(engines: EngineSharing | None) -> Iterator[int]:
    """Give numbers for the requests of this process, which no other one has."""
    return itertools.count(1) if engines is None else itertools.count(engines.rows + engines.row, engines.rows)


class Asking(NamedTuple):
    """How a program is asked.

    Attributes:
        begins: the word by which a request begins, before its number.
        ends: the word by which it is ended.
        split: gives what is whose of a frame that the program tells, by processes, of which there are so many, and what
            the first argument says is given in any case.
        ended: gives the numbers of requests one of whose texts has ended with a part of a frame.
    """

    begins: str
    ends: str
    split: Callable[[int, Any, int], dict[int, Any]]
    ended: Callable[[Any], Iterable[int]]


def _split_step(own: int, frame: Any, rows: int) -> dict[int, Any]:
    """Split what a step has brought; its figures are the owner's."""
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


TEXTS = Asking("add", "cancel", _split_step, _ended_by_step)
"""Programs that make texts step by step."""

PARTS = Asking("open", "close", _split_part, lambda _: ())
"""Programs that answer in parts, each of which is asked for."""


# ----------------------------------------------------------------------
# An engine that other processes of the server ask as well, as the one has it that owns its process
# ----------------------------------------------------------------------

READY: Final = "ready"
FRAMES: Final = "frames"
LOST: Final = "lost"
"""What parts tell: facts of the model; what the engine has told of requests; why its process has ended."""

ANSWERED: Final = 0
ENDED: Final = 1
LEAVING: Final = 2
"""What becomes of a question: an answer; the engine's process has ended, and why; another process is to be asked."""

_MOST_FRAMES: Final = 100_000
_TELL_SECONDS: Final = 5.0
_LEAVE_SECONDS: Final = 60.0


class ShownEngine(EngineProcess):
    """One model's process, whose requests are those of several processes of the server.

    Args:
        engines: the others.
        key: by which they ask for it.
        asking: how the program is asked.
        options: as the other arguments, see :class:`EngineProcess`.

    Attributes:
        open: how many requests of others there are.
        last_asked: when one of them has come last, or has ended, on trio's clock.
    """

    def __init__(
        self,
        engines: EngineSharing,
        key: str,
        asking: Asking,
        *,
        options: Any,
        name: str,
        heard: Callable[[Any], None],
        lost: Callable[[str], None],
        program: str,
    ) -> None:
        super().__init__(options, name, self._hear, self._lose, program)
        self._engines = engines
        self._key = key
        self._own_heard = heard
        self._own_lost = lost
        self._asking = asking
        self._sessions: dict[int, _Session] = {}
        self._numbers: dict[int, dict[int, int]] = {}
        self._emptied = trio.lowlevel.ParkingLot()
        self._loaded = trio.Event()
        self._failure: ServerError | None = None
        self._dropped: trio.MemorySendChannel[int] | None = None
        self._is_leaving = False
        self.last_asked = -math.inf

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Be the engine, and answer others; as :meth:`EngineProcess.run`.

        Raises:
            ModelFailure: the model cannot be loaded, the first time.
        """
        self._dropped, dropped = trio.open_memory_channel[int](math.inf)
        with self._engines.shown(self._key, self):
            try:
                async with trio.open_nursery() as nursery:
                    await nursery.start(super().run)
                    nursery.start_soon(self._drop_all, dropped)
                    self._loaded.set()
                    task_status.started()
            except* ServerError as group:
                self._failure = group.exceptions[0] if isinstance(group.exceptions[0], ServerError) else None
                if self._failure is not None:
                    # Who asks a moment later is to know as well.
                    self._engines.refuse(self._key, self._failure)
                raise
            finally:
                self._failure = self._failure or NotReady("the engine is closed")
                self._loaded.set()
                self._end_sessions("the engine is closed")

    async def sleep(self) -> None:
        """End the process, when others have no request any more; see :meth:`EngineProcess.sleep`.

        Cancellation: shielded once others have none.
        """
        with trio.move_on_after(_LEAVE_SECONDS):
            await self.idle()
        await super().sleep()

    # What others ask

    async def call(self, row: int, value: Any) -> Any:
        """Answer what another process asks of the engine.

        Raises:
            NotReady: there is no process, and none is to come.

        Cancellation: at once.
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
        if self._is_leaving or row not in self._sessions:
            return [LEAVING, None]
        number, asked, *_ = rest
        self._numbers.setdefault(row, {})[number] = asked["n"] if isinstance(asked, dict) else 1
        try:
            # One that is left while it waits for room is there still: whoever has left ends it, or its process's end.
            answer = await self._ask(value)
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
                await process.tell(value)
                return [ANSWERED, None]
            return [ANSWERED, await process.call(value)]
        except WorkerEnded as ended:
            return [ENDED, ended.why]

    async def listen(self, row: int) -> PartedAnswer:
        """Give what the engine tells of another process's requests, once it has been loaded.

        Raises:
            ServerError: it cannot be loaded.

        Cancellation: at once.
        """
        await self._loaded.wait()
        if self._failure is not None:
            raise self._failure
        if self._is_leaving:
            raise NotReady("the engine is being closed")
        session = _Session(self, row)
        session.put(READY, self.facts)
        old = self._sessions.get(row)
        self._sessions[row] = session
        if old is not None:
            old.end()
        return session

    def left(self, session: _Session, row: int) -> None:
        """Note that another process hears no more: what it has asked for ends."""
        if self._sessions.get(row) is session:
            del self._sessions[row]
            if self._dropped is not None:
                self._dropped.send_nowait(row)

    async def _drop_all(self, rows: trio.MemoryReceiveChannel[int]) -> None:
        """End the requests of processes that are gone.

        Cancellation: at once.
        """
        async for row in rows:
            for number in list(self._numbers.get(row, ())) if row not in self._sessions else ():
                with trio.move_on_after(_TELL_SECONDS):
                    await self._ask([self._asking.ends, number])
                self._forget(row, number)

    def _forget(self, row: int, number: int) -> None:
        self._numbers.get(row, {}).pop(number, None)
        self.last_asked = trio.current_time()
        if not self.open:
            self._emptied.unpark_all()

    @property
    def open(self) -> int:
        """How many requests of others there are."""
        return sum(map(len, self._numbers.values()))

    async def idle(self) -> None:
        """Wait until others have no request.

        Cancellation: at once.
        """
        while self.open:
            await self._emptied.park()

    def watched(self, requests: KnowsRequests) -> KnowsRequests:
        """Give what knows of all requests."""
        return _AllRequests(requests, self)

    async def leave(self, seconds: float) -> None:
        """Take no more requests of others, who ask the next process then, and let those that there are end.

        Cancellation: at once.
        """
        self._is_leaving = True
        with trio.move_on_after(seconds):
            await self.idle()
        self._end_sessions("the worker that had the engine has ended")

    def _end_sessions(self, why: str) -> None:
        """Tell others no more, and those who wait for answers that these do not come."""
        for row, session in list(self._sessions.items()):
            if self._numbers.get(row):
                session.put(LOST, why)
            session.end()

    # What the engine tells

    def _hear(self, frame: Any) -> None:
        """Hand out what a step has brought.

        Raises:
            ValueError, LookupError, TypeError: it is no frame.
        """
        if not self._sessions:
            self._own_heard(frame)
            return
        for row, part in self._asking.split(self._engines.row, frame, self._engines.rows).items():
            session = self._sessions.get(row)
            if row == self._engines.row:
                self._own_heard(part)
            elif session is not None:
                session.put_frame(part)
                for number in self._asking.ended(part):
                    self._note_ended(row, number)

    def _note_ended(self, row: int, number: int) -> None:
        """Note that one of the texts of a request has ended."""
        left = self._numbers.get(row, {}).get(number)
        if left is not None:
            if left > 1:
                self._numbers[row][number] = left - 1
            else:
                self._forget(row, number)

    def _lose(self, why: str) -> None:
        self._own_lost(why)
        for row, session in self._sessions.items():
            session.put(LOST, why)
            self._numbers.pop(row, None)
        self._emptied.unpark_all()


class _AllRequests:
    """The requests of this process and of others; see :class:`KnowsRequests`."""

    def __init__(self, own: KnowsRequests, others: ShownEngine) -> None:
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


class _Session(PartedAnswer):
    """What is told another process."""

    def __init__(self, engine: ShownEngine, row: int) -> None:
        self._engine = engine
        self._row = row
        self._parts: deque[list[Any]] = deque()
        self._is_over = False
        self._news = trio.lowlevel.ParkingLot()

    def put(self, kind: str, told: Any) -> None:
        """Tell something."""
        self._parts.append([kind, told])
        self._news.unpark_all()

    def put_frame(self, frame: Any) -> None:
        """Tell of a step, together with those before it that wait; one that does not listen is let go."""
        if self._is_over:
            return
        if self._parts and self._parts[-1][0] == FRAMES:
            frames = self._parts[-1][1]
            frames.append(frame)
            if len(frames) > _MOST_FRAMES:
                self.put(LOST, "the worker that asked does not listen")
                self.end()
        else:
            self.put(FRAMES, [frame])

    def end(self) -> None:
        """Tell no more."""
        self._is_over = True
        self._news.unpark_all()

    async def __anext__(self) -> Any:
        while not self._parts:
            if self._is_over:
                raise StopAsyncIteration
            await self._news.park()
        return self._parts.popleft()

    def close(self) -> None:
        """Note that the other process hears no more."""
        self._engine.left(self, self._row)


def _is_refusal(answer: Any) -> bool:
    outcome, told = answer
    return outcome != ANSWERED or bool(told and told[0] == REFUSED)


# ----------------------------------------------------------------------
# An engine that another process of the server has, as one has it that asks that process
# ----------------------------------------------------------------------

_WAIT_SECONDS: Final = 60.0
"""How long a request waits for a process that is being started in the place of the one that had the engine."""
_STARTED: Final = "the worker that has the model's engine is being started"


class RemoteEngine:
    """One model's process, which is another one's of the server; see :class:`EngineProcess` for what is as there.

    Args:
        engines: the other processes.
        owner: the one that has it.
        key: by which it is asked for.
        heard: is called with each frame that is for this process.
        lost: is called when the engine has ended, with the reason.

    Attributes:
        facts: what the program has told of the model.
        obstacle: why it cannot be asked now; empty if it can.
    """

    def __init__(
        self,
        engines: EngineSharing,
        owner: int,
        key: str,
        heard: Callable[[Any], None],
        lost: Callable[[str], None],
    ) -> None:
        self.facts: dict[str, Any] = {}
        self.obstacle = _STARTED
        self.pid: int | None = None
        self._engines = engines
        self._owner = owner
        self._key = key
        self._heard = heard
        self._lost = lost
        self._changes = trio.lowlevel.ParkingLot()
        self._started: trio.TaskStatus[None] | None = None
        self._times = 0

    @property
    def place(self) -> str:
        """Where it lives, for those who look."""
        return f"worker {self._owner}'s"

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Hear what the engine tells, and what the next one tells; started once it has been loaded.

        Raises:
            ModelFailure: it cannot be loaded, the first time.

        Cancellation: at once; what was asked of it ends.
        """
        self._started = task_status
        while True:
            # Who has been told that there is no more has also been told of what was lost with that.
            why = ""
            try:
                await self._engines.listen(self._owner, self._key, self._hear)
            except NotReady as error:
                why = error.message
            except ServerError as error:
                self._check_started(error)
                why = error.message
            self._detach(why)
            await self._engines.wait_change()

    def _check_started(self, error: ServerError) -> None:
        """See that an engine which cannot be loaded has been loaded before.

        Raises:
            ModelFailure: it has not.
        """
        if self._started is not None:
            raise ModelFailure(error.message) from error

    def _detach(self, why: str) -> None:
        if not self.obstacle:
            self.obstacle = _STARTED
            if why:
                self._lost(why)

    def _hear(self, part: Any) -> None:
        """Take what has come.

        Raises:
            ValueError, LookupError, TypeError: it is nothing that is told.
        """
        kind, told = part
        if kind == FRAMES:
            for frame in told:
                self._heard(frame)
        elif kind == LOST:
            self._lost(told)
        elif kind == READY:
            self.facts, self.obstacle = told, ""
            self._times += 1
            started, self._started = self._started, None
            if started is not None:
                started.started()
            self._changes.unpark_all()
        else:
            raise ValueError(f"{kind!r:.40} is nothing that engines tell")

    async def ready(self) -> RemoteEngine:
        """Give who is asked, waiting for a while for the next one where the last has ended.

        Raises:
            NotReady: there is none yet.

        Cancellation: at once.
        """
        with trio.move_on_after(_WAIT_SECONDS):
            while self.obstacle:
                await self._changes.park()
        if self.obstacle:
            raise NotReady(self.obstacle)
        return self

    async def woken(self) -> None:
        """Wait until it can be asked.

        Cancellation: at once.
        """
        while self.obstacle:
            await self._changes.park()

    async def sleep(self) -> None:
        """Leave it to its owner; what was asked of it ends with :meth:`run`."""

    def watched(self, requests: KnowsRequests) -> KnowsRequests:
        """Give what knows of the requests of this process."""
        return requests

    async def call(self, value: Any) -> Any:
        """Ask the engine, as a process is asked.

        Raises:
            WorkerEnded: its process has ended before it answered.
            NotReady: the worker that has it cannot be reached.

        Cancellation: at once.
        """
        while True:
            times = self._times
            outcome, told = await self._engines.call(self._owner, self._key, value)
            if outcome == ENDED:
                raise WorkerEnded(told, was_called=True)
            if outcome != LEAVING:
                return told
            with trio.move_on_after(_WAIT_SECONDS) as waiting:
                while times == self._times:
                    await self._changes.park()
            if waiting.cancelled_caught:
                raise NotReady(_STARTED)

    async def tell(self, value: Any) -> None:
        """Tell the engine something; one that is gone need not hear it.

        Raises:
            WorkerEnded: its process has ended.

        Cancellation: at once.
        """
        try:
            await self.call(value)
        except ServerError as error:
            raise WorkerEnded(error.message, was_called=False) from error


# ----------------------------------------------------------------------
# Whether a model's engine is this process's own, is shown to others, or is another one's
# ----------------------------------------------------------------------

Engine = EngineProcess | RemoteEngine


def engine_of(
    engines: EngineSharing | None,
    spec: TextModelSpec,
    options: Any,
    heard: Callable[[Any], None],
    lost: Callable[[str], None],
    *,
    failed: Callable[[str], None] | None = None,
    program: str = PROGRAM,
    asking: Asking = TEXTS,
) -> Engine:
    """Make the engine of a model, which lives once it is run.

    Args:
        engines: those of other processes of the server; None where there are none.
        spec: of the model; processes that have the same one share its engine.
        options: as the rest, see :class:`EngineProcess`.
        heard: likewise.
        lost: likewise.
        failed: is called in place of ``lost`` where the process is another one's, who counts its ends.
        program: likewise.
        asking: how the program is asked.
    """
    if engines is None:
        return EngineProcess(options, spec.name, heard, lost, program)
    key = f"{spec.name} {sha256(repr(spec.loaded_settings()).encode()).hexdigest()}"
    owner = engines.owner(spec.name)
    if owner is not None:
        return RemoteEngine(engines, owner, key, heard, failed or lost)
    return ShownEngine(engines, key, asking, options=options, name=spec.name, heard=heard, lost=lost, program=program)
