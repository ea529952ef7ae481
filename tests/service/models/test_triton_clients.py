from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

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
