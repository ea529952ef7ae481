from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import trio
from grpclib.const import Status

from ovmstrio.cluster.ray.controller import replica_of
from ovmstrio.cluster.ray.group_server import GroupServer, ReplicaPlan
from ovmstrio.cluster.ray.grpc import GrpcResult
from ovmstrio.cluster.ray.grpc_services import INFER
from ovmstrio.cluster.ray.http import HttpHead
from ovmstrio.cluster.ray.linked_services import answer_linked, describe_linked
from ovmstrio.cluster.ray.request_streams import OpenStreams, answer_stream, pass_stream
from ovmstrio.cluster.ray.trio_guest import TrioGuest
from ovmstrio.config.specs import ModelSpec, NodeInput, NodeOutput, PipelineNode, PipelineSpec
from ovmstrio.core.errors import ConfigError, NotReady, NotSupported, ServerError
from ovmstrio.core.http_messages import HttpRequest
from ovmstrio.encoding.messages import message_class
from ovmstrio.isolation.messages import decode_error, encode_error
from tests.support import ir
from tests.support.callers import LOCAL
from tests.support.waits import WAIT_SECONDS

Request = message_class("inference.ModelInferRequest")
Response = message_class("inference.ModelInferResponse")
Reply = message_class("inference.ModelStreamInferResponse")

SETTINGS: dict[str, Any] = {"crash_probe": "off", "file_system_poll_wait_seconds": 0}


def _pipeline(called: str) -> PipelineSpec:
    node = PipelineNode(
        name="n",
        model_name=called,
        inputs=(NodeInput(name="b", node="request", data_item="x"),),
        outputs=(NodeOutput(data_item="a", alias="a"),),
    )
    outputs = (NodeInput(name="y", node="n", data_item="a"),)
    return PipelineSpec(name="dag", base_path=Path(), inputs=("x",), outputs=outputs, nodes=(node,))


@asynccontextmanager
async def _serving(server: GroupServer) -> AsyncIterator[GroupServer]:
    ending = trio.Event()
    async with trio.open_nursery() as nursery:
        await nursery.start(server.run, ending.wait)
        yield server
        ending.set()


async def _unreachable(group: str, method: str, *arguments: Any) -> Any:
    raise NotReady(f'the group "{group}" has no replica')


def _server(root: Path, **settings: Any) -> GroupServer:
    ir.save(ir.dummy(), root, "m")
    specs = (ModelSpec(name="m", base_path=root / "m"),)
    return GroupServer(ReplicaPlan("g", specs, settings=SETTINGS | settings), _unreachable)


@asynccontextmanager
async def _two_groups(root: Path) -> AsyncIterator[tuple[GroupServer, GroupServer]]:
    far = _server(root)
    answers: dict[str, Any] = {"infer_linked": answer_linked, "describe_linked": describe_linked}

    async def ask(group: str, method: str, *arguments: Any) -> Any:
        assert group == "far"
        try:
            return await answers[method](far.plane, *arguments)
        except ServerError as error:
            raise decode_error(orjson.loads(orjson.dumps(encode_error(error)))) from None

    plan = ReplicaPlan("near", (_pipeline("m"),), called={"m": "far"}, settings=SETTINGS)
    async with _serving(far), _serving(GroupServer(plan, ask)) as near:
        yield far, near


def _infer(name: str, tensor: str, shape: tuple[int, ...] = (1, 10), number: int = 1) -> bytes:
    message = Request(model_name=name, id=str(number))
    message.inputs.add(name=tensor, datatype="FP32", shape=shape)
    message.raw_input_contents.append(np.full(shape, number, np.float32).tobytes())
    data: bytes = message.SerializeToString()
    return data


def _values(answer: GrpcResult) -> list[float]:
    assert answer.status == 0, answer.text
    found: list[float] = np.frombuffer(Response.FromString(answer.data).raw_output_contents[0], np.float32).tolist()
    return found


