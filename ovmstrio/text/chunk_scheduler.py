"""Chunk scheduler: requests that a process answers chunk by chunk (speech, images); a few run, round-robin."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import deque
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, TypeVar

import trio

from ovmstrio.core.errors import ConfigError, ModelFailure, Overloaded, Problem, QueueTimeExceeded, ServerError
from ovmstrio.core.request import ServableMetadata
from ovmstrio.inference.engine.messages import PART, REJECTED, decode_failure
from ovmstrio.isolation.worker_process import WorkerExited
from ovmstrio.serving.hosted_service import HostedService
from ovmstrio.text.engine_process import EngineProcess, sleep_when_idle
from ovmstrio.text.engine_sharing import CHUNK_VERBS, Engine, create_engine, request_ids
from ovmstrio.util.load_limit import run_load

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping
    from pathlib import Path
    from typing import Self

    from ovmstrio.config.specs import TextModelSpec
    from ovmstrio.core.generation import Task
    from ovmstrio.core.worker_peers import EngineDirectory
    from ovmstrio.text.engine_client import AskedEngine

# ----------------------------------------------------------------------
# Requests and their queue
# ----------------------------------------------------------------------

_PartT = TypeVar("_PartT")

_SEND_TIMEOUT_SECONDS: Final = 5.0
"""Longest wait for a process to read a message."""

_MAX_RUNNING: Final = 4
"""Number of requests that run concurrently."""


class ChunkedRequest(Generic[_PartT]):
    """A running request; an asynchronous iterator of its chunks.

    Args:
        number: request id.
        turns: semaphore of which the request holds one unit while chunks are made.
        max_unread: number of unread chunks at which the request pauses.

    Attributes:
        is_over: whether no more chunks will come.
    """

    def __init__(self, number: int, turns: trio.Semaphore, max_unread: float = math.inf) -> None:
        self.number = number
        self.is_over = False
        self._turns = turns
        self._has_turn = True
        self._most_parts = max_unread
        self._parts: deque[_PartT] = deque()
        self._error: ServerError | None = None
        self._wakeup_lot = trio.lowlevel.ParkingLot()

    @abstractmethod
    def take(self, payload: dict[str, Any]) -> None:
        """Convert the process's answer and :meth:`put` its chunks."""

    def put(self, part: _PartT) -> None:
        """Append a chunk for the reader."""
        self._parts.append(part)
        self._wakeup_lot.unpark_all()

    def end(self, error: ServerError | None = None) -> None:
        """End the request, with an error if there is one."""
        if not self.is_over:
            self.is_over, self._error = True, error
            self.release_turn()
            self._wakeup_lot.unpark_all()

    def release_turn(self) -> None:
        """Release the unit of the semaphore."""
        if self._has_turn:
            self._has_turn = False
            self._turns.release()

    async def make_room(self) -> None:
        """Wait until the reader has taken chunks, and reacquire the semaphore if it was released for that."""
        if len(self._parts) < self._most_parts:
            return
        self.release_turn()
        while len(self._parts) >= self._most_parts:
            await self._wakeup_lot.park()
        await self._turns.acquire()
        if self.is_over:
            self._turns.release()
        else:
            self._has_turn = True

    # Not a generator: callers that break out of a loop would have to close it.
    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> _PartT:
        await trio.lowlevel.checkpoint()
        while not self._parts:
            if self._error is not None:
                raise self._error
            if self.is_over:
                raise StopAsyncIteration
            await self._wakeup_lot.park()
        part = self._parts.popleft()
        self._wakeup_lot.unpark_all()
        return part


_TakerT = TypeVar("_TakerT", bound=ChunkedRequest[Any])


class ChunkScheduler(Generic[_TakerT]):
    """All requests of one model; survives restarts of its process.

    Args:
        make: creates a request from its id and the semaphore.
        max_queue: queue length.
        max_queue_time: longest wait in seconds; None for no limit.
        tasks: nursery for one task per request.
        noun: plural of the requests in the error for a full queue.
        numbers: request ids.

    Attributes:
        open: number of running and queued requests.
        last_asked: trio time of the last start or end of a request.
    """

    def __init__(
        self,
        make: Callable[[int, trio.Semaphore], _TakerT],
        max_queue: int,
        tasks: trio.Nursery,
        noun: str,
        numbers: Iterator[int],
        *,
        max_queue_time: float | None = None,
    ) -> None:
        self._make = make
        self._most = _MAX_RUNNING + max_queue
        self._max_queue_time = math.inf if max_queue_time is None else max_queue_time
        self._tasks = tasks
        self._noun = noun
        self._numbers = numbers
        self._turns = trio.Semaphore(_MAX_RUNNING, max_value=_MAX_RUNNING)
        self._idle_event = trio.Event()
        self.running: dict[int, _TakerT] = {}
        self.open = 0
        self.last_asked = -math.inf

    async def idle(self) -> None:
        """Wait until there is no request."""
        while self.open:
            self._idle_event = trio.Event()
            await self._idle_event.wait()

    def hear(self, frame: Any) -> None:
        """Handle a message that the process sends unasked.

        Raises:
            ValueError: always; programs with such messages override this.
        """
        raise ValueError(f"unexpected message: {frame!r:.80}")

    def lose(self, reason: str) -> None:
        """Fail all requests because their process has ended."""
        for each in self.running.values():
            each.end(ModelFailure(reason))

    @asynccontextmanager
    async def ask(self, engine: Engine, *opening: Any) -> AsyncIterator[_TakerT]:
        """Run a request once it is its turn; leaving the block cancels it.

        ``opening`` are the arguments of the process's ``open`` call.

        Raises:
            InvalidField: the process refused the request.
            Overloaded: the queue is full.
            QueueTimeExceeded: the request has waited too long.
            ServerError: the model failed, or its process ended.
        """
        if self.open >= self._most:
            raise Overloaded(f"{self.open} {self._noun} or wait, as many as may; try again later")
        self.open += 1
        try:
            with trio.move_on_after(self._max_queue_time) as scope:
                await self._turns.acquire()
            if scope.cancelled_caught:
                raise QueueTimeExceeded.after(self._max_queue_time)
            taker = self._make(next(self._numbers), self._turns)
            try:
                async with self._opened(await engine.ready(), taker, opening):
                    yield taker
            finally:
                # Wakes a request that waits to reacquire the semaphore, which it then releases at once.
                taker.end()
        finally:
            self.open -= 1
            self.last_asked = trio.current_time()
            if not self.open:
                self._idle_event.set()

    @asynccontextmanager
    async def _opened(self, process: AskedEngine, taker: _TakerT, opening: tuple[Any, ...]) -> AsyncIterator[None]:
        number = taker.number
        self.running[number] = taker
        scope = trio.CancelScope()
        try:
            await _call(process, ["open", number, *opening])
            # A separate nursery would wrap exceptions of the caller's block in a group.
            self._tasks.start_soon(_request_chunks, process, taker, scope)
            yield
        finally:
            scope.cancel()
            del self.running[number]
            await _close_request(process, number)


