from __future__ import annotations

import json
import math
import struct
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ovmstrio.core.errors import InvalidRequest, MalformedJson, ServerError
from ovmstrio.core.request import InferRequest
from ovmstrio.core.tensor import BY_NAME, Dim, TensorSpec
from ovmstrio.protocols.kserve.rest_requests import INPUT_UNREADABLE, read_infer_request
from ovmstrio.transport.statuses import error_status
from tests.support.servables import validate

EMPTY: dict[str, Any] = {}
X = {"name": "x", "shape": [2], "datatype": "FP32", "data": [1, 2]}
NO_PARAMETERS = "Could not parse request parameters"
NOT_JSON = "The file is not valid json"
SIZE_INVALID = "Invalid value of the binary data size parameter"
TOO_DEEP = "JSON nesting depth exceeded"
EXCEEDED = "Received buffer size is smaller than binary_data_size parameter indicates"
HEADER_INVALID = "Invalid value of the Inference-Header-Content-Length header"
HEADER_EXCEEDED = "Value of the Inference-Header-Content-Length header is larger than the request body"


def _spec(name: str, datatype: str, *shape: int) -> TensorSpec:
    return TensorSpec(name, BY_NAME[datatype], tuple(map(Dim.fixed, shape)))


def _read(document: Any, tail: bytes = b"", *, head_length: str | None = None) -> InferRequest:
    head = document if isinstance(document, bytes) else orjson.dumps(document)
    if tail and head_length is None:
        head_length = str(len(head))
    return read_infer_request("m", "3", head + tail, head_length)


def _input(**changes: Any) -> dict[str, Any]:
    changed = X | changes
    return {"inputs": [{key: value for key, value in changed.items() if value is not ...}]}


def _refused(document: Any, tail: bytes = b"", *, head_length: str | None = None) -> str:
    with pytest.raises(InvalidRequest) as caught:
        _read(document, tail, head_length=head_length)
    assert error_status(caught.value).http == (412 if isinstance(caught.value, MalformedJson) else 400)
    return caught.value.message


def test_names_id_parameters_shapes_and_outputs_are_read() -> None:
    request = _read(
        {
            "id": "seven",
            "parameters": {"a": "text", "b": -1, "c": True, "d": 2**63 - 1},
            "inputs": [X | {"parameters": {"hint": "no"}}, X | {"name": "y"}],
            "outputs": [{"name": "z", "parameters": {"binary_data": True}}, {"name": "z2"}],
        }
    )
    assert (request.model_name, request.model_version, request.id) == ("m", "3", "seven")
    assert request.parameters == {"a": "text", "b": -1, "c": True, "d": 2**63 - 1}
    assert [(each.name, each.shape, each.datatype) for each in request.inputs] == [
        ("x", (2,), "FP32"),
        ("y", (2,), "FP32"),
    ]
    assert request.inputs[0].parameters == {"hint": "no"}
    assert [(output.name, output.parameters) for output in request.outputs] == [
        ("z", {"binary_data": True}),
        ("z2", {}),
    ]
    assert request.raw_inputs == []


def _extremes(datatype: str) -> list[int]:
    limits = np.iinfo(BY_NAME[datatype].numpy)
    return [int(limits.min), int(limits.max)]


@pytest.mark.parametrize(
    ("datatype", "data", "elements"),
    [
        *((each, _extremes(each), _extremes(each)) for each in BY_NAME if each.startswith(("INT", "UINT"))),
        ("FP64", [math.pi, 5e-324, -1.7976931348623157e308], [math.pi, 5e-324, -1.7976931348623157e308]),
        ("FP64", [2**53 - 1, 0.1], [2**53 - 1, 0.1]),
        ("FP32", [1, 2.5], [1, 2.5]),
        ("BOOL", [True, False], [True, False]),
        ("BYTES", ["a\0b", "", "ünï", "\U0001f600"], ["a\0b", "", "ünï", "\U0001f600"]),
        ("FP32", [[1, 2], [3, 4]], [1, 2, 3, 4]),
        ("FP32", [[[1], [[2]]], 3, [4, [5]], []], [1, 2, 3, 4, 5]),
        ("BYTES", [["a"], ["b"]], ["a", "b"]),
    ],
)
def test_elements_are_flattened_and_keep_their_values(datatype: str, data: list[Any], elements: list[Any]) -> None:
    request = _read(_input(datatype=datatype, shape=[len(elements)], data=data))
    contents = request.inputs[0].contents
    assert contents is not None
    assert (contents.field, list(contents.values)) == (BY_NAME[datatype].contents_field, elements)
    array = validate(request, [_spec("x", datatype, len(elements))])["x"]
    assert array.tolist() == [each.encode() if isinstance(each, str) else each for each in elements]


