from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from ovmstrio.config.specs import GraphSpec
from ovmstrio.telemetry.metrics import Metrics
from ovmstrio.transport.http.responses import Cors
from tests.support.stub_registry import FIRST_TIMESTAMP, GRAPH, ScriptedServable, load_scripted
from tests.support.waits import WAIT_SECONDS
from tests.unit.protocols.servers import Serving, serving_rest

FAILURE = "Mediapipe execution failed. MP status - INTERNAL: node"
STREAM = f"/v2/models/{GRAPH}/generate_stream"


@pytest.fixture
async def serving(tmp_path: Path) -> AsyncIterator[Serving]:
    base = tmp_path / GRAPH
    (base / "1").mkdir(parents=True)
    spec = GraphSpec(name=GRAPH, base_path=base, graph_path=base / "graph.pbtxt")
    options: dict[str, Any] = {"metrics": Metrics(), "front_end": {"cors": Cors("*")}}
    async with serving_rest(tmp_path, models=(spec,), loader=load_scripted, **options) as server:
        yield server


def _graph(serving: Serving) -> ScriptedServable:
    servable = serving.registry.peek(GRAPH)
    assert isinstance(servable, ScriptedServable)
    return servable


def _post(**document: Any) -> bytes:
    body = json.dumps(document).encode()
    return f"POST {STREAM} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


async def _wait(event: trio.Event) -> None:
    with trio.fail_after(WAIT_SECONDS):
        await event.wait()


def _events(text: str) -> list[tuple[str, Any]]:
    found = []
    for block in text.split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        assert set(fields) <= {"event", "data"}
        found.append((fields.get("event", "message"), json.loads(fields["data"])))
    return found


async def test_a_graph_answers_under_the_name_of_its_output(serving: Serving) -> None:
    answer = await serving.post(f"/v2/models/{GRAPH}/generate", json={"x": "größe", "id": "7"})
    assert answer.json() == {
        "model_name": "graph",
        "model_version": "1",
        "id": "7",
        "parameters": {"OVMS_MP_TIMESTAMP": FIRST_TIMESTAMP},
        "x": "größe",
    }
    (request,) = _graph(serving).streams[0].requests
    assert (request.inputs[0].datatype, request.inputs[0].shape) == ("BYTES", (7,))
    assert request.raw_inputs == ["größe".encode()]


async def test_a_model_answers_with_flat_lists(serving: Serving) -> None:
    answer = await serving.post("/v2/models/echo/versions/1/generate", json={"x": [1, 2.5]})
    assert answer.json() == {"model_name": "echo", "model_version": "1", "x": [1.0, 2.5]}


@pytest.mark.parametrize(
    ("path", "document", "status", "text"),
    [
        ("echo/generate", {"text": "a", "fail": "no luck"}, 500, "no luck"),
        ("graph/generate_stream", {"x": "w", "fail": FAILURE, "replies": 0}, 400, FAILURE),
        ("graph/generate_stream", {"x": "w", "refuse": "cannot start"}, 412, "cannot start"),
        ("graph/generate_stream", {"x": "w", "problem": "x is unexpected"}, 400, "x is unexpected"),
        (
            "graph/generate_stream",
            {"nothing": "w"},
            400,
            "expected at least one input, got none; the inputs of graph are: x, y",
        ),
    ],
)
async def test_early_errors_have_a_status(
    serving: Serving, path: str, document: dict[str, Any], status: int, text: str
) -> None:
    answer = await serving.post(f"/v2/models/{path}", json=document)
    assert (answer.status_code, answer.json()) == (status, {"error": text})


@pytest.mark.parametrize(
    ("path", "body", "status", "text"),
    [
        ("nothing/generate", b"{}", 404, "with requested name is not found"),
        ("nothing/generate_stream", b"{}", 404, "is not found"),
        ("graph/generate", b"{", 412, "not valid json"),
        ("graph/generate_stream", b"[]", 400, "Request body should be JSON object"),
        ("graph/versions/x/generate_stream", b"{}", 400, "must be an integer"),
        ("echo/generate_stream", b"{}", 404, '"echo" does not stream, only graphs do'),
        ("graph/generate", b'{"x":[]}', 400, "input x: expected at least one element"),
    ],
)
async def test_bad_requests_are_refused(serving: Serving, path: str, body: bytes, status: int, text: str) -> None:
    answer = await serving.post(f"/v2/models/{path}", content=body)
    assert answer.status_code == status
    assert text in answer.json()["error"]


