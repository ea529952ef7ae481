"""Graphs that take requests over HTTP whole: what their nodes are given, and what becomes of what they answer."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing

from ovmstrio.core.errors import DeadlineExceeded, GraphFailure, InvalidRequest, NotSupported
from ovmstrio.core.http import HttpRequest
from ovmstrio.core.payloads import PayloadDocument
from ovmstrio.runtimes.graphs.config.graph_file import examine_text
from ovmstrio.runtimes.graphs.examining import examine_graph
from ovmstrio.work.isolation.isolated_code import Isolation
from tests.support.graphs import LOOPBACK, ask, graph_text, loaded, python_node
from tests.support.peers import LOCAL

if TYPE_CHECKING:
    from pathlib import Path

    from ovmstrio.runtimes.graphs.graph_servable import GraphServable

INPUTS, OUTPUTS = ["HTTP_REQUEST_PAYLOAD:asked"], ["HTTP_RESPONSE_PAYLOAD:answer"]
ONCE = graph_text(python_node("handler.py", INPUTS, OUTPUTS), inputs=INPUTS, outputs=OUTPUTS)
STREAMED = graph_text(python_node("handler.py", INPUTS, OUTPUTS, more=LOOPBACK), inputs=INPUTS, outputs=OUTPUTS)

TOLD = """
class OvmsPythonModel:
    def execute(self, inputs):
        asked, = inputs
        told = [asked.method, asked.uri, dict(asked.headers), asked.client, asked.json, bytes(asked).decode()]
        return [{"told": told, "tensor": [asked.name, asked.shape, asked.datatype, asked.body == bytes(asked)]}]
