"""Bodies of the generate extension, read."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from ovmstrio.api.kserve.rest.generate import read_generate_request
from ovmstrio.core.datatypes import BY_NAME, INVALID
from ovmstrio.core.errors import InvalidRequest, MalformedJson
from ovmstrio.core.request import Contents, InferRequest
from ovmstrio.core.tensor import ANY_SIZE, TensorSpec

GRAPH = (TensorSpec("text", INVALID, (), None), TensorSpec("seed", INVALID, (), None))
MODEL = (
    TensorSpec("prompt", BY_NAME["BYTES"], (ANY_SIZE, ANY_SIZE)),
    TensorSpec("x", BY_NAME["FP32"], (ANY_SIZE,) * 3),
    TensorSpec("half", BY_NAME["FP16"], (ANY_SIZE,)),
)


def _read(document: Any, inputs: tuple[TensorSpec, ...] = GRAPH) -> InferRequest:
    return read_generate_request("m", "", json.dumps(document).encode(), inputs)


@pytest.mark.parametrize(
    ("value", "datatype", "shape", "raw"),
    [
        ("größe", "BYTES", (7,), "größe".encode()),
        ("", "BYTES", (0,), b""),
        (["a", "bc"], "BYTES", (2,), b"\x01\0\0\0a\x02\0\0\0bc"),
        (5, "INT64", (1,), np.array([5], "<i8").tobytes()),
        (-(2**63), "INT64", (1,), np.array([-(2**63)], "<i8").tobytes()),
        ([0, 2**64 - 1], "UINT64", (2,), np.array([0, 2**64 - 1], "<u8").tobytes()),
        (0.5, "FP64", (1,), np.array([0.5], "<f8").tobytes()),
        ([[1, 2.5], [3, 4]], "FP64", (2, 2), np.array([1, 2.5, 3, 4], "<f8").tobytes()),
        ([True, False], "BOOL", (2,), b"\x01\x00"),
    ],
)
def test_values_for_graphs_say_their_own_datatype(
    value: Any, datatype: str, shape: tuple[int, ...], raw: bytes
) -> None:
    """A text is its bare bytes; all else has the datatype and shape that the JSON has."""
    request = _read({"text": value})

    (given,) = request.inputs
    assert (given.name, given.datatype, given.shape, given.contents) == ("text", datatype, shape, None)
    assert [bytes(each or b"") for each in request.raw_inputs] == [raw]


def test_values_for_models_have_the_models_datatypes() -> None:
    """Elements are taken as what the model says, and shapes get leading ones up to its rank."""
    request = _read({"prompt": "hi", "x": [[1, 2], [3, 4]]}, MODEL)

    prompt, x = request.inputs
    assert (prompt.datatype, prompt.shape, prompt.contents) == ("BYTES", (1, 1), Contents("bytes_contents", ["hi"]))
    assert (x.datatype, x.shape, x.contents) == ("FP32", (1, 2, 2), Contents("fp32_contents", [1, 2, 3, 4]))
    assert request.raw_inputs == []


@pytest.mark.parametrize(
    ("number", "datatype"), [("7", "INT64"), (str(2**63), "UINT64"), ("-0.5", "FP64"), ("2e0", "FP64")]
)
def test_long_lists_of_numbers_are_read_as_short_ones(number: str, datatype: str) -> None:
    """More numbers than a document may have other values, with and without rows."""
    count = 600_000
    flat, rows = ",".join([number] * count), ",".join([f"[{','.join([number] * 1000)}]"] * (count // 1000))
    request = read_generate_request("m", "", f'{{"text": [{flat}], "seed": [{rows}]}}'.encode(), GRAPH)
    typed = read_generate_request("m", "", f'{{"x": [{rows}]}}'.encode(), MODEL)

    assert [(given.datatype, given.shape) for given in request.inputs] == [
        (datatype, (count,)),
        (datatype, (600, 1000)),
    ]
    expected = np.full(count, float(number), BY_NAME[datatype].numpy).tobytes()
    assert [bytes(raw or b"") for raw in request.raw_inputs] == [expected, expected]
    assert typed.inputs[0].shape == (1, 600, 1000)
    assert typed.inputs[0].contents is not None
    assert set(np.asarray(typed.inputs[0].contents.values).tolist()) == {float(number)}


@pytest.mark.parametrize("text", ["[-1,18446744073709551615]", "[1,[2]]", "[[1],[2,3]]", '[1,"a"]', "[1,true]"])
def test_long_lists_of_other_values_are_refused_as_short_ones(text: str) -> None:
    """The value of the wrong type is at the end of the list."""
    with pytest.raises(InvalidRequest) as short:
        read_generate_request("m", "", f'{{"text": {text}}}'.encode(), GRAPH)
    first, rest = text[1:-1].split(",", 1)
    long = f'{{"text": [{f"{first}," * 40_000}{rest}]}}'.encode()
    with pytest.raises(InvalidRequest) as caught:
        read_generate_request("m", "", long, GRAPH)
    assert caught.value.message == short.value.message


def test_what_is_no_input_is_a_parameter() -> None:
    """Keys of the body and of its parameters are the same: inputs by their names, all others parameters."""
    document = {"id": "7", "text": "hi", "top": True, "parameters": {"seed": 3, "temperature": 0.5, "n": 2}}
    request = _read(document)

    assert request.id == "7"
    assert [given.name for given in request.inputs] == ["text", "seed"]
    assert request.parameters == {"top": True, "temperature": 0.5, "n": 2}


def test_inputs_may_have_the_names_of_the_body_itself() -> None:
    """An input called as a key of the protocol is an input."""
    inputs = (TensorSpec("id", INVALID, (), None), TensorSpec("parameters", INVALID, (), None))
    request = _read({"id": "a", "parameters": "b"}, inputs)

    assert (request.id, [given.name for given in request.inputs]) == ("", ["id", "parameters"])


@pytest.mark.parametrize(
    ("document", "text"),
    [
        ({"text": []}, "input text: expected at least one element"),
        ({"text": [[1], [2, 3]]}, "input text: expected lists of one length"),
        ({"text": [1, [2]]}, "input text: expected lists of one length"),
        ({"text": json.loads("[" * 40 + "]" * 40)}, "input text: expected lists of at most 32 levels"),
        ({"text": None}, "input text: expected texts, numbers or booleans, got null"),
        ({"text": {"a": 1}}, "input text: expected texts, numbers or booleans, got an object"),
        ({"text": ["a", 1]}, "input text: expected elements of one type, got numbers and texts"),
        ({"text": [True, 1]}, "input text: expected elements of one type, got booleans and numbers"),
        ({"text": [-1, 2**64 - 1]}, "fit no integer type together"),
        ({"txt": ["a"]}, "txt: expected a text, number or boolean for a parameter, got a list; inputs are: text, seed"),
        ({"parameters": {"a": None}}, "a: expected a text, number or boolean for a parameter, got null"),
        ({"parameters": [1]}, "parameters: expected an object"),
        ({"id": 7}, "id: expected a text"),
    ],
)
def test_what_cannot_be_read_is_named(document: Any, text: str) -> None:
    """A refusal names the key, what was expected and what came."""
    with pytest.raises(InvalidRequest) as caught:
        _read(document)
    assert text in caught.value.message


@pytest.mark.parametrize(
    ("document", "text"),
    [({"x": "a"}, "FP32 data holds str"), ({"half": True}, "FP16 data holds bool")],
)
def test_values_that_do_not_fit_a_model_are_named(document: Any, text: str) -> None:
    """What the model's datatype cannot take is refused as everywhere in REST."""
    with pytest.raises(InvalidRequest) as caught:
        _read(document, MODEL)
    assert text in caught.value.message


@pytest.mark.parametrize(
    ("value", "raw"), [(r'"\ud800"', b"\xed\xa0\x80"), (r'["a\ud800"]', b"\x04\0\0\0a\xed\xa0\x80")]
)
def test_half_of_a_surrogate_pair_is_passed_on_as_it_came(value: str, raw: bytes) -> None:
    """Python's reader takes it, which reads what has a NaN somewhere."""
    request = read_generate_request("m", "", f'{{"text": {value}, "temperature": NaN}}'.encode(), GRAPH)
    assert request.raw_inputs == [raw]


def test_a_body_that_is_not_json_has_its_own_error() -> None:
    """Broken JSON is told from JSON that does not fit."""
    with pytest.raises(MalformedJson):
        read_generate_request("m", "", b"{", GRAPH)


def test_everything_that_is_wrong_is_told_at_once() -> None:
    """Inputs and parameters, in the order of the body."""
    with pytest.raises(InvalidRequest) as caught:
        _read({"text": [], "seed": None, "of": {}})
    assert caught.value.message.split(". Also: ") == [
        "input text: expected at least one element, got an empty list",
        "input seed: expected texts, numbers or booleans, got null",
        "of: expected a text, number or boolean for a parameter, got an object; inputs are: text, seed",
    ]
