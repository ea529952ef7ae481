"""Recorded messages that once made the server fail."""

from __future__ import annotations

from typing import Final

from tests.fuzz.grpc_calls import INFER
from tests.fuzz.messages import Message, Transport

_JSON: Final = (("content-type", "application/json"),)
_STREAM: Final = INFER.replace("ModelInfer", "ModelStreamInfer")
_STATISTICS: Final = INFER.replace("ModelInfer", "ModelStatistics")
_ASKS_FOR_A_SEQUENCE: Final = (
    b"\n\x05model*\x0d\n\x01b\x12\x04FP32\x1a\x02\x01\n:(" + b"\0" * 40 + b"2\r\n\x0bsequence_id"
)  # fmt: skip
_BEGINS_WELL: Final = b"\0\0\0\0\x1e\n\x05graph*\x0e\n\x02in\x12\x05BYTES\x1a\x01\x03:\x05abcde"


def _call(path: str, message: bytes) -> Message:
    return Message(-1, "grpc", Transport.GRPC, b"\0" + len(message).to_bytes(4, "big") + message, path)


CASES: Final = {
    "an output that is a sequence's id, of a model without sequences": _call(INFER, _ASKS_FOR_A_SEQUENCE),
    "a version that is no number, without a name": _call(_STATISTICS, b"\x12\x03<a>"),
    "garbage within a stream": Message(-1, "grpc", Transport.GRPC, _BEGINS_WELL + b"\0\0\0\0\x02\x0a\xff", _STREAM),
    "more than may be received, within a stream": Message(
        -1, "grpc", Transport.GRPC, _BEGINS_WELL + b"\0\xff\xff\xff\xfe", _STREAM
    ),
    "lists deeper than arrays can be": Message(
        -1, "rest", Transport.HTTP, b'{"in":' + b"[" * 200 + b"1" + b"]" * 200 + b"}",
        "POST /v2/models/graph/generate_stream", _JSON,
    ),
    "half of a surrogate pair in a text for a graph": Message(
        -1, "rest", Transport.HTTP, b'{"in": "\xed\xa0\x80", "a": NaN}', "POST /v2/models/graph/generate_stream", _JSON
    ),
    "a tensor of no strings": Message(
        -1, "rest", Transport.HTTP, b'{"inputs":[],"a":"b"}', "POST /v1/models/strings:predict", _JSON
    ),
    "keys without values": Message(
        -1, "rest", Transport.HTTP, b'{"key":["x","y"],"value":[]}', "POST /ops/prediction", _JSON
    ),
    "values too deep to be written": Message(
        -1, "rest", Transport.HTTP, b'{"value":[' + b"[" * 300 + b"]" * 300 + b"]}", "POST /ops/prediction", _JSON
    ),
    "more digits than are read": Message(
        -1, "rest", Transport.HTTP, b'{"logid":"' + b"9" * 5000 + b'"}', "POST /ops/prediction", _JSON
    ),
    "a body longer than may be, and a request behind it": Message(
        -1, "raw http", Transport.RAW_HTTP,
        b"GET /v1/models/model HTTP/1.1\r\nContent-Length: 99999999999999999999\r\nhost: a\r\n\r\n"
        b"POST /o HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n{}",
    ),
    "a host that cannot be": Message(
        -1, "raw http", Transport.RAW_HTTP, b"DELETE /handler HTTP/1.1\r\nhost: 127..0.1\r\nUpgrade: h2c\r\n\r\n"
    ),
}  # fmt: skip
