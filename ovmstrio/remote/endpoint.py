"""Endpoint protocol of remote models, and its errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ovmstrio.core.errors import NotReady, ServerError
from ovmstrio.core.tensor import ANY_SIZE, BY_NAME, INVALID, Dim, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ovmstrio.core.request import InferRequest, InferResponse


class NotSent(NotReady):
    """Call that the server did not process, so that it may be sent again."""


@dataclass(frozen=True, slots=True)
class RemoteDescription:
    """Metadata of a remote model."""

    platform: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


class Endpoint(Protocol):
    """Client of one model at one address."""

    @property
    def address(self) -> str:
        """Configured address."""
        ...

    async def infer(self, request: InferRequest, seconds: float) -> InferResponse:
        """Run one inference with a time limit; model names and versions in request and response are ignored.

        Raises NotSent if the server did nothing, NotReady if the connection was lost or the server is not ready, and
        errors of the server with the address appended.  Cancellation cancels the call on the server.
        """
        ...

    async def describe(self) -> RemoteDescription:
        """Return the model's metadata; raises as :meth:`infer`."""
        ...

    async def unready_reason(self) -> str:
        """Return why the model cannot be called, empty if it can; raises as :meth:`infer`."""
        ...

    def doubt(self) -> None:
        """Handle missing responses: close a connection that may be dead."""
        ...

    async def aclose(self) -> None:
        """Close connections."""
        ...


def append_address(error: ServerError, address: str) -> ServerError:
    """Append the address to an error; clients match on the start of its text."""
    error.message = f"{error.message}; reported by {address}"
    error.args = (error.message,)
    return error


def make_tensor_spec(name: str, datatype: str, shape: Iterable[int]) -> TensorSpec:
    """Return the tensor spec for a server's metadata; negative sizes are dynamic."""
    dims: Sequence[Dim] = [Dim.fixed(size) if size >= 0 else ANY_SIZE for size in shape]
    return TensorSpec(name, BY_NAME.get(datatype, INVALID), tuple(dims), 0 if dims else None)
