from __future__ import annotations

import io
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from PIL import Image

from ovmstrio.config.specs import ModelSpec
from ovmstrio.encoding.messages import message_class
from ovmstrio.models.loading import load_model
from ovmstrio.models.sequences import SequenceManagers
from ovmstrio.protocols.tensorflow.types import BY_DATATYPE
from ovmstrio.serving.interfaces import KSERVE_GRPC
from ovmstrio.serving.records import VersionState
from ovmstrio.telemetry.metrics import Metrics
from tests.service.protocols.kserve.grpc.servers import Serving, serving_grpc
from tests.support import ir
from tests.support.api_clients import call
from tests.support.waits import WAIT_SECONDS
from tests.unit.protocols.tensorflow.calls import array_of, content, model_spec, predict_request, refusal, tensor

PREDICTION = "/tensorflow.serving.PredictionService"
MODEL = "/tensorflow.serving.ModelService"
ONES = content("DT_FLOAT", np.ones((1, 10), "f4"))
X = content("DT_FLOAT", np.ones((1, 2), "f4"))
MISSING = "Missing input with specific name - Required input: b"
EXTRA = "Unexpected input - c; the inputs are: b"
TWO_ROWS = content("DT_FLOAT", np.ones((2, 10), "f4"))
SIGNATURE = 'Invalid signature name - metadata_field: expected only "signature_def", got'


class Server:
    def __init__(self, serving: Serving, repository: Path) -> None:
        self.serving = serving
        self.repository = repository

    async def load(self, name: str, model: Any) -> None:
        base = ir.save(model, self.repository, name)
        spec = ModelSpec(name=name, base_path=base, plugin_config={"INFERENCE_PRECISION_HINT": "f32"})
        self.serving.specs.append(spec)
        assert not (await self.serving.registry.apply(self.serving.specs)).failures

    async def predict(self, model: str, **inputs: Any) -> Any:
        return await self.call(predict_request(model, inputs))

    async def call(self, message: Any, service: str = PREDICTION, **options: Any) -> Any:
        name = message.DESCRIPTOR.full_name.removesuffix("Request")
        path = f"{service}/{name.rpartition('.')[2]}"
        return await call(self.serving.address, path, message, f"{name}Response", **options)

    async def status(self, **spec: Any) -> Any:
        message = message_class("tensorflow.serving.GetModelStatusRequest")(model_spec=model_spec(**spec))
        return await self.call(message, MODEL)

    async def metadata(self, fields: tuple[str, ...] = ("signature_def",), **spec: Any) -> Any:
        make = message_class("tensorflow.serving.GetModelMetadataRequest")
        return await self.call(make(model_spec=model_spec(**spec) if spec else None, metadata_field=fields))


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    """Serve the models ``dummy`` and ``two`` and the stateful model ``sums``."""
    specs = [
        ModelSpec(name="dummy", base_path=ir.save(ir.dummy(), tmp_path, "dummy")),
        ModelSpec(name="two", base_path=ir.save(ir.sum_of_two(), tmp_path, "two")),
        ModelSpec(
            name="sums", base_path=ir.save(ir.accumulator(), tmp_path, "sums"), stateful=True, max_sequence_number=2
        ),
    ]
    load = partial(load_model, managers=SequenceManagers())
    async with serving_grpc(load, specs, metrics=Metrics()) as serving:
        yield Server(serving, tmp_path)


def special(sequence: int | None = None, control: int | None = None) -> dict[str, Any]:
    """Create the special inputs like ``make_tensor_proto`` of TensorFlow."""
    inputs = {}
    if sequence is not None:
        inputs["sequence_id"] = tensor("DT_UINT64", (1,), uint64_val=[sequence])
    if control is not None:
        inputs["sequence_control_input"] = tensor("DT_UINT32", (1,), uint32_val=[control])
    return inputs


