from __future__ import annotations

from pathlib import Path

import numpy as np
import openvino as ov
import openvino.opset13 as op
import pytest

from ovmstrio.core.errors import AlreadyExists, ConfigError
from ovmstrio.openvino.conversion import Conversion, convert, detect_state, new_version
from tests.support.onnx_files import onnx_file, onnx_loss_file


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


def _run(directory: Path, **inputs: object) -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
    compiled = ov.Core().compile_model(directory / "model.xml", "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    answers = compiled({name: np.array(value, np.float32) for name, value in inputs.items()}, share_inputs=True)
    return {port.get_any_name(): np.array(value) for port, value in answers.items()}


def test_an_onnx_file_becomes_a_version_that_computes_the_same(tmp_path: Path) -> None:
    """Converting a Relu gives IR that computes max(x, 0), described by its tensors."""
    source = tmp_path / "relu.onnx"
    source.write_bytes(onnx_file("Relu"))
    converted = convert(source, tmp_path / "models", "relu", 3)
    assert converted.directory == tmp_path / "models" / "relu" / "3"
    assert sorted(path.name for path in converted.directory.iterdir()) == ["model.bin", "model.xml"]
    assert [(spec.name, str(spec)) for spec in converted.inputs] == [("x", "FP32 [1,4]")]
    assert [(spec.name, str(spec)) for spec in converted.outputs] == [("y", "FP32 [1,4]")]
    assert _run(converted.directory, x=[[-1, 2, -3, 4]])["y"].tolist() == [[0, 2, 0, 4]]


def test_an_onnx_file_that_can_be_read_by_its_content_only_is_converted(tmp_path: Path) -> None:
    """OpenVINO cannot read it by its path."""
    source = tmp_path / "loss.onnx"
    source.write_bytes(onnx_loss_file())
    converted = convert(source, tmp_path / "models", "loss", 1)
    assert [(spec.name, str(spec)) for spec in converted.inputs] == [("scores", "FP32 [2,3]"), ("target", "INT64 [2]")]


def test_an_operation_that_openvino_lacks_is_named(tmp_path: Path) -> None:
    """The message for an unknown operation holds its name and nothing is left in the repository."""
    source = tmp_path / "odd.onnx"
    source.write_bytes(onnx_file("Frobnicate"))
    with pytest.raises(ConfigError, match=r"odd\.onnx: .*No conversion rule found for operations: Frobnicate"):
        convert(source, tmp_path / "models", "odd")
    assert not (tmp_path / "models").exists()


@pytest.mark.parametrize("suffix", [".onnx", ".tflite", ".xml"])
def test_a_corrupt_file_is_refused_with_its_format(tmp_path: Path, suffix: str) -> None:
    """Garbage under a model's suffix is said to be unreadable as that format."""
    source = tmp_path / f"broken{suffix}"
    source.write_bytes(b"this is no model\n")
    source.with_suffix(".bin").touch()
    with pytest.raises(ConfigError, match=r"cannot be read as (ONNX|TensorFlow Lite|OpenVINO IR)"):
        convert(source, tmp_path / "models", "broken")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("model.pth", "torch.export"),
        ("model.gguf", "GenAI"),
        ("model.weird", r"\.onnx"),
        ("model.xml", r"model\.bin are missing"),
        ("model.pdmodel", r"model\.pdiparams are missing"),
        ("model.pt", r"no file that PyTorch writes programs to.*torch\.export\.save"),
    ],
)
def test_a_file_that_cannot_be_converted_gets_a_way_out(tmp_path: Path, name: str, said: str) -> None:
    """Formats that OpenVINO does not read, and halves of models, are told apart."""
    (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=said):
        convert(tmp_path / name, tmp_path / "models", "model")


def test_nothing_there_and_a_folder_of_nothing_are_told_apart(tmp_path: Path) -> None:
    """A missing path and a folder that is no model each get their own message."""
    with pytest.raises(ConfigError, match="no such file or folder"):
        convert(tmp_path / "absent.onnx", tmp_path, "model")
    with pytest.raises(ConfigError, match=r"no saved_model\.pb"):
        convert(tmp_path, tmp_path, "model")


def test_an_existing_version_stays_unless_forced(tmp_path: Path) -> None:
    """A second conversion is refused; with force it replaces the first."""
    source = _saved(_accumulator(), tmp_path)
    first = convert(source, tmp_path / "models", "sum").directory
    (first / "mark").touch()
    with pytest.raises(AlreadyExists, match="--force"):
        convert(source, tmp_path / "models", "sum")
    assert (first / "mark").exists()
    convert(source, tmp_path / "models", "sum", force=True)
    assert not (first / "mark").exists()
    assert [path.name for path in (tmp_path / "models" / "sum").iterdir()] == ["1"]


