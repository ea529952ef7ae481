from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http

from ovmstrio.core.tensor import Array
from tests.support import ir
from tests.support.served_in_thread import ServedInThread, serving_in_thread

Infer = Callable[..., dict[str, Array]]

ROUNDS = 10


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedInThread]:
    root = tmp_path_factory.mktemp("models")
    entries = []
    for name, explicit in (("stateful", False), ("explicit", True)):
        base = ir.save(ir.lstm(explicit=explicit), root, name)
        plugin = {"INFERENCE_PRECISION_HINT": "f32"}
        entries.append({"name": name, "base_path": str(base), "stateful": not explicit, "plugin_config": plugin})
    config = root / "config.json"
    config.write_text(json.dumps({"model_config_list": [{"config": entry} for entry in entries]}))
    with serving_in_thread(config_path=config) as running:
        yield running


@pytest.fixture(params=["grpc", "rest"])
def infer(server: ServedInThread, request: pytest.FixtureRequest) -> Iterator[Infer]:
    if request.param == "grpc":
        import tritonclient.grpc as triton

        client = triton.InferenceServerClient(server.grpc)
    else:
        import tritonclient.http as triton

        client = triton.InferenceServerClient(server.http)

    def call(model: str, inputs: dict[str, Array], **options: Any) -> dict[str, Array]:
        tensors = []
        for name, array in inputs.items():
            tensor = triton.InferInput(name, array.shape, "FP32")
            tensor.set_data_from_numpy(array)
            tensors.append(tensor)
        result = client.infer(model, tensors, **options)
        names = ["y", "sequence_id"] if model == "stateful" else ["y", "next_hidden", "next_cell"]
        return {name: result.as_numpy(name) for name in names}

    yield call
    client.close()


def test_stateful_lstm_agrees_with_explicit_states(server: ServedInThread, infer: Infer) -> None:
    random = np.random.default_rng(11)
    states = {number: np.zeros((2, 1, 8), np.float32) for number in (1, 2, 3)}
    for turn in range(ROUNDS):
        for number in map(int, random.permutation([1, 2, 3])):
            x = random.normal(size=(1, 4)).astype(np.float32)
            expected = infer("explicit", {"x": x, "hidden": states[number][0], "cell": states[number][1]})
            states[number] = np.stack([expected["next_hidden"], expected["next_cell"]])
            found = infer(
                "stateful", {"x": x}, sequence_id=number, sequence_start=turn == 0, sequence_end=turn == ROUNDS - 1
            )
            np.testing.assert_array_equal(found["y"], expected["y"])
            assert found["sequence_id"].tolist() == [number]
    assert server.ask("GET", "/v2/models/stateful/sequences").json() == {"sequences": []}


CLIENTS = 16
CALLS = 8


def _sample(server: ServedInThread, name: str) -> float:
    labels = re.escape('{name="m",version="1"}')
    (found,) = re.findall(rf"(?m)^{name}{labels} (\S+)$", server.ask("GET", "/metrics").text)
    return float(found)


def _values(client: int, call: int) -> np.ndarray[Any, Any]:
    rows = 1 + (client + call) % 2
    return np.full((rows, 10), 100 * client + call, np.float32)


def _call(server: ServedInThread, client: int) -> None:
    package, address = (tritonclient.grpc, server.grpc) if client % 4 else (tritonclient.http, server.http)
    with package.InferenceServerClient(address) as triton:
        for call in range(CALLS):
            values = _values(client, call)
            tensor = package.InferInput("b", list(values.shape), "FP32")
            tensor.set_data_from_numpy(values)
            np.testing.assert_array_equal(triton.infer("m", [tensor]).as_numpy("a"), values + 1)


def test_clients_of_triton_share_inferences_and_get_their_own_rows(tmp_path: Path) -> None:
    base = ir.save(ir.dummy(), tmp_path, "m")
    batching = '{"max_batch_size": 8, "batch_timeout_ms": 50}'
    with (
        serving_in_thread(model_name="m", model_path=base, batching=batching) as server,
        ThreadPoolExecutor(CLIENTS) as threads,
    ):
        for call in [threads.submit(_call, server, client) for client in range(CLIENTS)]:
            call.result()
        batches, requests = _sample(server, "ovmstrio_batch_size_count"), CLIENTS * CALLS
        rows = sum(_values(client, call).shape[0] for client in range(CLIENTS) for call in range(CALLS))
        assert _sample(server, "ovmstrio_batch_size_sum") == rows
        assert batches < requests
        assert _sample(server, "ovms_inference_time_us_count") == batches
        assert _sample(server, "ovmstrio_batch_wait_time_us_count") == requests
