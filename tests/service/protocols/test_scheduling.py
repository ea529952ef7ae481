"""Triton's request parameters ``timeout`` and ``priority``, sent by its clients."""

from __future__ import annotations

import json
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from tests.support import ir
from tests.support.served_in_thread import ServedInThread, serving_in_thread

PASSED = "the request's timeout of 1000 microseconds passed before its inference ended"
CLIENTS = pytest.mark.parametrize("client_type", [tritonclient.grpc, tritonclient.http])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedInThread]:
    """Serve ``batched``, whose batches run only when they are full, and ``plain``."""
    folder = tmp_path_factory.mktemp("scheduled")
    path = str(ir.save(ir.dummy((-1, 2)), folder, "model"))
    batching = {"max_batch_size": 2, "batch_timeout_ms": 3_600_000}
    entries = [{"name": "plain", "base_path": path}, {"name": "batched", "base_path": path, "batching": batching}]
    config = folder / "config.json"
    config.write_text(json.dumps({"model_config_list": [{"config": entry} for entry in entries]}))
    with serving_in_thread(config_path=config) as running:
        yield running


def _inputs(client_type: Any, rows: int = 1) -> list[Any]:
    given = client_type.InferInput("b", [rows, 2], "FP32")
    given.set_data_from_numpy(np.ones((rows, 2), np.float32))
    return [given]


def _address(server: ServedInThread, client_type: Any) -> str:
    return server.grpc if client_type is tritonclient.grpc else server.http


@CLIENTS
def test_a_request_that_waits_longer_than_its_timeout_is_refused(server: ServedInThread, client_type: Any) -> None:
    with client_type.InferenceServerClient(_address(server, client_type)) as client:
        with pytest.raises(InferenceServerException) as refused:
            client.infer("batched", _inputs(client_type), timeout=1000)
        assert PASSED in refused.value.message()
        assert refused.value.status() in {"StatusCode.DEADLINE_EXCEEDED", "504"}
        # It has left the queue: two rows are a batch of their own.
        result = client.infer("batched", _inputs(client_type, rows=2), timeout=60_000_000)
        assert result.as_numpy("a").tolist() == [[2, 2], [2, 2]]


@CLIENTS
@pytest.mark.parametrize("timeout", [None, 0, 60_000_000])
def test_a_request_without_a_timeout_or_with_a_long_one_is_answered(
    server: ServedInThread, client_type: Any, timeout: int | None
) -> None:
    with client_type.InferenceServerClient(_address(server, client_type)) as client:
        result = client.infer("plain", _inputs(client_type), timeout=timeout, priority=1)
        assert result.as_numpy("a").tolist() == [[2, 2]]


def test_timeouts_of_a_stream_fail_their_requests_alone(server: ServedInThread) -> None:
    answers: SimpleQueue[Any] = SimpleQueue()
    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: answers.put(str(error) if error else result.as_numpy("a").tolist()))
        client.async_stream_infer("batched", _inputs(tritonclient.grpc), timeout=1000)
        client.async_stream_infer("batched", _inputs(tritonclient.grpc, rows=2))
        client.stop_stream()
    assert PASSED in answers.get_nowait()
    assert answers.get_nowait() == [[2, 2], [2, 2]]


@pytest.mark.parametrize("value", ["5 s", 0.5, True, -1])
def test_a_timeout_of_another_type_belongs_to_user_code(server: ServedInThread, value: Any) -> None:
    tensor = {"name": "b", "shape": [1, 2], "datatype": "FP32", "data": [1, 1]}
    document = {"inputs": [tensor], "parameters": {"timeout": value, "priority": value}}
    answer = server.ask("POST", "/v2/models/plain/infer", json=document)
    assert (answer.status_code, answer.json()["outputs"][0]["data"]) == (200, [2, 2])
