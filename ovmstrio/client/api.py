"""Client interface of KServe v2, common to gRPC and REST, and its value types."""

from __future__ import annotations

import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from ovmstrio.core.tensor import Array, RawTensor
from ovmstrio.encoding.raw_contents import raw_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
    from types import TracebackType
    from typing import Self

__all__ = [
    "TIMESTAMP",
    "Client",
    "Health",
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
    "to_raw_tensor",
]

# -- Streams -----------------------------------------------------------------------------------------------------------

TIMESTAMP: Final = "OVMS_MP_TIMESTAMP"
"""Parameter of requests and responses with the timestamp of their packets."""

Value = bytes | Array
"""Input: an array, or bytes, which are sent as one ``BYTES`` tensor of exactly these bytes (text for Python nodes)."""


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


@dataclass(frozen=True, slots=True)
class StreamReply:
    """Server message of a stream: outputs of one timestamp, or the error of a request."""

    outputs: tuple[StreamOutput, ...] = ()
    timestamp: int | None = None
    error: str = ""


def to_raw_tensor(name: str, value: Value, datatype: str | None = None) -> RawTensor:
    """Convert an input to a raw tensor; raises ``InvalidRequest`` if KServe has no datatype for the array."""
    if isinstance(value, bytes):
        return RawTensor(name, "BYTES", (len(value),), value)
    return raw_tensor(name, value, datatype)


# -- Client ------------------------------------------------------------------------------------------------------------

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


class Client(ABC):
    """KServe v2 client.

    Every method raises the error class that the server raised, ``Unreachable`` if no server answers, and
    ``DeadlineExceeded`` on timeout. ``BYTES`` arrays contain ``bytes`` objects; ``BF16`` is returned as ``float32``.
    """

    def infer(
        self,
        model: str,
        inputs: Mapping[str, Value],
        *,
        version: str = "",
        datatypes: Mapping[str, str] | None = None,
        parameters: Mapping[str, Parameter] | None = None,
    ) -> dict[str, Array]:
        """Infer with a model and return its outputs by name.

        Inputs are arrays or bytes; see ``Value``. ``datatypes`` names KServe datatypes that the array does not
        determine (``BF16``); ``parameters`` are request parameters, such as those of sequences.
        """
        tensors = [to_raw_tensor(name, value, (datatypes or {}).get(name)) for name, value in inputs.items()]
        return self._infer(model, version, tensors, parameters or {})

    @abstractmethod
    def _infer(
        self, model: str, version: str, tensors: Sequence[RawTensor], parameters: Mapping[str, Parameter]
    ) -> dict[str, Array]:
        pass

    @abstractmethod
    def stream(
        self, model: str, requests: Iterable[StreamRequest], *, timeout: float | None = None
    ) -> Generator[StreamReply]:
        """Stream to a graph; closing the iterator cancels the stream at once.

        ``requests`` are read one by one in a thread of the library; their exceptions are raised here. ``timeout`` is
        the maximum seconds of the stream over gRPC, and between events over REST, which has one request only.
        """

    @abstractmethod
    def post(self, service: str, body: bytes, content_type: str) -> Posted:
        """Post a body to a service at ``/{service}``; ``NotSupported`` over gRPC."""

    @abstractmethod
    def server_metadata(self) -> ServerInfo:
        """Return the server's name, version and extensions of KServe v2."""

    @abstractmethod
    def metadata(self, model: str, version: str = "") -> ModelInfo:
        """Return inputs, outputs and versions of a model."""

    @abstractmethod
    def models(self) -> list[ModelState]:
        """Return all model versions of the server."""

    @abstractmethod
    def sequences(self, model: str, version: str = "") -> list[SequenceState]:
        """Return the live sequences of a stateful model; ``NotSupported`` over gRPC."""

    @abstractmethod
    def metrics(self, families: Sequence[str] = ()) -> str:
        """Return metrics in Prometheus text format, optionally of some families; ``NotSupported`` over gRPC."""

    @abstractmethod
    def profile(self, seconds: float, rate: float, models: Sequence[str] | None = None) -> dict[str, Any]:
        """Profile the server (admin scope) and return the document of ``POST /v2/profile``; ``NotSupported`` over gRPC.

        Samples for ``seconds`` at ``rate`` per second, then times the layers of ``models``.
        """

    @abstractmethod
    def server_live(self) -> bool:
        """Return whether the server is live."""

    @abstractmethod
    def server_ready(self) -> Health:
        """Return the readiness of the server."""

    @abstractmethod
    def model_ready(self, model: str, version: str = "") -> Health:
        """Return the readiness of a model."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


# -- Ctrl-C ------------------------------------------------------------------------------------------------------------


@contextmanager
def cancel_on_interrupt(cancel: Callable[[], object]) -> Iterator[None]:
    """On Ctrl-C inside the block call ``cancel``, and raise ``KeyboardInterrupt`` at the end of the block.

    An immediate exception inside the library might leave a lock taken. No effect in other threads, or if the program
    has its own SIGINT handler.
    """
    if threading.current_thread() is not threading.main_thread() or (
        signal.getsignal(signal.SIGINT) is not signal.default_int_handler
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
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if is_interrupted:
            raise KeyboardInterrupt
