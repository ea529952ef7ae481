from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import ir
from tests.support.processes import OvmsProcess, run_ovms, serving

pytestmark = pytest.mark.e2e

CLIENTS = 16
CALLS = 8


def _sample(server: OvmsProcess, name: str, labels: str = 'name="m",version="1"') -> float:
    found = re.search(rf"^{name}{{{re.escape(labels)}}} (\S+)$", server.get("/metrics").text, re.MULTILINE)
    assert found is not None, name
    return float(found[1])


def _values(client: int, call: int) -> np.ndarray[Any, Any]:
    rows = 1 + (client + call) % 2
    return np.full((rows, 10), 100 * client + call, np.float32)


def _call_grpc(address: str, client: int) -> None:
    from tritonclient.grpc import InferenceServerClient, InferInput

    with InferenceServerClient(address) as triton:
        for call in range(CALLS):
            values = _values(client, call)
            tensor = InferInput("b", list(values.shape), "FP32")
            tensor.set_data_from_numpy(values)
            np.testing.assert_array_equal(triton.infer("m", [tensor], client_timeout=30).as_numpy("a"), values + 1)


def _call_http(address: str, client: int) -> None:
    from tritonclient.http import InferenceServerClient, InferInput

    with InferenceServerClient(address.removeprefix("http://"), network_timeout=30) as triton:
        for call in range(CALLS):
            values = _values(client, call)
            tensor = InferInput("b", list(values.shape), "FP32")
            tensor.set_data_from_numpy(values)
            np.testing.assert_array_equal(triton.infer("m", [tensor]).as_numpy("a"), values + 1)


def test_concurrent_clients_share_inferences_and_get_their_own_rows(tmp_path: Path) -> None:
    """Triton's clients call at once, with one and two rows each, over both protocols; metrics tell of the batches."""
    base_path = ir.save(ir.dummy(), tmp_path, "m")
    batching = json.dumps({"max_batch_size": 8, "batch_timeout_ms": 50})
    options = ("--model_name", "m", "--model_path", str(base_path), "--batching", batching)
    with serving(*options) as server, ThreadPoolExecutor(CLIENTS) as threads:
        running = [
            threads.submit(_call_http if client % 4 == 0 else _call_grpc, address, client)
            for client in range(CLIENTS)
            for address in [server.rest if client % 4 == 0 else server.grpc]
        ]
        for call in running:
            call.result()
        requests = CLIENTS * CALLS
        rows = sum(_values(client, call).shape[0] for client in range(CLIENTS) for call in range(CALLS))
        batches = _sample(server, "ovmstrio_batch_size_count")
        assert _sample(server, "ovmstrio_batch_size_sum") == rows
        assert batches <= requests / 2
        assert _sample(server, "ovms_inference_time_us_count") == batches
        assert _sample(server, "ovmstrio_batch_wait_time_us_count") == requests
        code, _ = server.stop()
        assert code == 0


def test_a_model_that_cannot_be_batched_is_told_by_check(tmp_path: Path) -> None:
    """The command names the line of the option and the tensor that is in the way."""
    ir.save(ir.scalar(), tmp_path, "m")
    model = {"name": "m", "base_path": "m", "batching": {"max_batch_size": 8, "batch_timeout_ms": 5}}
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_config_list": [{"config": model}]}, indent=1))
    done = run_ovms("check", str(config))
    assert done.returncode == 1
    assert "input 'b' has no batch dimension" in done.stdout + done.stderr
    assert "config.json:7" in done.stdout + done.stderr
