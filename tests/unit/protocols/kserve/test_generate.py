from __future__ import annotations

import json
from typing import Any

import numpy as np
import orjson
import pytest

from ovmstrio.core.errors import GraphFailure, InvalidRequest, MalformedJson
from ovmstrio.core.request import Contents, InferRequest, InferResponse
from ovmstrio.core.tensor import ANY_SIZE, BY_NAME, INVALID, RawTensor, Tensor, TensorSpec
from ovmstrio.protocols.kserve.generate import (
    encode_error_event,
    encode_event,
    generate_document,
    read_generate_request,
)

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
def test_values_for_graphs_have_json_datatypes(value: Any, datatype: str, shape: tuple[int, ...], raw: bytes) -> None:
    request = _read({"text": value})
    (tensor,) = request.inputs
    assert (tensor.name, tensor.datatype, tensor.shape, tensor.contents) == ("text", datatype, shape, None)
    assert [bytes(each or b"") for each in request.raw_inputs] == [raw]


def test_values_for_models_have_the_datatype_and_rank_of_the_model() -> None:
    request = _read({"prompt": "hi", "x": [[1, 2], [3, 4]]}, MODEL)
    prompt, x = request.inputs
    assert (prompt.datatype, prompt.shape, prompt.contents) == ("BYTES", (1, 1), Contents("bytes_contents", ["hi"]))
    assert (x.datatype, x.shape, x.contents) == ("FP32", (1, 2, 2), Contents("fp32_contents", [1, 2, 3, 4]))
    assert request.raw_inputs == []


