"""Forms: fields and files."""

from __future__ import annotations

import io
import re
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any
from urllib.parse import urlencode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ovmstrio.core import multipart
from ovmstrio.core.errors import MalformedPayload
from ovmstrio.core.http import HttpRequest
from ovmstrio.runtimes.handlers import http as handlers_http
from ovmstrio.runtimes.handlers.http import forms
from ovmstrio.runtimes.handlers.http.forms import parse_payload
from ovmstrio.runtimes.handlers.http.values import FormData, UploadFile

TYPE = "multipart/form-data; boundary=Edge7"


@pytest.fixture
def own_parse(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, bytes], Any]:
    """Return the parser as a server without Starlette has it."""
    monkeypatch.setitem(sys.modules, "starlette.datastructures", None)
    # The import below replaces both.
    monkeypatch.setattr(handlers_http, "forms", forms)
    monkeypatch.delitem(sys.modules, forms.__name__)
    parse: Callable[[str, bytes], Any] = import_module(forms.__name__).parse_payload
    return parse


def part(name: str, content: bytes, rest: str = "") -> bytes:
    """Write one part of a form."""
    head = f'--Edge7\r\nContent-Disposition: form-data; name="{name}"{rest}\r\n\r\n'
    return head.encode() + content + b"\r\n"


def form(*parts: bytes) -> bytes:
    """Write a form."""
    return b"".join(parts) + b"--Edge7--\r\n"


async def test_files_and_fields_of_a_form(own_parse: Callable[[str, bytes], Any]) -> None:
    """Files have their name, content and type, for plain handlers and for async ones; fields are text."""
    image = part("image", b"\x89PNG\r\n\x00", '; filename="c\u00e4t.png"\r\nContent-Type: image/png')
    payload = own_parse(TYPE, form(part("label", "hübsch".encode()), image))
    assert isinstance(payload, FormData)
    assert payload["label"] == "hübsch"
    upload = payload["image"]
    assert isinstance(upload, UploadFile)
    assert (upload.filename, upload.content_type, upload.size) == ("cät.png", "image/png", 7)
    assert upload.file.read() == b"\x89PNG\r\n\x00"
    await upload.seek(1)
    assert await upload.read(3) == b"PNG"
    assert await upload.read() == b"\r\n\x00"
    assert "cät.png" in repr(payload)
    await payload.close()
    assert upload.file.closed


async def test_the_content_of_an_upload_can_be_changed(own_parse: Callable[[str, bytes], Any]) -> None:
    """As with Starlette's; a file without a type has none."""
    upload = own_parse(TYPE, form(part("f", b"abc", '; filename="f"')))["f"]
    await upload.write(b"x")
    await upload.seek(0)
    assert await upload.read() == b"xbc"
    assert upload.content_type is None


def test_keys_may_repeat_in_both_kinds_of_forms(own_parse: Callable[[str, bytes], Any]) -> None:
    """The last value counts, and all are there in their order."""
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
def test_a_broken_form_is_the_callers_fault(content_type: str, body: bytes, reason: str) -> None:
    """And says what is wrong with it."""
    with pytest.raises(MalformedPayload, match=reason) as caught:
        parse_payload(content_type, body)
    assert not caught.value.is_json


def test_a_part_may_have_many_headers_and_a_long_content() -> None:
    """As long as they are no more than anybody writes."""
    content = b"\xe9" * 100_000
    payload = parse_payload(TYPE, form(part("f", content, '; filename="f"\r\n' + "x-a: b\r\n" * 900 + "x-b: c")))
    assert payload["f"].file.read() == content


@given(st.lists(st.tuples(st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1), st.binary())))
def test_every_file_comes_through(files: list[tuple[str, bytes]]) -> None:
    """Whatever its bytes are, in the order of the form."""
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
def test_no_form_does_more_than_fail(pieces: list[bytes]) -> None:
    """Whatever is put where, it is parsed or it is malformed."""
    with suppress(MalformedPayload):
        parse_payload(TYPE, b"--Edge7\r\n" + b"".join(pieces))


_BITS = st.sampled_from([b"--", b"Edge7", b"\r", b"\n", b"\r\n", b"x", b" ", b"-", b"--Edge7", b"\r\n--Edge"])
_CONTENTS = (
    st.lists(_BITS)
    .map(lambda bits: b"x" + b"".join(bits) + b"x")
    .filter(lambda content: not re.search(rb"[\r\n]--Edge7", content))
)


@given(st.lists(_CONTENTS, min_size=1, max_size=3), st.integers(1, 64), st.sampled_from([b"", b" ", b"\t" * 9]))
def test_a_form_is_the_same_however_it_is_cut_to_be_looked_through(
    contents: list[bytes], size: int, blanks: bytes
) -> None:
    """In the midst of boundaries and of what looks like them, behind which there may be blanks."""
    parts = [part("f", content, '; filename="f"').replace(b"--Edge7", b"--Edge7" + blanks, 1) for content in contents]
    found = multipart.form_parts(TYPE, form(*parts), piece_bytes=size)
    assert [each.content for each in found] == contents


async def test_forms_are_starlettes_where_it_is_installed() -> None:
    """So that handlers may ask for its classes."""
    datastructures = pytest.importorskip("starlette.datastructures")
    payload = parse_payload(TYPE, form(part("f", b"abc", '; filename="f.txt"\r\nContent-Type: text/plain')))
    assert isinstance(payload, datastructures.FormData)
    upload = payload["f"]
    assert isinstance(upload, datastructures.UploadFile)
    assert (upload.filename, upload.content_type) == ("f.txt", "text/plain")
    assert isinstance(upload.file, io.BytesIO)
    assert await upload.read() == b"abc"


@pytest.mark.parametrize("kind", [TYPE, "application/x-www-form-urlencoded"])
async def test_a_large_form_is_read_beside_the_event_loop(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small one is read at once; neither its size nor its fields change what is found in it."""
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


async def test_a_form_of_more_parts_than_may_be_is_refused() -> None:
    """Each part takes microseconds, however small it is."""
    request = HttpRequest("POST", "/", headers=(("content-type", TYPE),), body=form(*[part("a", b"")] * 4097))
    with pytest.raises(MalformedPayload, match="more than 4096 parts"):
        await forms.http_arguments(frozenset({"payload"}), request)


async def test_a_large_form_that_is_none_is_refused_like_a_small_one() -> None:
    """The thread's error is the caller's."""
    request = HttpRequest("POST", "/", headers=(("content-type", "multipart/form-data"),), body=b"x" * 2**20)
    with pytest.raises(MalformedPayload, match="boundary"):
        await forms.http_arguments(frozenset({"payload"}), request)
