from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc

from ovmstrio.protocol.descriptors import message_class
from tests.support import ir
from tests.support.served_in_thread import ServedInThread, serving_in_thread
from tests.support.waits import WAIT_SECONDS

if TYPE_CHECKING:
    from collections.abc import Iterator

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
