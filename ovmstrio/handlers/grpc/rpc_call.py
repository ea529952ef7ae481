"""Interface of a gRPC call to a handler, connected to this process or to the server process."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, Protocol

MetadataPairs = Collection[tuple[str, str | bytes]]


class _Metadata(Protocol):
    def items(self) -> Iterable[tuple[str, str | bytes]]: ...


class RpcCall(Protocol):
    """gRPC call with the methods of ``ovmstrio.transport.grpc.call.Call``."""

    @property
    def path(self) -> str:
        """``/package.Service/Method``."""
        ...

    @property
    def deadline(self) -> float:
        """Deadline by trio's clock; infinity without one."""
        ...

    @property
    def client_endpoint(self) -> str:
        """The client: ``host:port``, ``[host]:port``, ``unix:`` or ``unknown``."""
        ...

    @property
    def user_agent(self) -> str:
        """User agent of the client."""
        ...

    @property
    def metadata(self) -> _Metadata:
        """Metadata of the request."""
        ...

    def cancel(self) -> None:
        """Cancel the call with status CANCELLED."""
        ...

    async def recv_message(self) -> Any:
        """Return the next request, None after the last."""
        ...

    async def send_initial_metadata(self, *, metadata: Any = None) -> None:
        """Send the initial metadata."""
        ...

    async def send_message(self, message: Any) -> None:
        """Send a serialized reply."""
        ...

    async def send_trailing_metadata(self, *, status_message: str | None = None, metadata: Any = None) -> None:
        """Set the status message and trailing metadata."""
        ...