@pytest.mark.parametrize(("shape", "data"), [([0], []), ([2, 0], [[], []]), ([0], ...)])
def test_a_tensor_without_elements_needs_no_data(shape: list[int], data: Any) -> None:
    array = validate(_read(_input(shape=shape, data=data)), [_spec("x", "FP32", *shape)])["x"]
    assert array.shape == tuple(shape)


def test_an_empty_list_is_data_of_a_tensor_without_elements() -> None:
    request = _read({"inputs": [X, {"name": "y", "shape": [0], "datatype": "FP32", "data": []}]})
    arrays = validate(request, [_spec("x", "FP32", 2), _spec("y", "FP32", 0)])
    assert {name: array.tolist() for name, array in arrays.items()} == {"x": [1, 2], "y": []}


def test_an_input_with_an_empty_list_takes_its_bytes_from_the_tail() -> None:
    for parameters in ({"binary_data_size": 8}, {}):
        request = _read(_input(data=[], parameters=parameters), struct.pack("<2f", 1, 2))
        assert request.inputs[0].contents is None
        assert validate(request, [_spec("x", "FP32", 2)])["x"].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("datatype", "data"),
    [("UINT32", [-1, 0]), ("INT8", [128, 0]), ("INT64", [2**63, 0]), ("UINT64", [-1, 0]), ("INT32", [2**31, 0])],
)
def test_numbers_out_of_range_are_refused(datatype: str, data: list[int]) -> None:
    with pytest.raises(InvalidRequest, match="out of range"):
        validate(_read(_input(datatype=datatype, data=data)), [_spec("x", datatype, 2)])


@pytest.mark.parametrize("value", [b"[]", b"{}", b"[1]"])
def test_parameters_of_other_types_are_refused(value: bytes) -> None:
    x = orjson.dumps(X)
    for body in (
        b'{"parameters":{"p":%b},"inputs":[%b]}' % (value, x),
        b'{"inputs":[{"name":"x","shape":[1],"datatype":"INT8","data":[1],"parameters":{"p":%b}}]}' % value,
        b'{"outputs":[{"name":"y","parameters":{"p":%b}}],"inputs":[%b]}' % (value, x),
    ):
        assert _refused(body).startswith(f"{NO_PARAMETERS} - p: expected a text, number or boolean")


@pytest.mark.parametrize("value", [1.5, 1e300, -0.25, 2**64 - 1, -(2**63), 7, True, "text"])
def test_parameters_are_texts_numbers_or_booleans(value: Any) -> None:
    given = {"p": value}
    request = _read(
        {"parameters": given, "outputs": [{"name": "y", "parameters": given}], "inputs": [X | {"parameters": given}]}
    )
    for read in (request.parameters, request.inputs[0].parameters, request.outputs[0].parameters):
        assert read == given
        assert type(read["p"]) is type(value)


def test_null_is_the_same_as_a_missing_field() -> None:
    plain = {"inputs": [X], "outputs": [{"name": "y"}]}
    nulls = {"parameters": None, "id": None}
    full = {
        **nulls,
        "inputs": [X | {"parameters": None}],
        "outputs": [{"name": "y", "parameters": {"content_type": None}}],
    }
    assert _read(full) == _read(plain)
    assert _read({"inputs": [X], "outputs": None, "parameters": {"a": None, "b": 1}}).parameters == {"b": 1}
    head = {"inputs": [{"name": "x", "shape": [2], "datatype": "INT8", "data": None}]}
    assert _read(head, tail=b"ab").raw_inputs == [b"ab"]


