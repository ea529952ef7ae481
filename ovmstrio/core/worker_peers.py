"""Which process has a sequence, where a server has several, and what goes there."""

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

__all__ = [
    "NOTHING_ELSEWHERE",
    "Account",
    "Bucket",
    "Elsewhere",
    "EngineSharing",
    "ForwardedStep",
    "Ledger",
    "PartedAnswer",
    "SequenceDirectory",
    "SequenceElsewhere",
    "SequenceOwners",
    "ShownToOthers",
    "Siblings",
]

# ----------------------------------------------------------------------
# Which process has a sequence, where a server has several, and what goes there
# ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ForwardedStep:
    """A request of a sequence on its way to the process that has it.

    Attributes:
        model: the name.
        version: the number, empty where the request follows the default one.
        id: which sequence.
        start: whether the request is its first one.
        end: whether it is its last one.
        arrays: the inputs, which have been checked.
        most_bytes: how large the outputs may be together.
    """

    model: str
    version: str
    id: int | str
    start: bool
    end: bool
    arrays: Mapping[str, Array]
    most_bytes: float


class SequenceElsewhere(Exception):
    """An id is another process's, or not that process's any more which was asked: see again whose it is."""


class SequenceDirectory(Protocol):
    """What the processes of a server know together of their sequences.

    All sequences of one model that have the same id, in whichever versions, are in one process.
    """

    def begin(self, model: str, version: int, identity: int | str, most: float) -> None:
        """Note that this process has a sequence, unless another one has its id, or there are ``most`` of the version.

        Raises:
            SequenceElsewhere: another process has the id.
            TooManySequences: there are as many as may be, in all processes together.
        """
        ...

    def end(self, model: str, version: int, identity: int | str) -> None:
        """Note that a sequence of this process is over."""
        ...

    def count(self, model: str, version: int) -> int:
        """Count the sequences of a version in all processes."""
        ...

    def next_id(self, least: int) -> int:
        """Give a number, not below ``least``, that no process has been given before."""
        ...

    def settle(self, next_id: int) -> None:
        """Say that all is noted that this process has from its predecessor; what else that had is over.

        Args:
            next_id: numbers below it were given in an earlier run, and no process is given one of them again.
        """
        ...


class SequenceOwners(Protocol):
    """The processes of a server, each of which has the sequences that have begun there."""

    def owner(self, model: str, identity: int | str) -> int | None:
        """Tell which other process has an id; None if it is this one, or nobody."""
        ...

    async def run_step(self, owner: int, step: ForwardedStep) -> list[Tensor | RawTensor]:
        """Have another process answer a request of a sequence, after those that came before it from here.

        Raises:
            SequenceElsewhere: it could not be reached, and has the sequence no more.
            ServerError: what it raised there, or it cannot be reached.

        Cancellation: at once, and there, too.
        """
        ...


# ----------------------------------------------------------------------
# The other processes of a server that several are
# ----------------------------------------------------------------------

_T = TypeVar("_T")


class Siblings(Protocol):
    """The other processes of a server.

    Attributes:
        row: the number of the process that asks.
        others: those of the others.
    """

    row: int
    others: Sequence[int]

    async def ask_soon(self, questions: Mapping[int, Sequence[Any]], seconds: float) -> dict[int, Any]:
        """Ask some of them, and give the answers that come in so many seconds, by their numbers.

        Of those that are missing one is being started, is stuck, or has failed, which is in its log.

        Args:
            questions: what each of them is asked, its name first.
            seconds: how long they are waited for.

        Cancellation: at once, and of their work.
        """
        ...

    def answer_with(self, question: str, answer: Callable[..., Awaitable[Any]]) -> None:
        """Have a question of theirs be answered by a function of its arguments, with plain data."""
        ...

    async def ask_all(self, question: str, *arguments: Any, limit_seconds: float = 60) -> list[Any]:
        """Ask all of them that can be reached, and give their answers, which are plain data.

        Raises:
            ServerError: what one of them raised, or did not answer in time; the message tells which one.

        Cancellation: at once.
        """
        ...

    def leave_figures(self, text: bytes, *, is_open: bool) -> None:
        """Have metrics that were told be among those of the past when this process ends; in one of two formats."""
        ...

    def past_changes(self, *, is_open: bool) -> int | None:
        """Count how often a process has ended whose figures are of the past now; None while they become so."""
        ...

    def past_figures(self, answered: Iterable[int], *, is_open: bool) -> list[bytes]:
        """Give what processes have counted that have ended, which none of those has that have answered."""
        ...

    async def in_turn(self, work: Callable[[], Awaitable[_T]]) -> _T:
        """Do what changes all processes, while no other process does such a thing.

        Raises:
            Exception: what ``work`` raises.

        Cancellation: while it is waited for, and as ``work``.
        """
        ...


