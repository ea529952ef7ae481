from __future__ import annotations

import io
from typing import Any

import grpc
import numpy as np
import pytest
import trio
from PIL import Image

from ovmstrio.api.doors import KSERVE_GRPC
from ovmstrio.api.tensorflow.tensorflow_types import BY_DATATYPE
from ovmstrio.protocol.descriptors import message_class
from ovmstrio.registry import VersionState
from tests.support import ir
from tests.support.grpc_clients import call
from tests.support.waits import WAIT_SECONDS
from tests.unit.api.grpc.tensorflow.calls import Server, array_of, content, predict_request, refusal, tensor

ONES = content("DT_FLOAT", np.ones((1, 10), "f4"))
X = content("DT_FLOAT", np.ones((1, 2), "f4"))


def special(sequence: int | None = None, control: int | None = None) -> dict[str, Any]:
    """Make the special inputs as TensorFlow's ``make_tensor_proto`` makes them."""
    inputs = {}
    if sequence is not None:
        inputs["sequence_id"] = tensor("DT_UINT64", (1,), uint64_val=[sequence])
    if control is not None:
        inputs["sequence_control_input"] = tensor("DT_UINT32", (1,), uint32_val=[control])
    return inputs


async def test_a_model_adds_one(server: Server) -> None:
    """The answer holds the outputs by name and says which version has answered."""
    response = await server.predict("dummy", b=ONES)
    assert array_of(response.outputs["a"], "<f4").tolist() == [[2] * 10]
    assert (response.model_spec.name, response.model_spec.version.value) == ("dummy", 1)


@pytest.mark.parametrize("datatype", [name for name in ir.TYPES if name not in {"BYTES", "UINT64"}])
async def test_every_element_type_passes_through_a_model(server: Server, datatype: str) -> None:
    """Inputs and outputs of every numeric type keep type, shape and bits."""
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
    np.testing.assert_array_equal(array_of(found, array.dtype.str), array)


async def test_uint64_passes_through_a_model(server: Server) -> None:
    """It comes back in single values, as the id of a sequence does."""
    await server.load("same", ir.passthrough("UINT64"))
    response = await server.predict("same", x=tensor("DT_UINT64", (2, 3), uint64_val=range(6)))
    assert list(response.outputs["y"].uint64_val) == [0, 1, 2, 3, 4, 5]


async def test_strings_pass_through_a_model(server: Server) -> None:
    """Native strings come back as strings, and so do rows of bytes whose output is called ``..._string``."""
    await server.load("strings", ir.string_passthrough())
    await server.load("rows", ir.passthrough("UINT8", (-1, -1), output_name="rows_string"))
    strings = [b"one", b"", "für".encode()]
    message = tensor("DT_STRING", (3,), string_val=strings)
    assert list((await server.predict("strings", strings=message)).outputs["strings"].string_val) == strings
    assert list((await server.predict("rows", x=message)).outputs["rows_string"].string_val) == strings


async def test_images_are_decoded(server: Server) -> None:
    """An encoded image for an input of pixels comes as a string; one without a byte is refused."""
    await server.load("images", ir.image_passthrough())
    file = io.BytesIO()
    Image.new("RGB", (4, 4), (1, 2, 3)).save(file, "PNG")
    response = await server.predict("images", image=tensor("DT_STRING", (1,), string_val=[file.getvalue()]))
    assert array_of(response.outputs["pixels"], "<f4")[0, 0, 0].tolist() == [3, 2, 1]
    empty = tensor("DT_STRING", (1,), string_val=[b""])
    assert await refusal(server.predict("images", image=empty)) == (
        "INVALID_ARGUMENT",
        "Bytes contents empty - an encoded image is expected; input name: image",
    )


async def test_a_filter_chooses_outputs(server: Server) -> None:
    """Only the outputs that are named are sent; a name that the model has not is refused before the inference."""
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


