from __future__ import annotations

from typing import Any

import numpy as np
import trio

from ovmstrio.ops import Op, PipelineRequest, PipelineResponse, RequestOp, ResponseOp
from ovmstrio.runtimes.ops.executor import open_executor
from ovmstrio.runtimes.ops.graph import build
from ovmstrio.runtimes.ops.tensors import from_array
from tests.support.ops import asking, infer_until_deadline, settings, single
from tests.support.waits import Gate


class Waiting(RequestOp):
    release = Gate()

    def unpack_request_package(self, request: PipelineRequest) -> Any:
        if request.values[0] == "wait":
            self.release.wait()
        return {"x": request.values[0]}


async def test_hooks_of_the_ends_that_never_end_cost_only_their_own_requests(
    mock_clock: trio.testing.MockClock,
) -> None:
    """Those get 6000, later ones their answers; too many such hooks are an error, and no end of threads."""
    Waiting.release.clear()
    graph = build(ResponseOp(input_ops=Op(name="op", input_ops=Waiting())))
    try:
        async with open_executor(graph, settings(worker_num=2)) as executor:
            for _ in range(2):
                assert (await executor.infer(asking())).values == ["x"]
                assert (await infer_until_deadline(executor, Waiting.release.next_arrival(), mock_clock)).err_no == 6000
            response = await executor.infer(asking())
            assert response.err_no == 8000
            assert response.err_msg == "rpc package error: 2 hooks of the RequestOp or the ResponseOp do not end"
    finally:
        Waiting.release.set()


class Late(ResponseOp):
    async def pack_response_package(self, channeldata: Any) -> Any:
        await trio.sleep(1000)


async def test_an_answer_that_is_never_packed_is_6000(autojump_clock: trio.testing.MockClock) -> None:
    """At the request's own time, or a moment later for those whose time is over already."""
    graph = build(Late(input_ops=Op(name="op", input_ops=RequestOp())))
    async with open_executor(graph, settings()) as executor:
        for seconds, took in ((5.0, 5.0), (0.0, 1.0)):
            begin = trio.current_time()
            assert (await executor.infer(asking(), begin + seconds)).err_no == 6000
            assert trio.current_time() - begin == took


async def test_a_request_may_ask_for_its_timeline() -> None:
    """The key that asks for it is not among the inputs, and the answer has it, whatever it is."""
    graph = single(Op)
    async with open_executor(graph, settings()) as executor:
        response = await executor.infer(PipelineRequest(keys=["pipeline.profile", "x"], values=["1", "text"]))
        assert (response.keys, response.values[0]) == (["x", "pipeline.profile"], "text")
        response = await executor.infer(PipelineRequest(keys=["x", "y", "pipeline.profile"], values=["1"]))
        assert (response.err_no, response.keys) == (8000, [])
        response = await executor.infer(PipelineRequest(keys=["pipeline.profile"], values=["0"]))
        assert (response.err_no, response.keys) == (0, [])


class Foreign:
    err_no, err_msg, tensors = 0, "", ()
    key, value = ("a",), ("1",)


async def test_an_answer_may_be_anything_with_the_fields_of_the_message() -> None:
    """Its parts are taken over."""

    class Packing(ResponseOp):
        def pack_response_package(self, channeldata: Any) -> Any:
            return Foreign()

    async with open_executor(build(Packing(input_ops=Op(input_ops=RequestOp()))), settings()) as executor:
        assert await executor.infer(asking()) == PipelineResponse(keys=["a"], values=["1"])


async def test_large_requests_are_read_beside_the_loop() -> None:
    """As small ones are, and an error in them is one of the request."""
    array = np.arange(20_000, dtype=np.int32)
    tensor = from_array("x", array)

    class Summing(Op):
        def postprocess(self, input_dicts: Any, fetch_data: Any, data_id: int = 0, log_id: int = 0) -> Any:
            return {"x": str(fetch_data["x"].sum())}

    async with open_executor(single(Summing), settings()) as executor:
        assert (await executor.infer(PipelineRequest(tensors=[tensor]))).values == [str(array.sum())]
        tensor.int_data.pop()
        assert "has 19999 elements" in (await executor.infer(PipelineRequest(tensors=[tensor]))).err_msg