def test_a_state_found_by_name_is_kept_between_calls(tmp_path: Path) -> None:
    """The pair total, totaln becomes a variable: the input disappears and the sums go on."""
    converted = convert(_saved(_accumulator(), tmp_path), tmp_path, "sum", wanted=Conversion(stateful=True))
    assert dict(converted.state) == {"total": "totaln"}
    assert [spec.name for spec in converted.inputs] == ["x"]
    assert [spec.name for spec in converted.outputs] == ["y"]
    request = ov.Core().compile_model(converted.directory / "model.xml", "CPU").create_infer_request()
    sums = [request.infer([np.full((1, 3), 2, np.float32)], share_inputs=True)[0][0, 0] for _ in range(3)]
    assert sums == [2, 4, 6]


def test_pairs_can_be_named(tmp_path: Path) -> None:
    """Names that say nothing are paired by the caller."""
    source = _saved(_accumulator("this", "that"), tmp_path)
    with pytest.raises(ConfigError, match="--state in=out"):
        convert(source, tmp_path, "sum", wanted=Conversion(stateful=True))
    with pytest.raises(ConfigError, match=r"no output 'thot'.*\['that', 'y'\]"):
        convert(source, tmp_path, "sum", wanted=Conversion(stateful=True, state={"this": "thot"}))
    converted = convert(source, tmp_path, "sum", wanted=Conversion(stateful=True, state={"this": "that"}))
    assert dict(converted.state) == {"this": "that"}


def test_a_state_of_any_batch_is_refused(tmp_path: Path) -> None:
    """A state without a fixed batch has no initial value, which would fail at the first call."""
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
def test_states_are_told_from_data_by_their_names(before: str, after: str, paired: bool) -> None:
    """Names that exporters use for states are paired, names of data are not."""
    assert detect_state(_accumulator(before, after)) == ({before: after} if paired else {})


def test_low_latency_needs_a_loop(tmp_path: Path) -> None:
    """A model without loops is refused, as it has no state to keep."""
    with pytest.raises(ConfigError, match="leave out --low_latency"):
        convert(_saved(_accumulator(), tmp_path), tmp_path, "sum", wanted=Conversion(low_latency=True))


def test_fp16_halves_the_weights(tmp_path: Path) -> None:
    """Half precision takes half the bytes and computes nearly the same."""
    weights = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    x = _parameter("x", [1, 64])
    product = _named(op.matmul(x, weights, transpose_a=False, transpose_b=False), "y")
    source = _saved(ov.Model([op.result(product)], [x], "product"), tmp_path)
    full = convert(source, tmp_path, "full").directory
    half = convert(source, tmp_path, "half", wanted=Conversion(fp16=True)).directory
    assert (half / "model.bin").stat().st_size == (full / "model.bin").stat().st_size // 2
    ones = np.ones((1, 64))
    np.testing.assert_allclose(_run(half, x=ones)["y"], _run(full, x=ones)["y"], atol=0.05)


def test_a_version_that_fails_leaves_nothing(tmp_path: Path) -> None:
    """An error while a version is filled removes what was begun."""

    def fill() -> None:
        with new_version(tmp_path, "model") as directory:
            (directory / "half").touch()
            raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        fill()
    assert list(tmp_path.iterdir()) == []


def test_what_openvino_reads_and_cannot_compile_is_refused(tmp_path: Path) -> None:
    """The message names the source and OpenVINO's reason, and nothing is left in the repository."""
    x = _parameter("x", [1, 3, 8, 8])
    filters = op.constant(np.ones((4, 3, 3, 3), np.float32))
    binary = op.binary_convolution(x, filters, [1, 1], [0, 0], [0, 0], [1, 1], "xnor-popcount", 0.0)
    source = _saved(ov.Model([op.result(_named(binary, "y"))], [x], "binary"), tmp_path)
    with pytest.raises(ConfigError, match=r"source\.xml: Cannot compile model into target device - CPU: .*f32"):
        convert(source, tmp_path / "models", "binary")
    assert not (tmp_path / "models").exists()


def test_what_a_server_would_refuse_is_refused(tmp_path: Path) -> None:
    """Two outputs of one name are one too many."""
    x = _parameter("x", [1, 3])
    y = _named(op.relu(x), "y")
    source = _saved(ov.Model([op.result(y), op.result(y)], [x], "twice"), tmp_path)
    with pytest.raises(ConfigError, match="two outputs are called 'y'"):
        convert(source, tmp_path / "models", "twice")
    assert not (tmp_path / "models").exists()
