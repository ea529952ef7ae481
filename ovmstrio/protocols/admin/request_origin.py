"""Origin of a request: checks that the client is on this machine and that a browser page is the server's own."""

from __future__ import annotations

from ipaddress import ip_address
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from ovmstrio.core.connection import Loopback, UnixSocket, Unknown
from ovmstrio.core.errors import PermissionDenied

if TYPE_CHECKING:
    from ovmstrio.core.connection import ClientAddress
    from ovmstrio.core.http import HttpRequest

__all__ = ["check_is_local", "foreign_origin", "foreign_site", "is_local", "is_of_browser", "is_own_name"]


def check_is_local(client: ClientAddress, rule: str, hint: str) -> None:
    """Raise ``PermissionDenied`` with ``rule`` and ``hint`` unless the client is on this machine."""
    if is_local(client):
        return
    if isinstance(client, Unknown):
        reason = f" ({client.reason})" if client.reason else ""
        raise PermissionDenied(f"{rule}, and the address of the client is unknown{reason}; {hint}")
    raise PermissionDenied(f"{rule}, and this request came from {client}; {hint}")


def is_local(client: ClientAddress) -> bool:
    """Return whether a client is at a loopback address or at a Unix socket of this machine."""
    return isinstance(client, Loopback | UnixSocket)


# Browser pages

_SITE: Final = "sec-fetch-site"
_SAME: Final = frozenset({"same-origin", "none"})


def foreign_site(request: HttpRequest) -> str:
    """Return ``Sec-Fetch-Site`` if the page is of another origin; empty otherwise."""
    site = request.header(_SITE)
    return "" if site is None or site in _SAME else site[:20] or "unknown"


def foreign_origin(request: HttpRequest) -> str:
    """Return ``Origin`` if it differs from the requested host; empty otherwise."""
    origin = request.header("origin")
    if origin is None or origin.partition("://")[2] == request.header("host"):
        return ""
    return origin[:80] or "null"


def is_of_browser(request: HttpRequest) -> bool:
    """Return whether a request has headers that browsers add to every request that may change state."""
    return request.header("origin") is not None or request.header(_SITE) is not None


def is_own_name(host: str) -> bool:
    """Return whether a ``Host`` is ``localhost``, an IP address or absent, which no foreign page can have."""
    try:
        name = urlsplit(f"//{host}").hostname
    except ValueError:
        return False
    if not name:
        return not host
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
