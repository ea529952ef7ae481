"""Values of the clients: inputs, results, metadata and messages of streams."""

from __future__ import annotations

import signal
import threading
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Union

import numpy as np

from ovmstrio.core.errors import InvalidRequest
from ovmstrio.core.tensor import Array, RawTensor
from ovmstrio.encoding.raw_contents import from_raw, raw_tensor
from ovmstrio.util.interrupts import raise_interrupt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import ArrayLike

__all__ = [
    "TIMESTAMP",
    "Health",
    "InferResult",
    "ModelInfo",
    "ModelState",
    "Parameter",
    "Posted",
    "SequenceState",
    "ServerInfo",
    "StreamOutput",
    "StreamReply",
    "StreamRequest",
    "TensorInfo",
    "Value",
    "cancel_on_interrupt",
    "to_array",
    "to_raw_tensor",
]

# -- Streams -----------------------------------------------------------------------------------------------------------

TIMESTAMP: Final = "OVMS_MP_TIMESTAMP"
"""Parameter of requests and responses with the timestamp of their packets."""

Value = Union[bytes, "ArrayLike"]
"""Input: an array or what NumPy makes one of; bytes are sent as one ``BYTES`` tensor of exactly these bytes."""


@dataclass(frozen=True, slots=True)
class StreamRequest:
    """Request of a stream; without ``timestamp`` the server assigns one."""

    inputs: Mapping[str, Value]
    timestamp: int | None = None
    id: str = ""
    parameters: Mapping[str, bool | int | str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StreamOutput:
    """Output of a stream; ``data`` is the raw content over gRPC, the JSON value over REST."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: Any

    @property
    def array(self) -> Array:
        """Return the output as an array; over REST, which does not transfer types, of NumPy's default type."""
        if self.datatype == "JSON":
            array: Array = np.array(self.data, object if isinstance(self.data, str) else None)
            return array
        return from_raw(self.data, self.datatype, self.shape)


@dataclass(frozen=True, slots=True)
class StreamReply:
    """Server message of a stream: outputs of one timestamp, or the error of a request."""

    outputs: tuple[StreamOutput, ...] = ()
    timestamp: int | None = None
    error: str = ""

    def __getitem__(self, name: str) -> Array:
        """Return an output as an array; raises ``KeyError``."""
        for output in self.outputs:
            if output.name == name:
                return output.array
        raise KeyError(name)


def to_raw_tensor(name: str, value: Value, datatype: str | None = None) -> RawTensor:
    """Convert an input to a raw tensor; raises ``InvalidRequest`` if it cannot be sent as the datatype."""
    if isinstance(value, bytes):
        return RawTensor(name, "BYTES", (len(value),), value)
    return raw_tensor(name, to_array(name, value), datatype)


def to_array(name: str, value: ArrayLike) -> Array:
    """Convert an input to an array; raises ``InvalidRequest`` if NumPy makes none of it."""
    try:
        return np.asarray(value)
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidRequest(f"input {name!r}: {error}") from None


# -- Calls -------------------------------------------------------------------------------------------------------------

Parameter = bool | int | str
"""Request parameter; integers are signed 64-bit."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Input or output of a model; -1 in ``shape`` is a dynamic dimension."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Metadata of a servable."""

    name: str
    versions: tuple[str, ...]
    platform: str
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]


@dataclass(frozen=True, slots=True)
class ModelState:
    """Version of a servable; ``state`` is READY, LOADING, UNLOADING or UNAVAILABLE."""

    name: str
    version: str
    state: str
    reason: str


@dataclass(frozen=True, slots=True)
class SequenceState:
    """Live sequence of a stateful model; ``requests`` counts the successful ones.

    After a crash, requests of at most ``lost_seconds`` are missing in a restored sequence.
    """

    id: int
    age_seconds: float
    idle_seconds: float
    requests: int
    lost_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Health:
    """Readiness, with the reason if the protocol provides one."""

    ready: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Posted:
    """Response body of a service and its content type."""

    body: bytes
    content_type: str


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """Metadata of a server."""

    name: str
    version: str
    extensions: tuple[str, ...]


class InferResult(dict[str, Array]):
    """Outputs of an inference by name, as arrays that must not be written to.

    Attributes:
        model: name of the model; empty if the server does not say it.
        version: version that answered.
        id: id of the request.
        parameters: parameters of the response.
    """

    __slots__ = ("id", "model", "parameters", "version")

    def __init__(self) -> None:
        super().__init__()
        self.model = self.version = self.id = ""
        self.parameters: dict[str, Any] = {}


# -- Ctrl-C ------------------------------------------------------------------------------------------------------------


@contextmanager
def cancel_on_interrupt(cancel: Callable[[], object]) -> Iterator[None]:
    """On Ctrl-C inside the block call ``cancel``, and raise ``KeyboardInterrupt`` at the end of the block.

    An immediate exception inside the library might leave a lock taken. No effect in other threads, or if the program
    has its own SIGINT handler.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or (
        handler not in {signal.default_int_handler, raise_interrupt}
    ):
        yield
        return
    is_interrupted = False

    def answer(*_: object) -> None:
        nonlocal is_interrupted
        is_interrupted = True
        cancel()

    signal.signal(signal.SIGINT, answer)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if is_interrupted:
            raise KeyboardInterrupt
