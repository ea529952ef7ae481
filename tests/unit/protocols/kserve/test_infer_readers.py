from __future__ import annotations

import json
from math import prod
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ovmstrio.core.errors import ServerError
from ovmstrio.core.request import InferInput
from ovmstrio.core.tensor import BY_NAME, Dim, TensorSpec
from ovmstrio.models.tensor_contents import to_array
from ovmstrio.protocols.kserve.large_document import LARGE_BYTES, read_large_document
from ovmstrio.protocols.kserve.request_templates import RestTemplates, read_plain_request
from ovmstrio.protocols.kserve.rest_requests import read_infer_request

EMPTY: dict[str, Any] = {}
FP32_INPUT: dict[str, Any] = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1.5, 2]}
FIRST = b'{"inputs": [{"name": "data", "shape": [1,2], "datatype": "FP32", "data": [1.5, 2]}],"outputs":[{"name":"y"}]}'
INPUT = b'{"name":"x","shape":[1],"datatype":"FP32","data":[1]}'
BINARY_X = {"name": "x", "shape": [2], "datatype": "FP32", "parameters": {"binary_data_size": 8}}
BINARY_Y = {"name": "y", "shape": [1], "datatype": "INT8", "parameters": {"binary_data_size": 1, "note": "mine"}}
OUTPUTS = [{"name": "z", "parameters": {"binary_data": True}}]
BINARY = {"inputs": [BINARY_X, BINARY_Y], "outputs": OUTPUTS, "id": "7", "parameters": {"priority": 1}}
NUMBERS = [name for name, row in BY_NAME.items() if row.numpy.kind in "iuf"]


def _read(body: bytes, head_length: str | None = None, known: RestTemplates | None = None) -> Any:
    try:
        return read_infer_request("m", "3", body, head_length, known)
    except ServerError as error:
        return type(error), error.message


PLAIN: list[Any] = [
    {"inputs": [FP32_INPUT]},
    {"inputs": [FP32_INPUT, FP32_INPUT | {"name": "y", "datatype": "INT64", "data": [1, 2]}], "id": "7"},
    {"inputs": [FP32_INPUT], "outputs": []},
    {"inputs": [FP32_INPUT], "outputs": [{"name": "a"}, {"name": "b"}], "other": 1},
    {"inputs": [FP32_INPUT | {"datatype": "BYTES", "data": ["a", ""]}]},
    {"inputs": [FP32_INPUT | {"datatype": "BOOL", "data": [True, False]}]},
    {"inputs": [FP32_INPUT | {"data": [1, 2, 3]}]},
    {"inputs": []},
]
CHANGES: list[dict[str, Any]] = [
    *({"shape": each} for each in (None, [1, -1], [True], [1.0], [2**31])),
    *({"datatype": each} for each in (None, ["FP32"], "FP31")),
    *({"data": each} for each in (None, [], [[1, 2]], [1, True], [1, "NaN"], [1, "x"], [1, None])),
    *({"name": 1}, {"other": 1}, {"parameters": {"binary_data_size": 8}}, {"data": [], "shape": [0]}),
    *({"datatype": "INT8", "data": [1, 1.0]}, {"datatype": "BYTES", "data": [1]}),
]
GENERAL: list[Any] = [
    {},
    *({"inputs": each} for each in (None, EMPTY, [None])),
    *({"inputs": [FP32_INPUT], "outputs": each} for each in (None, EMPTY, [EMPTY], ["a"], [{"name": 1}])),
    {"inputs": [FP32_INPUT], "outputs": [{"name": "a", "parameters": {"binary_data": True}}]},
    *({"inputs": [FP32_INPUT], "id": each} for each in (None, 3)),
    *({"inputs": [FP32_INPUT], "parameters": each} for each in (EMPTY, {"p": 1.5})),
    *({"inputs": [FP32_INPUT | change]} for change in CHANGES),
    {"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "parameters": {}}]},
]


@pytest.mark.parametrize(
    ("document", "is_plain"), [*((each, True) for each in PLAIN), *((each, False) for each in GENERAL)]
)
def test_plain_documents_are_read_as_by_the_general_reader(document: Any, is_plain: bool) -> None:
    body = orjson.dumps(document)
    # The general reader reads any document whose length the header gives.
    assert _read(body) == _read(body, str(len(body)))
    assert (read_plain_request("m", "1", document) is not None) == is_plain


def _known(document: bytes) -> RestTemplates:
    known = RestTemplates.empty()
    read_infer_request("m", "3", document, cache=known)
    return known


def test_a_known_document_with_other_numbers_is_read() -> None:
    body = FIRST.replace(b"[1.5, 2]", b" [0.25 , -1e3,7]")
    request = _known(FIRST).json.read("m", "3", body)
    assert request is not None
    assert request == _read(body)
    assert request.inputs[0].contents is not None
    assert request.inputs[0].contents.values == [0.25, -1000.0, 7]
    assert [output.name for output in request.outputs] == ["y"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        *((b"[1.5, 2]", data) for data in (b"", b"[]", b"[1.5, true]", b"[1.5, NaN]", b"[[1.5], [2]]")),
        *((b"[1.5, 2]", data) for data in (b'[1.5, "NaN"]', b"[1.5, 2", b"1.5", b"null", b'[1],"data":[2]')),
        (b"[1.5, 2]", b'[1],"parameters":{"binary_data_size":8},"x":[2]'),
        (b"FP32", b"INT8"),
        (b'"y"', b'"z"'),
        (b"[1,2]", b"[2,1]"),
        (b"}]}", b"}]} 1"),
    ],
)
def test_a_document_similar_to_a_known_one_is_read_as_an_unknown_one(old: bytes, new: bytes) -> None:
    body = FIRST.replace(old, new)
    assert body != FIRST
    assert _read(body, known=_known(FIRST)) == _read(body)


