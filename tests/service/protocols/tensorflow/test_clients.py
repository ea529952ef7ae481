from __future__ import annotations

import io
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.support import ir
from tests.support.servables import EXACT
from tests.support.served_in_thread import ServedInThread, serving_in_thread

ovmsclient = pytest.importorskip("ovmsclient")
errors = pytest.importorskip("ovmsclient.tfs_compat.base.errors")

SEQUENCE_START = 1
SEQUENCE_END = 2
VALUES = np.array([[1, 2.5, -3], [4, 5, 6]], np.float32)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedInThread]:
    """Serve models with and without sequences; ``dummy`` has two versions."""
    folder = tmp_path_factory.mktemp("models")
    models: dict[str, tuple[Any, dict[str, Any]]] = {
        "dummy": (ir.dummy([-1, 3]), {"model_version_policy": {"all": {}}}),
        "two": (ir.sum_of_two((2, 2)), {}),
        "strings": (ir.string_passthrough(), {}),
        "image": (ir.image_passthrough(batch=-1), {}),
        "stateful_model": (ir.accumulator(), {"stateful": True}),
    }
    entries = [
        {"name": name, "base_path": str(ir.save(model, folder, name)), "plugin_config": EXACT, **options}
        for name, (model, options) in models.items()
    ]
    ir.save(ir.dummy([-1, 3]), folder, "dummy", version=2)
    config = folder / "config.json"
    config.write_text(json.dumps({"model_config_list": [{"config": entry} for entry in entries]}))
    with serving_in_thread(config_path=config) as running:
        yield running