@pytest.mark.parametrize("datatype", [name for name in ir.TYPES if name != "BYTES"])
async def test_values_of_every_element_type_pass_through_a_model(server: Server, datatype: str) -> None:
    await server.load("same", ir.passthrough(datatype))
    row = BY_DATATYPE[datatype]
    if datatype == "BF16":
        array = np.array([[0x3FC0, 0, 0xC000], [0x7F80, 1, 2]], "<u2")
        array[1, 1:] = 0x4000
    else:
        array = np.array([[0, 1, 2], [3, 100, 7]]).astype(row.datatype.numpy)
    response = await server.predict("same", x=content(row.name, array))
    found = response.outputs["y"]
    assert found.dtype == row.number
    # Only UINT64, the type of sequence ids, is returned as single values.
    values = list(found.uint64_val) or array_of(found, array.dtype.str)
    np.testing.assert_array_equal(np.reshape(values, array.shape), array)


async def test_strings_pass_through_models_of_strings_and_of_rows_of_bytes(server: Server) -> None:
    await server.load("strings", ir.string_passthrough())
    await server.load("rows", ir.passthrough("UINT8", (-1, -1), output_name="rows_string"))
    strings = [b"one", b"", "für".encode()]
    message = tensor("DT_STRING", (3,), string_val=strings)
    assert list((await server.predict("strings", strings=message)).outputs["strings"].string_val) == strings
    assert list((await server.predict("rows", x=message)).outputs["rows_string"].string_val) == strings


async def test_images_are_decoded_and_empty_ones_refused(server: Server) -> None:
    await server.load("images", ir.image_passthrough())
    file = io.BytesIO()
    Image.new("RGB", (4, 4), (1, 2, 3)).save(file, "PNG")
    response = await server.predict("images", image=tensor("DT_STRING", (1,), string_val=[file.getvalue()]))
    assert array_of(response.outputs["pixels"], "<f4")[0, 0, 0].tolist() == [3, 2, 1]
    empty = tensor("DT_STRING", (1,), string_val=[b""])
    assert await refusal(server.predict("images", image=empty)) == (
        "INVALID_ARGUMENT",
        "Bytes contents empty - expected an encoded image; input name: image",
    )


async def test_an_output_filter_selects_outputs(server: Server) -> None:
    inputs = {"x": ONES, "y": ONES}
    response = await server.call(predict_request("two", inputs, output_filter=["sum"]))
    assert set(response.outputs) == {"sum"}
    assert set((await server.call(predict_request("two", inputs))).outputs) == {"sum", "difference"}
    assert await refusal(server.call(predict_request("two", inputs, output_filter=["other"]))) == (
        "INVALID_ARGUMENT",
        "requested outputs: expected some of difference, sum, got other",
    )
    unknown = await refusal(server.call(predict_request("nobody", {}, output_filter=["sum"])))
    assert unknown == ("NOT_FOUND", "Pipeline with requested name is not found")


INVALID = [
    (lambda server: server.predict("dummy"), f"Invalid number of inputs - Expected: 1; Actual: 0. Also: {MISSING}"),
    (
        lambda server: server.predict("dummy", b=ONES, c=ONES),
        f"Invalid number of inputs - Expected: 1; Actual: 2. Also: {EXTRA}",
    ),
    (lambda server: server.predict("dummy", c=ONES), f"{MISSING}. Also: {EXTRA}"),
    (
        lambda server: server.predict("dummy", b=TWO_ROWS),
        "Invalid input batch size - Expected: 1; Actual: 2; input name: b",
    ),
    (lambda server: server.metadata(), "model_spec missing in request"),
    (lambda server: server.metadata((), name="dummy"), f"{SIGNATURE} []"),
    (lambda server: server.metadata(("other",), name="dummy"), f"{SIGNATURE} ['other']"),
    (lambda server: server.metadata(("signature_def",) * 2, name="dummy"), f"{SIGNATURE} {['signature_def'] * 2}"),
]
NOT_FOUND = [
    (lambda server: server.predict("nobody", b=ONES), "Pipeline with requested name is not found"),
    (lambda server: server.predict("", b=ONES), "Pipeline with requested name is not found"),
    (lambda server: server.call(predict_request("dummy", {"b": ONES}, 9)), "Model with requested version is not found"),
    (lambda server: server.metadata(name="nobody"), "Model with requested name is not found"),
    (lambda server: server.status(), "Model with requested name is not found"),
    (lambda server: server.status(name="dummy", version=7), "Model with requested version is not found"),
]


