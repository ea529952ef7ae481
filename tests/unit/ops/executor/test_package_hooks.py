from __future__ import annotations

from enum import Enum
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import trio

from ovmstrio.encoding.messages import RESPONSE
from ovmstrio.ext.ops import (
    CustomException,
    CustomExceptionCode,
    Op,
    PipelineRequest,
    PipelineResponse,
    ProductErrCode,
    RequestOp,
    ResponseOp,
)
from ovmstrio.ops.executor import open_executor
from ovmstrio.ops.graph import build
from ovmstrio.ops.messages import from_array
from tests.support.ops import asking, infer_until_deadline, op_class, settings, single
from tests.support.waits import Gate


class _Product(ProductErrCode):
    SORRY = 100001
    TUPLE = (100002,)


class _Code(Enum):
    PRODUCT = (100001,)


async def infer_with_ends(
    read: type[RequestOp] = RequestOp,
    write: type[ResponseOp] = ResponseOp,
    request: PipelineRequest | None = None,
    op: type[Op] = Op,
) -> PipelineResponse:
    """Send one request to a pipeline of one Op between a RequestOp and a ResponseOp."""
    async with open_executor(build(write(input_ops=op(name="op", input_ops=read()))), settings()) as executor:
        return await executor.infer(request or asking())


# Requests


@pytest.mark.parametrize(("code", "number"), [(60, 60), (_Product.SORRY, 100001), (_Product.TUPLE, 100002)])
async def test_a_request_op_may_refuse_with_a_product_code(code: Any, number: int) -> None:
    class Refusing(RequestOp):
        def unpack_request_package(self, request: PipelineRequest) -> Any:
            return {}, request.logid, code, "no such user"

    started: list[Any] = []
    response = await infer_with_ends(Refusing, op=op_class(preprocess=lambda _, inputs: started.append(inputs)))
    assert (response.err_no, response.err_msg, response.values) == (number, "no such user", [])
    assert started == []


async def test_fewer_values_than_keys_are_8000() -> None:
    response = await infer_with_ends(request=PipelineRequest(keys=["x", "y"], values=["1"]))
    assert (response.err_no, response.err_msg) == (8000, "rpc package error: 2 keys, but only 1 values")
    assert (await infer_with_ends(request=PipelineRequest(keys=["x"], values=["1", "2"]))).values == ["1"]


async def test_an_input_that_cannot_be_copied_for_another_attempt_is_an_error() -> None:
    class Generating(RequestOp):
        def unpack_request_package(self, request: PipelineRequest) -> Any:
            return {"x": (one for one in "abc")}

    graph = build(ResponseOp(input_ops=Op(name="op", input_ops=Generating())))
    async with open_executor(graph, settings(retry=2)) as executor:
        response = await executor.infer(asking())
    assert response.err_no == 10000
    assert "cannot be copied" in response.err_msg


async def test_large_requests_are_read_in_a_thread() -> None:
    array = np.arange(20_000, dtype=np.int32)
    tensor = from_array("x", array)
    summing = op_class(postprocess=lambda _, inputs, fetched: {"x": str(fetched["x"].sum())})
    async with open_executor(single(summing), settings()) as executor:
        assert (await executor.infer(PipelineRequest(tensors=[tensor]))).values == [str(array.sum())]
        tensor.int_data.pop()
        assert "has 19999 elements" in (await executor.infer(PipelineRequest(tensors=[tensor]))).err_msg


# Answers


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ({"y": np.asarray([[1, 2], [3, 4]])}, (0, "", ["array([[1, 2],\n       [3, 4]])"])),
        ({"y": np.asarray([0.5], np.float32)}, (0, "", ["array([0.5], dtype=float32)"])),
        ({"y": ["a", "b"]}, (0, "", ["['a', 'b']"])),
        ({"y": "text"}, (0, "", ["text"])),
        ({"y": 5}, (7000, "@DAGExecutor fetch var type must be str(<class 'int'>).", [])),
        ({"y": []}, (7000, "@DAGExecutor fetch var type must be str(<class 'list'>).", [])),
        ({"y": [1]}, (7000, "@DAGExecutor fetch var type must be str(<class 'list'>).", [])),
        ({}, (0, "", [])),
    ],
    ids=["array", "float32", "texts", "text", "number", "empty list", "list of numbers", "nothing"],
)
async def test_outputs_of_the_last_op(output: Any, expected: tuple[int, str, list[str]]) -> None:
    response = await infer_with_ends(op=op_class(postprocess=lambda *_: output))
    assert (response.err_no, response.err_msg, response.values) == expected


async def test_large_arrays_are_printed_in_full() -> None:
    array = np.arange(50_000)
    response = await infer_with_ends(request=PipelineRequest(tensors=[from_array("x", array)]))
    (text,) = response.values
    assert text.startswith("array([    0,     1,")
    np.testing.assert_array_equal(np.asarray(eval(text, {"array": list})), array)
    assert "..." in repr(array), "the print options are restored"


async def test_arrays_are_answered_as_tensors_with_their_offsets() -> None:
    output = {"a": np.array([[1.5], [2.5], [3.5]], np.float32), "a.lod": np.array([0, 1, 3], np.int32), "s": ["x"]}
    end = ResponseOp(input_ops=op_class(postprocess=lambda *_: output)(name="op", input_ops=RequestOp()))
    end.set_pack_format(True)
    async with open_executor(build(end), settings()) as executor:
        response = await executor.infer(asking())
    assert response.tensors == [from_array("a", output["a"], [0, 1, 3]), from_array("s", ["x"])]
    assert (response.keys, response.values) == ([], [])


