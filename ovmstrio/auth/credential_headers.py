"""Headers for code of users: without the key or token that the server itself has taken.

A header that is not what the caller is known by, such as one of the service's own, is passed on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ovmstrio.auth.authentication import bearer_of
from ovmstrio.core.callers import current_caller

if TYPE_CHECKING:
    from ovmstrio.core.http import Headers

__all__ = ["without_proof"]

_CERTIFICATE: Final = "certificate"
_SHOWN_IN: Final = frozenset({"authorization", "x-api-key"})


def without_proof(headers: Headers) -> Headers:
    """Give the headers of the running task's request without what its caller is known by, if that is among them."""
    caller = current_caller.get()
    if caller is None or caller.proof == _CERTIFICATE:
        return headers
    shown = bearer_of(headers)
    return tuple(line for line in headers if line[0] not in _SHOWN_IN or bearer_of((line,)) != shown)
