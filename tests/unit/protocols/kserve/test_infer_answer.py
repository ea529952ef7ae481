from __future__ import annotations

from typing import Any

import numpy as np
import orjson
import pytest

from ovmstrio.core.errors import InvalidRequest
from ovmstrio.core.http_messages import HttpAnswer
from ovmstrio.core.request import InferRequest, InferResponse, RequestedOutput
from ovmstrio.core.tensor import BY_NAME, RawTensor, Tensor
from ovmstrio.protocols.kserve.rest_routes import HEAD_LENGTH, encode_infer_response
from ovmstrio.util.buffers import PiecedMessage

NOT_FINITE = [np.nan, np.inf, -np.inf]


def _tensor(datatype: str, values: Any, name: str = "y") -> Tensor:
    return Tensor(name, BY_NAME[datatype], np.array(values, BY_NAME[datatype].numpy))


def _render(*tensors: Tensor | RawTensor, request: InferRequest | None = None, **more: Any) -> HttpAnswer:
    return encode_infer_response(request or InferRequest("m"), InferResponse("m", "3", list(tensors), **more))


def _data(tensor: Tensor | RawTensor) -> Any:
    return orjson.loads(_render(tensor).content)["outputs"][0]["data"]


def _request(outputs: dict[str, Any] | None = None, **parameters: Any) -> InferRequest:
    """Create a request for outputs, each with its ``binary_data`` parameter unless that is None."""
    requested = [
        RequestedOutput(name, {} if binary is None else {"binary_data": binary})
        for name, binary in (outputs or {}).items()
    ]
    return InferRequest("m", parameters=parameters, outputs=requested)


def _parts(answer: HttpAnswer) -> tuple[Any, bytes]:
    length = int(dict(answer.headers)[HEAD_LENGTH])
    return orjson.loads(answer.content[:length]), answer.content[length:]


def test_keys_have_the_order_of_ovms() -> None:
    answer = _render(_tensor("FP32", [[1, 2.5]]), id="7", parameters={"OVMS_MP_TIMESTAMP": 2**62 + 1})
    assert answer.status == 200
    assert answer.headers == (("content-type", "application/json"),)
    assert answer.content == (
        b'{"model_name":"m","id":"7","model_version":"3","parameters":{"OVMS_MP_TIMESTAMP":4611686018427387905},'
        b'"outputs":[{"name":"y","shape":[1,2],"datatype":"FP32","data":[1.0,2.5]}]}'
    )
    assert list(orjson.loads(_render(_tensor("FP32", [1])).content)) == ["model_name", "model_version", "outputs"]


def _raw(data: bytes) -> RawTensor:
    return RawTensor("y", "BYTES", (len(data),), data)


@pytest.mark.parametrize(
    ("tensor", "data"),
    [
        (_tensor("BOOL", [True, False]), [True, False]),
        *((_tensor(f"INT{bits}", [-(2 ** (bits - 1)), 1]), [-(2 ** (bits - 1)), 1]) for bits in (8, 16, 32, 64)),
        *((_tensor(f"UINT{bits}", [0, 2**bits - 1]), [0, 2**bits - 1]) for bits in (8, 16, 32, 64)),
        (_tensor("FP16", [0.5, -65_504]), [0.5, -65_504]),
        (_tensor("FP32", [0.5, -3]), [0.5, -3]),
        (_tensor("FP64", [0.1, 1e300]), [0.1, 1e300]),
        (_tensor("BYTES", [b"a\0b", "\u20ac".encode()]), ["a\0b", "\u20ac"]),
        *((_tensor(each, [*NOT_FINITE, 1]), ["NaN", "Infinity", "-Infinity", 1]) for each in ("FP16", "FP32", "FP64")),
        (_tensor("BF16", [0x7F80, 0x3F80]), ["Infinity", 1]),
        (_tensor("BF16", [0x3FC0, 0xC000]), [1.5, -2.0]),
        (_raw(b"\x02\0\0\0ab\0\0\0\0"), ["ab", ""]),
        *((_raw(text.encode()), [text]) for text in ("größe", "\x02\0\0\0a", "abc")),
        (_raw(b""), []),
    ],
)
def test_elements_of_every_datatype_are_written(tensor: Tensor | RawTensor, data: list[Any]) -> None:
    assert _data(tensor) == data


