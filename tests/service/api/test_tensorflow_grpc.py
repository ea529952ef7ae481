"""The TensorFlow Serving API as the clients that users have speak it, unmodified, against the real command."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.support import ir
from tests.support.processes import OvmsProcess, serving

ovmsclient = pytest.importorskip("ovmsclient")

pytestmark = pytest.mark.e2e

TENSORFLOW_PYTHON = "OVMSTRIO_TENSORFLOW_PYTHON"
"""Names an interpreter that has tensorflow and tensorflow-serving-api, where this one has not."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OvmsProcess]:
    """Serve stateless and stateful models as long as the module's tests last."""
    folder = tmp_path_factory.mktemp("models")
    models: dict[str, tuple[Any, dict[str, Any]]] = {
        "dummy": (ir.dummy(), {}),
        "two": (ir.sum_of_two(), {}),
        "images": (ir.image_passthrough(), {}),
        "strings": (ir.string_passthrough(), {}),
        "sums": (ir.accumulator(), {"stateful": True, "max_sequence_number": 2}),
        "lstm": (ir.lstm(), {"stateful": True}),
    }
    entries = [
        {"config": {"name": name, "base_path": str(ir.save(model, folder, name)), **options}}
        for name, (model, options) in models.items()
    ]
    ir.save(ir.dummy(), folder, "dummy", version=2)
    config = folder / "config.json"
    config.write_text(json.dumps({"model_config_list": entries}))
    with serving("--config_path", str(config)) as running:
        yield running


@pytest.fixture
def client(server: OvmsProcess) -> Iterator[Any]:
    """Connect ovmsclient."""
    made = ovmsclient.make_grpc_client(server.grpc)
    yield made
    made.channel.close()


def test_ovmsclient_predicts(client: Any) -> None:
    """Arrays, lists and scalars go in, arrays come out: of one output bare, of several by name."""
    array = np.arange(10, dtype=np.float32).reshape(1, 10)
    found = client.predict(inputs={"b": array}, model_name="dummy")
    np.testing.assert_array_equal(found, array + 1)
    np.testing.assert_array_equal(client.predict({"b": array.tolist()}, "dummy", model_version=2), array + 1)
    both = client.predict({"x": array, "y": array}, "two")
    assert set(both) == {"sum", "difference"}
    np.testing.assert_array_equal(both["sum"], 2 * array)


def test_ovmsclient_sends_images_and_strings(client: Any) -> None:
    """Bytes are an encoded image for an input of pixels, and a string for an input of strings."""
    file = io.BytesIO()
    Image.new("RGB", (8, 8), (10, 20, 30)).save(file, "PNG")
    pixels = client.predict({"image": file.getvalue()}, "images")
    assert (pixels.shape, pixels[0, 0, 0].tolist()) == ((1, 4, 4, 3), [30, 20, 10])
    assert client.predict({"strings": ["one", "two"]}, "strings").tolist() == [b"one", b"two"]


def test_ovmsclient_asks_about_models(client: Any) -> None:
    """Metadata has the version that serves, and the status that of every version."""
    assert client.get_model_metadata("dummy") == {
        "model_version": 2,
        "inputs": {"b": {"shape": [1, 10], "dtype": "DT_FLOAT"}},
        "outputs": {"a": {"shape": [1, 10], "dtype": "DT_FLOAT"}},
    }
    assert client.get_model_status("sums") == {1: {"state": "AVAILABLE", "error_code": 0, "error_message": "OK"}}


def test_ovmsclient_tells_errors_apart(client: Any) -> None:
    """Its exceptions are those that it has for a wrong name and for a wrong tensor."""
    from ovmsclient.tfs_compat.base.errors import InvalidInputError, ModelNotFoundError

    with pytest.raises(ModelNotFoundError, match="Pipeline with requested name is not found"):
        client.predict({"b": [1.0]}, "nobody")
    with pytest.raises(ModelNotFoundError, match="Model with requested name is not found"):
        client.get_model_status("nobody")
    with pytest.raises(ModelNotFoundError, match="Model with requested version is not found"):
        client.get_model_metadata("dummy", 7)
    with pytest.raises(InvalidInputError, match=r"Invalid input precision - Expected: FP32; Actual: INT32"):
        client.predict({"b": np.ones((1, 10), np.int32)}, "dummy")


def test_ovmsclient_runs_sequences(client: Any) -> None:
    """The special inputs are accepted packed as well, and the answers of a cell with memory depend on the sequence."""

    def step(model: str, x: Any, **special: int) -> Any:
        dtypes = {"sequence_id": np.uint64, "sequence_control_input": np.uint32}
        inputs = {name: np.array([value], dtypes[name]) for name, value in special.items()}
        return client.predict({"x": np.asarray([x], np.float32), **inputs}, model)

    started = step("sums", [1, 2], sequence_control_input=1)
    (number,) = started["sequence_id"].tolist()
    assert step("sums", [1, 2], sequence_id=number)["y"].tolist() == [[2, 4]]
    assert step("sums", [1, 2], sequence_id=number, sequence_control_input=2)["y"].tolist() == [[3, 6]]

    one, other = (step("lstm", [1, 2, 3, 4], sequence_id=name, sequence_control_input=1)["y"] for name in (1, 2))
    np.testing.assert_array_equal(one, other)
    one, other = step("lstm", [1, 0, 0, 0], sequence_id=1)["y"], step("lstm", [0, 0, 0, 9], sequence_id=2)["y"]
    assert not np.array_equal(one, other)
    one, other = (step("lstm", [1, 1, 1, 1], sequence_id=name)["y"] for name in (1, 2))
    assert not np.array_equal(one, other)


def test_calls_are_told_apart_in_the_metrics(server: OvmsProcess, client: Any) -> None:
    """A scraper sees them under the API's own name."""
    client.predict({"b": np.ones((1, 10), np.float32)}, "dummy")
    labels = 'api="TensorFlowServing",interface="gRPC",method="Predict",name="dummy",version="2"'
    lines = server.get("/metrics").text.splitlines()
    (success,) = (line for line in lines if line.startswith(f"ovms_requests_success{{{labels}}}"))
    assert float(success.rpartition(" ")[2]) >= 1


def _tensorflow_python() -> str:
    """Find an interpreter that can run TensorFlow's own client; without one the test is skipped."""
    named = os.environ.get(TENSORFLOW_PYTHON, "")
    if named:
        return named
    if not all(map(importlib.util.find_spec, ("tensorflow", "tensorflow_serving"))):
        pytest.skip(
            f"needs tensorflow and tensorflow-serving-api, here or in the interpreter {TENSORFLOW_PYTHON} names"
        )
    return sys.executable


def test_tensorflows_own_client_runs_sequences(server: OvmsProcess) -> None:
    """What the documentation of stateful models shows runs as it stands, with TensorFlow's packages."""
    script = Path(__file__).with_name("stateful_sample.py")
    command = [_tensorflow_python(), str(script), server.grpc, "sums"]
    ran = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    given = found["steps"][-1][1]
    assert found == {
        "steps": [[1, 10], [3, 10], [3, 10], [5, given], [5.5, given], [6.5, given]],
        "inputs": ["x"],
        "states": [[1, 30]],
    }
