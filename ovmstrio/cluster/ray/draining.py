"""How long a replica that is replaced may take to finish what it has, before Ray kills it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["drain_seconds"]

_OWN_SECONDS: Final = 30
_START_SECONDS: Final = 120


def drain_seconds(callees: Iterable[int]) -> int:
    """Give the time of a group, in seconds, by those of the groups that it calls.

    All groups are replaced at the same time.  What has been asked of a group with one replica waits there until the
    old one has ended and a new one has started, and so does the caller that has asked, which must not be killed before.
    """
    return max((each + _START_SECONDS for each in callees), default=_OWN_SECONDS)
