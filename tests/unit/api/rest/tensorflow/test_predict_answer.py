"""Answers of predict calls: rows and columns, names and none, and how each datatype is printed."""

from __future__ import annotations

import base64
import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from ovmstrio.api.tensorflow.rest.predict_answer import render_predict_answer
from ovmstrio.core.datatypes import BY_NAME
from ovmstrio.core.errors import InvalidRequest, ModelFailure
from ovmstrio.core.request import InferResponse
from ovmstrio.core.tensor import RawTensor, Tensor

NUMBERS = [name for name in BY_NAME if name not in {"BYTES", "BF16"}]
WORDS = [math.nan, math.inf, -math.inf]


def _tensor(name: str, datatype: str, values: Any) -> Tensor:
    row = BY_NAME[datatype]
    return Tensor(name, row, np.array(values, row.numpy))


def _text(*outputs: Tensor | RawTensor, by_rows: bool = False) -> str:
    answer = render_predict_answer(InferResponse("m", "1", [*outputs]), by_rows=by_rows)
    assert (answer.status, answer.headers) == (200, (("content-type", "application/json"),))
    return answer.content.decode()


def _json(*outputs: Tensor | RawTensor, by_rows: bool = False) -> Any:
    return json.loads(_text(*outputs, by_rows=by_rows))


@st.composite
def _tensors(draw: st.DrawFn) -> tuple[str, np.ndarray[Any, Any]]:
    datatype = draw(st.sampled_from(NUMBERS))
    shape = draw(arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
    return datatype, draw(arrays.arrays(BY_NAME[datatype].numpy, shape))


@given(_tensors())
def test_numbers_read_back_as_they_were(given_tensor: tuple[str, np.ndarray[Any, Any]]) -> None:
    """Every datatype and shape, with NaN and infinities, alone and beside another output."""
    datatype, array = given_tensor
    tensor = Tensor("y", BY_NAME[datatype], array)
    alone = _json(tensor)["outputs"]
    named = _json(tensor, _tensor("z", "FP32", [1]))["outputs"]
    assert set(named) == {"y", "z"}
    for values in (alone, named["y"]):
        read = np.array(values, array.dtype)
        np.testing.assert_array_equal(read, array.reshape(read.shape))


@given(_tensors())
def test_rows_are_those_of_the_columns(given_tensor: tuple[str, np.ndarray[Any, Any]]) -> None:
    """One output's predictions are its rows, those of several are objects."""
    datatype, array = given_tensor
    if not array.ndim:
        return
    tensor = Tensor("y", BY_NAME[datatype], array)
    assert _text(tensor, by_rows=True).partition(":")[2] == _text(tensor).partition(":")[2]
    beside = _tensor("z", "BYTES", [f"row {number}".encode() for number in range(len(array))])
    rows = _json(tensor, beside, by_rows=True)["predictions"]
    assert [row["z"] for row in rows] == [f"row {number}" for number in range(len(array))]
    np.testing.assert_equal([row["y"] for row in rows], _json(tensor)["outputs"])


def test_forms_of_answers() -> None:
    """An output alone has no name; several are objects, by rows one a row."""
    y = _tensor("y", "FP32", [[1, 2], [3, 4]])
    z = _tensor("z", "INT64", [5, 6])
    assert _text(y) == '{"outputs":[[1.0,2.0],[3.0,4.0]]}'
    assert _text(y, z) == '{"outputs":{"y":[[1.0,2.0],[3.0,4.0]],"z":[5,6]}}'
    assert _text(y, by_rows=True) == '{"predictions":[[1.0,2.0],[3.0,4.0]]}'
    assert _text(y, z, by_rows=True) == '{"predictions":[{"y":[1.0,2.0],"z":5},{"y":[3.0,4.0],"z":6}]}'
    assert _text(_tensor("y", "FP64", 0.1)) == '{"outputs":0.1}'


def test_the_sequence_is_an_output_as_others_are() -> None:
    """So what a model with sequences answers always has names."""
    identity = _tensor("sequence_id", "UINT64", [2**64 - 1])
    text = _text(_tensor("y", "FP32", [[1.5]]), identity)
    assert text == '{"outputs":{"y":[[1.5]],"sequence_id":[18446744073709551615]}}'


@pytest.mark.parametrize("datatype", ["FP32", "FP64", "FP16"])
def test_what_is_no_number_is_a_word(datatype: str) -> None:
    """The words are bare, wherever they stand."""
    assert _text(_tensor("y", datatype, [[*WORDS], [0.5, math.inf, 2]])) == (
        '{"outputs":[[NaN,Infinity,-Infinity],[0.5,Infinity,2.0]]}'
    )
    assert _text(_tensor("y", datatype, math.nan)) == '{"outputs":NaN}'
    beside = _tensor("z", "INT8", [1, 2])
    assert _text(_tensor("y", datatype, [math.inf, 0.5]), beside, by_rows=True) == (
        '{"predictions":[{"y":Infinity,"z":1},{"y":0.5,"z":2}]}'
    )


def test_arrays_need_not_be_contiguous() -> None:
    """What OpenVINO gives may be a view."""
    array = np.arange(6, dtype=np.float32).reshape(2, 3).T
    assert _json(Tensor("y", BY_NAME["FP32"], array))["outputs"] == array.tolist()


def test_bf16_shows_the_numbers() -> None:
    """Not their bits."""
    bits = (np.array([[0.5, -2, math.nan]], np.float32).view(np.uint32) >> 16).astype(np.uint16)
    assert _text(Tensor("y", BY_NAME["BF16"], bits)) == '{"outputs":[[0.5,-2.0,NaN]]}'


def test_texts_are_texts_unless_the_name_says_bytes() -> None:
    """Or unless one of them is no text."""
    texts = [[b"a", "ü\0".encode()], [b"", b"b"]]
    encoded = [[{"b64": base64.b64encode(each).decode()} for each in row] for row in texts]
    assert _json(_tensor("y", "BYTES", texts))["outputs"] == [["a", "ü\0"], ["", "b"]]
    assert _json(_tensor("y_bytes", "BYTES", texts))["outputs"] == encoded
    assert _json(_tensor("y_bytes", "BYTES", texts), by_rows=True)["predictions"] == encoded
    assert _json(_tensor("y", "BYTES", [b"\xff", b"a"]))["outputs"] == [{"b64": "/w=="}, {"b64": "YQ=="}]


@pytest.mark.parametrize(
    "outputs",
    [
        (_tensor("y", "FP32", [[1]]), _tensor("z", "FP32", [1, 2])),
        (_tensor("y", "FP32", 1),),
        (_tensor("y", "FP32", [1]), _tensor("z", "FP32", 1)),
    ],
)
def test_outputs_without_common_rows_cannot_go_by_rows(outputs: tuple[Tensor, ...]) -> None:
    """The refusal tells the shapes; by columns they can."""
    with pytest.raises(ModelFailure, match=r"^Response parsing to JSON error - .* y \["):
        _text(*outputs, by_rows=True)
    assert _text(*outputs)


def test_what_user_code_gives_as_bytes_is_read() -> None:
    """Numbers get their shape, and BYTES as many elements as they are; other datatypes are refused."""
    data = np.array([1, 2, 3, 4], "<f4").tobytes()
    assert _json(RawTensor("y", "FP32", (2, 2), data))["outputs"] == [[1, 2], [3, 4]]
    assert _json(RawTensor("y", "BYTES", (3,), b"whole"))["outputs"] == ["whole"]
    with pytest.raises(InvalidRequest, match="custom"):
        _text(RawTensor("y", "custom", (1,), b"1"))