BAD_BODIES: dict[str, tuple[Any, ...]] = {
    NOT_JSON: (b"", b"{", b"{} x", b'{"inputs": [NaN}', b'\xff\xfe{"id": "a"}', b'{"id": "\xff"}'),
    TOO_DEEP: (b"[" * 200_000, b"[" * 2_000 + b"]" * 2_000),
    "Request body should be JSON object": (b"[]", b"null", b"7"),
    "No inputs found": ({},),
    "Could not parse outputs content": tuple({"outputs": [each], "inputs": [X]} for each in ("y", EMPTY, {"name": 1})),
    "Could not parse input content. Unsupported data precision detected": (
        _input(datatype="FP31"),
        _input(datatype="fp32"),
    ),
    NO_PARAMETERS: (
        *({"parameters": each, "inputs": [X]} for each in (3, "a", {"a": [1]}, {"a": EMPTY})),
        {"parameters": [], "inputs": [X]},
        {"outputs": [{"name": "y", "parameters": 1}], "inputs": [X]},
        _input(parameters=3),
    ),
    INPUT_UNREADABLE: (
        *(b'{"inputs": NaN}', b'{"inputs": [Infinity]}'),
        *({"id": each, "inputs": [X]} for each in (7, EMPTY)),
        *({"outputs": each, "inputs": [X]} for each in (EMPTY, "", 0)),
        *({"inputs": each} for each in (None, EMPTY, 0, ["x"])),
        *(_input(name=each) for each in (..., 1)),
        *(_input(shape=each) for each in (..., 2, [-1], [2.0], ["2"], [True], [2**31])),
        *(_input(datatype=each) for each in (..., 5)),
        *(_input(data=each) for each in (EMPTY, "12", ["nan", 1], [None, 1], [True, 1], [[1], [EMPTY]])),
        *(_input(datatype="INT32", data=each) for each in (["NaN", 1], [1.0, 2], [True, 2])),
        *(_input(datatype="UINT32", data=each) for each in (["1", 2], [1.5, 2])),
        _input(datatype="BOOL", data=[0, 1]),
        *(_input(datatype="BYTES", data=each) for each in ([1, "a"], [["a", None]])),
        b'{"inputs":[{"name":"x","shape":[1],"datatype":"INT64","data":[%d]}]}' % 10**20,
    ),
}


@pytest.mark.parametrize(("document", "text"), [(each, text) for text, group in BAD_BODIES.items() for each in group])
def test_a_bad_body_is_refused_with_ovms_text(document: Any, text: str) -> None:
    assert _refused(document).startswith(text)


def _nested(depth: int) -> bytes:
    data = b"[" * depth + b"7" + b"]" * depth
    return b'{"inputs":[{"name":"x","shape":[1],"datatype":"INT8","data":%b}]}' % data


@pytest.mark.parametrize("depth", [98, 500, 5_000, 400_000])
def test_data_with_more_than_97_levels_is_refused(depth: int) -> None:
    assert _refused(_nested(depth)).startswith(TOO_DEEP)


@pytest.mark.parametrize("depth", [1, 50, 97])
def test_data_with_up_to_97_levels_is_read(depth: int) -> None:
    contents = _read(_nested(depth)).inputs[0].contents
    assert contents is not None
    assert list(contents.values) == [7]


def test_inputs_take_their_announced_or_needed_bytes_in_order() -> None:
    document = {
        "inputs": [
            {"name": "a", "shape": [2], "datatype": "INT16"},
            {"name": "b", "shape": [1], "datatype": "BYTES", "parameters": {"binary_data_size": 5}},
            {"name": "empty", "shape": [0, 7], "datatype": "FP32"},
            {"name": "none", "shape": [0], "datatype": "FP32", "parameters": {"binary_data_size": 0}},
            {"name": "half", "shape": [1], "datatype": "FP16"},
        ]
    }
    request = _read(document, b"\1\0\2\0" + b"\1\0\0\0z" + b"\0\x3c" + b"left over")
    assert [bytes(raw or b"") for raw in request.raw_inputs] == [b"\1\0\2\0", b"\1\0\0\0z", b"", b"", b"\0\x3c"]


def test_a_single_bytes_input_takes_the_complete_tail() -> None:
    tail = struct.pack("<I", 3) + b"\xff\0\xfe"
    request = _read(_input(datatype="BYTES", shape=[1], data=...), tail)
    assert [bytes(raw or b"") for raw in request.raw_inputs] == [tail]


