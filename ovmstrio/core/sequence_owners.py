"""Which process has a sequence, where a server has several, and what goes there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ovmstrio.core.tensor import Array, RawTensor, Tensor

__all__ = ["ForwardedStep", "SequenceOwners"]


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


class SequenceOwners(Protocol):
    """The processes of a server, each of which has the sequences whose ids are its own."""

    def owner(self, identity: int | str) -> int | None:
        """Tell which other process has a sequence; None if it is this one."""
        ...

    async def run_step(self, owner: int, step: ForwardedStep) -> list[Tensor | RawTensor]:
        """Have another process answer a request of a sequence, after those that came before it from here.

        Raises:
            ServerError: what it raised there, or it cannot be reached.

        Cancellation: at once, and there, too.
        """
        ...
