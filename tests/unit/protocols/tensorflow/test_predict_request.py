from __future__ import annotations

import base64
import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from ovmstrio.core.errors import InvalidRequest, MalformedJson, ServerError
from ovmstrio.core.request import InferRequest
from ovmstrio.core.tensor import ANY_SIZE, BY_NAME, TensorSpec, from_bf16, to_bf16
from ovmstrio.protocols.kserve.large_document import LARGE_BYTES
from ovmstrio.protocols.kserve.rest_requests import parse_document
from ovmstrio.protocols.tensorflow.rest_routes import (
    MAX_RANK,
    PredictBody,
    flatten,
    read_large_predict,
    read_predict_body,
)
from ovmstrio.transport.statuses import error_status
from tests.support.servables import validate

NO_INSTANCE = "Could not parse instance content. Not valid ndarray detected"
NO_INPUT = "Could not parse input content. Not valid ndarray detected"
NOT_JSON = "The file is not valid json"
NO_VALUE = "Invalid values in tensor proto container"
NUMBERS = [name for name in BY_NAME if name not in {"BYTES", "BOOL", "BF16"}]
B64 = {"b64": base64.b64encode(b"\0\xff").decode()}


def _spec(name: str, datatype: str, rank: int) -> TensorSpec:
    return TensorSpec(name, BY_NAME[datatype], (ANY_SIZE,) * rank)


def _read(document: Any, *specs: TensorSpec) -> PredictBody:
    return read_predict_body(document if isinstance(document, bytes) else json.dumps(document).encode(), specs)


def _array(document: Any, datatype: str, rank: int) -> np.ndarray[Any, Any]:
    spec = _spec("x", datatype, rank)
    read = _read(document, spec)
    return validate(InferRequest("m", inputs=read.inputs), [spec])["x"]


def _refused(document: Any, *specs: TensorSpec) -> str:
    with pytest.raises(InvalidRequest) as caught:
        _read(document, *specs)
    assert error_status(caught.value).http == (412 if isinstance(caught.value, MalformedJson) else 400)
    return caught.value.message


X = _spec("x", "FP32", 2)
Y = _spec("y", "FP32", 2)


# Values


_SHAPES = arrays.array_shapes(min_dims=1, max_dims=4, max_side=4)


@st.composite
def _tensors(draw: st.DrawFn) -> tuple[str, np.ndarray[Any, Any]]:
    datatype = draw(st.sampled_from(NUMBERS))
    return datatype, draw(arrays.arrays(BY_NAME[datatype].numpy, draw(_SHAPES)))


@given(_tensors())
def test_rows_and_columns_are_read_as_the_array_they_list(sent: tuple[str, np.ndarray[Any, Any]]) -> None:
    datatype, array = sent
    values = array.tolist()
    forms = {
        "column": {"inputs": values},
        "named column": {"inputs": {"x": values}},
        "row": {"instances": values},
        "named row": {"instances": [{"x": row} for row in values]},
    }
    for form, document in forms.items():
        read = _array(document, datatype, array.ndim)
        assert read.dtype == array.dtype, form
        np.testing.assert_array_equal(read, array, err_msg=form)


@given(arrays.arrays(np.float32, _SHAPES))
def test_bf16_is_rounded_to_the_nearest(array: np.ndarray[Any, Any]) -> None:
    read = _array({"inputs": array.tolist()}, "BF16", array.ndim)
    np.testing.assert_array_equal(from_bf16(read), from_bf16(to_bf16(array)))


@given(arrays.arrays(np.bool_, _SHAPES))
def test_booleans_are_read_by_rows_and_columns(array: np.ndarray[Any, Any]) -> None:
    for document in ({"inputs": array.tolist()}, {"instances": array.tolist()}):
        np.testing.assert_array_equal(_array(document, "BOOL", array.ndim), array)


@pytest.mark.parametrize(
    ("document", "shape"),
    [
        ({"inputs": []}, (0,)),
        ({"inputs": [[], []]}, (2, 0)),
        ({"inputs": {"x": [[[[[]], [[]], [[]]]], [[[[]], [[]], [[]]]]]}}, (2, 1, 3, 1, 0)),
        ({"instances": [[], []]}, (2, 0)),
        ({"instances": [{"x": []}, {"x": []}]}, (2, 0)),
    ],
)
def test_tensors_may_have_no_elements(document: Any, shape: tuple[int, ...]) -> None:
    assert _array(document, "FP32", len(shape)).shape == shape


