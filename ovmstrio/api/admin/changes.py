"""Changes of the server that clients ask for: who may make them, and the line of the log that says who did."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import structlog

from ovmstrio.api.admin.locality import check_is_local
from ovmstrio.core.callers import Need, current_caller
from ovmstrio.core.errors import PermissionDenied, ServerError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Changes"]

log = structlog.get_logger(__name__)


class Changes:
    """What changes the server.

    A caller that is known needs the scope ``admin``, from wherever it asks; where nobody has to be known, changes are
    made from the server's own machine.

    Args:
        allows_remote: whether those whom nobody knows may make changes from other machines, too.
    """

    def __init__(self, *, allows_remote: bool = False) -> None:
        self._allows_remote = allows_remote

    @contextmanager
    def making(self, change: str, client: str, **facts: object) -> Iterator[None]:
        """Make a change within the block, and have the log tell of it and of its outcome.

        Args:
            change: in a word or two, for the log.
            client: the host that asks; empty for one at a Unix socket.
            facts: about the change, for the log.

        Raises:
            PermissionDenied: who asks may not.
        """
        caller = current_caller.get()
        who = {"caller": "" if caller is None else caller.name, "client": client or "unix"}
        try:
            self._check(client)
            yield
        except PermissionDenied as error:
            log.warning("change refused", change=change, **who, **facts, reason=error.message)
            raise
        except ServerError as error:
            log.warning("change failed", change=change, **who, **facts, reason=error.message)
            raise
        log.info("server changed", change=change, **who, **facts)

    def _check(self, client: str) -> None:
        caller = current_caller.get()
        if caller is not None:
            caller.demand(Need.ADMIN)
        elif not self._allows_remote:
            check_is_local(client)
