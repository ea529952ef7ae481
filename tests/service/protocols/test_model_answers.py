from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from uuid import uuid4

import grpc
import numpy as np
import pytest
import tritonclient.grpc

from ovmstrio.encoding.messages import message_class
from tests.support import ir
from tests.support.served_in_thread import ServedInThread, serving_in_thread
from tests.support.waits import WAIT_SECONDS

LARGE = 1_000_000
TOO_LARGE = 100_000_000
METHOD = "/inference.GRPCInferenceService/ModelInfer"
REFUSAL = "400000000 bytes, the limit is 67108864"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedInThread]:
    """Serve ``ones``, whose input is the size of its output, and ``large``, which adds one to a million numbers."""
    folder = tmp_path_factory.mktemp("large")
    models = {"ones": ir.ones(), "large": ir.dummy((1, LARGE))}
    entries = [{"name": name, "base_path": str(ir.save(model, folder, name))} for name, model in models.items()]
    config = folder / "config.json"
    config.write_text(json.dumps({"model_config_list": [{"config": entry} for entry in entries]}))
    with serving_in_thread(config_path=config) as running:
        yield running


def _infer_ones(server: ServedInThread, count: int) -> bytes:
    make = message_class("inference.ModelInferRequest")
    inputs = [{"name": "count", "datatype": "INT64", "shape": [1]}]
    request = make(model_name="ones", inputs=inputs, raw_input_contents=[count.to_bytes(8, "little")])
    with grpc.insecure_channel(server.grpc, [("grpc.max_receive_message_length", -1)]) as channel:
        answer: bytes = channel.unary_unary(METHOD)(request.SerializeToString(), timeout=WAIT_SECONDS)
    return answer


def _kserve(count: int, **more: Any) -> dict[str, Any]:
    return {"inputs": [{"name": "count", "shape": [1], "datatype": "INT64", "data": [count]}], **more}


def test_an_answer_above_the_limit_is_refused_over_grpc(server: ServedInThread) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        _infer_ones(server, TOO_LARGE)
    error: Any = refused.value
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert REFUSAL in error.details()
    assert len(_infer_ones(server, 16_000_000)) > 64_000_000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v2/models/ones/infer", _kserve(TOO_LARGE)),
        ("/v2/models/ones/infer", _kserve(TOO_LARGE, parameters={"binary_data_output": True})),
        ("/v1/models/ones:predict", {"inputs": {"count": [TOO_LARGE]}}),
    ],
    ids=["kserve", "kserve binary", "tensorflow"],
)
def test_an_answer_above_the_limit_is_refused_over_rest(server: ServedInThread, path: str, body: Any) -> None:
    answer = server.ask("POST", path, json=body)
    assert answer.status_code == 413
    assert REFUSAL in answer.text


def test_concurrent_unary_and_streamed_calls_get_their_own_large_answers(server: ServedInThread) -> None:
    answers: SimpleQueue[Any] = SimpleQueue()
    with tritonclient.grpc.InferenceServerClient(server.grpc) as client, ThreadPoolExecutor(6) as pool:
        given = [_full(number) for number in range(6)]
        client.start_stream(callback=lambda result, error: answers.put(error or result))
        for tensor in given:
            client.async_stream_infer("large", [tensor])
        unary = [*pool.map(lambda tensor: client.infer("large", [tensor], client_timeout=WAIT_SECONDS), given)]
        streamed = [answers.get(timeout=WAIT_SECONDS) for _ in given]
        client.stop_stream()
    for results in (unary, streamed):
        for number, result in enumerate(results):
            assert (result.as_numpy("a") == np.full((1, LARGE), number + 1, np.float32)).all()


def _full(number: int) -> tritonclient.grpc.InferInput:
    tensor = tritonclient.grpc.InferInput("b", [1, LARGE], "FP32")
    tensor.set_data_from_numpy(np.full((1, LARGE), number, np.float32))
    return tensor


BUCKETS = {"batch": [4], "columns": {"sizes": [8], "inputs": {"b": 1}}}
VALUES = np.arange(6, dtype=np.float32).reshape(2, 3)


