"""What is read in one go, or left: the same as the careful way says, which a length in the header asks for."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from ovmstrio.api.kserve.rest.infer_request import read_infer_request
from ovmstrio.api.kserve.rest.plain_request import read_plain_request
from ovmstrio.core.errors import ServerError

INPUT: dict[str, Any] = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1.5, 2]}
PLAIN: list[Any] = [
    {"inputs": [INPUT]},
    {"inputs": [INPUT, INPUT | {"name": "y", "datatype": "INT64", "data": [1, 2]}], "id": "7"},
    {"inputs": [INPUT], "outputs": []},
    {"inputs": [INPUT], "outputs": [{"name": "a"}, {"name": "b"}], "other": 1},
    {"inputs": [INPUT | {"datatype": "BYTES", "data": ["a", ""]}]},
    {"inputs": [INPUT | {"datatype": "BOOL", "data": [True, False]}]},
    {"inputs": [INPUT | {"data": [1, 2, 3]}]},
    {"inputs": []},
]
CHANGES: list[dict[str, Any]] = [
    {"name": 1},
    {"shape": None},
    {"shape": [1, -1]},
    {"shape": [True]},
    {"shape": [1.0]},
    {"shape": [2**31]},
    {"datatype": None},
    {"datatype": ["FP32"]},
    {"datatype": "FP31"},
    {"data": None},
    {"data": []},
    {"data": [], "shape": [0]},
    {"data": [[1, 2]]},
    {"data": [1, True]},
    {"data": [1, "NaN"]},
    {"data": [1, "x"]},
    {"data": [1, None]},
    {"datatype": "INT8", "data": [1, 1.0]},
    {"datatype": "BYTES", "data": [1]},
    {"parameters": {"binary_data_size": 8}},
    {"other": 1},
]
ODD: list[Any] = [
    {},
    [],
    {"inputs": None},
    {"inputs": {}},
    {"inputs": [None]},
    {"inputs": [INPUT], "outputs": None},
    {"inputs": [INPUT], "outputs": {}},
    {"inputs": [INPUT], "outputs": [{}]},
    {"inputs": [INPUT], "outputs": ["a"]},
    {"inputs": [INPUT], "outputs": [{"name": 1}]},
    {"inputs": [INPUT], "outputs": [{"name": "a", "parameters": {"binary_data": True}}]},
    {"inputs": [INPUT], "id": None},
    {"inputs": [INPUT], "id": 3},
    {"inputs": [INPUT], "parameters": {}},
    {"inputs": [INPUT], "parameters": {"p": 1.5}},
    *({"inputs": [INPUT | change]} for change in CHANGES),
    {"inputs": [{key: value for key, value in INPUT.items() if key != "data"} | {"parameters": {}}]},
]


def _read(body: bytes, head_length: str | None) -> Any:
    try:
        return read_infer_request("m", "1", body, head_length)
    except ServerError as error:
        return type(error), error.message


@pytest.mark.parametrize("document", [*PLAIN, *ODD])
def test_both_ways_say_the_same(document: Any) -> None:
    """Be the document right or wrong."""
    body = orjson.dumps(document)
    assert _read(body, None) == _read(body, str(len(body)))


@pytest.mark.parametrize("document", PLAIN)
def test_plain_documents_are_read_in_one_go(document: Any) -> None:
    """Most requests have no need of the careful way."""
    assert read_plain_request("m", "1", document) is not None


@pytest.mark.parametrize("document", [each for each in ODD if isinstance(each, dict)])
def test_odd_documents_are_left(document: Any) -> None:
    """For the careful way to take or refuse."""
    assert read_plain_request("m", "1", document) is None
