from __future__ import annotations

import json
from textwrap import dedent
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from ovmstrio.observability.logs import configure_logs
from ovmstrio.protocol.descriptors import message_class
from tests.support.graphs import graph_text, python_node
from tests.support.served_in_thread import ServedInThread, serving_in_thread
from tests.support.waits import WAIT_SECONDS, until

if TYPE_CHECKING:
    from collections.abc import Iterator

HANDLER = """
    from pyovms import Tensor

    class LongText(Exception):
        def __str__(self):
            return "t" * 20_000_000

    def chain(length, text):
        error = None
        for number in range(length):
            try:
                raise ValueError(f"{number} {text}") from error
            except ValueError as caught:
                error = caught
        return error

    class OvmsPythonModel:
        def execute(self, inputs):
            kind = bytes(inputs[0])[4:].decode()
            if kind == "message":
                raise ValueError("x" * 20_000_000)
            if kind == "chain":
                raise chain(1000, "y" * 20_000)
            if kind == "str":
                raise LongText
            raise ExceptionGroup("z" * 20_000_000, [chain(100, "y" * 20_000) for _ in range(20)])
"""
METHOD = "/inference.GRPCInferenceService/ModelInfer"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedInThread]:
    folder = tmp_path_factory.mktemp("errors")
    (folder / "handler.py").write_text(dedent(HANDLER))
    (folder / "graph.pbtxt").write_text(graph_text(python_node("handler.py")))
    config = folder / "config.json"
    graphs = [{"name": "fails", "base_path": str(folder)}]
    config.write_text(json.dumps({"model_config_list": [], "mediapipe_config_list": graphs}))
    with serving_in_thread(config_path=config) as running:
        yield running


@pytest.mark.parametrize("kind", ["message", "chain", "str", "group"])
@pytest.mark.parametrize("transport", ["grpc", "http"])
def test_long_error_is_truncated(
    server: ServedInThread, transport: str, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    configure_logs()
    if transport == "grpc":
        make = message_class("inference.ModelInferRequest")
        inputs = [{"name": "in", "datatype": "BYTES", "shape": [1]}]
        raw = [len(kind).to_bytes(4, "little") + kind.encode()]
        request = make(model_name="fails", inputs=inputs, raw_input_contents=raw).SerializeToString()
        with grpc.insecure_channel(server.grpc) as channel, pytest.raises(grpc.RpcError) as refused:
            channel.unary_unary(METHOD)(request, timeout=WAIT_SECONDS)
        error: Any = refused.value
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "Error occurred during graph execution" in error.details()
        assert len(error.details()) < 8192
    else:
        body = {"inputs": [{"name": "in", "shape": [1], "datatype": "BYTES", "data": [kind]}]}
        answer = server.ask("POST", "/v2/models/fails/infer", json=body)
        assert answer.status_code == 400
        assert len(answer.content) < 8192
    printed: list[str] = []

    def is_logged() -> bool:
        printed.append(capfd.readouterr().err)
        return "a Python node raised" in "".join(printed)

    until(is_logged)
    assert "".join(printed).count("a Python node raised") == 1
    assert sum(map(len, printed)) < 125_000
