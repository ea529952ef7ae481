"""Which process has a sequence, where a server has several, and what goes there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ovmstrio.core.tensor import Array, RawTensor, Tensor

__all__ = ["ForwardedStep", "SequenceDirectory", "SequenceElsewhere", "SequenceOwners"]


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
