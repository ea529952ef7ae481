"""A call of a gRPC service as a handler's side needs it, wherever its connection is."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, Protocol

__all__ = ["MetadataPairs", "RpcCall"]

MetadataPairs = Collection[tuple[str, str | bytes]]


class _Metadata(Protocol):
    def items(self) -> Iterable[tuple[str, str | bytes]]:
        """Give all pairs in their order."""
        ...


class RpcCall(Protocol):
    """One call; see ``ovmstrio.transport.grpc.stream.Call``, whose methods these are."""

    @property
    def path(self) -> str:
        """Which method is called."""
        ...

    @property
    def deadline(self) -> float:
        """When the caller gives up, by trio's clock."""
        ...

    @property
    def client_endpoint(self) -> str:
        """The client: ``host:port``, ``[host]:port``, ``unix:`` or ``unknown``."""
        ...

    @property
    def user_agent(self) -> str:
        """With what it calls."""
        ...

    @property
    def metadata(self) -> _Metadata:
        """What the caller has sent besides."""
        ...

    def cancel(self) -> None:
        """End the call with CANCELLED."""
        ...

    async def recv_message(self) -> Any:
        """Give the next request, None after the last."""
        ...

    async def send_initial_metadata(self, *, metadata: Any = None) -> None:
        """Send headers."""
        ...

    async def send_message(self, message: Any) -> None:
        """Send a reply, which is bytes."""
        ...

    async def send_trailing_metadata(self, *, status_message: str | None = None, metadata: Any = None) -> None:
        """Say what goes with the end."""
        ...
