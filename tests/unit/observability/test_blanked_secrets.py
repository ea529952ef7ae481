"""What is shown of what was sent, and what is not."""

from __future__ import annotations

import json
import time
from urllib.parse import quote, urlencode

import pytest
from hypothesis import given
from hypothesis import strategies as some

from ovmstrio.observability.blanked_secrets import blanked
from tests.support.waits import WAIT_SECONDS

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


def _within(document: object, times: int) -> str:
    """Write JSON as a text of JSON, so many times."""
    return json.dumps(document if times == 0 else {"a": _within(document, times - 1)})


def _part(name: str, *headers: str, value: str = SECRET) -> str:
    lines = "".join(f"{line}\r\n" for line in (f"Content-Disposition: form-data; {name}", *headers))
    return f"--x\r\n{lines}\r\n{value}\r\n--x--"


@pytest.mark.parametrize(
    "sent",
    [
        _within({"password": SECRET, "b": 1}, 1),
        _within({"b": [{"password": SECRET}]}, 2),
        _within({"credentials": {"user": "me", "in": [SECRET]}}, 1),
        _within({"password": SECRET}, 1)[:-5],
        f'{{"p\\u0061ssword": "{SECRET}"}}',
        f'{{"a": "{{\\u0022password\\u0022:\\u0022{SECRET}\\u0022}}"}}',
        f'5" {{"password": "{SECRET}"}}',
        f"\x22\0\0\0{{'password': '{SECRET}'}}",
        f"password: {SECRET}\nmore: 1",
        f"GET / HTTP/1.1\r\nX-Api-Key: {SECRET}\r\nAccept: text",
        f"Cookie: a=1; session={SECRET}",
        json.dumps({"headers": [f"Authorization: Basic {SECRET}"]}),
        json.dumps({"text": f"curl -H 'x-api-key: {SECRET}' -d 1"}),
        json.dumps([{"name": "api_key", "value": SECRET}]),
        json.dumps({"inputs": [{"name": "password", "shape": [1], "datatype": "BYTES", "data": [SECRET]}]}),
        json.dumps({"parameters": {"api_key": {"string_param": SECRET}}}),
        json.dumps({"pwd": SECRET, "b": 1}),
        json.dumps({"pass_phrase": 1, "passphrase": SECRET}),
        json.dumps({"aws_access_key": SECRET}),
        f"<a><password>{SECRET}</password></a>",
        _part('name="api_key"'),
        _part("name=api_key"),
        _part('name="api_key"; filename="k"', "Content-Type: text/plain"),
        _part('name="secret"', value=f"first\r\n{SECRET}"),
        f"-----BEGIN RSA PRIVATE KEY-----\n{SECRET}\n-----END RSA PRIVATE KEY-----",
        f"\n\x07api_key\x12\x0f\x1a\x0d{SECRET}\x12\x04left",
    ],
)
def test_secrets_in_odd_forms_are_blanked(sent: str) -> None:
    """Texts of JSON within JSON, escapes, quotes that do not match, lines of headers, forms, markup and protobuf."""
    told = blanked(sent.encode())
    assert "horse" not in told
    assert "***" in told


@pytest.mark.parametrize("sign", ["&", "%26", ";"])
def test_what_forms_escape_is_read_before_it_is_looked_at(sign: str) -> None:
    """Names, and JSON in a value; a secret ends where its field does, whatever is in it."""
    headers = [("content-type", "application/x-www-form-urlencoded; charset=utf-8")]
    inner = json.dumps({"password": "very secret"})
    sent = urlencode({"payload": inner, "b": "1"}) + f"&p%61ssword=correct{quote('&')}horse%20{sign}c=3"
    told = blanked(sent.encode(), headers)
    assert "very" not in told
    assert "horse" not in told
    assert "b=1" in told
    assert ("c=3" in told) is (sign == "&")


@pytest.mark.parametrize(
    "unit",
    [
        b'\\"',
        b"-eyJ",
        b"\\",
        b"token",
        b"token ",
        b'"name":"token',
        b"content-disposition:; name=token\r\n",
        b"password:{",
        b'"password":"',
        b"token\\\\\\'",
        b"://a",
        b"&",
        b"a",
    ],
)
@pytest.mark.parametrize("begin", [b'"', b'"password": "', b'"password": {"'])
def test_blanking_takes_linear_time(unit: bytes, begin: bytes) -> None:
    """Linear time is 0.2 s here, quadratic time is minutes."""
    sent = (begin + unit * 262_144)[:262_144]
    before = time.thread_time()
    blanked(sent, [("content-type", "application/x-www-form-urlencoded")])
    assert time.thread_time() - before < WAIT_SECONDS


def test_what_the_head_has_shown_is_blanked_in_the_body() -> None:
    """With or without the word before it."""
    headers = [("authorization", "Bearer abcdef"), ("x-api-key", "ghijkl"), ("accept", "text")]
    assert blanked(b"abcdef and ghijkl as text", headers) == "*** and *** as text"


@pytest.mark.parametrize(
    "sent",
    [
        {"max_tokens": 5, "add_special_tokens": True, "inputs": [{"name": "b", "data": [1.5, -2e3]}]},
        {"messages": [{"content": "a: b"}], "stop_token_ids": [1, 2]},
        {"signature_name": "serving_default", "inputs": {"token_type_ids": [[0, 1]], "input": ["text"]}},
        {"inputs": [{"name": "token_ids", "datatype": "INT64", "shape": [1, 2], "data": [1, 2]}]},
    ],
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
