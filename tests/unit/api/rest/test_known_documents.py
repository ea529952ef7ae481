"""What is read by what has come before: the same as is read without, and nothing that might mean something else."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ovmstrio.api.kserve.rest.infer_request import read_infer_request
from ovmstrio.api.kserve.rest.known_documents import KnownDocuments
from ovmstrio.core.errors import ServerError
from ovmstrio.core.request import InferRequest

FIRST = b'{"inputs": [{"name": "data", "shape": [1,2], "datatype": "FP32", "data": [1.5, 2]}],"outputs":[{"name":"y"}]}'
INPUT = b'{"name":"x","shape":[1],"datatype":"FP32","data":[1]}'


def _knowing(document: bytes) -> KnownDocuments:
    known = KnownDocuments()
    read_infer_request("m", "3", document, known=known)
    return known


def _read(body: bytes, known: KnownDocuments | None) -> InferRequest | str:
    try:
        return read_infer_request("m", "3", body, known=known)
    except ServerError as error:
        return error.message


def test_other_numbers_of_a_known_document() -> None:
    """They are read without parsing what stands around them."""
    body = FIRST.replace(b"[1.5, 2]", b" [0.25 , -1e3,7]")
    read = _knowing(FIRST).read("other", "", body)
    assert read is not None
    assert read == read_infer_request("other", "", body)
    assert read.inputs[0].contents is not None
    assert read.inputs[0].contents.values == [0.25, -1000.0, 7]
    assert [output.name for output in read.outputs] == ["y"]


@pytest.mark.parametrize(
    "change",
    [
        (b"[1.5, 2]", b"[]"),
        (b"[1.5, 2]", b"[1.5, true]"),
        (b"[1.5, 2]", b"[1.5, NaN]"),
        (b"[1.5, 2]", b"[[1.5], [2]]"),
        (b"[1.5, 2]", b'[1.5, "NaN"]'),
        (b"[1.5, 2]", b"[1.5, 2"),
        (b"[1.5, 2]", b"1.5"),
        (b"[1.5, 2]", b"null"),
        (b"[1.5, 2]", b'[1],"data":[2]'),
        (b"[1.5, 2]", b'[1],"parameters":{"binary_data_size":8},"x":[2]'),
        (b"[1.5, 2]", b""),
        (b"FP32", b"INT8"),
        (b'"y"', b'"z"'),
        (b"[1,2]", b"[2,1]"),
        (b"}]}", b"}]} 1"),
    ],
)
def test_documents_that_resemble_a_known_one(change: tuple[bytes, bytes]) -> None:
    """They are read, or refused, as if nothing had come before."""
    body = FIRST.replace(*change)
    assert body != FIRST
    assert _read(body, _knowing(FIRST)) == _read(body, None)


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
def test_documents_of_which_more_than_one_list_may_change(document: bytes) -> None:
    """Such are never known, nor are those with much beside their numbers."""
    known = _knowing(document)
    assert known.read("m", "3", document) is None


@given(st.lists(st.one_of(st.integers(-(2**70), 2**70), st.floats(allow_nan=False, allow_infinity=False))))
def test_any_numbers(numbers: list[Any]) -> None:
    """They come out as without what is known."""
    body = FIRST.replace(b"[1.5, 2]", str(numbers).encode())
    assert _read(body, _knowing(FIRST)) == _read(body, None)


def test_ever_fewer_of_documents_that_all_differ_are_looked_at() -> None:
    """Those that are counted are no reason to look closer than at each power of two of them."""
    known = KnownDocuments()
    looked_at = 0
    for number in range(1, 65):
        body = FIRST.replace(b'{"inputs"', b'{"id":"%d","inputs"' % number)
        assert known.read("m", "3", body) is None
        read_infer_request("m", "3", body, known=known)
        looked_at += known.read("m", "3", body) is not None
        known.missed = number
    assert looked_at == 7
