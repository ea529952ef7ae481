from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tritonclient.grpc.service_pb2 import ModelInferRequest

from ovmstrio.core.errors import InvalidRequest
from ovmstrio.core.request import Contents, InferRequest
from ovmstrio.core.tensor import BY_NAME
from ovmstrio.encoding.generated import inference
from ovmstrio.encoding.generated.grpc.health.v1 import HealthCheckRequest
from ovmstrio.encoding.generated.grpc.reflection.v1 import ServerReflectionRequest
from ovmstrio.encoding.messages import message_class
from ovmstrio.encoding.protobuf_wire import first_string_field
from ovmstrio.protocols.grpc_codec import Codec
from ovmstrio.protocols.kserve.grpc_messages import decode_request, read_elements
from ovmstrio.protocols.kserve.request_templates import ProtobufTemplates

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)

_parameters = st.dictionaries(
    texts,
    st.one_of(
        st.just({}),
        st.booleans().map(lambda value: {"bool_param": value}),
        st.integers(-(2**63), 2**63 - 1).map(lambda value: {"int64_param": value}),
        st.integers(0, 2**64 - 1).map(lambda value: {"uint64_param": value}),
        st.floats(allow_nan=False).map(lambda value: {"double_param": value}),
        texts.map(lambda value: {"string_param": value}),
    ),
    max_size=3,
)


def _elements(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    few = st.lists(strategy, min_size=1, max_size=4)
    return st.one_of(few, st.tuples(few, st.integers(20, 60)).map(lambda pair: pair[0] * pair[1]))


_contents = st.fixed_dictionaries(
    {},
    optional={
        "bool_contents": _elements(st.booleans()),
        "int_contents": _elements(st.integers(-(2**31), 2**31 - 1)),
        "int64_contents": _elements(st.integers(-(2**63), 2**63 - 1)),
        "uint_contents": _elements(st.integers(0, 2**32 - 1)),
        "uint64_contents": _elements(st.integers(0, 2**64 - 1)),
        "fp32_contents": _elements(st.floats(width=32, allow_nan=False)),
        "fp64_contents": _elements(st.floats(allow_nan=False)),
        "bytes_contents": _elements(st.binary(max_size=9)),
    },
)

_inputs = st.fixed_dictionaries(
    {
        "name": texts,
        "datatype": st.one_of(st.sampled_from(sorted(BY_NAME)), texts),
        "shape": st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5),
        "parameters": _parameters,
    },
    optional={"contents": _contents},
)

