from __future__ import annotations

import itertools
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson
import pytest
import trio
import trio.testing
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ovmstrio.server.front_ends import make_rest_router
from ovmstrio.serving.authorization import AuthorizingDataPlane
from ovmstrio.serving.data_plane import DataPlane
from ovmstrio.transport.http.fast_path import IDLE_SECONDS, RECEIVE_SECONDS, FastPathConnection, parse_head
from ovmstrio.transport.http.responses import Cors
from tests.service.handlers.servers import serving_handler
from tests.service.transport.http.conftest import GET_METADATA, MEBIBYTE, SLOW_BODY, chunk, chunked
from tests.support.callers import gate_of
from tests.support.examples import examples
from tests.support.op_pipelines import EchoExecutor, serving_pipeline
from tests.support.waits import WAIT_SECONDS
from tests.unit.protocols.servers import BODY, Peer, Serving, infer_head, infer_post, serving_rest, stack

LONG_SECONDS = 3600
"""More than any time that is waited for on a clock that jumps."""
JSON_PART = b'{"inputs":[{"name":"x","shape":[2],"datatype":"INT16"}],"outputs":[{"name":"x","parameters":%b}]}'
AS_BYTES = JSON_PART % b'{"binary_data":true}'


def _large(count: int) -> tuple[bytes, str, bytes]:
    """Return the body of a request of so many numbers as bytes, the header with its JSON size, and the bytes."""
    numbers = np.arange(count, dtype="<f4").tobytes()
    given = {"name": "x", "shape": [count], "datatype": "FP32"}
    wanted = {"name": "x", "parameters": {"binary_data": True}}
    head = orjson.dumps({"inputs": [given], "outputs": [wanted]})
    return head + numbers, f"Inference-Header-Content-Length: {len(head)}", numbers


def _numbered(number: int) -> bytes:
    given = {"name": "x", "shape": [1], "datatype": "INT32", "data": [number]}
    return infer_post(orjson.dumps({"id": str(number), "inputs": [given]}))


REQUESTS: dict[str, tuple[bytes, list[str], str, str]] = {
    "JSON": (BODY, [], "echo", ""),
    "a version": (BODY, [], "echo", "/versions/1"),
    "the default version": (BODY, [], "echo", "/versions/0"),
    "bytes": (AS_BYTES + b"\1\0\2\0", [f"Inference-Header-Content-Length: {len(AS_BYTES)}"], "echo", ""),
    "a large tensor": (_large(200_000)[0], [_large(200_000)[1]], "echo", ""),
    "an encoded name": (BODY, [], "ec%68o", ""),
    "an unknown name": (BODY, [], "nobody%20at%20home", ""),
    "an unknown version": (BODY, [], "echo", "/versions/9"),
    "a huge version": (BODY, [], "echo", "/versions/9999999999999999999"),
    "a longer version": (BODY, [], "echo", "/versions/99999999999999999999"),
    "a version that is none": (BODY, [], "echo", "/versions/one"),
    "no JSON": (b"{", [], "echo", ""),
    "no body": (b"", [], "echo", ""),
    "no inputs": (b"{}", [], "echo", ""),
    "a bad length of the JSON": (BODY, ["Inference-Header-Content-Length: -1"], "echo", ""),
    "a failing model": (BODY[:-1] + b',"parameters":{"fail":"it broke"}}', [], "echo", ""),
    "dots": (BODY, [], "..", ""),
    "an encoded slash": (BODY, [], "echo%2Finfer", ""),
    "no UTF-8": (BODY, [], "%ff", ""),
}


@pytest.mark.parametrize("case", REQUESTS)
async def test_both_lanes_give_the_same_status_headers_and_body(serving: Serving, case: str) -> None:
    body, extra, model, suffix = REQUESTS[case]
    answers = []
    for make in (infer_post, chunked):
        async with serving.connect() as peer:
            answers.append(await peer.ask(make(body, *extra, model=model, suffix=suffix)))
    fast, application = answers
    assert (fast.status, fast.body) == (application.status, application.body)
    for header in ("content-type", "content-length", "inference-header-content-length"):
        assert fast.headers.get(header) == application.headers.get(header)
    assert (fast.status == 200) is (case in {*list(REQUESTS)[:6]})


