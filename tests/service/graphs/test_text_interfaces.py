"""Interfaces of text generation, called over HTTP for a graph with a language model and Python nodes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, Final

import pytest
import trio

from ovmstrio.config.specs import GraphSpec
from ovmstrio.core.generation import Conversation
from ovmstrio.server.front_ends import RestFrontEnd
from tests.support.graphs import BEFORE_AND_BEHIND, GRAPH, handler, loaded
from tests.support.scripted_services import ScriptedGenerator
from tests.support.stub_registry import open_plane_of
from tests.unit.protocols.servers import Serving

_NODES: Final[dict[str, Any]] = {
    "before": handler("return inputs[0].json"),
    "behind": handler("return {**json.loads(bytes(inputs[0])), 'passed': True}", head="import json"),
}
_CHAT: Final[dict[str, Any]] = {"model": GRAPH, "messages": [{"role": "user", "content": "one two"}]}
_MESSAGE: Final = _CHAT | {"max_tokens": 9}
_PROMPT: Final = {"model": GRAPH, "prompt": "one two"}


@asynccontextmanager
async def _serving(folder: Path) -> AsyncIterator[tuple[Serving, ScriptedGenerator]]:
    generator = ScriptedGenerator()

    async def load_text(_: Any) -> ScriptedGenerator:
        await trio.lowlevel.checkpoint()
        return generator

    spec = GraphSpec(name=GRAPH, base_path=folder, graph_path=folder / "g" / "graph.pbtxt")
    async with (
        loaded(folder / "g", BEFORE_AND_BEHIND, load_text=load_text, **_NODES) as graph,
        open_plane_of(spec, graph) as plane,
        trio.open_nursery() as nursery,
    ):
        server = RestFrontEnd(plane, ["127.0.0.1:0"])
        (address,) = await nursery.start(server.serve)
        yield Serving(server, plane, plane.registry, [], address), generator
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("path", "body", "place"),
    [
        ("/v1/messages", _MESSAGE, ("content", 0, "text")),
        ("/api/chat", _CHAT, ("message", "content")),
        ("/api/generate", _PROMPT, ("response",)),
    ],
)
async def test_a_graph_answers_with_one_document(
    tmp_path: Path, path: str, body: dict[str, Any], place: tuple[Any, ...]
) -> None:
    async with _serving(tmp_path) as (serving, generator):
        answer = await serving.post(path, json=body | {"stream": False})
        refused = await serving.post(path, json=body | {"stream": False, "temperature": "x", "options": {"top_p": "x"}})
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json"), answer.text
    assert (reduce(getitem, place, answer.json()), answer.json()["passed"]) == ("one two", True)
    assert isinstance(generator.requests[0].prompt, Conversation)
    assert (refused.status_code, "is not a valid number" in refused.text) == (400, True)


async def test_a_graph_streams_the_events_of_anthropic(tmp_path: Path) -> None:
    async with _serving(tmp_path) as (serving, _):
        answer = await serving.post("/v1/messages", json=_MESSAGE | {"stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [block.split("\n") for block in answer.text.split("\n\n")[:-1]]
    documents = [json.loads(data.removeprefix("data: ")) for _, data in events]
    assert [name for name, _ in events] == [f"event: {each['type']}" for each in documents]
    assert [documents[0]["type"], documents[-1]["type"]] == ["message_start", "message_stop"]
    assert "".join(each["delta"].get("text", "") for each in documents if "delta" in each) == "one two"
    assert all(each["passed"] for each in documents)


@pytest.mark.parametrize(("path", "body"), [("/api/chat", _CHAT), ("/api/generate", _PROMPT)])
async def test_a_graph_streams_the_lines_of_ollama_by_default(tmp_path: Path, path: str, body: dict[str, Any]) -> None:
    async with _serving(tmp_path) as (serving, _):
        answer = await serving.post(path, json=body | {"model": f"{GRAPH}:latest"})
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/x-ndjson"), answer.text
    documents = [json.loads(line) for line in answer.text.splitlines()]
    assert [each["done"] for each in documents] == [False] * (len(documents) - 1) + [True]
    assert (
        "".join(each["message"]["content"] if path == "/api/chat" else each["response"] for each in documents)
        == "one two"
    )
    assert all(each["passed"] for each in documents)