@pytest.mark.parametrize("shape", [(), (0,), (2, 0), (1, 1, 1)])
def test_data_is_flat_for_every_shape(shape: tuple[int, ...]) -> None:
    (output,) = orjson.loads(_render(_tensor("FP32", np.ones(shape))).content)["outputs"]
    assert (output["shape"], output["data"]) == (list(shape), [1.0] * int(np.prod(shape)))


def test_printed_fp32_is_short_and_exact() -> None:
    values = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    read = np.array(_data(_tensor("FP32", values)), np.float64).astype(np.float32)
    assert read.tobytes() == values.tobytes()
    assert b"[0.1]" in _render(_tensor("FP32", [0.1])).content


def test_a_transposed_view_is_written_in_its_own_order() -> None:
    view = np.arange(6, dtype=np.float32).reshape(2, 3).T
    tensor = Tensor("y", BY_NAME["FP32"], view)
    assert _data(tensor) == [0, 3, 1, 4, 2, 5]
    answer = _render(tensor, request=_request(binary_data_output=True))
    assert _parts(answer)[1] == np.ascontiguousarray(view).tobytes()


@pytest.mark.parametrize(
    ("outputs", "parameters", "binary"),
    [
        ({}, {}, []),
        ({}, {"binary_data_output": True}, ["a", "b", "c"]),
        ({}, {"binary_data_output": False}, []),
        ({}, {"binary_data_output": 1}, []),
        ({}, {"binary_data_output": "true"}, []),
        ({"a": True}, {}, ["a"]),
        ({"a": True, "c": True}, {}, ["a", "c"]),
        ({"c": True, "a": True, "b": False}, {}, ["a", "c"]),
        ({"a": None}, {"binary_data_output": True}, ["a"]),
        ({"a": None, "b": None}, {"binary_data_output": True}, ["a", "b"]),
        ({"a": None, "b": False}, {"binary_data_output": True}, ["a"]),
        ({"a": 1, "b": "true"}, {}, []),
        ({"a": 1, "b": "true"}, {"binary_data_output": True}, ["a", "b"]),
        ({"nothing": True}, {}, []),
    ],
)
def test_the_parameter_of_an_output_precedes_that_of_the_request(
    outputs: dict[str, Any], parameters: dict[str, Any], binary: list[str]
) -> None:
    tensors = [_tensor("FP32", [number], name) for number, name in enumerate("abc")]
    answer = _render(*tensors, request=_request(outputs, **parameters))
    assert (HEAD_LENGTH in dict(answer.headers)) == bool(binary)
    document, tail = _parts(answer) if binary else (orjson.loads(answer.content), b"")
    assert [output["name"] for output in document["outputs"]] == ["a", "b", "c"]
    assert [output["name"] for output in document["outputs"] if "data" not in output] == binary
    assert tail == b"".join(tensor.array.tobytes() for tensor in tensors if tensor.name in binary)
    assert dict(answer.headers)["content-type"] == "application/json"


@pytest.mark.parametrize(
    ("tensor", "raw"),
    [
        (_tensor("FP16", [1, 2]), b"\x00\x3c\x00\x40"),
        (_tensor("BF16", [0x3F80]), b"\x80\x3f"),
        (_tensor("BOOL", [True, False]), b"\x01\x00"),
        (_tensor("BYTES", [[b"ab"], [b""]]), b"\x02\0\0\0ab\0\0\0\0"),
        (_tensor("FP32", []), b""),
    ],
)
def test_binary_tensors_are_packed_with_their_size(tensor: Tensor, raw: bytes) -> None:
    document, tail = _parts(_render(tensor, request=_request(binary_data_output=True)))
    assert document["outputs"][0]["parameters"] == {"binary_data_size": len(raw)}
    assert tail == raw