# ----------------------------------------------------------------------
# What the processes of one server count together, as those see it that count
# ----------------------------------------------------------------------


class Elsewhere(NamedTuple):
    """What other processes have: calls under way, calls that wait, and since when the first of these does.

    ``rows`` are the processes in which calls wait; ``since`` is a time of ``time.monotonic``.
    """

    under_way: int = 0
    waiting: int = 0
    since: float = math.inf
    rows: tuple[int, ...] = ()


NOTHING_ELSEWHERE: Final = Elsewhere()


class Bucket(NamedTuple):
    """What is left in a bucket of tokens, and when that was counted, on ``time.monotonic``; 0 for never."""

    tokens: float = 0.0
    filled_at: float = 0.0


class Account(Protocol):
    """What is counted under one name.  Whoever reads and writes holds the ledger's lock."""

    @property
    def under_way(self) -> int:
        """What this process has written."""
        ...

    def elsewhere(self) -> Elsewhere:
        """Tell what other processes have."""
        ...

    def write(self, under_way: int, waiting: int = 0, since: float = math.inf) -> None:
        """Tell others what this process has; it is forgotten when the process ends."""
        ...

    def bucket(self, number: int) -> Bucket:
        """Read one of two buckets, which belong to all processes and outlive them."""
        ...

    def fill(self, number: int, bucket: Bucket) -> None:
        """Write one of two buckets."""
        ...


class Ledger(Protocol):
    """All that is counted."""

    def locked(self) -> AbstractContextManager[None]:
        """Keep other processes from reading and writing; nothing may wait within."""
        ...

    def account(self, name: str) -> Account:
        """Give what is counted under a name, the same in all processes.

        Raises:
            NotSupported: there are more names than the ledger has room for.
        """
        ...

    def ring(self, rows: tuple[int, ...]) -> None:
        """Have other processes look whether calls that wait there can go on; costs a system call each."""
        ...

    async def rung(self) -> None:
        """Wait until another process says that there may be room.

        Cancellation: at once.
        """
        ...


# ----------------------------------------------------------------------
# Engines of models that several processes of a server share: one of them has it, and the others ask that one
# ----------------------------------------------------------------------


class PartedAnswer(ABC):
    """An answer to another process that comes in parts, plain data each."""

    def __aiter__(self) -> PartedAnswer:
        """Give the parts."""
        return self

    @abstractmethod
    async def __anext__(self) -> Any:
        """Wait for the next part.

        Raises:
            ServerError: there will be none, because of that.

        Cancellation: at once.
        """

    @abstractmethod
    def close(self) -> None:
        """Note that nobody takes parts any more; called once."""


class ShownToOthers(Protocol):
    """An engine, as the process has it that others ask."""

    async def call(self, row: int, value: Any) -> Any:
        """Answer what another process asks of the engine, as plain data.

        Raises:
            ServerError: there is no engine now.

        Cancellation: at once.
        """
        ...

    async def listen(self, row: int) -> PartedAnswer:
        """Give what the engine tells of another process's requests, once it has been loaded.

        Raises:
            ServerError: it cannot be loaded.

        Cancellation: at once.
        """
        ...

    async def leave(self, seconds: float) -> None:
        """Take no more requests of others, and let those that there are end.

        Cancellation: at once.
        """
        ...


class EngineSharing(Protocol):
    """The processes of a server, as one of them sees them.

    Attributes:
        row: this one's number.
        rows: how many there are.
    """

    row: int
    rows: int

    def owner(self, name: str) -> int | None:
        """Tell which other process has the engine of a model; None if it is this one."""
        ...

    def shown(self, key: str, engine: ShownToOthers) -> AbstractContextManager[None]:
        """Let others ask an engine within the block, by a key that they have as well."""
        ...

    def refuse(self, key: str, error: ServerError) -> None:
        """Have others be told why there is no engine, until there is one of the key, or another one is refused."""
        ...

    async def call(self, owner: int, key: str, value: Any) -> Any:
        """Ask the engine of another process.

        Raises:
            NotReady: that process cannot be reached, ended before it answered, or has no such engine.
            ServerError: what it raised.

        Cancellation: at once, and there, too.
        """
        ...

    async def listen(self, owner: int, key: str, heard: Callable[[Any], None]) -> None:
        """Have what another process's engine tells handed over, until it has no more.

        Raises:
            NotReady: that process cannot be reached, has ended, or has no such engine after a while.
            ServerError: the engine cannot be loaded there.

        Cancellation: at once; requests that are open there end.
        """
        ...

    async def wait_change(self) -> None:
        """Wait until another process has begun or ended, but not for long.

        Cancellation: at once.
        """
        ...
