from __future__ import annotations

import json
import math
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import trio

from ovmstrio.config.specs import OpPipelineSpec, ServableSpec
from ovmstrio.core.request import ServableMetadata
from ovmstrio.encoding.messages import METHOD, REQUEST, RESPONSE
from ovmstrio.ops.messages import PipelineRequest, PipelineResponse
from ovmstrio.ops.op_service import OpService
from ovmstrio.ops.settings import PipelineSettings
from tests.service.protocols.kserve.grpc.servers import RecordedCalls, serving_grpc
from tests.support.api_clients import call, with_channel
from tests.support.fetched_samples import unpack_original
from tests.support.op_pipelines import EchoExecutor, serving_pipeline
from tests.support.waits import WAIT_SECONDS, until_async

RESPONSE_NAME = RESPONSE.DESCRIPTOR.full_name
ORIGINAL = Path(__file__).parents[2] / "support" / "paddle_serving_client.py"


async def ask(address: str, request: Any, **options: Any) -> Any:
    return await call(address, METHOD, request, RESPONSE_NAME, **options)


@pytest.fixture
def executor() -> EchoExecutor:
    return EchoExecutor()


@pytest.fixture
async def address(executor: EchoExecutor) -> AsyncIterator[str]:
    async with serving_pipeline(executor) as running:
        yield running.grpc[0]


async def test_all_fields_of_request_and_answer_are_passed(executor: EchoExecutor, address: str) -> None:
    request = REQUEST(key=["x"], value=["1"], name="uci", method="m", logid=7, clientip="10.0.0.1")
    answer = await ask(address, request)
    assert (answer.err_no, list(answer.key), list(answer.value)) == (0, ["x"], ["1"])
    (seen,) = executor.requests
    assert (seen.name, seen.method, seen.logid, seen.clientip) == ("uci", "m", 7, "10.0.0.1")
    assert executor.deadlines[0] < math.inf


async def test_the_older_message_layout_is_accepted(executor: EchoExecutor, address: str) -> None:
    data = b"\x0a\x01x\x12\x011\x1a\x03uci\x22\x01m\x28\x07\x32\x041.23"
    answer = await ask(address, data)
    assert list(answer.value) == ["1"]
    (seen,) = executor.requests
    assert (seen.name, seen.method, seen.logid, seen.clientip) == ("uci", "m", 7, "1.23")


