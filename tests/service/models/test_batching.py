from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import tritonclient.grpc
import tritonclient.http

from tests.support import ir
from tests.support.served_in_thread import ServedInThread, serving_in_thread

if TYPE_CHECKING:
    from pathlib import Path

CLIENTS = 16
CALLS = 8


def _sample(server: ServedInThread, name: str) -> float:
    labels = re.escape('{name="m",version="1"}')
    (found,) = re.findall(rf"(?m)^{name}{labels} (\S+)$", server.ask("GET", "/metrics").text)
    return float(found)


def _values(client: int, call: int) -> np.ndarray[Any, Any]:
    rows = 1 + (client + call) % 2
    return np.full((rows, 10), 100 * client + call, np.float32)


def _call(server: ServedInThread, client: int) -> None:
    package, address = (tritonclient.grpc, server.grpc) if client % 4 else (tritonclient.http, server.http)
    with package.InferenceServerClient(address) as triton:
        for call in range(CALLS):
            values = _values(client, call)
            tensor = package.InferInput("b", list(values.shape), "FP32")
            tensor.set_data_from_numpy(values)
            np.testing.assert_array_equal(triton.infer("m", [tensor]).as_numpy("a"), values + 1)


def test_clients_of_triton_share_inferences_and_get_their_own_rows(tmp_path: Path) -> None:
    base = ir.save(ir.dummy(), tmp_path, "m")
    batching = '{"max_batch_size": 8, "batch_timeout_ms": 50}'
    with (
        serving_in_thread(model_name="m", model_path=base, batching=batching) as server,
        ThreadPoolExecutor(CLIENTS) as threads,
    ):
        for call in [threads.submit(_call, server, client) for client in range(CLIENTS)]:
            call.result()
        batches, requests = _sample(server, "ovmstrio_batch_size_count"), CLIENTS * CALLS
        rows = sum(_values(client, call).shape[0] for client in range(CLIENTS) for call in range(CALLS))
        assert _sample(server, "ovmstrio_batch_size_sum") == rows
        assert batches < requests
        assert _sample(server, "ovms_inference_time_us_count") == batches
        assert _sample(server, "ovmstrio_batch_wait_time_us_count") == requests
