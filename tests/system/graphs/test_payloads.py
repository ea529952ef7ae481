from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing

from ovmstrio.core.errors import DeadlineExceeded, GraphFailure, InvalidRequest, NotSupported
from ovmstrio.core.http_messages import HttpRequest
from ovmstrio.core.payloads import RawDocument
from ovmstrio.graphs.graph_file import parse_graph_text
from ovmstrio.graphs.validate import validate_graph
from ovmstrio.isolation.isolated_code import Isolation
from tests.support.callers import LOCAL
from tests.support.graphs import LOOPBACK, ask, graph_text, handler, loaded, python_node

if TYPE_CHECKING:
    from pathlib import Path

    from ovmstrio.graphs.servable import GraphServable

INPUTS, OUTPUTS = ["HTTP_REQUEST_PAYLOAD:payload"], ["HTTP_RESPONSE_PAYLOAD:answer"]
ONCE = graph_text(python_node("handler.py", INPUTS, OUTPUTS), inputs=INPUTS, outputs=OUTPUTS)
STREAMED = graph_text(python_node("handler.py", INPUTS, OUTPUTS, more=LOOPBACK), inputs=INPUTS, outputs=OUTPUTS)

PLACES = pytest.mark.parametrize("isolation", [None, Isolation()], ids=["threads", "process"])

REPORT = handler("""
payload, = inputs
head = [payload.method, payload.uri, dict(payload.headers), payload.client]
tensor = [payload.name, payload.shape, payload.datatype, payload.body == bytes(payload)]
return [{"reported": [*head, payload.json, bytes(payload).decode()], "tensor": tensor}]
""")

REQUEST = HttpRequest(
    "POST",
    "/v3/summary",
    "long=1",
    (("content-type", "application/json"), ("x-tag", "a"), ("x-tag", "b")),
    b'{"text": [1, "\xc3\xbc"]}',
    LOCAL,
    "/v3/summary?long=1",
)


async def _documents(graph: GraphServable, request: HttpRequest = REQUEST) -> list[RawDocument]:
    found = []
    async with graph.open_payload(request, math.inf) as documents:
        while (document := await documents.receive()) is not None:
            found.append(document)
    return found


@PLACES
async def test_node_gets_the_request(tmp_path: Path, isolation: Isolation | None) -> None:
    async with loaded(tmp_path / "g", ONCE, isolation=isolation, handler=REPORT) as graph:
        assert graph.accepts_payloads
        (document,) = await _documents(graph)
        (empty,) = await _documents(graph, HttpRequest("GET", "/v3/x", target="/v3/x"))
    assert document.media_type == "application/json"
    assert json.loads(document.data) == {
        "reported": [
            "POST",
            "/v3/summary?long=1",
            {"content-type": "application/json", "x-tag": "a, b"},
            "127.0.0.1",
            {"text": [1, "\N{LATIN SMALL LETTER U WITH DIAERESIS}"]},
            REQUEST.body.decode(),
        ],
        "tensor": ["payload", [len(REQUEST.body)], "application/json", True],
    }
    assert json.loads(empty.data)["reported"] == ["GET", "/v3/x", {}, "unknown", None, ""]


@PLACES
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ('{"a": [1, "\\u00fc"]}', RawDocument(b'{"a": [1, "\\u00fc"]}', "application/json")),
        ('"text"', RawDocument(b"text", "text/plain; charset=utf-8")),
        ('b"\\0bytes"', RawDocument(b"\0bytes", "application/octet-stream")),
        ('[{"a": 1}]', RawDocument(b'{"a": 1}', "application/json")),
        ('[Tensor("answer", b"<p>", datatype="text/html")]', RawDocument(b"<p>", "text/html")),
        ('[Tensor("answer", b"raw")]', RawDocument(b"raw", "application/octet-stream")),
    ],
    ids=["dict", "str", "bytes", "list", "tensor of a type", "tensor"],
)
async def test_results_have_a_media_type(
    tmp_path: Path, value: str, expected: RawDocument, isolation: Isolation | None
) -> None:
    source = f"class OvmsPythonModel:\n    def execute(self, inputs):\n        KEYWORD {value}\n"
    for text, keyword in ((ONCE, "return"), (STREAMED, "yield")):
        handler = source.replace("KEYWORD", keyword)
        async with loaded(tmp_path / keyword, text, isolation=isolation, handler=handler) as graph:
            assert await _documents(graph) == [expected]


