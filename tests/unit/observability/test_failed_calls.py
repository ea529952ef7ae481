"""What is kept of calls that failed."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator

import pytest

from ovmstrio.core.events import CallEvent, Door, WireRequest, kept_body_bytes
from ovmstrio.observability.failed_calls import FailedCalls
from tests.support.peers import LOCAL

DOOR = Door("KServe", "REST", "infer")
SENT = json.dumps({"password": "correct horse", "text": "mine " * 900}).encode()


@pytest.fixture(autouse=True)
def kept() -> Iterator[None]:
    """Have a thousand bytes of bodies be kept."""
    token = kept_body_bytes.set(1000)
    yield
    kept_body_bytes.reset(token)


def _failed(body: bytes, *headers: tuple[str, str]) -> tuple[str, int]:
    failures, request = FailedCalls(), WireRequest("HTTP", "POST", "/", headers, LOCAL)
    request.body, request.received = body[:1000], len(body)
    failures.call_failed(CallEvent("m", "1", "model", DOOR, "infer", code="InvalidRequest", request=request))
    (kept,) = failures.since(0)
    return kept.body, kept.body_bytes


@pytest.mark.parametrize(("encoding", "pack"), [("gzip", gzip.compress), ("Deflate", zlib.compress)])
def test_what_came_compressed_is_shown_as_it_was_and_without_secrets(encoding: str, pack: type[bytes]) -> None:
    """As bytes that are escaped whoever looks could unpack it."""
    packed = pack(SENT)
    body, size = _failed(packed, ("content-encoding", encoding))
    assert body.startswith('{"password": "***", "text": "mine mine')
    assert (len(body) <= 1000, size) == (True, len(packed))


def test_what_cannot_be_unpacked_is_not_shown() -> None:
    """Its size is."""
    body, size = _failed(SENT, ("content-encoding", "br"))
    assert (body, size) == ("(compressed, and cannot be read)", len(SENT))


def test_bytes_that_are_escaped_take_no_more_room_than_was_asked_for() -> None:
    """Each of them would take four characters."""
    body, size = _failed(b"\xff" * 5000)
    assert (body, size) == (r"\xff" * 250, 5000)
