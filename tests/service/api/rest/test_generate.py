"""Triton's generate extension over HTTP: one answer, or events as soon as they are made."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio
import trio.testing

from ovmstrio.config.specs import GraphSpec
from ovmstrio.observability.metrics import Metrics
from ovmstrio.wire.http.answers import Cors
from tests.support.streaming_servables import FIRST_TIMESTAMP, GRAPH, ScriptedServable, load_scripted
from tests.support.waits import WAIT_SECONDS
from tests.unit.api.rest.servers import Peer, Serving, serving_rest

FAILURE = "Mediapipe execution failed. MP status - INTERNAL: node"
STREAM = f"/v2/models/{GRAPH}/generate_stream"


@asynccontextmanager
async def _serving(tmp_path: Path, **options: Any) -> AsyncIterator[Serving]:
    base = tmp_path / GRAPH
    (base / "1").mkdir(parents=True)
    spec = GraphSpec(name=GRAPH, base_path=base, graph_path=base / "graph.pbtxt")
    async with serving_rest(tmp_path, models=(spec,), loader=load_scripted, **options) as server:
        yield server


@pytest.fixture
async def serving(tmp_path: Path) -> AsyncIterator[Serving]:
    """Serve ``graph``, which has streams, and the model ``echo``, as long as the test lasts."""
    async with _serving(tmp_path, metrics=Metrics()) as server:
        yield server


def _graph(serving: Serving) -> ScriptedServable:
    servable = serving.registry.peek(GRAPH)
    assert isinstance(servable, ScriptedServable)
    return servable


def _post(**document: Any) -> bytes:
    body = json.dumps(document).encode()
    head = f"POST {STREAM} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def _read_until(peer: Peer, text: bytes) -> bytes:
    come = b""
    with trio.fail_after(WAIT_SECONDS):
        while text not in come:
            data = await peer.stream.receive_some()
            assert data, f"the connection ended after {come!r}"
            come += data
    return come


async def _wait(event: trio.Event) -> None:
    with trio.fail_after(WAIT_SECONDS):
        await event.wait()


def _events(text: str) -> list[tuple[str, Any]]:
    """Read server-sent events as pairs of type and data."""
    found = []
    for block in text.split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        assert set(fields) <= {"event", "data"}
        found.append((fields.get("event", "message"), json.loads(fields["data"])))
    return found


# One answer


async def test_a_graph_generates_one_answer(serving: Serving) -> None:
    """Texts arrive as Python nodes expect them, and come back under the output's name with timestamp and id."""
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


async def test_a_model_generates_one_answer(serving: Serving) -> None:
    """A model's inputs have the datatypes that it says, and its outputs are flat lists."""
    answer = await serving.post("/v2/models/echo/versions/1/generate", json={"x": [1, 2.5]})

    assert answer.json() == {"model_name": "echo", "model_version": "1", "x": [1.0, 2.5]}


async def test_a_models_failure_keeps_its_status(serving: Serving) -> None:
    """What is no input is a parameter, and an error is JSON with its own status."""
    answer = await serving.post("/v2/models/echo/generate", json={"text": "a", "fail": "no luck"})

    assert (answer.status_code, answer.json()) == (500, {"error": "no luck"})


@pytest.mark.parametrize(
    ("path", "body", "status", "text"),
    [
        ("nobody/generate", b"{}", 404, "with requested name is not found"),
        ("nobody/generate_stream", b"{}", 404, "is not found"),
        ("graph/generate", b"{", 412, "not valid json"),
        ("graph/generate_stream", b"[]", 400, "Request body should be JSON object"),
        ("graph/versions/x/generate_stream", b"{}", 400, "must be an integer"),
        ("echo/generate_stream", b"{}", 404, '"echo" is a model, and only graphs have streams'),
        ("graph/generate", b'{"x":[]}', 400, "input x: expected at least one element"),
    ],
)
async def test_what_cannot_begin_is_refused_with_a_status(
    serving: Serving, path: str, body: bytes, status: int, text: str
) -> None:
    """Errors before the first event are the JSON that every error is."""
    answer = await serving.post(f"/v2/models/{path}", content=body)

    assert answer.status_code == status
    assert text in answer.json()["error"]


async def test_the_verb_is_post(serving: Serving) -> None:
    """Other verbs are refused as everywhere."""
    assert (await serving.get(STREAM)).status_code == 406


# Streams


@pytest.mark.parametrize("path", [STREAM, f"{STREAM}/", f"/v2/models/{GRAPH}/versions/1/generate_stream"])
async def test_every_reply_is_an_event(serving: Serving, path: str) -> None:
    """Events come in order, each with the output and its timestamp, and the answer ends after the last."""
    answer = await serving.post(path, json={"x": "word", "parameters": {"replies": 3}})

    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    events = _events(answer.text)
    assert [kind for kind, _ in events] == ["message"] * 3
    assert [data["x"] for _, data in events] == ["word"] * 3
    stamps = [data["parameters"]["OVMS_MP_TIMESTAMP"] for _, data in events]
    assert stamps == [FIRST_TIMESTAMP, FIRST_TIMESTAMP + 1, FIRST_TIMESTAMP + 2]


async def test_events_come_as_soon_as_they_are_made(serving: Serving) -> None:
    """The first event is there while the graph still works on the next."""
    graph = _graph(serving)
    graph.pause_after = 1

    async with serving.connect() as peer:
        await peer.send(_post(x="first", replies=2))
        come = await _read_until(peer, b"first")
        assert b"text/event-stream" in come
        assert graph.streams[0].made == 1
        graph.release()
        assert b"first" in await _read_until(peer, b"\r\n0\r\n\r\n")