@pytest.mark.parametrize(
    ("datatype", "rank", "document", "expected"),
    [
        ("FP32", 0, {"inputs": 7}, 7),
        ("INT64", 0, {"inputs": {"x": 7}}, 7),
        ("INT64", 1, {"instances": [7, 8]}, [7, 8]),
        ("INT64", 1, {"instances": [{"x": 7}, {"x": 8}]}, [7, 8]),
        ("INT32", 1, {"inputs": [1.9, -1.9, 3, 2.0]}, [1, -1, 3, 2]),
        ("INT64", 1, {"inputs": [1.9, -1.9, 3, 2.0]}, [1, -1, 3, 2]),
        ("INT64", 1, {"inputs": [2**63 - 1, 0.5]}, [2**63 - 1, 0]),
        ("FP32", 1, {"inputs": [1e39, -1e39]}, [np.inf, -np.inf]),
        ("FP16", 1, {"inputs": [70000]}, [np.inf]),
        ("BYTES", 1, {"inputs": ["a", "ü\0"]}, [b"a", "ü\0".encode()]),
        ("BYTES", 2, {"inputs": [["a", "b"], ["c", "d"]]}, [[b"a", b"b"], [b"c", b"d"]]),
        ("BYTES", 1, {"inputs": {"x": [B64, "a", {"b64": ""}]}}, [b"\0\xff", b"a", b""]),
        ("BYTES", 1, {"inputs": [B64]}, [b"\0\xff"]),
        ("BYTES", 1, {"inputs": [{"b64": "AP8"}, {"b64": "AP\n8=\n"}, {"b64": " A P 8 "}]}, [b"\0\xff"] * 3),
        ("BYTES", 1, {"inputs": [{"b64": base64.encodebytes(bytes(200)).decode()}]}, [bytes(200)]),
        ("BYTES", 1, {"instances": [B64, B64]}, [b"\0\xff"] * 2),
        ("BYTES", 1, {"instances": ["a", B64]}, [b"a", b"\0\xff"]),
        ("BYTES", 1, {"instances": [{"x": B64}, {"x": "a"}]}, [b"\0\xff", b"a"]),
    ],
)
def test_values_become_elements_of_the_datatype(datatype: str, rank: int, document: Any, expected: Any) -> None:
    assert _array(document, datatype, rank).tolist() == expected


