"""Bodies of predict calls, read: what is taken by rows and by columns, and the words of every refusal."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from ovmstrio.api.tensorflow.rest.predict_request import PredictBody, read_predict_body
from ovmstrio.core.datatypes import BY_NAME, from_bf16, to_bf16
from ovmstrio.core.errors import InvalidRequest, MalformedJson
from ovmstrio.core.request import InferRequest
from ovmstrio.core.tensor import ANY_SIZE, TensorSpec
from ovmstrio.wire.statuses import status_of
from tests.support.validation import validate

NO_INSTANCE = "Could not parse instance content. Not valid ndarray detected"
NO_INPUT = "Could not parse input content. Not valid ndarray detected"

NUMBERS = [name for name in BY_NAME if name not in {"BYTES", "BOOL", "BF16"}]


def _spec(name: str, datatype: str, rank: int) -> TensorSpec:
    return TensorSpec(name, BY_NAME[datatype], (ANY_SIZE,) * rank)


def _read(document: Any, *specs: TensorSpec) -> PredictBody:
    return read_predict_body(document if isinstance(document, bytes) else json.dumps(document).encode(), specs)


def _array(document: Any, datatype: str, rank: int) -> np.ndarray[Any, Any]:
    """Give what a model of one input would get."""
    spec = _spec("x", datatype, rank)
    read = _read(document, spec)
    return validate(InferRequest("m", inputs=read.inputs), [spec])["x"]


def _refused(document: Any, *specs: TensorSpec) -> str:
    with pytest.raises(InvalidRequest) as caught:
        _read(document, *specs)
    assert status_of(caught.value).http == (412 if isinstance(caught.value, MalformedJson) else 400)
    return caught.value.message


X = _spec("x", "FP32", 2)
Y = _spec("y", "FP32", 2)


_SHAPES = arrays.array_shapes(min_dims=1, max_dims=4, max_side=4)


@st.composite
def _tensors(draw: st.DrawFn) -> tuple[str, np.ndarray[Any, Any]]:
    datatype = draw(st.sampled_from(NUMBERS))
    return datatype, draw(arrays.arrays(BY_NAME[datatype].numpy, draw(_SHAPES)))


@given(_tensors())
def test_every_form_gives_the_array_that_was_sent(sent: tuple[str, np.ndarray[Any, Any]]) -> None:
    """Rows and columns, with and without names, NaN and infinities among the numbers, to the last bit."""
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
    """The numbers become the bits that stand for the nearest ones."""
    read = _array({"inputs": array.tolist()}, "BF16", array.ndim)
    np.testing.assert_array_equal(from_bf16(read), from_bf16(to_bf16(array)))


@given(arrays.arrays(np.bool_, _SHAPES))
def test_booleans_are_read(array: np.ndarray[Any, Any]) -> None:
    """An input of BOOL takes true and false, also by rows."""
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
    """The shape is that of the lists."""
    assert _array(document, "FP32", len(shape)).shape == shape


def test_a_number_has_no_dimensions() -> None:
    """By columns it is a scalar, named or not; by rows it is one of a list."""
    assert _array({"inputs": 7}, "FP32", 0) == np.float32(7)
    assert _array({"inputs": {"x": 7}}, "INT64", 0) == 7
    np.testing.assert_array_equal(_array({"instances": [7, 8]}, "INT64", 1), [7, 8])
    np.testing.assert_array_equal(_array({"instances": [{"x": 7}, {"x": 8}]}, "INT64", 1), [7, 8])


@pytest.mark.parametrize(("datatype", "expected"), [("INT32", [1, -1, 3, 2]), ("INT64", [1, -1, 3, 2])])
def test_fractions_lose_what_stands_behind_the_point(datatype: str, expected: list[int]) -> None:
    """As a cast to the integer type does."""
    assert _array({"inputs": [1.9, -1.9, 3, 2.0]}, datatype, 1).tolist() == expected


def test_whole_numbers_beside_fractions_keep_64_bits() -> None:
    """They do not go through a double."""
    assert _array({"inputs": [2**63 - 1, 0.5]}, "INT64", 1).tolist() == [2**63 - 1, 0]


@pytest.mark.parametrize(
    ("datatype", "value", "text"),
    [
        ("INT8", 128, "Invalid values in tensor proto container"),
        ("UINT8", -1, "Invalid values in tensor proto container"),
        ("INT32", 3e9, "Invalid values in tensor proto container"),
        ("UINT64", 2**64, "Invalid values in tensor proto container"),
        ("INT64", float("nan"), NO_INPUT),
        ("INT64", float("inf"), NO_INPUT),
    ],
)
def test_numbers_out_of_range_are_refused(datatype: str, value: float, text: str) -> None:
    """The model would see another number."""
    with pytest.raises(InvalidRequest) as caught:
        _array({"inputs": [value]}, datatype, 1)
    assert caught.value.message.startswith(text)


def test_numbers_too_large_for_a_float_become_infinite() -> None:
    """What was a number stays one, of the same sign; what no double holds either is no JSON, or no value."""
    assert _array({"inputs": [1e39, -1e39]}, "FP32", 1).tolist() == [np.inf, -np.inf]
    assert _array({"inputs": [70000]}, "FP16", 1).tolist() == [np.inf]
    assert _refused(b'{"inputs": [1e400]}', X).startswith("The file is not valid json")
    assert _refused(b'{"inputs": [NaN, 1' + b"0" * 400 + b"]}", X).startswith(NO_INPUT)


B64 = {"b64": base64.b64encode(b"\0\xff").decode()}


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({"inputs": ["a", "ü\0"]}, [b"a", "ü\0".encode()]),
        ({"inputs": {"x": [B64, "a", {"b64": ""}]}}, [b"\0\xff", b"a", b""]),
        ({"inputs": [B64]}, [b"\0\xff"]),
        ({"instances": [B64, B64]}, [b"\0\xff"] * 2),
        ({"instances": ["a", B64]}, [b"a", b"\0\xff"]),
        ({"instances": [{"x": B64}, {"x": "a"}]}, [b"\0\xff", b"a"]),
    ],
)
def test_texts_and_encoded_bytes_are_elements(document: Any, expected: list[bytes]) -> None:
    """Both may stand in one list."""
    assert _array(document, "BYTES", 1).tolist() == expected


def test_a_list_of_texts_has_a_shape() -> None:
    """Native strings may have any number of dimensions."""
    assert _array({"inputs": [["a", "b"], ["c", "d"]]}, "BYTES", 2).tolist() == [[b"a", b"b"], [b"c", b"d"]]


def test_encoded_bytes_go_to_inputs_of_numbers() -> None:
    """They are BYTES then, of which the model makes an image or a row of bytes; so are texts for bytes."""
    for datatype, values in (("FP32", [B64]), ("UINT8", [B64, "text"])):
        (read,) = _read({"inputs": values}, _spec("x", datatype, 4)).inputs
        assert (read.datatype, read.shape) == ("BYTES", (len(values),))


def test_an_input_called_b64_is_one() -> None:
    """Only an object with a text under that name stands for bytes."""
    spec = _spec("b64", "FP32", 2)
    (read,) = _read({"instances": [{"b64": [1]}, {"b64": [2]}]}, spec).inputs
    assert (read.name, read.shape) == ("b64", (2, 1))


@pytest.mark.parametrize("order", ["instances", "inputs"])
def test_everything_else_in_the_document_is_passed_over(order: str) -> None:
    """The signature's name among it."""
    (read,) = _read({"signature_name": "nobody's", order: [[1]], "extra": {"a": None}}, X).inputs
    assert (read.name, read.shape) == ("x", (1, 1))


