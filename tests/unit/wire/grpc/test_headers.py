from __future__ import annotations

import math

import pytest
from grpclib.const import Status
from hpack import Encoder

from ovmstrio.wire.grpc.frames import ConnectionFault, ErrorCode
from ovmstrio.wire.grpc.headers import HeaderDecoder, MalformedRequest, RequestHead
from ovmstrio.wire.grpc.replies import metadata_block, trailers_block
from tests.unit.wire.grpc.bytes_client import decoded, request_headers


def head_of(*extra: tuple[str, str], limit: int = 16_384) -> RequestHead:
    """Decode a request that carries these headers besides the usual ones."""
    head = HeaderDecoder(limit).request(Encoder().encode(request_headers("/a/B", *extra)))
    assert isinstance(head, RequestHead)
    return head


def refusal_of(head: RequestHead) -> dict[str, str]:
    """Decode the block that answers a refused request."""
    assert head.refusal is not None
    return dict(decoded(head.refusal))


def test_a_request_is_understood() -> None:
    """Path, timeout, encoding and length are read; what is absent has its default."""
    plain = head_of()
    assert (plain.path, plain.timeout_seconds, plain.encoding, plain.content_length) == (
        "/a/B",
        math.inf,
        "identity",
        None,
    )
    head = head_of(("grpc-timeout", "1500m"), ("grpc-encoding", "gzip"), ("content-length", "7"))
    assert (head.timeout_seconds, head.encoding, head.content_length, head.refusal) == (1.5, "gzip", 7, None)


def test_equal_blocks_give_the_same_object_while_the_table_stays() -> None:
    """The first block fills the table; the second, which only refers to it, is decoded once."""
    encoder, decoder = Encoder(), HeaderDecoder(16_384)
    first, second, third = (encoder.encode(request_headers()) for _ in range(3))
    assert first != second == third
    opened = decoder.request(first)
    again = decoder.request(second)
    assert again is not opened
    assert decoder.request(third) is again


def test_the_same_block_means_another_request_after_the_table_changed() -> None:
    """Decoded requests are forgotten with the table that they were decoded by."""
    decoder = HeaderDecoder(16_384)
    post_http, newest_entry = b"\x83\x86", b"\xbe"
    paths = []
    for path in (b"/a", b"/b"):
        decoder.request(post_http + b"\x44\x02" + path)  # a literal :path that enters the table
        for _ in range(2):
            head = decoder.request(post_http + newest_entry)
            assert isinstance(head, RequestHead)
            paths.append(head.path)
    assert paths == ["/a", "/a", "/b", "/b"]


def test_blocks_that_change_the_table_are_never_kept() -> None:
    """Such a block is decoded each time, because decoding it is what keeps the table in step."""
    decoder = HeaderDecoder(16_384)
    block = Encoder().encode(request_headers())
    assert decoder.request(block) is not decoder.request(block)


def test_malformed_requests_are_returned() -> None:
    """A header list that breaks the rules is no fault of the connection."""
    head = HeaderDecoder(16_384).request(Encoder().encode([(":method", "POST"), (":scheme", "http"), (":path", "")]))
    assert isinstance(head, MalformedRequest)


def test_undecodable_blocks_are_faults() -> None:
    """A block that HPACK cannot read ends the connection, as the table is lost."""
    with pytest.raises(ConnectionFault) as caught:
        HeaderDecoder(16_384).request(b"\xbf\xff")
    assert caught.value.code is ErrorCode.COMPRESSION_ERROR


@pytest.mark.parametrize(
    ("pairs", "status"),
    [
        ([(":method", "GET"), (":scheme", "http"), (":path", "/")], "405"),
        ([(":method", "POST"), (":scheme", "http"), (":path", "/")], "415"),
        ([(":method", "POST"), (":scheme", "http"), (":path", "/"), ("content-type", "application/json")], "415"),
        ([(":method", "POST"), (":scheme", "http"), (":path", "/"), ("content-type", "application/grpcish")], "415"),
    ],
)
def test_requests_that_are_not_grpc_get_an_http_status(pairs: list[tuple[str, str]], status: str) -> None:
    """Wrong method and wrong content type are answered in HTTP's terms."""
    head = HeaderDecoder(16_384).request(Encoder().encode(pairs))
    assert isinstance(head, RequestHead)
    assert refusal_of(head)[":status"] == status


@pytest.mark.parametrize("content_type", ["application/grpc+proto", "application/grpc;charset=utf-8"])
def test_grpc_content_types(content_type: str) -> None:
    """Subtypes and parameters are gRPC all the same, and a missing ``te`` is tolerated."""
    pairs = [(":method", "POST"), (":scheme", "https"), (":path", "/a/B"), ("content-type", content_type)]
    head = HeaderDecoder(16_384).request(Encoder().encode(pairs))
    assert isinstance(head, RequestHead)
    assert head.refusal is None


@pytest.mark.parametrize("timeout", ["", "5", "S", "-1S", "1.5S", "123456789S", "99999999999S", "5 S", "٣S"])
def test_bad_timeouts_are_invalid_arguments(timeout: str) -> None:
    """A timeout that is not eight digits and a unit is named in the refusal."""
    answer = refusal_of(head_of(("grpc-timeout", timeout)))
    assert answer["grpc-status"] == str(Status.INVALID_ARGUMENT.value)
    assert "grpc-timeout" in answer["grpc-message"]


def test_large_header_lists_are_refused_by_name() -> None:
    """A list above the limit is RESOURCE_EXHAUSTED with both sizes; far above it the connection ends."""
    answer = refusal_of(head_of(("x-long", "v" * 2_000), limit=1_000))
    assert answer["grpc-status"] == str(Status.RESOURCE_EXHAUSTED.value)
    assert "limit of 1000 bytes (max_header_list_bytes)" in answer["grpc-message"]
    with pytest.raises(ConnectionFault):
        head_of(("x-long", "v" * 5_000), limit=1_000)


def test_replies_read_back() -> None:
    """Blocks decode to what they were made of, long values and binary details included."""
    long_value = "v" * 40_000
    block = metadata_block([("x-short", "1"), ("x-long", long_value)])
    assert decoded(block) == [("x-short", "1"), ("x-long", long_value)]
    trailers = dict(decoded(trailers_block(Status.ABORTED, "50% ü", b"\xff\xfe")))
    assert trailers == {"grpc-status": "10", "grpc-message": "50%25 %C3%BC", "grpc-status-details-bin": "//4"}


@pytest.mark.parametrize("text", ["x" * 10_000, "é" * 5_000, "ab" + "é" * 5_000, "a" + "é" * 5_000, "\ud800" * 9_000])
def test_endless_messages_are_cut(text: str) -> None:
    """A message too long for a client's metadata limit is cut, and never within an escape."""
    message = dict(decoded(trailers_block(Status.INTERNAL, text)))["grpc-message"]
    assert 4_000 < len(message) <= 4_096
    assert len(message.rsplit("%", 1)[-1]) >= 2