@pytest.mark.parametrize("make", [infer_post, chunked], ids=["fast", "application"])
@pytest.mark.parametrize("is_split", [False, True], ids=["in one piece", "byte by byte"])
async def test_empty_lines_before_a_request_are_ignored_in_both_lanes(
    serving: Serving, make: Callable[[bytes], bytes], is_split: bool
) -> None:
    async with serving.connect() as peer:
        for _ in range(2):
            await peer.send(b"\r\n\r")
            if is_split:
                await trio.testing.wait_all_tasks_blocked(0.01)
            await peer.send(b"\n")
            assert (await peer.ask(make(BODY) + b"\r\n")).status == 200
        await trio.testing.wait_all_tasks_blocked(0.01)
        with trio.fail_after(WAIT_SECONDS):
            assert await serving.front_end.drain(WAIT_SECONDS) == 0


@pytest.mark.parametrize("size", [MEBIBYTE, MEBIBYTE + 1])
@pytest.mark.parametrize("make", [infer_post, chunked], ids=["fast", "application"])
async def test_the_body_limit_is_the_same_in_both_lanes(
    tmp_path: Path, make: Callable[[bytes], bytes], size: int
) -> None:
    async with (
        serving_rest(tmp_path, front_end={"max_body_bytes": MEBIBYTE}) as serving,
        serving.connect() as peer,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(peer.send, make(BODY.ljust(size)))
        answer = await peer.answer()
    if size == MEBIBYTE:
        assert answer.status == 200
    else:
        assert answer.status == 413
        assert str(MEBIBYTE) in answer.json["error"]
        assert "--max-message-size" in answer.json["error"]


async def test_a_connection_has_any_number_of_requests_in_both_lanes(serving: Serving) -> None:
    for make in (infer_post, chunked):
        async with serving.connect() as peer:
            answers = [await peer.ask(make(BODY)) for _ in range(1002)]
        assert {(answer.status, answer.headers.get("connection")) for answer in answers} == {(200, None)}


async def _note_left(lane: FastPathConnection, left: list[bytes | None]) -> None:
    left.append(await lane.run())


async def test_a_cached_head_does_not_bypass_the_body_limit(tmp_path: Path) -> None:
    async with stack(tmp_path) as (plane, _, _):
        router = make_rest_router(plane)
        for limit, status in ((MEBIBYTE, b"200"), (len(BODY) - 1, b""), (MEBIBYTE, b"200")):
            ours, theirs = trio.testing.memory_stream_pair()
            left: list[bytes | None] = []
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_note_left, FastPathConnection(router, theirs, limit), left)
                await ours.send_all(infer_post(BODY))
                if status:
                    assert (await ours.receive_some(65536)).split()[1] == status
                await ours.send_eof()
            assert left == [None if status else infer_post(BODY)]
        assert len(router.heads) == 1
        router.forget()
        assert not router.heads


@pytest.mark.parametrize("cuts", [[], [3], [500], [70_000, 70_001, 400_000], [-1]])
async def test_large_tensors_are_complete_and_aligned_however_they_are_split(serving: Serving, cuts: list[int]) -> None:
    body, line, numbers = _large(200_000)
    request = infer_post(body, line)
    whole = request + _numbered(7)
    async with serving.connect() as peer:
        for start, end in itertools.pairwise([0, *(cut % len(whole) for cut in cuts), len(whole)]):
            await peer.send(whole[start:end])
            await trio.testing.wait_all_tasks_blocked(0.01)
        large = await peer.answer()
        small = await peer.answer()
    assert large.status == small.status == 200
    assert large.body[int(large.headers["inference-header-content-length"]) :] == numbers
    assert small.json["outputs"][0]["data"] == [7]
    (raw,) = serving.servable.requests[0].raw_inputs
    assert isinstance(raw, memoryview)
    assert raw.readonly
    assert np.frombuffer(raw, "<f4").flags.aligned


