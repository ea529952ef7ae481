from __future__ import annotations

import gzip
import json
import re
import time
import zlib
from urllib.parse import quote, urlencode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ovmstrio.core.events import ApiInterface, CallEvent, WireRequest
from ovmstrio.telemetry.recent_history import FailedCalls
from ovmstrio.util.redaction import blanked
from tests.support.callers import LOCAL
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
def test_values_of_secret_names_are_blanked(sent: dict[str, object], indent: int | None) -> None:
    text = blanked(json.dumps(sent, indent=indent).encode())
    assert SECRET not in text
    read = json.loads(text)
    assert list(read) == list(sent)
    assert "***" in text
    assert read.get("b") == sent.get("b")


@pytest.mark.parametrize("cut", range(20, 45))
def test_a_truncated_secret_is_blanked(cut: int) -> None:
    text = blanked(json.dumps({"text": "mine", "password": SECRET}).encode()[:cut])
    assert text.startswith('{"text": "mine"'[:cut])
    assert "corr" not in text


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
def test_text_that_looks_like_a_key_is_blanked(text: str) -> None:
    text = blanked(json.dumps({"prompt": text}).encode() if '"' not in text else text.encode())
    assert "SECRETSECRET12" not in text
    assert "***" in text


def _nested_json(document: object, times: int) -> str:
    return json.dumps(document if times == 0 else {"a": _nested_json(document, times - 1)})


def _part(name: str, *headers: str, value: str = SECRET) -> str:
    lines = "".join(f"{line}\r\n" for line in (f"Content-Disposition: form-data; {name}", *headers))
    return f"--x\r\n{lines}\r\n{value}\r\n--x--"


@pytest.mark.parametrize(
    "sent",
    [
        _nested_json({"password": SECRET, "b": 1}, 1),
        _nested_json({"b": [{"password": SECRET}]}, 2),
        _nested_json({"credentials": {"user": "me", "in": [SECRET]}}, 1),
        _nested_json({"password": SECRET}, 1)[:-5],
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
def test_secrets_in_other_formats_are_blanked(sent: str) -> None:
    text = blanked(sent.encode())
    assert "horse" not in text
    assert "***" in text


@pytest.mark.parametrize("sign", ["&", "%26", ";"])
def test_escapes_of_forms_are_decoded_before_the_search(sign: str) -> None:
    headers = [("content-type", "application/x-www-form-urlencoded; charset=utf-8")]
    inner = json.dumps({"password": "very secret"})
    sent = urlencode({"payload": inner, "b": "1"}) + f"&p%61ssword=correct{quote('&')}horse%20{sign}c=3"
    text = blanked(sent.encode(), headers)
    assert "very" not in text
    assert "horse" not in text
    assert "b=1" in text
    assert ("c=3" in text) is (sign == "&")


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
    sent = (begin + unit * 131_072)[:131_072]
    before = time.thread_time()
    blanked(sent, [("content-type", "application/x-www-form-urlencoded")])
    assert time.thread_time() - before < WAIT_SECONDS


def test_credentials_of_the_headers_are_blanked_in_the_body() -> None:
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
def test_bodies_without_secrets_are_unchanged(sent: object) -> None:
    assert blanked(json.dumps(sent).encode()) == json.dumps(sent)


@given(st.binary(max_size=300))
def test_any_bytes_become_text(data: bytes) -> None:
    assert isinstance(blanked(data), str)


@given(st.text("abc{}[]:,\\ 0", max_size=200))
def test_text_without_secret_names_is_unchanged(text: str) -> None:
    assert blanked(text.encode()) == text


# Failed calls


REST = ApiInterface("KServe", "REST", "infer")
BODY = json.dumps({"password": "correct horse", "text": "mine " * 900}).encode()


@pytest.mark.parametrize(
    ("body", "encoding", "shown"),
    [
        (gzip.compress(BODY, mtime=0), "gzip", r'\{"password": "\*\*\*", "text": "mine mine.*'),
        (zlib.compress(BODY), "Deflate", r'\{"password": "\*\*\*", "text": "mine mine.*'),
        (BODY, "br", r"\(compressed body, decompression failed\)"),
        (b"\xff" * 5000, "", r"(\\xff){250}"),
    ],
)
def test_a_body_is_shown_decoded_without_secrets_within_the_limit(body: bytes, encoding: str, shown: str) -> None:
    failures, request = FailedCalls(1000), WireRequest("HTTP", "POST", "/", [("content-encoding", encoding)], LOCAL)
    request.body, request.received = body[:1000], len(body)
    failures.call_failed(CallEvent("m", "1", "model", REST, "infer", code="InvalidRequest", request=request))
    (failure,) = failures.since(0)
    assert re.fullmatch(shown, failure.body)
    assert (len(failure.body) <= 1000, failure.body_bytes) == (True, len(body))
