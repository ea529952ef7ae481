"""Where every request shows who makes it, before its body is read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import structlog

from ovmstrio.auth.revocable_streams import LongRequests
from ovmstrio.core.callers import NO_SCOPE, OVER_LIMIT, Caller, Need, current_caller
from ovmstrio.core.errors import CallerLimited, MissingScope, Unauthenticated

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from ovmstrio.auth.authentication import Authentication

__all__ = ["Gate"]

log = structlog.get_logger(__name__)


def nobody_told(reason: str) -> None:
    """Leave a refusal uncounted."""
    del reason


def _reason_of(error: Unauthenticated | MissingScope | CallerLimited) -> str:
    if isinstance(error, Unauthenticated):
        return "not_known" if error.is_wrong else "nothing_shown"
    return NO_SCOPE if isinstance(error, MissingScope) else OVER_LIMIT


class Gate:
    """Lets requests in.

    Args:
        authentication: tells who calls.
        guards_everything: whether all but health is guarded, and not only what generates.

    Attributes:
        refused: is told why a request was refused: ``nothing_shown``, ``not_known``, ``scope`` or ``limit``.
        long_requests: those that go on, and are looked at again.
    """

    def __init__(self, authentication: Authentication, *, guards_everything: bool = True) -> None:
        self.refused: Callable[[str], object] = nobody_told
        self.long_requests = LongRequests()
        self._authentication = authentication
        self.guards_everything = guards_everything

    def let_in_now(
        self, need: Need, service: str, headers: Iterable[tuple[str, str]], notes: dict[object, Any] | None = None
    ) -> bool:
        """Let a request in that shows what was seen before, and may do what it asks for; nothing is waited for.

        Gives False, and has done nothing, for any other request: :meth:`let_in` is asked then, and says why if it
        refuses.  Args and Ownership as there; ``notes`` are those of headers that may come again, so that they need
        not be read again.
        """
        if need is Need.NOTHING or not (self.guards_everything or need is Need.GENERATE):
            current_caller.set(None)
            return True
        caller = self._authentication.seen(headers, notes)
        if caller is None:
            return False
        try:
            caller.demand(need, service)
            if caller.allowance is not None:
                caller.enter()
        except (MissingScope, CallerLimited):
            return False
        current_caller.set(caller)
        return True

    async def let_in(
        self, need: Need, service: str, headers: Iterable[tuple[str, str]], certificate: Mapping[str, Any] | None
    ) -> Caller | None:
        """Let a request in, whose caller is the task's ``current_caller`` from then on.

        Args:
            need: what it needs.
            service: which one it is about; empty where only its body tells.
            headers: in small letters.
            certificate: of the client, verified.

        Raises:
            Unauthenticated: it is not known who calls.
            MissingScope: the caller may not do that.
            CallerLimited: it does too much of it.

        Ownership: the caller of this must have the caller given leave; None if nobody had to be known.
        Cancellation: while a token's keys are fetched; nothing is held then.
        """
        if need is Need.NOTHING or not (self.guards_everything or need is Need.GENERATE):
            current_caller.set(None)
            return None
        try:
            caller = self._authentication.seen(headers) or await self._authentication.identify(headers, certificate)
            caller.demand(need, service)
            caller.enter()
        except (Unauthenticated, MissingScope, CallerLimited) as error:
            self.refused(_reason_of(error))
            raise
        current_caller.set(caller)
        return caller

    async def look_again(
        self, need: Need, headers: Iterable[tuple[str, str]], certificate: Mapping[str, Any] | None
    ) -> Caller | None:
        """Ask once more whether a request that was let in, and still goes on, may; it is not counted again.

        Args as those of :meth:`let_in`.  Gives whose it is now, who may do something else than before; None where
        nobody has to be known.

        Raises:
            Unauthenticated: who makes it is not known any more.
            MissingScope: the caller may not do that any more.

        Cancellation: while a token's keys are fetched.
        """
        if need is Need.NOTHING or not (self.guards_everything or need is Need.GENERATE):
            return None
        caller = self._authentication.seen(headers) or await self._authentication.identify(headers, certificate)
        caller.demand(need)
        return caller

    async def end_unknown(self) -> None:
        """End the long requests of those who are not known any more, or may do less than when they began.

        It costs next to nothing while callers stay, and no key ends.

        Cancellation: while a token's keys are fetched; the rest is looked at the next time.
        """
        for request in self.long_requests:
            if self._authentication.holds(request.known_as):
                continue
            try:
                known = await self._authentication.known(request.headers, request.certificate)
                known.caller.demand_all_of(request.caller)
            except (Unauthenticated, MissingScope) as error:
                self.refused(_reason_of(error))
                log.info("stream ended", caller=request.caller.name, reason=error.message)
                request.end(error)
            else:
                request.known_as = known
