from __future__ import annotations

import io
import json
import math
import re
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any, cast
from urllib.parse import urlencode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ovmstrio import handlers
from ovmstrio.core.errors import MalformedPayload
from ovmstrio.core.http_messages import HttpRequest
from ovmstrio.encoding import multipart
from ovmstrio.handlers import http_values as forms
from ovmstrio.handlers.http_values import FormData, QueryParams, RequestHeaders, UploadFile, parse_payload

# Payloads of other types than forms


@pytest.mark.parametrize(
    ("content_type", "body", "payload"),
    [
        ("application/json", b'{"a": [1, null]}', {"a": [1, None]}),
        ("Application/JSON; charset=utf-8", b'"\xc3\xa9"', "é"),
        ("application/json", b"123456789012345678901234567890", 123456789012345678901234567890),
        ("application/json", b"[Infinity]", [math.inf]),
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
    assert parse_payload(content_type, body) == payload


@pytest.mark.parametrize(
    ("content_type", "body", "message", "is_json"),
    [
        ("application/json", b"", "Expecting value", True),
        ("application/json", b'{"a": }', r"Expecting value: line 1 column 7 \(char 6\)", True),
        ("application/json", b'"\xff"', "utf-8", True),
        ("application/json", b"[" * 100_000, "recursion|nest", True),
        ("text/plain; charset=utf-8", b"\xff", "not in utf-8", False),
        ("text/plain; charset=no-such", b"\xff", "not in no-such", False),
        ("text/plain; charset=hex", b"\xff", "not in hex", False),
        ("text/plain; charset=undefined", b"\xff", "not in undefined", False),
        # The time that charsets of names take grows with the square of their length.
        ("text/plain; charset=punycode", b"9a9a", "not in punycode", False),
        ("text/plain; charset=idna", b"a.b", "not in idna", False),
        ("text/plain; charset=utf-7", b"+2AA-", "not in utf-7", False),
    ],
)
def test_malformed_payloads(content_type: str, body: bytes, message: str, is_json: bool) -> None:
    with pytest.raises(MalformedPayload, match=message) as caught:
        parse_payload(content_type, body)
    assert caught.value.is_json is is_json


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    )
)
def test_every_json_value_is_read(value: Any) -> None:
    assert parse_payload("application/json", json.dumps(value).encode()) == value


@given(
    st.sampled_from(["application/json", "text/plain; charset=utf-7", "multipart/form-data; boundary=b"]), st.binary()
)
def test_any_body_is_parsed_or_malformed(content_type: str, body: bytes) -> None:
    with suppress(MalformedPayload):
        parse_payload(content_type, body)


# Headers and query parameters


def test_headers_have_no_case_and_their_first_value() -> None:
    headers = RequestHeaders([("X-Key", "1"), ("accept", "a"), ("x-key", "2")])
    assert (headers["X-KEY"], headers.get("Accept"), headers.get("other", "-")) == ("1", "a", "-")
    assert headers.getlist("X-key") == ["1", "2"]
    assert "ACCEPT" in headers
    assert cast("str", 7) not in headers
    assert dict(headers) == {"x-key": "1", "accept": "a"}
    assert len(headers) == 2
    assert headers.raw == [(b"x-key", b"1"), (b"accept", b"a"), (b"x-key", b"2")]
    assert "x-key" in repr(headers)


def test_query_parameters_have_their_last_value() -> None:
    params = QueryParams("a=1&b=&a=%C3%BC+x&c")
    assert (params["a"], params.get("b"), params.get("z")) == ("ü x", "", None)
    assert params.getlist("a") == ["1", "ü x"]
    assert dict(params) == {"a": "ü x", "b": "", "c": ""}
    assert str(params) == "a=1&b=&a=%C3%BC+x&c="
    assert len(params) == 3


# Forms


TYPE = "multipart/form-data; boundary=Edge7"


