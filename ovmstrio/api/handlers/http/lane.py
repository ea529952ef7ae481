"""Plain requests to handlers, by the fast lane."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote

from ovmstrio.api.handlers.http.access_log import log_access

if TYPE_CHECKING:
    from ovmstrio.api.handlers.http.mounts import HandlerMounts
    from ovmstrio.api.handlers.http.service import HandlerAnswer, HandlerService
    from ovmstrio.wire.http.fast_lane import LaneRoutes
    from ovmstrio.wire.http.lane_answers import LaneAnswer
    from ovmstrio.wire.http.lane_head import Head

__all__ = ["MountedRoutes", "ProjectRoutes"]

_VERBS: Final = ("POST", "GET", "PUT", "PATCH", "DELETE")
_PREFIXES: Final = tuple(f"{verb} /".encode() for verb in _VERBS)


class ProjectRoutes:
    """The lane's way to the one handler of a project, at ``/``."""

    prefixes: Final = tuple(prefix + end for prefix in _PREFIXES for end in (b" ", b"?"))

    def __init__(self, service: HandlerService) -> None:
        self._service = service

    def route(self, head: Head) -> Callable[[bytes], Awaitable[LaneAnswer]] | None:
        """Find what answers a request; None for one that is not for ``/``."""
        path, _, query = head.target.partition("?")
        return partial(self._answer, head, query) if path == "/" else None

    async def _answer(self, head: Head, query: str, body: bytes) -> HandlerAnswer:
        answer = await self._service.answer(head.method, head.headers, query, body)
        log_access("", head.method, head.target, answer.status, answer.request_id)
        return answer


class MountedRoutes:
    """The lane's way to handlers under their names, and for all else that of the server that they are in.

    Args:
        mounts: the handlers.
        others: which takes what is not for them.
    """

    def __init__(self, mounts: HandlerMounts, others: LaneRoutes) -> None:
        self._mounts = mounts
        self._others = others

    @property
    def prefixes(self) -> tuple[bytes, ...]:
        """What requests begin with; nothing more than without handlers where there are none."""
        return _PREFIXES if self._mounts else self._others.prefixes

    def route(self, head: Head) -> Callable[[bytes], Awaitable[LaneAnswer]] | None:
        """Find what answers a request; None for one that is the application's."""
        path, _, query = head.target.partition("?")
        name = unquote(path[1:])
        if name in self._mounts:
            return partial(self._mounts.answer, name, head.method, head.headers, query)
        return self._others.route(head)
