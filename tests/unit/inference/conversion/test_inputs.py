from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ovmstrio.core.errors import ConfigError
from ovmstrio.core.tensor import ANY_SIZE, BY_NAME, Dim, TensorSpec
from ovmstrio.inference.conversion import MAX_SAMPLES, read_calibration
from ovmstrio.inference.model_readers import message_fields, parse_paddle_program
from tests.support.paddle_files import write_field

X = TensorSpec("x", BY_NAME["FP32"], (ANY_SIZE, Dim.fixed(3)))
FIXED = TensorSpec("x", BY_NAME["FP32"], (Dim.fixed(2), Dim.fixed(3)))
IDS = TensorSpec("ids", BY_NAME["INT64"], (ANY_SIZE, Dim.fixed(1)))


def _write(path: Path, array: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.save(path, np.asarray(array))


def _numbers(rows: int) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    return np.arange(rows * 3, dtype=np.float32).reshape(rows, 3)


def _problems(folder: Path, *inputs: TensorSpec) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        read_calibration(folder, inputs)
    return [str(problem).replace(f"{folder}", "cal") for problem in raised.value.problems]


@pytest.mark.parametrize("place", [".", "x"])
def test_files_of_a_single_input_are_in_the_folder_or_a_folder_of_its_name(tmp_path: Path, place: str) -> None:
    _write(tmp_path / place / "b.npy", _numbers(1).astype(np.float64) + 1)
    _write(tmp_path / place / "a.npy", _numbers(2))
    found = read_calibration(tmp_path, [X])
    arrays = [found.arrays(sample)[0] for sample in found.samples]
    assert [array.tolist() for array in arrays] == [[[0, 1, 2], [3, 4, 5]], [[1, 2, 3]]]
    assert {array.dtype for array in arrays} == {np.dtype(np.float32)}


def test_files_are_split_into_batches_of_a_fixed_size(tmp_path: Path) -> None:
    _write(tmp_path / "a.npy", _numbers(6))
    found = read_calibration(tmp_path, [FIXED])
    assert [found.arrays(sample)[0][0, 0] for sample in found.samples] == [0, 6, 12]
    _write(tmp_path / "b.npy", _numbers(5))
    assert _problems(tmp_path, FIXED) == ["cal/b.npy: has the shape [5,3]; input 'x' is FP32 [2,3]"]


def test_files_of_several_inputs_are_joined_by_their_names(tmp_path: Path) -> None:
    for number in range(2):
        _write(tmp_path / "x" / f"{number}.npy", _numbers(1) + number)
        _write(tmp_path / "ids" / f"{number}.npy", [[number]])
    found = read_calibration(tmp_path, [IDS, X])
    assert [[each.tolist() for each in found.arrays(sample)] for sample in found.samples] == [
        [[[0]], [[0, 1, 2]]],
        [[[1]], [[1, 2, 3]]],
    ]


def test_each_file_that_does_not_fit_is_reported(tmp_path: Path) -> None:
    _write(tmp_path / "x" / "1.npy", _numbers(1)[0])
    _write(tmp_path / "x" / "2.npy", np.ones((1, 3), np.complex64))
    _write(tmp_path / "x" / "3.npy", _numbers(0))
    _write(tmp_path / "ids" / "1.npy", [[1.5]])
    _write(tmp_path / "idx" / "1.npy", [[1]])
    _write(tmp_path / "ids" / "2.npy", np.array([[None]], object))
    (tmp_path / "ids" / "3.npy").write_bytes(b"no array")
    _write(tmp_path / "ids" / "4.npy", [[1]])
    problems = _problems(tmp_path, X, IDS)
    shown = [re.sub(r"(cannot be read as \.npy): .*", r"\1", problem) for problem in problems]
    assert shown[:5] == [
        "cal/idx: folder with .npy files matches no input; did you mean ids?",
        "cal/x/1.npy: has the shape [3]; input 'x' is FP32 [-1,3]",
        "cal/ids/1.npy: has float64; input 'ids' is INT64 [-1,1]",
        "cal/x/2.npy: has complex64; input 'x' is FP32 [-1,3]",
        "cal/ids/2.npy: cannot be read as .npy",
    ]
    assert "cal/ids/3.npy: cannot be read as .npy" in shown
    assert "cal/x/3.npy: has the shape [0,3]; input 'x' is FP32 [-1,3]" in shown
    assert "cal: 4.npy is missing for x" in shown


def test_folder_without_samples_is_refused(tmp_path: Path) -> None:
    assert _problems(tmp_path, X) == ["cal: no .npy files there"]
    assert _problems(tmp_path, X, IDS) == ["cal: no .npy files in cal/x, cal/ids"]


def test_number_of_samples_is_bounded(tmp_path: Path) -> None:
    _write(tmp_path / "a.npy", _numbers(2 * MAX_SAMPLES + 2))
    assert len(read_calibration(tmp_path, [FIXED]).samples) == MAX_SAMPLES


@given(st.integers(1, 1000), st.lists(st.binary(max_size=300)), st.lists(st.integers(0, 2**64 - 1)))
def test_fields_are_read_as_written(number: int, contents: list[bytes], numbers: list[int]) -> None:
    data = b"".join(write_field(number, content) for content in contents)
    data += b"".join(write_field(number + 1, value) for value in numbers)
    assert list(message_fields(data, number)) == contents
    assert list(message_fields(data, number + 1)) == []


@given(st.binary())
def test_invalid_programs_raise_value_error(data: bytes) -> None:
    try:
        parse_paddle_program(data)
    except ValueError:
        return
    assert parse_paddle_program(data).content == data
