"""What is told of requests over HTTP when they have been answered."""

from __future__ import annotations

from ovmstrio.core.events import CallEvent, Door, WireRequest
from ovmstrio.core.http import HttpAnswer, HttpRequest
from ovmstrio.core.pieced_message import PiecedMessage
from ovmstrio.wire.http.told_requests import ToldRequests


class _Observer:
    def __init__(self) -> None:
        self.ended: list[WireRequest] = []

    needs_every = True

    def samples(self, traceparent: str) -> bool | None:
        raise AssertionError(f"{traceparent}: over HTTP each request is told of")

    def request_ended(self, request: WireRequest) -> None:
        self.ended.append(request)


def test_bytes_are_counted_wherever_a_large_body_or_answer_lies() -> None:
    """A body in memory of its own, and an answer that is sent from where its parts lie."""
    observer = _Observer()
    told = ToldRequests(observer)
    view = memoryview(bytes(70_000))
    requests = HttpRequest("POST", "/", "", (), b"12345"), HttpRequest("POST", "/", "", (), b"", view=view)
    answers = HttpAnswer(200, (), b"123"), HttpAnswer(200, (), PiecedMessage([b"{}", bytes(80_000)]))

    for request, answer in zip(requests, answers, strict=True):
        assert told.answered(told.begin(request), answer) is answer

    assert [(each.received, each.sent) for each in observer.ended] == [(5, 3), (70_000, 80_002)]


def test_a_request_that_was_told_of_leaves_nothing_to_the_collector() -> None:
    """Its call knows it, and so it must not know the call any more."""
    observer = _Observer()
    told = ToldRequests(observer)
    request = told.begin(HttpRequest("POST", "/", "", (), b"12345"))
    request.event = CallEvent("m", "1", "model", Door("KServe", "REST"), "infer", request=request)

    told.answered(request, HttpAnswer(200))

    assert observer.ended == [request]
    assert request.event is None
