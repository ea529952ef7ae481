"""Authentication of requests, before their bodies are read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import structlog

from ovmstrio.core.callers import MISSING_SCOPE_REASON, OVER_LIMIT_REASON, Caller, Permission, current_caller
from ovmstrio.core.errors import CallerLimited, MissingScope, Unauthenticated
from ovmstrio.telemetry.log_rate_limit import DeniedChangeLog

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from ovmstrio.auth.authentication import Authentication
    from ovmstrio.auth.revocable_streams import RevocableStream

log = structlog.get_logger(__name__)


def no_metric(reason: str) -> None:
    """Ignore the rejection."""
    del reason


def _rejection_reason(error: Unauthenticated | MissingScope | CallerLimited) -> str:
    if isinstance(error, Unauthenticated):
        return "not_known" if error.is_wrong else "nothing_shown"
    return MISSING_SCOPE_REASON if isinstance(error, MissingScope) else OVER_LIMIT_REASON


class Gate:
    """Gatekeeper of requests.

    Args:
        guards_everything: whether all endpoints except health are guarded, not only text generation.

    Attributes:
        refused: callback with the reason of a rejection: ``nothing_shown``, ``not_known``, ``scope`` or ``limit``.
        denials: log of admin changes that the gate denies.
        revocable_streams: open streams, checked again when credentials change.
    """

    def __init__(self, authentication: Authentication, *, guards_everything: bool = True) -> None:
        self.refused: Callable[[str], object] = no_metric
        self.denials = DeniedChangeLog()
        self.revocable_streams: set[RevocableStream] = set()
        self._authentication = authentication
        self.guards_everything = guards_everything

    def try_authenticate(
        self, need: Permission, service: str, headers: Iterable[tuple[str, str]], notes: dict[object, Any] | None = None
    ) -> bool:
        """Admit a request with cached credentials and sufficient permission, without waiting.

        Returns False without effect otherwise; then :meth:`let_in` decides.  ``notes`` is a cache for repeated headers.
        """
        if need is Permission.NOTHING or not (self.guards_everything or need is Permission.GENERATE):
            current_caller.set(None)
            return True
        caller = self._authentication.seen(headers, notes)
        if caller is None:
            return False
        try:
            caller.check(need, service)
            if caller.allowance is not None:
                caller.enter()
        except (MissingScope, CallerLimited):
            return False
        current_caller.set(caller)
        return True

    async def let_in(
        self, need: Permission, service: str, headers: Iterable[tuple[str, str]], certificate: Mapping[str, Any] | None
    ) -> Caller | None:
        """Authenticate a request and set the task's ``current_caller``.

        Args:
            need: required permission.
            service: name of the service; empty if the body names it.
            headers: lower-case names and values.
            certificate: verified client certificate.

        Returns:
            The caller, whose ``leave`` must be called; None without authentication.

        Raises:
            Unauthenticated: missing or wrong credentials.
            MissingScope: the permission is missing.
            CallerLimited: the quota is exceeded.
        """
        if need is Permission.NOTHING or not (self.guards_everything or need is Permission.GENERATE):
            current_caller.set(None)
            return None
        try:
            caller = self._authentication.seen(headers) or await self._authentication.identify(headers, certificate)
            caller.check(need, service)
            caller.enter()
        except (Unauthenticated, MissingScope, CallerLimited) as error:
            self.refused(_rejection_reason(error))
            raise
        current_caller.set(caller)
        return caller

    async def reauthenticate(
        self, need: Permission, headers: Iterable[tuple[str, str]], certificate: Mapping[str, Any] | None
    ) -> Caller | None:
        """Check an admitted request again, without counting it, and return its caller; None without authentication.

        Raises:
            Unauthenticated: the credentials are not valid any more.
            MissingScope: the permission was removed.
        """
        if need is Permission.NOTHING or not (self.guards_everything or need is Permission.GENERATE):
            return None
        caller = self._authentication.seen(headers) or await self._authentication.identify(headers, certificate)
        caller.check(need)
        return caller

    async def end_revoked(self) -> None:
        """Cancel open streams with revoked credentials or removed permissions; cheap without changes."""
        for request in tuple(self.revocable_streams):
            if self._authentication.holds(request.known_as):
                continue
            try:
                known = await self._authentication.known(request.headers, request.certificate)
                known.caller.check_same_scopes(request.caller)
            except (Unauthenticated, MissingScope) as error:
                self.refused(_rejection_reason(error))
                log.info("stream ended", caller=request.caller.name, reason=error.message)
                request.end(error)
            else:
                request.known_as = known