async def test_httpx_reads_a_stream_line_by_line(serving: Serving) -> None:
    """An ordinary client iterates over the events."""

    def work(client: httpx.Client) -> list[str]:
        with client.stream("POST", STREAM, json={"x": "w", "replies": 4}) as answer:
            return [json.loads(line[6:])["x"] for line in answer.iter_lines() if line.startswith("data: ")]

    assert await serving.with_http(work) == ["w"] * 4


async def test_a_stream_without_replies_is_empty(serving: Serving) -> None:
    """A graph that says nothing gives an answer without events."""
    answer = await serving.post(STREAM, json={"x": "w", "replies": 0})

    assert (answer.status_code, answer.text) == (200, "")


@pytest.mark.parametrize(
    ("parameters", "status", "text"),
    [
        ({"fail": FAILURE, "replies": 0}, 400, FAILURE),
        ({"refuse": "cannot start"}, 412, "cannot start"),
        ({"problem": "x is unexpected"}, 400, "x is unexpected"),
    ],
)
async def test_an_error_before_the_first_event_has_a_status(
    serving: Serving, parameters: dict[str, Any], status: int, text: str
) -> None:
    """A stream that fails before it has said anything is an ordinary error."""
    answer = await serving.post(STREAM, json={"x": "w", **parameters})

    assert (answer.status_code, answer.json()) == (status, {"error": text})


async def test_a_stream_without_any_input_is_refused(serving: Serving) -> None:
    """A misspelt name would otherwise be a parameter that nobody reads, and the answer empty."""
    answer = await serving.post(STREAM, json={"nothing": "w"})

    assert answer.status_code == 400
    assert answer.json() == {"error": "expected at least one input, got none; the inputs of graph are: x, y"}


async def test_an_error_after_the_first_event_is_the_last_event(serving: Serving) -> None:
    """What was made before is delivered, then the error, and the answer ends properly."""
    answer = await serving.post(STREAM, json={"x": "w", "replies": 2, "fail": FAILURE})

    events = _events(answer.text)
    assert [kind for kind, _ in events] == ["message", "message", "error"]
    assert events[-1][1] == {"error": FAILURE}


async def test_the_connection_serves_on_after_a_stream(serving: Serving) -> None:
    """A stream ends its answer, not its connection."""

    def work(client: httpx.Client) -> list[int]:
        return [client.post(STREAM, json={"x": "w"}).status_code for _ in range(3)]

    assert await serving.with_http(work) == [200] * 3
    assert serving.front_end.open_connections <= 1


async def test_browsers_of_other_origins_may_read_streams(tmp_path: Path) -> None:
    """The headers for other origins are on a stream's answer as on any."""
    async with _serving(tmp_path, front_end={"cors": Cors("*")}) as serving:
        answer = await serving.post(STREAM, json={"x": "w"}, headers={"Origin": "http://page"})

    assert answer.headers["access-control-allow-origin"] == "*"


# Clients that leave or do not read


async def test_a_client_that_leaves_before_the_first_event_stops_the_graph(serving: Serving) -> None:
    """The end of the connection is noticed while the graph works and nothing is sent."""
    graph = _graph(serving)

    async with serving.connect() as peer:
        await peer.send(_post(x="w", hold=True))
        await _wait(graph.holding)

    await _wait(graph.cancelled)
    await serving.wait_closed()
    assert graph.open == 0


async def test_a_client_that_leaves_between_events_stops_the_graph(
    serving: Serving, capsys: pytest.CaptureFixture[str]
) -> None:
    """The end of the connection is noticed while the graph works on a later event, and is no failure in the log."""
    graph = _graph(serving)
    graph.pause_after = 1

    async with serving.connect() as peer:
        await peer.send(_post(x="first", replies=5))
        await _read_until(peer, b"first")

    await _wait(graph.cancelled)
    await serving.wait_closed()
    assert "stream failed" not in capsys.readouterr().out


async def test_a_client_that_does_not_read_holds_up_the_graph_and_may_leave(serving: Serving) -> None:
    """Replies are not made ahead of a slow reader; when it leaves, the graph stops."""
    graph = _graph(serving)

    async with serving.connect() as peer:
        await peer.send(_post(x="x" * 100_000, replies=100_000))
        await _read_until(peer, b"data: ")
        with trio.fail_after(WAIT_SECONDS):
            made = -1
            while graph.streams[0].made > made:
                made = graph.streams[0].made
                await trio.testing.wait_all_tasks_blocked(0.1)
        assert made < 500
        await trio.aclose_forcefully(peer.stream)

    await _wait(graph.cancelled)
    await serving.wait_closed()


async def test_a_stream_is_cut_when_the_grace_of_a_drain_ends(serving: Serving) -> None:
    """A stream goes on while the server drains, and is stopped at the end of the grace."""
    graph = _graph(serving)
    graph.pause_after = 1

    async with serving.connect() as peer, trio.open_nursery() as nursery:
        await peer.send(_post(x="first", replies=3))
        await _read_until(peer, b"first")
        nursery.start_soon(serving.front_end.drain, 0.3)
        await peer.rest()

    await _wait(graph.cancelled)


async def test_streams_are_counted(serving: Serving) -> None:
    """A stream over REST moves the counters of its graph under that interface."""
    await serving.post(STREAM, json={"x": "w", "replies": 2, "fail": "no"})

    rendered = serving.plane.render_metrics()
    assert rendered is not None
    labels = '{api="KServe",interface="REST",method="ModelInferStream",name="graph"}'
    for line in (f"ovms_responses{labels} 2.0", f"ovms_requests_accepted{labels} 1.0", f"ovms_graph_error{labels} 1.0"):
        assert line in rendered.decode()