@pytest.mark.parametrize(
    ("number", "datatype"), [("7", "INT64"), (str(2**63), "UINT64"), ("-0.5", "FP64"), ("2e0", "FP64")]
)
def test_long_lists_of_numbers_are_read_as_short_ones(number: str, datatype: str) -> None:
    count = 600_000
    flat, rows = ",".join([number] * count), ",".join([f"[{','.join([number] * 1000)}]"] * (count // 1000))
    request = read_generate_request("m", "", f'{{"text": [{flat}], "seed": [{rows}]}}'.encode(), GRAPH)
    typed = read_generate_request("m", "", f'{{"x": [{rows}]}}'.encode(), MODEL)
    assert [(each.datatype, each.shape) for each in request.inputs] == [
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
    with pytest.raises(InvalidRequest) as short:
        read_generate_request("m", "", f'{{"text": {text}}}'.encode(), GRAPH)
    first, rest = text[1:-1].split(",", 1)
    long = f'{{"text": [{f"{first}," * 40_000}{rest}]}}'.encode()
    with pytest.raises(InvalidRequest) as caught:
        read_generate_request("m", "", long, GRAPH)
    assert caught.value.message == short.value.message


def test_keys_that_are_no_inputs_are_parameters() -> None:
    document = {"id": "7", "text": "hi", "top": True, "parameters": {"seed": 3, "temperature": 0.5, "n": 2}}
    request = _read(document)
    assert request.id == "7"
    assert [each.name for each in request.inputs] == ["text", "seed"]
    assert request.parameters == {"top": True, "temperature": 0.5, "n": 2}


def test_inputs_may_be_named_as_keys_of_the_body() -> None:
    inputs = (TensorSpec("id", INVALID, (), None), TensorSpec("parameters", INVALID, (), None))
    request = _read({"id": "a", "parameters": "b"}, inputs)
    assert (request.id, [each.name for each in request.inputs]) == ("", ["id", "parameters"])


@pytest.mark.parametrize(
    ("document", "inputs", "text"),
    [
        ({"text": []}, GRAPH, "input text: expected at least one element"),
        ({"text": [[1], [2, 3]]}, GRAPH, "input text: ragged nested list"),
        ({"text": [1, [2]]}, GRAPH, "input text: ragged nested list"),
        ({"text": json.loads("[" * 40 + "]" * 40)}, GRAPH, "input text: expected lists of at most 32 levels"),
        ({"text": None}, GRAPH, "input text: expected texts, numbers or booleans, got null"),
        ({"text": {"a": 1}}, GRAPH, "input text: expected texts, numbers or booleans, got an object"),
        ({"text": ["a", 1]}, GRAPH, "input text: expected elements of one type, got numbers and texts"),
        ({"text": [True, 1]}, GRAPH, "input text: expected elements of one type, got booleans and numbers"),
        ({"text": [-1, 2**64 - 1]}, GRAPH, "fit no integer type together"),
        (
            {"txt": ["a"]},
            GRAPH,
            "txt: expected a text, number or boolean for a parameter, got a list; inputs are: text, seed",
        ),
        ({"parameters": {"a": [1]}}, GRAPH, "a: expected a text, number or boolean for a parameter, got a list"),
        ({"parameters": [1]}, GRAPH, "parameters: expected an object"),
        ({"id": 7}, GRAPH, "id: expected a text"),
        ({"x": "a"}, MODEL, "FP32 data holds str"),
        ({"half": True}, MODEL, "FP16 data holds bool"),
    ],
)
def test_errors_name_the_key_and_the_value(document: Any, inputs: tuple[TensorSpec, ...], text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        _read(document, inputs)
    assert text in caught.value.message


def test_null_is_the_same_as_a_missing_field() -> None:
    given = {"id": None, "parameters": None, "text": "a", "temperature": None}
    assert _read(given, GRAPH) == _read({"text": "a"}, GRAPH)
    assert _read({"parameters": {"a": None, "b": 0.5}, "text": "a"}, GRAPH).parameters == {"b": 0.5}


@pytest.mark.parametrize(("value", "shape"), [([], (0,)), ([[]], (1, 0))])
def test_an_empty_list_is_a_tensor_without_elements_if_the_input_has_a_datatype(
    value: list[Any], shape: tuple[int, ...]
) -> None:
    (given,) = _read({"x": value}, MODEL).inputs
    assert (given.shape[-len(shape) :], given.contents and list(given.contents.values)) == (shape, [])


@pytest.mark.parametrize(
    ("value", "raw"), [(r'"\ud800"', b"\xed\xa0\x80"), (r'["a\ud800"]', b"\x04\0\0\0a\xed\xa0\x80")]
)
def test_a_lone_surrogate_is_passed_on_unchanged(value: str, raw: bytes) -> None:
    # NaN makes Python's JSON reader read the body, which accepts lone surrogates.
    request = read_generate_request("m", "", f'{{"text": {value}, "temperature": NaN}}'.encode(), GRAPH)
    assert request.raw_inputs == [raw]


def test_a_body_that_is_not_json_has_its_own_error() -> None:
    with pytest.raises(MalformedJson):
        read_generate_request("m", "", b"{", GRAPH)


def test_all_errors_are_reported_in_one_message() -> None:
    with pytest.raises(InvalidRequest) as caught:
        _read({"text": [], "seed": None, "of": {}})
    assert caught.value.message.split(". Also: ") == [
        "input text: expected at least one element, got an empty list",
        "input seed: expected texts, numbers or booleans, got null",
        "of: expected a text, number or boolean for a parameter, got an object; inputs are: text, seed",
    ]


def _event(*tensors: Tensor | RawTensor) -> Any:
    written = encode_event(InferResponse("m", "1", list(tensors)))
    assert written.startswith(b"data: ")
    assert written.endswith(b"}\n\n")
    return orjson.loads(written[6:])["y"]


def test_keys_of_an_answer_have_a_fixed_order() -> None:
    outputs: list[Tensor | RawTensor] = [RawTensor("y", "BYTES", (2,), b"hi")]
    full = generate_document(InferResponse("m", "3", outputs, "7", {"OVMS_MP_TIMESTAMP": 2**60}))
    assert list(full.items()) == [
        ("model_name", "m"),
        ("model_version", "3"),
        ("id", "7"),
        ("parameters", {"OVMS_MP_TIMESTAMP": 2**60}),
        ("y", "hi"),
    ]
    assert list(generate_document(InferResponse("m", "3", outputs))) == ["model_name", "model_version", "y"]


def _raw(datatype: str, *data: bytes, shape: tuple[int, ...] | None = None) -> list[RawTensor]:
    size = BY_NAME[datatype].itemsize or 1
    return [RawTensor("y", datatype, shape or (len(each) // size,), each) for each in data]


@pytest.mark.parametrize(
    ("tensors", "value"),
    [
        (_raw("BYTES", b"a\nb"), "a\nb"),
        (_raw("BYTES", b""), ""),
        (_raw("BYTES", b"\x01\0\0\0a\x01\0\0\0b", shape=(2,)), ["a", "b"]),
        (_raw("UINT8", "größe".encode()), "größe"),
        (_raw("UINT8", b""), ""),
        (_raw("UINT8", b"\xff\xfe"), [255, 254]),
        (_raw("UINT8", b"\x00\x01\x02"), [0, 1, 2]),
        (_raw("UINT8", b"ab", shape=(1, 2)), [97, 98]),
        (_raw("INT64", b"\x05" + bytes(7)), 5),
        (_raw("FP32", np.array([0.5, 2], "<f4").tobytes(), shape=(1, 2)), [0.5, 2.0]),
        (_raw("BOOL", b"\x01"), True),
        ([Tensor("y", BY_NAME["FP32"], np.array([1.5], "<f4"))], 1.5),
        ([Tensor("y", BY_NAME["FP32"], np.array([[1.5, np.nan]], "<f4"))], [1.5, "NaN"]),
        # Pieces of text are joined, and numbers are listed.
        (_raw("UINT8", b"one ", b"two"), "one two"),
        (_raw("UINT8", "ö".encode()[:1], "ö".encode()[1:]), "ö"),
        (_raw("UINT8", b"\x00\x01", b"\x02"), [[0, 1], 2]),
        (_raw("UINT8", b"a", b"\xff"), ["a", 255]),
        (_raw("INT64", b"\x03" + bytes(7), b"\x04" + bytes(7)), [3, 4]),
    ],
)
def test_outputs_are_texts_values_or_flat_lists(tensors: list[Tensor | RawTensor], value: Any) -> None:
    found = _event(*tensors)
    assert (found, type(found)) == (value, type(value))


def test_an_output_of_a_custom_datatype_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="cannot be written as JSON"):
        _event(RawTensor("y", "words", (1,), b"a"))


def test_an_error_event_has_its_type_and_an_internal_error_has_no_details() -> None:
    assert encode_error_event(GraphFailure("no\nluck")) == b'event: error\ndata: {"error":"no\\nluck"}\n\n'
    assert encode_error_event(KeyError("a secret")).startswith(b'event: error\ndata: {"error":"internal error')
