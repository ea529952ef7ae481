"""What is shown of what was sent, and what is not."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as some

from ovmstrio.observability.blanked_secrets import blanked

SECRET = "correct horse"


@pytest.mark.parametrize(
    "sent",
    [
        {"password": SECRET},
        {"a": [{"Api-Key": SECRET, "b": 1}]},
        {"clientSecret": [SECRET, {"in": SECRET}], "b": 1},
        {'my " token': SECRET},
        {"credentials": {"user": SECRET, "roles": [SECRET]}, "b": [1, 2]},
    ],
)
@pytest.mark.parametrize("indent", [None, 2])
def test_values_whose_names_say_that_they_are_secret_are_blanked(sent: dict[str, object], indent: int | None) -> None:
    """However deep they are, with all names that are in them; what is left is JSON."""
    told = blanked(json.dumps(sent, indent=indent).encode())
    assert SECRET not in told
    read = json.loads(told)
    assert list(read) == list(sent)
    assert "***" in told
    assert read.get("b") == sent.get("b")


@pytest.mark.parametrize("cut", range(20, 45))
def test_a_secret_that_was_cut_is_none_the_less_blanked(cut: int) -> None:
    """Wherever the begin that is kept ends."""
    told = blanked(json.dumps({"text": "mine", "password": SECRET}).encode()[:cut])
    assert told.startswith('{"text": "mine"'[:cut])
    assert "corr" not in told


@pytest.mark.parametrize(
    "text",
    [
        "grant=x&client_secret=SECRETSECRET12&more=1",
        'form-data; name="api_key"\r\n\r\nSECRETSECRET12\r\n',
        "curl -H 'Authorization: Bearer SECRETSECRET12'",
        "see https://me:SECRETSECRET12@example.org/x",
        "the key is sk-SECRETSECRET12",
        "mine is ovms_SECRETSECRET12",
        "eyJhbGciOiJ9.SECRETSECRET12.abc",
    ],
)
def test_what_looks_like_a_key_is_blanked_wherever_it_stands(text: str) -> None:
    """In forms, in texts and in addresses."""
    told = blanked(json.dumps({"prompt": text}).encode() if '"' not in text else text.encode())
    assert "SECRETSECRET12" not in told
    assert "***" in told


def test_what_the_head_has_shown_is_blanked_in_the_body() -> None:
    """With or without the word before it."""
    headers = [("authorization", "Bearer abcdef"), ("x-api-key", "ghijkl"), ("accept", "text")]
    assert blanked(b"abcdef and ghijkl as text", headers) == "*** and *** as text"


@pytest.mark.parametrize(
    "sent", [{"max_tokens": 5, "inputs": [{"name": "b", "data": [1.5, -2e3]}]}, {"messages": [{"content": "a: b"}]}]
)
def test_what_is_no_secret_stays_as_it_was_sent(sent: object) -> None:
    """Numbers of tokens among it."""
    assert blanked(json.dumps(sent).encode()) == json.dumps(sent)


@given(some.binary(max_size=300))
def test_whatever_was_sent_becomes_a_text(data: bytes) -> None:
    """Bytes that are no text are escaped."""
    assert isinstance(blanked(data), str)


@given(some.text("abc{}[]:,\\ 0", max_size=200))
def test_what_names_no_secret_is_told_whole(text: str) -> None:
    """Whatever its form."""
    assert blanked(text.encode()) == text
