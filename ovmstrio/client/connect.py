"""Choosing the client of a protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ovmstrio.client.api import Client
    from ovmstrio.client.tls import ClientTls

__all__ = ["DEFAULT_TIMEOUT_SECONDS", "open_client"]

DEFAULT_TIMEOUT_SECONDS: Final = 60.0
_SCHEMES: Final = frozenset({"", "http", "https", "grpc", "grpcs"})
_GRPC_ADDRESS: Final = "127.0.0.1:9000"
_REST_ADDRESS: Final = "127.0.0.1:8000"


def open_client(
    url: str = "", *, rest: bool = False, timeout: float = DEFAULT_TIMEOUT_SECONDS, tls: ClientTls | None = None
) -> Client:
    """Open a client of a server, for use in a ``with`` statement.

    Args:
        url: ``host:port``, with or without a scheme; by default the server's default port on this machine.
        rest: speak REST instead of gRPC.
        timeout: seconds that each call may take.
        tls: speak TLS.

    Raises:
        OSError: a certificate cannot be read.
        InvalidRequest: the URL is none.
    """
    scheme, _, rest_of_url = url.rpartition("://")
    address = rest_of_url.rstrip("/") if scheme in _SCHEMES else url
    if rest:
        from ovmstrio.client.rest_client import RestClient  # noqa: PLC0415 - only one protocol's library is imported

        return RestClient(address or _REST_ADDRESS, timeout=timeout, tls=tls)
    from ovmstrio.client.grpc_client import GrpcClient  # noqa: PLC0415 - as above

    return GrpcClient(address or _GRPC_ADDRESS, timeout=timeout, tls=tls)