def test_rows_and_columns_are_told_apart() -> None:
    """The answer goes the way of the request."""
    assert _read({"instances": [[1]]}, X).by_rows
    assert not _read({"inputs": [[1]]}, X).by_rows


def test_columns_may_have_different_batches() -> None:
    """The model says whether they fit it."""
    read = _read({"inputs": {"y": [[1]], "x": [[1], [2]]}}, X, Y)
    assert {given.name: given.shape for given in read.inputs} == {"y": (1, 1), "x": (2, 1)}


@pytest.mark.parametrize("value", [1, [1.5], [[True]], ["a"], [B64], [], [2**40]])
def test_names_that_the_model_does_not_have_are_left_to_it(value: Any) -> None:
    """It counts its inputs."""
    read = _read({"inputs": {"x": [[1]], "z": value}}, X)
    with pytest.raises(InvalidRequest, match=r"^Invalid number of inputs - Expected: 1; Actual: 2"):
        validate(InferRequest("m", inputs=read.inputs), [X])


def test_declared_inputs_that_are_missing_are_left_to_the_model() -> None:
    """It counts its inputs."""
    read = _read({"instances": [{"x": [1]}]}, X, Y)
    with pytest.raises(InvalidRequest, match=r"^Invalid number of inputs - Expected: 2; Actual: 1"):
        validate(InferRequest("m", inputs=read.inputs), [X, Y])