@pytest.mark.parametrize(
    ("datatype", "body", "text"),
    [
        ("INT8", '{"inputs": [128]}', NO_VALUE),
        ("UINT8", '{"inputs": [-1]}', NO_VALUE),
        ("INT32", '{"inputs": [3e9]}', NO_VALUE),
        ("UINT64", f'{{"inputs": [{2**64}]}}', NO_VALUE),
        ("INT64", '{"inputs": [NaN]}', NO_INPUT),
        ("INT64", '{"inputs": [Infinity]}', NO_INPUT),
        ("FP32", '{"inputs": [1e400]}', NOT_JSON),
        ("FP32", f'{{"inputs": [NaN, 1{"0" * 400}]}}', NO_INPUT),
    ],
)
def test_numbers_out_of_range_are_refused(datatype: str, body: str, text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        _array(body.encode(), datatype, 1)
    assert caught.value.message.startswith(text)


@pytest.mark.parametrize(
    ("datatype", "rank", "document", "name", "read_datatype", "shape"),
    [
        ("FP32", 4, {"inputs": [B64]}, "x", "BYTES", (1,)),
        ("UINT8", 4, {"inputs": [B64, "text"]}, "x", "BYTES", (2,)),
        ("FP32", 2, {"instances": [{"b64": [1]}, {"b64": [2]}]}, "b64", "FP32", (2, 1)),
        ("FP32", 2, {"inputs": {"sequence_id": [[1.5]]}}, "sequence_id", "FP32", (1, 1)),
        ("FP32", 2, {"signature_name": "s", "inputs": [[1]], "extra": {"a": None}}, "x", "FP32", (1, 1)),
        ("FP32", 2, {"signature_name": "s", "instances": [[1]], "extra": {"a": None}}, "x", "FP32", (1, 1)),
    ],
    ids=["image", "images", "input b64", "declared sequence_id", "other keys by columns", "other keys by rows"],
)
def test_the_only_input_is_read(
    datatype: str, rank: int, document: Any, name: str, read_datatype: str, shape: tuple[int, ...]
) -> None:
    request = _read(document, _spec(name, datatype, rank))
    (tensor,) = request.inputs
    assert (tensor.name, tensor.datatype, tensor.shape) == (name, read_datatype, shape)
    assert request.by_rows == ("instances" in document)


@pytest.mark.parametrize(
    ("document", "specs", "message"),
    [
        *(
            ({"inputs": {"x": [[1]], "z": value}}, [X], "Invalid number of inputs - Expected: 1; Actual: 2")
            for value in (1, [1.5], [[True]], ["a"], [B64], [], [2**40])
        ),
        ({"instances": [{"x": [1]}]}, [X, Y], "Invalid number of inputs - Expected: 2; Actual: 1"),
        ({"inputs": B64}, [X], "Missing input with specific name - Required input: x"),
    ],
)
def test_unknown_and_missing_names_are_left_to_the_model(document: Any, specs: list[TensorSpec], message: str) -> None:
    request = _read(document, *specs)
    with pytest.raises(InvalidRequest) as caught:
        validate(InferRequest("m", inputs=request.inputs), specs)
    assert caught.value.message.startswith(message)


# Sequences


def test_sequence_inputs_have_integer_datatypes() -> None:
    read = _read({"inputs": {"x": [[1]], "sequence_id": [2**64 - 1], "sequence_control_input": [1]}}, X)
    found = {each.name: (each.datatype, each.shape) for each in read.inputs}
    assert found == {"x": ("FP32", (1, 1)), "sequence_id": ("UINT64", (1,)), "sequence_control_input": ("UINT32", (1,))}
    contents = read.inputs[1].contents
    assert contents is not None
    assert list(contents.values) == [2**64 - 1]


@pytest.mark.parametrize("value", [[1.0], [-1], [[1]], ["1"], [True], [None], "1", [2**64], [{"b64": "MQ=="}], {}])
@pytest.mark.parametrize("name", ["sequence_id", "sequence_control_input"])
def test_a_sequence_input_is_a_list_of_one_integer(name: str, value: Any) -> None:
    assert _refused({"inputs": {"x": [[1]], name: value}}, X).startswith(NO_INPUT)


def test_sequence_inputs_by_rows_have_a_second_dimension() -> None:
    read = _read({"instances": [{"x": [1], "sequence_id": [7]}]}, X)
    assert read.inputs[1].shape == (1, 1)
    assert _refused({"instances": [{"x": [1], "sequence_id": 7}]}, X).startswith(NO_INSTANCE)


# Refusals


BAD_BODIES: dict[str, tuple[Any, ...]] = {
    NOT_JSON: (
        *(b"", b"{", b'{"inputs": nan}', b'{"inputs": +Infinity}', b'{"inputs": [NaN,]}', b'{"inputs": NaN} x'),
        *(b'{"inputs": 1e400}', b"\xff NaN", b'{"inputs": [NaN, %b]}' % (b"1" * 5000)),
    ),
    "JSON nesting depth exceeded": tuple(
        b'{"inputs":%b%b%b}' % (b"[" * depth, word, b"]" * depth)
        for depth, word in ((101, b"1"), (100_000, b"1"), (100_000, b"NaN"))
    ),
    "Request body should be JSON object": (b"[]", b"7", b"null", b"NaN", b"[NaN]", b'"NaN"'),
}
BAD_DOCUMENTS: dict[str, tuple[Any, ...]] = {
    "Could not detect row or column format": ({}, {"signature_name": ""}, {"instances": [[1]], "inputs": [[1]]}),
    "Missing inputs in column format": ({"inputs": {}},),
    "One of inputs is not a JSON object.": tuple({"inputs": each} for each in (None, "text", True)),
}
BAD_INSTANCES: dict[str, tuple[Any, ...]] = {
    "Invalid JSON structure. Nonamed instance is not an array.": (1, {"x": [1]}, None, "text"),
    "Invalid JSON structure. Missing instances in row format": ([],),
    "Could not detect neither named or nonamed format": ([None], [True]),
    "Invalid JSON structure. One of named instances is not a JSON object.": ([{"x": [1]}, [1]], [{"x": [1]}, None]),
    "Invalid JSON structure. Request inputs have different batch sizes": (
        [{"x": [1]}, {"x": [1], "y": [1]}],
        [{"x": [1]}, {"y": [1]}],
    ),
    NO_INSTANCE: (
        *([{}], [{"x": [1]}, {}], [[1], [1, 2]], [[1], 2], [1, [2]], [[1], {"x": [1]}], [[1], ["a"]], ["a"]),
        *([1, True], [1, None], [[[]], [1]], [{"x": [1]}, {"x": [1, 2]}], [{"x": [1]}, {"x": 1}]),
        *([{"x": {"b64": "AA==", "more": 1}}], [{"x": True}], [{"x": None}]),
        *([{"b64": each}] for each in ("?", "Q", "QQ===", "-_-_", "ü")),
    ),
}
BAD_INPUTS = (None, "text", [True], ["text"], {"y": 1}, [1, [2]], [[1, 2], [3]], [{"b64": 1}])


@pytest.mark.parametrize(
    ("document", "text"),
    [
        *((each, text) for text, group in BAD_BODIES.items() for each in group),
        *((each, f"Invalid JSON structure. {text}") for text, group in BAD_DOCUMENTS.items() for each in group),
        *(({"instances": each}, text) for text, group in BAD_INSTANCES.items() for each in group),
        *(({"inputs": {"x": each}}, NO_INPUT) for each in BAD_INPUTS),
        ({"inputs": [{"b64": "a.b="}]}, NO_INPUT),
    ],
)
def test_a_bad_document_is_refused_with_ovms_text(document: Any, text: str) -> None:
    assert _refused(document, X).startswith(text)


@pytest.mark.parametrize("specs", [(), (X, Y)])
@pytest.mark.parametrize("document", [{"inputs": [[1]]}, {"instances": [[1]]}, {"inputs": []}, {"instances": [1]}])
def test_unnamed_values_need_a_model_with_one_input(specs: tuple[TensorSpec, ...], document: Any) -> None:
    text = _refused(document, *specs)
    assert text.startswith("Inputs inside buffer do not match the expected format")
    assert all(spec.name in text for spec in specs)


def test_an_unnamed_number_needs_a_model_with_one_input() -> None:
    assert _refused({"inputs": 1}, X, Y).startswith("Invalid JSON structure. One of inputs is not a JSON object.")


@pytest.mark.parametrize(
    ("datatype", "values", "found"),
    [
        ("BYTES", [1], "number"),
        ("BYTES", ["a", 1], "number, text"),
        ("BOOL", [1], "number"),
        ("FP32", [1, True, None], "boolean, null, number"),
        ("FP32", [1, B64], "number, object"),
        ("FP32", ["a"], "text"),
    ],
)
def test_elements_of_other_types_are_named(datatype: str, values: list[Any], found: str) -> None:
    text = _refused({"inputs": values}, _spec("x", datatype, 1))
    assert text.startswith(f"{NO_INPUT} - input x: expected elements of {datatype}")
    assert text.endswith(f"got {found}")


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**65), 2**65) | st.floats() | st.text() | st.just(B64),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["x", "y", "b64"]), inner),
    ),
    st.sampled_from(["instances", "inputs"]),
    st.sampled_from(["FP32", "INT8", "UINT8", "BYTES", "BOOL", "FP16", "BF16"]),
)
def test_any_document_is_read_or_refused(value: Any, order: str, datatype: str) -> None:
    spec = _spec("x", datatype, 1)
    try:
        read = _read({order: value}, spec)
    except InvalidRequest:
        return
    for each in read.inputs:
        assert each.contents is not None
        assert len(each.contents.values) == np.prod(each.shape, dtype=int)


