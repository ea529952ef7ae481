from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import openvino as ov
import pytest

from ovmstrio.config.specs import ModelSpec
from ovmstrio.core.errors import ConfigError
from ovmstrio.inference.compile import ModelFile, compile_model
from ovmstrio.inference.model_readers import read_model, read_paddle
from ovmstrio.inference.network import Network
from tests.support.onnx_files import EXTERNAL_PLACES, onnx_external_file, onnx_loss_file
from tests.support.paddle_files import Layer, layers, write_field, write_model
from tests.support.servables import EXACT


async def test_onnx_file_that_cannot_be_read_by_its_path_is_read_by_its_content(tmp_path: Path) -> None:
    file = tmp_path / "model.onnx"
    file.write_bytes(onnx_loss_file())
    spec = ModelSpec(name="loss", base_path=tmp_path, plugin_config=EXACT)
    network = Network(compile_model(ModelFile(file, spec)))
    scores, target = np.array([[1, 2, 3], [4, 5, 6]], np.float32), np.array([0, 2], np.int64)
    (loss,) = await network.infer([scores, target])
    assert loss == -6


def test_onnx_file_with_external_weights_is_not_read_by_its_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # OpenVINO would take the weights from the working directory, and its error by content is less precise.
    weights = np.ones(3, np.float32).tobytes()
    (tmp_path / "weights.data").write_bytes(weights)
    file = external_model(tmp_path, onnx_loss_file(weights="weights.data"))
    (file.parent / "weights.data").write_bytes(weights)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="get_attribute is not implemented") as caught:
        read_model(file)
    assert caught.value.problems[0].file == str(file)


def external_model(folder: Path, content: bytes, name: str = "model.onnx") -> Path:
    (folder / "model").mkdir()
    for file in (folder / "secret", folder / "model" / "weights"):
        file.write_bytes(np.arange(4, dtype=np.float32).tobytes())
    (folder / "model" / "link").symlink_to(folder / "secret")
    (folder / "model" / "linked").symlink_to(folder)
    file = folder / "model" / name
    file.write_bytes(content)
    return file


@pytest.mark.parametrize(
    "location",
    [
        "/etc/passwd",
        "../secret",
        "a/../../secret",
        "a/../weights",
        "link",
        "linked/secret",
        "",
        ".//weights",
        "file:///etc/passwd",
        "file:weights",
        "..\\secret",
        "weights\0",
        "*/_ORT_MEM_ADDR_/*",
    ],
)
def test_external_data_outside_of_the_folder_of_the_model_is_refused(tmp_path: Path, location: str) -> None:
    file = external_model(tmp_path, onnx_external_file(location=location, offset="0", length="16"))
    with pytest.raises(ConfigError, match='tensor "weights" is outside of the model\'s folder'):
        read_model(file)


@pytest.mark.parametrize("name", ["model.onnx", "model.pb", "model.tflite"])
@pytest.mark.parametrize("place", EXTERNAL_PLACES)
def test_external_data_is_checked_wherever_a_model_has_tensors(tmp_path: Path, place: str, name: str) -> None:
    file = external_model(tmp_path, onnx_external_file(place, location="../secret"), name)
    with pytest.raises(ConfigError, match="outside of the model's folder"):
        read_model(file)


def test_external_data_is_found_after_unknown_fields_and_overlong_tags(tmp_path: Path) -> None:
    content = onnx_external_file(location="../secret")
    group = b"\xbb\x06\x08\x01\xc3\x06\xc4\x06\xbc\x06"  # group 103 with an integer and an empty group 104
    graph = content.index(b"\x3a")
    overlong = content[:graph] + b"\xba\x80\x80\x80\x10" + content[graph + 1 :]
    for number, written in enumerate((group + content, overlong)):
        (tmp_path / str(number)).mkdir()
        with pytest.raises(ConfigError, match="outside of the model's folder"):
            read_model(external_model(tmp_path / str(number), written))