@pytest.fixture(params=["grpc", "http"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def client(server: ServedInThread, transport: str) -> Iterator[Any]:
    if transport == "grpc":
        made = ovmsclient.make_grpc_client(server.grpc)
        yield made
        made.channel.close()
    else:
        made = ovmsclient.make_http_client(server.http)
        yield made
        made.session.close()


def test_predictions_are_arrays_by_output(client: Any) -> None:
    np.testing.assert_array_equal(client.predict({"b": VALUES}, "dummy"), VALUES + 1)
    np.testing.assert_array_equal(client.predict({"b": VALUES.tolist()}, "dummy", model_version=1), VALUES + 1)
    x, y = np.arange(4, dtype=np.float32).reshape(2, 2), np.full((2, 2), 0.5, np.float32)
    found = client.predict({"x": x, "y": y}, "two")
    assert set(found) == {"difference", "sum"}
    np.testing.assert_array_equal(found["sum"], x + y)
    np.testing.assert_array_equal(found["difference"], x - y)
    given = np.array([[np.nan, np.inf, -np.inf]], np.float32)
    np.testing.assert_array_equal(client.predict({"b": given}, "dummy"), given)


def test_strings_and_images_are_accepted(client: Any, transport: str) -> None:
    found = client.predict({"strings": [b"a", "ü".encode()]}, "strings").tolist()
    assert found == ([b"a", "ü".encode()] if transport == "grpc" else ["a", "ü"])
    pixels = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "BMP")
    images = [file.getvalue() + b"\1"] * 2
    np.testing.assert_array_equal(client.predict({"image": images}, "image"), [pixels[..., ::-1]] * 2)


def test_metadata_and_status_have_all_versions(client: Any) -> None:
    assert client.get_model_metadata("two") == {
        "model_version": 1,
        "inputs": {name: {"dtype": "DT_FLOAT", "shape": [2, 2]} for name in ("x", "y")},
        "outputs": {name: {"dtype": "DT_FLOAT", "shape": [2, 2]} for name in ("difference", "sum")},
    }
    assert client.get_model_metadata("dummy")["model_version"] == 2
    assert client.get_model_metadata("dummy", model_version=1)["inputs"]["b"]["shape"] == [-1, 3]
    healthy = {"state": "AVAILABLE", "error_code": 0, "error_message": "OK"}
    assert client.get_model_status("dummy") == {1: healthy, 2: healthy}
    assert client.get_model_status("dummy", model_version=1) == {1: healthy}


def test_errors_have_their_classes(client: Any, transport: str) -> None:
    given = np.zeros((1, 3), np.float32)
    unknown = "Pipeline with requested name is not found" if transport == "grpc" else "Model with requested name"
    with pytest.raises(errors.ModelNotFoundError, match=unknown):
        client.predict({"b": given}, "nobody")
    with pytest.raises(errors.ModelNotFoundError, match="Model with requested version is not found"):
        client.predict({"b": given}, "dummy", model_version=7)
    with pytest.raises(errors.ModelNotFoundError, match="Model with requested name is not found"):
        client.get_model_status("nobody")
    with pytest.raises(errors.ModelNotFoundError, match="Model with requested version is not found"):
        client.get_model_metadata("dummy", model_version=7)
    with pytest.raises(errors.InvalidInputError, match="Invalid input shape"):
        client.predict({"b": given[:, :2]}, "dummy")
    with pytest.raises(errors.InvalidInputError, match="Missing input with specific name"):
        client.predict({"c": given}, "dummy")
    with pytest.raises(errors.InvalidInputError, match="Sequence ID has not been provided"):
        client.predict({"x": np.zeros((1, 2), np.float32)}, "stateful_model")


def _predict_step(client: Any, model: str, x: list[float], **special: int) -> Any:
    dtypes = {"sequence_id": np.uint64, "sequence_control_input": np.uint32}
    inputs = {name: np.array([value], dtypes[name]) for name, value in special.items()}
    return client.predict({"x": np.asarray([x], np.float32), **inputs}, model)


def _sum(client: Any, value: float, **special: int) -> tuple[float, int]:
    """Make one step of a sequence of the accumulator; return the sum and the id of the sequence."""
    found = _predict_step(client, "stateful_model", [value, value], **special)
    assert found["y"][0][0] == found["y"][0][1]
    return float(found["y"][0][0]), int(found["sequence_id"][0])


def test_concurrent_sequences_have_separate_sums_and_ids(client: Any) -> None:
    largest = 2**64 - 1
    _, own = _sum(client, 1, sequence_control_input=SEQUENCE_START, sequence_id=0)
    for identity in (500, largest):
        assert _sum(client, 10, sequence_control_input=SEQUENCE_START, sequence_id=identity) == (10, identity)
    _, other = _sum(client, 100, sequence_control_input=SEQUENCE_START)
    assert len({own, other, 500, largest}) == 4
    for identity, total in ((own, 3), (500, 12), (largest, 12), (other, 102)):
        assert _sum(client, 2, sequence_id=identity) == (total, identity)
        assert _sum(client, 1, sequence_id=identity, sequence_control_input=SEQUENCE_END) == (total + 1, identity)
    assert _sum(client, 7, sequence_id=500, sequence_control_input=SEQUENCE_START) == (7, 500)
    assert _sum(client, 1, sequence_id=500, sequence_control_input=SEQUENCE_END) == (8, 500)


def test_a_sequence_continues_over_kserve(server: ServedInThread, client: Any) -> None:
    assert _sum(client, 5, sequence_id=900, sequence_control_input=SEQUENCE_START) == (5, 900)
    inputs = [
        {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [6, 6]},
        {"name": "sequence_id", "datatype": "UINT64", "shape": [1], "data": [900]},
    ]
    answer = server.ask("POST", "/v2/models/stateful_model/infer", json={"inputs": inputs})
    assert answer.json()["outputs"][0]["data"] == [11, 11]
    assert _sum(client, 1, sequence_id=900, sequence_control_input=SEQUENCE_END) == (12, 900)


def test_the_configuration_has_the_status_of_each_model(server: ServedInThread) -> None:
    config = server.ask("GET", "/v1/config").json()
    assert set(config) == {"dummy", "two", "strings", "image", "stateful_model"}
    assert config["dummy"] == server.ask("GET", "/v1/models/dummy").json()
    assert server.ask("GET", "/v1/models/dummy:predict").status_code == 406