def _write(folder: Path, **buckets: Any) -> Path:
    ir.save(ir.dynamic(), folder, "m")
    node = {
        "name": "node",
        "model_name": "m",
        "type": "DL model",
        "inputs": [{"b": {"node_name": "request", "data_item": "x"}}],
        "outputs": [{"data_item": "a", "alias": "a"}],
    }
    output = {"y": {"node_name": "node", "data_item": "a"}}
    document = {
        "model_config_list": [{"config": {"name": "m", "base_path": "m", "shape_buckets": buckets}}],
        "pipeline_config_list": [{"name": "p", "inputs": ["x"], "nodes": [node], "outputs": [output]}],
    }
    config = folder / "config.json"
    config.write_text(json.dumps(document))
    return config


def _by_triton(server: ServedInThread, name: str, model_input: str, output: str) -> Any:
    from tritonclient.grpc import InferenceServerClient, InferInput

    tensor = InferInput(model_input, list(VALUES.shape), "FP32")
    tensor.set_data_from_numpy(VALUES)
    with InferenceServerClient(server.grpc) as triton:
        return triton.infer(name, [tensor], client_timeout=60).as_numpy(output)


def _by_shared_memory(server: ServedInThread) -> Any:
    from tritonclient.grpc import InferenceServerClient, InferInput, InferRequestedOutput
    from tritonclient.utils import shared_memory

    key = f"/ovmstrio-{uuid4().hex}"
    region = shared_memory.create_shared_memory_region("r", key, 2 * VALUES.nbytes)
    try:
        shared_memory.set_shared_memory_region(region, [VALUES])
        tensor, output = InferInput("b", list(VALUES.shape), "FP32"), InferRequestedOutput("a")
        tensor.set_shared_memory("r", VALUES.nbytes)
        output.set_shared_memory("r", VALUES.nbytes, offset=VALUES.nbytes)
        with InferenceServerClient(server.grpc) as triton:
            triton.register_system_shared_memory("r", key, 2 * VALUES.nbytes)
            triton.infer("m", [tensor], outputs=[output], client_timeout=60)
            triton.unregister_system_shared_memory("r")
        return shared_memory.get_contents_as_numpy(region, np.float32, VALUES.shape, offset=VALUES.nbytes).copy()
    finally:
        shared_memory.destroy_shared_memory_region(region)


def test_answers_over_all_apis_have_no_padding_and_padding_is_counted(tmp_path: Path) -> None:
    with serving_in_thread(config_path=_write(tmp_path, **BUCKETS), allow_shared_memory=True) as server:
        predicted = server.ask("POST", "/v1/models/m:predict", json={"inputs": VALUES.tolist()})
        kserve = {"name": "b", "shape": VALUES.shape, "datatype": "FP32", "data": VALUES.tolist()}
        inferred = server.ask("POST", "/v2/models/m/infer", json={"inputs": [kserve]})
        refused = server.ask("POST", "/v1/models/m:predict", json={"inputs": [[0] * 9]})
        found = [
            predicted.json()["outputs"],
            np.reshape(inferred.json()["outputs"][0]["data"], inferred.json()["outputs"][0]["shape"]),
            _by_triton(server, "m", "b", "a"),
            _by_triton(server, "p", "x", "y"),
            _by_shared_memory(server),
        ]
        metrics = server.ask(
            "GET", "/metrics?match[]=ovmstrio_bucketed_inferences&match[]=ovmstrio_padded_elements"
        ).text
    for each in found:
        np.testing.assert_array_equal(each, VALUES + 1)
    assert refused.status_code == 400
    assert "at most 8 in dimension 1, the largest of the buckets 8 of 'columns'" in refused.text
    counted = {
        re.sub(r'_total{.*(?:fit|part)="(\w+)".*', r" \1", key): float(number)
        for key, number in re.findall(r"^(ovmstrio\S+) (\S+)$", metrics, re.MULTILINE)
    }
    assert counted["ovmstrio_bucketed_inferences padded"] == len(found)
    assert counted["ovmstrio_padded_elements request"] == len(found) * 6
    assert counted["ovmstrio_padded_elements padding"] == len(found) * 26
