"""Address, credentials and headers of a server, parsed from one URL."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from ovmstrio.client.tls import ClientTls
from ovmstrio.core.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

_DEFAULT_PORTS: Final = {"grpc": 9000, "grpcs": 9000, "http": 8000, "https": 8000}
"""The server's own ports; a URL of a site on the web has its port."""
_SECURE: Final = frozenset({"grpcs", "https"})
_TARGETS: Final = ("dns:", "ipv4:", "ipv6:")
"""Prefixes of gRPC targets, which name the kind of the address."""
_UNIX: Final = ("unix-abstract:", "unix:")
_LAST_PORT: Final = 65_535
_KEY: Final = "OVMS_API_KEY"


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Address of one server.

    Attributes:
        text: the address for messages.
        is_grpc: calls are gRPC, otherwise REST.
        path: of a Unix socket, or None for TCP.
        prefix: path before the paths of a REST API.
        context: TLS context, or None for plain connections.
    """

    text: str
    is_grpc: bool
    host: str
    port: int
    path: str | None = None
    prefix: str = ""
    context: ssl.SSLContext | None = None

    @property
    def authority(self) -> str:
        """Return the value of ``Host`` and ``:authority``."""
        if self.path is not None:
            return "localhost"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def parse_address(url: str, tls: ClientTls | bool | None = None, *, default_scheme: str = "grpc") -> ServerAddress:
    """Parse ``scheme://host:port``, ``host:port`` or ``unix:/path``; an empty URL is this machine.

    Args:
        url: schemes are ``grpc``, ``grpcs``, ``http`` and ``https``.
        tls: TLS settings; True for the system's CAs; None for what the scheme says.
        default_scheme: scheme of an address without one.

    Raises:
        InvalidRequest: the URL is malformed, or a file of ``tls`` cannot be used.
    """
    is_grpc = default_scheme.startswith("grpc")
    if is_grpc and url.startswith(_UNIX):
        kind, _, name = url.partition(":")
        path = "\0" + name if kind == "unix-abstract" else "/" + name.lstrip("/") if name.startswith("//") else name
        return ServerAddress(url, is_grpc=True, host="", port=0, path=path, context=_context(tls, is_grpc=True))
    if is_grpc and url.startswith(_TARGETS):
        url = url.partition(":")[2].rpartition("/")[2]
    scheme, found, rest = url.rpartition("://")
    scheme = scheme if found else default_scheme
    if scheme not in _DEFAULT_PORTS:
        raise InvalidRequest(f"expected HOST:PORT, got {url}: scheme {scheme} is not supported")
    is_grpc = scheme.startswith("grpc")
    host, port, prefix = _split(rest.rstrip("/"), _DEFAULT_PORTS[scheme])
    if is_grpc and prefix:
        raise InvalidRequest(f"{url}: expected HOST:PORT without a path for gRPC")
    if tls is None or tls is False:
        tls = scheme in _SECURE
    context = _context(tls, is_grpc=is_grpc)
    text = rest.rstrip("/") or f"{host}:{port}"
    if not is_grpc:
        text = f"{'http' if context is None else 'https'}://{text}"
    return ServerAddress(text, is_grpc, host, port, prefix=prefix, context=context)


def _split(address: str, default_port: int) -> tuple[str, int, str]:
    authority, slash, path = address.partition("/")
    _, colon, port = authority.rpartition(":")
    has_port = bool(colon) and not port.endswith("]")
    if has_port and not (port.isascii() and port.isdecimal() and int(port) <= _LAST_PORT):
        raise InvalidRequest(f"{address}: expected HOST:PORT with a port up to {_LAST_PORT}, got {port!r}")
    try:
        host = urlsplit(f"//{authority}").hostname or "127.0.0.1"
    except ValueError as error:
        raise InvalidRequest(f"expected HOST:PORT, got {address}: {error}") from None
    if any(each <= " " or each in "\x7f@?#" for each in address):
        raise InvalidRequest(f"expected HOST:PORT, got {address!r}")
    return host, int(port) if has_port else default_port, slash + path


def _context(tls: ClientTls | bool | None, *, is_grpc: bool) -> ssl.SSLContext | None:
    if not tls:
        return None
    context = (ClientTls() if tls is True else tls).context()
    context.set_alpn_protocols(["h2" if is_grpc else "http/1.1"])
    return context


def read_headers(api_key: str, headers: Mapping[str, str] | None) -> dict[str, str]:
    """Return the headers of every call, with the key as bearer token; default: the variable OVMS_API_KEY.

    Raises:
        InvalidRequest: a header or the key has characters that are not allowed.
    """
    found = {name.lower(): value for name, value in (headers or {}).items()}
    key = api_key or os.environ.get(_KEY, "")
    if not (key.isascii() and key.isprintable()):
        raise InvalidRequest("the API key has characters that are not allowed in a header")
    if key:
        found.setdefault("authorization", f"Bearer {key}")
    for name, value in found.items():
        if not (name.isascii() and name.isprintable() and name and not set(name) & set(" :")):
            raise InvalidRequest(f"{name!r} is not the name of a header")
        if not (value.isascii() and value.isprintable()):
            raise InvalidRequest(f"header {name}: the value has characters that are not allowed")
    return found
