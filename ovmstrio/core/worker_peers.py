"""Protocols between the worker processes of a server: sequences, RPC, shared counters and text engines."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:
    from ovmstrio.core.errors import ServerError
    from ovmstrio.core.tensor import Array, RawTensor, Tensor

SERVER_COUNTER: Final = "server"
"""Name of the counter row of the whole server, whose queue includes the queues of services."""


@dataclass(frozen=True, slots=True)
class ForwardedStep:
    """A sequence request forwarded to its owner worker.

    Attributes:
        version: number, or empty for the default version.
        max_output_bytes: maximum size of all outputs together.
    """

    model: str
    version: str
    id: int | str
    start: bool
    end: bool
    arrays: Mapping[str, Array]
    max_output_bytes: float


class StepResult(NamedTuple):
    """Outputs of a sequence request, and after a crash the number of restored steps, unless already reported."""

    outputs: list[Tensor | RawTensor]
    restored_steps: int | None = None


class SequenceOwners(Protocol):
    """Sequences of all workers: the worker that owns an id, calls to it, and counts over all workers.

    A hash of the model's name and the id selects the owner, in any version of the model.
    """

    last_id: int
    """Last id that this worker, or a predecessor, has generated for any model."""

    def owner(self, model: str, identity: int | str) -> int | None:
        """Return the worker that owns an id; None if this worker does."""

    async def run_step(self, owner: int, step: ForwardedStep) -> StepResult:
        """Run a sequence request on another worker, in the order of the calls.

        Raises:
            WorkerRestarting: the worker cannot be reached in time; the request has not run.
            NotReady: the worker exited after it received the request.
            ServerError: the request failed there.
        """

    def begin(self, model: str, version: int, limit: float) -> None:
        """Count a sequence of this worker; raises TooManySequences if the version has ``limit`` in all workers."""

    def end(self, model: str, version: int) -> None:
        """Count the end of a sequence of this worker."""

    def count(self, model: str, version: int) -> int:
        """Return the number of sequences of a version in all workers."""


# Worker RPC

_T = TypeVar("_T")


class WorkerPeers(Protocol):
    """RPC to the other workers of the server."""

    row: int
    others: Sequence[int]

    async def call(self, row: int, method: str, *arguments: Any) -> Any:
        """Call one worker and return its result.

        Raises:
            WorkerRestarting: the worker cannot be reached.
            NotReady: the worker exited before it answered.
            ServerError: the call failed there.
        """

    async def call_within(self, calls: Mapping[int, Sequence[Any]], seconds: float) -> dict[int, Any]:
        """Call several workers and return the results that arrive within ``seconds``, by worker.

        Missing workers are starting, stuck or have failed, as their logs say.

        Args:
            calls: name and arguments of the call, by worker.
            seconds: timeout.
        """

    def register_handler(self, method: str, answer: Callable[..., Awaitable[Any]]) -> None:
        """Register the handler of an RPC; arguments and results are plain data."""

    async def call_all(self, method: str, *arguments: Any, limit_seconds: float = 60) -> list[Any]:
        """Call all reachable workers and return their results.

        Raises:
            ServerError: a worker failed or timed out; the message names it.
        """

    def save_metrics(self, text: bytes, *, is_open: bool) -> None:
        """Save metrics that are retained after this worker exits, in one of two text formats."""

    def metrics_generation(self, *, is_open: bool) -> int | None:
        """Return the generation of the retained metrics; None while they are updated."""

    def retained_metrics(self, answered: Iterable[int], *, is_open: bool) -> list[bytes]:
        """Return metrics retained from exited workers that are not among ``answered``."""

    async def run_locked(self, work: Callable[[], Awaitable[_T]]) -> _T:
        """Run ``work`` under the server-wide lock for admin changes; raises as ``work``."""


# Shared counters


class PeerCounters(NamedTuple):
    """Counters of other workers: running calls, waiting calls, and the ``time.monotonic`` start of the oldest wait.

    ``rows`` are the workers with waiting calls.
    """

    in_flight: int = 0
    waiting: int = 0
    since: float = math.inf
    rows: tuple[int, ...] = ()


NO_PEER_COUNTERS: Final = PeerCounters()


class TokenBucketLevel(NamedTuple):
    """Tokens left in a token bucket and the ``time.monotonic`` time of that count; 0 for never."""

    tokens: float = 0.0
    filled_at: float = 0.0


class CounterRow(Protocol):
    """Counter row of one name; readers and writers hold the table's lock."""

    @property
    def in_flight(self) -> int:
        """Running calls of this worker."""

    def elsewhere(self) -> PeerCounters:
        """Return the counters of other workers."""

    def write(self, in_flight: int, waiting: int = 0, since: float = math.inf) -> None:
        """Set this worker's counters; reset when the worker exits."""

    def bucket(self, number: int) -> TokenBucketLevel:
        """Read one of two token buckets, which all workers share and which outlive them."""

    def fill(self, number: int, bucket: TokenBucketLevel) -> None:
        """Write one of two token buckets."""


