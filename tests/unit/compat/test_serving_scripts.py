from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import paddle_serving_app
from ovmstrio.core.errors import ConfigError
from ovmstrio.ext import ops
from ovmstrio.ops.config_file import read_pipeline_config, resolve_op_settings
from ovmstrio.ops.messages import PipelineRequest, PipelineTensor
from ovmstrio.ops.settings import PipelineSettings
from paddle_serving_app import reader
from paddle_serving_server.pipeline import LocalServiceHandler, PipelineServer
from paddle_serving_server.pipeline.channel import ChannelData, ChannelStopError, ThreadChannel
from paddle_serving_server.pipeline.error_catch import (
    CustomException,
    CustomExceptionCode,
    ErrorCatch,
    ParamChecker,
    ParamVerify,
)
from paddle_serving_server.pipeline.operator import VirtualOp
from paddle_serving_server.pipeline.util import NameGenerator
from paddle_serving_server.util import CONFIG_VARIABLE, ArgsParser
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
    "paddle_serving_client.utils": "MultiThreadRunner benchmark_args show_latency",
    "paddle_serving_app.reader.image_reader": (
        "ImageReader File2Image URL2Image Base64ToImage String2Image Sequential Lambda Normalize Div CenterCrop Resize "
        "ResizeByFactor PadStride Transpose RGB2BGR BGR2RGB DetectionFile2Image DetectionSequential DetectionNormalize "
        "DetectionTranspose DetectionResize DetectionBGR2RGB DetectionPadStride DetectionDiv SegPostprocess "
        "RCNNPostprocess BlazeFacePostprocess DBPostProcess FilterBoxes GetRotateCropImage SortedBoxes "
        "generate_colormap"
    ),
    "paddle_serving_app.reader.functional": "transpose normalize crop resize",
    "paddle_serving_app.reader.ocr_reader": "OCRReader CharacterOps BaseRecLabelDecode CTCLabelDecode",
    "paddle_serving_app.reader.pptsn_reader": "VideoDecoder Sampler Scale TenCrop Image2Array Normalization",
    "paddle_serving_app.reader.lac_reader": "LACReader load_kv_dict",
    "paddle_serving_app.reader.senta_reader": "SentaReader",
    "paddle_serving_app.reader.imdb_reader": "IMDBDataset",
    "paddle_serving_app.reader.chinese_bert_reader": "ChineseBertReader",
    "paddle_serving_app.reader.bert_base_reader": "BertBaseReader",
    "paddle_serving_app.reader.reader": "ReaderBase",
    "paddle_serving_app.reader.batching": "pad_batch_data prepare_batch_data",
    "paddle_serving_app.reader.tokenization": (
        "FullTokenizer CharTokenizer BasicTokenizer WordpieceTokenizer convert_to_unicode printable_text load_vocab "
        "convert_by_vocab convert_tokens_to_ids convert_ids_to_tokens whitespace_tokenize"
    ),
}


@pytest.mark.parametrize("module", NAMES)
def test_modules_have_the_names_that_scripts_import(module: str) -> None:
    assert [name for name in NAMES[module].split() if not hasattr(import_module(module), name)] == []


@pytest.mark.parametrize("module", [name for name in NAMES if name.startswith("paddle_serving_server.")])
def test_the_package_of_older_releases_has_the_same_names(module: str) -> None:
    older = import_module(module.replace("paddle_serving_server", "paddle_serving_server_gpu"))
    assert [name for name in NAMES[module].split() if not hasattr(older, name)] == []


def test_classes_are_those_of_the_engine_and_precede_the_original() -> None:
    operator: Any = import_module("paddle_serving_server.pipeline.operator")
    channel: Any = import_module("paddle_serving_server.pipeline.channel")
    assert (operator.Op, operator.RequestOp, operator.ResponseOp) == (ops.Op, ops.RequestOp, ops.ResponseOp)
    assert channel.ChannelDataErrcode is ops.CustomExceptionCode
    assert [kind.value for kind in channel.ChannelDataType] == [0, 1, 2]
    ours = Path(paddle_serving_app.__file__ or "").parent
    assert next(iter(paddle_serving_app.__path__)) == str(ours)


def test_a_star_import_has_all_readers() -> None:
    everything: dict[str, object] = {}
    exec("from paddle_serving_app.reader import *", everything)
    modules = ("image_reader", "pptsn_reader")
    public = {name for module in modules for name in NAMES[f"paddle_serving_app.reader.{module}"].split()}
    public -= {"generate_colormap"}
    public |= {"OCRReader", "LACReader", "SentaReader", "IMDBDataset", "ChineseBertReader"}
    assert set(everything) - {"__builtins__"} == public == set(reader.__all__)
    assert everything["Resize"] is reader.image_reader.Resize
    assert public <= set(dir(reader))
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = reader.Nothing


