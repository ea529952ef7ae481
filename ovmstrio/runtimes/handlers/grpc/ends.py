"""How calls end besides with a reply."""

from __future__ import annotations

from typing import Final

__all__ = ["PASSING", "CallEndedError", "WrongReplyError"]


class CallEndedError(Exception):
    """Leaves the handler's code when it has aborted its call, or reads requests of a call that is over.

    It is not logged: the call's status has been said elsewhere.
    """


class WrongReplyError(Exception):
    """A handler gave back what is not a reply of its RPC; that has been logged."""


PASSING: Final = (CallEndedError, WrongReplyError)
"""What passes through a handler's methods as it is."""
