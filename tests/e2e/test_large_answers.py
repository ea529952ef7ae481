"""An answer that is too large is refused before it is made, and one that is only large keeps nobody waiting."""

from __future__ import annotations

import json
from pathlib import Path

import grpc
import httpx
import pytest

from ovmstrio.protocol.descriptors import message_class
from tests.support import ir
from tests.support.processes import serving
from tests.support.waits import worst_wait

pytestmark = pytest.mark.e2e

_METHOD = "/inference.GRPCInferenceService/ModelInfer"


def _request(count: int) -> bytes:
    make = message_class("inference.ModelInferRequest")
    inputs = [{"name": "count", "datatype": "INT64", "shape": [1]}]
    raw = [count.to_bytes(8, "little")]
    message: bytes = make(model_name="ones", inputs=inputs, raw_input_contents=raw).SerializeToString()
    return message


def test_large_answers_are_refused_or_written_while_others_are_answered(tmp_path: Path) -> None:
    """400 MB through every door; then as much as may be, which is 64 MB as bytes, and 10 MB as text."""
    base = ir.save(ir.ones(), tmp_path, "ones")
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_config_list": [{"config": {"name": "ones", "base_path": str(base)}}]}))
    limits = [("grpc.max_receive_message_length", -1)]
    with serving("--config_path", str(config)) as server, grpc.insecure_channel(server.grpc, limits) as channel:
        infer = channel.unary_unary(_METHOD)
        with worst_wait(server) as seconds:
            with pytest.raises(grpc.RpcError) as refused:
                infer(_request(100_000_000), timeout=60)
            assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "400000000 bytes, the limit is 67108864" in refused.value.details()
            body = {"inputs": [{"name": "count", "shape": [1], "datatype": "INT64", "data": [100_000_000]}]}
            for path, asked in (
                ("/v2/models/ones/infer", body),
                ("/v2/models/ones/infer", body | {"parameters": {"binary_data_output": True}}),
                ("/v1/models/ones:predict", {"inputs": {"count": [100_000_000]}}),
            ):
                answer = httpx.post(server.rest + path, json=asked, timeout=60)
                assert answer.status_code == 413
                assert "400000000 bytes, the limit is 67108864" in answer.text
            assert len(infer(_request(16_000_000), timeout=60)) > 64_000_000
            body["inputs"][0]["data"] = [2_000_000]
            answer = httpx.post(f"{server.rest}/v2/models/ones/infer", json=body, timeout=60)
            assert answer.json()["outputs"][0]["data"] == [1.0] * 2_000_000
        assert max(seconds) < 1
        code, output = server.stop()
    assert code == 0, output