async def _request_chunks(process: AskedEngine, taker: ChunkedRequest[Any], scope: trio.CancelScope) -> None:
    """Request one chunk after the other until ``scope`` is cancelled."""
    with scope:
        try:
            while not taker.is_over:
                await taker.make_room()
                taker.take(await _call(process, ["part", taker.number]))
        except ServerError as error:
            taker.end(error)


async def _close_request(process: AskedEngine, number: int) -> None:
    with trio.CancelScope(shield=True, deadline=trio.current_time() + _SEND_TIMEOUT_SECONDS), suppress(WorkerExited):
        await process.notify(["close", number])


async def _call(process: AskedEngine, value: list[Any]) -> Any:
    try:
        kind, *answer = await process.call(value)
    except WorkerExited as ended:
        raise ModelFailure(f"the engine process {ended.why}") from ended
    if kind == REJECTED:
        raise decode_failure(answer[0])
    return answer[0] if kind == PART else None


# ----------------------------------------------------------------------
# Services
# ----------------------------------------------------------------------

_PLATFORM: Final = "openvino_genai"

_QueueT = TypeVar("_QueueT", bound=ChunkScheduler[Any])
_ModelT = TypeVar("_ModelT", bound="ChunkedModel[Any]")


class ChunkedModel(HostedService, Generic[_QueueT]):
    """Base of speech and image services."""

    task: ClassVar[Task]

    def __init__(self, spec: TextModelSpec, process: Engine, queue: _QueueT) -> None:
        super().__init__()
        self.spec = spec
        self.process = process
        self.queue = queue
        self._metadata = ServableMetadata(spec.name, _PLATFORM, (), ())

    @property
    def metadata(self) -> ServableMetadata:
        """Metadata without tensors."""
        return self._metadata

    @property
    def tasks(self) -> frozenset[Task]:
        """The task of the service."""
        return frozenset({self.task})

    @property
    def unready_reason(self) -> str:
        """Why the model is unready; empty if it is ready."""
        return self.process.unready_reason

    @property
    def pid(self) -> int | None:
        """Process id; None while there is no process."""
        return self.process.pid

    @property
    def open_requests(self) -> int:
        """Number of running and queued requests."""
        return self.queue.open


async def check_model_files(
    spec: TextModelSpec, missing: Callable[[Path], str], expected: str, *, noun: str = "speech model"
) -> None:
    """Check that a model has its files, before a process is started.

    ``missing`` returns the missing files of a folder as text; ``expected`` and ``noun`` are for the error.

    Raises:
        ConfigError: a file is missing.
    """
    absent = await run_load(partial(_absent, spec.path, missing))
    if absent:
        message = f"no {noun} found"
        raise ConfigError([spec.placed(Problem(message, path="path", expected=expected, found=absent))])


def _absent(folder: Path, missing: Callable[[Path], str]) -> str:
    if not folder.is_dir():
        return f"{folder}, which {'is not a folder' if folder.exists() else 'does not exist'}"
    without = missing(folder)
    return f"{folder} without {without}" if without else ""


@asynccontextmanager
async def open_chunked_model(
    spec: TextModelSpec,
    program: str,
    options: Mapping[str, Any],
    make_queue: Callable[[trio.Nursery, Iterator[int]], _QueueT],
    make_model: Callable[[TextModelSpec, Engine, _QueueT], _ModelT],
    *,
    engines: EngineDirectory | None = None,
) -> AsyncIterator[_ModelT]:
    """Load a model for the duration of the block.

    Args:
        spec: configuration.
        program: module that the process runs.
        options: options of the program besides folder, device and properties.
        make_queue: creates the queue from a nursery and request ids.
        make_model: creates the service.
        engines: engines of other workers.

    Raises:
        ModelFailure: the model cannot be loaded.
    """
    base = {"folder": str(spec.path.absolute()), "device": spec.device, "properties": dict(spec.plugin_config)}
    async with trio.open_nursery() as nursery:
        queue = make_queue(nursery, request_ids(engines))
        process = create_engine(
            engines, spec, {**base, **options}, queue.hear, queue.lose, program=program, verbs=CHUNK_VERBS
        )
        await nursery.start(process.run)
        if spec.idle_unload_seconds and isinstance(process, EngineProcess):
            nursery.start_soon(sleep_when_idle, process, queue, spec)
        try:
            yield make_model(spec, process, queue)
        finally:
            await process.sleep()
            nursery.cancel_scope.cancel()