@pytest.mark.parametrize(
    ("message", "status", "text"),
    [
        (predict_request("nobody", {"b": ONES}), "NOT_FOUND", "Pipeline with requested name is not found"),
        (predict_request("", {"b": ONES}), "NOT_FOUND", "Pipeline with requested name is not found"),
        (predict_request("dummy", {"b": ONES}, 9), "NOT_FOUND", "Model with requested version is not found"),
        (predict_request("dummy", {"b": ONES}, -1), "NOT_FOUND", "Model with requested version is not found"),
        (
            predict_request("dummy", {}),
            "INVALID_ARGUMENT",
            (
                "Invalid number of inputs - Expected: 1; Actual: 0. Also: "
                "Missing input with specific name - Required input: b"
            ),
        ),
        (
            predict_request("dummy", {"b": ONES, "c": ONES}),
            "INVALID_ARGUMENT",
            "Invalid number of inputs - Expected: 1; Actual: 2. Also: Unexpected input - c; the inputs are: b",
        ),
        (
            predict_request("dummy", {"c": ONES}),
            "INVALID_ARGUMENT",
            "Missing input with specific name - Required input: b. Also: Unexpected input - c; the inputs are: b",
        ),
        (
            predict_request("dummy", {"b": content("DT_FLOAT", np.ones((2, 10), "f4"))}),
            "INVALID_ARGUMENT",
            "Invalid input batch size - Expected: 1; Actual: 2; input name: b",
        ),
        (
            predict_request("dummy", {"b": content("DT_FLOAT", np.ones((1, 9), "f4"))}),
            "INVALID_ARGUMENT",
            "Invalid input shape - Expected: (1,10); Actual: (1,9); input name: b",
        ),
        (
            predict_request("dummy", {"b": content("DT_INT8", np.ones((1, 10), "i1"))}),
            "INVALID_ARGUMENT",
            "Invalid input precision - Expected: FP32; Actual: INT8; input name: b",
        ),
        (
            predict_request("dummy", {"b": tensor("DT_FLOAT", (1, 10), tensor_content=bytes(36))}),
            "INVALID_ARGUMENT",
            "Invalid content size of tensor proto - Expected: 40 bytes; Actual: 36 bytes; input name: b",
        ),
    ],
)
async def test_what_cannot_be_served_is_refused(server: Server, message: Any, status: str, text: str) -> None:
    """Status and text are OVMS's."""
    assert await refusal(server.call(message)) == (status, text)


async def test_the_other_methods_of_tensorflow_serving_are_unimplemented(server: Server) -> None:
    """As in OVMS there is no classification, regression or multi-inference, and settings are not taken from callers."""
    for method in ("Classify", "Regress", "MultiInference"):
        path = f"/tensorflow.serving.PredictionService/{method}"
        status, _ = await refusal(call(server.address, path, b"", "tensorflow.serving.PredictResponse"))
        assert status == "UNIMPLEMENTED"
    path = "/tensorflow.serving.ModelService/HandleReloadConfigRequest"
    # One field that the server's own message has not: the settings.
    status, text = await refusal(call(server.address, path, b"\x0a\x00", "tensorflow.serving.ReloadConfigResponse"))
    assert (status, "POST /v1/config/reload" in text) == ("UNIMPLEMENTED", True)


async def test_a_deadline_is_kept(server: Server) -> None:
    """A call whose time has passed ends with DEADLINE_EXCEEDED."""
    with pytest.raises(grpc.RpcError) as caught:
        await server.call(predict_request("dummy", {"b": ONES}), timeout=1e-6)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_metadata_is_one_signature(server: Server) -> None:
    """Inputs and outputs come with names, types and shapes, -1 for open dimensions, and the version that serves."""
    await server.load("dynamic", ir.dynamic())
    response = await server.metadata(name="dynamic")
    assert (response.model_spec.name, response.model_spec.version.value) == ("dynamic", 1)
    packed = response.metadata["signature_def"]
    assert packed.type_url == "type.googleapis.com/tensorflow.serving.SignatureDefMap"
    signatures = message_class("tensorflow.serving.SignatureDefMap").FromString(packed.value).signature_def
    assert set(signatures) == {"serving_default"}
    signature = signatures["serving_default"]
    assert (set(signature.inputs), set(signature.outputs), signature.method_name) == ({"b"}, {"a"}, "")
    info = signature.inputs["b"]
    assert (info.name, info.dtype, [dim.size for dim in info.tensor_shape.dim]) == ("b", 1, [-1, -1])


