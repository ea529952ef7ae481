from __future__ import annotations

from typing import Any

import pytest

from ovmstrio.ops import PipelineResponse, PipelineTensor
from ovmstrio.protocol.pipeline_messages import REQUEST
from ovmstrio.runtimes.ops.messages import from_message, tensor_from_message, to_message

TENSOR = PipelineTensor("x", 1, [1, 2], [0, 1], float_data=[0.5, 1.5])


def test_requests_are_read() -> None:
    """With every field of theirs."""
    message = REQUEST(key=["a"], value=["1"], name="n", method="m", logid=2**40, clientip="ip")
    message.tensors.add(name="x", elem_type=1, shape=[1, 2], lod=[0, 1], float_data=[0.5, 1.5])
    request = from_message(message)
    assert (request.keys, request.values, request.tensors) == (["a"], ["1"], [TENSOR])
    assert (request.name, request.method, request.logid, request.clientip) == ("n", "m", 2**40, "ip")


def test_answers_are_written() -> None:
    """With every field of theirs."""
    message = to_message(PipelineResponse(5, "why", ["a"], ["1"], [TENSOR]))
    assert (message.err_no, message.err_msg, list(message.key), list(message.value)) == (5, "why", ["a"], ["1"])
    assert [tensor_from_message(one) for one in message.tensors] == [TENSOR]


@pytest.mark.parametrize(
    "wrong",
    [{"err_no": 2**40}, {"keys": [5]}, {"tensors": [PipelineTensor(shape=[2**70])]}, {"err_msg": b"\xff"}],
)  # fmt: skip
def test_answers_that_cannot_be_written_are_8000(wrong: dict[str, Any]) -> None:
    """Instead of none at all."""
    message = to_message(PipelineResponse(**wrong))
    assert message.err_no == 8000
    assert message.err_msg.startswith("rpc package error: ")