def test_encoded_bytes_alone_by_columns_are_an_input_called_b64() -> None:
    """A list of one is meant; the model says that it has no input of that name."""
    read = _read({"inputs": B64}, X)
    with pytest.raises(InvalidRequest, match=r"^Missing input with specific name - Required input: x"):
        validate(InferRequest("m", inputs=read.inputs), [X])


# Sequences


def test_inputs_about_sequences_have_datatypes_of_their_own() -> None:
    """A model does not declare them."""
    read = _read({"inputs": {"x": [[1]], "sequence_id": [2**64 - 1], "sequence_control_input": [1]}}, X)
    found = {given.name: (given.datatype, given.shape) for given in read.inputs}
    assert found == {"x": ("FP32", (1, 1)), "sequence_id": ("UINT64", (1,)), "sequence_control_input": ("UINT32", (1,))}
    contents = read.inputs[1].contents
    assert contents is not None
    assert list(contents.values) == [2**64 - 1]


def test_an_input_that_a_model_declares_is_not_about_sequences() -> None:
    """Its datatype is the model's."""
    (read,) = _read({"inputs": {"sequence_id": [[1.5]]}}, _spec("sequence_id", "FP32", 2)).inputs
    assert (read.datatype, read.shape) == ("FP32", (1, 1))


@pytest.mark.parametrize("value", [[1.0], [-1], [[1]], ["1"], [True], [None], "1", [2**64], [{"b64": "MQ=="}], {}])
@pytest.mark.parametrize("name", ["sequence_id", "sequence_control_input"])
def test_what_says_no_sequence_is_refused(name: str, value: Any) -> None:
    """It is a list of one whole number, by columns."""
    assert _refused({"inputs": {"x": [[1]], name: value}}, X).startswith(NO_INPUT)


def test_inputs_about_sequences_by_rows() -> None:
    """They get a dimension more, which the model refuses; a number alone is refused at once, as in OVMS."""
    read = _read({"instances": [{"x": [1], "sequence_id": [7]}]}, X)
    assert read.inputs[1].shape == (1, 1)
    assert _refused({"instances": [{"x": [1], "sequence_id": 7}]}, X).startswith(NO_INSTANCE)


# Refusals


@pytest.mark.parametrize(
    ("document", "text"),
    [
        (b"{", "The file is not valid json"),
        ([], "Request body should be JSON object"),
        ({}, "Invalid JSON structure. Could not detect row or column format"),
        ({"signature_name": ""}, "Invalid JSON structure. Could not detect row or column format"),
        ({"instances": [[1]], "inputs": [[1]]}, "Invalid JSON structure. Could not detect row or column format"),
        ({"instances": 1}, "Invalid JSON structure. Nonamed instance is not an array."),
        ({"instances": {"x": [1]}}, "Invalid JSON structure. Nonamed instance is not an array."),
        ({"instances": None}, "Invalid JSON structure. Nonamed instance is not an array."),
        ({"instances": "text"}, "Invalid JSON structure. Nonamed instance is not an array."),
        ({"instances": []}, "Invalid JSON structure. Missing instances in row format"),
        ({"instances": [None]}, "Could not detect neither named or nonamed format"),
        ({"instances": [True]}, "Could not detect neither named or nonamed format"),
        ({"instances": [{"x": [1]}, [1]]}, "Invalid JSON structure. One of named instances is not a JSON object."),
        ({"instances": [{"x": [1]}, None]}, "Invalid JSON structure. One of named instances is not a JSON object."),
        ({"instances": [{}]}, NO_INSTANCE),
        ({"instances": [{"x": [1]}, {}]}, NO_INSTANCE),
        (
            {"instances": [{"x": [1]}, {"x": [1], "y": [1]}]},
            "Invalid JSON structure. Request inputs have different batch sizes",
        ),
        (
            {"instances": [{"x": [1]}, {"y": [1]}]},
            "Invalid JSON structure. Request inputs have different batch sizes",
        ),
        ({"instances": [[1], [1, 2]]}, NO_INSTANCE),
        ({"instances": [[1], 2]}, NO_INSTANCE),
        ({"instances": [1, [2]]}, NO_INSTANCE),
        ({"instances": [[1], {"x": [1]}]}, NO_INSTANCE),
        ({"instances": [[1], ["a"]]}, NO_INSTANCE),
        ({"instances": ["a"]}, NO_INSTANCE),
        ({"instances": [1, True]}, NO_INSTANCE),
        ({"instances": [1, None]}, NO_INSTANCE),
        ({"instances": [[[]], [1]]}, NO_INSTANCE),
        ({"instances": [{"x": [1]}, {"x": [1, 2]}]}, NO_INSTANCE),
        ({"instances": [{"x": [1]}, {"x": 1}]}, NO_INSTANCE),
        ({"instances": [{"x": {"b64": "AA==", "more": 1}}]}, NO_INSTANCE),
        ({"instances": [{"x": True}]}, NO_INSTANCE),
        ({"instances": [{"x": None}]}, NO_INSTANCE),
        ({"instances": [{"b64": "?"}]}, NO_INSTANCE),
        ({"instances": [{"b64": "QQ"}]}, NO_INSTANCE),
        ({"instances": [{"b64": "ü"}]}, NO_INSTANCE),
        ({"inputs": {}}, "Invalid JSON structure. Missing inputs in column format"),
        ({"inputs": None}, "Invalid JSON structure. One of inputs is not a JSON object."),
        ({"inputs": "text"}, "Invalid JSON structure. One of inputs is not a JSON object."),
        ({"inputs": True}, "Invalid JSON structure. One of inputs is not a JSON object."),
        ({"inputs": {"x": None}}, NO_INPUT),
        ({"inputs": {"x": "text"}}, NO_INPUT),
        ({"inputs": {"x": [True]}}, NO_INPUT),
        ({"inputs": {"x": ["text"]}}, NO_INPUT),
        ({"inputs": {"x": {"y": 1}}}, NO_INPUT),
        ({"inputs": {"x": [1, [2]]}}, NO_INPUT),
        ({"inputs": {"x": [[1, 2], [3]]}}, NO_INPUT),
        ({"inputs": {"x": [{"b64": 1}]}}, NO_INPUT),
        ({"inputs": [{"b64": "a b="}]}, NO_INPUT),
    ],
)
def test_each_mistake_has_its_own_words(document: Any, text: str) -> None:
    """The words are OVMS's, and the reason stands behind them."""
    assert _refused(document, X).startswith(text)