async def test_a_missing_client_address_is_that_of_the_connection(executor: EchoExecutor, address: str) -> None:
    await ask(address, REQUEST())
    assert executor.requests[0].clientip == "127.0.0.1"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (METHOD, REQUEST(name="uci", key=["x"], value=["1"]).SerializeToString() + b"\x1a\x01\xff"),
        (METHOD, b"\x0a\x01x\x12\x011\x1a\x03uci\x22\x01m\x28\x07\x08\xff"),
        ("/inference.GRPCInferenceService/ModelInfer", b"\x0a\x03uci\xff"),
    ],
)
async def test_a_request_beyond_the_queue_is_refused_undecoded(path: str, body: bytes) -> None:
    executor = EchoExecutor()
    executor.gate = trio.Event()

    def work(channel: grpc.Channel) -> list[tuple[grpc.StatusCode, str]]:
        held = channel.unary_unary(METHOD).future(REQUEST(name="uci").SerializeToString(), timeout=WAIT_SECONDS)
        trio.from_thread.run(executor.arrived.wait)
        ends = []
        for _ in range(2):
            with pytest.raises(grpc.RpcError) as raised:
                channel.unary_unary(path)(body, timeout=WAIT_SECONDS)
            ends.append((raised.value.code(), raised.value.details()))
            trio.from_thread.run_sync(executor.gate.set)
            held.result()
        return ends

    async with serving_pipeline(executor, max_concurrency=1, max_queue=0) as running:
        refused, read = await with_channel(running.grpc[0], work)
    assert refused[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "the server has 1 calls under way and 0 waiting" in refused[1]
    assert read[0] is grpc.StatusCode.INVALID_ARGUMENT
    assert len(executor.requests) == 1


async def test_an_answer_that_cannot_be_serialised_is_error_8000(executor: EchoExecutor, address: str) -> None:
    executor.answer = PipelineResponse(2**40, "text")
    answer = await ask(address, REQUEST())
    assert answer.err_no == 8000
    assert answer.err_msg.startswith("rpc package error: ")


async def test_a_cancelled_call_is_cancelled_in_the_pipeline(executor: EchoExecutor, address: str) -> None:
    executor.gate = trio.Event()

    def work(channel: grpc.Channel) -> None:
        future = channel.unary_unary(METHOD).future(REQUEST(logid=7).SerializeToString())
        trio.from_thread.run(executor.arrived.wait)
        future.cancel()
        trio.from_thread.run(until_async, lambda: executor.cancelled)

    await with_channel(address, work)
    assert [each.logid for each in executor.cancelled] == [7]


async def test_a_drain_lets_running_requests_finish() -> None:
    executor = EchoExecutor()
    executor.gate = trio.Event()
    answers: list[Any] = []
    async with serving_pipeline(executor) as running, trio.open_nursery() as nursery:

        async def one() -> None:
            answers.append(await ask(running.grpc[0], REQUEST(key=["x"], value=["1"])))

        nursery.start_soon(one)
        await executor.arrived.wait()
        running.drain()
        await executor.closed.wait()
        assert not running.plane.readiness().ready
        executor.gate.set()
    assert [list(answer.value) for answer in answers] == [["1"]]


async def test_the_client_of_paddle_serving_is_served(tmp_path: Path) -> None:
    home = str(unpack_original(tmp_path))
    async with serving_pipeline(EchoExecutor()) as running:
        command = [sys.executable, str(ORIGINAL), home, running.grpc[0]]
        done = await trio.run_process(command, capture_stdout=True, stderr=-3)
    answers = json.loads(done.stdout)
    assert answers["text"] == [0, "", ["x"], ["1,2"]]
    assert answers["array"][3] == ["array([[0., 1.],\n       [2., 3.]], dtype=float32)"]
    assert answers["bytes_tensor"][3] == ["array([[0, 1, 2],\n       [3, 4, 5]])"]
    assert answers["lod"][2] == ["x", "x.lod"]
    assert answers["string_tensor"][3] == ["abc"]
    assert answers["int16"][3] == ["array([[1, 0],\n       [3, 1]], dtype=int16)"]
    assert answers["bool"][3] == ["array([[ True, False],\n       [ True,  True]])"]
    assert all(answer[0] == 0 for name, answer in answers.items() if name != "async")
    assert answers["async"] == [[str(number)] for number in range(100)]


async def test_overload_is_resource_exhausted(executor: EchoExecutor, address: str) -> None:
    executor.answer = PipelineResponse(3000, "too many requests wait", is_overload=True)
    with pytest.raises(grpc.RpcError) as raised:
        await ask(address, REQUEST())
    assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert raised.value.details() == "too many requests wait"


@pytest.mark.parametrize("field", ["key", "value", "tensors"])
async def test_a_request_has_at_most_16384_members(field: str) -> None:
    item = {} if field == "tensors" else ""
    async with serving_pipeline(EchoExecutor()) as running:
        await ask(running.grpc[0], REQUEST(**{field: [item] * 16_384}))
        with pytest.raises(grpc.RpcError) as caught:
            await ask(running.grpc[0], REQUEST(**{field: [item] * 16_385}))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == f"{field}: expected at most 16384, got 16385"


class _NamedPipeline(OpService):
    def __init__(self, entry: str, name: str) -> None:
        super().__init__(name, EchoExecutor(), None, PipelineSettings())
        self.metadata = ServableMetadata(entry, "test", (), ())
        self.name = name

    async def answer(self, request: PipelineRequest, deadline: float) -> PipelineResponse:
        del deadline
        await trio.lowlevel.checkpoint()
        return PipelineResponse(int("".join(request.values) or 0), "", ["entry"], [self.metadata.name])

    async def aclose(self) -> None:
        pass


@asynccontextmanager
async def _serving(entries: dict[str, str], root: str = "", **options: Any) -> AsyncIterator[str]:
    """Serve pipelines by entry and name of their service, and yield the address."""

    async def load(spec: ServableSpec, _version: int, _directory: Path) -> _NamedPipeline:
        return _NamedPipeline(spec.name, entries[spec.name])

    specs = [OpPipelineSpec(name=name, base_path=Path.cwd()) for name in entries]
    async with serving_grpc(load, specs, root=root, **options) as serving:
        yield serving.address


TWO = {"first": "first", "second": "uci"}


@pytest.mark.parametrize(
    ("entries", "name", "root", "answered"),
    [
        (TWO, "first", "", "first"),
        (TWO, "second", "", "second"),
        (TWO, "uci", "", "second"),
        (TWO, "", "first", "first"),
        ({"first": "uci"}, "", "", "first"),
        ({"first": ""}, "", "", "first"),
    ],
)
async def test_the_name_of_a_request_selects_the_pipeline(
    entries: dict[str, str], name: str, root: str, answered: str
) -> None:
    async with _serving(entries, root) as address:
        answer = await _ask_entry(address, name)
    assert (answer.err_no, list(answer.value)) == (0, [answered])


@pytest.mark.parametrize(
    ("entries", "name", "root"),
    [(TWO, "", ""), (TWO, "", "gone"), (TWO, "other", "first"), ({"first": "uci"}, "x", "")],
)
async def test_an_unknown_pipeline_name_is_error_3002(entries: dict[str, str], name: str, root: str) -> None:
    async with _serving(entries, root) as address:
        answer = await _ask_entry(address, name)
    assert (answer.err_no, answer.err_msg) == (3002, "Failed to inference: Service name error.")


async def _ask_entry(address: str, name: str, *values: str) -> Any:
    return await call(address, METHOD, REQUEST(name=name, value=values), RESPONSE_NAME)


async def test_a_server_without_pipelines_does_not_have_the_service() -> None:
    async with _serving({}) as address:
        with pytest.raises(grpc.RpcError) as raised:
            await _ask_entry(address, "")
    assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_each_call_of_a_pipeline_is_one_event() -> None:
    ends = RecordedCalls()
    async with _serving({"first": "uci"}, observers=[ends]) as address:
        for number in ("0", "6000", "123"):
            await _ask_entry(address, "uci", number)
    seen = [(event.name, event.api_interface.api, event.api_interface.interface, event.method) for event in ends.events]
    assert seen == [("first", "PaddleServing", "gRPC", "inference")] * 3
    assert [event.code for event in ends.events] == ["OK", "TIMEOUT", "PRODUCT_ERROR"]
    assert all(event.received and event.sent for event in ends.events)