@pytest.mark.parametrize(
    ("call", "status", "text"),
    [
        *((call, "INVALID_ARGUMENT", text) for call, text in INVALID),
        *((call, "NOT_FOUND", text) for call, text in NOT_FOUND),
    ],
)
async def test_invalid_calls_are_refused_with_status_and_text_of_ovms(
    server: Server, call: Callable[[Server], Any], status: str, text: str
) -> None:
    assert await refusal(call(server)) == (status, text)


async def test_metadata_is_one_signature_without_special_inputs(server: Server) -> None:
    response = await server.metadata(name="sums")
    assert (response.model_spec.name, response.model_spec.version.value) == ("sums", 1)
    packed = response.metadata["signature_def"]
    assert packed.type_url == "type.googleapis.com/tensorflow.serving.SignatureDefMap"
    signatures = message_class("tensorflow.serving.SignatureDefMap").FromString(packed.value).signature_def
    assert set(signatures) == {"serving_default"}
    signature = signatures["serving_default"]
    assert (set(signature.inputs), set(signature.outputs), signature.method_name) == ({"x"}, {"y"}, "")
    info = signature.inputs["x"]
    assert (info.name, info.dtype, [dim.size for dim in info.tensor_shape.dim]) == ("x", 1, [1, 2])


async def test_the_other_methods_of_tensorflow_serving_are_unimplemented(server: Server) -> None:
    for method in ("Classify", "Regress", "MultiInference"):
        path = f"/tensorflow.serving.PredictionService/{method}"
        status, _ = await refusal(call(server.serving.address, path, b"", "tensorflow.serving.PredictResponse"))
        assert status == "UNIMPLEMENTED"
    path = "/tensorflow.serving.ModelService/HandleReloadConfigRequest"
    # One field that the server's own message has not: the settings.
    status, text = await refusal(
        call(server.serving.address, path, b"\x0a\x00", "tensorflow.serving.ReloadConfigResponse")
    )
    assert (status, "POST /v1/config/reload" in text) == ("UNIMPLEMENTED", True)


async def test_status_reports_retired_and_failed_versions(server: Server) -> None:
    dummy = server.serving.specs[0]
    assert dummy.base_path is not None
    (dummy.base_path / "2").mkdir()
    result = await server.serving.registry.apply([dummy])
    assert [failure.version for failure in result.failures] == [2]
    failed = (await server.status(name="dummy", version=2)).model_version_status[0]
    assert (failed.state, failed.status.error_code, failed.status.error_message) == (20, 2, "UNKNOWN")
    with trio.fail_after(WAIT_SECONDS):
        while server.serving.registry.statuses()["two"][0].state is not VersionState.END:
            await server.serving.registry.wait_change()
    assert (await server.status(name="two")).model_version_status[0].state == 50
    assert await refusal(server.call(predict_request("two", {"x": ONES, "y": ONES}, 1))) == (
        "NOT_FOUND",
        "Model with requested version is retired",
    )


async def test_calls_are_counted_with_the_api_and_method(server: Server) -> None:
    await server.predict("dummy", b=ONES)
    await refusal(server.predict("dummy", c=ONES))
    await server.metadata(name="dummy")
    await server.status(name="dummy")
    labels = 'api="TensorFlowServing",interface="gRPC",method="{}",name="dummy",version="{}"'
    metrics = server.serving.metrics
    for method, version in (("Predict", "1"), ("GetModelMetadata", "1"), ("GetModelStatus", "")):
        assert f"ovms_requests_success{{{labels.format(method, version)}}} 1.0\n" in metrics
    assert f"ovms_requests_fail{{{labels.format('Predict', '1')}}} 1.0\n" in metrics
    assert 'ovms_current_requests{name="dummy",version="1"} 0.0\n' in metrics
    assert 'ovms_request_time_us_count{interface="gRPC",name="dummy",version="1"} 2.0\n' in metrics