"""

ASKED = HttpRequest(
    "POST",
    "/v3/summary",
    "long=1",
    (("content-type", "application/json"), ("x-tag", "a"), ("x-tag", "b")),
    b'{"text": [1, "\xc3\xbc"]}',
    LOCAL,
    "/v3/summary?long=1",
)


async def _documents(graph: GraphServable, request: HttpRequest = ASKED) -> list[PayloadDocument]:
    found = []
    async with graph.open_payload(request, math.inf) as documents:
        while (document := await documents.receive()) is not None:
            found.append(document)
    return found


@pytest.mark.parametrize("isolated", [False, True], ids=["threads", "process"])
async def test_a_node_is_given_the_whole_request(tmp_path: Path, *, isolated: bool) -> None:
    """As a tensor it is the body."""
    isolation = Isolation() if isolated else None
    async with loaded(tmp_path / "g", ONCE, isolation=isolation, handler=TOLD) as graph:
        assert graph.takes_payloads
        (document,) = await _documents(graph)
        (empty,) = await _documents(graph, HttpRequest("GET", "/v3/x", target="/v3/x"))
    assert document.media_type == "application/json"
    assert json.loads(document.data) == {
        "told": [
            "POST",
            "/v3/summary?long=1",
            {"content-type": "application/json", "x-tag": "a, b"},
            "127.0.0.1",
            {"text": [1, "\N{LATIN SMALL LETTER U WITH DIAERESIS}"]},
            ASKED.body.decode(),
        ],
        "tensor": ["asked", [len(ASKED.body)], "application/json", True],
    }
    assert json.loads(empty.data)["told"] == ["GET", "/v3/x", {}, "unknown", None, ""]


@pytest.mark.parametrize("isolated", [False, True], ids=["threads", "process"])
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ('{"a": [1, "\\u00fc"]}', PayloadDocument(b'{"a": [1, "\\u00fc"]}', "application/json")),
        ('"text"', PayloadDocument(b"text", "text/plain; charset=utf-8")),
        ('b"\\0bytes"', PayloadDocument(b"\0bytes", "application/octet-stream")),
        ('[{"a": 1}]', PayloadDocument(b'{"a": 1}', "application/json")),
        ('[Tensor("answer", b"<p>", datatype="text/html")]', PayloadDocument(b"<p>", "text/html")),
        ('[Tensor("answer", b"raw")]', PayloadDocument(b"raw", "application/octet-stream")),
    ],
    ids=["dict", "str", "bytes", "list", "tensor of a type", "tensor"],
)
async def test_what_a_node_gives_has_a_type_of_content(
    tmp_path: Path, value: str, expected: PayloadDocument, *, isolated: bool
) -> None:
    """Whether it returns or yields it."""
    isolation = Isolation() if isolated else None
    source = f"class OvmsPythonModel:\n    def execute(self, inputs):\n        KEYWORD {value}\n"
    for text, keyword in ((ONCE, "return"), (STREAMED, "yield")):
        handler = source.replace("KEYWORD", keyword)
        async with loaded(tmp_path / keyword, text, isolation=isolation, handler=handler) as graph:
            assert await _documents(graph) == [expected]


async def test_a_generator_answers_piece_by_piece_and_is_closed_when_nobody_waits(tmp_path: Path) -> None:
    """Leaving the block closes it."""
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
        async with graph.open_payload(ASKED, math.inf) as documents:
            told = [await documents.receive() for _ in range(3)]
        assert (tmp_path / "g" / "closed").read_text() == "closed"
    assert [json.loads(each.data)["number"] for each in told if each] == [0, 1, 2]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("{1: object()}", "a dict cannot be written as JSON: Object of type object"),
        ('{"a": float("nan")}', "a dict cannot be written as JSON: "),
        ("7", "Unexpected Python object type. Expected: list or generator. Received: int"),
        ("1 / 0", r"ZeroDivisionError: division by zero \(.*handler.py:4\)"),
    ],
)
async def test_what_is_no_document_fails_the_request(tmp_path: Path, value: str, words: str) -> None:
    """As other errors of user code do."""
    source = f"class OvmsPythonModel:\n    def execute(self, inputs):\n        return {value}\n"
    async with loaded(tmp_path / "g", ONCE, handler=source) as graph:
        with pytest.raises(GraphFailure, match=words):
            await _documents(graph)


async def test_tensors_do_not_get_into_such_a_graph_and_documents_not_out_of_others(tmp_path: Path) -> None:
    """What OVMS says of a node that returns no list is said as before."""
    async with loaded(tmp_path / "g", ONCE, handler=TOLD) as graph:
        with pytest.raises(InvalidRequest, match="asked is unexpected"):
            await graph.infer(ask({"asked": b"x"}))
    plain = graph_text(python_node("handler.py"))
    source = 'class OvmsPythonModel:\n    def execute(self, inputs):\n        return {"a": 1}\n'
    async with loaded(tmp_path / "h", plain, handler=source) as graph:
        assert not graph.takes_payloads
        with pytest.raises(GraphFailure, match="Received: dict"):
            await graph.infer(ask({"in": b"x"}))
        with pytest.raises(NotSupported, match='expected input_stream: "HTTP_REQUEST_PAYLOAD:name"'):
            await _documents(graph)


async def test_a_payload_may_go_on_to_tensors_and_come_back_from_them(tmp_path: Path) -> None:
    """A node takes what is in it, another makes an answer of that."""
    first = python_node("first.py", ["ASKED:asked"], ["TEXT:text"], name="first")
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
        assert await _documents(graph) == [PayloadDocument(b'{"length": 9}', "application/json")]
    assert [str(each) for each in examine_graph(tmp_path / "g" / "graph.pbtxt").problems] == []


@pytest.mark.parametrize(
    ("inputs", "outputs", "words"),
    [
        (INPUTS, ["OVMS_PY_TENSOR:answer"], "has one output, tagged HTTP_RESPONSE_PAYLOAD"),
        (["OVMS_PY_TENSOR:asked"], OUTPUTS, "has one input, tagged HTTP_REQUEST_PAYLOAD"),
        ([*INPUTS, "OVMS_PY_TENSOR:more"], OUTPUTS, "has one input, tagged HTTP_REQUEST_PAYLOAD"),
    ],
)
def test_a_graph_of_requests_takes_and_gives_nothing_else(
    tmp_path: Path, inputs: list[str], outputs: list[str], words: str
) -> None:
    """The file's problem says how it is written."""
    (tmp_path / "handler.py").write_text(TOLD)
    ports = [f"P{number}:{each.rpartition(':')[2]}" for number, each in enumerate(inputs)]
    path = tmp_path / "graph.pbtxt"
    path.write_text(graph_text(python_node("handler.py", ports, ["OUT:answer"]), inputs=inputs, outputs=outputs))
    assert examine_text(path.read_text(), "graph.pbtxt").config is not None
    (problem,) = examine_graph(path).errors
    assert words in problem.message
    assert problem.suggestion.startswith("let the only ")


async def test_a_deadline_ends_what_takes_too_long(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    """The block that waits is left with the reason."""
    source = """
    import trio
    class OvmsPythonModel:
        async def execute(self, inputs):
            await trio.sleep_forever()
    """
    async with loaded(tmp_path / "g", ONCE, handler=source) as graph:
        with pytest.raises(DeadlineExceeded, match="before the graph had answered"):
            async with graph.open_payload(ASKED, trio.current_time() + 5) as documents:
                await documents.receive()
    assert autojump_clock.autojump_threshold == 0


async def test_headers_of_a_payload_are_read_only(tmp_path: Path) -> None:
    """Several nodes get the same payload, and its JSON is parsed once."""
    source = """
    class OvmsPythonModel:
        def execute(self, inputs):
            asked, = inputs
            try:
                asked.headers["x-tag"] = "c"
            except TypeError as error:
                refusal = str(error)
            return [{"told": [refusal, asked.json is asked.json, asked.headers["x-tag"]]}]
    """
    async with loaded(tmp_path / "g", ONCE, handler=source) as graph:
        (document,) = await _documents(graph)
    refusal, is_parsed_once, tag = json.loads(document.data)["told"]
    assert "does not support item assignment" in refusal
    assert (is_parsed_once, tag) == (True, "a, b")
