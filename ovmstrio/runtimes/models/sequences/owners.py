"""Which process has a sequence, where a server has several."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol
from zlib import crc32

import numpy as np

from ovmstrio.core.datatypes import BY_NAME
from ovmstrio.core.tensor import Array, RawTensor, Tensor
from ovmstrio.core.texts import utf8

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ovmstrio.runtimes.models.sequences.sequence_requests import Control

__all__ = ["SequenceOwners", "Step", "owner_of", "read_outputs", "tell_outputs"]

_ID_BYTES = 8


class SequenceOwners(Protocol):
    """The processes of a server, each of which has the sequences whose ids are its own."""

    def owner(self, identity: int | str) -> int | None:
        """Tell which other process has a sequence; None if it is this one."""
        ...

    async def run_step(self, owner: int, step: Step) -> list[Tensor | RawTensor]:
        """Have another process answer a request of a sequence, after those that came before it from here.

        Raises:
            ServerError: what it raised there, or it cannot be reached.

        Cancellation: at once, and there, too.
        """
        ...


class Step:
    """A request of a sequence on its way to the process that has it.

    Attributes:
        model: the name.
        version: the number, empty where the request follows the default one.
        control: which sequence, and whether the request is its first or last one.
        arrays: the inputs, which have been checked.
        most_bytes: how large the outputs may be together.
    """

    __slots__ = ("arrays", "control", "model", "most_bytes", "version")

    def __init__(
        self, model: str, version: str, control: Control, arrays: Mapping[str, Array], *, most_bytes: float
    ) -> None:
        self.model = model
        self.version = version
        self.control = control
        self.arrays = arrays
        self.most_bytes = most_bytes


def owner_of(identity: int | str, processes: int) -> int:
    """Tell which of so many processes has a sequence; the same whichever is asked, and whenever."""
    data = utf8(identity) if isinstance(identity, str) else identity.to_bytes(_ID_BYTES, "little")
    return crc32(data) % processes


def tell_outputs(outputs: Sequence[Tensor | RawTensor]) -> list[list[Any]]:
    """Make plain data of a model's outputs."""
    return [[each.name, each.datatype_name, each.array] for each in outputs if isinstance(each, Tensor)]


def read_outputs(told: Sequence[Sequence[Any]]) -> list[Tensor | RawTensor]:
    """Make outputs of what :func:`tell_outputs` gave."""
    return [Tensor(name, BY_NAME[datatype], np.asarray(array)) for name, datatype, array in told]
