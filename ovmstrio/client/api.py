"""What a client of either protocol can do, and the values that it gives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ovmstrio.client.streaming import to_wire

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Mapping, Sequence
    from types import TracebackType
    from typing import Self

    from ovmstrio.client.streaming import StreamReply, StreamRequest, Value
    from ovmstrio.core.tensor import Array, RawTensor

__all__ = ["Client", "Health", "ModelInfo", "ModelState", "Parameter", "Posted", "SequenceState", "TensorInfo"]

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