async def test_metadata_of_a_stateful_model_has_no_special_inputs(server: Server) -> None:
    """They are the server's, not the model's."""
    response = await server.metadata(name="sums", version=1)
    packed = response.metadata["signature_def"].value
    signature = message_class("tensorflow.serving.SignatureDefMap").FromString(packed).signature_def["serving_default"]
    assert (set(signature.inputs), set(signature.outputs)) == ({"x"}, {"y"})


@pytest.mark.parametrize(
    ("fields", "spec", "status", "text"),
    [
        (("signature_def",), {}, "INVALID_ARGUMENT", "model_spec missing in request"),
        ((), {"name": "dummy"}, "INVALID_ARGUMENT", "Invalid signature name - metadata_field"),
        (("other",), {"name": "dummy"}, "INVALID_ARGUMENT", "Invalid signature name - metadata_field"),
        (("signature_def",) * 2, {"name": "dummy"}, "INVALID_ARGUMENT", "Invalid signature name - metadata_field"),
        (("signature_def",), {"name": "nobody"}, "NOT_FOUND", "Model with requested name is not found"),
        (
            ("signature_def",),
            {"name": "dummy", "version": 2},
            "NOT_FOUND",
            "Model with requested version is not found",
        ),
    ],
)
async def test_metadata_that_cannot_be_told(
    server: Server, fields: tuple[str, ...], spec: dict[str, Any], status: str, text: str
) -> None:
    """Status and text are OVMS's."""
    found = await refusal(server.metadata(fields, **spec))
    assert (found[0], text in found[1]) == (status, True)


async def test_status_tells_every_version(server: Server) -> None:
    """Without a version all that were ever seen are told, with one that one."""
    response = await server.status(name="dummy")
    (found,) = response.model_version_status
    assert (found.version, found.state) == (1, 30)
    assert (found.status.error_code, found.status.error_message) == (0, "OK")
    assert (await server.status(name="dummy", version=1)) == response


async def test_status_tells_what_has_ended_and_what_has_failed(server: Server) -> None:
    """Retired versions are END; one whose load failed is LOADING with an error code."""
    dummy = server.specs[0]
    assert dummy.base_path is not None
    (dummy.base_path / "2").mkdir()
    result = await server.registry.apply([dummy])
    assert [failure.version for failure in result.failures] == [2]
    failed = (await server.status(name="dummy", version=2)).model_version_status[0]
    assert (failed.state, failed.status.error_code, failed.status.error_message) == (20, 2, "UNKNOWN")
    with trio.fail_after(WAIT_SECONDS):
        while server.registry.statuses()["two"][0].state is not VersionState.END:
            await server.registry.wait_change()
    assert (await server.status(name="two")).model_version_status[0].state == 50
    assert await refusal(server.call(predict_request("two", {"x": ONES, "y": ONES}, 1))) == (
        "NOT_FOUND",
        "Model with requested version is retired",
    )


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ({}, "Model with requested name is not found"),
        ({"name": "nobody"}, "Model with requested name is not found"),
        ({"name": "dummy", "version": 7}, "Model with requested version is not found"),
    ],
)
async def test_status_of_what_is_unknown(server: Server, spec: dict[str, Any], text: str) -> None:
    """Unknown names and versions are NOT_FOUND."""
    assert await refusal(server.status(**spec)) == ("NOT_FOUND", text)


