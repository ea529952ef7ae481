"""Of which page of a browser a request is: a browser asks on behalf of any page that it shows."""

from __future__ import annotations

from ipaddress import ip_address
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from ovmstrio.core.http import HttpRequest

__all__ = ["foreign_origin", "foreign_site", "is_of_browser", "is_own_name"]

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