@given(st.lists(st.one_of(st.integers(-(2**70), 2**70), st.floats(allow_nan=False, allow_infinity=False))))
def test_any_numbers_of_a_known_document_are_read_as_of_an_unknown_one(numbers: list[Any]) -> None:
    body = FIRST.replace(b"[1.5, 2]", str(numbers).encode())
    assert _read(body, known=_known(FIRST)) == _read(body)


@pytest.mark.parametrize(
    "document",
    [
        b'{"inputs":[{"name":"x","shape":[1],"datatype":"FP32","data":[1],"data":[2]}]}',
        b'{"inputs":[%b,%b]}' % (INPUT, INPUT),
        b'{"x":{"data":[1]},"inputs":[{"name":"x","shape":[1],"datatype":"FP32","data":[1]}]}',
        b'{"inputs":[{"name":"x","shape":[1],"datatype":"FP32","data":[[1]]}]}',
        b'{"inputs":[{"name":"x","shape":[1],"datatype":"BYTES","data":["]"]}]}',
        b'{"inputs":[%b],"id":"%b"}' % (INPUT, b"i" * 1024),
    ],
)
def test_ambiguous_and_long_documents_do_not_become_known(document: bytes) -> None:
    assert _known(document).json.read("m", "3", document) is None


def test_one_document_per_power_of_two_misses_is_learned() -> None:
    known = RestTemplates.empty()
    learned = 0
    for number in range(1, 65):
        body = FIRST.replace(b'{"inputs"', b'{"id":"%d","inputs"' % number)
        assert known.json.read("m", "3", body) is None
        read_infer_request("m", "3", body, cache=known)
        learned += known.json.read("m", "3", body) is not None
        known.json.missed = number
    assert learned == 7


def _is_known(document: dict[str, Any], tail: bytes, known: RestTemplates) -> bool:
    return known.binary.read("m", "3", orjson.dumps(document), memoryview(tail)) is not None


