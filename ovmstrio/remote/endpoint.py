"""What every way to call another server can do, and how its failures are told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ovmstrio.core.errors import NotReady, ServerError
from ovmstrio.core.tensor import ANY_SIZE, BY_NAME, INVALID, Dim, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ovmstrio.core.request import InferRequest, InferResponse

__all__ = ["Endpoint", "NotSent", "RemoteDescription", "spec_of", "with_address"]


class NotSent(NotReady):
    """Nothing of the call was sent, or the server says that it has not looked at it: it may be made again."""


@dataclass(frozen=True, slots=True)
class RemoteDescription:
    """What a server says of its model."""

    platform: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


class Endpoint(Protocol):
    """One model at one address."""

    @property
    def address(self) -> str:
        """Where it is, as it is configured."""
        ...

    async def infer(self, request: InferRequest, seconds: float) -> InferResponse:
        """Make one call, which the server has so many seconds for.

        Names and versions in the request and in the response are not looked at.

        Raises:
            NotSent: the server was not reached; nothing was done.
            NotReady: the connection broke, or the server says so.
            ServerError: what the server answered; the text is its own, and the address.

        Ownership: the request's buffers until it returns.
        Cancellation: at any checkpoint; the server is told.
        """
        ...

    async def describe(self) -> RemoteDescription:
        """Ask for inputs and outputs; raises as :meth:`infer`."""
        ...

    async def ask_ready(self) -> str:
        """Ask why the model cannot be called, empty if it can; raises as :meth:`infer`."""
        ...

    def doubt(self) -> None:
        """Take note that nothing came in time: what is connected may not be there any more."""
        ...

    async def aclose(self) -> None:
        """Close connections."""
        ...


def with_address(error: ServerError, address: str) -> ServerError:
    """Say in an error who has told it, behind its own text, by which clients know it."""
    error.message = f"{error.message}; told by {address}"
    error.args = (error.message,)
    return error


def spec_of(name: str, datatype: str, shape: Iterable[int]) -> TensorSpec:
    """Describe a tensor as the server does; sizes below 0 are any."""
    dims: Sequence[Dim] = [Dim.fixed(size) if size >= 0 else ANY_SIZE for size in shape]
    return TensorSpec(name, BY_NAME.get(datatype, INVALID), tuple(dims), 0 if dims else None)