@pytest.mark.parametrize(
    ("path", "replies"),
    [(STREAM, 3), (f"{STREAM}/", 3), (f"/v2/models/{GRAPH}/versions/1/generate_stream", 3), (STREAM, 0)],
)
async def test_every_reply_is_an_event(serving: Serving, path: str, replies: int) -> None:
    answer = await serving.post(path, json={"x": "word", "parameters": {"replies": replies}})
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert (answer.headers["cache-control"], answer.headers["access-control-allow-origin"]) == ("no-cache", "*")
    events = [(kind, data["x"], data["parameters"]["OVMS_MP_TIMESTAMP"]) for kind, data in _events(answer.text)]
    assert events == [("message", "word", FIRST_TIMESTAMP + number) for number in range(replies)]


async def test_an_event_is_sent_before_the_next_one_is_made(serving: Serving) -> None:
    graph = _graph(serving)
    graph.pause_after = 1
    async with serving.connect() as peer:
        await peer.send(_post(x="first", replies=2))
        received = await peer.until(b"first")
        assert b"text/event-stream" in received
        assert graph.streams[0].made == 1
        graph.release()
        assert b"first" in await peer.until(b"\r\n0\r\n\r\n")


async def test_a_failure_after_the_first_event_is_the_last_event_and_counted(serving: Serving) -> None:
    answer = await serving.post(STREAM, json={"x": "w", "replies": 2, "fail": FAILURE})
    events = _events(answer.text)
    assert [kind for kind, _ in events] == ["message", "message", "error"]
    assert events[-1][1] == {"error": FAILURE}
    rendered = (serving.plane.render_metrics() or b"").decode()
    labels = '{api="KServe",interface="REST",method="ModelInferStream",name="graph"}'
    for line in (f"ovms_responses{labels} 2.0", f"ovms_requests_accepted{labels} 1.0", f"ovms_graph_error{labels} 1.0"):
        assert line in rendered


@pytest.mark.parametrize(
    ("pause_after", "document", "received"),
    [(0, {"hold": True}, b""), (1, {"replies": 5}, b"first")],
    ids=["before the first event", "between events"],
)
async def test_a_client_that_disconnects_cancels_the_graph_without_a_failure(
    serving: Serving, capsys: pytest.CaptureFixture[str], pause_after: int, document: dict[str, Any], received: bytes
) -> None:
    graph = _graph(serving)
    graph.pause_after = pause_after
    async with serving.connect() as peer:
        await peer.send(_post(x="first", **document))
        if received:
            await peer.until(received)
        else:
            await _wait(graph.holding)
    await _wait(graph.cancelled)
    await serving.wait_closed()
    assert graph.open == 0
    assert "stream failed" not in capsys.readouterr().out


async def test_a_client_that_does_not_read_blocks_the_graph_until_it_disconnects(serving: Serving) -> None:
    graph = _graph(serving)
    async with serving.connect() as peer:
        await peer.send(_post(x="x" * 100_000, replies=100_000))
        await peer.until(b"data: ")
        with trio.fail_after(WAIT_SECONDS):
            made = -1
            while graph.streams[0].made > made:
                made = graph.streams[0].made
                await trio.testing.wait_all_tasks_blocked(0.1)
        assert made < 500
        await trio.aclose_forcefully(peer.stream)
    await _wait(graph.cancelled)
    await serving.wait_closed()


async def test_a_stream_is_cancelled_after_the_grace_of_a_drain(serving: Serving) -> None:
    graph = _graph(serving)
    graph.pause_after = 1
    async with serving.connect() as peer:
        await peer.send(_post(x="first", replies=3))
        await peer.until(b"first")
        assert await serving.front_end.drain(0.3) == 1
        assert await peer.rest() == b""
    await _wait(graph.cancelled)
    assert (graph.open, graph.streams[0].made) == (0, 1)
