from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from google.protobuf.json_format import ParseDict
from hypothesis import given, settings
from hypothesis import strategies as st

from ovmstrio.core.errors import InvalidRequest
from ovmstrio.encoding.messages import TENSOR
from ovmstrio.ops.http_routes import parse_request
from ovmstrio.ops.messages import PipelineTensor, tensor_from_message
from tests.support.examples import examples

_NAMES = [name for field in TENSOR.DESCRIPTOR.fields for name in (field.name, field.json_name)]
_ELEMENTS = st.one_of(
    st.integers(-(2**65), 2**65),
    st.integers(-3, 3),
    st.integers(-3, 3).map(str),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from([1.0, 1e39, "NaN", "Infinity", "1_0", " 1", "x", "", "\ud800", True, False, None, [], {}]),
    st.text(max_size=3),
)
_VALUES = st.one_of(st.lists(st.integers(-3, 3)), st.lists(_ELEMENTS, max_size=4), _ELEMENTS)


@settings(max_examples=examples(400), deadline=None)
@given(tensor=st.dictionaries(st.sampled_from([*_NAMES, "unknown"]), _VALUES, max_size=4))
def test_a_tensor_is_read_as_by_the_protobuf_json_reader(tensor: dict[str, Any]) -> None:
    tensor = {name: value for name, value in tensor.items() if not {name} & _twice(tensor)}
    expected: PipelineTensor | None = None
    with contextlib.suppress(Exception):
        expected = tensor_from_message(ParseDict(json.loads(json.dumps(tensor)), TENSOR(), ignore_unknown_fields=True))
    try:
        (read,) = parse_request(json.dumps({"tensors": [tensor]}).encode(), "ops", "x").tensors
    except InvalidRequest:
        assert expected is None
    else:
        assert read == expected


def _twice(tensor: dict[str, Any]) -> set[str]:
    """Return the other name of each field that a tensor names in both forms."""
    return {
        field.json_name for field in TENSOR.DESCRIPTOR.fields if field.name in tensor and field.name != field.json_name
    }


@pytest.mark.parametrize(
    ("field", "number", "expected"),
    [
        ("float_data", "0.1", 0.10000000149011612),
        ("float64_data", "0.1", 0.1),
        ("int64_data", "-7", -7),
        ("int_data", "7", 7),
    ],
)
def test_a_tensor_may_have_more_numbers_than_documents_have_members(field: str, number: str, expected: float) -> None:
    count = 600_000
    body = f'{{"tensors":[{{"name":"x","shape":["{count}"],"{field}":[{",".join([number] * count)}]}}]}}'
    (tensor,) = parse_request(body.encode(), "ops", "x").tensors
    values = getattr(tensor, field)
    assert (len(values), set(values), tensor.shape) == (count, {expected}, [count])


@pytest.mark.parametrize("field", ["bool_data", "float_data"])
def test_a_long_list_of_booleans_is_read_as_a_short_one(field: str) -> None:
    bodies = [f'{{"tensors":[{{"{field}":[{",".join(["true"] * count)}]}}]}}'.encode() for count in (1, 40_000)]
    short, long = (getattr(parse_request(body, "ops", "x").tensors[0], field) for body in bodies)
    assert long == short * 40_000
    assert set(map(type, long)) == set(map(type, short))


@pytest.mark.parametrize("element", ['"1.5"', "null", "{}"])
def test_a_long_list_of_other_types_is_refused(element: str) -> None:
    body = f'{{"tensors":[{{"float64_data":[{",".join([element] * 16_385)}]}}]}}'
    with pytest.raises(InvalidRequest, match="the field's type in a list of more than 16384"):
        parse_request(body.encode(), "ops", "x")