class Counters(Protocol):
    """Counter table shared by all workers."""

    def locked(self) -> AbstractContextManager[None]:
        """Hold the inter-process lock within the block, which must not wait."""

    def row(self, name: str) -> CounterRow:
        """Return the counter row of a name, shared by all workers; raises NotSupported if the table is full."""

    def notify(self, rows: tuple[int, ...]) -> None:
        """Wake up other workers with waiting calls; costs a system call each."""

    async def wait(self) -> None:
        """Wait for a wake-up by another worker."""


# Shared text-model engines


class StreamedResult(ABC):
    """Streamed RPC response of plain data."""

    def __aiter__(self) -> StreamedResult:
        return self

    @abstractmethod
    async def __anext__(self) -> Any:
        """Return the next part; raises ServerError if the stream failed."""

    @abstractmethod
    def close(self) -> None:
        """Release the stream; called once."""


class ExportedEngine(Protocol):
    """Engine that other workers call."""

    async def call(self, row: int, value: Any) -> Any:
        """Handle a call of another worker; the result is plain data.

        Raises:
            ServerError: there is no engine now.
        """

    async def listen(self, row: int) -> StreamedResult:
        """Return the output stream for another worker's requests, once the engine is loaded.

        Raises:
            ServerError: the engine cannot be loaded.
        """

    async def leave(self, seconds: float) -> None:
        """Reject new requests of other workers and wait for the running ones."""


class EngineDirectory(Protocol):
    """Access to the engines of all workers."""

    row: int
    rows: int

    def owner(self, name: str) -> int | None:
        """Return the worker that owns a model's engine; None if this worker does."""

    def exported(self, key: str, engine: ExportedEngine) -> AbstractContextManager[None]:
        """Export an engine to other workers within the block, under a key that all workers compute."""

    def set_load_error(self, key: str, error: ServerError) -> None:
        """Set the error for calls of a missing engine, until it is exported or another error is set."""

    async def call(self, owner: int, key: str, value: Any) -> Any:
        """Call the engine of another worker.

        Raises:
            WorkerRestarting: the worker cannot be reached; the call was not sent.
            NotReady: the worker exited, or has no such engine.
            ServerError: the call failed there.
        """

    async def listen(self, owner: int, key: str, on_message: Callable[[Any], None]) -> None:
        """Pass the output of another worker's engine to ``on_message`` until it ends.

        Raises:
            NotReady: the worker cannot be reached, exited, or has no such engine after a while.
            ServerError: the engine cannot be loaded there.

        Cancellation: ends the open requests there.
        """

    async def wait_change(self) -> None:
        """Wait, for a bounded time, until another worker has started or exited."""

    def wait_seconds(self, owner: int) -> float:
        """Return how long a call may wait for a worker that is restarting."""
