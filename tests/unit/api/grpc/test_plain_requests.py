"""Requests known by their beginning are what the parser makes of them, whatever came before."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ovmstrio.api.kserve.grpc.plain_requests import PlainRequests
from ovmstrio.api.kserve.grpc.request_decoding import decode_request
from ovmstrio.core.errors import InvalidRequest
from ovmstrio.core.request import Contents, InferRequest
from ovmstrio.protocol.descriptors import message_class

_REQUEST: Final = message_class("inference.ModelInferRequest")
_TAG: Final = 0x3A


def _message(raw: bytes, model: str = "m", request_id: str = "", **more: Any) -> bytes:
    message = _REQUEST(model_name=model, id=request_id, raw_input_contents=[raw, *more.get("further", ())])
    for number, each in enumerate(message.raw_input_contents):
        message.inputs.add(name=f"x{number}", datatype="FP32", shape=[1, len(each) // 4])
    for name in more.get("outputs", ()):
        message.outputs.add(name=name)
    return bytes(message.SerializeToString())


def _parsed(data: bytes) -> InferRequest:
    """Parse a message that is no ``bytes``, which no memory of earlier requests is used for."""
    return decode_request(memoryview(data))


def _read(known: PlainRequests, data: bytes) -> Any:
    found = known.read(data)
    if found is None:
        known.note(data, _parsed(data))
    return found


def test_the_second_of_two_alike_is_known() -> None:
    """With its own values, and as the parser reads it."""
    known = PlainRequests(_TAG, "m")
    assert _read(known, _message(bytes(8), outputs=["y"])) is None
    data = _message(b"12345678", outputs=["y"])
    assert _read(known, data) == _parsed(data)


def test_several_tensors_are_known_each() -> None:
    """Where they have the same sizes; other sizes that come to the same sum are another request."""
    known = PlainRequests(_TAG, "m")
    assert _read(known, _message(bytes(4), further=[bytes(8), b""])) is None
    data = _message(b"1234", further=[b"56789012", b""])
    assert _read(known, data) == _parsed(data)
    assert _read(known, _message(bytes(8), further=[bytes(4), b""])) is None


def test_what_is_given_is_nobody_elses() -> None:
    """Whoever changes a request changes no later one."""
    known = PlainRequests(_TAG, "m")
    data = _message(bytes(8), outputs=["y"])
    _read(known, data)
    first = _read(known, data)
    first.inputs[0].parameters["a"] = 1
    first.outputs[0].parameters["a"] = 1
    first.parameters["a"] = 1
    first.inputs.clear()
    assert _read(known, data) == _parsed(data)


def test_a_request_without_bytes_is_known_if_it_is_the_same_throughout() -> None:
    """As one whose tensors are in shared memory is, with all that it says of them."""
    known = PlainRequests(_TAG, "m")
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
    message = _REQUEST(model_name="m")
    message.parameters["priority"].int64_param = 1
    given, wanted = message.inputs.add(name="x", datatype="FP32", shape=[1]), message.outputs.add(name="y")
    for tensor in (given, wanted):
        tensor.parameters["shared_memory_region"].string_param = region
        tensor.parameters["shared_memory_byte_size"].int64_param = 4
    return bytes(message.SerializeToString(deterministic=True))


@pytest.mark.parametrize("data", [_in_memory("r1"), _message(b"12345678")], ids=["in memory", "raw"])
def test_groups_of_fields_that_nobody_knows_are_passed_over(data: bytes) -> None:
    """As the parser does; such a request is parsed each time."""
    for _ in range(3):
        assert decode_request(data + b"\x7b\x7c") == replace(decode_request(data), received=len(data) + 2)


def _is_last_known(count: int) -> bool:
    """Read so many requests, each of another id, and return whether the last one is known."""
    known = PlainRequests(_TAG, "m")
    messages = [_message(bytes(8), request_id=f"{number:03}") for number in range(count)]
    for data in messages:
        assert known.read(data) is None
        known.note(data, _parsed(data))
    return known.read(messages[-1]) is not None


def test_requests_that_are_all_different_are_looked_at_ever_less() -> None:
    """Ids of one length, each sent once."""
    assert [count for count in range(1, 71) if _is_last_known(count)] == [1, 2, 3, 5, 9, 17, 33, 65]


_RAW: Final = st.binary(max_size=12)


@given(st.lists(st.tuples(st.sampled_from(["", "id"]), st.sampled_from(["m", "n"]), _RAW, st.lists(_RAW, max_size=2))))
def test_every_request_is_what_the_parser_makes_of_it(asked: list[tuple[str, str, bytes, list[bytes]]]) -> None:
    """In any order, of any sizes, plain or not."""
    known = PlainRequests(_TAG, "m")
    for request_id, model, raw, further in asked:
        data = _message(raw, model, request_id, further=further)
        found = _read(known, data)
        assert found is None or found == _parsed(data)


@given(st.lists(st.binary(max_size=24), max_size=20), st.binary(max_size=6), st.integers(0, 80))
def test_bytes_that_are_nearly_a_request_are_read_as_without_memory(
    noise: list[bytes], end: bytes, changed: int
) -> None:
    """Also when they have the size, and most of the beginning, of one that is known."""
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
