from __future__ import annotations

import json
import time
from typing import Any

import orjson
import pytest
from grpclib.const import Status
from structlog.testing import capture_logs

from ovmstrio.core import errors
from ovmstrio.core.callers import Permission
from ovmstrio.core.errors import InvalidRequest, NotFound, Overloaded
from ovmstrio.core.events import ApiInterface, CallEvent, WireRequest
from ovmstrio.core.http_messages import HttpAnswer, HttpRequest
from ovmstrio.transport.http.responses import (
    JSON_TYPE,
    encode_plain_json,
    encode_response_head,
    error_response,
    json_response,
)
from ovmstrio.transport.http.router import RequestEvents, Route, Router, rule
from ovmstrio.transport.statuses import ERROR_STATUSES, error_status, to_grpc_error
from ovmstrio.util.buffers import PiecedMessage


@pytest.mark.parametrize(
    ("error", "status", "body"),
    [
        (NotFound("missing"), 404, b'{"error":"missing"}'),
        (KeyError("a secret"), 500, b'{"error":"internal error; the server\'s log has the details"}'),
    ],
    ids=["domain error", "unexpected error"],
)
def test_an_error_is_a_json_object_without_internals(error: Exception, status: int, body: bytes) -> None:
    answer = error_response(error)
    assert (answer.status, answer.body, answer.headers) == (status, body, (("content-type", "application/json"),))


@pytest.mark.parametrize(("seconds", "header"), [(0.1, "1"), (1.0, "1"), (1.4, "2"), (7.6, "8")])
def test_retry_after_is_in_seconds_rounded_up(seconds: float, header: str) -> None:
    answer = error_response(Overloaded("full", retry_after_seconds=seconds))
    assert (answer.status, dict(answer.headers)["retry-after"]) == (429, header)


def test_long_error_texts_are_cut() -> None:
    text = orjson.loads(error_response(InvalidRequest("x" * 1_000_000)).content)["error"]
    assert text == "x" * 4096 + "..."


def test_texts_with_surrogates_are_written_as_json() -> None:
    assert json.loads(json_response({"reason": "broken \udcff name"}).content) == {"reason": "broken \udcff name"}


def test_a_plain_answer_equals_head_and_body(monkeypatch: pytest.MonkeyPatch) -> None:
    for now in (1.0, 1.9, 2.0, 86_400.0):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        for body in (b"", b"{}", b"x" * 2**16):
            for headers in (JSON_TYPE, (*JSON_TYPE, ("x-length", " 7"))):
                answer = HttpAnswer(200, headers, body)
                head = encode_response_head(200, headers, length=len(body), is_chunked=False, keep_alive=True)
                assert encode_plain_json(answer) == head + body


class _Observer:
    def __init__(self) -> None:
        self.ended: list[WireRequest] = []

    needs_every = True
    body_bytes = 0

    def samples(self, traceparent: str) -> bool | None:
        raise AssertionError(f"{traceparent}: every request over HTTP is reported")

    def request_ended(self, request: WireRequest) -> None:
        self.ended.append(request)


def test_bytes_of_views_and_pieced_answers_are_counted() -> None:
    observer = _Observer()
    reporter = RequestEvents(observer)
    view = memoryview(bytes(70_000))
    requests = HttpRequest("POST", "/", "", (), b"12345"), HttpRequest("POST", "/", "", (), b"", view=view)
    answers = HttpAnswer(200, (), b"123"), HttpAnswer(200, (), PiecedMessage([b"{}", bytes(80_000)]))
    for request, answer in zip(requests, answers, strict=True):
        assert reporter.answered(reporter.begin(request), answer) is answer
    assert [(each.received, each.sent) for each in observer.ended] == [(5, 3), (70_000, 80_002)]


def test_a_reported_request_has_no_reference_to_its_call() -> None:
    observer = _Observer()
    reporter = RequestEvents(observer)
    request = reporter.begin(HttpRequest("POST", "/", "", (), b"12345"))
    request.event = CallEvent("m", "1", "model", ApiInterface("KServe", "REST"), "infer", request=request)
    reporter.answered(request, HttpAnswer(200))
    assert observer.ended == [request]
    assert request.event is None


def _subclasses(cls: type[errors.ServerError]) -> set[type[errors.ServerError]]:
    return {cls}.union(*(_subclasses(child) for child in cls.__subclasses__()))


def test_every_error_class_has_statuses() -> None:
    defined = {cls for cls in _subclasses(errors.ServerError) if cls.__module__ == errors.__name__}
    assert defined == set(ERROR_STATUSES)


@pytest.mark.parametrize(("cls", "row"), ERROR_STATUSES.items())
def test_statuses_are_failures(cls: type[errors.ServerError], row: tuple[Status, int]) -> None:
    grpc, http = row
    assert grpc is not Status.OK
    assert 400 <= http < 600 or (cls, http) == (errors.NothingToGather, 204)


@pytest.mark.parametrize(
    ("error", "grpc", "http"),
    [
        (errors.InvalidRequest("why"), Status.INVALID_ARGUMENT, 400),
        (errors.NotFound("why"), Status.NOT_FOUND, 404),
        (errors.WorkerRestarting("why"), Status.UNAVAILABLE, 503),
        (errors.VersionLoading("why"), Status.UNAVAILABLE, 404),
        (errors.Overloaded("why"), Status.RESOURCE_EXHAUSTED, 429),
        (errors.MalformedPayload("why"), Status.INVALID_ARGUMENT, 400),
        (errors.UserCodeError("why"), Status.INTERNAL, 500),
        (errors.TooManyRequests("why"), Status.UNAVAILABLE, 503),
        (errors.QueueTimeout(1.5), Status.UNAVAILABLE, 503),
        (errors.ServiceLoading("why"), Status.UNAVAILABLE, 503),
        (errors.StorageFailure("why"), Status.UNAVAILABLE, 503),
    ],
)
def test_errors_are_mapped_to_their_statuses_with_their_text(
    error: errors.ServerError, grpc: Status, http: int
) -> None:
    mapped = to_grpc_error(error)
    assert mapped is not None
    assert (mapped.status, mapped.message, error_status(error)) == (grpc, str(error), (grpc, http))


def test_unexpected_errors_are_not_mapped() -> None:
    assert to_grpc_error(ValueError("secret")) is None


async def test_an_unexpected_error_of_a_path_parameter_named_path_is_answered() -> None:
    async def fail(_: HttpRequest, path: str) -> HttpAnswer:
        raise KeyError(path)

    refusals: Any = None
    router = Router([rule("/v3/<path:path>", "POST", fail, need=Permission.NOTHING)], refusals)
    route = router.find("POST", "/v3/some/where")
    assert isinstance(route, Route)
    with capture_logs() as lines:
        answer = await router.answer(route, HttpRequest("POST", "/v3/some/where"))
    assert answer.status == 500
    assert [(line["event"], line["path"]) for line in lines] == [("request failed", "/v3/some/where")]
