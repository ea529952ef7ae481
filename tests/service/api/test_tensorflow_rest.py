"""TensorFlow Serving's REST API as clients see it: OVMS's own client, and plain HTTP with sequences."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.support import ir
from tests.support.processes import OvmsProcess, serving
from tests.support.servables import EXACT

pytestmark = pytest.mark.e2e

SEQUENCE_START = 1
SEQUENCE_END = 2
MAX_SEQUENCES = 3


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OvmsProcess]:
    """Run a server of models with and without sequences, as long as this module's tests last."""
    directory = tmp_path_factory.mktemp("models")
    models = {
        "dummy": ir.dummy([-1, 3]),
        "two": ir.sum_of_two((2, 2)),
        "strings": ir.string_passthrough(),
        "image": ir.image_passthrough(batch=-1),
        "stateful_model": ir.accumulator(),
        "few_sequences": ir.accumulator(),
    }
    options: dict[str, dict[str, Any]] = {
        "stateful_model": {"stateful": True},
        "few_sequences": {"stateful": True, "max_sequence_number": MAX_SEQUENCES},
    }
    entries = [
        {
            "name": name,
            "base_path": str(ir.save(model, directory, name)),
            "plugin_config": EXACT,
            **options.get(name, {}),
        }
        for name, model in models.items()
    ]
    ir.save(ir.dummy([-1, 3]), directory, "dummy", version=2)
    entries[0]["model_version_policy"] = {"all": {}}
    config = directory / "config.json"
    config.write_text(json.dumps({"model_config_list": [{"config": entry} for entry in entries]}))
    with serving("--config_path", str(config)) as process:
        yield process


# OVMS's own client


@pytest.fixture
def client(server: OvmsProcess) -> Any:
    """Make OVMS's client for REST, where it is installed."""
    ovmsclient = pytest.importorskip("ovmsclient")
    made = ovmsclient.make_http_client(server.rest.removeprefix("http://"))
    yield made
    made.session.close()


def test_its_predictions_are_arrays(client: Any) -> None:
    """One output alone, several by name, from arrays, lists and numbers."""
    given = np.array([[1, 2.5, -3], [4, 5, 6]], np.float32)
    np.testing.assert_array_equal(client.predict({"b": given}, "dummy"), given + 1)
    np.testing.assert_array_equal(client.predict({"b": given.tolist()}, "dummy", model_version=1), given + 1)
    x, y = np.arange(4).reshape(2, 2), np.full((2, 2), 0.5)
    found = client.predict({"x": x, "y": y}, "two")
    assert set(found) == {"difference", "sum"}
    np.testing.assert_array_equal(found["sum"], x + y)
    np.testing.assert_array_equal(found["difference"], x - y)


def test_it_sends_numbers_that_json_does_not_have(client: Any) -> None:
    """They come back as they were."""
    given = np.array([[np.nan, np.inf, -np.inf]], np.float32)
    np.testing.assert_array_equal(client.predict({"b": given}, "dummy"), given)


def test_it_sends_texts_and_images(client: Any) -> None:
    """Bytes go encoded, and are decoded to pixels where the model takes numbers."""
    import io

    from PIL import Image

    assert client.predict({"strings": [b"a", "ü".encode()]}, "strings").tolist() == ["a", "ü"]
    pixels = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "BMP")
    found = client.predict({"image": [file.getvalue() + b"\1"] * 2}, "image")
    np.testing.assert_array_equal(found, [pixels[..., ::-1]] * 2)


def test_it_learns_what_is_served(client: Any) -> None:
    """Metadata and status have the forms that it reads."""
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


def test_it_tells_refusals_apart(client: Any) -> None:
    """Unknown names and versions from inputs that do not fit."""
    errors = pytest.importorskip("ovmsclient.tfs_compat.base.errors")
    given = np.zeros((1, 3), np.float32)
    with pytest.raises(errors.ModelNotFoundError, match="Model with requested name is not found"):
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
        client.predict({"x": np.zeros((1, 2))}, "stateful_model")


def test_it_goes_through_a_sequence(client: Any) -> None:
    """Arrays of integers say which."""
    x = np.array([[1.0, 2.0]])
    first = client.predict({"x": x, "sequence_control_input": np.array([1], np.uint32)}, "stateful_model")
    identity = first["sequence_id"].astype(np.uint64)
    second = client.predict({"x": x, "sequence_id": identity}, "stateful_model")
    last = client.predict(
        {"x": x, "sequence_id": identity, "sequence_control_input": np.array([2], np.uint32)}, "stateful_model"
    )
    for times, found in enumerate((first, second, last), 1):
        np.testing.assert_array_equal(found["y"], times * x)
        assert found["sequence_id"].tolist() == identity.tolist()


# Plain HTTP


