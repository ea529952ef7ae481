"""Arrays cut into the steps of a sequence."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ovms_cli.sequence_steps import Cutting, Steps, WrongOption, plan
from ovmstrio.client import TensorInfo
from ovmstrio.core.errors import InvalidRequest

AUDIO = TensorInfo("audio", "FP32", (1, 4))
OPEN = TensorInfo("audio", "FP32", (1, -1))
RATE = TensorInfo("rate", "INT64", ())
ROW = TensorInfo("row", "FP32", (1, 3))


def _plan(
    arrays: dict[str, Any], expected: list[TensorInfo], cutting: Cutting, notes: list[str] | None = None
) -> Steps:
    with TemporaryDirectory() as folder:
        for name, array in arrays.items():
            np.save(Path(folder) / name, array)
        given_ = [f"{name}={folder}/{name}.npy" for name in arrays]
        return plan(given_, expected, cutting, ([] if notes is None else notes).append)


def _numbers(size: int) -> np.ndarray[Any, Any]:
    return np.arange(1, size + 1, dtype=np.float32)


def test_the_size_of_the_input_is_the_length_of_a_part() -> None:
    """Ten numbers are three parts of four, the last of which is filled up with zeros; all of that is said."""
    notes: list[str] = []
    steps = _plan({"audio": _numbers(10)}, [AUDIO], Cutting(axis=1), notes)
    assert [each["audio"].tolist() for each in steps] == [[[1, 2, 3, 4]], [[5, 6, 7, 8]], [[9, 10, 0, 0]]]
    assert len(steps) == 3
    assert notes[1:] == [
        "input audio: 10 along axis 1, in 3 steps of 4",
        "the last 2 are fewer than 4: filled up with zeros",
    ]


@pytest.mark.parametrize(
    ("tensor", "pad", "last", "said"),
    [
        (AUDIO, False, [[5, 6, 7, 8]], "left out"),
        (OPEN, None, [[9, 10]], "sent as they are"),
        (OPEN, True, [[9, 10, 0, 0]], "filled up with zeros"),
        (OPEN, False, [[5, 6, 7, 8]], "left out"),
    ],
)
def test_a_short_last_part(tensor: TensorInfo, pad: bool | None, last: Any, said: str) -> None:
    """It is left out, filled up, or sent as it is where the input takes that."""
    notes: list[str] = []
    steps = _plan({"audio": _numbers(10)}, [tensor], Cutting(4, axis=-1, pad=pad), notes)
    assert [each["audio"].tolist() for each in steps][-1] == last
    assert notes[-1] == f"the last 2 are fewer than 4: {said}"


def test_the_longest_is_cut_and_what_is_as_long() -> None:
    """Two inputs go side by side, a third is sent whole at each step, as is one without such an axis."""
    expected = [TensorInfo("a", "FP32", (1, 2)), TensorInfo("b", "FP32", (-1, 2)), ROW, RATE]
    arrays = {
        "rate": np.array(16_000),
        "row": _numbers(3),
        "a": _numbers(8).reshape(4, 2),
        "b": -_numbers(8).reshape(4, 2),
    }
    notes: list[str] = []
    steps = list(_plan(arrays, expected, Cutting(), notes))
    assert len(steps) == 4
    assert {name: array.tolist() for name, array in steps[1].items()} == {
        "a": [[3, 4]],
        "b": [[-3, -4]],
        "row": [[1, 2, 3]],
        "rate": 16_000,
    }
    assert "input row: [1, 3] whole at each step" in notes


def test_an_input_is_sent_whole_if_that_is_asked_for() -> None:
    """One of the same length by chance stays as it is."""
    expected = [TensorInfo("a", "FP32", (1, 2)), TensorInfo("table", "FP32", (-1, 2))]
    arrays = {name: np.ones((3, 2), np.float32) for name in ("a", "table")}
    assert [each["table"].shape for each in _plan(arrays, expected, Cutting())] == [(1, 2)] * 3
    kept = _plan(arrays, expected, Cutting(whole=frozenset({"table"})))
    assert [each["table"].shape for each in kept] == [(3, 2)] * 3


@pytest.mark.parametrize(
    ("tensor", "size", "cutting", "text"),
    [
        (AUDIO, 8, Cutting(axis=2), r"--axis 2 is out of range: the model takes audio \[1, 4\]"),
        (AUDIO, 8, Cutting(axis=-3), "--axis -3 is out of range"),
        (AUDIO, 8, Cutting(3, axis=1), 'input "audio" takes 4 along axis 1, and not 3'),
        (OPEN, 8, Cutting(axis=1), "any length along axis 1 will do; say which: --chunk"),
        (AUDIO, 3, Cutting(axis=1, pad=False), "no part of 4 is left of a length of 3"),
        (OPEN, 0, Cutting(2, axis=1), "no part of 2 is left of a length of 0"),
        (AUDIO, 8, Cutting(whole=frozenset({"aduio"})), "--whole aduio: no input is called so; the model takes audio"),
        (AUDIO, 8, Cutting(whole=frozenset({"audio"})), "nothing is left to cut"),
    ],
)
def test_options_that_do_not_go_with_the_model(tensor: TensorInfo, size: int, cutting: Cutting, text: str) -> None:
    """They are refused with what the model takes."""
    with pytest.raises(WrongOption, match=text):
        _plan({"audio": np.zeros((1, size), np.float32)}, [tensor], cutting)


def test_what_does_not_fit_the_inputs_is_said() -> None:
    """Another shape beside the axis, another type, and a whole input of another size are refused."""
    with pytest.raises(InvalidRequest, match=r'"audio": expected FP32 \[1, -1\], got \[2, 8\]'):
        _plan({"audio": np.zeros((2, 8), np.float32)}, [AUDIO], Cutting(axis=1))
    with pytest.raises(InvalidRequest, match='"row": expected FP32, got complex64'):
        _plan({"row": np.zeros((2, 3), np.complex64)}, [ROW], Cutting())
    arrays = {"audio": np.zeros((1, 8), np.float32), "row": np.zeros((1, 2), np.float32)}
    with pytest.raises(InvalidRequest, match=r'"row" is not the longest .* expected FP32 \[1, 3\], got \[1, 2\]'):
        _plan(arrays, [AUDIO, ROW], Cutting(axis=1))


def test_texts_are_filled_up_with_empty_ones() -> None:
    """BYTES have no zeros."""
    words = TensorInfo("words", "BYTES", (2,))
    steps = _plan({"words": np.array([b"a", b"b", b"c"])}, [words], Cutting())
    assert [each["words"].tolist() for each in steps] == [[b"a", b"b"], [b"c", b""]]


@given(
    shape=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    axis=st.integers(-3, 2),
    size=st.integers(1, 7),
    pad=st.sampled_from([None, True, False]),
)
def test_parts_make_up_the_whole(shape: list[int], axis: int, size: int, pad: bool | None) -> None:
    """Joined again, parts are the array: less what was left out, or with zeros behind it."""
    if not -len(shape) <= axis < len(shape) or (pad is False and shape[axis] < size):
        return
    array = np.arange(1, 1 + np.prod(shape), dtype=np.float32).reshape(shape)
    tensor = TensorInfo("x", "FP32", (-1,) * len(shape))
    steps = _plan({"x": array}, [tensor], Cutting(size, axis, pad))
    parts = [each["x"] for each in steps]
    joined = np.moveaxis(np.concatenate(parts, axis), axis, 0)
    moved = np.moveaxis(array, axis, 0)
    same = min(len(joined), len(moved))
    np.testing.assert_array_equal(joined[:same], moved[:same])
    assert not joined[same:].any()
    assert len(parts) == len(steps)
    assert len(joined) == {None: len(moved), True: -(-len(moved) // size) * size, False: len(moved) // size * size}[pad]
