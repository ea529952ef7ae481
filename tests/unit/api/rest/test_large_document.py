"""Large JSON bodies are read into arrays, and say in every case what small ones do."""

from __future__ import annotations

import json
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ovmstrio.api.kserve.rest.infer_request import read_infer_request
from ovmstrio.api.kserve.rest.large_document import LARGE_BYTES, read_large_document
from ovmstrio.core.datatypes import BY_NAME
from ovmstrio.core.errors import ServerError
from ovmstrio.core.request import InferInput
from ovmstrio.core.tensor import Dim, TensorSpec
from ovmstrio.runtimes.models.contents import to_array

NUMBERS = [name for name, row in BY_NAME.items() if row.numpy.kind in "iuf"]


def _element(given_input: InferInput) -> Any:
    """Give what a model would get, or why it would get nothing."""
    datatype = BY_NAME.get(given_input.datatype)
    contents = given_input.contents
    if datatype is None or datatype.numpy.hasobject or contents is None:
        return None if contents is None else list(contents.values)
    shape = (len(contents.values),)
    try:
        array = to_array(contents, shape, prod(shape), TensorSpec("x", datatype, (Dim.fixed(shape[0]),)))
    except ServerError as error:
        return error.message
    return array.dtype.str, array.tobytes()


def _outcome(body: bytes) -> Any:
    try:
        request = read_infer_request("m", "", body)
    except ServerError as error:
        return type(error), error.message
    given = [(each.name, each.datatype, each.shape, each.parameters, _element(each)) for each in request.inputs]
    return request.id, request.parameters, request.outputs, given, [raw and bytes(raw) for raw in request.raw_inputs]


def _judge(body: bytes) -> None:
    assert _outcome(body.ljust(2 * LARGE_BYTES)) == _outcome(body)


_like_numbers: st.SearchStrategy[Any] = (
    st.integers()
    | st.integers(-300, 300)
    | st.floats(width=32)
    | st.floats()
    | st.sampled_from(
        [
            2**63,
            2**64 - 1,
            2**64,
            -(2**63),
            -(2**63) - 1,
            2**53 + 1,
            1e39,
            -0.0,
            True,
            None,
            "NaN",
            "-Infinity",
            "x",
            {},
        ]
    )
)
_lists = st.recursive(st.lists(_like_numbers, max_size=6), lambda inner: st.lists(inner | _like_numbers, max_size=4))


@given(
    st.sampled_from([*NUMBERS, "BOOL", "BYTES", "NONE"]), _lists | st.lists(st.integers(0, 9)) | st.lists(st.floats())
)
def test_numbers_are_read_alike(datatype: str, data: list[Any]) -> None:
    """Of every type, in lists of any form, in range or not: the same elements, or the same refusal."""
    given_input = {"name": "x", "shape": [2], "datatype": datatype, "data": data}
    _judge(json.dumps({"id": "1", "inputs": [given_input, given_input | {"name": "y"}]}).encode())


@pytest.mark.parametrize(
    "data",
    [
        b"[1e400]",
        b"[1e-400, 0.1e1, -0, 1E+2]",
        b"[01]",
        b"[1,]",
        b"[0.1000000000000000055511151231257827021181583404541015625, 9007199254740993, 4.9e-324]",
        b"[16777217, 3.4028235677973366e38, 65519.99, 65520, 1.00048828125]",
        b'["\\ud800"]',
        b'["\xff"]',
        b"[" * 96 + b"1" + b"]" * 96,
        b"[" * 97 + b"1" + b"]" * 97,
        b"[" * 98 + b"1" + b"]" * 98,
        b"[" * 5000 + b"1" + b"]" * 5000,
        b"[[1], 2, [[3, 4]], []]",
        b"[[], []]",
        b"{}",
        b"1",
    ],
)
@pytest.mark.parametrize("datatype", [b"FP64", b"FP32", b"FP16", b"BF16", b"INT64", b"BYTES"])
def test_odd_data_is_read_alike(datatype: bytes, data: bytes) -> None:
    """Where a parser could round, allow or refuse in a way of its own."""
    _judge(b'{"inputs":[{"name":"x","shape":[1],"datatype":"%b","data":%b}]}' % (datatype, data))


@pytest.mark.parametrize(
    "body",
    [
        b'{"inputs":[],"inputs":[{"name":"x","shape":[1],"datatype":"INT8","data":[1]}]}',
        b'{"inputs":[{"data":[2],"name":"x","shape":[1],"datatype":"INT8","data":[1]}]}',
        b'{"inputs":[{"name":"x","shape":[1],"datatype":"INT8","data":[1],"parameters":{"a":1,"a":{}}}]}',
        b'{"inputs":[{"name":"x","shape":[1],"datatype":"INT8","data":[1]}],"parameters":{"a":[[1]]}}',
        b'{"inputs":[1]}',
        b'{"inputs":{}}',
        b'{"inputs":null}',
        b"{}",
        b"[]",
        b"1",
        b" ",
        b'\xef\xbb\xbf{"inputs":[]}',
        b'{"inputs":[]} x',
        b"{%b}" % b",".join(b'"key %d":1' % number for number in range(1000)),
    ],
)
def test_odd_documents_are_read_alike(body: bytes) -> None:
    """Keys that stand there twice, things that are no lists and no objects, and what is no JSON."""
    _judge(body)


@pytest.mark.parametrize("datatype", NUMBERS)
def test_numbers_become_no_objects(datatype: str) -> None:
    """They are in an array from the beginning, nested or not, wherever there is the parser."""
    pytest.importorskip("simdjson")
    rows = np.arange(100).reshape(10, 10)
    for data in (rows.tolist(), rows.ravel().tolist()):
        document = {"inputs": [{"name": "x", "shape": [10, 10], "datatype": datatype, "data": data}]}
        request = read_infer_request("m", "", json.dumps(document).encode().ljust(LARGE_BYTES))
        contents = request.inputs[0].contents
        assert contents is not None
        assert isinstance(contents.values, np.ndarray)
        assert contents.values.tolist() == list(range(100))


def test_objects_with_many_members_are_left_to_the_other_parser() -> None:
    """Looking for each of them from the first one on would take the square of their number."""
    many = {str(number): 0 for number in range(65)}
    assert read_large_document(json.dumps(many).encode(), 10) is None
    assert read_large_document(json.dumps({"inputs": [many]}).encode(), 10) is None
