"""Admin changes that clients request: the permission check and the audit log line."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Final

import structlog

from ovmstrio.core.callers import Need, current_caller
from ovmstrio.core.errors import PermissionDenied, ServerError
from ovmstrio.protocols.admin.request_origin import (
    check_is_local,
    foreign_origin,
    foreign_site,
    is_local,
    is_of_browser,
    is_own_name,
)
from ovmstrio.telemetry.denied_admin_log import tell_refused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from ovmstrio.core.connection import ClientAddress
    from ovmstrio.core.http import HttpRequest

__all__ = ["Changes"]

log = structlog.get_logger(__name__)

_LOCAL_ONLY: Final = "the server is changed from its own machine only"


class Changes:
    """Permission check and audit log of admin changes.

    An authenticated caller needs the scope ``admin``; without authentication the client must be on this machine unless
    ``allows_remote``.  Browsers send requests with the user's certificates on behalf of any page, so only the server's
    own
    pages and pages of ``origins`` (comma-separated) may request changes.
    """

    def __init__(self, *, allows_remote: bool = False, origins: str = "") -> None:
        self._allows_remote = allows_remote
        self._origins = frozenset(each.strip() for each in origins.split(",")) - {"", "*"}

    def making(self, change: str, client: ClientAddress, **facts: object) -> AbstractContextManager[None]:
        """Run the block as a change: check the permission, and log the change with its outcome."""
        return self._audited(change, client, self._check, facts)

    def requested(self, change: str, request: HttpRequest, **facts: object) -> AbstractContextManager[None]:
        """Run the block as a change requested over HTTP, which pages of other origins may not request."""
        return self._audited(change, request.client, partial(self._check_request, request), facts)

    def lets_page(self, request: HttpRequest) -> bool:
        """Return whether the server's own page, which sent this request, may make changes."""
        caller = current_caller.get()
        if caller is not None:
            return caller.scopes.admin
        return self._allows_remote or (is_local(request.client) and is_own_name(request.header("host") or ""))

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
            tell_refused(change, error, client=client, caller=who["caller"], facts=facts)
            raise
        except ServerError as error:
            log.warning("change failed", change=change, **who, **facts, reason=error.message)
            raise
        log.info("server changed", change=change, **who, **facts)

    def _check(self, client: ClientAddress) -> None:
        caller = current_caller.get()
        if caller is not None:
            caller.demand(Need.ADMIN)
        elif not self._allows_remote:
            check_is_local(client, _LOCAL_ONLY, "--allow_remote_admin lets other machines do it")

    def _check_request(self, request: HttpRequest, client: ClientAddress) -> None:
        self._check(client)
        origin = foreign_origin(request)
        if (origin or foreign_site(request)) and origin not in self._origins:
            raise PermissionDenied(
                f"cross-origin change refused: this page is {origin or foreign_site(request)}; "
                "--allowed_origins admits pages by their origin"
            )
        host = request.header("host") or ""
        # DNS rebinding: a foreign name that resolves to this machine makes its page same-origin with the server.
        is_doubtful = current_caller.get() is None and not self._allows_remote and is_of_browser(request)
        if is_doubtful and not is_own_name(host):
            raise PermissionDenied(
                f"change by a browser: expected Host localhost or an IP address, got {host[:80]!r}; "
                "--allow_remote_admin or --keys_file admits it"
            )