@pytest.fixture
def own_parse(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, bytes], Any]:
    monkeypatch.setitem(sys.modules, "starlette.datastructures", None)
    # The import below replaces both; its classes are not those of this module.
    monkeypatch.setattr(handlers, "http_values", forms)
    monkeypatch.delitem(sys.modules, forms.__name__)
    parse: Callable[[str, bytes], Any] = import_module(forms.__name__).parse_payload
    return parse


def part(name: str, content: bytes, rest: str = "") -> bytes:
    head = f'--Edge7\r\nContent-Disposition: form-data; name="{name}"{rest}\r\n\r\n'
    return head.encode() + content + b"\r\n"


def form(*parts: bytes) -> bytes:
    return b"".join(parts) + b"--Edge7--\r\n"


async def test_files_and_fields_of_a_form(own_parse: Callable[[str, bytes], Any]) -> None:
    image = part("image", b"\x89PNG\r\n\x00", '; filename="c\u00e4t.png"\r\nContent-Type: image/png')
    payload = own_parse(TYPE, form(part("label", "hübsch".encode()), image))
    assert type(payload).__name__ == FormData.__name__
    assert payload["label"] == "hübsch"
    upload = payload["image"]
    assert type(upload).__name__ == UploadFile.__name__
    assert (upload.filename, upload.content_type, upload.size) == ("cät.png", "image/png", 7)
    assert upload.file.read() == b"\x89PNG\r\n\x00"
    await upload.seek(1)
    assert await upload.read(3) == b"PNG"
    assert await upload.read() == b"\r\n\x00"
    assert "cät.png" in repr(payload)
    await payload.close()
    assert upload.file.closed


async def test_the_content_of_an_upload_can_be_changed(own_parse: Callable[[str, bytes], Any]) -> None:
    upload = own_parse(TYPE, form(part("f", b"abc", '; filename="f"')))["f"]
    await upload.write(b"x")
    await upload.seek(0)
    assert await upload.read() == b"xbc"
    assert upload.content_type is None


def test_fields_may_repeat_in_both_kinds_of_forms(own_parse: Callable[[str, bytes], Any]) -> None:
    several = own_parse(TYPE, form(part("a", b"1"), part("b", b"2"), part("a", b"3")))
    assert (several["a"], several.getlist("a"), several.get("c")) == ("3", ["1", "3"], None)
    coded = own_parse("application/x-www-form-urlencoded; charset=utf-8", b"a=1&b=&a=%C3%BC+x")
    assert coded.multi_items() == [("a", "1"), ("b", ""), ("a", "ü x")]
    assert dict(coded) == {"a": "ü x", "b": ""}


@pytest.mark.parametrize(
    ("content_type", "body", "reason"),
    [
        ("multipart/form-data", form(part("a", b"1")), "boundary"),
        (TYPE, b"", "cannot be parsed"),
        (TYPE, part("a", b"1"), "cannot be parsed"),
        (TYPE, b"--Edge7\r\nX: y\r\n\r\nx\r\n--Edge7--\r\n", "Content-Disposition"),
        (TYPE, b"--Edge7\r\nContent-Disposition: form-data\r\n\r\nx\r\n--Edge7--\r\n", "no name"),
        (TYPE, form(part("a", b"\xff")), "codec"),
        (TYPE + "; charset=no-such", form(part("a", b"x")), "no-such"),
        (TYPE + "; charset=punycode", form(part("a", b"9a" * 9)), "unknown encoding: punycode"),
        (TYPE + "; charset=utf-7", form(part("a", b"+2AA-")), "surrogates not allowed"),
        (TYPE, form(part("a", b"1"), part("b", b"x", ";" * 9000)), "headers of a part have more than 8192 bytes"),
        (TYPE, b"--Edge7\r\n" + b"a:b\r\n" * 9000, "headers of a part have more than 8192 bytes"),
    ],
)
def test_malformed_forms(content_type: str, body: bytes, reason: str) -> None:
    with pytest.raises(MalformedPayload, match=reason) as caught:
        parse_payload(content_type, body)
    assert not caught.value.is_json


