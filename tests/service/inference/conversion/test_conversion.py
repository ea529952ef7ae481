from __future__ import annotations

import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino.opset13 as op
import pytest

from ovmstrio.core.errors import AlreadyExists, ConfigError
from ovmstrio.inference.conversion import (
    Conversion,
    Converted,
    convert,
    detect_framework,
    detect_state,
    find_models,
    new_version,
    parse_input_form,
)
from ovmstrio.inference.model_readers import read_model
from tests.support.onnx_files import onnx_file, onnx_loss_file
from tests.support.paddle_files import Layer, layers, write_model
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


@pytest.mark.parametrize("suffix", [".onnx", ".tflite", ".xml"])
def test_corrupt_file_is_refused_with_its_format(tmp_path: Path, suffix: str) -> None:
    source = tmp_path / f"broken{suffix}"
    source.write_bytes(b"this is no model\n")
    source.with_suffix(".bin").touch()
    with pytest.raises(ConfigError, match=r"cannot be read as (ONNX|TensorFlow Lite|OpenVINO IR)"):
        convert(source, tmp_path / "models", "broken")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("model.pth", b"", "torch.export"),
        ("model.gguf", b"", "GenAI"),
        ("model.weird", b"", r"\.onnx"),
        ("model.xml", b"", r"model\.bin are missing"),
        ("model.pdmodel", b"", r"model\.pdiparams are missing"),
        ("model.pt", b"", r"not a PyTorch program file.*torch\.export\.save"),
        ("odd.onnx", onnx_file("Frobnicate"), r"odd\.onnx: .*No conversion rule found for operations: Frobnicate"),
        ("folder/other", b"", r"no saved_model\.pb"),
        ("absent.onnx", None, "no such file or folder"),
    ],
)
def test_file_that_cannot_be_converted_is_refused(
    tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    source = tmp_path / name
    source.parent.mkdir(exist_ok=True)
    if content is not None:
        source.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        convert(tmp_path / name.partition("/")[0], tmp_path / "models", "model")
    assert not (tmp_path / "models").exists()


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
    with pytest.raises(ConfigError, match="leave out --low-latency"):
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
        (_two_outputs_of_one_name(), "two outputs are named 'y'"),
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
        ("x=FP32[1,5]", r"'x' has the shape \[\?,4\], not \[1,5\]"),
        ("x=INT64[1,4]", "'x' is FP32, not INT64; leave the type out"),
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
        ("x=FP33[1]", "unknown element type 'FP33'; known are BOOL"),
        ("x=FP32[a]", "invalid dimension 'a'"),
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


X = np.array([[1, 2, 3], [0.5, 0, -1]], np.float32)


def _files(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"<?xml?><net>" if name.endswith(".xml") else b"")


def _found(folder: Path) -> dict[str, str]:
    return {model.name: model.path.relative_to(folder).as_posix() for model in find_models(folder)}


def test_models_are_named_after_their_files_or_folders(tmp_path: Path) -> None:
    _files(
        tmp_path, "relu.onnx", "det/inference.pdmodel", "cls/__model__", "flowers/saved_model.pb", "resnet/2/model.xml"
    )
    _files(tmp_path, "det/inference.pdiparams", "flowers/variables/model.pb", "other/my model.onnx")
    (lone,) = find_models(tmp_path / "other/my model.onnx")
    assert (lone.path, lone.name) == (tmp_path / "other/my model.onnx", "my_model")
    assert _found(tmp_path) == {
        "cls": "cls",
        "det": "det/inference.pdmodel",
        "flowers": "flowers",
        "my_model": "other/my model.onnx",
        "relu": "relu.onnx",
        "resnet": "resnet/2/model.xml",
    }


def test_models_of_one_name_are_distinguished_by_their_folders(tmp_path: Path) -> None:
    _files(tmp_path, "small/net.onnx", "large/net.onnx")
    assert _found(tmp_path) == {"small_net": "small/net.onnx", "large_net": "large/net.onnx"}
    _files(tmp_path, "small/net.tflite")
    with pytest.raises(ConfigError, match=r"have the name 'small_net': .*net\.onnx, .*net\.tflite; .*one by one"):
        find_models(tmp_path)


def test_hidden_files_and_other_files_are_no_models(tmp_path: Path) -> None:
    _files(tmp_path, ".git/a.onnx", ".b.onnx", "c.bin", "README.md")
    (tmp_path / "pom.xml").write_text("<project/>")
    with pytest.raises(ConfigError, match=r"no model found in the folder; known are \.xml"):
        find_models(tmp_path)


@pytest.mark.parametrize("layout", ["pdmodel", "params", "separate"])
@pytest.mark.parametrize("version", [0, 1_007_000, 1_008_005, 2_006_002])
def test_paddle_model_of_any_layout_and_version_is_converted(tmp_path: Path, layout: str, version: int) -> None:
    (layer,) = layers()
    write_model(tmp_path / "fc", layer, layout=layout, version=version)  # type: ignore[arg-type]
    (model,) = find_models(tmp_path / "fc")
    converted = convert(model.path, tmp_path / "models", model.name)
    assert (model.name, converted.framework) == ("fc", "PaddlePaddle")
    assert [(spec.name, str(spec)) for spec in converted.inputs] == [("x", "FP32 [-1,3]")]
    assert [spec.name for spec in converted.outputs] == [layer.output]
    compiled = ov.Core().compile_model(converted.directory / "model.xml", "CPU", EXACT)
    np.testing.assert_allclose(compiled(X, share_inputs=True)[0], layer.of(X), rtol=1e-6)


def test_program_file_stands_for_its_folder_of_parameters(tmp_path: Path) -> None:
    first, second = layers(2)
    write_model(tmp_path / "a", first, layout="separate")
    assert detect_framework(tmp_path / "a" / "__model__") == "PaddlePaddle"
    assert _outputs(tmp_path / "a" / "__model__", tmp_path) == ["fc_0.tmp_1"]
    write_model(tmp_path / "b", second)
    for suffix in ("pdmodel", "pdiparams"):
        (tmp_path / "b" / f"inference.{suffix}").rename(tmp_path / "b" / f"second.{suffix}")
    write_model(tmp_path / "b", first)
    assert _outputs(tmp_path / "b" / "second.pdmodel", tmp_path) == [second.output]


def _outputs(source: Path, repository: Path) -> list[str]:
    return [spec.name for spec in convert(source, repository, "read", force=True).outputs]


def test_pdmodel_of_paddle_1_is_read(tmp_path: Path) -> None:
    write_model(tmp_path, Layer(np.ones((3, 2), np.float32)), version=1_007_000)
    model = read_model(tmp_path / "inference.pdmodel")
    assert [port.get_any_name() for port in model.inputs] == ["x"]


@pytest.mark.parametrize(
    ("entries", "framework"),
    [
        (["m/archive_format", "m/models/model.json"], "PyTorch export"),
        (["serialized_exported_program.json"], "PyTorch export"),
        (["m/data.pkl", "m/code/__torch__.py"], "TorchScript"),
    ],
)
@pytest.mark.parametrize("suffix", [".pt", ".pt2"])
def test_contents_of_a_file_of_pytorch_decide_its_format(
    tmp_path: Path, entries: list[str], framework: str, suffix: str
) -> None:
    assert detect_framework(_archive(tmp_path / f"m{suffix}", entries)) == framework


def test_weights_without_a_program_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"pickled PyTorch objects.* no program; .*torch\.export\.save"):
        detect_framework(_archive(tmp_path / "weights.pt", ["weights/data.pkl", "weights/data/0"]))


