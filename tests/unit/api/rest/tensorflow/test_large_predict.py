"""Large predict bodies are read into arrays, and say in every case what small ones do."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ovmstrio.api.kserve.rest.large_document import LARGE_BYTES
from ovmstrio.api.tensorflow.rest.large_predict import read_large_predict
from ovmstrio.api.tensorflow.rest.predict_request import read_predict_body
from ovmstrio.core.datatypes import BY_NAME
from ovmstrio.core.errors import ServerError
from ovmstrio.core.request import InferRequest
from ovmstrio.core.tensor import ANY_SIZE, TensorSpec
from tests.support.validation import validate

DATATYPES = [name for name in BY_NAME if name != "BYTES"]


def _outcome(body: bytes, specs: list[TensorSpec]) -> Any:
    """Give what a model would get, or why it would get nothing."""
    try:
        read = read_predict_body(body, specs)
        arrays = validate(InferRequest("m", inputs=read.inputs), specs)
    except ServerError as error:
        return type(error), error.message
    given_inputs = [(each.name, each.datatype, each.shape) for each in read.inputs]
    return read.by_rows, given_inputs, {name: (array.dtype.str, array.tobytes()) for name, array in arrays.items()}


_numbers: st.SearchStrategy[Any] = (
    st.integers(0, 100)
    | st.integers()
    | st.floats()
    | st.sampled_from([2**63, 2**64, -(2**63) - 1, 1e39, 65520.0, -0.0])
)


def _lists(element: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    shapes = st.lists(st.integers(1, 3), min_size=1, max_size=3)

    def of_shape(shape: list[int]) -> st.SearchStrategy[Any]:
        made = element
        for size in reversed(shape):
            made = st.lists(made, min_size=size, max_size=size)
        return made

    return shapes.flatmap(of_shape)


_odd: st.SearchStrategy[Any] = st.recursive(
    _numbers | st.booleans() | st.none() | st.text(max_size=3) | st.just("[["),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("xyz"), inner, max_size=2),
)
_values = _lists(st.integers(0, 100)) | _lists(_numbers) | _odd
_documents = st.fixed_dictionaries(
    {},
    optional={
        "instances": _values,
        "inputs": _values | st.dictionaries(st.sampled_from("xyz"), _values, max_size=3),
        "signature_name": st.sampled_from(["serving_default", "[", []]),
    },
)


@given(_documents, st.lists(st.sampled_from(DATATYPES), min_size=1, max_size=2), st.integers(1, 3))
@example({"instances": [[1, 2], [3, 4, 5], [6]]}, ["FP32"], 2)
@example({"instances": [[1, 2], [[3], 4]]}, ["FP32"], 2)
@example({"inputs": {"x": [[1], [2]], "y": [[1.5, 2], [3, 4]]}}, ["INT64", "FP16"], 2)
def test_large_bodies_say_what_small_ones_do(document: Any, datatypes: list[str], rank: int) -> None:
    """Whatever is in them: the same arrays, or the same refusal."""
    specs = [TensorSpec(name, BY_NAME[each], (ANY_SIZE,) * rank) for name, each in zip("xy", datatypes, strict=False)]
    body = json.dumps(document).encode()
    assert _outcome(body.ljust(2 * LARGE_BYTES), specs) == _outcome(body, specs)


@pytest.mark.parametrize("datatype", ["FP32", "FP64", "FP16", "INT32", "UINT64", "INT8"])
@pytest.mark.parametrize("form", ["rows", "column", "columns"])
def test_plain_numbers_never_become_objects(datatype: str, form: str) -> None:
    """They are read by the parser that knows tensors, whichever form they come in."""
    array = np.arange(60, dtype=BY_NAME[datatype].numpy).reshape(3, 4, 5)
    listed = array.tolist()
    document = {"rows": {"instances": listed}, "column": {"inputs": listed}, "columns": {"inputs": {"x": listed}}}[form]
    body = json.dumps(document).encode().ljust(LARGE_BYTES)
    read = read_large_predict(body, [TensorSpec("x", BY_NAME[datatype], (ANY_SIZE,) * 3)])
    assert read is not None
    by_rows, (only,) = read
    assert (by_rows, only.name, only.datatype, only.shape) == (form == "rows", "x", datatype, (3, 4, 5))
    assert only.contents is not None
    assert isinstance(only.contents.values, np.ndarray)
    assert np.array_equal(only.contents.values, array.reshape(-1))


def test_a_body_with_more_lists_than_numbers_is_read_the_careful_way() -> None:
    """To look at each list would cost more than it saves."""
    body = json.dumps({"inputs": [[[1]]] * 2000}, separators=(",", ":")).encode()
    specs = [TensorSpec("x", BY_NAME["FP32"], (ANY_SIZE,) * 3)]
    assert read_large_predict(body, specs) is None
    assert _outcome(body, specs)[1] == [("x", "FP32", (2000, 1, 1))]