async def test_generator_is_closed_when_its_client_leaves(tmp_path: Path) -> None:
    source = """
    import pathlib
    class OvmsPythonModel:
        def initialize(self, kwargs):
            self.log = pathlib.Path(kwargs["base_path"]) / "closed"
        def execute(self, inputs):
            try:
                number = 0
                while True:
                    yield {"number": number}
                    number += 1
            finally:
                self.log.write_text("closed")
    """
    async with loaded(tmp_path / "g", STREAMED, handler=source) as graph:
        async with graph.open_payload(REQUEST, math.inf) as documents:
            reported = [await documents.receive() for _ in range(3)]
        assert (tmp_path / "g" / "closed").read_text() == "closed"
    assert [json.loads(each.data)["number"] for each in reported if each] == [0, 1, 2]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("{1: object()}", "a dict cannot be written as JSON: Object of type object"),
        ('{"a": float("nan")}', "a dict cannot be written as JSON: "),
        ("7", "Unexpected Python object type. Expected: list or generator. Received: int"),
        ("1 / 0", r"ZeroDivisionError: division by zero \(.*handler.py:4\)"),
    ],
)
async def test_invalid_results_fail_the_request(tmp_path: Path, value: str, words: str) -> None:
    source = f"class OvmsPythonModel:\n    def execute(self, inputs):\n        return {value}\n"
    async with loaded(tmp_path / "g", ONCE, handler=source) as graph:
        with pytest.raises(GraphFailure, match=words):
            await _documents(graph)


async def test_graphs_take_either_payloads_or_tensors(tmp_path: Path) -> None:
    async with loaded(tmp_path / "g", ONCE, handler=REPORT) as graph:
        with pytest.raises(InvalidRequest, match="payload is unexpected"):
            await graph.infer(ask({"payload": b"x"}))
    plain = graph_text(python_node("handler.py"))
    source = 'class OvmsPythonModel:\n    def execute(self, inputs):\n        return {"a": 1}\n'
    async with loaded(tmp_path / "h", plain, handler=source) as graph:
        assert not graph.accepts_payloads
        with pytest.raises(GraphFailure, match="Received: dict"):
            await graph.infer(ask({"in": b"x"}))
        with pytest.raises(NotSupported, match='expected input_stream: "HTTP_REQUEST_PAYLOAD:name"'):
            await _documents(graph)


async def test_payload_is_converted_to_tensors_and_back(tmp_path: Path) -> None:
    first = python_node("first.py", ["REQUEST:payload"], ["TEXT:text"], name="first")
    last = python_node("last.py", ["TEXT:text"], OUTPUTS, name="last")
    text = graph_text(first, last, inputs=INPUTS, outputs=OUTPUTS)
    sources: dict[str, Any] = {
        "first": """
        class OvmsPythonModel:
            def execute(self, inputs):
                return [Tensor("text", str(inputs[0].json["text"]).encode())]
        """,
        "last": """
        class OvmsPythonModel:
            def execute(self, inputs):
                return {"length": len(bytes(inputs[0]))}
        """,
    }
    async with loaded(tmp_path / "g", text, **sources) as graph:
        assert await _documents(graph) == [RawDocument(b'{"length": 9}', "application/json")]
    assert [str(each) for each in validate_graph(tmp_path / "g" / "graph.pbtxt").problems] == []


@pytest.mark.parametrize(
    ("inputs", "outputs", "words"),
    [
        (INPUTS, ["OVMS_PY_TENSOR:answer"], "has one output, tagged HTTP_RESPONSE_PAYLOAD"),
        (["OVMS_PY_TENSOR:payload"], OUTPUTS, "has one input, tagged HTTP_REQUEST_PAYLOAD"),
        ([*INPUTS, "OVMS_PY_TENSOR:more"], OUTPUTS, "has one input, tagged HTTP_REQUEST_PAYLOAD"),
    ],
)
def test_payload_graph_has_one_input_and_one_output(
    tmp_path: Path, inputs: list[str], outputs: list[str], words: str
) -> None:
    (tmp_path / "handler.py").write_text(REPORT)
    ports = [f"P{number}:{each.rpartition(':')[2]}" for number, each in enumerate(inputs)]
    path = tmp_path / "graph.pbtxt"
    path.write_text(graph_text(python_node("handler.py", ports, ["OUT:answer"]), inputs=inputs, outputs=outputs))
    assert parse_graph_text(path.read_text(), "graph.pbtxt").config is not None
    (problem,) = validate_graph(path).errors
    assert words in problem.message
    assert problem.suggestion.startswith("use ")


async def test_deadline_ends_a_payload_request(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    source = handler("await trio.sleep_forever()", prefix="async ", head="import trio")
    async with loaded(tmp_path / "g", ONCE, handler=source) as graph:
        with pytest.raises(DeadlineExceeded, match="deadline exceeded while the graph ran"):
            async with graph.open_payload(REQUEST, trio.current_time() + 5) as documents:
                await documents.receive()
    assert autojump_clock.autojump_threshold == 0


async def test_headers_are_read_only_and_json_is_parsed_once(tmp_path: Path) -> None:
    source = handler("""
    payload, = inputs
    try:
        payload.headers["x-tag"] = "c"
    except TypeError as error:
        refusal = str(error)
    return [{"reported": [refusal, payload.json is payload.json, payload.headers["x-tag"]]}]
    """)
    async with loaded(tmp_path / "g", ONCE, handler=source) as graph:
        (document,) = await _documents(graph)
    refusal, is_parsed_once, tag = json.loads(document.data)["reported"]
    assert "does not support item assignment" in refusal
    assert (is_parsed_once, tag) == (True, "a, b")