def test_unsupported_names_raise_with_an_alternative() -> None:
    with pytest.raises(NotImplementedError, match="expected client_type 'local_predictor', got 'brpc'"):
        LocalServiceHandler(model_config="x", client_type="brpc")
    with pytest.raises(NotImplementedError, match="input_ops"):
        VirtualOp("vir0")
    with pytest.raises(NotImplementedError, match="ThreadChannel is not supported"):
        ThreadChannel()
    with pytest.raises(NotImplementedError, match="get_pipeline_response"):
        WebService().load_model_config("x")
    assert str(ChannelStopError()) == "Channel stopped."


@pytest.mark.parametrize(
    ("feed", "found"),
    [
        ({"x": np.ones(2), "texts": ["a"]}, (0, None)),
        ([{"x": np.ones(2)}, {"x": np.ones(2)}], (0, None)),
        ({"x": [1.0]}, (7000, "Failed to check data: 'x': expected numpy.ndarray or list[str], got list.")),
        (
            [{"x": np.ones(2)}, {"x": "a"}],
            (7000, "Failed to check data: 'x': expected numpy.ndarray or list[str], got str."),
        ),
        ("text", (7000, "Failed to check data: expected a dict, got str.")),
    ],
    ids=["arrays and texts", "list of feeds", "numbers", "second feed", "no feed"],
)
def test_channel_data_checks_the_feeds_of_a_batch(feed: Any, found: tuple[int, str | None]) -> None:
    assert ChannelData.check_npdata(feed) == ChannelData.check_batch_npdata([{"x": np.ones(1)}, feed]) == found
    assert ChannelData.check_batch_npdata([]) == (0, None)
    assert ChannelData.check_dictdata({"any": object()}) == (0, None)


def test_a_local_service_handler_configures_an_op() -> None:
    handler = LocalServiceHandler("models/uci", fetch_names=["price"], thread_num=3, device_type=0, ir_optim=True)
    assert (handler.get_fetch_list(), handler.get_port_list()) == (["price"], [])
    assert handler.get_client_config() == "models/uci/serving_server_conf.prototxt"
    handler.prepare_server()
    handler.start_server()
    op = ops.Op(name="uci", local_service_handler=handler)
    resolved = resolve_op_settings(op, PipelineSettings()).local_service_conf
    assert (resolved.model_config, resolved.fetch_list) == ("models/uci", ("price",))
    assert (resolved.thread_num, resolved.device_type) == (3, 0)
    with pytest.raises(ConfigError, match=r"local_service_conf.thread_num of Op uci is invalid .*expected"):
        resolve_op_settings(
            ops.Op(name="uci", local_service_handler=LocalServiceHandler("x", thread_num=0)), PipelineSettings()
        )
    with pytest.raises(ConfigError, match="expected a LocalServiceHandler, found str"):
        ops.Op(name="uci", local_service_handler="x")


def test_an_op_without_inputs_may_say_none() -> None:
    op = ops.Op(name="a", input_ops=None, jump_to_ops=None)
    assert (op.get_input_ops(), op.get_jump_to_ops()) == ([], [])


class _TensorsOnly(ops.RequestOp):
    def unpack_request_package(self, request: PipelineRequest) -> Any:
        if request.method is not _METHOD:
            raise ValueError("request method error")
        return {tensor.name: self.proto_tensor_2_numpy(tensor) for tensor in request.tensors}


_METHOD = "prediction"


def test_request_ops_read_tensors_and_compare_the_method_by_identity() -> None:
    tensors = [PipelineTensor("x", 1, [1, 2], [0, 1], float_data=[1.0, 2.0]), PipelineTensor("s", 12, str_data=["a"])]
    method = "/ocr/prediction".rpartition("/")[2]
    unpacked = _TensorsOnly().unpack_request_package(PipelineRequest(tensors=tensors, method=method))
    array, offsets = unpacked["x"]
    assert (array.tolist(), array.dtype, offsets.tolist()) == ([[1.0, 2.0]], np.float32, [[0], [1]])
    assert unpacked["s"] == ("a", None)
    with pytest.raises(ValueError, match="method"):
        _TensorsOnly().unpack_request_package(PipelineRequest(method="other"))


