"""A call and its answer, free of any wire format.

A front end turns bytes into an :class:`InferRequest` without judging it; a servable validates it against its own
inputs (``ovmstrio.runtimes.models.validation``), so that every protocol rejects the same things in the same words.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from ovmstrio.core.tensor import Array, RawTensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ovmstrio.core.arrivals import Arrival
    from ovmstrio.core.events import CallEvent
    from ovmstrio.core.tensor import Tensor, TensorSpec

__all__ = [
    "SEQUENCE_CONTROL",
    "SEQUENCE_ID",
    "Buffer",
    "Contents",
    "InferInput",
    "InferRequest",
    "InferResponse",
    "ParameterValue",
    "RequestedOutput",
    "ServableMetadata",
    "StreamProblem",
    "StreamReply",
]

SEQUENCE_ID: Final = "sequence_id"
SEQUENCE_CONTROL: Final = "sequence_control_input"
"""The inputs by which a client of a stateful model says to which sequence a request belongs, and where that begins."""

ParameterValue = bool | int | float | str
Buffer = bytes | bytearray | memoryview


@dataclass(slots=True)
class Contents:
    """Values that came one by one: protobuf's ``InferTensorContents`` or a JSON ``data`` list, flattened.

    ``field`` names the one field that was filled (``fp32_contents``, ...); ``values`` are its elements.  With
    ``repeat_last`` the last of them stands for all that are missing, as in TensorFlow's tensors.  ``is_checked`` says
    that each is of a type that the field may have, which need not be looked at again.
    """

    field: str
    values: Sequence[Any] | Array
    repeat_last: bool = False
    is_checked: bool = dataclasses.field(default=False, compare=False)


@dataclass(slots=True)
class InferInput:
    """One input tensor as the caller described it; nothing here has been checked."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    contents: Contents | None = None
    parameters: dict[str, ParameterValue] = field(default_factory=dict)


@dataclass(slots=True)
class RequestedOutput:
    """An output that the caller named, with what it said about it; nobody changes one, as requests may share it."""

    name: str
    parameters: dict[str, ParameterValue] = field(default_factory=dict)


@dataclass(slots=True)
class InferRequest:
    """One inference call.

    ``model_version`` is as sent: empty or ``"0"`` means the default version.  ``raw_inputs`` holds one buffer an
    input, by position, where the caller used raw contents (elements little-endian and packed; ``BYTES`` elements each
    behind a little-endian uint32 length), and None for an input that has contents where the protocol lets a request
    use both.  ``deadline`` is on trio's clock.  ``keeps_rows`` asks for matrices of bytes as they are, where the names
    of outputs would make them strings: the caller is no client.  ``received`` is how many bytes it came in; ``event``
    is what observers see of the call that it belongs to, for whoever works on it to tell times.  ``arrival`` is its
    place among those of its connection, where several of one may be under way.
    With ``wants_all_packets`` a graph answers with every packet of its outputs, an output each, and not with the first.
    ``most_bytes`` is how large the outputs may be together, of a call whose answer goes to a client.
    """

    model_name: str
    model_version: str = ""
    id: str = ""
    parameters: dict[str, ParameterValue] = field(default_factory=dict)
    inputs: list[InferInput] = field(default_factory=list)
    outputs: list[RequestedOutput] = field(default_factory=list)
    raw_inputs: list[Buffer | None] = field(default_factory=list)
    deadline: float = math.inf
    keeps_rows: bool = False
    received: int = 0
    event: CallEvent | None = None
    arrival: Arrival | None = None
    most_bytes: float = math.inf
    wants_all_packets: bool = False


@dataclass(slots=True)
class InferResponse:
    """The answer to one inference call; ``outputs`` are in the order in which they are shown (by name, for models).

    Attributes:
        is_private: whether nobody else has the memory of the outputs, or may change it.
    """

    model_name: str
    model_version: str
    outputs: list[Tensor | RawTensor]
    id: str = ""
    parameters: dict[str, ParameterValue] = field(default_factory=dict)
    is_private: bool = False

    @property
    def lies_as_sent(self) -> bool:
        """Whether the outputs can be sent from where they lie, as their elements stand there in row-major order."""
        return self.is_private and all(
            isinstance(output, RawTensor) or (output.array.flags.c_contiguous and not output.array.dtype.hasobject)
            for output in self.outputs
        )

    @property
    def nbytes(self) -> int:
        """The bytes of all outputs."""
        size = 0
        for output in self.outputs:
            size += output.nbytes
        return size


@dataclass(frozen=True, slots=True)
class StreamProblem:
    """What was wrong with one request of a stream, which goes on."""

    message: str


StreamReply = InferResponse | StreamProblem
"""What a stream answers with."""


@dataclass(frozen=True, slots=True)
class ServableMetadata:
    """What a servable tells of itself.

    ``inputs`` and ``outputs`` are sorted by name.  ``extra`` goes into the REST answer as it is (``rt_info``).
    ``joined_rows`` is up to how many rows of different requests are run together, 0 where each runs alone.  ``labels``
    name the classes of its outputs, by their index.
    """

    name: str
    platform: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    extra: dict[str, Any] = field(default_factory=dict)
    joined_rows: int = 0
    has_sequences: bool = False
    labels: tuple[str, ...] = ()
