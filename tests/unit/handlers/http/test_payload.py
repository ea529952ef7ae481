"""The payload by the content type."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ovmstrio.core.errors import MalformedPayload
from ovmstrio.runtimes.handlers.http.forms import parse_payload


@pytest.mark.parametrize(
    ("content_type", "body", "payload"),
    [
        ("application/json", b'{"a": [1, null]}', {"a": [1, None]}),
        ("Application/JSON; charset=utf-8", b'"\xc3\xa9"', "é"),
        ("application/json", b"123456789012345678901234567890", 123456789012345678901234567890),
        ("text/plain", "héllo".encode(), "héllo"),
        ("text/plain", b"", ""),
        ("text/plain; charset=latin-1", b"\xe9", "é"),
        ('text/plain; charset="UTF-16-LE";', "é".encode("utf-16-le"), "é"),
        ("text/plain; charset=ascii; charset=latin-1;", b"\xe9", "é"),
        ("application/octet-stream", b"\x00\xff", b"\x00\xff"),
        ("application/vnd.x+json", b"{}", b"{}"),
        ("text/html", b"<p>", b"<p>"),
        ("", b"x", b"x"),
        (None, b"", b""),
    ],
)
def test_each_content_type_has_its_payload(content_type: str | None, body: bytes, payload: Any) -> None:
    """JSON values, text in its charset, and bytes for everything else."""
    assert parse_payload(content_type, body) == payload


def test_json_may_have_what_is_no_number() -> None:
    """As the original's parser reads it."""
    payload = parse_payload("application/json", b"[NaN, Infinity]")
    assert math.isnan(payload[0])
    assert payload[1] == math.inf


@pytest.mark.parametrize("body", [b"", b"{", b'"\xff"', b"[" * 100_000])
def test_bad_json_is_the_callers_fault(body: bytes) -> None:
    """An empty body, no JSON, no UTF-8, or too deep; marked, because the answer is JSON then."""
    with pytest.raises(MalformedPayload) as caught:
        parse_payload("application/json", body)
    assert caught.value.is_json


def test_the_parsers_text_is_told() -> None:
    """So that the caller finds the place."""
    with pytest.raises(MalformedPayload, match=r"Expecting value: line 1 column 7 \(char 6\)"):
        parse_payload("application/json", b'{"a": }')


@pytest.mark.parametrize("charset", ["utf-8", "no-such", "hex", "undefined"])
def test_text_in_another_charset_is_the_callers_fault(charset: str) -> None:
    """Whether the charset is unknown, is none of text, or is not the text's."""
    with pytest.raises(MalformedPayload, match=f"not in {charset}") as caught:
        parse_payload(f"text/plain; charset={charset}", b"\xff")
    assert not caught.value.is_json


@pytest.mark.parametrize(("charset", "body"), [("punycode", b"9a9a"), ("idna", b"a.b"), ("utf-7", b"+2AA-")])
def test_a_charset_of_names_and_half_a_letter_are_the_callers_fault(charset: str, body: bytes) -> None:
    """The time that names take grows by the square of their length, and nothing can be done with halves."""
    with pytest.raises(MalformedPayload, match=f"not in {charset}"):
        parse_payload(f"text/plain; charset={charset}", body)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    )
)
def test_every_json_value_comes_through(value: Any) -> None:
    """As it was written."""
    assert parse_payload("application/json", json.dumps(value).encode()) == value


@given(
    st.sampled_from(["application/json", "text/plain; charset=utf-7", "multipart/form-data; boundary=b"]), st.binary()
)
def test_no_body_does_more_than_fail(content_type: str, body: bytes) -> None:
    """Whatever is sent, it is parsed or it is malformed."""
    with suppress(MalformedPayload):
        parse_payload(content_type, body)