@given(st.lists(st.binary(max_size=12), min_size=2, max_size=4))
def test_binary_data_after_a_known_head_is_read(tails: list[bytes]) -> None:
    head, known = orjson.dumps(BINARY), RestTemplates.empty()
    for tail in (b"123456789", *tails):
        assert _read(head + tail, str(len(head)), known) == _read(head + tail, str(len(head)))
        assert _is_known(BINARY, tail, known) is (len(tail) >= 9)


def test_changes_of_a_request_do_not_reach_the_next_one() -> None:
    head, known = orjson.dumps(BINARY), RestTemplates.empty()
    expected = _read(head + b"123456789", str(len(head)))
    for _ in range(3):
        request = _read(head + b"123456789", str(len(head)), known)
        assert request == expected
        request.parameters["mine"] = request.inputs[0].parameters["mine"] = 1
        request.inputs.pop()
        request.outputs.clear()
        request.raw_inputs = []


@pytest.mark.parametrize(
    "document",
    [
        {"inputs": [BINARY_X, {"name": "y", "shape": [1], "datatype": "INT8", "data": [1]}]},
        {"inputs": [{"name": "x", "shape": [1], "datatype": "BYTES"}]},
        {"inputs": [BINARY_X | {"parameters": {"shared_memory_region": "r"}}]},
        {"inputs": []},
        BINARY | {"id": "i" * 1024},
    ],
    ids=["data", "no size", "shared memory", "no inputs", "long"],
)
def test_heads_without_the_size_of_each_input_do_not_become_known(document: dict[str, Any]) -> None:
    head, known = orjson.dumps(document), RestTemplates.empty()
    for tail in (b"123456789", b"12345678"):
        assert _read(head + tail, str(len(head)), known) == _read(head + tail, str(len(head)))
    assert not _is_known(document, b"123456789", known)


@pytest.mark.parametrize("length", ["x", "-1", "99999", "1"])
def test_the_length_of_a_known_head_is_validated(length: str) -> None:
    head, known = orjson.dumps(BINARY), RestTemplates.empty()
    _read(head + b"123456789", str(len(head)), known)
    assert _read(head + b"123456789", length, known) == _read(head + b"123456789", length)


def _learn(known: RestTemplates, number: int) -> None:
    head = orjson.dumps(BINARY | {"id": str(number)})
    _read(head + b"123456789", str(len(head)), known)


def _learned(known: RestTemplates, number: int) -> bool:
    return _is_known(BINARY | {"id": str(number)}, b"123456789", known)


def test_one_head_per_power_of_two_misses_is_kept() -> None:
    known, kept = RestTemplates.empty(), []
    for number in range(1, 65):
        _learn(known, number)
        if _learned(known, number):
            kept.append(number)
        known.binary.missed = number
    assert kept == [1, 2, 4, 8, 16, 32, 64]


def test_the_number_of_known_heads_is_bounded() -> None:
    known = RestTemplates.empty()
    for number in range(1000):
        known.binary.missed = 0
        _learn(known, number)
    assert [number for number in range(1000) if _learned(known, number)] == list(range(768, 1000))


def _model_input(tensor: InferInput) -> Any:
    datatype = BY_NAME.get(tensor.datatype)
    contents = tensor.contents
    if datatype is None or datatype.numpy.hasobject or contents is None:
        return None if contents is None else list(contents.values)
    shape = (len(contents.values),)
    try:
        array = to_array(contents, shape, prod(shape), TensorSpec("x", datatype, (Dim.fixed(shape[0]),)))
    except ServerError as error:
        return error.message
    return array.dtype.str, array.tobytes()


def _outcome(body: bytes) -> Any:
    request = _read(body)
    if isinstance(request, tuple):
        return request
    inputs = [(each.name, each.datatype, each.shape, each.parameters, _model_input(each)) for each in request.inputs]
    return request.id, request.parameters, request.outputs, inputs, [raw and bytes(raw) for raw in request.raw_inputs]


def _check_padded_alike(body: bytes) -> None:
    assert _outcome(body.ljust(2 * LARGE_BYTES)) == _outcome(body)