@pytest.mark.parametrize(
    ("packed", "expected"),
    [
        (RESPONSE(err_no=3, err_msg="m", key=["k"], value=["v"]), PipelineResponse(3, "m", ["k"], ["v"])),
        (
            SimpleNamespace(err_no=_Code.PRODUCT, err_msg="", key=("a",), value=("1",), tensors=()),
            PipelineResponse(100001, "", ["a"], ["1"]),
        ),
        (
            PipelineResponse(values=[1]),  # type: ignore[list-item] # the mistake
            PipelineResponse(8000, "rpc package error: keys, values and err_msg of an answer must be str, got int"),
        ),
        ("text", PipelineResponse(8000, "rpc package error: 'str' object has no attribute 'err_no'")),
    ],
    ids=["protobuf", "same fields", "wrong value", "wrong type"],
)
async def test_a_response_op_may_return_anything_with_the_fields_of_the_message(
    packed: Any, expected: PipelineResponse
) -> None:
    class Packing(ResponseOp):
        async def pack_response_package(self, channeldata: Any) -> Any:
            return packed

    assert await infer_with_ends(write=Packing) == expected


class _Checking(RequestOp):
    async def init_op(self) -> None:
        self.separator = ","

    def unpack_request_package(self, request: PipelineRequest) -> Any:
        if request.method != "predict":
            return {}, request.log_id, 50, f"no method {request.method}"
        if not request.value:
            raise ValueError("nothing to read")
        values = [float(one) for one in request.value[0].split(self.separator)]
        return {"words": np.asarray([values])}, request.log_id, None, ""


class _Printing(ResponseOp):
    def pack_response_package(self, channeldata: Any) -> Any:
        response = PipelineResponse()
        response.err_no = channeldata.error_code
        if response.err_no:
            response.err_msg = f"{channeldata.error_info}{channeldata.prod_error_info}"
            return response
        response.key.append("sum")
        response.value.append(repr(float(channeldata.parse()["words"].sum())))
        return response


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (PipelineRequest(keys=["w"], values=["1,2,4"], method="predict"), PipelineResponse(0, "", ["sum"], ["7.0"])),
        (PipelineRequest(method="other"), PipelineResponse(50, "no method other")),
        (PipelineRequest(method="predict"), PipelineResponse(8000, "rpc package error: nothing to read")),
    ],
    ids=["answered", "refused", "raised"],
)
async def test_both_ends_may_be_overridden(request_: PipelineRequest, expected: PipelineResponse) -> None:
    assert await infer_with_ends(_Checking, _Printing, request_) == expected


@pytest.mark.parametrize("is_sent", [True, False])
async def test_custom_exceptions_have_their_code_and_may_hide_their_text(is_sent: bool) -> None:
    class Reading(RequestOp):
        def unpack_request_package(self, request: Any) -> Any:
            if not request.key:
                raise CustomException(CustomExceptionCode.INPUT_PARAMS_ERROR, "no key", is_sent)
            return {}

    class Writing(ResponseOp):
        def pack_response_package(self, channeldata: Any) -> Any:
            if channeldata.error_code:
                return PipelineResponse(channeldata.error_code, channeldata.error_info)
            raise CustomException(100_002, "no sum", is_sent)

    hidden = "rpc package error: the message is in the log of the server"
    response = await infer_with_ends(Reading, Writing, PipelineRequest())
    assert response == PipelineResponse(5000, "rpc package error: no key" if is_sent else hidden)
    response = await infer_with_ends(Reading, Writing, PipelineRequest(keys=["a"], values=["b"]))
    assert response == PipelineResponse(100_002, "rpc package error: no sum" if is_sent else hidden)


async def test_a_request_may_ask_for_its_timeline() -> None:
    async with open_executor(single(Op), settings()) as executor:
        response = await executor.infer(PipelineRequest(keys=["pipeline.profile", "x"], values=["1", "text"]))
        assert (response.keys, response.values[0]) == (["x", "pipeline.profile"], "text")
        response = await executor.infer(PipelineRequest(keys=["x", "y", "pipeline.profile"], values=["1"]))
        assert (response.err_no, response.keys) == (8000, [])
        response = await executor.infer(PipelineRequest(keys=["pipeline.profile"], values=["0"]))
        assert (response.err_no, response.keys) == (0, [])


# Time


async def test_threads_of_stuck_request_ops_are_limited(mock_clock: trio.testing.MockClock) -> None:
    release = Gate()

    class Stuck(RequestOp):
        def unpack_request_package(self, request: PipelineRequest) -> Any:
            if request.values[0] == "wait":
                release.wait()
            return {"x": request.values[0]}

    graph = build(ResponseOp(input_ops=Op(name="op", input_ops=Stuck())))
    try:
        async with open_executor(graph, settings(worker_num=2)) as executor:
            for _ in range(2):
                assert (await executor.infer(asking())).values == ["x"]
                assert (await infer_until_deadline(executor, release.next_arrival(), mock_clock)).err_no == 6000
            response = await executor.infer(asking())
            assert response.err_no == 8000
            assert response.err_msg == "rpc package error: 2 hooks of the RequestOp or the ResponseOp do not end"
    finally:
        release.set()


@pytest.mark.parametrize(("seconds", "took"), [(5.0, 5.0), (0.0, 1.0)], ids=["in time", "after the deadline"])
async def test_an_answer_that_is_never_packed_is_6000(
    autojump_clock: trio.testing.MockClock, seconds: float, took: float
) -> None:
    class Late(ResponseOp):
        async def pack_response_package(self, channeldata: Any) -> Any:
            await trio.sleep(1000)

    async with open_executor(build(Late(input_ops=Op(name="op", input_ops=RequestOp()))), settings()) as executor:
        begin = trio.current_time()
        assert (await executor.infer(asking(), begin + seconds)).err_no == 6000
        assert trio.current_time() - begin == took
