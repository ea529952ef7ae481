from __future__ import annotations

from pathlib import Path

import pytest

import paddle_serving_app
from ovmstrio import ops
from paddle_serving_server.pipeline import LocalServiceHandler, PipelineServer
from paddle_serving_server.pipeline.channel import ChannelStopError, ThreadChannel
from paddle_serving_server.pipeline.operator import VirtualOp
from paddle_serving_server.pipeline.util import NameGenerator
from paddle_serving_server.web_service import WebService

NAMES = {
    "paddle_serving_server.web_service": "WebService Op",
    "paddle_serving_server.pipeline": (
        "Op RequestOp ResponseOp PipelineServer PipelineClient LocalServiceHandler Analyst"
    ),
    "paddle_serving_server.pipeline.operator": "Op RequestOp ResponseOp VirtualOp",
    "paddle_serving_server.pipeline.channel": (
        "ChannelData ChannelDataType ChannelDataErrcode ThreadChannel ProcessChannel ChannelStopError "
        "ChannelTimeoutError"
    ),
    "paddle_serving_server.pipeline.error_catch": (
        "CustomExceptionCode CustomException ProductErrCode ErrorCatch ParamChecker ParamVerify"
    ),
    "paddle_serving_server.pipeline.proto.pipeline_service_pb2": "Request Response Tensor",
    "paddle_serving_server.pipeline.proto.pipeline_service_pb2_grpc": "PipelineServiceStub PipelineServiceServicer",
    "paddle_serving_server.pipeline.pipeline_client": "PipelineClient",
    "paddle_serving_server.pipeline.pipeline_server": "PipelineServer",
    "paddle_serving_server.pipeline.dag": "DAG",
    "paddle_serving_server.pipeline.profiler": "TimeProfiler",
    "paddle_serving_server.pipeline.analyse": "Analyst",
    "paddle_serving_server.util": "ArgsParser",
    "paddle_serving_app.local_predict": "LocalPredictor",
}


def test_what_is_gone_says_so() -> None:
    """Names without a use here can be imported, and tell the way out when they are used."""
    with pytest.raises(NotImplementedError, match="local_service_conf"):
        LocalServiceHandler(model_config="x")
    with pytest.raises(NotImplementedError, match="input_ops"):
        VirtualOp("vir0")
    with pytest.raises(NotImplementedError, match="ThreadChannel cannot be made"):
        ThreadChannel()
    with pytest.raises(NotImplementedError, match="get_pipeline_response"):
        WebService().load_model_config("x")
    assert str(ChannelStopError()) == "Channel stopped."


def test_servers_of_ops_that_a_script_joins() -> None:
    """A PipelineServer is a service of its ResponseOp, without a name unless it has one; misuse is told."""
    server = PipelineServer()
    with pytest.raises(ValueError, match="prepare_server"):
        server.run_server()
    with pytest.raises(TypeError, match="must be a ResponseOp, got Op"):
        server.set_response_op(ops.Op(name="a"))  # type: ignore[arg-type]
    server.set_response_op(ops.ResponseOp(input_ops=[ops.Op(name="a", input_ops=[ops.RequestOp()])]))
    server.prepare_server(yml_dict={"rpc_port": 0})
    taken: list[ops.WebService] = []
    from ovmstrio.runtimes.ops.web_service import set_service_runner

    set_service_runner(taken.append)
    try:
        server.run_server()
    finally:
        set_service_runner(None)
    (service,) = taken
    assert (service.name, list(service.graph().ops)) == ("", ["a"])


def test_readers_of_the_original_are_found_behind_ours() -> None:
    """Our folder comes first, and what it has not may come from another copy of the package."""
    ours = Path(paddle_serving_app.__file__ or "").parent
    assert next(iter(paddle_serving_app.__path__)) == str(ours)


def test_a_generator_counts_names() -> None:
    """From zero."""
    names = NameGenerator("op")
    assert [names.next(), names.next()] == ["op0", "op1"]
