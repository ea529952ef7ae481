"""The check that a client is on this machine; every grant by address goes through it."""

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

# ----------------------------------------------------------------------
# The check that a client is on this machine; every grant by address goes through it
# ----------------------------------------------------------------------


def check_is_local(client: ClientAddress, rule: str, hint: str) -> None:
    """Raise unless the client is on this machine.

    Args:
        client: as :meth:`ovmstrio.core.connection.Peer.client` derives it.
        rule: what is allowed to local clients only, for the error.
        hint: how other clients are allowed, for the error.

    Raises:
        PermissionDenied: the client is on another machine, or its address is unknown.
    """
    if is_local(client):
        return
    if isinstance(client, Unknown):
        reason = f" ({client.reason})" if client.reason else ""
        raise PermissionDenied(f"{rule}, and the address of the client is unknown{reason}; {hint}")
    raise PermissionDenied(f"{rule}, and this request came from {client}; {hint}")


def is_local(client: ClientAddress) -> bool:
    """Return whether a client is at a loopback address or at a Unix socket of this machine."""
    return isinstance(client, Loopback | UnixSocket)


# ----------------------------------------------------------------------
# Of which page of a browser a request is: a browser asks on behalf of any page that it shows
# ----------------------------------------------------------------------

_SITE: Final = "sec-fetch-site"
_SAME: Final = frozenset({"same-origin", "none"})


def foreign_site(request: HttpRequest) -> str:
    """Tell what a browser says of the page that asks, if it is another origin's; empty otherwise."""
    site = request.header(_SITE)
    return "" if site is None or site in _SAME else site[:20] or "of nobody"


def foreign_origin(request: HttpRequest) -> str:
    """Give the origin of the page that asks, if it is not the one that is asked; empty otherwise."""
    origin = request.header("origin")
    if origin is None or origin.partition("://")[2] == request.header("host"):
        return ""
    return origin[:80] or "null"


def is_of_browser(request: HttpRequest) -> bool:
    """Tell whether a request has what browsers add, to whatever changes something at the least."""
    return request.header("origin") is not None or request.header(_SITE) is not None


def is_own_name(host: str) -> bool:
    """Tell whether a ``Host`` is one that nobody else's page can have: ``localhost``, an address, or none."""
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