def test_a_part_may_have_many_headers_and_a_long_content() -> None:
    content = b"\xe9" * 100_000
    payload = parse_payload(TYPE, form(part("f", content, '; filename="f"\r\n' + "x-a: b\r\n" * 900 + "x-b: c")))
    assert payload["f"].file.read() == content


@given(st.lists(st.tuples(st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1), st.binary())))
def test_every_file_is_read(files: list[tuple[str, bytes]]) -> None:
    body = form(*(part(name, content, '; filename="f"') for name, content in files if b"--Edge7" not in content))
    expected = [pair for pair in files if b"--Edge7" not in pair[1]]
    found: Any = parse_payload(TYPE, body)
    assert [(name, each.file.read()) for name, each in found.multi_items()] == expected


@given(
    st.lists(
        st.sampled_from(
            [b"--", b"Edge7", b"\r", b"\n", b"\r\n", b'Content-Disposition: form-data; name="a"', b"x", b" "]
        )
    )
)
def test_any_form_is_parsed_or_malformed(pieces: list[bytes]) -> None:
    with suppress(MalformedPayload):
        parse_payload(TYPE, b"--Edge7\r\n" + b"".join(pieces))


_BITS = st.sampled_from([b"--", b"Edge7", b"\r", b"\n", b"\r\n", b"x", b" ", b"-", b"--Edge7", b"\r\n--Edge"])
_CONTENTS = (
    st.lists(_BITS)
    .map(lambda bits: b"x" + b"".join(bits) + b"x")
    .filter(lambda content: not re.search(rb"[\r\n]--Edge7", content))
)


@given(st.lists(_CONTENTS, min_size=1, max_size=3), st.integers(1, 64), st.sampled_from([b"", b" ", b"\t" * 9]))
def test_parts_do_not_depend_on_the_size_of_pieces(contents: list[bytes], size: int, blanks: bytes) -> None:
    parts = [part("f", content, '; filename="f"').replace(b"--Edge7", b"--Edge7" + blanks, 1) for content in contents]
    found = multipart.form_parts(TYPE, form(*parts), piece_bytes=size)
    assert [each.content for each in found] == contents


async def test_forms_are_starlettes_where_it_is_installed() -> None:
    datastructures = pytest.importorskip("starlette.datastructures")
    payload = parse_payload(TYPE, form(part("f", b"abc", '; filename="f.txt"\r\nContent-Type: text/plain')))
    assert isinstance(payload, datastructures.FormData)
    upload = payload["f"]
    assert isinstance(upload, datastructures.UploadFile)
    assert (upload.filename, upload.content_type) == ("f.txt", "text/plain")
    assert isinstance(upload.file, io.BytesIO)
    assert await upload.read() == b"abc"


@pytest.mark.parametrize("kind", [TYPE, "application/x-www-form-urlencoded"])
async def test_a_large_form_is_read_in_a_thread(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []

    def recorded(content_type: str | None, body: bytes) -> Any:
        threads.append(threading.get_ident())
        return parse_payload(content_type, body)

    monkeypatch.setattr(forms, "parse_payload", recorded)
    for count in (1, 4000):
        fields = [(f"f{number}", str(number)) for number in range(count)]
        parts = [part(name, text.encode()) for name, text in fields]
        body = form(*parts) if kind is TYPE else urlencode(fields).encode()
        request = HttpRequest("POST", "/", headers=(("content-type", kind),), body=body)
        made = await forms.http_arguments(frozenset({"payload"}), request)
        assert made["payload"].multi_items() == fields

    small, large = threads
    assert small == threading.get_ident() != large


@pytest.mark.parametrize(
    ("kind", "body", "message"),
    [
        (TYPE, form(*[part("a", b"")] * 4097), "at most 4096 parts"),
        ("multipart/form-data", b"x" * 2**20, "boundary"),
    ],
    ids=["too many parts", "large and malformed"],
)
async def test_large_forms_that_are_refused(kind: str, body: bytes, message: str) -> None:
    request = HttpRequest("POST", "/", headers=(("content-type", kind),), body=body)
    with pytest.raises(MalformedPayload, match=message):
        await forms.http_arguments(frozenset({"payload"}), request)
