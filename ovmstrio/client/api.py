"""What a client of either protocol can do, and the values that it gives."""

from __future__ import annotations

import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from ovmstrio.core.tensor import Array, RawTensor
from ovmstrio.encoding.wire_tensors import raw_tensor

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
    "StreamOutput",
    "StreamReply",
    "StreamRequest",
    "TensorInfo",
    "Value",
    "interrupts_cancel",
    "to_wire",
]

# ----------------------------------------------------------------------
# What goes into a stream to a graph, and what comes out of it, whatever the protocol
# ----------------------------------------------------------------------

TIMESTAMP: Final = "OVMS_MP_TIMESTAMP"
"""The parameter of requests and responses that holds the timestamp of their packets."""

Value = bytes | Array
"""An input: bytes go as ``BYTES`` whose content is just these bytes, which is what Python nodes expect of text."""


@dataclass(frozen=True, slots=True)
class StreamRequest:
    """One request of a stream; without a ``timestamp`` the server gives it one."""

    inputs: Mapping[str, Value]
    timestamp: int | None = None
    id: str = ""
    parameters: Mapping[str, bool | int | str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StreamOutput:
    """One output as it came: ``data`` is its content over gRPC, its JSON value over REST."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: Any


@dataclass(frozen=True, slots=True)
class StreamReply:
    """One message of the server: outputs of one timestamp, or what was wrong with a request."""

    outputs: tuple[StreamOutput, ...] = ()
    timestamp: int | None = None
    error: str = ""


def to_wire(name: str, value: Value, datatype: str | None = None) -> RawTensor:
    """Give an input as it travels; an array by default as the type that its dtype says.

    Raises:
        InvalidRequest: KServe has no name for the array's type.
    """
    if isinstance(value, bytes):
        return RawTensor(name, "BYTES", (len(value),), value)
    return raw_tensor(name, value, datatype)


# ----------------------------------------------------------------------
# What a client of either protocol can do, and the values that it gives
# ----------------------------------------------------------------------

Parameter = bool | int | str
"""A request parameter as both protocols carry it; integers have 64 bits and a sign."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One input or output as metadata tells it; -1 in ``shape`` is a dimension of any size."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The metadata of one servable."""

    name: str
    versions: tuple[str, ...]
    platform: str
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]


@dataclass(frozen=True, slots=True)
class ModelState:
    """One version of one servable and its state: READY, LOADING, UNLOADING or UNAVAILABLE."""

    name: str
    version: str
    state: str
    reason: str


@dataclass(frozen=True, slots=True)
class SequenceState:
    """One live sequence of a stateful model.

    ``requests`` counts those that succeeded; of ``lost_seconds`` at most they are missing in a sequence that was
    restored after its server had ended without a word.
    """

    id: int
    age_seconds: float
    idle_seconds: float
    requests: int
    lost_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Health:
    """Whether something is ready, and if not, why, where the protocol tells."""

    ready: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Posted:
    """What a service said to a body, and of which content type that is."""

    body: bytes
    content_type: str


class Client(ABC):
    """The calls of KServe v2, over either protocol.

    Every method raises the error class that the server raised, ``Unreachable`` when nobody answers, and
    ``DeadlineExceeded`` when the answer takes longer than the client's timeout.  Arrays of ``BYTES`` hold
    ``bytes`` objects; ``BF16`` is given as ``float32``.
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
        """Call a model.

        Inputs are arrays, or bytes, which go as ``BYTES`` whose content is just these bytes, as in streams;
        ``datatypes`` names KServe's type of an input where the array alone does not tell it (``BF16``);
        ``parameters`` are the request's own, such as those of sequences.
        """
        tensors = [to_wire(name, value, (datatypes or {}).get(name)) for name, value in inputs.items()]
        return self._infer(model, version, tensors, parameters or {})

    @abstractmethod
    def _infer(
        self, model: str, version: str, tensors: Sequence[RawTensor], parameters: Mapping[str, Parameter]
    ) -> dict[str, Array]:
        """Call a model with tensors as they travel."""

    @abstractmethod
    def stream(
        self, model: str, requests: Iterable[StreamRequest], *, timeout: float | None = None
    ) -> Generator[StreamReply]:
        """Stream to a graph; closing the iterator cancels the stream at once.

        ``requests`` are taken one by one as they come, in a thread of the library, and the stream's input ends with
        them; what they raise is raised here.  ``timeout`` is how many seconds the stream may take over gRPC, and over
        REST, where there is but one request, how many may pass without an event; None for any.
        """

    @abstractmethod
    def post(self, service: str, body: bytes, content_type: str) -> Posted:
        """Send a body to a service that is called over HTTP at ``/{service}``; ``NotSupported`` over gRPC."""

    @abstractmethod
    def metadata(self, model: str, version: str = "") -> ModelInfo:
        """Tell inputs, outputs and versions of a model."""

    @abstractmethod
    def models(self) -> list[ModelState]:
        """List every version that the server knows of."""

    @abstractmethod
    def sequences(self, model: str, version: str = "") -> list[SequenceState]:
        """List the live sequences of a stateful model; ``NotSupported`` where the protocol does not tell them."""

    @abstractmethod
    def metrics(self, families: Sequence[str] = ()) -> str:
        """Give the server's metrics in Prometheus's text format, all or those of some families.

        ``NotSupported`` where the protocol does not tell them.
        """

    @abstractmethod
    def profile(self, seconds: float, rate: float, models: Sequence[str] | None = None) -> dict[str, Any]:
        """Have the server look for so long at what its time goes to; for administrators.

        The document is that of ``POST /v2/profile``; ``NotSupported`` where the protocol has no such call.
        """

    @abstractmethod
    def server_live(self) -> bool:
        """Tell whether the server answers at all."""

    @abstractmethod
    def server_ready(self) -> Health:
        """Tell whether the server is ready."""

    @abstractmethod
    def model_ready(self, model: str, version: str = "") -> Health:
        """Tell whether a model can be called."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


# ----------------------------------------------------------------------
# Ctrl-C while a library waits that cannot stand an exception in the middle of it
# ----------------------------------------------------------------------


@contextmanager
def interrupts_cancel(cancel: Callable[[], object]) -> Iterator[None]:
    """Answer Ctrl-C inside the block with ``cancel``, and raise it when the block is left.

    Raised at once, it may come between the taking of a lock and the code that gives it back, and whoever wants the
    lock next waits for ever.  In other threads, and where the program has a handler of its own, nothing changes.

    Raises:
        KeyboardInterrupt: Ctrl-C came.
    """
    if threading.current_thread() is not threading.main_thread() or (
        signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield
        return
    came = False

    def answer(*_: object) -> None:
        nonlocal came
        came = True
        cancel()

    signal.signal(signal.SIGINT, answer)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if came:
            raise KeyboardInterrupt