async def test_calls_are_counted_as_tensorflow_servings(server: Server) -> None:
    """The label ``api`` tells them from KServe's, and so do the methods."""
    await server.predict("dummy", b=ONES)
    await refusal(server.predict("dummy", c=ONES))
    await server.metadata(name="dummy")
    await server.status(name="dummy")
    labels = 'api="TensorFlowServing",interface="gRPC",method="{}",name="dummy",version="{}"'
    for method, version in (("Predict", "1"), ("GetModelMetadata", "1"), ("GetModelStatus", "")):
        assert server.metric(f"ovms_requests_success{{{labels.format(method, version)}}}") == 1
    assert server.metric(f"ovms_requests_fail{{{labels.format('Predict', '1')}}}") == 1
    assert server.metric('ovms_current_requests{name="dummy",version="1"}') == 0
    assert server.metric('ovms_request_time_us_count{interface="gRPC",name="dummy",version="1"}') == 2


async def test_a_sequence_from_start_to_end(server: Server) -> None:
    """The id comes back with every answer, whatever is filtered, and the sequence is gone after its end."""
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
        (
            {"sequence_id": tensor("DT_UINT64", (1,), uint64_val=[5, 6])},
            "INVALID_ARGUMENT",
            "Could not find sequence id in expected tensor proto field uint64_val",
        ),
        (
            {"sequence_id": tensor("DT_INT64", (1,), int64_val=[5])},
            "INVALID_ARGUMENT",
            "Could not find sequence id in expected tensor proto field uint64_val",
        ),
        (
            special(5) | {"sequence_control_input": tensor("DT_UINT32", (1,))},
            "INVALID_ARGUMENT",
            "Could not find sequence control input in expected tensor proto field uint32_val",
        ),
        (
            {"sequence_id": tensor("DT_UINT64", (), uint64_val=[5])},
            "INVALID_ARGUMENT",
            "Special input proto does not contain tensor shape information",
        ),
        (
            {"sequence_id": tensor("DT_UINT64", (1, 1), uint64_val=[5])},
            "INVALID_ARGUMENT",
            "Invalid number of shape dimensions - Expected: (1); Actual: (1,1); input name: sequence_id",
        ),
        (
            {"sequence_id": tensor("DT_UINT64", (2,), uint64_val=[5, 6])},
            "INVALID_ARGUMENT",
            "Invalid input shape - Expected: (1); Actual: (2); input name: sequence_id",
        ),
    ],
)
async def test_sequences_are_refused_as_documented(
    server: Server, inputs: dict[str, Any], status: str, text: str
) -> None:
    """Every row of the documented errors has its status and text, and the sequence that is alive stays as it was."""
    await server.predict("sums", x=X, **special(5, 1))
    found = await refusal(server.predict("sums", x=X, **inputs))
    assert (found[0], found[1][: len(text)]) == (status, text)
    after = await server.predict("sums", x=X, **special(5))
    assert array_of(after.outputs["y"], "<f4").tolist() == [[2, 2]]


async def test_no_more_sequences_than_the_model_may_have(server: Server) -> None:
    """One too many is UNAVAILABLE; when another has ended there is room again."""
    for sequence in (1, 2):
        await server.predict("sums", x=X, **special(sequence, 1))
    status, text = await refusal(server.predict("sums", x=X, **special(3, 1)))
    assert (status, text.startswith("Max sequence number has been reached")) == ("UNAVAILABLE", True)
    await server.predict("sums", x=X, **special(1, 2))
    await server.predict("sums", x=X, **special(3, 1))


async def test_a_request_that_does_not_fit_leaves_no_sequence(server: Server) -> None:
    """A start whose data are refused has started nothing, and a filter with a wrong name neither."""
    await refusal(server.predict("sums", x=ONES, **special(4, 1)))
    await refusal(server.call(predict_request("sums", {"x": X, **special(4, 1)}, output_filter=["z"])))
    assert server.plane.sequences("sums", "", KSERVE_GRPC) == []
