from __future__ import annotations

from hpack import Decoder, Encoder
from hypothesis import given, settings
from hypothesis import strategies as st

from ovmstrio.transport.grpc.frames import ConnectionFault
from ovmstrio.transport.grpc.headers import HeaderDecoder, encode_header
from tests.support.examples import examples

NAMES = st.sampled_from([b":status", b"content-type", b"x-request-id", b"grpc-status", b"grpc-message", b"date"])
HEADERS = st.lists(st.tuples(NAMES, st.binary(max_size=300).filter(lambda value: b"\n" not in value)), max_size=6)
BLOCKS = st.lists(st.tuples(HEADERS, st.sampled_from(["table", "huffman", "literals"])), max_size=8)


@settings(max_examples=examples(200))
@given(BLOCKS)
def test_blocks_decode_as_in_hpack_whatever_came_before(blocks: list[tuple[list[tuple[bytes, bytes]], str]]) -> None:
    encoder, expected, decoder = Encoder(), Decoder(), HeaderDecoder(64 * 1024)
    for headers, form in blocks:
        if form == "literals":
            block = b"".join(encode_header(name, value) for name, value in headers)
        else:
            block = bytes(encoder.encode(headers, huffman=form == "huffman"))
        for _ in range(2 if form == "literals" else 1):
            found = decoder.response(block)
            assert [tuple(each) for each in found] == [tuple(each) for each in expected.decode(block, raw=True)]


def test_truncated_blocks_are_no_headers() -> None:
    block = encode_header(b"x-request-id", b"abc") + encode_header(b"grpc-status", b"0")
    decoder = HeaderDecoder(64 * 1024)
    for end in range(len(block)):
        try:
            found = dict(decoder.response(block[:end]))
        except ConnectionFault:
            continue
        assert found in ({}, {b"x-request-id": b"abc"})
