"""Changes of the server that clients ask for: who may make them, and the line of the log that says who did."""

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

_RULE: Final = "the server is changed from its own machine only"


class Changes:
    """What changes the server.

    A caller that is known needs the scope ``admin``, from wherever it asks; where nobody has to be known, changes are
    made from the server's own machine.  Browsers ask for every page that they show, with certificates and from the
    machine of whoever looks at it, and so none but the server's own page may ask, and those that the settings name.

    Args:
        allows_remote: whether those whom nobody knows may make changes from other machines, too.
        origins: of pages that may ask, separated by commas; ``*`` names none.
    """

    def __init__(self, *, allows_remote: bool = False, origins: str = "") -> None:
        self._allows_remote = allows_remote
        self._origins = frozenset(each.strip() for each in origins.split(",")) - {"", "*"}

    def making(self, change: str, client: ClientAddress, **facts: object) -> AbstractContextManager[None]:
        """Make a change within the block, and have the log tell of it and of its outcome.

        Args:
            change: in a word or two, for the log.
            client: the address of the client.
            facts: about the change, for the log.

        Raises:
            PermissionDenied: who asks may not.
        """
        return self._making(change, client, self._check, facts)

    def requested(self, change: str, request: HttpRequest, **facts: object) -> AbstractContextManager[None]:
        """Make a change as :meth:`making` does, that a request over HTTP asks for.

        Raises:
            PermissionDenied: who asks may not, or a browser does so for a page of another origin.
        """
        return self._making(change, request.client, partial(self._check_request, request), facts)

    def lets_page(self, request: HttpRequest) -> bool:
        """Tell whether the server's own page, which makes this request, may make changes."""
        caller = current_caller.get()
        if caller is not None:
            return caller.scopes.admin
        return self._allows_remote or (is_local(request.client) and is_own_name(request.header("host") or ""))

    @contextmanager
    def _making(
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
            check_is_local(client, _RULE, "--allow_remote_admin lets other machines do it")

    def _check_request(self, request: HttpRequest, client: ClientAddress) -> None:
        self._check(client)
        origin = foreign_origin(request)
        if (origin or foreign_site(request)) and origin not in self._origins:
            raise PermissionDenied(
                f"what changes the server is asked for by no page of another origin, and this one is "
                f"{origin or foreign_site(request)}; --allowed_origins with its name lets a page do it"
            )
        host = request.header("host") or ""
        # A name that leads here may be another's, whose page then is of the same origin as the server.
        is_doubtful = current_caller.get() is None and not self._allows_remote and is_of_browser(request)
        if is_doubtful and not is_own_name(host):
            raise PermissionDenied(
                f"a browser changes the server at localhost or at an address, and not at {host[:80]!r}; "
                "--allow_remote_admin lets it, and with --keys_file it is known who asks"
            )
