from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino.opset13 as op
import pytest

from ovmstrio.core.errors import AlreadyExists, ConfigError
from ovmstrio.openvino.conversion import Conversion, convert, detect_state, new_version
from ovmstrio.openvino.conversion.inputs import parse_input_form
from tests.support.onnx_files import onnx_file, onnx_loss_file
from tests.support.servables import EXACT


def _named(node: ov.Node, name: str) -> ov.Node:
    node.output(0).set_names({name})
    return node


def _parameter(name: str, shape: list[int]) -> ov.Node:
    return _named(op.parameter(ov.PartialShape(shape), np.float32, name=name), name)


def _accumulator(state: str = "total", successor: str = "totaln", batch: int = 1) -> ov.Model:
    """Make a model that adds its input to a state."""
    x, total = _parameter("x", [batch, 3]), _parameter(state, [batch, 3])
    added = _named(op.add(total, x), successor)
    shown = _named(op.multiply(added, np.float32(1)), "y")
    return ov.Model([op.result(shown), op.result(added)], [x, total], "accumulator")


def _saved(model: ov.Model, folder: Path) -> Path:
    path = folder / "source.xml"
    ov.save_model(model, path, compress_to_fp16=False)
    return path


def _run(directory: Path, **inputs: Any) -> dict[str, Any]:
    compiled = ov.Core().compile_model(directory / "model.xml", "CPU", EXACT)
    answers = compiled({name: np.array(value, np.float32) for name, value in inputs.items()}, share_inputs=True)
    return {port.get_any_name(): np.array(value) for port, value in answers.items()}


def test_onnx_file_becomes_a_version_that_computes_the_same(tmp_path: Path) -> None:
    source = tmp_path / "relu.onnx"
    source.write_bytes(onnx_file("Relu"))
    converted = convert(source, tmp_path / "models", "relu", 3)
    assert converted.directory == tmp_path / "models" / "relu" / "3"
    assert sorted(path.name for path in converted.directory.iterdir()) == ["model.bin", "model.xml"]
    assert [(spec.name, str(spec)) for spec in converted.inputs] == [("x", "FP32 [1,4]")]
    assert [(spec.name, str(spec)) for spec in converted.outputs] == [("y", "FP32 [1,4]")]
    assert _run(converted.directory, x=[[-1, 2, -3, 4]])["y"].tolist() == [[0, 2, 0, 4]]


def test_onnx_file_that_can_only_be_read_by_its_content_is_converted(tmp_path: Path) -> None:
    (tmp_path / "loss.onnx").write_bytes(onnx_loss_file())
    converted = convert(tmp_path / "loss.onnx", tmp_path / "models", "loss", 1)
    assert [(spec.name, str(spec)) for spec in converted.inputs] == [("scores", "FP32 [2,3]"), ("target", "INT64 [2]")]


def test_operation_that_openvino_lacks_is_named(tmp_path: Path) -> None:
    source = tmp_path / "odd.onnx"
    source.write_bytes(onnx_file("Frobnicate"))
    with pytest.raises(ConfigError, match=r"odd\.onnx: .*No conversion rule found for operations: Frobnicate"):
        convert(source, tmp_path / "models", "odd")
    assert not (tmp_path / "models").exists()


@pytest.mark.parametrize("suffix", [".onnx", ".tflite", ".xml"])
def test_corrupt_file_is_refused_with_its_format(tmp_path: Path, suffix: str) -> None:
    source = tmp_path / f"broken{suffix}"
    source.write_bytes(b"this is no model\n")
    source.with_suffix(".bin").touch()
    with pytest.raises(ConfigError, match=r"cannot be read as (ONNX|TensorFlow Lite|OpenVINO IR)"):
        convert(source, tmp_path / "models", "broken")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.pth", "torch.export"),
        ("model.gguf", "GenAI"),
        ("model.weird", r"\.onnx"),
        ("model.xml", r"model\.bin are missing"),
        ("model.pdmodel", r"model\.pdiparams are missing"),
        ("model.pt", r"no file that PyTorch writes programs to.*torch\.export\.save"),
    ],
)
def test_file_that_cannot_be_converted_is_refused_with_an_alternative(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=message):
        convert(tmp_path / name, tmp_path / "models", "model")


