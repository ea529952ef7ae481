"""The JSON of predict calls, with the words that JSON does not have."""

from __future__ import annotations

import math

import pytest

from ovmstrio.api.kserve.rest.infer_request import parse_document
from ovmstrio.core.errors import InvalidRequest, MalformedJson


def test_words_for_what_is_no_number_are_read() -> None:
    """They are those that Python's and TensorFlow Serving's JSON have."""
    document = parse_document(b'{"inputs": [NaN, Infinity, -Infinity, 1, 0.5]}')
    values = document["inputs"]
    assert math.isnan(values[0])
    assert values[1:] == [math.inf, -math.inf, 1, 0.5]


def test_of_a_key_that_stands_there_twice_the_last_counts() -> None:
    """With the words and without them."""
    assert parse_document(b'{"inputs": 1, "inputs": 2}') == {"inputs": 2}
    assert parse_document(b'{"inputs": NaN, "inputs": 2}') == {"inputs": 2}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"inputs": nan}',
        b'{"inputs": +Infinity}',
        b'{"inputs": [NaN,]}',
        b'{"inputs": NaN} x',
        b'{"inputs": 1e400}',
        b"\xff NaN",
        b'{"inputs": [NaN, ' + b"1" * 5000 + b"]}",
    ],
)
def test_what_is_no_json_is_told_apart(body: bytes) -> None:
    """It has a status of its own, and the text that clients know."""
    with pytest.raises(MalformedJson, match=r"^The file is not valid json"):
        parse_document(body)


@pytest.mark.parametrize("body", [b"[]", b"7", b"null", b"NaN", b"[NaN]", b'"NaN"'])
def test_a_document_must_be_an_object(body: bytes) -> None:
    """Lists, texts and numbers are none."""
    with pytest.raises(InvalidRequest, match=r"^Request body should be JSON object"):
        parse_document(body)


@pytest.mark.parametrize("word", [b"1", b"NaN"])
def test_what_lies_too_deep_is_refused(word: bytes) -> None:
    """However the document is read."""
    depth = 100_000
    with pytest.raises(InvalidRequest, match=r"^JSON nesting depth exceeded"):
        parse_document(b'{"inputs":' + b"[" * depth + word + b"]" * depth + b"}")