@pytest.mark.parametrize("specs", [(), (X, Y)])
@pytest.mark.parametrize("document", [{"inputs": [[1]]}, {"instances": [[1]]}, {"inputs": []}, {"instances": [1]}])
def test_values_without_a_name_need_a_model_of_one_input(specs: tuple[TensorSpec, ...], document: Any) -> None:
    """The names are told."""
    text = _refused(document, *specs)
    assert text.startswith("Inputs inside buffer do not match the expected format")
    assert all(spec.name in text for spec in specs)


def test_a_number_without_a_name_needs_a_model_of_one_input() -> None:
    """OVMS has other words for it."""
    expected = "Invalid JSON structure. One of inputs is not a JSON object."
    assert _refused({"inputs": 1}, X, Y).startswith(expected)


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
def test_elements_of_another_kind_are_named(datatype: str, values: list[Any], found: str) -> None:
    """The refusal tells the input, what it takes and what came."""
    text = _refused({"inputs": values}, _spec("x", datatype, 1))
    assert text.startswith(f"{NO_INPUT} - input x: expected elements of {datatype}")
    assert text.endswith(f"got {found}")


def test_what_lies_too_deep_is_refused() -> None:
    """Before the model is asked."""
    deep = b"[" * 101 + b"1" + b"]" * 101
    assert _refused(b'{"inputs":' + deep + b"}", X).startswith("JSON nesting depth exceeded")


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**65), 2**65) | st.floats() | st.text() | st.just(B64),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["x", "y", "b64"]), inner),
    ),
    st.sampled_from(["instances", "inputs"]),
    st.sampled_from(["FP32", "INT8", "UINT8", "BYTES", "BOOL", "FP16", "BF16"]),
)
def test_whatever_is_sent_is_read_or_refused(value: Any, order: str, datatype: str) -> None:
    """Nothing else is raised, and what is read has a value for every element."""
    spec = _spec("x", datatype, 1)
    try:
        read = _read({order: value}, spec)
    except InvalidRequest:
        return
    for each in read.inputs:
        assert each.contents is not None
        assert len(each.contents.values) == np.prod(each.shape, dtype=int)


@pytest.mark.parametrize(("body", "fixed"), [({"inputs": ...}, NO_INPUT), ({"instances": [...]}, NO_INSTANCE)])
def test_everything_that_is_wrong_is_told_at_once(body: dict[str, Any], fixed: str) -> None:
    """Each input that cannot be read is named, by columns and by rows."""
    values = {"x": [["a"]], "y": [[1], 2]}
    document = json.loads(json.dumps(body, default=lambda _: values))
    assert _refused(document, X, Y).split(". Also: ") == [
        f'{fixed} - input x: expected elements of FP32 or {{"b64": ...}}, got text',
        f"{fixed} - input y: lists of one level differ in length, or have elements beside them",
    ]
