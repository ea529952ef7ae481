"""Requests with tensors behind a document that has come before: read as if nothing had."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ovmstrio.api.kserve.rest.infer_request import read_infer_request
from ovmstrio.api.kserve.rest.known_documents import KnownDocuments
from ovmstrio.core.errors import ServerError
from ovmstrio.core.request import InferRequest

X = {"name": "x", "shape": [2], "datatype": "FP32", "parameters": {"binary_data_size": 8}}
Y = {"name": "y", "shape": [1], "datatype": "INT8", "parameters": {"binary_data_size": 1, "note": "mine"}}
WANTED = [{"name": "z", "parameters": {"binary_data": True}}]
DOCUMENT = {"inputs": [X, Y], "outputs": WANTED, "id": "7", "parameters": {"priority": 1}}


def _read(head: bytes, tail: bytes, known: KnownDocuments | None, length: str = "") -> InferRequest | str:
    try:
        return read_infer_request("m", "3", head + tail, length or str(len(head)), known)
    except ServerError as error:
        return error.message


def _is_known(document: dict[str, Any], tail: bytes, known: KnownDocuments) -> bool:
    return known.heads.read("m", "3", orjson.dumps(document), memoryview(tail)) is not None


@given(st.lists(st.binary(max_size=12), min_size=2, max_size=4))
def test_other_bytes_behind_a_known_head(tails: list[bytes]) -> None:
    """However many there are; too few are refused as before."""
    head, known = orjson.dumps(DOCUMENT), KnownDocuments()
    for tail in (b"123456789", *tails):
        assert _read(head, tail, known) == _read(head, tail, None)
        assert _is_known(DOCUMENT, tail, known) is (len(tail) >= 9)


def test_what_becomes_of_a_request_changes_none_that_follows() -> None:
    """Whoever works on a request may note there what it likes."""
    head, known = orjson.dumps(DOCUMENT), KnownDocuments()
    for _ in range(3):
        read = _read(head, b"123456789", known)
        assert isinstance(read, InferRequest)
        assert read == _read(head, b"123456789", None)
        read.parameters["mine"] = read.inputs[0].parameters["mine"] = 1
        read.inputs.pop()
        read.outputs.clear()
        read.raw_inputs = []


@pytest.mark.parametrize(
    "document",
    [
        {"inputs": [X, {"name": "y", "shape": [1], "datatype": "INT8", "data": [1]}]},
        {"inputs": [{"name": "x", "shape": [1], "datatype": "BYTES"}]},
        {"inputs": [X | {"parameters": {"shared_memory_region": "r"}}]},
        {"inputs": []},
        DOCUMENT | {"id": "i" * 1024},
    ],
    ids=["data", "all that comes", "shared memory", "nothing", "long"],
)
def test_what_does_not_say_of_each_input_how_many_bytes_it_has_is_not_known(document: dict[str, Any]) -> None:
    """It is read anew each time."""
    known = KnownDocuments()
    for tail in (b"123456789", b"12345678"):
        assert _read(orjson.dumps(document), tail, known) == _read(orjson.dumps(document), tail, None)
    assert not _is_known(document, b"123456789", known)


@pytest.mark.parametrize("length", ["x", "-1", "99999", "1"])
def test_where_a_head_ends_is_looked_at_as_before(length: str) -> None:
    """Although what comes then is known."""
    head, known = orjson.dumps(DOCUMENT), KnownDocuments()
    _read(head, b"123456789", known)
    assert _read(head, b"123456789", known, length) == _read(head, b"123456789", None, length)


def test_ever_fewer_of_heads_that_all_differ_are_kept() -> None:
    """The first, and one at each power of two of those that have been unknown since."""
    known = KnownDocuments()
    kept = []
    for number in range(1, 65):
        document = DOCUMENT | {"id": str(number)}
        _read(orjson.dumps(document), b"123456789", known)
        if _is_known(document, b"123456789", known):
            kept.append(number)
        known.heads.missed = number
    assert kept == [1, 2, 4, 8, 16, 32, 64]


def test_heads_do_not_take_memory_without_end() -> None:
    """Those that were known are forgotten when there are very many."""
    known = KnownDocuments()
    for number in range(1000):
        known.heads.missed = 0
        _read(orjson.dumps(DOCUMENT | {"id": str(number)}), b"123456789", known)
    known_ones = [number for number in range(1000) if _is_known(DOCUMENT | {"id": str(number)}, b"123456789", known)]
    assert known_ones == list(range(768, 1000))
