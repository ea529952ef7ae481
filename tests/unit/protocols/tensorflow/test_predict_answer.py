from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from ovmstrio.core.errors import InvalidRequest, ModelFailure
from ovmstrio.core.request import InferResponse
from ovmstrio.core.tensor import BY_NAME, RawTensor, Tensor
from ovmstrio.protocols.tensorflow.rest_routes import encode_predict_response

NUMBERS = [name for name in BY_NAME if name not in {"BYTES", "BF16"}]


def _tensor(name: str, datatype: str, values: Any) -> Tensor:
    row = BY_NAME[datatype]
    return Tensor(name, row, np.array(values, row.numpy))


def _text(*outputs: Tensor | RawTensor, by_rows: bool = False) -> str:
    answer = encode_predict_response(InferResponse("m", "1", [*outputs]), by_rows=by_rows)
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
def test_numbers_of_every_datatype_and_shape_survive(case: tuple[str, np.ndarray[Any, Any]]) -> None:
    datatype, array = case
    tensor = Tensor("y", BY_NAME[datatype], array)
    alone = _json(tensor)["outputs"]
    named = _json(tensor, _tensor("z", "FP32", [1]))["outputs"]
    assert set(named) == {"y", "z"}
    for values in (alone, named["y"]):
        read = np.array(values, array.dtype)
        np.testing.assert_array_equal(read, array.reshape(read.shape))


@given(_tensors())
def test_rows_are_the_columns_transposed(case: tuple[str, np.ndarray[Any, Any]]) -> None:
    datatype, array = case
    if not array.ndim:
        return
    tensor = Tensor("y", BY_NAME[datatype], array)
    assert _text(tensor, by_rows=True).partition(":")[2] == _text(tensor).partition(":")[2]
    labels = _tensor("z", "BYTES", [f"row {number}".encode() for number in range(len(array))])
    rows = _json(tensor, labels, by_rows=True)["predictions"]
    assert [row["z"] for row in rows] == [f"row {number}" for number in range(len(array))]
    np.testing.assert_equal([row["y"] for row in rows], _json(tensor)["outputs"])


Y = _tensor("y", "FP32", [[1, 2], [3, 4]])
Z = _tensor("z", "INT64", [5, 6])
BF16 = (np.array([[0.5, -2, math.nan]], np.float32).view(np.uint32) >> 16).astype(np.uint16)
TEXTS = [[b"a", "ü\0".encode()], [b"", b"b"]]
ENCODED = '[[{"b64":"YQ=="},{"b64":"w7wA"}],[{"b64":""},{"b64":"Yg=="}]]'


@pytest.mark.parametrize(
    ("outputs", "by_rows", "text"),
    [
        ([Y], False, '{"outputs":[[1.0,2.0],[3.0,4.0]]}'),
        ([Y, Z], False, '{"outputs":{"y":[[1.0,2.0],[3.0,4.0]],"z":[5,6]}}'),
        ([Y], True, '{"predictions":[[1.0,2.0],[3.0,4.0]]}'),
        ([Y, Z], True, '{"predictions":[{"y":[1.0,2.0],"z":5},{"y":[3.0,4.0],"z":6}]}'),
        ([_tensor("y", "FP64", 0.1)], False, '{"outputs":0.1}'),
        (
            [_tensor("y", "FP32", [[1.5]]), _tensor("sequence_id", "UINT64", [2**64 - 1])],
            False,
            '{"outputs":{"y":[[1.5]],"sequence_id":[18446744073709551615]}}',
        ),
        (
            [Tensor("y", BY_NAME["FP32"], np.arange(4, dtype=np.float32).reshape(2, 2).T)],
            False,
            '{"outputs":[[0.0,2.0],[1.0,3.0]]}',
        ),
        ([Tensor("y", BY_NAME["BF16"], BF16)], False, '{"outputs":[[0.5,-2.0,NaN]]}'),
        (
            [RawTensor("y", "FP32", (2, 2), np.array([1, 2, 3, 4], "<f4").tobytes())],
            False,
            '{"outputs":[[1.0,2.0],[3.0,4.0]]}',
        ),
        ([RawTensor("y", "BYTES", (3,), b"text")], False, '{"outputs":["text"]}'),
        ([_tensor("y", "BYTES", TEXTS)], False, '{"outputs":[["a","ü\\u0000"],["","b"]]}'),
        ([_tensor("y_bytes", "BYTES", TEXTS)], False, f'{{"outputs":{ENCODED}}}'),
        ([_tensor("y_bytes", "BYTES", TEXTS)], True, f'{{"predictions":{ENCODED}}}'),
        ([_tensor("y", "BYTES", [b"\xff", b"a"])], False, '{"outputs":[{"b64":"/w=="},{"b64":"YQ=="}]}'),
    ],
)
def test_outputs_are_written_by_rows_and_columns(outputs: list[Tensor | RawTensor], by_rows: bool, text: str) -> None:
    assert _text(*outputs, by_rows=by_rows) == text


@pytest.mark.parametrize(
    "outputs",
    [
        (_tensor("y", "FP32", [[1]]), _tensor("z", "FP32", [1, 2])),
        (_tensor("y", "FP32", 1),),
        (_tensor("y", "FP32", [1]), _tensor("z", "FP32", 1)),
    ],
)
def test_outputs_without_common_rows_are_refused_by_rows_only(outputs: tuple[Tensor, ...]) -> None:
    with pytest.raises(ModelFailure, match=r"^Response parsing to JSON error - .* y \["):
        _text(*outputs, by_rows=True)
    assert _text(*outputs)


def test_an_output_of_a_custom_datatype_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="custom"):
        _text(RawTensor("y", "custom", (1,), b"1"))