async def test_large_bodies_after_an_earlier_call_are_complete(serving: Serving) -> None:
    body, line, numbers = _large(100_000)
    request = infer_post(body, line)

    async def send(peer: Peer) -> None:
        for part in (request[:9_000], request[9_000:], request):
            await peer.send(part)

    async with serving.connect() as peer, trio.open_nursery() as nursery:
        await peer.ask(infer_post())
        # Who sends more than the system holds has to read meanwhile.
        nursery.start_soon(send, peer)
        for _ in range(2):
            answer = await peer.answer()
            assert answer.body[int(answer.headers["inference-header-content-length"]) :] == numbers


async def test_a_truncated_large_body_reaches_no_model(serving: Serving) -> None:
    body, line, _ = _large(100_000)
    async with serving.connect() as peer:
        await peer.send(infer_post(body, line)[:-1])
        assert isinstance(peer.stream, trio.SocketStream)
        await peer.stream.send_eof()
        assert await peer.rest() == b""
    assert not serving.servable.requests


@pytest.mark.parametrize("other", [GET_METADATA, chunked(BODY)], ids=["GET", "chunked"])
async def test_pipelined_requests_of_both_lanes_are_answered_in_order(serving: Serving, other: bytes) -> None:
    async with serving.connect() as peer:
        await peer.send(_numbered(1) + _numbered(2) + other + _numbered(3) + other)
        answers = [await peer.answer() for _ in range(5)]
        assert [answer.json.get("id") for answer in answers] == ["1", "2", None, "3", None]
        assert {answer.status for answer in answers} == {200}
        assert (await peer.ask(_numbered(4))).json["id"] == "4"


@asynccontextmanager
async def _lane(tmp_path: Path) -> AsyncIterator[tuple[Peer, FastPathConnection, list[bytes | None], trio.Event]]:
    """Run a lane over streams in memory. The list gets the result of its run, and the event is set at its end."""
    async with stack(tmp_path) as (plane, _registry, _specs):
        # Only here: the work of threads, above, does not keep a clock from jumping.
        with trio.fail_after(LONG_SECONDS):
            async with trio.open_nursery() as nursery:
                ours, theirs = trio.testing.memory_stream_pair()
                lane = FastPathConnection(make_rest_router(plane), theirs, MEBIBYTE)
                left: list[bytes | None] = []
                ended = trio.Event()

                async def run() -> None:
                    left.append(await lane.run())
                    await theirs.aclose()
                    ended.set()

                nursery.start_soon(run)
                yield Peer(ours), lane, left, ended
                nursery.cancel_scope.cancel()


async def test_a_request_may_be_split_at_any_byte(tmp_path: Path) -> None:
    request = infer_post(b'{"inputs":[{"name":"x","shape":[1],"datatype":"INT8","data":[7]}]}')
    async with _lane(tmp_path) as (peer, _, _left, _ended):
        for cut in range(1, len(request)):
            await peer.send(request[:cut])
            await trio.testing.wait_all_tasks_blocked()
            answer = await peer.ask(request[cut:])
            assert answer.json["outputs"][0]["data"] == [7]
        for byte in request:
            await peer.send(bytes([byte]))
            await trio.testing.wait_all_tasks_blocked()
        assert (await peer.answer()).status == 200


AMBIGUOUS_LINES = [
    *("Content-Length: 5", "Content-Length: 6", "Transfer-Encoding: chunked", "transfer-encoding: identity"),
    *("Transfer-Encoding : chunked", "X: a\nTransfer-Encoding: chunked", "X: a\r Y: b", "X: a\0b", "X: a\x0bb"),
    *("X: a\x7fb", " folded: line", ": no name", "no colon", "Host: twice", "Connection: upgrade", "Upgrade: h2c"),
    *("Connection: keep-alive, close", "Expect: 100-continue", "Content-Encoding: gzip"),
]
AMBIGUOUS_LENGTHS = ["5, 5", "+5", "-5", "5_0", "0x5", "", "1" * 16]