def _post(server: OvmsProcess, model: str, document: Any) -> httpx.Response:
    return httpx.post(f"{server.rest}/v1/models/{model}:predict", content=json.dumps(document), timeout=10)


def test_every_form_of_a_request(server: OvmsProcess) -> None:
    """Rows and columns, with names and without."""
    values, sums = [[1, 2, 3], [4, 5, 6]], [[2, 3, 4], [5, 6, 7]]
    for document, expected in (
        ({"signature_name": "", "instances": values}, {"predictions": sums}),
        ({"instances": [{"b": row} for row in values]}, {"predictions": sums}),
        ({"inputs": values}, {"outputs": sums}),
        ({"inputs": {"b": values}}, {"outputs": sums}),
    ):
        answer = _post(server, "dummy", document)
        assert (answer.status_code, answer.json()) == (200, expected)
    answer = httpx.get(f"{server.rest}/v1/models/dummy:predict", timeout=10)
    assert answer.status_code == 406
    assert answer.json()["error"].startswith("Unsupported method")


def test_the_configuration_is_shown_beside_it(server: OvmsProcess) -> None:
    """Each servable as its own status is."""
    config = server.get("/v1/config").json()
    assert set(config) == {"dummy", "two", "strings", "image", "stateful_model", "few_sequences"}
    assert config["dummy"] == server.get("/v1/models/dummy").json()


def test_a_sequence_as_documented(server: OvmsProcess) -> None:
    """The request of the documentation: to start with an id, to go on, and to end."""
    requests = pytest.importorskip("requests")
    sequence_id = 10
    for times, control in enumerate((SEQUENCE_START, None, SEQUENCE_END), 1):
        inputs: dict[str, Any] = {"x": [[1.5, -1]]}
        inputs["sequence_id"] = [sequence_id]
        if control is not None:
            inputs["sequence_control_input"] = [control]
        signature = "serving_default"
        request_body = json.dumps({"signature_name": signature, "inputs": inputs})
        response = requests.post(f"{server.rest}/v1/models/stateful_model:predict", data=request_body, timeout=10)
        response_body = json.loads(response.text)
        assert response_body["outputs"]["sequence_id"] == [10]
        assert response_body["outputs"]["y"] == [[1.5 * times, -1.0 * times]]


def _step(server: OvmsProcess, value: float, *, model: str = "stateful_model", **special: Any) -> httpx.Response:
    inputs: dict[str, Any] = {"x": [[value, value]]}
    return _post(server, model, {"signature_name": "serving_default", "inputs": inputs | special})


def _sum(response: httpx.Response, sequence_id: int) -> float:
    assert response.status_code == 200, response.text
    outputs = response.json()["outputs"]
    assert outputs["sequence_id"] == [sequence_id]
    assert outputs["y"][0][0] == outputs["y"][0][1]
    return float(outputs["y"][0][0])


def test_several_sequences_live_side_by_side(server: OvmsProcess) -> None:
    """Each has its own sum; the server's ids are those that are free, and the largest is one."""
    largest = 2**64 - 1
    found = _step(server, 1, sequence_control_input=[SEQUENCE_START], sequence_id=[0]).json()
    own = found["outputs"]["sequence_id"][0]
    for identity in (500, largest):
        assert _sum(_step(server, 10, sequence_control_input=[SEQUENCE_START], sequence_id=[identity]), identity) == 10
    other = _step(server, 100, sequence_control_input=[SEQUENCE_START]).json()["outputs"]["sequence_id"][0]
    assert len({own, other, 500, largest}) == 4
    assert _sum(_step(server, 2, sequence_id=[own]), own) == 3
    assert _sum(_step(server, 20, sequence_id=[500], sequence_control_input=[0]), 500) == 30
    assert _sum(_step(server, 30, sequence_id=[largest]), largest) == 40
    assert _sum(_step(server, 200, sequence_id=[other]), other) == 300
    for identity, total in ((own, 4), (500, 31), (largest, 41), (other, 301)):
        ended = _step(server, 1, sequence_id=[identity], sequence_control_input=[SEQUENCE_END])
        assert _sum(ended, identity) == total
    again = _step(server, 7, sequence_id=[500], sequence_control_input=[SEQUENCE_START])
    assert _sum(again, 500) == 7
    assert _sum(_step(server, 1, sequence_id=[500], sequence_control_input=[SEQUENCE_END]), 500) == 8