def test_one_input_may_have_data_and_another_binary_data() -> None:
    document = {"inputs": [X, {"name": "y", "shape": [1], "datatype": "INT8"}]}
    request = _read(document, b"\5")
    assert request.inputs[0].contents is not None
    assert request.raw_inputs == [None, b"\5"]


@pytest.mark.parametrize("datatype", ["FP16", "BF16", "FP32", "FP64"])
@pytest.mark.parametrize("data", ['["NaN", "Infinity", "-Infinity", 1.5]', "[NaN, Infinity, -Infinity, 1.5]"])
def test_nan_and_infinities_are_read_as_texts_and_words(datatype: str, data: str) -> None:
    body = f'{{"inputs":[{{"name":"x","shape":[4],"datatype":"{datatype}","data":{data}}}]}}'
    (tensor,) = read_infer_request("m", "", body.encode()).inputs
    assert tensor.contents is not None
    np.testing.assert_array_equal(list(tensor.contents.values), [np.nan, np.inf, -np.inf, 1.5])


@pytest.mark.parametrize(
    ("document", "tail", "start"),
    [
        (_input(parameters={"binary_data_size": 8}), b"\0" * 8, "Request contents field is not empty"),
        (_input(data=..., parameters={"binary_data_size": -1}), b"\0" * 8, SIZE_INVALID),
        (_input(data=..., parameters={"binary_data_size": "8"}), b"\0" * 8, SIZE_INVALID),
        (_input(data=..., parameters={"binary_data_size": 8.0}), b"\0" * 8, SIZE_INVALID),
        (_input(data=..., parameters={"binary_data_size": True}), b"\0" * 8, SIZE_INVALID),
        (_input(data=..., parameters={"binary_data_size": 9}), b"\0" * 8, EXCEEDED),
        (_input(data=..., parameters={"binary_data_size": 2**63}), b"\0" * 8, EXCEEDED),
        (_input(data=..., shape=[3]), b"\0" * 8, EXCEEDED),
        (_input(data=...), b"", EXCEEDED),
        (_input(data=[]), b"", EXCEEDED),
        (_input(data=..., datatype="BYTES", shape=[3]), b"\0" * 8, INPUT_UNREADABLE),
        (_input(data=..., shape=[2**31 - 1] * 3), b"\0", "Invalid content size of tensor proto"),
        (
            {"inputs": [{"name": name, "shape": [1], "datatype": "BYTES"} for name in "ab"]},
            b"\0" * 8,
            INPUT_UNREADABLE,
        ),
    ],
)
def test_bad_sizes_of_binary_data_are_refused(document: Any, tail: bytes, start: str) -> None:
    assert _refused(document, tail).startswith(start)


BAD_LENGTHS = {
    HEADER_INVALID: ("", "-1", "+5", "5.0", "0x10", "٣", "1_0"),
    HEADER_EXCEEDED: ("100000", "9" * 20, "9" * 10_000),
    NOT_JSON: ("0", "5"),
}


@pytest.mark.parametrize(("length", "text"), [(each, text) for text, group in BAD_LENGTHS.items() for each in group])
def test_a_bad_json_length_header_is_refused(length: str, text: str) -> None:
    assert _refused({"inputs": [X]}, head_length=length).startswith(text)


def test_the_json_length_header_may_have_leading_zeros() -> None:
    body = orjson.dumps({"inputs": [X]})
    assert _read(body, head_length=str(len(body)).zfill(30)).inputs[0].name == "x"


_names = st.text(max_size=5)
_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | _names,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_names, inner, max_size=4),
    max_leaves=12,
)
_like_input = st.fixed_dictionaries(
    {},
    optional={
        "name": _names | _json,
        "shape": st.lists(st.integers(0, 5), max_size=3) | _json,
        "datatype": st.sampled_from([*BY_NAME]) | _json,
        "data": st.lists(_json, max_size=3),
        "parameters": st.fixed_dictionaries({}, optional={"binary_data_size": st.integers(-1, 9) | _json}) | _json,
    },
)
_like_request = st.fixed_dictionaries(
    {},
    optional={
        "id": _json,
        "parameters": _json,
        "outputs": st.lists(_like_input, max_size=2) | _json,
        "inputs": st.lists(_like_input, max_size=3) | _json,
    },
)


