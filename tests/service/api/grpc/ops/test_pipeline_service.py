"""``PipelineService`` as clients of gRPC find it."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
import trio

from ovmstrio.protocol.pipeline_messages import METHOD, REQUEST, RESPONSE
from ovmstrio.runtimes.ops.values import PipelineResponse
from tests.support.grpc_clients import call, with_channel
from tests.support.op_pipelines import EchoExecutor, serving_pipeline
from tests.support.original_package import unpack_original
from tests.support.waits import WAIT_SECONDS

RESPONSE_NAME = RESPONSE.DESCRIPTOR.full_name
ORIGINAL = Path(__file__).parents[4] / "support" / "original_client.py"


async def ask(address: str, request: Any, **options: Any) -> Any:
    """Make one call."""
    return await call(address, METHOD, request, RESPONSE_NAME, **options)


async def test_request_and_answer_travel_whole() -> None:
    """Every field arrives, and the answer comes back."""
    executor = EchoExecutor()
    async with serving_pipeline(executor) as running:
        request = REQUEST(key=["x"], value=["1"], name="uci", method="m", logid=7, clientip="10.0.0.1")
        answer = await ask(running.grpc[0], request)
    assert (answer.err_no, list(answer.key), list(answer.value)) == (0, ["x"], ["1"])
    (seen,) = executor.requests
    assert (seen.name, seen.method, seen.logid, seen.clientip) == ("uci", "m", 7, "10.0.0.1")
    assert executor.deadlines[0] < math.inf


async def test_older_layout_is_answered() -> None:
    """A request with the older field numbers means the same."""
    executor = EchoExecutor()
    data = b"\x0a\x01x\x12\x011\x1a\x03uci\x22\x01m\x28\x07\x32\x041.23"
    async with serving_pipeline(executor) as running:
        answer = await ask(running.grpc[0], data)
    assert list(answer.value) == ["1"]
    (seen,) = executor.requests
    assert (seen.name, seen.method, seen.logid, seen.clientip) == ("uci", "m", 7, "1.23")


async def test_missing_address_is_that_of_the_connection() -> None:
    """A client that does not say where it is gets the address that it calls from."""
    executor = EchoExecutor()
    async with serving_pipeline(executor) as running:
        await ask(running.grpc[0], REQUEST())
    assert executor.requests[0].clientip == "127.0.0.1"


@pytest.mark.parametrize(
    ("name", "asked", "code"), [("uci", "nope", 3002), ("uci", "", 0), (None, "x", 3002), (None, "", 0)]
)
async def test_service_name_must_fit(name: str | None, asked: str, code: int) -> None:
    """A wrong name is 3002, none at all is always right, and a nameless service has no right name."""
    async with serving_pipeline(EchoExecutor(), name) as running:
        answer = await ask(running.grpc[0], REQUEST(name=asked))
    assert answer.err_no == code


async def test_garbage_is_an_invalid_argument() -> None:
    """Bytes that are no request end the call with the status of a wrong argument."""
    async with serving_pipeline(EchoExecutor()) as running:
        with pytest.raises(grpc.RpcError) as raised:
            await ask(running.grpc[0], b"\xff\xff")
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (METHOD, REQUEST(name="uci", key=["x"], value=["1"]).SerializeToString() + b"\x1a\x01\xff"),
        (METHOD, b"\x0a\x01x\x12\x011\x1a\x03uci\x22\x01m\x28\x07\x08\xff"),
        ("/inference.GRPCInferenceService/ModelInfer", b"\x0a\x03uci\xff"),
    ],
)
async def test_a_request_beyond_the_queue_is_refused_undecoded(path: str, body: bytes) -> None:
    """By the name in it, in both layouts, and over KServe; what is wrong with it is told once there is a place."""
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


async def test_answer_that_cannot_be_packed_is_told() -> None:
    """A service that fills the answer with what it cannot hold is error 8000, and nothing hangs."""
    executor = EchoExecutor()
    executor.answer = PipelineResponse(2**40, "text")
    async with serving_pipeline(executor) as running:
        answer = await ask(running.grpc[0], REQUEST())
    assert answer.err_no == 8000
    assert answer.err_msg.startswith("rpc package error: ")


async def test_large_messages_pass() -> None:
    """20 MB go in and come out."""
    text = "x" * 20_000_000
    limits = [(f"grpc.max_{way}_message_length", -1) for way in ("send", "receive")]
    async with serving_pipeline(EchoExecutor()) as running:

        def work() -> Any:
            with grpc.insecure_channel(running.grpc[0], options=limits) as channel:
                method = channel.unary_unary(METHOD, REQUEST.SerializeToString, RESPONSE.FromString)
                return method(REQUEST(key=["x"], value=[text]), timeout=WAIT_SECONDS)

        answer = await trio.to_thread.run_sync(work)
    assert list(answer.value) == [text]


async def test_leaving_client_cancels_its_request() -> None:
    """A cancelled call is cancelled in the pipeline."""
    executor = EchoExecutor()
    executor.gate = trio.Event()
    async with serving_pipeline(executor) as running:

        def work(channel: grpc.Channel) -> None:
            future = channel.unary_unary(METHOD).future(b"")
            trio.from_thread.run(executor.arrived.wait)
            future.cancel()

        await with_channel(running.grpc[0], work)
        with trio.fail_after(WAIT_SECONDS):
            await executor.left.wait()


async def test_drain_answers_what_comes_and_finishes_what_runs() -> None:
    """A draining server closes its executor and lets the request that is worked on end."""
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


async def test_original_client_is_served(tmp_path: Path) -> None:
    """Paddle Serving's own client gets its answers: texts, tensors of every type, and a hundred calls at once."""
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


async def test_overload_is_a_status() -> None:
    """A request that is refused because too many wait ends with a status that clients know how to repeat."""
    executor = EchoExecutor()
    executor.answer = PipelineResponse(3000, "too many requests wait", is_overload=True)
    async with serving_pipeline(executor) as running:
        with pytest.raises(grpc.RpcError) as raised:
            await ask(running.grpc[0], REQUEST())
    assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert raised.value.details() == "too many requests wait"


@pytest.mark.parametrize("field", ["key", "value", "tensors"])
async def test_a_request_of_too_many_members_is_refused(field: str) -> None:
    """16,384 are accepted over gRPC as over HTTP, and one more is an invalid argument."""
    item = {} if field == "tensors" else ""
    async with serving_pipeline(EchoExecutor()) as running:
        await ask(running.grpc[0], REQUEST(**{field: [item] * 16_384}))
        with pytest.raises(grpc.RpcError) as caught:
            await ask(running.grpc[0], REQUEST(**{field: [item] * 16_385}))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == f"{field}: expected at most 16384, got 16385"