def test_a_pipeline_server_is_a_service_of_its_response_op() -> None:
    server = PipelineServer()
    with pytest.raises(ValueError, match="prepare_server"):
        server.run_server()
    with pytest.raises(TypeError, match="must be a ResponseOp, got Op"):
        server.set_response_op(ops.Op(name="a"))  # type: ignore[arg-type]
    server.set_response_op(ops.ResponseOp(input_ops=[ops.Op(name="a", input_ops=[ops.RequestOp()])]))
    server.prepare_server(yml_dict={"rpc_port": 0})
    taken: list[ops.WebService] = []
    from ovmstrio.ops.graph import set_service_runner

    set_service_runner(taken.append)
    try:
        server.run_server()
    finally:
        set_service_runner(None)
    (service,) = taken
    assert (service.name, list(service.graph().ops)) == ("", ["a"])
    names = NameGenerator("op")
    assert [names.next(), names.next()] == ["op0", "op1"]


_CONFIG = "http_port: 18082\nworker_num: 1\nop:\n  det: {concurrency: 2, local_service_conf: {devices: '0'}}\n"


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.yml"
    path.write_text(_CONFIG)
    return str(path)


def test_options_override_the_file(config: str) -> None:
    options = ["-o", "op.det.concurrency=5", "worker_num=3", "op.rec.batch_size=4"]
    args = ArgsParser().parse_args(["-c", config, *options])
    read = read_pipeline_config(yml_dict=args.conf_dict)
    assert (read.http_port, read.worker_num) == (18082, 3)
    assert (read.op("det").concurrency, read.op("rec").batch_size) == (5, 4)
    assert read.op("det").local_service_conf.devices == "0"


def test_the_file_may_come_from_the_environment(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CONFIG_VARIABLE, raising=False)
    with pytest.raises(SystemExit):
        ArgsParser().parse_args([])
    monkeypatch.setenv(CONFIG_VARIABLE, config)
    assert ArgsParser().parse_args([]).conf_dict["http_port"] == 18082


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-o", "worker_num"], "expected key.key=value"),
        (["-o", "a=["], "is not YAML"),
        (["-c", "nothing.yml"], r"nothing\.yml: cannot be read"),
    ],
)
def test_malformed_options_are_refused(config: str, arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ArgsParser().parse_args(["-c", config, *arguments])


@ErrorCatch
def _divide(a: int, b: int, log_id: int = 0) -> float:
    if b < 0:
        raise CustomException(CustomExceptionCode.INPUT_PARAMS_ERROR, "b is negative", b == -1)
    return a / b


def _given_back(a: Any, b: Any = 1, c: Any = 1) -> Any:
    return b


_given_back.__annotations__ = {"a": int, "b": (int, str), "c": lambda value: value > 0, "return": (int, str)}
_checked = ParamChecker(_given_back)


def test_errors_become_responses() -> None:
    assert _divide(4, 2)[0] == 2
    assert _divide(4, 2)[1].err_no == 0
    result, response = _divide(1, 0, log_id=7)
    assert (result, response.err_no) == (None, 10000)
    assert response.err_msg.startswith("Log_id: 7  Raise_msg: division by zero  ClassName: _divide")
    assert _divide(1, -1)[1].err_no == 5000
    assert "b is negative" in _divide(1, -1)[1].err_msg
    assert "b is negative" not in _divide(1, -2)[1].err_msg


@pytest.mark.parametrize(
    ("arguments", "text"),
    [(("x",), "['a']"), ((1, 1.5), "['b']"), ((1, 1, 0), "['c']")],
    ids=["type", "types", "judge"],
)
def test_arguments_are_checked_against_annotations(arguments: Any, text: str) -> None:
    assert _checked(1, "x") == "x"
    with pytest.raises(CustomException) as raised:
        _checked(*arguments)
    assert (raised.value.code, raised.value.message) == (5000, f"invalid arg list: {text}")


def test_param_verify_checks_bounds_and_files(tmp_path: Any) -> None:
    assert ParamVerify.int_check(5, 1, 10)
    assert not ParamVerify.int_check(11, 1, 10)
    assert not ParamVerify.int_check("5")
    assert ParamVerify.file_check(str(tmp_path))
    assert not ParamVerify.file_check(str(tmp_path / "nope"))


def test_param_verify_checks_the_names_of_feeds_and_outputs() -> None:
    assert ParamVerify.check_feed_dict({"x": 1, "y": 2, "x.lod": 3}, ["y", "x"])
    assert not ParamVerify.check_feed_dict({"x": 1}, ["y", "x"])
    assert not ParamVerify.check_feed_dict({"x": 1, "z": 2}, ["x"])
    assert not ParamVerify.check_feed_dict([{"x": 1}], ["x"])
    assert ParamVerify.check_fetch_list([], ["price"])
    assert ParamVerify.check_fetch_list(["price"], ["price", "size"])
    assert not ParamVerify.check_fetch_list(["price", "cost"], ["price"])
    assert not ParamVerify.check_fetch_list(("price",), ["price"])
