"""One caller's long texts, and a log that nobody reads, keep no other caller waiting."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from textwrap import dedent

import grpc
import httpx
import pytest

from ovmstrio.protocol.descriptors import message_class
from tests.support.graphs import graph_text, python_node
from tests.support.processes import serving
from tests.support.waits import worst_wait

pytestmark = pytest.mark.e2e

_HANDLER = """
    from pyovms import Tensor

    class Told(Exception):
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
            how = bytes(inputs[0])[4:].decode()
            if how == "text":
                raise ValueError("x" * 20_000_000)
            if how == "chain":
                raise chain(1000, "y" * 20_000)
            if how == "told":
                raise Told
            if how == "group":
                raise ExceptionGroup("z" * 20_000_000, [chain(100, "y" * 20_000) for _ in range(20)])
            return [Tensor("out", bytes(inputs[0]))]
"""
_METHOD = "/inference.GRPCInferenceService/ModelInfer"


def _config(folder: Path) -> Path:
    (folder / "handler.py").write_text(dedent(_HANDLER))
    text = graph_text(python_node("handler.py"))
    (folder / "graph.pbtxt").write_text(text)
    path = folder / "config.json"
    path.write_text(
        json.dumps({"model_config_list": [], "mediapipe_config_list": [{"name": "loud", "base_path": str(folder)}]})
    )
    return path


def _request(how: str) -> bytes:
    make = message_class("inference.ModelInferRequest")
    inputs = [{"name": "in", "datatype": "BYTES", "shape": [1]}]
    raw = [len(how).to_bytes(4, "little") + how.encode()]
    message: bytes = make(model_name="loud", inputs=inputs, raw_input_contents=raw).SerializeToString()
    return message


def test_a_long_error_is_told_in_short_and_keeps_nobody_waiting(tmp_path: Path) -> None:
    """20 MB of text, or a thousand errors: the caller gets a status with a beginning, in both protocols."""
    hows = ("text", "chain", "told", "group")
    with serving("--config_path", str(_config(tmp_path))) as server, grpc.insecure_channel(server.grpc) as channel:
        infer = channel.unary_unary(_METHOD)
        with worst_wait(server) as seconds:
            for how in hows:
                with pytest.raises(grpc.RpcError) as refused:
                    infer(_request(how), timeout=60)
                assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
                assert "Error occurred during graph execution" in refused.value.details()
                body = {"inputs": [{"name": "in", "shape": [1], "datatype": "BYTES", "data": [how]}]}
                answer = httpx.post(f"{server.rest}/v2/models/loud/infer", json=body, timeout=60)
                assert answer.status_code == 400
                assert len(answer.content) < 8192
        assert max(seconds) < 2
        code, output = server.stop()
    assert code == 0, output
    assert output.count("a Python node raised") == 2 * len(hows)
    assert len(output) < 1_000_000


def test_a_log_that_nobody_reads_stops_neither_calls_nor_the_end(tmp_path: Path) -> None:
    """A pipe holds 64 KiB; what comes after that is kept for a while, and then dropped."""
    with serving("--config_path", str(_config(tmp_path)), "--log_level", "DEBUG") as server:
        with httpx.Client(base_url=server.rest, timeout=20) as client:
            for _ in range(1500):
                body = {"inputs": [{"name": "in", "shape": [1], "datatype": "BYTES", "data": ["fine"]}]}
                client.post("/v2/models/loud/infer", json=body).raise_for_status()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=30) == 0
