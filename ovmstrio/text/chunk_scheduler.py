"""Requests that a process answers part by part, such as window by window; all that are open take turns."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import deque
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, TypeVar

import trio

from ovmstrio.core.errors import ConfigError, ModelFailure, Overloaded, Problem, ServerError
from ovmstrio.core.request import ServableMetadata
from ovmstrio.inference.engine.messages import PART, REFUSED, decode_failure
from ovmstrio.isolation.worker_process import WorkerEnded
from ovmstrio.serving.hosted_service import ResidentService
from ovmstrio.text.engine_process import EngineProcess, sleep_when_idle
from ovmstrio.text.engine_sharing import PARTS, Engine, engine_of, numbers_of
from ovmstrio.util.placement import run_load

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping
    from pathlib import Path
    from typing import Self

    from ovmstrio.config.specs import TextModelSpec
    from ovmstrio.core.generation import Task
    from ovmstrio.core.worker_peers import EngineSharing
    from ovmstrio.text.engine_link import AskedEngine

__all__ = ["TurnModel", "TurnQueue", "TurnTaker", "check_folder", "open_model"]

# ----------------------------------------------------------------------
# Requests that a process answers part by part, such as window by window; all that are open take turns
# ----------------------------------------------------------------------

_PartT = TypeVar("_PartT")

_SECONDS_TO_TELL: Final = 5.0
"""How long a message to a process may wait for it to read others."""

_TURNS: Final = 4
"""How many requests take turns; what is to be done for others stays where it is."""


class TurnTaker(Generic[_PartT]):
    """A request that is being answered.

    Args:
        number: the process's number for it.
        turns: of which it has one while parts are made.
        most_parts: how many parts may wait for whoever takes them, before no more are made.

    Attributes:
        is_over: whether nothing more will come.
    """

    def __init__(self, number: int, turns: trio.Semaphore, most_parts: float = math.inf) -> None:
        self.number = number
        self.is_over = False
        self._turns = turns
        self._has_turn = True
        self._most_parts = most_parts
        self._parts: deque[_PartT] = deque()
        self._error: ServerError | None = None
        self._changes = trio.lowlevel.ParkingLot()

    @abstractmethod
    def take(self, told: dict[str, Any]) -> None:
        """Take what the process has told of a part."""

    def put(self, part: _PartT) -> None:
        """Have a part wait for whoever takes it."""
        self._parts.append(part)
        self._changes.unpark_all()

    def end(self, error: ServerError | None = None) -> None:
        """Note that nothing more will come, because of an error if there is one."""
        if not self.is_over:
            self.is_over, self._error = True, error
            self.leave_turn()
            self._changes.unpark_all()

    def leave_turn(self) -> None:
        """Let another one be answered."""
        if self._has_turn:
            self._has_turn = False
            self._turns.release()

    async def make_room(self) -> None:
        """Wait until there is room for a part, and for a turn if another one has had it meanwhile.

        Cancellation: at any time; there is no turn then.
        """
        if len(self._parts) < self._most_parts:
            return
        self.leave_turn()
        while len(self._parts) >= self._most_parts:
            await self._changes.park()
        await self._turns.acquire()
        if self.is_over:
            self._turns.release()
        else:
            self._has_turn = True

    # No generator, which whoever leaves a loop early would have to close.
    def __aiter__(self) -> Self:
        """Give parts until the end."""
        return self

    async def __anext__(self) -> _PartT:
        """Wait for the next part.

        Raises:
            ServerError: there will be none.
        """
        await trio.lowlevel.checkpoint()
        while not self._parts:
            if self._error is not None:
                raise self._error
            if self.is_over:
                raise StopAsyncIteration
            await self._changes.park()
        part = self._parts.popleft()
        self._changes.unpark_all()
        return part


_TakerT = TypeVar("_TakerT", bound=TurnTaker[Any])


class TurnQueue(Generic[_TakerT]):
    """All requests of one model, through whichever processes it lives.

    Args:
        make: makes a request of its number and the turns.
        most_waiting: how many may wait for a turn.
        tasks: hosts a task for each; as long as it is open, requests can be answered.
        noun: what several of them are called, for who is refused.
        numbers: for requests; no two have the same.

    Attributes:
        open: how many requests there are.
        last_asked: when somebody has asked last, or has got an answer, on trio's clock.
    """

    def __init__(
        self,
        make: Callable[[int, trio.Semaphore], _TakerT],
        most_waiting: int,
        tasks: trio.Nursery,
        noun: str,
        numbers: Iterator[int],
    ) -> None:
        self._make = make
        self._most = _TURNS + most_waiting
        self._tasks = tasks
        self._noun = noun
        self._numbers = numbers
        self._turns = trio.Semaphore(_TURNS, max_value=_TURNS)
        self._emptied = trio.Event()
        self.running: dict[int, _TakerT] = {}
        self.open = 0
        self.last_asked = -math.inf

    async def idle(self) -> None:
        """Wait until there is no request.

        Cancellation: at once.
        """
        while self.open:
            self._emptied = trio.Event()
            await self._emptied.wait()

    def hear(self, frame: Any) -> None:
        """Take what a process has told by itself.

        Raises:
            ValueError: always; a process that tells something has another queue.
        """
        raise ValueError(f"nobody asked for {frame!r:.80}")

    def lose(self, why: str) -> None:
        """Tell all requests that their process has ended."""
        for each in self.running.values():
            each.end(ModelFailure(why))

    @asynccontextmanager
    async def ask(self, engine: Engine, *opening: Any) -> AsyncIterator[_TakerT]:
        """Have a request answered, once it is its turn.

        Args:
            engine: where the model lives.
            opening: what the process is told of the request.

        Raises:
            InvalidField: the process has refused it.
            Overloaded: too many wait.
            ServerError: the model failed, or its process ended.

        Ownership: the request, which the process drops when the block is left.
        Cancellation: anywhere.
        """
        if self.open >= self._most:
            raise Overloaded(f"{self.open} {self._noun} or wait, as many as may; try again later")
        self.open += 1
        try:
            await self._turns.acquire()
            taker = self._make(next(self._numbers), self._turns)
            try:
                async with self._opened(await engine.ready(), taker, opening):
                    yield taker
            finally:
                # One that waits for its turn to come again gets none, or leaves it at once.
                taker.end()
        finally:
            self.open -= 1
            self.last_asked = trio.current_time()
            if not self.open:
                self._emptied.set()

    @asynccontextmanager
    async def _opened(self, process: AskedEngine, taker: _TakerT, opening: tuple[Any, ...]) -> AsyncIterator[None]:
        number = taker.number
        self.running[number] = taker
        scope = trio.CancelScope()
        try:
            await _call(process, ["open", number, *opening])
            # A nursery of its own would put what the caller's block raises into a group.
            self._tasks.start_soon(_answer_all, process, taker, scope)
            yield
        finally:
            scope.cancel()
            del self.running[number]
            await _close(process, number)


async def _answer_all(process: AskedEngine, taker: TurnTaker[Any], scope: trio.CancelScope) -> None:
    """Have one part after the other made, until a scope is cancelled.

    Cancellation: at once; a part that has been begun is abandoned.
    """
    with scope:
        try:
            while not taker.is_over:
                await taker.make_room()
                taker.take(await _call(process, ["part", taker.number]))
        except ServerError as error:
            taker.end(error)


async def _close(process: AskedEngine, number: int) -> None:
    with trio.CancelScope(shield=True, deadline=trio.current_time() + _SECONDS_TO_TELL), suppress(WorkerEnded):
        await process.tell(["close", number])


async def _call(process: AskedEngine, value: list[Any]) -> Any:
    try:
        kind, *told = await process.call(value)
    except WorkerEnded as ended:
        raise ModelFailure(f"the process of the model {ended.why}") from ended
    if kind == REFUSED:
        raise decode_failure(told[0])
    return told[0] if kind == PART else None


# ----------------------------------------------------------------------
# What models of speech have in common: a process that answers in parts, and the turns of who asks it
# ----------------------------------------------------------------------

_PLATFORM: Final = "openvino_genai"

_QueueT = TypeVar("_QueueT", bound=TurnQueue[Any])
_ModelT = TypeVar("_ModelT", bound="TurnModel[Any]")


class TurnModel(ResidentService, Generic[_QueueT]):
    """One model.

    Args:
        spec: how it is configured.
        process: where it lives.
        queue: what asks it.
    """

    task: ClassVar[Task]

    def __init__(self, spec: TextModelSpec, process: Engine, queue: _QueueT) -> None:
        super().__init__()
        self.spec = spec
        self.process = process
        self.queue = queue
        self._metadata = ServableMetadata(spec.name, _PLATFORM, (), ())

    @property
    def metadata(self) -> ServableMetadata:
        """What it tells of itself: no tensors."""
        return self._metadata

    @property
    def tasks(self) -> frozenset[Task]:
        """What it does."""
        return frozenset({self.task})

    @property
    def obstacle(self) -> str:
        """Why it cannot answer now; empty if it can."""
        return self.process.obstacle

    @property
    def pid(self) -> int | None:
        """The number of its process, None while there is none."""
        return self.process.pid

    @property
    def open_requests(self) -> int:
        """How many requests are being answered, or wait."""
        return self.queue.open


async def check_folder(spec: TextModelSpec, missing: Callable[[Path], str], expected: str) -> None:
    """See that a model has its files, before a process is started for it.

    Args:
        spec: of the model.
        missing: says what is not in a folder; blocking.
        expected: what there should be.

    Raises:
        ConfigError: it has not.

    Cancellation: not while a thread looks.
    """
    absent = await run_load(partial(_absent, spec.path, missing))
    if absent:
        message = "there is no model of speech that could be loaded"
        raise ConfigError([spec.placed(Problem(message, path="path", expected=expected, found=absent))])


def _absent(folder: Path, missing: Callable[[Path], str]) -> str:
    if not folder.is_dir():
        return f"{folder}, which {'is no folder' if folder.exists() else 'does not exist'}"
    without = missing(folder)
    return f"{folder} without {without}" if without else ""


@asynccontextmanager
async def open_model(
    spec: TextModelSpec,
    program: str,
    options: Mapping[str, Any],
    make_queue: Callable[[trio.Nursery, Iterator[int]], _QueueT],
    make_model: Callable[[TextModelSpec, Engine, _QueueT], _ModelT],
    *,
    engines: EngineSharing | None = None,
) -> AsyncIterator[_ModelT]:
    """Have a model loaded while the block lasts.

    Args:
        spec: how it is configured.
        program: the module that its process runs.
        options: what that is told first, besides folder, device and properties.
        make_queue: makes what asks it, with numbers for requests.
        make_model: makes the service.
        engines: those of other processes of the server.

    Raises:
        ModelFailure: it cannot be loaded.

    Ownership: the process.
    """
    told = {"folder": str(spec.path.absolute()), "device": spec.device, "properties": dict(spec.plugin_config)}
    async with trio.open_nursery() as nursery:
        queue = make_queue(nursery, numbers_of(engines))
        told = {**told, **options}
        process = engine_of(engines, spec, told, queue.hear, queue.lose, program=program, asking=PARTS)
        await nursery.start(process.run)
        if spec.idle_unload_seconds and isinstance(process, EngineProcess):
            nursery.start_soon(sleep_when_idle, process, queue, spec)
        try:
            yield make_model(spec, process, queue)
        finally:
            await process.sleep()
            nursery.cancel_scope.cancel()