request_fields = st.fixed_dictionaries(
    {
        "model_name": texts,
        "model_version": texts,
        "id": texts,
        "parameters": _parameters,
        "inputs": st.lists(_inputs, max_size=3),
        "outputs": st.lists(st.fixed_dictionaries({"name": texts, "parameters": _parameters}), max_size=3),
        "raw_input_contents": st.lists(
            st.one_of(st.binary(max_size=50), st.integers(30_000, 40_000).map(lambda size: b"\x3a\x05" * (size // 2))),
            max_size=3,
        ),
    }
)
"""The fields of a ``ModelInferRequest``, as keyword arguments of Google's classes; about half make large messages."""


def _cut(data: bytes, start: int, end: int, extra: bytes) -> bytes:
    return data[: start % (len(data) + 1)] + extra + data[end % (len(data) + 1) :]


def mutations(messages: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    """Replace a random stretch of a message by random bytes, at its start more often than elsewhere."""
    position = st.one_of(st.integers(0, 80), st.integers(0, 100_000))
    return st.builds(_cut, messages, position, position, st.binary(max_size=12))


LARGE = b"\x3a\xc0\xb8\x02" + b"\x3a" * 40_000
"""A field of raw contents that makes any message a large one."""

GROUP_WIRE_TYPES = {3, 4}
MANY = {str(n): {"bool_param": True} for n in range(2_000)}

messages = request_fields.map(lambda fields: ModelInferRequest(**fields).SerializeToString())


def decode(data: bytes) -> InferRequest:
    request: InferRequest = Codec().decode(data, InferRequest)
    return request


def outcome(data: bytes) -> InferRequest | GRPCError:
    try:
        return decode(data)
    except GRPCError as error:
        return error


def refusal(data: bytes) -> str:
    error = outcome(data)
    assert isinstance(error, GRPCError)
    assert error.status is Status.INVALID_ARGUMENT
    return error.message or ""


def parameters(messages: Any) -> dict[str, Any]:
    choices = {name: message.WhichOneof("parameter_choice") for name, message in messages.items()}
    return {name: getattr(messages[name], choice) for name, choice in choices.items() if choice}


def shown(values: dict[str, Any]) -> dict[str, str]:
    return {name: repr(value) for name, value in values.items()}


def assert_same(request: InferRequest, oracle: Any) -> None:
    """Compare every field with what Google's own class, as tritonclient has it, reads."""
    assert (request.model_name, request.model_version, request.id) == (
        oracle.model_name,
        oracle.model_version,
        oracle.id,
    )
    assert shown(request.parameters) == shown(parameters(oracle.parameters))
    assert [(output.name, shown(output.parameters)) for output in request.outputs] == [
        (output.name, shown(parameters(output.parameters))) for output in oracle.outputs
    ]
    assert [bytes(raw or b"") for raw in request.raw_inputs] == list(oracle.raw_input_contents)
    assert len(request.inputs) == len(oracle.inputs)
    for ours, theirs in zip(request.inputs, oracle.inputs, strict=True):
        assert (ours.name, ours.datatype, ours.shape) == (theirs.name, theirs.datatype, tuple(theirs.shape))
        assert shown(ours.parameters) == shown(parameters(theirs.parameters))
        assert (ours.contents is not None) == bool(theirs.contents.ListFields())
        if ours.contents is not None:
            expected = list(getattr(theirs.contents, ours.contents.field)) if ours.contents.field else []
            np.testing.assert_array_equal(list(ours.contents.values), expected)


@settings(deadline=None)
@given(fields=request_fields)
def test_requests_are_read_as_google_reads_them(fields: dict[str, Any]) -> None:
    message = ModelInferRequest(**fields)
    assert_same(decode(message.SerializeToString()), message)


@settings(deadline=None)
@given(data=st.one_of(st.binary(max_size=200), mutations(messages), mutations(messages).map(lambda data: data + LARGE)))
@example(b"\x0a\x01\xff")  # not UTF-8
@example(b"\x0a\x05ab")  # cut off
@example(b"\x3b\x3c")  # a group
@example(b"\x00\x00")  # field number 0
@example(b"\x3a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01" + LARGE)  # a negative length
@example(b"\xff" * 12 + LARGE)  # a tag without end
@example(b"\x2a\x02\x1a\x7f" + LARGE)  # a packed shape longer than its input
def test_any_bytes_are_read_as_google_reads_them_or_refused(data: bytes) -> None:
    result = outcome(data)
    if isinstance(result, InferRequest):
        assert_same(result, ModelInferRequest.FromString(data))
    else:
        assert "inference.ModelInferRequest" in refusal(data)


@settings(deadline=None)
@given(data=st.one_of(st.binary(max_size=200), mutations(messages)))
def test_messages_that_google_accepts_are_accepted_unless_they_contain_groups(data: bytes) -> None:
    try:
        ModelInferRequest.FromString(data)
    except DecodeError:
        return
    assert isinstance(outcome(data), InferRequest) or any(octet & 7 in GROUP_WIRE_TYPES for octet in data[32_768:])


@pytest.mark.parametrize("padding", [b"", LARGE])
def test_unknown_fields_and_wrong_wire_types_are_ignored(padding: bytes) -> None:
    message = ModelInferRequest(model_name="m", raw_input_contents=[b"abc"]).SerializeToString()
    strange = b"\xf8\x7f\x01" + b"\x38\x05" + b"\x3d\x00\x00\x00\x00" + b"\x39" + bytes(8)
    request = decode(strange + message + strange + padding)
    assert (request.model_name, request.raw_inputs[0]) == ("m", b"abc")
    assert len(request.raw_inputs) == (2 if padding else 1)


def test_tensors_of_a_large_message_are_views_of_it() -> None:
    raw = np.arange(20_000, dtype="<f4")
    data = ModelInferRequest(model_name="m", raw_input_contents=[raw.tobytes(), b"", b"x"]).SerializeToString()
    request = decode(data)
    assert all(isinstance(view, memoryview) and view.obj is data for view in request.raw_inputs)
    assert np.shares_memory(np.frombuffer(request.raw_inputs[0] or b"", "u1"), np.frombuffer(data, "u1"))
    assert [bytes(view or b"") for view in request.raw_inputs] == [raw.tobytes(), b"", b"x"]


@pytest.mark.parametrize("datatype", sorted(BY_NAME))
def test_the_contents_field_of_the_datatype_is_preferred(datatype: str) -> None:
    fitting = BY_NAME[datatype].contents_field
    filled = {"bool_contents": [True], "fp64_contents": [0.5], "bytes_contents": [b"x"], fitting: [1, 0]}
    if datatype == "BYTES":
        filled["bytes_contents"] = [b"1", b"0"]
    message = ModelInferRequest(inputs=[{"datatype": datatype, "contents": filled}])
    contents = decode(message.SerializeToString()).inputs[0].contents
    assert contents is not None
    assert (contents.field, len(contents.values)) == (fitting, 2)


def test_another_contents_field_is_kept_for_validation() -> None:
    filled = {"uint64_contents": [7], "fp64_contents": [0.5]}
    message = ModelInferRequest(inputs=[{"datatype": "FP16", "contents": filled}, {"datatype": "FP32", "contents": {}}])
    wrong, nothing = (tensor.contents for tensor in decode(message.SerializeToString()).inputs)
    assert wrong is not None
    assert (wrong.field, list(wrong.values)) == ("uint64_contents", [7])
    assert nothing is None


def test_long_lists_of_floats_keep_their_bits() -> None:
    values = np.arange(5_000, dtype="<f4")
    values[7:9] = np.array([0x7FC00123, 0x80000000], "<u4").view("<f4")
    contents = {"fp32_contents": values, "fp64_contents": [1.5]}
    message = ModelInferRequest(inputs=[{"datatype": "FP32", "shape": [5_000], "contents": contents}])
    message.inputs[0].contents.MergeFromString(b"\xf8\x7f\x01")  # a field of a newer protocol
    decoded = decode(message.SerializeToString()).inputs[0].contents
    assert decoded is not None
    assert isinstance(decoded.values, np.ndarray)
    np.testing.assert_array_equal(decoded.values.view("<u4"), values.view("<u4"))


@pytest.mark.parametrize(
    ("data", "text"),
    [
        *((entry * 40_000, "at most 16384 fields") for entry in (b"\x2a\x00", b"\x3a\x00", b"\xf8\x7f\x00")),
        (bytes(ModelInferRequest(inputs=[{"shape": [1] * 50_000}]).SerializeToString()), "1024 dimensions, got 50000"),
        (bytes(ModelInferRequest(parameters=MANY).SerializeToString()), "at most 1024 parameters, got 2000"),
    ],
    ids=["inputs", "raw contents", "unknown fields", "dimensions", "parameters"],
)
def test_floods_of_fields_dimensions_and_parameters_are_refused(data: bytes, text: str) -> None:
    assert text in refusal(data)


_TAG: Final = 0x3A


def _message(raw: bytes, model: str = "m", request_id: str = "", **more: Any) -> bytes:
    message = ModelInferRequest(model_name=model, id=request_id, raw_input_contents=[raw, *more.get("further", ())])
    for number, each in enumerate(message.raw_input_contents):
        message.inputs.add(name=f"x{number}", datatype="FP32", shape=[1, len(each) // 4])
    for name in more.get("outputs", ()):
        message.outputs.add(name=name)
    return bytes(message.SerializeToString())


def _parsed(data: bytes) -> InferRequest:
    """Parse without the cache of earlier requests, which is used for ``bytes`` only."""
    return decode_request(memoryview(data))


def _read(known: ProtobufTemplates, data: bytes) -> Any:
    found = known.read(data)
    if found is None:
        known.note(data, _parsed(data))
    return found


def test_a_request_like_an_earlier_one_is_read_from_the_cache() -> None:
    known = ProtobufTemplates(_TAG, "m")
    assert _read(known, _message(bytes(8), outputs=["y"])) is None
    data = _message(b"12345678", outputs=["y"])
    assert _read(known, data) == _parsed(data)


def test_changing_a_cached_request_does_not_change_later_ones() -> None:
    known = ProtobufTemplates(_TAG, "m")
    data = _message(bytes(8), outputs=["y"])
    _read(known, data)
    first = _read(known, data)
    first.inputs[0].parameters["a"] = 1
    first.outputs[0].parameters["a"] = 1
    first.parameters["a"] = 1
    first.inputs.clear()
    assert _read(known, data) == _parsed(data)


def test_a_request_in_shared_memory_is_cached_by_all_of_its_bytes() -> None:
    known = ProtobufTemplates(_TAG, "m")
    one, other = (_in_memory(region) for region in ("r1", "r2"))
    assert _read(known, one) is None
    for _ in range(2):
        found = _read(known, one)
        assert found == _parsed(one)
        found.inputs[0].parameters.clear()
        found.inputs[0].contents = Contents("fp32_contents", [1.0])
        found.raw_inputs = [b""]
        found.outputs[0].parameters.clear()
        found.parameters.clear()
    assert _read(known, other) is None
    assert decode_request(one) == decode_request(one) == _parsed(one)


def _in_memory(region: str) -> bytes:
    message = ModelInferRequest(model_name="m")
    message.parameters["priority"].int64_param = 1
    given, wanted = message.inputs.add(name="x", datatype="FP32", shape=[1]), message.outputs.add(name="y")
    for tensor in (given, wanted):
        tensor.parameters["shared_memory_region"].string_param = region
        tensor.parameters["shared_memory_byte_size"].int64_param = 4
    return bytes(message.SerializeToString(deterministic=True))


@pytest.mark.parametrize("data", [_in_memory("r1"), _message(b"12345678")], ids=["in memory", "raw"])
def test_unknown_groups_are_ignored_and_not_cached(data: bytes) -> None:
    for _ in range(3):
        assert decode_request(data + b"\x7b\x7c") == replace(decode_request(data), received=len(data) + 2)


_RAW: Final = st.binary(max_size=12)


@given(st.lists(st.tuples(st.sampled_from(["", "id"]), st.sampled_from(["m", "n"]), _RAW, st.lists(_RAW, max_size=2))))
def test_cached_requests_equal_parsed_ones(requests: list[tuple[str, str, bytes, list[bytes]]]) -> None:
    known = ProtobufTemplates(_TAG, "m")
    for request_id, model, raw, further in requests:
        data = _message(raw, model, request_id, further=further)
        found = _read(known, data)
        assert found is None or found == _parsed(data)


@given(st.lists(st.binary(max_size=24), max_size=20), st.binary(max_size=6), st.integers(0, 80))
def test_bytes_similar_to_a_cached_request_are_read_as_without_the_cache(
    noise: list[bytes], end: bytes, changed: int
) -> None:
    data = bytearray(_message(b"12345678", further=[b"1234"]))
    decode_request(bytes(data))
    data[changed % len(data)] ^= 1
    for each in (bytes(data), bytes(data) + end, *noise):
        try:
            expected: Any = _parsed(each)
        except InvalidRequest as error:
            expected = str(error)
        for _ in range(2):
            try:
                found: Any = decode_request(each)
            except InvalidRequest as error:
                found = str(error)
            assert found == expected


REQUESTS: dict[Any, str] = {
    inference.ServerLiveRequest: "inference.ServerLiveRequest",
    inference.ModelReadyRequest: "inference.ModelReadyRequest",
    inference.ModelMetadataRequest: "inference.ModelMetadataRequest",
    inference.ModelConfigRequest: "inference.ModelConfigRequest",
    inference.RepositoryIndexRequest: "inference.RepositoryIndexRequest",
    HealthCheckRequest: "grpc.health.v1.HealthCheckRequest",
    ServerReflectionRequest: "grpc.reflection.v1.ServerReflectionRequest",
}

VALID = [
    inference.ModelReadyRequest("model", "3"),
    inference.RepositoryIndexRequest(ready=True),
    ServerReflectionRequest(host="h", file_containing_symbol="inference.ModelInferRequest"),
]


@settings(deadline=None)
@given(
    message_type=st.sampled_from(list(REQUESTS)),
    data=st.one_of(st.binary(max_size=60), mutations(st.sampled_from([bytes(message) for message in VALID]))),
)
@example(inference.ModelReadyRequest, b"\x0a\x01\xff")
@example(inference.ModelReadyRequest, b"\x0a\x05ab")
@example(inference.ModelReadyRequest, b"\x08\x01")
@example(ServerReflectionRequest, b"\x2a\x02\x10\x01\x1a\x01a\x22\x01b")
def test_any_bytes_of_other_requests_are_read_as_google_reads_them_or_refused(message_type: Any, data: bytes) -> None:
    strict = message_class(REQUESTS[message_type])
    try:
        oracle = strict.FromString(data)
    except DecodeError:
        with pytest.raises(GRPCError, match=f"malformed {REQUESTS[message_type]}") as caught:
            Codec().decode(data, message_type)
        assert caught.value.status is Status.INVALID_ARGUMENT
    else:
        oracle.DiscardUnknownFields()
        assert strict.FromString(bytes(Codec().decode(data, message_type))) == oracle


FIELDS: list[tuple[str, str, bool, st.SearchStrategy[Any]]] = [
    ("float_val", "<f4", True, st.floats(width=32, allow_nan=False)),
    ("double_val", "<f8", True, st.floats(allow_nan=False)),
    ("bool_val", "?", True, st.booleans()),
    ("int_val", "<i4", False, st.integers(-(2**31), 2**31 - 1)),
    ("uint64_val", "<u8", False, st.integers(0, 2**64 - 1)),
]


@pytest.mark.parametrize(("field", "dtype", "packed", "values"), FIELDS, ids=[row[0] for row in FIELDS])
@pytest.mark.parametrize("copies", [1, 50])
@given(data=st.data())
def test_elements_of_a_field_are_read_as_a_list_or_an_array(
    data: st.DataObject, copies: int, field: str, dtype: str, packed: bool, values: st.SearchStrategy[Any]
) -> None:
    elements = data.draw(st.lists(values, min_size=2, max_size=5)) * copies
    message = message_class("tensorflow.TensorProto")(version_number=3, tensor_content=b"12", **{field: elements})
    message.MergeFromString(b"\xba\x3e\x01x")
    found = read_elements(message, field, np.dtype(dtype), packed=packed)
    assert isinstance(found, list) is (len(elements) <= 64)
    assert (found if isinstance(found, list) else np.asarray(found).tolist()) == elements


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"\x0a\x04echo\x12\x011", b"echo"),
        (b"\x0a\x00", b""),
        (b"", b""),
        (b"\x0a", b""),
        (b"\x12\x04echo", b""),
        (b"\x0a\x80\x01" + b"n" * 200, b"n" * 128),
        (b"\x0a\xff\xff\xff\xff\xff", b""),
        (b"\x0a\xff\x7f" + b"n" * 20_000, b""),
    ],
)
def test_the_first_field_is_read_if_it_is_a_short_text(data: bytes, found: bytes) -> None:
    assert first_string_field(data) == found