@pytest.mark.parametrize(
    "head",
    [
        *(infer_head("5", line) for line in AMBIGUOUS_LINES),
        *(infer_head(length) for length in AMBIGUOUS_LENGTHS),
        infer_head("5").replace(b"/infer", b"/inf\xe9r"),
        infer_head("5").replace(b"Host: localhost\r\n", b""),
        infer_head("5").replace(b"HTTP/1.1", b"HTTP/1.0"),
        infer_head("5").replace(b"/v2", b"http://h/v2"),
    ],
)
def test_ambiguous_heads_are_left_to_the_application(head: bytes) -> None:
    assert parse_head(head) is None


@pytest.mark.parametrize(
    "extra",
    [
        ["Content-Length: 4"],
        ["Transfer-Encoding: chunked"],
        ["Transfer-Encoding : chunked"],
        ["X: a\nTransfer-Encoding: chunked"],
    ],
)
async def test_ambiguous_body_lengths_are_refused_and_end_the_connection(serving: Serving, extra: list[str]) -> None:
    inner = _numbered(7)
    async with serving.connect() as peer:
        await peer.send(infer_post(b"0\r\n\r\n" + inner, *extra))
        answer = await peer.answer()
        assert answer.status == 400
        assert await peer.rest() == b""
    assert serving.servable.requests == []


@pytest.mark.parametrize("first", [b"", infer_post()], ids=["at once", "after a request"])
async def test_a_head_above_the_limit_is_refused(serving: Serving, first: bytes) -> None:
    async with serving.connect() as peer:
        if first:
            assert (await peer.ask(first)).status == 200
        await peer.send(infer_head(5)[:-2] + b"X: " + b"y" * 40_000)
        answer = await peer.answer()
        assert answer.status in {400, 431}
        assert "error" in answer.json
        await peer.rest()


@pytest.mark.parametrize("leave", [trio.SocketStream.aclose, trio.SocketStream.send_eof], ids=["close", "half-close"])
@pytest.mark.parametrize("request_bytes", [infer_post(SLOW_BODY), chunked(SLOW_BODY)], ids=["fast", "application"])
async def test_a_client_that_leaves_cancels_its_call_and_releases_the_version(
    serving: Serving, request_bytes: bytes, leave: Callable[[trio.SocketStream], Awaitable[None]]
) -> None:
    servable = serving.servable
    async with serving.connect() as peer:
        await peer.send(request_bytes)
        await serving.wait_blocked()
        assert isinstance(peer.stream, trio.SocketStream)
        await leave(peer.stream)
        with trio.fail_after(WAIT_SECONDS):
            await servable.cancelled.wait()
            await serving.wait_closed()
            # A retirement waits for every lease.
            await serving.registry.apply([])


async def test_the_end_of_the_stream_after_requests_ends_the_connection(tmp_path: Path) -> None:
    async with _lane(tmp_path) as (peer, _, left, ended):
        await peer.stream.send_all(_numbered(1) + _numbered(2))
        await peer.stream.send_eof()  # type: ignore[attr-defined]
        with trio.fail_after(WAIT_SECONDS):
            await ended.wait()
        assert left == [None]


@pytest.mark.parametrize(
    ("sent", "seconds", "status"),
    [(b"", IDLE_SECONDS, b""), (infer_head(9)[:-2], RECEIVE_SECONDS, b"408"), (infer_head(9), RECEIVE_SECONDS, b"408")],
    ids=["nothing", "half a head", "no body"],
)
async def test_waits_for_a_request_are_bounded(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, sent: bytes, seconds: float, status: bytes
) -> None:
    async with _lane(tmp_path) as (peer, _, left, ended):
        if sent:
            await peer.stream.send_all(sent)
        began = trio.current_time()
        await ended.wait()
        assert trio.current_time() - began == pytest.approx(seconds)
        assert left == [None]
        assert (await peer.rest())[9:12] == status