def _check_read_or_refused(body: bytes, head_length: str | None) -> None:
    status, request = 200, None
    try:
        request = read_infer_request("m", "", body, head_length)
    except ServerError as error:
        status = error_status(error).http
    assert request is not None or 400 <= status < 500
    if request is None:
        return
    for tensor in request.inputs:
        assert isinstance(tensor.name, str)
        assert isinstance(tensor.datatype, str)
        assert all(size >= 0 for size in tensor.shape)
    assert len(request.raw_inputs) == sum(tensor.contents is None for tensor in request.inputs)


@given(_like_request | _json, st.none() | st.integers(-2, 200).map(str), st.binary(max_size=20))
def test_any_json_is_read_or_refused(document: Any, head_length: str | None, tail: bytes) -> None:
    _check_read_or_refused(json.dumps(document).encode() + tail, head_length)


@given(st.binary(max_size=200), st.none() | st.text(max_size=6))
def test_any_bytes_are_read_or_refused(body: bytes, head_length: str | None) -> None:
    _check_read_or_refused(body, head_length)


@st.composite
def _binary_requests(draw: st.DrawFn) -> tuple[dict[str, Any], bytes, list[tuple[str, str, tuple[int, ...], Any]]]:
    inputs, tail, expected = [], b"", []
    for number in range(draw(st.integers(1, 3))):
        datatype = BY_NAME[draw(st.sampled_from([name for name, row in BY_NAME.items() if row.itemsize]))]
        shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
        raw = draw(
            st.binary(min_size=math.prod(shape) * datatype.itemsize, max_size=math.prod(shape) * datatype.itemsize)
        )
        tensor: dict[str, Any] = {"name": f"i{number}", "shape": shape, "datatype": datatype.name}
        if draw(st.booleans()):
            tensor["parameters"] = {"binary_data_size": len(raw)}
        inputs.append(tensor)
        tail += raw
        expected.append((tensor["name"], datatype.name, shape, raw))
    return {"inputs": inputs}, tail, expected


@given(_binary_requests())
def test_binary_data_is_read_unchanged(case: tuple[dict[str, Any], bytes, list[Any]]) -> None:
    document, tail, expected = case
    head = orjson.dumps(document)
    request = read_infer_request("m", "", head + tail, str(len(head)))
    read = [(each.name, each.datatype, each.shape) for each in request.inputs]
    assert [(*each, bytes(raw or b"")) for each, raw in zip(read, request.raw_inputs, strict=True)] == expected


@pytest.mark.parametrize(
    ("document", "messages"),
    [
        (
            {
                "id": 7,
                "parameters": [1],
                "outputs": [{"name": "y"}, {"name": 3}, "z"],
                "inputs": [X, X | {"name": "a", "shape": [-1]}, X | {"name": "b", "data": ["one", "two"]}, 5],
            },
            [
                f"{INPUT_UNREADABLE} - id: expected a text, got a number",
                f"{NO_PARAMETERS} - expected an object, got a list",
                "Could not parse outputs content - outputs[1]: expected an object with a name",
                "Could not parse outputs content - outputs[2]: expected an object with a name",
                f"{INPUT_UNREADABLE} - input a: shape: expected a list of whole numbers from 0 to 2147483647, got [-1]",
                f'{INPUT_UNREADABLE} - input b: FP32 data holds str, such as "one"',
                f"{INPUT_UNREADABLE} - expected an object with a name for each input",
            ],
        ),
        (
            {
                "inputs": [
                    {"name": "a", "shape": [2], "datatype": "FP32", "parameters": {"binary_data_size": "8"}},
                    {"name": "b", "shape": [2], "datatype": "FP32", "parameters": {"binary_data_size": -1}},
                ]
            },
            [
                f"{SIZE_INVALID} - input a: expected a whole number, 0 or more, got '8'",
                f"{SIZE_INVALID} - input b: expected a whole number, 0 or more, got -1",
            ],
        ),
    ],
    ids=["fields", "sizes of binary data"],
)
def test_all_errors_are_reported_in_one_message(document: Any, messages: list[str]) -> None:
    assert _refused(document, bytes(16)).split(". Also: ") == messages
