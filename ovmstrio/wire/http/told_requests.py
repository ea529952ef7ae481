"""Requests over HTTP, told to whoever wants to know of each: begun, answered, refused, or left by their clients."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ovmstrio.core.events import WireRequest, current_request, is_over_tls, kept_body_bytes

if TYPE_CHECKING:
    from ovmstrio.core.events import RequestObserver
    from ovmstrio.core.http import HttpAnswer, HttpRequest

__all__ = ["ToldRequests"]


class ToldRequests:
    """Makes a :class:`WireRequest` of each request, and tells of its end.

    Args:
        observer: is told.
    """

    def __init__(self, observer: RequestObserver) -> None:
        self._observer = observer

    def begin(self, request: HttpRequest) -> WireRequest:
        """Make a request the one that the running task answers."""
        told = WireRequest("HTTP", request.method, request.target or request.path, request.headers, request.peer)
        body = request.body if request.view is None else request.view
        told.received = len(body)
        if most := kept_body_bytes.get():
            told.body = bytes(body[:most])
        told.is_encrypted = is_over_tls.get()
        current_request.set(told)
        return told

    def answered(self, told: WireRequest, answer: HttpAnswer) -> HttpAnswer:
        """Tell of a request that has its answer; one that is a stream lasts as long as that."""
        current_request.set(None)
        told.status = answer.status
        if answer.stream is None:
            told.sent = answer.size
            self._tell(told)
            return answer
        return answer.followed_by(lambda: self._end_stream(told))

    def refused(self, request: HttpRequest, answer: HttpAnswer) -> None:
        """Tell of a request that is answered before its body was read."""
        self.answered(self.begin(request), answer)

    def left(self, told: WireRequest) -> None:
        """Tell of a request whose client left before there was an answer, or that was cut off."""
        current_request.set(None)
        self._tell(told)

    def _end_stream(self, told: WireRequest) -> None:
        if told.event is not None:
            told.sent = told.event.sent
        self._tell(told)

    def _tell(self, told: WireRequest) -> None:
        self._observer.request_ended(told)
        # Its call knows it: both would be kept until cycles are looked for.
        told.event = None
