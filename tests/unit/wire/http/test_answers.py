"""The one form of errors."""

from __future__ import annotations

import json
import time

import orjson
import pytest

from ovmstrio.core.errors import InvalidRequest, NotFound, Overloaded
from ovmstrio.core.http import HttpAnswer
from ovmstrio.core.pieced_message import PiecedMessage
from ovmstrio.wire.http.answers import JSON_TYPE, answer_head, error_answer, json_answer, plain_answer

TEXT = "internal error; the server's log has the details"


def test_an_error_is_an_object_with_its_text() -> None:
    """The status is that of its class."""
    answer = error_answer(NotFound("nobody is here"))
    assert (answer.status, answer.body) == (404, b'{"error":"nobody is here"}')
    assert answer.headers == JSON_TYPE == (("content-type", "application/json"),)


def test_what_nobody_foresaw_tells_nothing() -> None:
    """Internals stay in the log."""
    answer = error_answer(KeyError("a secret"))
    assert (answer.status, orjson.loads(answer.content)) == (500, {"error": TEXT})


@pytest.mark.parametrize(("seconds", "header"), [(0.1, "1"), (1.0, "1"), (1.4, "2"), (7.6, "8")])
def test_an_overload_says_when_to_come_again(seconds: float, header: str) -> None:
    """In whole seconds, at least one, and never earlier than it helps."""
    answer = error_answer(Overloaded("full", retry_after_seconds=seconds))
    assert (answer.status, dict(answer.headers)["retry-after"]) == (429, header)


def test_a_long_text_is_cut() -> None:
    """An error that quotes its request does not send all of it back."""
    text = orjson.loads(error_answer(InvalidRequest("x" * 1_000_000)).content)["error"]
    assert text == "x" * 4096 + "..."


def test_a_text_that_is_not_unicode_is_still_told() -> None:
    """File names may hold any bytes, and end up in reasons."""
    assert json.loads(json_answer({"reason": "broken \udcff name"}).content) == {"reason": "broken \udcff name"}


def test_a_plain_answer_is_what_the_general_way_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its head is remembered, for a second."""
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
    """They are written with all that there is to say."""
    assert plain_answer(answer) is None