def test_refusals_of_sequences(server: OvmsProcess) -> None:
    """Each has the status and text of the documentation, and leaves the sequence as it was."""
    assert _sum(_step(server, 1, sequence_id=[77], sequence_control_input=[SEQUENCE_START]), 77) == 1
    no_tensor = "Could not parse input content. Not valid ndarray detected"
    cases: list[tuple[dict[str, Any], int, str]] = [
        ({"sequence_id": [78]}, 404, "Sequence with provided ID does not exist"),
        (
            {"sequence_id": [78], "sequence_control_input": [SEQUENCE_END]},
            404,
            "Sequence with provided ID does not exist",
        ),
        (
            {"sequence_id": [77], "sequence_control_input": [SEQUENCE_START]},
            409,
            "Sequence with provided ID already exists",
        ),
        ({}, 400, "Sequence ID has not been provided in request inputs"),
        ({"sequence_id": [0]}, 400, "Sequence ID has not been provided in request inputs"),
        ({"sequence_control_input": [SEQUENCE_END]}, 400, "Sequence ID has not been provided in request inputs"),
        ({"sequence_id": [77], "sequence_control_input": [3]}, 400, "Unexpected value of sequence control input"),
        ({"sequence_id": 77}, 400, "Special input proto does not contain tensor shape information"),
        ({"sequence_id": [77, 77]}, 400, "Invalid input shape"),
        ({"sequence_id": []}, 400, "Invalid input shape"),
        ({"sequence_id": [[77]]}, 400, no_tensor),
        ({"sequence_id": [77.5]}, 400, no_tensor),
        ({"sequence_id": ["77"]}, 400, no_tensor),
        ({"sequence_id": [-77]}, 400, no_tensor),
        (
            {"sequence_id": [77], "sequence_control_input": [2**32]},
            400,
            "Could not find sequence control input in expected tensor proto field uint32_val",
        ),
        ({"sequence_id": [77], "z": [[1, 2]]}, 400, "Invalid number of inputs"),
        ({"sequence_id": [77], "x": [[1, 2, 3]]}, 400, "Invalid input shape"),
    ]
    for special, status, text in cases:
        answer = _step(server, 1, **special)
        assert answer.status_code == status, (special, answer.text)
        assert answer.json()["error"].startswith(text), (special, answer.text)
    by_rows = _post(server, "stateful_model", {"instances": [{"x": [1, 1], "sequence_id": [77]}]})
    assert by_rows.status_code == 400
    assert by_rows.json()["error"].startswith("Invalid number of shape dimensions")
    assert _sum(_step(server, 1, sequence_id=[77], sequence_control_input=[SEQUENCE_END]), 77) == 2


def test_no_more_sequences_than_configured(server: OvmsProcess) -> None:
    """One more is refused until one ends."""

    def step(**special: Any) -> httpx.Response:
        return _step(server, 1, model="few_sequences", **special)

    for identity in range(1, MAX_SEQUENCES + 1):
        assert _sum(step(sequence_control_input=[SEQUENCE_START]), identity) == 1
    refused = step(sequence_control_input=[SEQUENCE_START])
    assert refused.status_code == 503
    assert refused.json()["error"].startswith("Max sequence number has been reached")
    assert _sum(step(sequence_id=[2], sequence_control_input=[SEQUENCE_END]), 2) == 2
    assert step(sequence_control_input=[SEQUENCE_START]).status_code == 200


def test_sequences_are_one_models_whatever_the_protocol(server: OvmsProcess) -> None:
    """One that was started here goes on over KServe's REST."""
    assert _sum(_step(server, 5, sequence_id=[900], sequence_control_input=[SEQUENCE_START]), 900) == 5
    inputs = [
        {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [6, 6]},
        {"name": "sequence_id", "datatype": "UINT64", "shape": [1], "data": [900]},
    ]
    answer = httpx.post(f"{server.rest}/v2/models/stateful_model/infer", json={"inputs": inputs}, timeout=10)
    assert answer.json()["outputs"][0]["data"] == [11, 11]
    assert _sum(_step(server, 1, sequence_id=[900], sequence_control_input=[SEQUENCE_END]), 900) == 12


def test_numbers_that_are_counted(server: OvmsProcess) -> None:
    """Calls of this API have its name as their label."""
    _post(server, "two", {"inputs": {"x": [[1, 2], [3, 4]], "y": [[1, 2], [3, 4]]}})
    text = server.get("/metrics").text
    (line,) = (
        line
        for line in text.splitlines()
        if line.startswith("ovms_requests_success{")
        and all(f'"{label}"' in line for label in ("TensorFlowServing", "REST", "Predict", "two"))
    )
    assert float(line.split()[-1]) >= 1


def test_a_model_given_on_the_command_line(tmp_path: Path) -> None:
    """The options of the documentation serve the same sequences."""
    base = ir.save(ir.accumulator(), tmp_path, "m")
    with serving("--model_path", str(base), "--model_name", "stateful_model", "--stateful") as process:
        assert _sum(_step(process, 3, sequence_control_input=[SEQUENCE_START]), 1) == 3
        assert _sum(_step(process, 4, sequence_id=[1], sequence_control_input=[SEQUENCE_END]), 1) == 7
