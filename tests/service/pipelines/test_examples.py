"""Pipelines like OVMS's examples, called by Triton's clients over gRPC and HTTP."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino.opset13 as op
import pytest
import tritonclient.grpc
import tritonclient.http
from PIL import Image
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from ovmstrio.core.tensor import Array
from tests.support import ir
from tests.support.served_in_thread import ServedInThread, serving_in_thread

_HEIGHT, _WIDTH = 40, 60
# What the detector finds in any picture that is not black: image, label, confidence, left, top, right, bottom.
_FOUND = [[0, 1, 0.9, 0, 0, 0.5, 0.5], [0, 1, 0.2, 0.1, 0.1, 0.3, 0.3], [0, 1, 0.8, 0.5, 0.5, 1, 1]]
_KEPT = [_FOUND[0], _FOUND[2]]


def _named(node: Any, name: str) -> Any:
    node.output(0).set_names({name})
    return node


def _parameter(name: str, *shape: int) -> Any:
    return _named(op.parameter(list(shape), np.float32, name=name), name)


def _detector(found: Array) -> ov.Model:
    """Finds the same in every picture, and nothing of it in a black one."""
    image = _parameter("image", 1, 3, _HEIGHT, _WIDTH)
    light = op.minimum(op.reduce_max(image, np.array([0, 1, 2, 3])), np.float32(1))
    certain = np.zeros(found.shape, np.float32)
    confidence = 4 if found.ndim == 2 else 2
    certain[..., confidence] = found[..., confidence]
    detection = _named(op.add(found - certain, op.multiply(certain, light)), "detection")
    return ov.Model([op.result(detection)], [image], "detector")


def _brightness(channels: int, height: int, width: int) -> ov.Model:
    image = _parameter("image", 1, channels, height, width)
    mean = _named(op.reduce_mean(image, np.array([2, 3])), "mean")
    return ov.Model([op.result(mean)], [image], "brightness")


def _shift(number: float, first: int = 1) -> ov.Model:
    x = _parameter("x", first, 10)
    return ov.Model([op.result(_named(op.add(x, np.float32(number)), "y"))], [x], "shift")


def _from(node: str, item: str) -> dict[str, str]:
    return {"node_name": node, "data_item": item}


def _model(name: str, model: str, inputs: Mapping[str, Any], outputs: list[str], **more: Any) -> dict[str, Any]:
    node: dict[str, Any] = {"name": name, "type": "DL model", "model_name": model, **more}
    return node | {
        "inputs": [{key: source} for key, source in inputs.items()],
        "outputs": [{"data_item": item, "alias": item} for item in outputs],
    }


def _custom(name: str, library: str, inputs: Mapping[str, Any], outputs: list[str], **more: Any) -> dict[str, Any]:
    node = _model(name, "", inputs, outputs, **more) | {"type": "custom", "library_name": library}
    del node["model_name"]
    return node


def _pipeline(
    name: str, inputs: list[str], nodes: list[Any], outputs: Mapping[str, dict[str, str]], **more: Any
) -> dict[str, Any]:
    return {"name": name, "inputs": inputs, "nodes": nodes, "outputs": [{k: v} for k, v in outputs.items()], **more}


def _pictures(width: int, height: int, **more: str) -> dict[str, str]:
    """Return the parameters of nodes that cut pictures."""
    original = {"original_image_width": str(_WIDTH), "original_image_height": str(_HEIGHT)}
    target = {"target_image_width": str(width), "target_image_height": str(height)}
    return {**original, **target, "original_image_layout": "NCHW", "target_image_layout": "NCHW", **more}


def _faces() -> dict[str, Any]:
    """Cut out what was found, and let two models look at every part."""
    image = _from("request", "image")
    part = {"image": _from("extract", "images")}
    return _pipeline(
        "faces",
        ["image"],
        [
            _model("detect", "face_detector", {"image": image}, ["detection"]),
            _custom(
                "extract",
                "object_detection",
                {"image": image, "detection": _from("detect", "detection")},
                ["images", "coordinates", "confidences"],
                params=_pictures(8, 6, confidence_threshold="0.5"),
                demultiply_count=-1,
            ),
            _model("brightness", "brightness", part, ["mean"]),
            _model("second", "brightness", part, ["mean"], version=1),
        ],
        {
            "images": _from("extract", "images"),
            "coordinates": _from("extract", "coordinates"),
            "confidences": _from("extract", "confidences"),
            "brightness": _from("brightness", "mean"),
            "second": _from("second", "mean"),
        },
    )


def _encoded() -> dict[str, Any]:
    """Take pictures with their channels last, which may come as files."""
    image = _from("request", "image")
    params = _pictures(8, 6, confidence_threshold="0.5") | {"original_image_layout": "NHWC"}
    return _pipeline(
        "encoded",
        ["image"],
        [
            _model("detect", "nhwc_detector", {"image": image}, ["detection"]),
            _custom(
                "extract",
                "object_detection",
                {"image": image, "detection": _from("detect", "detection")},
                ["images"],
                params=params,
                demultiply_count=-1,
            ),
        ],
        {"images": _from("extract", "images")},
    )


def _dynamic_batch() -> dict[str, Any]:
    """Let a model with a fixed batch of one answer any number of rows."""
    nodes = [_model("shift", "plus_one", {"x": _from("request", "rows")}, ["y"])]
    return _pipeline("dynamic_batch", ["rows"], nodes, {"y": _from("shift", "y")}, demultiply_count=-1)


def _chain() -> dict[str, Any]:
    """Add one by a custom node, two by another pipeline, one by a model."""
    nodes = [
        _custom(
            "first",
            "add_one",
            {"input_numbers": _from("request", "x")},
            ["output_numbers"],
            params={"add_number": "3", "sub_number": "2"},
        ),
        _model("inner", "plus_two", {"x": _from("first", "output_numbers")}, ["y"]),
        _model("last", "plus_one", {"x": _from("inner", "y")}, ["y"]),
    ]
    return _pipeline("chain", ["x"], nodes, {"y": _from("last", "y")})


def _plus_two() -> dict[str, Any]:
    nodes = [
        _model("one", "plus_one", {"x": _from("request", "x")}, ["y"]),
        _model("two", "plus_one", {"x": _from("one", "y")}, ["y"]),
    ]
    return _pipeline("plus_two", ["x"], nodes, {"y": _from("two", "y")})


_FUSSY = '''
"""Says how large a text is, unless it is rude."""


def get_inputs_info(params):
    return {"text": ("UINT8", [-1, -1])}


def get_outputs_info(params):
    return {"shout": ("UINT8", [-1, -1])}


def execute(inputs, params):
    rows = inputs["text"]
    if bytes(rows[0]).startswith(b"rude"):
        raise ValueError("mind your tongue")
    small = (rows >= 97) & (rows <= 122)
    return {"shout": rows - 32 * small.astype("uint8")}
'''


def _shout() -> dict[str, Any]:
    nodes = [_custom("shout", "fussy", {"text": _from("request", "text")}, ["shout"])]
    return _pipeline("shout", ["text"], nodes, {"loud_string": _from("shout", "shout")})


def _config(folder: Path, *pipelines: dict[str, Any]) -> Path:
    (folder / "fussy.py").write_text(_FUSSY)
    container = "/ovms/lib/custom_nodes/libcustom_node_"
    builtin = {
        "object_detection": f"{container}model_zoo_intel_object_detection.so",
        "add_one": "add_one",
        "fussy": "fussy.py",
    }
    names = [path.name for path in (folder / "models").iterdir()]
    models: dict[str, dict[str, str]] = {name: {"name": name, "base_path": f"models/{name}"} for name in sorted(names)}
    models["nhwc_detector"] = models["face_detector"] | {"name": "nhwc_detector", "layout": "NHWC:NCHW"}
    config = {
        "model_config_list": [{"config": settings} for settings in models.values()],
        "custom_node_library_config_list": [{"name": name, "base_path": path} for name, path in builtin.items()],
        "pipeline_config_list": pipelines or [_faces(), _encoded(), _dynamic_batch(), _chain(), _plus_two(), _shout()],
    }
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


def _write_models(folder: Path) -> None:
    found = np.array(_FOUND, np.float32).reshape(1, 1, -1, 7)
    models = {
        "face_detector": _detector(found),
        "brightness": _brightness(3, 6, 8),
        "plus_one": _shift(1),
    }
    for name, model in models.items():
        ir.save(model, folder / "models", name)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedInThread]:
    folder = tmp_path_factory.mktemp("pipelines")
    _write_models(folder)
    with serving_in_thread(config_path=_config(folder)) as process:
        yield process


@pytest.fixture(params=["grpc", "http"])
def protocol(request: pytest.FixtureRequest) -> Any:
    return {"grpc": tritonclient.grpc, "http": tritonclient.http}[request.param]


def _call(server: ServedInThread, protocol: Any, name: str, outputs: list[str], **inputs: Array) -> list[Array]:
    url = server.grpc if protocol is tritonclient.grpc else server.http
    given = []
    for key, value in inputs.items():
        tensor = protocol.InferInput(key, list(value.shape), np_to_triton_dtype(value.dtype))
        tensor.set_data_from_numpy(value)
        given.append(tensor)
    with protocol.InferenceServerClient(url) as client:
        result = client.infer(name, given)
    return [result.as_numpy(each) for each in outputs]


def _picture() -> Array:
    picture = np.full((1, 3, _HEIGHT, _WIDTH), 50, np.float32)
    picture[0, :, : _HEIGHT // 2, : _WIDTH // 2] = np.array([10, 20, 30]).reshape(3, 1, 1)
    picture[0, :, _HEIGHT // 2 :, _WIDTH // 2 :] = np.array([200, 210, 220]).reshape(3, 1, 1)
    return picture


_MEANS = [[[10, 20, 30]], [[200, 210, 220]]]


def test_detections_are_cropped_and_classified(server: ServedInThread, protocol: Any) -> None:
    outputs = ["images", "coordinates", "confidences", "brightness", "second"]
    images, coordinates, confidences, brightness, second = _call(server, protocol, "faces", outputs, image=_picture())
    assert images.shape == (2, 1, 3, 6, 8)
    np.testing.assert_array_equal(images[:, :, :, 0, 0], _MEANS)
    np.testing.assert_allclose(coordinates[:, 0], [row[3:] for row in _KEPT])
    np.testing.assert_allclose(confidences[:, 0, 0], [row[2] for row in _KEPT])
    np.testing.assert_allclose(brightness, _MEANS, rtol=1e-5)
    np.testing.assert_array_equal(second, brightness)


def test_image_file_is_decoded(server: ServedInThread, protocol: Any) -> None:
    pixels = _picture().transpose(0, 2, 3, 1)
    encoded = io.BytesIO()
    Image.fromarray(pixels[0, ..., ::-1].astype(np.uint8)).save(encoded, "png")
    (parts,) = _call(server, protocol, "encoded", ["images"], image=pixels)
    np.testing.assert_array_equal(parts[:, :, :, 0, 0], _MEANS)
    (decoded,) = _call(server, protocol, "encoded", ["images"], image=np.array([encoded.getvalue()], object))
    np.testing.assert_array_equal(decoded, parts)


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_rows_are_split_for_a_model_with_a_batch_of_one(server: ServedInThread, protocol: Any, rows: int) -> None:
    given = np.arange(rows * 10, dtype=np.float32).reshape(rows, 1, 10)
    (y,) = _call(server, protocol, "dynamic_batch", ["y"], rows=given)
    np.testing.assert_array_equal(y, given + 1)


def test_pipeline_is_a_node_of_a_pipeline(server: ServedInThread, protocol: Any) -> None:
    given = np.arange(10, dtype=np.float32).reshape(1, 10)
    (y,) = _call(server, protocol, "chain", ["y"], x=given)
    np.testing.assert_array_equal(y, given + 4)


def test_strings_are_passed_as_rows(server: ServedInThread, protocol: Any) -> None:
    (loud,) = _call(server, protocol, "shout", ["loud_string"], text=np.array([b"zebra", b"", b"String_123"], object))
    assert loud.tolist() == [b"ZEBRA", b"", b"STRING_123"]


def test_no_detection_has_a_status_of_its_own(server: ServedInThread) -> None:
    black = np.zeros((1, 3, _HEIGHT, _WIDTH), np.float32)
    with pytest.raises(InferenceServerException, match="had no results") as raised:
        _call(server, tritonclient.grpc, "faces", [], image=black)
    assert raised.value.status() == "StatusCode.ABORTED"
    given = {"name": "image", "shape": list(black.shape), "datatype": "FP32", "data": black.reshape(-1).tolist()}
    assert server.ask("POST", "/v2/models/faces/infer", json={"inputs": [given]}).status_code == 204


def test_invalid_input_is_refused_at_the_entry(server: ServedInThread, protocol: Any) -> None:
    with pytest.raises(InferenceServerException, match=r"\(1,3,40,60\).*\(1,3,8,8\).*image"):
        _call(server, protocol, "faces", [], image=np.zeros((1, 3, 8, 8), np.float32))


def test_failed_node_is_named(server: ServedInThread, protocol: Any) -> None:
    with pytest.raises(InferenceServerException, match=r"shout.*mind your tongue"):
        _call(server, protocol, "shout", [], text=np.array([b"rude words"], object))
    (loud,) = _call(server, protocol, "shout", ["loud_string"], text=np.array([b"kind"], object))
    assert loud.tolist() == [b"KIND"]