@pytest.mark.parametrize(("body", "fixed"), [({"inputs": ...}, NO_INPUT), ({"instances": [...]}, NO_INSTANCE)])
def test_all_errors_are_reported_in_one_message(body: dict[str, Any], fixed: str) -> None:
    values = {"x": [["a"]], "y": [[1], 2]}
    document = json.loads(json.dumps(body, default=lambda _: values))
    assert _refused(document, X, Y).split(". Also: ") == [
        f'{fixed} - input x: expected elements of FP32 or {{"b64": ...}}, got text',
        f"{fixed} - input y: ragged nested list, or lists mixed with elements",
    ]


# JSON documents


@pytest.mark.parametrize(
    ("body", "document"),
    [
        (b'{"inputs": [Infinity, -Infinity, 1, 0.5]}', {"inputs": [math.inf, -math.inf, 1, 0.5]}),
        (b'{"inputs": 1, "inputs": 2}', {"inputs": 2}),
        (b'{"inputs": NaN, "inputs": 2}', {"inputs": 2}),
        (b'{"inputs": "%b"}' % (b"a" * 2**20), {"inputs": "a" * 2**20}),
    ],
)
def test_documents_are_read_as_by_python(body: bytes, document: Any) -> None:
    assert parse_document(body) == document


def test_the_rank_of_nested_lists_is_bounded() -> None:
    deepest = json.loads("[" * MAX_RANK + "1" + "]" * MAX_RANK)
    nested = flatten(deepest)
    assert nested is not None
    assert nested.shape == (1,) * MAX_RANK
    with pytest.raises(InvalidRequest, match=r"^JSON nesting depth exceeded"):
        flatten([deepest])


