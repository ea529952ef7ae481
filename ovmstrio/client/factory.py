"""Client factory of the commands."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ovmstrio.client.addresses import parse_address
from ovmstrio.client.client_base import DEFAULT_TIMEOUT_SECONDS
from ovmstrio.client.sync_client import Client

if TYPE_CHECKING:
    from ovmstrio.client.tls import ClientTls

_UNIX = ("unix:", "unix-abstract:")


def open_client(
    url: str = "",
    *,
    rest: bool = False,
    timeout: float = DEFAULT_TIMEOUT_SECONDS,
    tls: ClientTls | None = None,
    api_key: str = "",
) -> Client:
    """Open a client that repeats no calls; use as context manager. ``Client(url)`` takes the protocol from its URL.

    Args:
        url: ``host:port``, optionally with scheme; default: the server's default port on this machine.
        rest: use REST instead of gRPC, whatever the scheme.
        timeout: maximum seconds per call.
        tls: TLS settings.
        api_key: API key or token; default: the environment variable OVMS_API_KEY.

    Raises:
        InvalidRequest: URL or key is malformed, or a file of ``tls`` cannot be used.
    """
    is_secure = False
    scheme, found, rest_of_url = url.rpartition("://")
    if found and not url.startswith(_UNIX) and scheme in {"", "http", "https", "grpc", "grpcs"}:
        url, is_secure = rest_of_url, scheme in {"https", "grpcs"}
    address = parse_address(url, tls or is_secure, default_scheme="http" if rest else "grpc")
    return Client(timeout=timeout, retries=0, api_key=api_key, address=address)
