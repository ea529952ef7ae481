from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import grpc
import numpy as np
import pytest
import trio

from ovmstrio.client.pipeline import PipelineClient
from tests.support.op_pipelines import EchoExecutor, serving_pipeline
from tests.support.waits import WAIT_SECONDS

ResultT = TypeVar("ResultT")


async def _ask(executor: EchoExecutor, work: Callable[[PipelineClient], ResultT]) -> ResultT:
    def connected(address: str) -> ResultT:
        client = PipelineClient()
        client.connect([address])
        try:
            return work(client)
        finally:
            client.release()

    async with serving_pipeline(executor) as running:
        return await trio.to_thread.run_sync(connected, running.grpc[0])


async def test_texts_arrays_and_lists_are_text() -> None:
    feed = {"a": "1", "b": np.array([1, 2]), "c": [1.5]}
    answer = await _ask(EchoExecutor(), lambda client: client.predict(feed, fetch=["a"], timeout=WAIT_SECONDS))
    assert list(answer.key) == ["a", "b", "c"]
    assert list(answer.value) == ["1", "array([1, 2])", "array([1.5])"]


@pytest.mark.parametrize(
    "dtype", ["int64", "float32", "int32", "float64", "int16", "float16", "uint16", "uint8", "int8", "bool"]
)
@pytest.mark.parametrize("as_bytes", [False, True])
async def test_tensors_keep_type_elements_and_offsets(dtype: str, *, as_bytes: bool) -> None:
    array = np.array([[1], [0], [1]], dtype)
    feed = {"x": array, "x.lod": [0, 1, 3]}
    options: dict[str, Any] = {"pack_tensor_format": True, "use_tensor_bytes": as_bytes}
    answer = await _ask(EchoExecutor(), lambda client: client.predict(feed, timeout=WAIT_SECONDS, **options))
    assert dict(zip(answer.key, answer.value, strict=True)) == {
        "x": repr(array),
        "x.lod": "array([0, 1, 3], dtype=int32)",
    }


async def test_log_id_and_client_address_are_fields_of_the_request() -> None:
    executor = EchoExecutor()

    def work(client: PipelineClient) -> None:
        client.predict({"x": "1", "logid": 5, "clientip": "10.0.0.1"}, timeout=WAIT_SECONDS)
        client.predict({"x": "1", "logid": 5}, log_id=7, timeout=WAIT_SECONDS)
        client.predict({"x": "1"}, timeout=WAIT_SECONDS, profile=True)

    await _ask(executor, work)
    assert [request.logid for request in executor.requests] == [5, 7, 0]
    assert executor.requests[0].clientip == "10.0.0.1"
    assert [request.keys for request in executor.requests] == [["x"], ["x"], ["x", "pipeline.profile"]]


async def test_concurrent_calls_have_their_own_answers() -> None:
    def work(client: PipelineClient) -> list[str]:
        futures = [client.predict({"x": str(number)}, asyn=True) for number in range(100)]
        return [future.result(WAIT_SECONDS).value[0] for future in futures]

    assert await _ask(EchoExecutor(), work) == [str(number) for number in range(100)]


async def test_calls_and_futures_have_timeouts() -> None:
    executor = EchoExecutor()
    executor.gate = trio.Event()

    def work(client: PipelineClient) -> None:
        with pytest.raises(grpc.RpcError) as raised:
            client.predict({"x": "1"}, timeout=0.1)
        assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        with pytest.raises(grpc.FutureTimeoutError):
            client.predict({"x": "1"}, asyn=True).result(0.05)

    await _ask(executor, work)


@pytest.mark.parametrize(
    ("feed", "options", "error"),
    [
        ([], {}, "feed must be dict"),
        ({"x": "1"}, {"fetch": "x"}, "fetch must be list"),
        ({"x": 5}, {}, "x: only str, list and np.ndarray"),
        ({"x": [1]}, {"pack_tensor_format": True}, "x: only str and np.ndarray"),
        ({"x": np.zeros(1, np.complex64)}, {"pack_tensor_format": True}, "complex64"),
    ],
    ids=["feed", "fetch", "number", "list", "complex"],
)
def test_values_that_cannot_be_sent_are_named(feed: Any, options: dict[str, Any], error: str) -> None:
    client = PipelineClient()
    with pytest.raises(RuntimeError, match="not connected"):
        client.predict({"x": "1"})
    with pytest.raises(ValueError, match="at least one endpoint"):
        client.connect([])
    client.connect("127.0.0.1:1")
    with pytest.raises(TypeError, match=error):
        client.predict(feed, **options)
    client.release()