def test_missing_path_and_empty_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file or folder"):
        convert(tmp_path / "absent.onnx", tmp_path, "model")
    with pytest.raises(ConfigError, match=r"no saved_model\.pb"):
        convert(tmp_path, tmp_path, "model")


def test_existing_version_is_kept_unless_forced(tmp_path: Path) -> None:
    source = _saved(_accumulator(), tmp_path)
    first = convert(source, tmp_path / "models", "sum").directory
    (first / "mark").touch()
    with pytest.raises(AlreadyExists, match="--force"):
        convert(source, tmp_path / "models", "sum")
    assert (first / "mark").exists()
    convert(source, tmp_path / "models", "sum", force=True)
    assert not (first / "mark").exists()
    assert [path.name for path in (tmp_path / "models" / "sum").iterdir()] == ["1"]


def test_state_found_by_name_is_kept_between_calls(tmp_path: Path) -> None:
    converted = convert(_saved(_accumulator(), tmp_path), tmp_path, "sum", wanted=Conversion(stateful=True))
    assert dict(converted.state) == {"total": "totaln"}
    assert [spec.name for spec in converted.inputs] == ["x"]
    assert [spec.name for spec in converted.outputs] == ["y"]
    request = ov.Core().compile_model(converted.directory / "model.xml", "CPU").create_infer_request()
    sums = [request.infer([np.full((1, 3), 2, np.float32)], share_inputs=True)[0][0, 0] for _ in range(3)]
    assert sums == [2, 4, 6]


def test_state_pairs_can_be_configured(tmp_path: Path) -> None:
    source = _saved(_accumulator("this", "that"), tmp_path)
    with pytest.raises(ConfigError, match="--state in=out"):
        convert(source, tmp_path, "sum", wanted=Conversion(stateful=True))
    with pytest.raises(ConfigError, match=r"no output 'thot'.*\['that', 'y'\]"):
        convert(source, tmp_path, "sum", wanted=Conversion(stateful=True, state={"this": "thot"}))
    converted = convert(source, tmp_path, "sum", wanted=Conversion(stateful=True, state={"this": "that"}))
    assert dict(converted.state) == {"this": "that"}


def test_state_of_an_open_batch_is_refused(tmp_path: Path) -> None:
    source = _saved(_accumulator(batch=-1), tmp_path)
    with pytest.raises(ConfigError, match="no fixed batch size"):
        convert(source, tmp_path, "sum", wanted=Conversion(stateful=True))


@pytest.mark.parametrize(
    ("before", "after", "paired"),
    [
        ("state", "stateN", True),
        ("h", "hn", True),
        ("past_k0", "present_k0", True),
        ("cache_in", "cache_out", True),
        ("audio_in", "audio_out", False),
        ("a", "b", False),
    ],
)
def test_states_are_detected_by_their_names(before: str, after: str, paired: bool) -> None:
    assert detect_state(_accumulator(before, after)) == ({before: after} if paired else {})


def test_low_latency_needs_a_loop(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="leave out --low_latency"):
        convert(_saved(_accumulator(), tmp_path), tmp_path, "sum", wanted=Conversion(low_latency=True))


def test_fp16_halves_the_weights(tmp_path: Path) -> None:
    weights = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    x = _parameter("x", [1, 64])
    product = _named(op.matmul(x, weights, transpose_a=False, transpose_b=False), "y")
    source = _saved(ov.Model([op.result(product)], [x], "product"), tmp_path)
    full = convert(source, tmp_path, "full").directory
    half = convert(source, tmp_path, "half", wanted=Conversion(fp16=True)).directory
    assert (half / "model.bin").stat().st_size == (full / "model.bin").stat().st_size // 2
    ones = np.ones((1, 64))
    np.testing.assert_allclose(_run(half, x=ones)["y"], _run(full, x=ones)["y"], atol=0.05)