async def test_a_sequence_returns_its_id_until_its_end(server: Server) -> None:
    started = await server.predict("sums", x=X, **special(control=1))
    assert list(started.outputs["sequence_id"].uint64_val) == [1]
    assert started.outputs["sequence_id"].dtype == 23
    assert [dim.size for dim in started.outputs["sequence_id"].tensor_shape.dim] == [1]
    second = await server.call(predict_request("sums", {"x": X, **special(1)}, output_filter=["y"]))
    assert array_of(second.outputs["y"], "<f4").tolist() == [[2, 2]]
    assert list(second.outputs["sequence_id"].uint64_val) == [1]
    last = await server.predict("sums", x=X, **special(1, 2))
    assert array_of(last.outputs["y"], "<f4").tolist() == [[3, 3]]
    assert list(last.outputs["sequence_id"].uint64_val) == [1]
    assert (await refusal(server.predict("sums", x=X, **special(1))))[0] == "NOT_FOUND"


def sequence_id(dtype: str, shape: tuple[int, ...], **values: list[int]) -> dict[str, Any]:
    return {"sequence_id": tensor(dtype, shape, **values)}


WRONG_FIELD = "Could not find sequence {} in expected tensor proto field {}"
NO_CONTROL = special(5) | {"sequence_control_input": tensor("DT_UINT32", (1,))}


@pytest.mark.parametrize(
    ("inputs", "status", "text"),
    [
        (special(9), "NOT_FOUND", "Sequence with provided ID does not exist"),
        (special(9, 2), "NOT_FOUND", "Sequence with provided ID does not exist"),
        (special(5, 1), "ALREADY_EXISTS", "Sequence with provided ID already exists"),
        ({}, "INVALID_ARGUMENT", "Sequence ID has not been provided in request inputs"),
        (special(0), "INVALID_ARGUMENT", "Sequence ID has not been provided in request inputs"),
        (special(control=2), "INVALID_ARGUMENT", "Sequence ID has not been provided in request inputs"),
        (special(5, 3), "INVALID_ARGUMENT", "Unexpected value of sequence control input"),
        (sequence_id("DT_UINT64", (1,), uint64_val=[5, 6]), "INVALID_ARGUMENT", WRONG_FIELD.format("id", "uint64_val")),
        (sequence_id("DT_INT64", (1,), int64_val=[5]), "INVALID_ARGUMENT", WRONG_FIELD.format("id", "uint64_val")),
        (NO_CONTROL, "INVALID_ARGUMENT", WRONG_FIELD.format("control input", "uint32_val")),
        (
            sequence_id("DT_UINT64", (), uint64_val=[5]),
            "INVALID_ARGUMENT",
            "Special input proto does not contain tensor",
        ),
        (
            sequence_id("DT_UINT64", (1, 1), uint64_val=[5]),
            "INVALID_ARGUMENT",
            "Invalid number of shape dimensions - Expected: (1); Actual: (1,1); input name: sequence_id",
        ),
        (
            sequence_id("DT_UINT64", (2,), uint64_val=[5, 6]),
            "INVALID_ARGUMENT",
            "Invalid input shape - Expected: (1); Actual: (2); input name: sequence_id",
        ),
    ],
)
async def test_invalid_sequence_inputs_are_refused_and_leave_the_sequence_unchanged(
    server: Server, inputs: dict[str, Any], status: str, text: str
) -> None:
    await server.predict("sums", x=X, **special(5, 1))
    found = await refusal(server.predict("sums", x=X, **inputs))
    assert (found[0], found[1][: len(text)]) == (status, text)
    after = await server.predict("sums", x=X, **special(5))
    assert array_of(after.outputs["y"], "<f4").tolist() == [[2, 2]]


async def test_sequences_above_the_maximum_are_unavailable_until_one_ends(server: Server) -> None:
    for sequence in (1, 2):
        await server.predict("sums", x=X, **special(sequence, 1))
    status, text = await refusal(server.predict("sums", x=X, **special(3, 1)))
    assert (status, text.startswith("Max sequence number has been reached")) == ("UNAVAILABLE", True)
    await server.predict("sums", x=X, **special(1, 2))
    await server.predict("sums", x=X, **special(3, 1))


async def test_a_refused_start_leaves_no_sequence(server: Server) -> None:
    await refusal(server.predict("sums", x=ONES, **special(4, 1)))
    await refusal(server.call(predict_request("sums", {"x": X, **special(4, 1)}, output_filter=["z"])))
    assert server.serving.plane.sequences("sums", "", KSERVE_GRPC) == []
