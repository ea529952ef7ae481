"""What a handler's errors are to the client."""

from __future__ import annotations

import json

import pytest

from ovmstrio.core.errors import MalformedPayload, NotReady, UserCodeError
from ovmstrio.runtimes.handlers.http.responses import HTTPError
from ovmstrio.runtimes.handlers.http.values import error_answer, wants_json

TEXT = ("content-type", "text/plain; charset=utf-8")


def test_bad_json_is_answered_in_json() -> None:
    """With the parser's words; other bad payloads in text."""
    answer = error_answer(MalformedPayload("Expecting value", is_json=True), 400)
    assert (answer.status, answer.headers) == (400, (("content-type", "application/json"),))
    assert isinstance(answer.body, bytes)
    assert json.loads(answer.body) == {"error": "Expecting value"}
    assert error_answer(MalformedPayload("no boundary"), 400).headers == (TEXT,)


def test_a_chosen_status_is_kept() -> None:
    """With its text, or what the status is called, and its headers."""
    answer = error_answer(HTTPError(418, "short and stout", {"X-Pot": "tea"}), 500)
    assert (answer.status, answer.body) == (418, b"short and stout")
    assert answer.headers == (TEXT, ("x-pot", "tea"))
    assert error_answer(HTTPError(404), 500).body == b"Not Found"
    assert error_answer(HTTPError(799), 500).body == b""
    typed = error_answer(HTTPError(422, "{}", {"Content-Type": "application/json"}), 500)
    assert typed.headers == (("content-type", "application/json"),)
    assert error_answer(HTTPError(204, "x"), 500).body == b""
    assert str(HTTPError(404)) == "404: Not Found"


def test_what_a_handler_raised_is_for_the_log() -> None:
    """Unless the operator wants it shown."""
    error = UserCodeError("internal server error", detail="ValueError: boom (handler.py:3)")
    assert error_answer(error, 500).body == b"internal server error"
    shown = error_answer(error, 500, shows_details=True)
    assert shown.body == b"internal server error: ValueError: boom (handler.py:3)"


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ("application/json", True),
        ("application/json;q=0.9, */*;q=0.1", True),
        ("application/json, text/plain, */*", False),
        ("*/*", False),
        ("", False),
        (None, False),
    ],
)
def test_a_client_may_want_json(accept: str | None, expected: bool) -> None:
    """One that takes text as well gets that."""
    assert wants_json(accept) is expected


def test_errors_may_be_json_but_for_what_a_handler_says() -> None:
    """Which is sent as it is."""
    answer = error_answer(NotReady("later"), 503, as_json=True)
    assert (answer.headers, answer.body) == ((("content-type", "application/json"),), b'{"error": "later"}')
    assert error_answer(HTTPError(404, "no leaf"), 500, as_json=True).body == b"no leaf"


def test_errors_of_the_server_say_what_they_say() -> None:
    """With the front end's status."""
    answer = error_answer(NotReady("later"), 503)
    assert (answer.status, answer.body) == (503, b"later")
