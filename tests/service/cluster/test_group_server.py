"""Servers of groups that call each other without Ray, over gRPC and HTTP."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import trio

from ovmstrio.cluster.ray.group_server import GroupServer, ReplicaPlan
from ovmstrio.cluster.ray.grpc_door import GrpcAnswer
from ovmstrio.cluster.ray.grpc_paths import INFER
from ovmstrio.cluster.ray.http_door import HttpHead
from ovmstrio.cluster.ray.linked_services import answer_linked, describe_linked
from ovmstrio.config.specs import ModelSpec, NodeInput, NodeOutput, PipelineNode, PipelineSpec
from ovmstrio.core.errors import ConfigError, NotReady, NotSupported, ServerError
from ovmstrio.core.http import HttpRequest
from ovmstrio.protocol.descriptors import message_class
from ovmstrio.work.messages.error_codec import decode_error, encode_error
from tests.support import ir
from tests.support.callers import LOCAL

Request = message_class("inference.ModelInferRequest")
Response = message_class("inference.ModelInferResponse")


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


@asynccontextmanager
async def _two_groups(root: Path) -> AsyncIterator[tuple[GroupServer, GroupServer]]:
    ir.save(ir.dummy(), root, "m")
    settings = {"trial_load": "off", "file_system_poll_wait_seconds": 0}
    far = GroupServer(ReplicaPlan("far", (ModelSpec(name="m", base_path=root / "m"),), settings=settings), _unreachable)

    answers: dict[str, Any] = {"infer_linked": answer_linked, "describe_linked": describe_linked}

    async def ask(group: str, method: str, *arguments: Any) -> Any:
        assert group == "far"
        try:
            return await answers[method](far.plane, *arguments)
        except ServerError as error:
            raise decode_error(orjson.loads(orjson.dumps(encode_error(error)))) from None

    plan = ReplicaPlan("near", (_pipeline("m"),), called={"m": "far"}, settings=settings)
    async with _serving(far), _serving(GroupServer(plan, ask)) as near:
        yield far, near


def _infer(name: str, tensor: str, shape: tuple[int, ...] = (1, 10)) -> bytes:
    message = Request(model_name=name, id="7")
    message.inputs.add(name=tensor, datatype="FP32", shape=shape)
    message.raw_input_contents.append(np.ones(shape, np.float32).tobytes())
    data: bytes = message.SerializeToString()
    return data


def _values(answer: GrpcAnswer) -> list[float]:
    assert answer.status == 0, answer.text
    found: list[float] = np.frombuffer(Response.FromString(answer.data).raw_output_contents[0], np.float32).tolist()
    return found


async def _get(server: GroupServer, target: str, method: str = "GET", body: Any = None) -> tuple[int, Any]:
    data = b"" if body is None else orjson.dumps(body)
    head: HttpHead = await server.http.answer(HttpRequest(method, "", "", (), data, LOCAL, target))
    return head.status, orjson.loads(head.body) if head.body else None


@asynccontextmanager
async def _one_group(root: Path, **settings: Any) -> AsyncIterator[GroupServer]:
    ir.save(ir.dummy(), root, "m")
    specs = (ModelSpec(name="m", base_path=root / "m"),)
    plan = ReplicaPlan("g", specs, settings={"trial_load": "off", **settings})
    async with _serving(GroupServer(plan, _unreachable)) as server:
        yield server


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

    plan = ReplicaPlan("near", (_pipeline("m"),), called={"m": "far"}, settings={"file_system_poll_wait_seconds": 0})
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
    async with _one_group(tmp_path) as server:
        status, document = await _get(server, target, method)
        assert status == 501
        assert "`ovms deploy ray` changes what is served" in document["error"]


async def test_a_replica_that_cannot_load_does_not_start(tmp_path: Path) -> None:
    plan = ReplicaPlan("g", (ModelSpec(name="m", base_path=tmp_path / "nowhere"),))
    with pytest.raises(ExceptionGroup) as raised:
        async with _serving(GroupServer(plan, _unreachable)):
            raise AssertionError
    assert raised.group_contains(ConfigError, match="the model's path does not exist")


async def test_messages_and_bodies_above_the_limit_are_refused(tmp_path: Path) -> None:
    async with _one_group(tmp_path, max_message_size=1024) as server:
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
    async with _one_group(tmp_path, openai_errors=form) as server:
        target, body = "/v3/chat/completions", {"model": "none", "messages": [{"role": "user", "content": "x"}]}
        status, document = await _get(server, target, "POST", body)
        assert (status, type(document["error"])) == (404, kind)
        refused = await server.http.refuse(HttpRequest("POST", "", target=target), NotSupported("elsewhere"))
        assert isinstance(orjson.loads(refused.body)["error"], kind)
