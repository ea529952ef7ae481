from __future__ import annotations

import math

import pytest
from grpclib.const import Status
from hpack import Encoder

from ovmstrio.wire.grpc.frames import ConnectionFault
from ovmstrio.wire.grpc.headers import HeaderDecoder, RequestHead
from ovmstrio.wire.grpc.replies import metadata_block, trailers_block
from tests.unit.wire.grpc.bytes_client import decoded, request_headers


def head_of(*extra: tuple[str, str], limit: int = 16_384) -> RequestHead:
    head = HeaderDecoder(limit).request(Encoder().encode(request_headers("/a/B", *extra)))
    assert isinstance(head, RequestHead)
    return head


def refusal_of(head: RequestHead) -> dict[str, str]:
    assert head.refusal is not None
    return dict(decoded(head.refusal))


def test_path_timeout_encoding_and_length_are_read() -> None:
    plain = head_of()
    assert (plain.path, plain.timeout_seconds, plain.encoding, plain.content_length) == (
        "/a/B",
        math.inf,
        "identity",
        None,
    )
    head = head_of(("grpc-timeout", "1500m"), ("grpc-encoding", "gzip"), ("content-length", "7"))
    assert (head.timeout_seconds, head.encoding, head.content_length, head.refusal) == (1.5, "gzip", 7, None)


def test_equal_blocks_are_decoded_once_while_the_table_does_not_change() -> None:
    encoder, decoder = Encoder(), HeaderDecoder(16_384)
    first, second, third = (encoder.encode(request_headers()) for _ in range(3))
    assert first != second == third
    opened = decoder.request(first)
    again = decoder.request(second)
    assert again is not opened
    assert decoder.request(third) is again


def test_decoded_blocks_are_forgotten_when_the_table_changes() -> None:
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


def test_blocks_that_change_the_table_are_decoded_each_time() -> None:
    decoder = HeaderDecoder(16_384)
    block = Encoder().encode(request_headers())
    assert decoder.request(block) is not decoder.request(block)


@pytest.mark.parametrize("content_type", ["application/grpc+proto", "application/grpc;charset=utf-8"])
def test_subtypes_and_parameters_of_the_grpc_content_type_are_accepted(content_type: str) -> None:
    pairs = [(":method", "POST"), (":scheme", "https"), (":path", "/a/B"), ("content-type", content_type)]
    head = HeaderDecoder(16_384).request(Encoder().encode(pairs))
    assert isinstance(head, RequestHead)
    assert head.refusal is None


@pytest.mark.parametrize("timeout", ["", "5", "S", "-1S", "1.5S", "123456789S", "99999999999S", "5 S", "٣S"])
def test_bad_timeouts_are_invalid_arguments(timeout: str) -> None:
    answer = refusal_of(head_of(("grpc-timeout", timeout)))
    assert answer["grpc-status"] == str(Status.INVALID_ARGUMENT.value)
    assert "grpc-timeout" in answer["grpc-message"]


def test_header_lists_above_the_limit_are_refused_with_both_sizes() -> None:
    answer = refusal_of(head_of(("x-long", "v" * 2_000), limit=1_000))
    assert answer["grpc-status"] == str(Status.RESOURCE_EXHAUSTED.value)
    assert "limit of 1000 bytes (max_header_list_bytes)" in answer["grpc-message"]
    with pytest.raises(ConnectionFault):
        head_of(("x-long", "v" * 5_000), limit=1_000)


def test_metadata_and_trailers_decode_to_their_values() -> None:
    long_value = "v" * 40_000
    block = metadata_block([("x-short", "1"), ("x-long", long_value)])
    assert decoded(block) == [("x-short", "1"), ("x-long", long_value)]
    trailers = dict(decoded(trailers_block(Status.ABORTED, "50% ü", b"\xff\xfe")))
    assert trailers == {"grpc-status": "10", "grpc-message": "50%25 %C3%BC", "grpc-status-details-bin": "//4"}


@pytest.mark.parametrize("text", ["x" * 10_000, "é" * 5_000, "ab" + "é" * 5_000, "a" + "é" * 5_000, "\ud800" * 9_000])
def test_long_status_messages_are_cut_outside_of_escapes(text: str) -> None:
    message = dict(decoded(trailers_block(Status.INTERNAL, text)))["grpc-message"]
    assert 4_000 < len(message) <= 4_096
    assert len(message.rsplit("%", 1)[-1]) >= 2
