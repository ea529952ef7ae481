"""Authorization and audit log of admin changes: origin checks, permission check and log."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from ipaddress import ip_address
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import structlog

from ovmstrio.core.callers import Permission, current_caller
from ovmstrio.core.connection import Loopback, UnixSocket, Unknown
from ovmstrio.core.errors import PermissionDenied, ServerError
from ovmstrio.telemetry.log_rate_limit import DeniedChangeLog
from ovmstrio.util.truncation import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from ovmstrio.core.connection import ClientAddress
    from ovmstrio.core.http_messages import HttpRequest

# Request origin


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


def cross_site(request: HttpRequest) -> str:
    """Return ``Sec-Fetch-Site`` if the page is of another origin; empty otherwise."""
    site = request.header(_SITE)
    return "" if site is None or site in _SAME else site[:20] or "unknown"


def cross_origin(request: HttpRequest) -> str:
    """Return ``Origin`` if it differs from the requested host; empty otherwise."""
    origin = request.header("origin")
    if origin is None or origin.partition("://")[2] == request.header("host"):
        return ""
    return origin[:80] or "null"


def is_from_browser(request: HttpRequest) -> bool:
    """Return whether a request has headers that browsers add to every request that may change state."""
    return request.header("origin") is not None or request.header(_SITE) is not None


def is_local_host_name(host: str) -> bool:
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


# Permission and audit

log = structlog.get_logger(__name__)

_LOCAL_ONLY: Final = "the server is changed from its own machine only"


class AdminChanges:
    """Permission check and audit log of admin changes.

    An authenticated caller needs the scope ``admin``; without authentication the client must be on this machine unless
    ``allows_remote``.  Browsers send requests with the user's certificates on behalf of any page, so only the server's
    own
    pages and pages of ``origins`` (comma-separated) may request changes.
    """

    def __init__(
        self, *, allows_remote: bool = False, origins: str = "", denials: DeniedChangeLog | None = None
    ) -> None:
        self.denials = denials or DeniedChangeLog()
        self._allows_remote = allows_remote
        self._origins = frozenset(each.strip() for each in origins.split(",")) - {"", "*"}

    def making(self, change: str, client: ClientAddress, **facts: object) -> AbstractContextManager[None]:
        """Run the block as a change: check the permission, and log the change with its outcome."""
        return self._audited(change, client, self._check, facts)

    def requested(self, change: str, request: HttpRequest, **facts: object) -> AbstractContextManager[None]:
        """Run the block as a change requested over HTTP, which pages of other origins may not request."""
        return self._audited(change, request.client, partial(self._check_request, request), facts)

    def page_may_change(self, request: HttpRequest) -> bool:
        """Return whether the server's own page, which sent this request, may make changes."""
        caller = current_caller.get()
        if caller is not None:
            return caller.scopes.admin
        return self._allows_remote or (is_local(request.client) and is_local_host_name(request.header("host") or ""))

    @contextmanager
    def _audited(
        self, change: str, client: ClientAddress, check: Callable[[ClientAddress], None], facts: dict[str, object]
    ) -> Iterator[None]:
        caller = current_caller.get()
        who = {"caller": "" if caller is None else caller.name, "client": str(client)}
        try:
            check(client)
            yield
        except PermissionDenied as error:
            self.denials.log_denied(change, error, client=client, caller=who["caller"], facts=facts)
            raise
        except ServerError as error:
            log.warning("change failed", change=change, **who, **facts, reason=error.message)
            raise
        log.info("server changed", change=change, **who, **facts)

    def _check(self, client: ClientAddress) -> None:
        caller = current_caller.get()
        if caller is not None:
            caller.check(Permission.ADMIN)
        elif not self._allows_remote:
            check_is_local(client, _LOCAL_ONLY, "--allow-remote-admin lets other machines do it")

    def _check_request(self, request: HttpRequest, client: ClientAddress) -> None:
        self._check(client)
        origin = cross_origin(request)
        if (origin or cross_site(request)) and origin not in self._origins:
            raise PermissionDenied(
                f"cross-origin change refused: this page is {origin or cross_site(request)}; "
                "--allowed-origins admits pages by their origin"
            )
        host = request.header("host") or ""
        # DNS rebinding: a foreign name that resolves to this machine makes its page same-origin with the server.
        is_doubtful = current_caller.get() is None and not self._allows_remote and is_from_browser(request)
        if is_doubtful and not is_local_host_name(host):
            raise PermissionDenied(
                f"change by a browser: expected Host localhost or an IP address, got {shown(host, 80)}; "
                "--allow-remote-admin or --keys-file admits it"
            )