async def test_the_time_of_a_call_is_not_bounded(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    async with _lane(tmp_path) as (peer, _, _left, ended):
        await peer.stream.send_all(infer_post(SLOW_BODY))
        await trio.sleep(10 * IDLE_SECONDS)
        assert not ended.is_set()


async def test_a_request_in_progress_is_answered_during_a_drain(serving: Serving) -> None:
    async with serving.connect() as peer:
        await peer.send(infer_head(len(BODY)))
        await trio.testing.wait_all_tasks_blocked(0.05)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serving.front_end.drain, 10)
            await trio.testing.wait_all_tasks_blocked(0.05)
            answer = await peer.ask(BODY)
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert await peer.rest() == b""


@pytest.mark.parametrize("lane", ["fast", "application"])
@pytest.mark.parametrize(
    "damage",
    [
        lambda head: head.replace(b"\r\n", b"\n"),
        lambda head: head.replace(b"\r\n", b"\n", 1),
        lambda head: head.replace(b"Host: localhost\r\n", b"Host: localhost\n"),
        lambda head: head[:-2] + b"\n",
    ],
    ids=["every line", "the first line", "a header", "the end"],
)
async def test_lines_that_end_with_lf_alone_are_refused(
    serving: Serving, damage: Callable[[bytes], bytes], lane: str
) -> None:
    async with serving.connect() as peer:
        await peer.ask(infer_post() if lane == "fast" else GET_METADATA)
        with trio.fail_after(WAIT_SECONDS):
            answer = await peer.ask(damage(infer_head(len(BODY))) + BODY + GET_METADATA)
            assert (answer.status, answer.headers["connection"]) == (400, "close")
            assert answer.json == {"error": "not a valid HTTP/1.1 request: Bad Request"}
            assert await peer.rest() == b""


async def test_two_different_json_lengths_are_refused_and_equal_ones_accepted(serving: Serving) -> None:
    body, lengths = AS_BYTES + b"\1\0\2\0", (len(AS_BYTES), len(AS_BYTES) - 1)
    async with serving.connect() as peer:
        for second, status in ((lengths[0], 200), (lengths[1], 400)):
            lines = [f"Inference-Header-Content-Length: {length}" for length in (lengths[0], second)]
            assert (await peer.ask(infer_post(body, *lines))).status == status


@pytest.mark.parametrize(
    "head", [infer_head(10_000), infer_head(None, "Transfer-Encoding: chunked")], ids=["fast", "app"]
)
@pytest.mark.parametrize("part", ["half a head", "half a body"])
async def test_a_slow_request_is_refused_after_the_receive_time_in_both_lanes(
    tmp_path: Path, head: bytes, part: str
) -> None:
    data = head[:-4] if part == "half a head" else head + (b"FFFF\r\n{" if b"chunked" in head else b"{")
    async with serving_rest(tmp_path, front_end={"receive_seconds": 0.5}) as serving, serving.connect() as peer:

        async def drip() -> None:
            with suppress(trio.BrokenResourceError):
                while True:
                    await peer.send(b"a")
                    await trio.sleep(0.05)

        with trio.fail_after(WAIT_SECONDS):
            async with trio.open_nursery() as nursery:
                await peer.send(data)
                nursery.start_soon(drip)
                answer = await peer.answer()
                nursery.cancel_scope.cancel()
        assert (answer.status, answer.headers["connection"]) == (408, "close")
        assert answer.json == {"error": "the request did not come within 0.5 s (--request-read-timeout)"}
        assert await peer.rest() == b""


HANDLER: Final = """
from ovmstrio.ext.handlers import HTTPError, Response

class Handler:
    def handle_post(self, payload, headers, query_params):
        if payload == "refuse":
            raise HTTPError(418, "short", {"X-Kind": "pot", "Retry-After": " 3 "})
        if payload == "fail":
            raise ValueError("a secret")
        names = sorted(set(headers) - {"te", "content-length", "transfer-encoding"})
        return {"payload": str(payload), "names": names, "query": dict(query_params)}

    def handle_get(self, query_params):
        for number in range(int(query_params.get("count", "2"))):
            yield f"{number};" * 3

    def handle_put(self, payload):
        return Response("made", int(payload or 201), headers={"X-One": "1", "Date": "never", "Set-Cookie": "a=b"})

    def handle_delete(self):
        return Response(status_code=204, headers={"X-Two": "2"})
"""
REQUEST_ID: Final = re.compile(rb"x-request-id: [!-~]+\r\n")
DATE: Final = re.compile(rb"date: [A-Z][a-z]{2}, \d{2} [A-Z][a-z]{2} \d{4} \d{2}:\d{2}:\d{2} GMT\r\n")
PATIENCE_SECONDS: Final = 20
Address = str