async def _get(server: GroupServer, target: str, method: str = "GET", body: Any = None) -> tuple[int, Any]:
    data = b"" if body is None else orjson.dumps(body)
    head: HttpHead = await server.http.answer(HttpRequest(method, "", "", (), data, LOCAL, target))
    return head.status, orjson.loads(head.body) if head.body else None


async def test_a_pipeline_calls_a_model_of_another_group(tmp_path: Path) -> None:
    async with _two_groups(tmp_path) as (far, near):
        assert _values(await far.grpc.answer(INFER, _infer("m", "b"))) == [2.0] * 10
        assert _values(await near.grpc.answer(INFER, _infer("dag", "x"))) == [2.0] * 10
        status, document = await _get(near, "/v2/models/dag")
        assert status == 200
        assert document["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [1, 10]}]


async def test_errors_keep_their_statuses_over_both_interfaces_and_between_groups(tmp_path: Path) -> None:
    async with _two_groups(tmp_path) as (far, near):
        here = await far.grpc.answer(INFER, _infer("m", "b", (1, 9)))
        there = await near.grpc.answer(INFER, _infer("dag", "x", (1, 9)))
        assert (here.status, there.status) == (3, 3)
        assert "Invalid input shape" in here.text
        assert "Invalid input shape" in there.text
        assert (await far.grpc.answer(INFER, _infer("none", "b"))).status == 5
        body = {"inputs": [{"name": "x", "shape": [1, 9], "datatype": "FP32", "data": [1.0] * 9}]}
        assert (await _get(near, "/v2/models/dag/infer", "POST", body))[0] == 400
        assert (await _get(near, "/v2/models/none"))[0] == 404


async def test_a_deadline_is_passed_on_to_other_groups() -> None:
    async def ask(group: str, method: str, *arguments: Any) -> Any:
        if method == "infer_linked":
            assert arguments[-1] < math.inf
            await trio.sleep_forever()
        tensor = ["FP32", [[1, 1], [10, 10]], 0, ""]
        return ["m", "OpenVINO", [["b", *tensor]], [["a", *tensor]], []]

    plan = ReplicaPlan("near", (_pipeline("m"),), called={"m": "far"}, settings=SETTINGS)
    async with _serving(GroupServer(plan, ask)) as near:
        assert (await near.grpc.answer(INFER, _infer("dag", "x"), 0.2)).status == 4


@pytest.mark.parametrize(
    ("method", "target"),
    [
        ("GET", "/metrics"),
        ("GET", "/v2/models/stats"),
        ("GET", "/v2/models/m/stats"),
        ("POST", "/v1/config/reload"),
        ("POST", "/v2/repository/models/m/unload"),
    ],
)
async def test_requests_about_one_process_are_refused(tmp_path: Path, method: str, target: str) -> None:
    async with _serving(_server(tmp_path)) as server:
        status, document = await _get(server, target, method)
        assert status == 501
        assert "`ovms deploy ray` for changes" in document["error"]


async def test_a_replica_that_cannot_load_does_not_start(tmp_path: Path) -> None:
    plan = ReplicaPlan("g", (ModelSpec(name="m", base_path=tmp_path / "nowhere"),))
    with pytest.raises(ExceptionGroup) as raised:
        async with _serving(GroupServer(plan, _unreachable)):
            raise AssertionError
    assert raised.group_contains(ConfigError, match="the model's path does not exist")


async def test_messages_and_bodies_above_the_limit_are_refused(tmp_path: Path) -> None:
    async with _serving(_server(tmp_path, max_message_size=1024)) as server:
        assert _values(await server.grpc.answer(INFER, _infer("m", "b"))) == [2.0] * 10
        refused = await server.grpc.answer(INFER, _infer("m", "b", (1, 1000)))
        assert refused.status == 8
        assert "is larger than the limit of 1024 bytes" in refused.text
        send, receive = trio.open_memory_channel[bytes](1)
        replies, _ = trio.open_memory_channel[bytes](1)
        await send.send(_infer("m", "b", (1, 1000)))
        ended = await server.grpc.stream(receive, replies)
        assert ended is not None
        assert (ended.status, ended.text) == (refused.status, refused.text)
        body = {"inputs": [{"name": "b", "shape": [1, 10], "datatype": "FP32", "data": [1.0] * 1000}]}
        status, document = await _get(server, "/v2/models/m/infer", "POST", body)
        assert status == 413
        assert "the limit is 1024" in document["error"]


@pytest.mark.parametrize(("form", "kind"), [("openai", dict), ("ovms", str)])
async def test_errors_of_openais_api_have_the_configured_form(tmp_path: Path, form: str, kind: type) -> None:
    async with _serving(_server(tmp_path, openai_errors=form)) as server:
        target, body = "/v3/chat/completions", {"model": "none", "messages": [{"role": "user", "content": "x"}]}
        status, document = await _get(server, target, "POST", body)
        assert (status, type(document["error"])) == (404, kind)
        refused = await server.http.refuse(HttpRequest("POST", "", target=target), NotSupported("elsewhere"))
        assert isinstance(orjson.loads(refused.body)["error"], kind)


# Streams of requests that one group passes on to another


class _NearLink:
    def __init__(self, streams: OpenStreams, guest: TrioGuest, server: GroupServer) -> None:
        self.streams = streams
        self.guest = guest
        self.server = server

    async def call_once(self, method: str, *arguments: Any, **options: Any) -> Any:
        assert method == "push_to_stream"
        return await self.streams.push(*arguments, **options)

    async def stream(self, method: str, *arguments: Any) -> AsyncGenerator[Any]:
        assert (method, arguments) == ("open_stream", ())
        async with aclosing(self.streams.open(self.guest, self.server.grpc)) as replies:
            async for reply in replies:
                yield reply


@asynccontextmanager
async def _linked(root: Path, most: int = 8, **options: float) -> AsyncIterator[_NearLink]:
    guest, server = TrioGuest(), _server(root)
    async with asyncio.timeout(WAIT_SECONDS):
        await guest.start(server.run)
        try:
            yield _NearLink(OpenStreams("r1", most, **options), guest, server)
        finally:
            await guest.aclose()


def _numbered(number: int) -> bytes:
    return _infer("m", "b", number=number)


def _on_link(
    most: int = 8, **options: float
) -> Callable[[Callable[[_NearLink], Awaitable[None]]], Callable[..., None]]:
    def decorate(test: Callable[[_NearLink], Awaitable[None]]) -> Callable[..., None]:
        async def run(root: Path) -> None:
            async with _linked(root, most, **options) as link:
                await test(link)

        # Pytest would take the parameter of a wrapped function for a fixture.
        return lambda tmp_path: asyncio.run(run(tmp_path))

    return decorate


def _sending(*numbers: int) -> Callable[[], Awaitable[bytes | None]]:
    left = iter(numbers)

    async def next_request() -> bytes | None:
        number = next(left, None)
        return None if number is None else _numbered(number)

    return next_request


def _id(reply: Any) -> str:
    assert isinstance(reply, bytes)
    found: str = Reply.FromString(reply).infer_response.id
    return found


@_on_link()
async def test_the_requests_of_a_stream_are_answered_in_order(link: _NearLink) -> None:
    found = []
    async for reply in pass_stream(link, _sending(*range(40))):
        assert isinstance(reply, bytes)
        response = Reply.FromString(reply).infer_response
        found.append((response.id, float(np.frombuffer(response.raw_output_contents[0], np.float32)[0])))
    assert link.streams.keys == []
    assert found == [(str(number), number + 1.0) for number in range(40)]


@_on_link()
async def test_closing_the_replies_ends_the_stream_at_the_replica(link: _NearLink) -> None:
    given = [_numbered(0)]

    async def next_request() -> bytes | None:
        if not given:
            await asyncio.Event().wait()
        return given.pop()

    async with aclosing(pass_stream(link, next_request)) as replies:
        assert isinstance(await anext(replies), bytes)
        (key,) = link.streams.keys
    assert link.streams.keys == []
    assert replica_of(key) == "r1"
    assert not await link.call_once("push_to_stream", key, _numbered(1), is_last=False)


@_on_link()
async def test_a_stream_that_is_closed_before_its_first_request_is_removed(link: _NearLink) -> None:
    opened = link.stream("open_stream")
    key = await anext(opened)
    assert key in link.streams.keys
    await opened.aclose()
    assert link.streams.keys == []


@_on_link(silence_seconds=1)
async def test_a_silent_stream_ends_as_unavailable(link: _NearLink) -> None:
    async with aclosing(link.stream("open_stream")) as replies:
        assert await link.call_once("push_to_stream", await anext(replies), _numbered(0), is_last=False)
        reply, end = [reply async for reply in replies]
    assert _id(reply) == "0"
    assert (end.status, "no request or heartbeat for 1 s" in end.text) == (Status.UNAVAILABLE.value, True)


@_on_link()
async def test_heartbeats_keep_a_stream_without_requests_open(link: _NearLink) -> None:
    beats: list[Any] = []
    enough = asyncio.Event()
    push = link.streams.push
    given = [_numbered(0)]

    async def record(key: str, message: bytes | None, *, is_last: bool) -> bool:
        beats.append((message, is_last))
        if len(beats) > 2:
            enough.set()
        return await push(key, message, is_last=is_last)

    async def next_request() -> bytes | None:
        await enough.wait()
        return given.pop() if given else None

    link.streams.push = record  # type: ignore[method-assign]
    replies = [reply async for reply in pass_stream(link, next_request, beat_seconds=0.01)]
    assert len(replies) == 1
    assert beats[:3] == [(None, False)] * 3
    assert beats[-1] == (None, True)


@_on_link()
async def test_a_request_that_cannot_be_passed_on_ends_the_stream(link: _NearLink) -> None:
    found: list[str] = []
    push = link.streams.push
    answered = asyncio.Event()

    async def fail_second(key: str, message: bytes | None, *, is_last: bool) -> bool:
        if message == _numbered(1):
            await answered.wait()
            raise NotReady("the connection is broken")
        return await push(key, message, is_last=is_last)

    async def receive() -> None:
        async for reply in pass_stream(link, _sending(0, 1, 2)):
            found.append(_id(reply))
            answered.set()

    link.streams.push = fail_second  # type: ignore[method-assign]
    with pytest.raises(NotReady, match="the connection is broken"):
        await receive()
    assert link.streams.keys == []
    assert found == ["0"]


@_on_link()
async def test_a_request_that_reaches_another_replica_ends_the_stream(link: _NearLink) -> None:
    # Ray sends no more calls to a replica that is being replaced, though its streams are still open.
    other = OpenStreams("r2", 8)

    async def next_request() -> bytes | None:
        link.streams = other
        return _numbered(0)

    with pytest.raises(NotReady, match="restart the stream"):
        async with aclosing(pass_stream(link, next_request)) as replies:
            await anext(replies)


@_on_link()
async def test_requests_that_break_off_end_the_stream_with_the_reason(link: _NearLink) -> None:
    given = [_numbered(0)]

    async def next_request() -> bytes | None:
        if not given:
            raise NotReady("the client's door has ended")
        return given.pop()

    reply, end = [reply async for reply in answer_stream(link.guest, link.server.grpc, next_request)]
    assert _id(reply) == "0"
    assert end == (b"", Status.UNAVAILABLE.value, "the client's door has ended", ())


@_on_link(1)
async def test_streams_beyond_the_limit_are_refused_until_one_ends(link: _NearLink) -> None:
    async with aclosing(link.stream("open_stream")) as first:
        assert isinstance(await anext(first), str)
        (refused,) = [reply async for reply in pass_stream(link, _sending(0))]
    assert not isinstance(refused, bytes)
    assert refused.status == Status.RESOURCE_EXHAUSTED.value
    assert "half of the max_ongoing_requests" in refused.text
    (reply,) = [reply async for reply in pass_stream(link, _sending(0))]
    assert _id(reply) == "0"
