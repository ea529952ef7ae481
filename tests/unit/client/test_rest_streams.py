from __future__ import annotations

import numpy as np
import pytest

from ovmstrio.client import open_client
from ovmstrio.client.addresses import parse_address
from ovmstrio.client.api import StreamRequest
from ovmstrio.client.calls import RestCalls
from ovmstrio.client.links import Answer
from ovmstrio.core import errors


@pytest.mark.parametrize(
    ("requests", "text"),
    [
        ([StreamRequest({}), StreamRequest({})], "has one request, got 2"),
        ([], "has one request, got 0"),
        ([StreamRequest({"x": b"\xff"})], "input x: expected UTF-8 text"),
        ([StreamRequest({"x": np.zeros(1, np.float32)})], "input x: over REST, float32 would arrive as another type"),
        ([StreamRequest({}, 2**70)], "cannot be written as JSON"),
        ([StreamRequest({"x": [[1], [2, 3]]})], "input 'x': setting an array element with a sequence"),
    ],
)
def test_rest_refuses_streams_that_json_cannot_represent(requests: list[StreamRequest], text: str) -> None:
    with open_client("127.0.0.1:9", rest=True) as client, pytest.raises(errors.InvalidRequest, match=text):
        list(client.stream("graph", requests))


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_events_are_parsed_from_chunks_of_any_size(size: int) -> None:
    text = '{"out":"a\u2028b\x85c"}'
    stream = f': hello\n\nid: 1\ndata:{text}\n\nevent: error\r\ndata: {{"error":\r\ndata: "x"}}\r\n\r\ndata: {text}\n\n'
    raw = stream.encode()
    chunks = (raw[start : start + size] for start in range(0, len(raw), size))
    read = RestCalls(parse_address("http://127.0.0.1:9"), {}).reply_reader()
    texts = [each.error or each.outputs[0].data for chunk in chunks for each in read(chunk)]
    assert texts == ["a\u2028b\x85c", "x", "a\u2028b\x85c"]


def test_an_answer_without_a_body_is_a_success_of_a_handler_but_not_of_a_pipeline() -> None:
    calls = RestCalls(parse_address("http://127.0.0.1:9"), {})
    answer = Answer(204, {})
    assert calls.error(answer) is None
    assert calls.post("handler", b"{}", "application/json").read(answer).body == b""
    inference = calls.infer("pipeline", {}, "", None, None, (), "")
    with pytest.raises(errors.NothingToGather, match="nothing to split"):
        inference.read(answer)