def _head(verb: str, target: str, *lines: str, host: str = "h") -> bytes:
    return "\r\n".join([f"{verb} {target} HTTP/1.1", f"Host: {host}", *lines, "\r\n"]).encode("latin-1")


async def _raw(address: Address, request: bytes) -> bytes:
    """Send a request twice, the second time with Connection: close; return both answers without dates and ids."""
    host, _, port = address.rpartition(":")
    last = request.replace(b" HTTP/1.1\r\n", b" HTTP/1.1\r\nConnection: close\r\n", 1)
    received = b""
    with trio.fail_after(PATIENCE_SECONDS):
        async with await trio.open_tcp_stream(host, int(port)) as stream:
            await stream.send_all(request + last)
            async for data in stream:
                received += data
    dates = DATE.findall(received)
    assert len(dates) == received.count(b"HTTP/1.1 "), received
    assert len(REQUEST_ID.findall(received)) == len(dates), received
    return REQUEST_ID.sub(b"", DATE.sub(b"date: now\r\n", received))


async def _assert_alike(address: Address, verb: str, target: str, lines: tuple[str, ...], body: bytes) -> bytes:
    """Send a request to the fast lane, and twice to the application; return the two answers of the fast lane."""
    length = f"Content-Length: {len(body)}"
    fast = await _raw(address, _head(verb, target, *lines, length) + body)
    application = await _raw(address, _head(verb, target, *lines, "TE: trailers", length) + body)
    chunks = chunk(body) + b"0\r\n\r\n"
    in_chunks = await _raw(address, _head(verb, target, *lines, "Transfer-Encoding: chunked") + chunks)
    assert fast == application == in_chunks
    return fast


@asynccontextmanager
async def _models(folder: Path, *, plane_class: type[DataPlane] = DataPlane, **options: Any) -> AsyncIterator[Address]:
    async with serving_rest(folder, front_end=options, plane_class=plane_class) as serving:
        yield serving.address


@asynccontextmanager
async def _handler(folder: Path) -> AsyncIterator[Address]:
    async with serving_handler(folder, HANDLER) as served:
        yield served.address


@asynccontextmanager
async def _ops(folder: Path) -> AsyncIterator[Address]:
    del folder
    async with serving_pipeline(EchoExecutor(), http_status=True) as running:
        yield running.rest[0]


SERVERS: Final[dict[str, Callable[[Path], Any]]] = {
    "models": _models,
    "models for pages": partial(_models, cors=Cors("http://a, http://b", credentials=True)),
    "models of known callers": partial(
        _models, plane_class=AuthorizingDataPlane, gate=gate_of({"good": "infer:echo read"})
    ),
    "a handler": _handler,
    "Ops": _ops,
}
TARGETS: Final = [
    *("/", "/?count=3", "/?count=0&a=%20x", "/info", "/nothing", "//", "/..", "/%2f", "/?"),
    *("/v2/models/echo/infer", "/v2/models/echo/infer?a=1", "/v2/models/ec%68o/infer/", "/v2/models/%ff/infer"),
    *("/v2/modelshttp://h/echo/infer", "http://h/v2/models/echo/infer", "//v2/models/echo/infer"),
    *("/v2/models/a%2fb/infer", "/v2/models/../infer", "/v2/models/echo/versions/x/infer", "/v2/models/a/b/infer"),
    f"/v2/models/echo/versions/1{20 * '0'}/infer",
    *("/v1/models/echo:predict", "/v1/models/echo/versions/2:predict", "/v1/models/echo%3Apredict", "/v1/models/x/y"),
    *("/v2", "/v2/models/echo", "/v1/config", "/metrics", "/v2/models/uci/infer"),
    *("/uci/prediction", "/uci/", "/uci", "/uci/uci/prediction", "/nope/prediction"),
    *("/uci/health", "/health", "/a/b/c"),
]
BODIES: Final = [b"", b"{", BODY, b'"refuse"', b'"fail"', b'{"key":["x"],"value":["1"]}', b'{"instances":[1]}', b"204"]
LINES: Final = [
    *("Content-Type: application/json", "Accept: application/json", "Origin: http://a", "Origin: http://c"),
    *("X-Request-Id: a-1", "Connection: keep-alive", "Inference-Header-Content-Length: 3", "X-Empty:"),
    *("Authorization: Bearer good", "X-Api-Key: good", "accept: text/*"),
]


