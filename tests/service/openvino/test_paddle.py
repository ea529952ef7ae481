"""Reading Paddle models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest

from ovmstrio.core.errors import ConfigError
from ovmstrio.openvino.paddle import read_paddle
from tests.support.paddle_files import Layer, layers, write_field, write_model

X = np.array([[1, 2, 3], [0.5, 0, -1]], np.float32)


def run(model: ov.Model, array: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    """Infer exactly."""
    compiled = ov.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return list(compiled(array).values())


@pytest.mark.parametrize("layout", ["pdmodel", "params", "separate"])
@pytest.mark.parametrize("version", [0, 1_007_000, 1_008_005, 2_006_002])
def test_reads_layout(tmp_path: Path, layout: Any, version: int) -> None:
    """Each layout, of each age, gives a model with the program's names and exact numbers."""
    (layer,) = layers()
    write_model(tmp_path, layer, layout=layout, version=version)

    model = read_paddle(tmp_path)

    assert model.input(0).get_names() == {"x"}
    assert model.output(0).get_names() == {"fc_0.tmp_1"}
    np.testing.assert_allclose(run(model, X)[0], layer.of(X), rtol=1e-6)


def test_outputs_are_in_the_order_of_the_program(tmp_path: Path) -> None:
    """Outputs come as the program fetches them, whatever their names."""
    first, second = layers(2)
    write_model(tmp_path, second, first)

    assert [output.get_any_name() for output in read_paddle(tmp_path).outputs] == ["fc_1.tmp_1", "fc_0.tmp_1"]


@pytest.mark.parametrize(("columns", "sample"), [(1, (2, 3)), (2, (2, 3)), (3, (4, 2, 3))])
def test_multiplies_more_dimensions_than_two(tmp_path: Path, columns: int, sample: tuple[int, ...]) -> None:
    """Dimensions up to a position are rows of the matrix, and come back in the answer."""
    rows, inner = sample[: columns - 1], int(np.prod(sample[columns - 1 :]))
    weights = np.linspace(-1, 1, inner * 2, dtype=np.float32).reshape(inner, 2)
    write_model(tmp_path, Layer(weights, columns=columns), sample=sample)
    array = np.linspace(0, 1, 5 * int(np.prod(sample)), dtype=np.float32).reshape(5, *sample)

    (answer,) = run(read_paddle(tmp_path), array)

    np.testing.assert_allclose(answer, array.reshape(5, *rows, inner) @ weights, rtol=1e-5, atol=1e-6)


def test_leaves_the_folder_alone(tmp_path: Path) -> None:
    """Nothing is written beside the model."""
    write_model(tmp_path, *layers(), layout="separate", version=1_007_000)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    read_paddle(tmp_path)

    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "holds no \\*.pdmodel"),
        ({"inference.pdmodel": b"x"}, "without its parameters inference.pdiparams"),
        ({"inference.json": b"{}", "inference.pdiparams": b""}, "format of Paddle 3"),
        ({"__model__": b"\xff\xff"}, "is no Paddle program"),
        ({"__model__": b""}, "is no Paddle program: it has no operations"),
    ],
)
def test_tells_why_a_folder_is_no_model(tmp_path: Path, files: dict[str, bytes], message: str) -> None:
    """A folder that holds no model, or half of one, is refused with the reason."""
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)

    with pytest.raises(ConfigError, match=message):
        read_paddle(tmp_path)


def test_tells_that_there_is_no_folder(tmp_path: Path) -> None:
    """A path that leads nowhere is refused."""
    with pytest.raises(ConfigError, match="no such folder"):
        read_paddle(tmp_path / "missing")


@pytest.mark.parametrize("name", ["../w0", "/etc/passwd", "a/../../w0"])
def test_parameters_outside_of_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    """OpenVINO takes the names of parameters that have a file each for paths."""
    folder = tmp_path / "model"
    write_model(folder, *layers(), layout="separate")
    (folder / "w0").rename(tmp_path / "w0")
    program = folder / "__model__"
    program.write_bytes(program.read_bytes() + write_field(1, write_field(3, write_field(1, name))))

    with pytest.raises(ConfigError, match="is outside of the model's folder"):
        read_paddle(folder)


def test_names_operations_on_sequences(tmp_path: Path) -> None:
    """A model of sequences is refused with the operations that OpenVINO has not."""
    write_model(tmp_path, *layers(), extra=("sequence_pool", "sequence_conv"))

    with pytest.raises(ConfigError, match="LoD tensors, and the model uses sequence_conv, sequence_pool"):
        read_paddle(tmp_path)


def test_names_unknown_operations(tmp_path: Path) -> None:
    """A model with an operation that OpenVINO does not know is refused with its name."""
    write_model(tmp_path, *layers(), extra=("fake_quantize_nothing",))

    with pytest.raises(ConfigError, match="fake_quantize_nothing"):
        read_paddle(tmp_path)


def test_tells_that_parameters_are_missing(tmp_path: Path) -> None:
    """A model of which a parameter's file is missing is refused, and the process lives on."""
    write_model(tmp_path, *layers(), layout="separate")
    (tmp_path / "w0").unlink()

    with pytest.raises(ConfigError, match="cannot convert"):
        read_paddle(tmp_path)
