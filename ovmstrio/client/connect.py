"""Choosing the client of a protocol."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ovmstrio.core.errors import InvalidRequest
from ovmstrio.util.regular_files import check_regular

if TYPE_CHECKING:
    from ovmstrio.client.api import Client

__all__ = ["DEFAULT_TIMEOUT_SECONDS", "ClientTls", "open_client"]

# ----------------------------------------------------------------------
# Choosing the client of a protocol
# ----------------------------------------------------------------------

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


# ----------------------------------------------------------------------
# The client's side of TLS
# ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ClientTls:
    """PEM files: the CA to trust in place of the system's, and the client's own certificate with its key."""

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    def context(self) -> ssl.SSLContext:
        """Load the files.

        Raises:
            InvalidRequest: one cannot be read, or does not hold what it should.
        """
        try:
            if self.ca is not None:
                check_regular(self.ca)
            context = ssl.create_default_context(cafile=self.ca)
        except OSError as error:
            raise InvalidRequest(f"{self.ca}: no certificate of a CA can be read: {_reason(error)}") from None
        if self.cert is not None:
            try:
                for path in (self.cert, self.key):
                    if path is not None:
                        check_regular(path)
                context.load_cert_chain(self.cert, self.key, password=_no_password)
            except (OSError, ValueError) as error:
                files = self.cert if self.key is None else f"{self.cert} and {self.key}"
                raise InvalidRequest(f"{files}: no certificate with its key can be read: {_reason(error)}") from None
        return context


def _no_password() -> str:
    """Refuse a key with a password, for which the library would ask at the terminal."""
    raise ValueError("the key is encrypted")


def _reason(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)