@pytest.mark.parametrize("datatype", sorted(BY_NAME.keys() - {"BYTES", "BF16", "FP16"}))
def test_raw_numbers_are_written_by_their_datatype(datatype: str) -> None:
    array = np.array([[0, 1, 1]], BY_NAME[datatype].numpy)
    for data in (array.tobytes(), bytearray(array.tobytes()), array.data):
        assert _data(RawTensor("y", datatype, (1, 3), data)) == array.ravel().tolist()
    assert _data(RawTensor("y", datatype, (0,), b"")) == []


@pytest.mark.parametrize(
    ("tensor", "text", "raw"),
    [
        (_tensor("BYTES", [b"\xff"]), "output y: its BYTES are not UTF-8", b"\x01\0\0\0\xff"),
        (RawTensor("y", "BYTES", (1,), b"\xff"), "not UTF-8", b"\xff"),
        (RawTensor("y", "my words", (1,), b"\0\0"), "'my words' cannot be written as JSON", b"\0\0"),
        (RawTensor("y", "INT32", (2,), bytes(4)), "expected INT32 elements of shape [2], got 4 bytes", bytes(4)),
        (RawTensor("y", "INT32", (-1,), bytes(4)), "expected INT32 elements of shape [-1], got 4 bytes", bytes(4)),
    ],
)
def test_outputs_that_json_cannot_carry_are_binary_only(tensor: Tensor | RawTensor, text: str, raw: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        _render(tensor)
    assert text in caught.value.message
    assert "binary" in caught.value.message

    document, tail = _parts(_render(tensor, request=_request({"y": True})))
    assert tail == raw
    datatype = tensor.datatype if isinstance(tensor, RawTensor) else tensor.datatype.name
    described = {"name": "y", "shape": list(tensor.shape), "datatype": datatype}
    assert document["outputs"] == [described | {"parameters": {"binary_data_size": len(raw)}}]


def test_large_binary_outputs_are_sent_without_copies() -> None:
    arrays: list[np.ndarray[Any, Any]] = [
        np.arange(200_000, dtype=np.float32),
        np.arange(3, dtype=np.int64),
        np.ones(100_000),
    ]
    names = ("FP32", "INT64", "FP64")
    outputs: list[Tensor | RawTensor] = [
        Tensor(name, BY_NAME[name], array) for name, array in zip(names, arrays, strict=True)
    ]
    request = InferRequest("m", parameters={"binary_data_output": True})
    private = encode_infer_response(request, InferResponse("m", "1", outputs, is_private=True))
    joined = encode_infer_response(request, InferResponse("m", "1", outputs))
    assert isinstance(private.body, PiecedMessage)
    assert isinstance(joined.body, bytes)
    assert (private.content, private.size, private.headers) == (joined.body, len(joined.body), joined.headers)
    large = [view for _, view in private.body.pieces if len(view)]
    assert [np.shares_memory(view, array) for view, array in zip(large, arrays[::2], strict=True)] == [True, True]


@pytest.mark.parametrize(
    "tensors",
    [
        [_tensor("FP32", [[1, 2.5]])],
        [_tensor("FP64", [0.1, float("inf"), float("nan")])],
        [_tensor("FP16", [[0.5]], "null"), _tensor("UINT8", 7)],
        [_tensor("INT64", np.arange(12).reshape(3, 4).T), _tensor("BOOL", [True])],
        [_tensor("FP32", np.empty((0, 3)))],
        [_tensor("BF16", [16256])],
        [_tensor("BYTES", [b"a"])],
        [RawTensor("y", "FP32", (1,), bytes(4))],
        [],
    ],
)
@pytest.mark.parametrize("id_", ["", "null", "7"])
def test_small_answers_are_written_as_by_the_general_writer(tensors: list[Tensor | RawTensor], id_: str) -> None:
    # A parameter, even one without an effect, makes the general writer write the answer.
    general = InferRequest("m", parameters={"binary_data_output": False})
    assert _render(*tensors, id=id_) == _render(*tensors, request=general, id=id_)