@pytest.mark.parametrize("server", SERVERS)
async def test_both_lanes_answer_with_the_same_bytes(tmp_path: Path, server: str) -> None:
    requests: list[tuple[str, str, tuple[str, ...], bytes]] = []

    @settings(max_examples=examples(120), database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        st.sampled_from(["POST", "POST", "GET", "PUT", "PATCH", "DELETE"]),
        st.sampled_from(TARGETS),
        st.lists(st.sampled_from(LINES), max_size=3, unique_by=lambda line: line.partition(":")[0].lower()).map(tuple),
        st.sampled_from(BODIES),
    )
    def collect(verb: str, target: str, lines: tuple[str, ...], body: bytes) -> None:
        requests.append((verb, target, lines, body))

    collect()
    async with SERVERS[server](tmp_path) as address:
        for each in requests:
            with_id = (*each[2], "X-Request-Id: b-2") if not any("Id" in line for line in each[2]) else each[2]
            await _assert_alike(address, each[0], each[1], with_id, each[3])


@pytest.mark.parametrize(
    ("verb", "target", "body", "expected"),
    [
        ("DELETE", "/", b"", b"HTTP/1.1 204 No Content\r\ndate: now\r\nx-two: 2\r\n"),
        ("PUT", "/", b"299", b"HTTP/1.1 299 \r\ndate: now\r\n"),
        ("GET", "/", b"", b"\r\ntransfer-encoding: chunked\r\n\r\n6\r\n0;0;0;\r\n"),
        ("GET", "/", b"", b"\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n6\r\n"),
        (
            "PATCH",
            "/",
            b"",
            b"HTTP/1.1 405 Method Not Allowed\r\ndate: now\r\nallow: DELETE, GET, OPTIONS, POST, PUT\r\n",
        ),
        ("POST", "/", b'"fail"', b"HTTP/1.1 500 Internal Server Error\r\ndate: now\r\n"),
        ("GET", "/v2", b"", b"HTTP/1.1 200 OK\r\ndate: now\r\ncontent-type: application/json\r\ncontent-length: "),
    ],
)
async def test_answers_have_the_same_form_in_both_lanes(
    tmp_path: Path, verb: str, target: str, body: bytes, expected: bytes
) -> None:
    lines = ("Content-Type: application/json", "X-Request-Id: a")
    async with _handler(tmp_path) as address:
        assert expected in await _assert_alike(address, verb, target, lines, body)


async def test_head_is_answered_with_the_head_of_get(tmp_path: Path) -> None:
    async with _models(tmp_path) as address:
        for target in ("/v2", "/v2/models/echo", "/v1/config", "/v2/models/nobody"):
            got = await _raw(address, _head("GET", target))
            assert (await _raw(address, _head("HEAD", target))).split(b"\r\n\r\n")[0] == got.split(b"\r\n\r\n")[0]


@pytest.mark.parametrize("host", ["a..b", "x" * 70, "127..0.1:80", "-", "[::1", "a:b"])
async def test_an_invalid_host_is_answered_as_any_other(tmp_path: Path, host: str) -> None:
    async with _models(tmp_path) as address:
        for line in ("X: y", "TE: trailers"):
            answers = await _raw(address, _head("GET", "/v2", line, host=host))
            assert answers.count(b"HTTP/1.1 200 ") == 2
