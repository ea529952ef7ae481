"""Who may look at the console, and from which pages: not every page that a browser shows may ask on its behalf."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

from ovmstrio.api.admin.locality import check_is_local
from ovmstrio.api.admin.page_origins import foreign_origin, foreign_site, is_own_name
from ovmstrio.core.callers import current_caller
from ovmstrio.core.errors import PermissionDenied

if TYPE_CHECKING:
    from ovmstrio.core.http import HttpRequest

__all__ = ["CHANGE_HEADER", "ConsoleGuard", "ConsoleMode"]

ConsoleMode = Literal["off", "local", "on"]

CHANGE_HEADER: Final = "x-ovms-console"
"""What a request has that changes the server; a form of another page cannot have it."""


class ConsoleGuard:
    """Lets requests in.

    Args:
        mode: ``local`` for those of this machine, ``on`` for all.
    """

    def __init__(self, mode: ConsoleMode) -> None:
        self._is_local = mode == "local"

    def let_in(self, request: HttpRequest) -> None:
        """Let pass a request for the page, or of it.

        Raises:
            PermissionDenied: it is of another machine, or a page of another origin makes it.
        """
        if self._is_local:
            _check_local(request)
        _check_origin(request)

    def let_change(self, request: HttpRequest) -> None:
        """Let pass a request that changes the server.

        Raises:
            PermissionDenied: as :meth:`let_in`, or it may be one that a form of another page sends.
        """
        self.let_in(request)
        if request.header(CHANGE_HEADER) is None:
            raise PermissionDenied(f"what changes the server needs the header {CHANGE_HEADER}: 1")


def _check_local(request: HttpRequest) -> None:
    way_out = "--console on shows it to other machines, best with --keys_file"
    check_is_local(request.client, "the console is for this machine", way_out)
    host = request.header("host") or ""
    # A name that leads here and is another's page would make that page one of this machine.
    if current_caller.get() is None and not is_own_name(host):
        raise PermissionDenied(f"the console is at localhost or at an address, and not at {host[:80]!r}; {way_out}")


def _check_origin(request: HttpRequest) -> None:
    site, origin = foreign_site(request), foreign_origin(request)
    # Whoever follows a link to the page comes from anywhere; that is no request of another page's code.
    follows_link = request.header("sec-fetch-mode") == "navigate" and request.method in {"GET", "HEAD"}
    if site and not follows_link:
        raise PermissionDenied(f"the console is for its own page, and this is {site}")
    if origin:
        raise PermissionDenied(f"the console is for its own page, and this is of {origin}")
