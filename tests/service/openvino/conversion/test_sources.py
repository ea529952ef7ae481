from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import openvino as ov
import openvino.opset13 as op
import pytest

from ovmstrio.core.errors import ConfigError
from ovmstrio.openvino.conversion import convert
from ovmstrio.openvino.conversion.sources import find_models, framework_of
from ovmstrio.openvino.reading import read_model
from tests.support.onnx_files import onnx_file
from tests.support.paddle_files import Layer, layers, write_model
from tests.support.servables import EXACT

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
    with pytest.raises(ConfigError, match=r"all be called 'small_net': .*net\.onnx, .*net\.tflite; .*one by one"):
        find_models(tmp_path)


def test_hidden_files_and_other_files_are_no_models(tmp_path: Path) -> None:
    _files(tmp_path, ".git/a.onnx", ".b.onnx", "c.bin", "README.md")
    (tmp_path / "pom.xml").write_text("<project/>")
    with pytest.raises(ConfigError, match=r"no model lies in the folder; known are \.xml"):
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
    assert framework_of(tmp_path / "a" / "__model__") == "PaddlePaddle"
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
    assert framework_of(_archive(tmp_path / f"m{suffix}", entries)) == framework


def test_weights_without_a_program_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"pickled objects .* no program; .*torch\.export\.save"):
        framework_of(_archive(tmp_path / "weights.pt", ["weights/data.pkl", "weights/data/0"]))


def _archive(path: Path, entries: list[str]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for entry in entries:
            archive.writestr(entry, "")
    return path


def test_missing_torch_is_reported_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    source = _archive(tmp_path / "m.pt2", ["m/archive_format"])
    with pytest.raises(ConfigError, match=r"needs torch and packaging; \S+ -m pip install .*\[torch\].*, or .* ONNX"):
        convert(source, tmp_path / "models", "m")


def test_input_of_unknown_rank_needs_a_shape(tmp_path: Path) -> None:
    x = op.parameter(ov.PartialShape.dynamic(), np.float32, name="x")
    y = op.relu(x)
    y.output(0).set_names({"y"})
    ov.save_model(ov.Model([op.result(y)], [x], "any"), tmp_path / "any.xml")
    with pytest.raises(ConfigError, match=r"no number of dimensions of 'x'; tell them: --input 'x=FP32\[-1,\.\.\.\]'"):
        convert(tmp_path / "any.xml", tmp_path / "models", "any")


def test_empty_onnx_file_is_refused(tmp_path: Path) -> None:
    _files(tmp_path, "empty.onnx")
    with pytest.raises(ConfigError, match="without outputs; is the file complete"):
        convert(tmp_path / "empty.onnx", tmp_path / "models", "empty")
    (tmp_path / "relu.onnx").write_bytes(onnx_file("Relu"))
    assert convert(tmp_path / "relu.onnx", tmp_path / "models", "relu").framework == "ONNX"