@pytest.mark.parametrize("entries", [{}, {"offset": "0", "length": "16"}, {"length": "0"}])
async def test_external_data_in_the_folder_of_the_model_is_read_also_through_links(
    tmp_path: Path, entries: dict[str, str]
) -> None:
    file = external_model(tmp_path, onnx_external_file(location="inside/data", **entries))
    (file.parent / "inside").mkdir()
    (file.parent / "inside" / "data").symlink_to("../weights")
    network = Network(compile_model(ModelFile(file, ModelSpec(name="m", base_path=tmp_path, plugin_config=EXACT))))
    (sums,) = await network.infer([np.ones(4, np.float32)])
    np.testing.assert_array_equal(sums, [1, 2, 3, 4])


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"offset": "8", "length": "16"}, r"weights is too short \(expected 24 bytes, found 16 bytes\)"),
        ({"offset": "-4"}, "invalid extent"),
        ({"offset": "9" * 30}, "invalid extent"),
        ({"location": "missing"}, "cannot be read: No such file or directory"),
        ({"location": "fifo"}, "cannot be read: expected a regular file, got a FIFO"),
    ],
)
def test_incomplete_external_data_is_refused(tmp_path: Path, entries: dict[str, str], words: str) -> None:
    file = external_model(tmp_path, onnx_external_file(**{"location": "weights", **entries}))
    os.mkfifo(file.parent / "fifo")
    with pytest.raises(ConfigError, match=words):
        read_model(file)


def test_damaged_model_with_external_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the file is not an ONNX model: a field is longer than the file"):
        read_model(external_model(tmp_path, onnx_external_file(location="../secret")[:-1]))


def test_outputs_are_in_the_order_of_the_program(tmp_path: Path) -> None:
    first, second = layers(2)
    write_model(tmp_path, second, first)
    assert [output.get_any_name() for output in read_paddle(tmp_path).outputs] == ["fc_1.tmp_1", "fc_0.tmp_1"]


@pytest.mark.parametrize(("columns", "sample"), [(1, (2, 3)), (2, (2, 3)), (3, (4, 2, 3))])
def test_leading_dimensions_are_rows_of_the_matrix(tmp_path: Path, columns: int, sample: tuple[int, ...]) -> None:
    rows, inner = sample[: columns - 1], int(np.prod(sample[columns - 1 :]))
    weights = np.linspace(-1, 1, inner * 2, dtype=np.float32).reshape(inner, 2)
    write_model(tmp_path, Layer(weights, columns=columns), sample=sample)
    array = np.linspace(0, 1, 5 * int(np.prod(sample)), dtype=np.float32).reshape(5, *sample)
    (answer,) = ov.Core().compile_model(read_paddle(tmp_path), "CPU", EXACT)(array).values()
    np.testing.assert_allclose(answer, array.reshape(5, *rows, inner) @ weights, rtol=1e-5, atol=1e-6)


def test_reading_writes_nothing_into_the_folder(tmp_path: Path) -> None:
    write_model(tmp_path, *layers(), layout="separate", version=1_007_000)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    read_paddle(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "has no \\*.pdmodel"),
        ({"inference.pdmodel": b"x"}, "has no parameter file inference.pdiparams"),
        ({"inference.json": b"{}", "inference.pdiparams": b""}, "format of Paddle 3"),
        ({"__model__": b"\xff\xff"}, "not a Paddle program"),
        ({"__model__": b""}, "not a Paddle program: it has no operations"),
    ],
)
def test_folder_without_a_model_is_refused(tmp_path: Path, files: dict[str, bytes], message: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_paddle(tmp_path)


@pytest.mark.parametrize(
    ("operations", "message"),
    [
        (("sequence_pool", "sequence_conv"), "LoD tensors, and the model uses sequence_conv, sequence_pool"),
        (("fake_quantize_nothing",), "fake_quantize_nothing"),
    ],
)
def test_operations_that_openvino_lacks_are_named(tmp_path: Path, operations: tuple[str, ...], message: str) -> None:
    write_model(tmp_path, *layers(), extra=operations)
    with pytest.raises(ConfigError, match=message):
        read_paddle(tmp_path)


def test_missing_paths_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        read_paddle(tmp_path / "missing")
    write_model(tmp_path, *layers(), layout="separate")
    (tmp_path / "w0").unlink()
    with pytest.raises(ConfigError, match="cannot convert"):
        read_paddle(tmp_path)


@pytest.mark.parametrize("name", ["../w0", "/etc/passwd", "a/../../w0"])
def test_parameters_outside_of_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "model"
    write_model(folder, *layers(), layout="separate")
    (folder / "w0").rename(tmp_path / "w0")
    program = folder / "__model__"
    program.write_bytes(program.read_bytes() + write_field(1, write_field(3, write_field(1, name))))
    with pytest.raises(ConfigError, match="is outside of the model's folder"):
        read_paddle(folder)