_elements: st.SearchStrategy[Any] = (
    st.integers()
    | st.integers(-300, 300)
    | st.floats(width=32)
    | st.floats()
    | st.sampled_from([2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 2**53 + 1, 1e39, -0.0])
    | st.sampled_from([True, None, "NaN", "-Infinity", "x", {}])
)
_lists = st.recursive(st.lists(_elements, max_size=6), lambda inner: st.lists(inner | _elements, max_size=4))


@given(
    st.sampled_from([*NUMBERS, "BOOL", "BYTES", "NONE"]), _lists | st.lists(st.integers(0, 9)) | st.lists(st.floats())
)
def test_data_of_a_large_document_is_read_as_of_a_small_one(datatype: str, data: list[Any]) -> None:
    tensor = {"name": "x", "shape": [2], "datatype": datatype, "data": data}
    _check_padded_alike(json.dumps({"id": "1", "inputs": [tensor, tensor | {"name": "y"}]}).encode())


@pytest.mark.parametrize(
    "data",
    [
        *(b"[1e400]", b"[1e-400, 0.1e1, -0, 1E+2]", b"[01]", b"[1,]", b'["\\ud800"]', b'["\xff"]'),
        b"[0.1000000000000000055511151231257827021181583404541015625, 9007199254740993, 4.9e-324]",
        b"[16777217, 3.4028235677973366e38, 65519.99, 65520, 1.00048828125]",
        *(b"[" * depth + b"1" + b"]" * depth for depth in (96, 97, 98, 5000)),
        *(b"[[1], 2, [[3, 4]], []]", b"[[], []]", b"{}", b"1"),
    ],
)
@pytest.mark.parametrize("datatype", [b"FP64", b"FP32", b"FP16", b"BF16", b"INT64", b"BYTES"])
def test_unusual_data_of_a_large_document_is_read_as_of_a_small_one(datatype: bytes, data: bytes) -> None:
    _check_padded_alike(b'{"inputs":[{"name":"x","shape":[1],"datatype":"%b","data":%b}]}' % (datatype, data))


@pytest.mark.parametrize(
    "body",
    [
        b'{"inputs":[],"inputs":[{"name":"x","shape":[1],"datatype":"INT8","data":[1]}]}',
        b'{"inputs":[{"data":[2],"name":"x","shape":[1],"datatype":"INT8","data":[1]}]}',
        b'{"inputs":[{"name":"x","shape":[1],"datatype":"INT8","data":[1],"parameters":{"a":1,"a":{}}}]}',
        b'{"inputs":[{"name":"x","shape":[1],"datatype":"INT8","data":[1]}],"parameters":{"a":[[1]]}}',
        *(b'{"inputs":[1]}', b'{"inputs":{}}', b'{"inputs":null}', b"{}", b"[]", b"1", b" "),
        *(b'\xef\xbb\xbf{"inputs":[]}', b'{"inputs":[]} x'),
        b"{%b}" % b",".join(b'"key %d":1' % number for number in range(1000)),
    ],
)
def test_unusual_large_documents_are_read_as_small_ones(body: bytes) -> None:
    _check_padded_alike(body)


@pytest.mark.parametrize("datatype", NUMBERS)
def test_numbers_of_a_large_document_are_read_into_an_array(datatype: str) -> None:
    pytest.importorskip("simdjson")
    rows = np.arange(100).reshape(10, 10)
    for data in (rows.tolist(), rows.ravel().tolist()):
        document = {"inputs": [{"name": "x", "shape": [10, 10], "datatype": datatype, "data": data}]}
        request = read_infer_request("m", "", json.dumps(document).encode().ljust(LARGE_BYTES))
        contents = request.inputs[0].contents
        assert contents is not None
        assert isinstance(contents.values, np.ndarray)
        assert contents.values.tolist() == list(range(100))


def test_objects_with_many_members_are_left_to_the_general_reader() -> None:
    many = {str(number): 0 for number in range(65)}
    # The large-document reader finds a member in linear time.
    for document in (many, {"inputs": [many]}):
        assert read_large_document(json.dumps(document).encode(), 10) is None
