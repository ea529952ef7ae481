"""Client factory."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from ovmstrio.client.tls import ClientTls
from ovmstrio.core.errors import InvalidRequest
from ovmstrio.util.extras import Extra, missing_extra

if TYPE_CHECKING:
    from ovmstrio.client.api import Client

DEFAULT_TIMEOUT_SECONDS: Final = 60.0
_SCHEMES: Final = frozenset({"", "http", "https", "grpc", "grpcs"})
_GRPC_TARGETS: Final = ("unix:", "unix-abstract:", "dns:", "ipv4:", "ipv6:")
"""Prefixes of other address forms, which grpcio parses."""
_GRPC_ADDRESS: Final = "127.0.0.1:9000"
_REST_ADDRESS: Final = "127.0.0.1:8000"
_MAX_PORT: Final = 65_535
_KEY: Final = "OVMS_API_KEY"


def open_client(
    url: str = "",
    *,
    rest: bool = False,
    timeout: float = DEFAULT_TIMEOUT_SECONDS,
    tls: ClientTls | None = None,
    api_key: str = "",
) -> Client:
    """Open a client; use as context manager.

    Args:
        url: ``host:port``, optionally with scheme; default: the server's default port on this machine.
        rest: use REST instead of gRPC.
        timeout: maximum seconds per call.
        tls: TLS settings.
        api_key: API key or token; default: the environment variable OVMS_API_KEY.

    Raises:
        InvalidRequest: URL or key is malformed, or a file of ``tls`` cannot be used.
    """
    address = _address(url, rest=rest)
    api_key = api_key or os.environ.get(_KEY, "")
    if not (api_key.isascii() and api_key.isprintable()):
        raise InvalidRequest("the API key has characters that are not allowed in a header")
    if rest:
        from ovmstrio.client.rest_client import RestClient  # noqa: PLC0415 - imports one protocol's library only

        return RestClient(address or _REST_ADDRESS, timeout=timeout, tls=tls, api_key=api_key)
    if missing := missing_extra("grpc", Extra.GRPC):
        raise InvalidRequest(f"calls over gRPC need grpcio: {missing}; or use REST")
    from ovmstrio.client.grpc_client import GrpcClient  # noqa: PLC0415 - imports one protocol's library only

    return GrpcClient(address or _GRPC_ADDRESS, timeout=timeout, tls=tls, api_key=api_key)


def _address(url: str, *, rest: bool) -> str:
    """Remove the scheme; reject invalid ports, which the libraries truncate."""
    if not rest and url.startswith(_GRPC_TARGETS):
        return url
    scheme, _, rest_of_url = url.rpartition("://")
    if scheme not in _SCHEMES:
        raise InvalidRequest(f"expected HOST:PORT, got {url}: scheme {scheme} is not supported")
    address = rest_of_url.rstrip("/")
    _, colon, port = address.rpartition(":")
    if colon and not port.endswith("]") and not (port.isdecimal() and int(port) <= _MAX_PORT):
        raise InvalidRequest(f"{address}: expected HOST:PORT with a port up to {_MAX_PORT}, got {port!r}")
    return address
