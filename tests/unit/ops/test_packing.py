from __future__ import annotations

from enum import Enum
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ovmstrio.protocol.pipeline_messages import RESPONSE
from ovmstrio.runtimes.ops.tensors import as_response, holds_arrays, pack
from ovmstrio.runtimes.ops.values import ChannelData, ChannelDataType, PipelineResponse

ARRAYS = ChannelDataType.CHANNEL_NPDATA.value


def test_arrays_are_printed_in_full() -> None:
    """Arrays become what numpy has always printed, however long they are; printing is as it was afterwards."""
    long = np.arange(2000)
    output = {"a": np.array([[0, 1], [2, 3]], np.float32), "b": long, "c": ["x", "y"], "d": np.array([np.float32(1)])}
    response = pack(ChannelData(datatype=ARRAYS, npdata=output))
    assert response.keys == ["a", "b", "c", "d"]
    assert response.values[0] == "array([[0., 1.],\n       [2., 3.]], dtype=float32)"
    assert "..." not in response.values[1]
    assert response.values[2] == "['x', 'y']"
    assert "..." in repr(long)


def test_arrays_are_tensors_where_that_is_wanted() -> None:
    """With ``set_pack_format`` the answer holds tensors, whose offsets are theirs and no tensor of their own."""
    output = {"a": np.array([[1], [2], [3]]), "a.lod": np.array([0, 1, 3], np.int32), "s": ["x"]}
    response = pack(ChannelData(datatype=ARRAYS, npdata=output), as_tensors=True)
    assert (response.keys, response.values) == ([], [])
    assert [(each.name, each.lod, each.shape) for each in response.tensors] == [
        ("a", [0, 1, 3], [3, 1]),
        ("s", [], [1]),
    ]


def test_texts_stay_as_they_are() -> None:
    """A dictionary of texts is the answer; the first value of another type ends it with 7000."""
    assert pack(ChannelData(dictdata={"a": "1", "b": ""})).values == ["1", ""]
    refused = pack(ChannelData(dictdata={"a": "1", "b": 5, "c": "2"}))
    assert (refused.err_no, refused.err_msg) == (7000, "@DAGExecutor fetch var type must be str(<class 'int'>).")
    assert refused.keys == ["a"]


def test_errors_have_no_output() -> None:
    """An error's code and text are the answer, and a product's take their place."""
    data = ChannelData(datatype=ChannelDataType.ERROR.value, error_code=6000, error_info="late")
    assert pack(data) == PipelineResponse(6000, "late")
    data.prod_error_code, data.prod_error_info = 100001, "product"
    assert pack(data) == PipelineResponse(100001, "product")


@pytest.mark.parametrize(
    ("output", "expected"),
    [({"a": np.zeros(1), "b": ["x"]}, True), ({"a": []}, False), ({"a": [1]}, False), ({"a": "x"}, False), ({}, True)],
    ids=["arrays", "empty_list", "numbers", "text", "nothing"],
)
def test_which_outputs_are_arrays(output: dict[str, Any], expected: bool) -> None:
    """Arrays and lists of texts are; an empty list is an ordinary value."""
    assert holds_arrays(output) is expected


class _Code(Enum):
    Product_Error = (100001,)


def test_what_pack_hooks_return() -> None:
    """Our value, the protobuf message and anything with its fields are answers, and codes may be members."""
    message = RESPONSE(err_no=3, err_msg="m", key=["k"], value=["v"])
    given = SimpleNamespace(err_no=_Code.Product_Error, err_msg="", key=(), value=(), tensors=())
    assert as_response(message) == PipelineResponse(3, "m", ["k"], ["v"])
    assert as_response(given).err_no == 100001
    assert as_response(PipelineResponse(err_no=1)) == PipelineResponse(1)
    with pytest.raises(TypeError, match="must be str, got int"):
        as_response(PipelineResponse(values=[1]))  # type: ignore[list-item]
    with pytest.raises(AttributeError):
        as_response(None)
