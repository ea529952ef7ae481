"""An answer that is too large is refused before it is made, and one that is only large keeps nobody waiting."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import tritonclient.grpc

from ovmstrio.protocol.descriptors import message_class
from tests.support import ir
from tests.support.processes import serving
from tests.support.waits import worst_wait

pytestmark = pytest.mark.e2e

_LARGE = 1_000_000
_METHOD = "/inference.GRPCInferenceService/ModelInfer"


def _request(count: int) -> bytes:
    make = message_class("inference.ModelInferRequest")
    inputs = [{"name": "count", "datatype": "INT64", "shape": [1]}]
    raw = [count.to_bytes(8, "little")]
    message: bytes = make(model_name="ones", inputs=inputs, raw_input_contents=raw).SerializeToString()
    return message


def test_large_answers_are_refused_or_written_while_others_are_answered(tmp_path: Path) -> None:
    """400 MB through every door; then as much as may be, which is 64 MB as bytes, and 10 MB as text."""
    base = ir.save(ir.ones(), tmp_path, "ones")
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_config_list": [{"config": {"name": "ones", "base_path": str(base)}}]}))
    limits = [("grpc.max_receive_message_length", -1)]
    with serving("--config_path", str(config)) as server, grpc.insecure_channel(server.grpc, limits) as channel:
        infer = channel.unary_unary(_METHOD)
        with worst_wait(server) as seconds:
            with pytest.raises(grpc.RpcError) as refused:
                infer(_request(100_000_000), timeout=60)
            assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "400000000 bytes, the limit is 67108864" in refused.value.details()
            body = {"inputs": [{"name": "count", "shape": [1], "datatype": "INT64", "data": [100_000_000]}]}
            for path, asked in (
                ("/v2/models/ones/infer", body),
                ("/v2/models/ones/infer", body | {"parameters": {"binary_data_output": True}}),
                ("/v1/models/ones:predict", {"inputs": {"count": [100_000_000]}}),
            ):
                answer = httpx.post(server.rest + path, json=asked, timeout=60)
                assert answer.status_code == 413
                assert "400000000 bytes, the limit is 67108864" in answer.text
            assert len(infer(_request(16_000_000), timeout=60)) > 64_000_000
            body["inputs"][0]["data"] = [2_000_000]
            answer = httpx.post(f"{server.rest}/v2/models/ones/infer", json=body, timeout=60)
        # Read here: to parse it keeps the interpreter from whoever asks the server in this process.
        assert answer.json()["outputs"][0]["data"] == [1.0] * 2_000_000
        assert max(seconds) < 1
        code, output = server.stop()
    assert code == 0, output


def test_large_answers_of_calls_at_once_are_each_their_own(tmp_path: Path) -> None:
    """Over a connection, unary and on a stream: the outputs of one are not those of another that came after it."""
    base = ir.save(ir.dummy((1, _LARGE)), tmp_path, "large")
    answers: SimpleQueue[Any] = SimpleQueue()
    with (
        serving("--model_name", "large", "--model_path", str(base)) as server,
        tritonclient.grpc.InferenceServerClient(server.grpc) as client,
        ThreadPoolExecutor(6) as pool,
    ):
        given = [_full(number) for number in range(6)]
        client.start_stream(callback=lambda result, error: answers.put(error or result))
        for tensor in given:
            client.async_stream_infer("large", [tensor])
        unary = [*pool.map(lambda tensor: client.infer("large", [tensor], client_timeout=60), given)]
        streamed = [answers.get(timeout=60) for _ in given]
        client.stop_stream()
    for results in (unary, streamed):
        for number, result in enumerate(results):
            assert (result.as_numpy("a") == np.full((1, _LARGE), number + 1, np.float32)).all()


def _full(number: int) -> tritonclient.grpc.InferInput:
    tensor = tritonclient.grpc.InferInput("b", [1, _LARGE], "FP32")
    tensor.set_data_from_numpy(np.full((1, _LARGE), number, np.float32))
    return tensor
