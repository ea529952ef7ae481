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


def _detector() -> ov.Model:
    """Create a model that finds ``_FOUND`` in every image, with confidence 0 in a black one."""
    image = _parameter("image", 1, 3, _HEIGHT, _WIDTH)
    light = op.minimum(op.reduce_max(image, np.array([0, 1, 2, 3])), np.float32(1))
    detections = np.array(_FOUND, np.float32).reshape(1, 1, -1, 7)
    confidence = detections * (np.arange(7) == 2).astype(np.float32)
    detection = _named(op.add(detections - confidence, op.multiply(confidence, light)), "detection")
    return ov.Model([op.result(detection)], [image], "detector")


def _brightness() -> ov.Model:
    image = _parameter("image", 1, 3, 6, 8)
    mean = _named(op.reduce_mean(image, np.array([2, 3])), "mean")
    return ov.Model([op.result(mean)], [image], "brightness")


def _model(name: str, model: str, inputs: Mapping[str, str], outputs: str, **more: Any) -> dict[str, Any]:
    """Write a node; inputs are ``{"input": "source.item"}``, and outputs names with blanks between."""
    return {
        "name": name,
        "type": "DL model",
        "model_name": model,
        "inputs": _sources(inputs),
        "outputs": [{"data_item": item, "alias": item} for item in outputs.split()],
        **more,
    }


def _custom(name: str, library: str, inputs: Mapping[str, str], outputs: str, **more: Any) -> dict[str, Any]:
    node = _model(name, "", inputs, outputs, **more) | {"type": "custom", "library_name": library}
    del node["model_name"]
    return node


def _sources(sources: Mapping[str, str]) -> list[dict[str, dict[str, str]]]:
    parts = {name: source.split(".") for name, source in sources.items()}
    return [{name: {"node_name": node, "data_item": item}} for name, (node, item) in parts.items()]


def _pipeline(name: str, nodes: list[Any], outputs: Mapping[str, str], **more: Any) -> dict[str, Any]:
    sources = [source for node in nodes for each in node["inputs"] for source in each.values()]
    inputs = {source["data_item"] for source in sources if source["node_name"] == "request"}
    return {"name": name, "inputs": sorted(inputs), "nodes": nodes, "outputs": _sources(outputs), **more}


_CROP = {
    "original_image_width": str(_WIDTH),
    "original_image_height": str(_HEIGHT),
    "target_image_width": "8",
    "target_image_height": "6",
    "original_image_layout": "NCHW",
    "target_image_layout": "NCHW",
    "confidence_threshold": "0.5",
}


def _extract(outputs: str, **params: str) -> dict[str, Any]:
    inputs = {"image": "request.image", "detection": "detect.detection"}
    return _custom("extract", "object_detection", inputs, outputs, params=_CROP | params, demultiply_count=-1)


_PIPELINES = [
    # Detections are cropped, and two models look at every crop.
    _pipeline(
        "faces",
        [
            _model("detect", "face_detector", {"image": "request.image"}, "detection"),
            _extract("images coordinates confidences"),
            _model("brightness", "brightness", {"image": "extract.images"}, "mean"),
            _model("second", "brightness", {"image": "extract.images"}, "mean", version=1),
        ],
        {
            "images": "extract.images",
            "coordinates": "extract.coordinates",
            "confidences": "extract.confidences",
            "brightness": "brightness.mean",
            "second": "second.mean",
        },
    ),
    # Images with their channels last, which may be encoded as files.
    _pipeline(
        "encoded",
        [
            _model("detect", "nhwc_detector", {"image": "request.image"}, "detection"),
            _extract("images", original_image_layout="NHWC"),
        ],
        {"images": "extract.images"},
    ),
    _pipeline("shout", [_custom("shout", "fussy", {"text": "request.text"}, "shout")], {"loud_string": "shout.shout"}),
]

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


def _write(folder: Path) -> Path:
    """Write models, libraries as in OVMS's container, and pipelines; return the configuration."""
    (folder / "fussy.py").write_text(_FUSSY)
    detection = "/ovms/lib/custom_nodes/libcustom_node_model_zoo_intel_object_detection.so"
    libraries = {"object_detection": detection, "fussy": "fussy.py"}
    models = {"face_detector": _detector(), "brightness": _brightness()}
    for name, model in models.items():
        ir.save(model, folder / "models", name)
    settings = [{"name": name, "base_path": f"models/{name}"} for name in models]
    settings.append({"name": "nhwc_detector", "base_path": "models/face_detector", "layout": "NHWC:NCHW"})
    config = {
        "model_config_list": [{"config": each} for each in settings],
        "custom_node_library_config_list": [{"name": name, "base_path": path} for name, path in libraries.items()],
        "pipeline_config_list": _PIPELINES,
    }
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedInThread]:
    with serving_in_thread(config_path=_write(tmp_path_factory.mktemp("pipelines"))) as process:
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


def test_strings_are_passed_as_rows(server: ServedInThread, protocol: Any) -> None:
    (loud,) = _call(server, protocol, "shout", ["loud_string"], text=np.array([b"zebra", b"", b"String_123"], object))
    assert loud.tolist() == [b"ZEBRA", b"", b"STRING_123"]


def test_no_detection_has_a_separate_status(server: ServedInThread) -> None:
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
