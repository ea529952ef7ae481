from __future__ import annotations

from pathlib import Path

import numpy as np
import openvino as ov
import pytest

from ovmstrio.core.errors import ConfigError
from ovmstrio.openvino.paddle import read_paddle
from tests.support.paddle_files import Layer, layers, write_field, write_model
from tests.support.servables import EXACT


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
        ({}, "holds no \\*.pdmodel"),
        ({"inference.pdmodel": b"x"}, "without its parameters inference.pdiparams"),
        ({"inference.json": b"{}", "inference.pdiparams": b""}, "format of Paddle 3"),
        ({"__model__": b"\xff\xff"}, "is no Paddle program"),
        ({"__model__": b""}, "is no Paddle program: it has no operations"),
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
