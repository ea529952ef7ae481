from __future__ import annotations

import json
import time

import orjson
import pytest

from ovmstrio.core.errors import InvalidRequest, NotFound, Overloaded
from ovmstrio.core.events import CallEvent, Door, WireRequest
from ovmstrio.core.http import HttpAnswer, HttpRequest
from ovmstrio.core.pieced_message import PiecedMessage
from ovmstrio.wire.http.answers import JSON_TYPE, answer_head, error_answer, json_answer, plain_answer
from ovmstrio.wire.http.told_requests import ToldRequests


@pytest.mark.parametrize(
    ("error", "status", "body"),
    [
        (NotFound("missing"), 404, b'{"error":"missing"}'),
        (KeyError("a secret"), 500, b'{"error":"internal error; the server\'s log has the details"}'),
    ],
    ids=["domain error", "unexpected error"],
)
def test_an_error_is_a_json_object_without_internals(error: Exception, status: int, body: bytes) -> None:
    answer = error_answer(error)
    assert (answer.status, answer.body, answer.headers) == (status, body, (("content-type", "application/json"),))


@pytest.mark.parametrize(("seconds", "header"), [(0.1, "1"), (1.0, "1"), (1.4, "2"), (7.6, "8")])
def test_retry_after_is_in_seconds_rounded_up(seconds: float, header: str) -> None:
    answer = error_answer(Overloaded("full", retry_after_seconds=seconds))
    assert (answer.status, dict(answer.headers)["retry-after"]) == (429, header)


def test_long_error_texts_are_cut() -> None:
    text = orjson.loads(error_answer(InvalidRequest("x" * 1_000_000)).content)["error"]
    assert text == "x" * 4096 + "..."


def test_texts_with_surrogates_are_written_as_json() -> None:
    assert json.loads(json_answer({"reason": "broken \udcff name"}).content) == {"reason": "broken \udcff name"}


def test_a_plain_answer_equals_head_and_body(monkeypatch: pytest.MonkeyPatch) -> None:
    for now in (1.0, 1.9, 2.0, 86_400.0):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        for body in (b"", b"{}", b"x" * 2**16):
            for headers in (JSON_TYPE, (*JSON_TYPE, ("x-length", " 7"))):
                answer = HttpAnswer(200, headers, body)
                head = answer_head(200, headers, length=len(body), is_chunked=False, keep_alive=True)
                assert plain_answer(answer) == head + body


@pytest.mark.parametrize(
    "answer",
    [
        HttpAnswer(400, JSON_TYPE, b"{}"),
        HttpAnswer(200, (), b"{}"),
        HttpAnswer(200, (*JSON_TYPE, ("vary", "Origin"), ("x-length", "2")), b"{}"),
        HttpAnswer(200, (("vary", "Origin"), *JSON_TYPE), b"{}"),
        HttpAnswer(200, JSON_TYPE, b"x" * (2**16 + 1)),
        HttpAnswer(200, JSON_TYPE, PiecedMessage([b"{}"])),
    ],
)
def test_other_answers_are_not_plain(answer: HttpAnswer) -> None:
    assert plain_answer(answer) is None


class _Observer:
    def __init__(self) -> None:
        self.ended: list[WireRequest] = []

    needs_every = True

    def samples(self, traceparent: str) -> bool | None:
        raise AssertionError(f"{traceparent}: over HTTP each request is told of")

    def request_ended(self, request: WireRequest) -> None:
        self.ended.append(request)


def test_bytes_of_views_and_pieced_answers_are_counted() -> None:
    observer = _Observer()
    told = ToldRequests(observer)
    view = memoryview(bytes(70_000))
    requests = HttpRequest("POST", "/", "", (), b"12345"), HttpRequest("POST", "/", "", (), b"", view=view)
    answers = HttpAnswer(200, (), b"123"), HttpAnswer(200, (), PiecedMessage([b"{}", bytes(80_000)]))
    for request, answer in zip(requests, answers, strict=True):
        assert told.answered(told.begin(request), answer) is answer
    assert [(each.received, each.sent) for each in observer.ended] == [(5, 3), (70_000, 80_002)]


def test_a_reported_request_has_no_reference_to_its_call() -> None:
    observer = _Observer()
    told = ToldRequests(observer)
    request = told.begin(HttpRequest("POST", "/", "", (), b"12345"))
    request.event = CallEvent("m", "1", "model", Door("KServe", "REST"), "infer", request=request)
    told.answered(request, HttpAnswer(200))
    assert observer.ended == [request]
    assert request.event is None