def _archive(path: Path, entries: list[str]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for entry in entries:
            archive.writestr(entry, "")
    return path


def test_missing_packages_are_reported_with_the_command_that_installs_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    source = _archive(tmp_path / "m.pt2", ["m/archive_format"])
    with pytest.raises(ConfigError, match=r"needs torch and packaging; \S+ -m pip install .*\[torch\].*, or .* ONNX"):
        convert(source, tmp_path / "models", "m")
    with pytest.raises(ConfigError, match=r"quantization needs nncf; \S+ -m pip install .*\[quantize\]"):
        convert(_picture_model(tmp_path), tmp_path, "m", wanted=Conversion(calibration=_picture_samples(tmp_path)))


def test_input_of_unknown_rank_needs_a_shape(tmp_path: Path) -> None:
    x = op.parameter(ov.PartialShape.dynamic(), np.float32, name="x")
    y = op.relu(x)
    y.output(0).set_names({"y"})
    ov.save_model(ov.Model([op.result(y)], [x], "any"), tmp_path / "any.xml")
    with pytest.raises(ConfigError, match=r"no rank for 'x'; specify --input 'x=FP32\[-1,\.\.\.\]'"):
        convert(tmp_path / "any.xml", tmp_path / "models", "any")


def test_empty_onnx_file_is_refused(tmp_path: Path) -> None:
    _files(tmp_path, "empty.onnx")
    with pytest.raises(ConfigError, match="has no outputs; is the file complete"):
        convert(tmp_path / "empty.onnx", tmp_path / "models", "empty")
    (tmp_path / "relu.onnx").write_bytes(onnx_file("Relu"))
    assert convert(tmp_path / "relu.onnx", tmp_path / "models", "relu").framework == "ONNX"


RANDOM = np.random.default_rng(0)
needs_nncf = pytest.mark.skipif(find_spec("nncf") is None, reason="quantization needs the extra quantize")


def _picture_model(folder: Path) -> Path:
    x = _named(op.parameter([-1, 3, 8, 8], np.float32, name="x"), "x")
    bias = _named(op.parameter([-1, 64, 1, 1], np.float32, name="bias"), "bias")
    weights = RANDOM.normal(size=(64, 3, 3, 3)).astype(np.float32)
    convolved = op.relu(op.convolution(x, weights, [1, 1], [0, 0], [0, 0], [1, 1]))
    model = ov.Model([op.result(_named(op.add(convolved, bias), "y"))], [bias, x], "pictures")
    ov.save_model(model, folder / "pictures.xml", compress_to_fp16=False)
    return folder / "pictures.xml"


def _picture_samples(folder: Path) -> Path:
    for number in range(8):
        for name, shape in (("x", (1, 3, 8, 8)), ("bias", (1, 64, 1, 1))):
            (folder / "samples" / name).mkdir(parents=True, exist_ok=True)
            np.save(folder / "samples" / name / f"{number}.npy", RANDOM.normal(size=shape).astype(np.float32))
    return folder / "samples"


@needs_nncf
def test_quantized_model_is_smaller_and_computes_nearly_the_same(tmp_path: Path) -> None:
    source = _picture_model(tmp_path)
    full = convert(source, tmp_path, "full")
    small = convert(source, tmp_path, "small", wanted=Conversion(calibration=_picture_samples(tmp_path)))
    assert (small.samples, full.samples) == (8, 0)
    assert (small.inputs, small.outputs) == (full.inputs, full.outputs)
    sizes = [(each.directory / "model.bin").stat().st_size for each in (small, full)]
    assert sizes[0] < 0.5 * sizes[1]
    x, bias = RANDOM.normal(size=(2, 3, 8, 8)).astype(np.float32), np.zeros((2, 64, 1, 1), np.float32)
    approximate, exact = (_run(each.directory, x=x, bias=bias)["y"].ravel() for each in (small, full))
    assert np.corrcoef(approximate, exact)[0, 1] > 0.99
    assert not np.array_equal(approximate, exact)


@needs_nncf
def test_samples_that_do_not_fit_are_refused_and_nothing_is_written(tmp_path: Path) -> None:
    samples = _picture_samples(tmp_path)
    np.save(samples / "x" / "8.npy", np.ones((1, 3, 8), np.float32))
    np.save(samples / "bias" / "8.npy", np.ones((1, 64, 1, 1), np.float32))
    with pytest.raises(ConfigError, match=r"x/8\.npy: has the shape \[1,3,8\]; input 'x' is FP32 \[-1,3,8,8\]"):
        convert(_picture_model(tmp_path), tmp_path / "models", "m", wanted=Conversion(calibration=samples))
    assert not (tmp_path / "models").exists()


@needs_nncf
def test_infinite_samples_are_refused(tmp_path: Path) -> None:
    samples = _picture_samples(tmp_path)
    np.save(samples / "x" / "3.npy", np.full((1, 3, 8, 8), np.nan, np.float32))
    with pytest.raises(ConfigError, match=r"x/3\.npy: has non-finite numbers"):
        convert(_picture_model(tmp_path), tmp_path / "models", "m", wanted=Conversion(calibration=samples))


@needs_nncf
def test_model_without_anything_to_quantize_is_refused(tmp_path: Path) -> None:
    x = _named(op.parameter([1, 3], np.float32, name="x"), "x")
    ov.save_model(ov.Model([op.result(_named(op.relu(x), "y"))], [x], "relu"), tmp_path / "relu.xml")
    (tmp_path / "samples").mkdir()
    np.save(tmp_path / "samples" / "a.npy", np.ones((1, 3), np.float32))
    with pytest.raises(ConfigError, match="leave out --quantize"):
        convert(tmp_path / "relu.xml", tmp_path, "relu", wanted=Conversion(calibration=tmp_path / "samples"))


# torch stays out of this process: it is large, and starts threads.
_WRITE_TORCH = """
import sys, warnings
warnings.simplefilter("ignore")
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)
        with torch.no_grad():
            self.layer.weight.copy_(torch.arange(12.0).reshape(3, 4))
            self.layer.bias.fill_(-10.0)
    def forward(self, pixels):
        return torch.relu(self.layer(pixels))

net, pixels = Net().eval(), torch.ones(2, 4)
rows = {"pixels": {0: torch.export.Dim("rows")}}
torch.export.save(torch.export.export(net, (pixels,), dynamic_shapes=rows), "free.pt2")
torch.export.save(torch.export.export(net, (pixels,)), "fixed.pt2")
torch.jit.save(torch.jit.trace(net, pixels), "traced.pt")
torch.jit.save(torch.jit.script(net), "scripted.pt")
"""


@pytest.fixture(scope="module")
def torch_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("torch", reason="torch is not installed: programs of PyTorch cannot be made or read")
    folder = tmp_path_factory.mktemp("torch")
    (folder / "write.py").write_text(_WRITE_TORCH)  # TorchScript wants to read its source
    subprocess.run([sys.executable, "write.py"], cwd=folder, check=True, capture_output=True, timeout=300)
    return folder


def _convert_torch(source: Path, folder: Path, *inputs: str) -> Converted:
    return convert(source, folder, "net", wanted=Conversion(inputs=dict(map(parse_input_form, inputs))))


@pytest.mark.parametrize(
    ("file", "framework", "inputs", "forms"),
    [
        ("free.pt2", "PyTorch export", ["FP32 [-1,4]"], ()),
        ("fixed.pt2", "PyTorch export", ["FP32 [2,4]"], ()),
        ("traced.pt", "TorchScript", ["FP32 [-1,-1]"], ()),
        ("traced.pt", "TorchScript", ["FP32 [-1,4]"], ("pixels=[-1,4]",)),
        ("scripted.pt", "TorchScript", ["FP32 [-1,4]"], ("pixels=FP32[-1,4]",)),
    ],
)
def test_torch_program_computes_the_same(
    torch_folder: Path, tmp_path: Path, file: str, framework: str, inputs: list[str], forms: tuple[str, ...]
) -> None:
    converted = _convert_torch(torch_folder / file, tmp_path, *forms)
    assert converted.framework == framework
    assert [(spec.name, str(spec)) for spec in converted.inputs] == [("pixels", inputs[0])]
    compiled = ov.Core().compile_model(converted.directory / "model.xml", "CPU", EXACT)
    pixels = np.array([[1, 0, 2, 0], [0, 1, 0, 1]], np.float32)
    expected = np.maximum(pixels @ np.arange(12, dtype=np.float32).reshape(3, 4).T - 10, 0)
    assert compiled({"pixels": pixels}, share_inputs=True)[0].tolist() == expected.tolist()


def test_scripted_program_needs_types_and_shapes_of_its_inputs(torch_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no rank for 'pixels'; specify --input 'pixels=FP32\[-1,\.\.\.\]'"):
        _convert_torch(torch_folder / "scripted.pt", tmp_path)


def test_damaged_program_is_refused_in_one_line(torch_folder: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "half.pt2", "w") as archive:
        archive.writestr("half/archive_format", "pt2")
    with pytest.raises(ConfigError, match=r"half\.pt2: torch cannot read the file: .*torch\.export") as raised:
        _convert_torch(tmp_path / "half.pt2", tmp_path)
    assert "\n" not in str(raised.value)