def _binary_convolution() -> ov.Model:
    x = _parameter("x", [1, 3, 8, 8])
    filters = op.constant(np.ones((4, 3, 3, 3), np.float32))
    binary = op.binary_convolution(x, filters, [1, 1], [0, 0], [0, 0], [1, 1], "xnor-popcount", 0.0)
    return ov.Model([op.result(_named(binary, "y"))], [x], "binary")


def _two_outputs_of_one_name() -> ov.Model:
    x = _parameter("x", [1, 3])
    y = _named(op.relu(x), "y")
    return ov.Model([op.result(y), op.result(y)], [x], "twice")


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (_binary_convolution(), r"source\.xml: Cannot compile model into target device - CPU: .*f32"),
        (_two_outputs_of_one_name(), "two outputs are called 'y'"),
    ],
)
def test_model_that_a_server_could_not_load_is_refused(tmp_path: Path, model: ov.Model, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        convert(_saved(model, tmp_path), tmp_path / "models", "m")
    assert not (tmp_path / "models").exists()


def _product_source(folder: Path, shape: ov.PartialShape) -> Path:
    x = _named(op.parameter(shape, np.float32, name="x"), "x")
    product = op.matmul(x, np.ones((4, 2), np.float32), transpose_a=False, transpose_b=False)
    return _saved(ov.Model([op.result(_named(product, "y"))], [x], "product"), folder)


@pytest.mark.parametrize(
    ("form", "inputs", "outputs"),
    [
        ("x=FP32[1,4]", "FP32 [1,4]", "FP32 [1,2]"),
        ("x=[-1, 4]", "FP32 [-1,4]", "FP32 [-1,2]"),
        ("x=fp32(2:8,4)", "FP32 [[2~8],4]", "FP32 [[2~8],2]"),
    ],
)
def test_input_gets_the_given_type_and_shape(tmp_path: Path, form: str, inputs: str, outputs: str) -> None:
    wanted = Conversion(inputs=dict([parse_input_form(form)]))
    converted = convert(_product_source(tmp_path, ov.PartialShape.dynamic()), tmp_path, "product", wanted=wanted)
    assert [str(spec) for spec in converted.inputs] == [inputs]
    assert [str(spec) for spec in converted.outputs] == [outputs]


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ("x=FP32[1,5]", r"'x' has the shape \[\?,4\], and not \[1,5\]"),
        ("x=INT64[1,4]", "'x' is FP32, and not INT64; leave the type out"),
        ("xx=[1,4]", "no input 'xx'; did you mean x?"),
        ("image=[1,4]", "no input 'image'; it has x"),
    ],
)
def test_input_form_that_does_not_fit_the_model_is_refused(tmp_path: Path, form: str, message: str) -> None:
    wanted = Conversion(inputs=dict([parse_input_form(form)]))
    with pytest.raises(ConfigError, match=message):
        convert(_product_source(tmp_path, ov.PartialShape([-1, 4])), tmp_path / "models", "product", wanted=wanted)
    assert not (tmp_path / "models").exists()


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ("x", r"expected NAME=TYPE\[SIZES\] such as .*, got 'x'"),
        ("x=FP33[1]", "'FP33' is no element type; known are BOOL"),
        ("x=FP32[a]", "'a' is no dimension"),
    ],
)
def test_invalid_input_form_is_refused(form: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_input_form(form)


def test_version_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="disk full"), new_version(tmp_path, "model") as directory:  # noqa: PT012
        (directory / "half").touch()
        raise RuntimeError("disk full")
    assert list(tmp_path.iterdir()) == []
