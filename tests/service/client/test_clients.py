"""Both clients against a real server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import openvino as ov
import pytest

from ovmstrio.client import Client, Unreachable, open_client
from ovmstrio.core import errors
from tests.support import ir
from tests.support.ports import free_ports
from tests.support.relay import relaying
from tests.support.served_in_thread import ServedInThread, serving_in_thread

EXACT = {"INFERENCE_PRECISION_HINT": "f32"}
MODELS: dict[str, ov.Model] = {
    "dummy": ir.dummy(),
    "sum": ir.sum_of_two(),
    "strings": ir.string_passthrough(),
    "half": ir.passthrough("FP16"),
    "brain": ir.passthrough("BF16"),
    "long": ir.passthrough("INT64"),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedInThread]:
    """Serve several small models."""
    root: Path = tmp_path_factory.mktemp("models")
    entries = [
        {"config": {"name": name, "base_path": str(ir.save(model, root, name)), "plugin_config": EXACT}}
        for name, model in MODELS.items()
    ]
    config = root / "config.json"
    config.write_text(json.dumps({"model_config_list": entries}))
    with serving_in_thread(config_path=config) as running:
        yield running


@pytest.fixture(params=["gRPC", "REST"])
def client(server: ServedInThread, request: pytest.FixtureRequest) -> Iterator[Client]:
    """A client of either protocol."""
    rest = request.param == "REST"
    with open_client(server.rest if rest else server.grpc, rest=rest) as opened:
        yield opened


def test_an_answer_holds_every_output_by_name(client: Client) -> None:
    """Several inputs go in and several outputs come out, as arrays."""
    x, y = np.ones((1, 10), np.float32), np.full((1, 10), 2, np.float32)
    outputs = client.infer("sum", {"x": x, "y": y})
    np.testing.assert_array_equal(outputs["sum"], x + y)
    np.testing.assert_array_equal(outputs["difference"], x - y)


@pytest.mark.parametrize(
    ("model", "array", "datatype"),
    [
        ("half", np.arange(6, dtype=np.float16).reshape(2, 3), "FP16"),
        ("brain", np.arange(6, dtype=np.float32).reshape(2, 3), "BF16"),
        ("long", np.array([[1, -2, 3], [4, 5, 2**31 - 1]], np.int64), "INT64"),
    ],
)
def test_every_element_type_comes_back_as_it_went(client: Client, model: str, array: np.ndarray, datatype: str) -> None:
    """Types that JSON does not have travel as well."""
    outputs = client.infer(model, {"x": array}, datatypes={"x": datatype})
    np.testing.assert_array_equal(outputs["y"], array)
    assert outputs["y"].dtype == array.dtype


def test_strings_come_back_as_bytes(client: Client) -> None:
    """BYTES hold any text, the empty one included."""
    sent = np.array(["", "héllo", "a b"], object)
    outputs = client.infer("strings", {"strings": sent})
    assert outputs["strings"].tolist() == [b"", "héllo".encode(), b"a b"]


def test_metadata_names_inputs_and_outputs(client: Client) -> None:
    """What a model takes and gives can be asked for."""
    known = client.metadata("dummy")
    assert (known.name, known.versions, known.platform) == ("dummy", ("1",), "OpenVINO")
    (taken,), (given,) = known.inputs, known.outputs
    assert (taken.name, taken.datatype, taken.shape) == ("b", "FP32", (1, 10))
    assert (given.name, given.datatype, given.shape) == ("a", "FP32", (1, 10))


def test_states_and_health_are_told(client: Client) -> None:
    """Every model is listed, and each level of readiness can be asked for."""
    assert {state.name for state in client.models() if state.state == "READY"} == set(MODELS)
    assert client.server_live()
    assert client.server_ready().ready
    assert client.model_ready("dummy").ready


@pytest.mark.parametrize(
    ("model", "version", "shape", "error", "text"),
    [
        ("nobody", "", (1, 10), errors.NotFound, "not found"),
        ("dummy", "7", (1, 10), errors.NotFound, "version is not found"),
        ("dummy", "", (1, 9), errors.InvalidRequest, "Expected: (1,10); Actual: (1,9)"),
    ],
)
def test_refusals_are_raised_as_what_the_server_raised(
    client: Client, model: str, version: str, shape: tuple[int, ...], error: type[Exception], text: str
) -> None:
    """An error's class and text travel both ways."""
    with pytest.raises(error) as raised:
        client.infer(model, {"b": np.zeros(shape, np.float32)}, version=version)
    assert text in str(raised.value)


@pytest.mark.parametrize("rest", [False, True])
def test_a_server_that_does_not_answer_is_a_deadline(server: ServedInThread, rest: bool) -> None:
    """The error has another class than that of an unreachable server."""
    target = server.http if rest else server.grpc
    with relaying(target) as relay, open_client(relay.address, rest=rest, timeout=2) as client:
        assert client.server_live()
        relay.hold()
        with pytest.raises(errors.DeadlineExceeded, match="did not answer in time"):
            client.infer("dummy", {"b": np.zeros((1, 10), np.float32)})


@pytest.mark.parametrize("rest", [False, True])
def test_nobody_at_the_address_is_told_apart_from_a_refusal(rest: bool) -> None:
    """Scripts can wait for a server that is not there yet."""
    (port,) = free_ports(1)
    with open_client(f"127.0.0.1:{port}", rest=rest, timeout=5) as client, pytest.raises(Unreachable, match=str(port)):
        client.server_live()