# Large documents


DATATYPES = [name for name in BY_NAME if name != "BYTES"]


def _outcome(body: bytes, specs: list[TensorSpec]) -> Any:
    try:
        read = read_predict_body(body, specs)
        arrays = validate(InferRequest("m", inputs=read.inputs), specs)
    except ServerError as error:
        return type(error), error.message
    inputs = [(each.name, each.datatype, each.shape) for each in read.inputs]
    return read.by_rows, inputs, {name: (array.dtype.str, array.tobytes()) for name, array in arrays.items()}


_numbers: st.SearchStrategy[Any] = (
    st.integers(0, 100)
    | st.integers()
    | st.floats()
    | st.sampled_from([2**63, 2**64, -(2**63) - 1, 1e39, 65520.0, -0.0])
)


def _lists(element: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    shapes = st.lists(st.integers(1, 3), min_size=1, max_size=3)

    def of_shape(shape: list[int]) -> st.SearchStrategy[Any]:
        made = element
        for size in reversed(shape):
            made = st.lists(made, min_size=size, max_size=size)
        return made

    return shapes.flatmap(of_shape)


_odd: st.SearchStrategy[Any] = st.recursive(
    _numbers | st.booleans() | st.none() | st.text(max_size=3) | st.just("[["),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("xyz"), inner, max_size=2),
)
_values = _lists(st.integers(0, 100)) | _lists(_numbers) | _odd
_documents = st.fixed_dictionaries(
    {},
    optional={
        "instances": _values,
        "inputs": _values | st.dictionaries(st.sampled_from("xyz"), _values, max_size=3),
        "signature_name": st.sampled_from(["serving_default", "[", []]),
    },
)


@given(_documents, st.lists(st.sampled_from(DATATYPES), min_size=1, max_size=2), st.integers(1, 3))
@example({"instances": [[1, 2], [3, 4, 5], [6]]}, ["FP32"], 2)
@example({"instances": [[1, 2], [[3], 4]]}, ["FP32"], 2)
@example({"inputs": {"x": [[1], [2]], "y": [[1.5, 2], [3, 4]]}}, ["INT64", "FP16"], 2)
def test_large_documents_are_read_as_small_ones(document: Any, datatypes: list[str], rank: int) -> None:
    specs = [TensorSpec(name, BY_NAME[each], (ANY_SIZE,) * rank) for name, each in zip("xy", datatypes, strict=False)]
    body = json.dumps(document).encode()
    assert _outcome(body.ljust(2 * LARGE_BYTES), specs) == _outcome(body, specs)


@pytest.mark.parametrize("datatype", ["FP32", "FP64", "FP16", "INT32", "UINT64", "INT8"])
@pytest.mark.parametrize("form", ["rows", "column", "columns"])
def test_numbers_of_large_documents_are_read_into_an_array(datatype: str, form: str) -> None:
    array = np.arange(60, dtype=BY_NAME[datatype].numpy).reshape(3, 4, 5)
    listed = array.tolist()
    document = {"rows": {"instances": listed}, "column": {"inputs": listed}, "columns": {"inputs": {"x": listed}}}[form]
    body = json.dumps(document).encode().ljust(LARGE_BYTES)
    read = read_large_predict(body, [TensorSpec("x", BY_NAME[datatype], (ANY_SIZE,) * 3)])
    assert read is not None
    by_rows, (only,) = read
    assert (by_rows, only.name, only.datatype, only.shape) == (form == "rows", "x", datatype, (3, 4, 5))
    assert only.contents is not None
    assert isinstance(only.contents.values, np.ndarray)
    assert np.array_equal(only.contents.values, array.reshape(-1))


def test_large_documents_with_more_lists_than_numbers_are_left_to_the_general_reader() -> None:
    body = json.dumps({"inputs": [[[1]]] * 2000}, separators=(",", ":")).encode()
    specs = [TensorSpec("x", BY_NAME["FP32"], (ANY_SIZE,) * 3)]
    assert read_large_predict(body, specs) is None
    assert _outcome(body, specs)[1] == [("x", "FP32", (2000, 1, 1))]
