"""Choosing the client of a protocol."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from ovmstrio.core.errors import InvalidRequest

if TYPE_CHECKING:
    from ovmstrio.client.api import Client
    from ovmstrio.client.tls import ClientTls

__all__ = ["DEFAULT_TIMEOUT_SECONDS", "open_client"]

DEFAULT_TIMEOUT_SECONDS: Final = 60.0
_SCHEMES: Final = frozenset({"", "http", "https", "grpc", "grpcs"})
_GRPC_TARGETS: Final = ("unix:", "unix-abstract:", "dns:", "ipv4:", "ipv6:")
"""Beginnings of addresses of other forms, which the gRPC library reads itself."""
_GRPC_ADDRESS: Final = "127.0.0.1:9000"
_REST_ADDRESS: Final = "127.0.0.1:8000"
_LARGEST_PORT: Final = 65_535
_KEY: Final = "OVMS_API_KEY"


def open_client(
    url: str = "",
    *,
    rest: bool = False,
    timeout: float = DEFAULT_TIMEOUT_SECONDS,
    tls: ClientTls | None = None,
    api_key: str = "",
) -> Client:
    """Open a client of a server, for use in a ``with`` statement.

    Args:
        url: ``host:port``, with or without a scheme; by default the server's default port on this machine.
        rest: speak REST instead of gRPC.
        timeout: seconds that each call may take.
        tls: speak TLS.
        api_key: a key or token that says who calls; that of the variable OVMS_API_KEY unless given.

    Raises:
        InvalidRequest: the URL is none, the key cannot be sent, or a file of ``tls`` cannot be used.
    """
    address = _address(url, rest=rest)
    api_key = api_key or os.environ.get(_KEY, "")
    if not (api_key.isascii() and api_key.isprintable()):
        raise InvalidRequest("the API key has characters that no header can have")
    if rest:
        from ovmstrio.client.rest_client import RestClient  # noqa: PLC0415 - only one protocol's library is imported

        return RestClient(address or _REST_ADDRESS, timeout=timeout, tls=tls, api_key=api_key)
    from ovmstrio.client.grpc_client import GrpcClient  # noqa: PLC0415 - as above

    return GrpcClient(address or _GRPC_ADDRESS, timeout=timeout, tls=tls, api_key=api_key)


def _address(url: str, *, rest: bool) -> str:
    """Take the scheme off, and refuse a port that libraries would cut to another."""
    if not rest and url.startswith(_GRPC_TARGETS):
        return url
    scheme, _, rest_of_url = url.rpartition("://")
    if scheme not in _SCHEMES:
        raise InvalidRequest(f"{url} is no HOST:PORT: nothing here speaks {scheme}")
    address = rest_of_url.rstrip("/")
    _, colon, port = address.rpartition(":")
    if colon and not port.endswith("]") and not (port.isdecimal() and int(port) <= _LARGEST_PORT):
        raise InvalidRequest(f"{address} is no HOST:PORT: expected a port up to {_LARGEST_PORT}, got {port!r}")
    return address
