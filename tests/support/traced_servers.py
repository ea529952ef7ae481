"""Servers of all kinds of services whose calls are traced, their collector, and calls of their model."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import trio

from ovmstrio.server.plan import read_plan
from ovmstrio.server.settings import ServerSettings
from tests.support.api_clients import triton_module
from tests.support.otlp import Collector, collecting
from tests.support.served_in_thread import ServedPlan, serving_plan
from tests.support.waits import WAIT_SECONDS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from pathlib import Path

    import pytest

__all__ = [
    "GRAPH_BODY",
    "PARENT",
    "SPAN",
    "TRACE",
    "TRACED_HANDLER",
    "TRACED_OPS",
    "UNSAMPLED",
    "infer_body",
    "infer_over_grpc",
    "request",
    "serving",
    "traced",
]

GRAPH_BODY = {"inputs": [{"name": "in", "shape": [1], "datatype": "BYTES", "data": ["x"]}]}
TRACE = "0af7651916cd43dd8448eb211c80319c"
SPAN = "b7ad6b7169203331"
PARENT = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "vendor=x"}
UNSAMPLED = {"traceparent": f"00-{TRACE}-{SPAN}-00"}
TRACED_HANDLER = """
from opentelemetry import trace

class Handler:
    def handle_post(self, payload):
        with trace.get_tracer("mine").start_as_current_span("of the handler"):
            return sum(payload)
"""
TRACED_OPS = """
from opentelemetry import trace
from ovmstrio.ext.ops import Op, WebService


class Count(Op):
    def preprocess(self, input_dicts, data_id=0, log_id=0):
        (given,) = input_dicts.values()
        with trace.get_tracer("mine").start_as_current_span("of the op"):
            return {"y": "first " + given["x"]}, False, None, ""


class Service(WebService):
    def get_pipeline_response(self, read_op):
        return Count(name="count", input_ops=[read_op])


service = Service(name="ops")
service.prepare_pipeline_config("config.yml")
service.run_service()
"""
_LOOPBACK = {"grpc_bind_address": "127.0.0.1", "rest_bind_address": "127.0.0.1", "crash_probe": "off"}


@asynccontextmanager
async def serving(config: Path, **settings: Any) -> AsyncIterator[ServedPlan]:
    """Serve a configuration on free ports, and drain the server after the block, which exports all its spans."""
    plan = await read_plan(ServerSettings.model_validate({**_LOOPBACK, "config_path": config, **settings}))
    plan = replace(plan, grpc=("127.0.0.1:0",), rest=("127.0.0.1:0",))
    async with serving_plan(plan, drains=True) as server:
        with trio.fail_after(WAIT_SECONDS):
            await server.plane.registry.wait_loaded()
        yield server


@asynccontextmanager
async def traced(
    monkeypatch: pytest.MonkeyPatch,
    config: Path,
    *,
    settings: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
) -> AsyncIterator[tuple[Collector, ServedPlan]]:
    """Serve a configuration with a collector, which has all spans after the block."""
    async with collecting() as collector:
        for name, value in collector.environment(**(environment or {})).items():
            monkeypatch.setenv(name, value)
        async with serving(config, **(settings or {})) as server:
            yield collector, server


async def request(server: ServedPlan, method: str, path: str, **options: Any) -> httpx.Response:
    """Send a REST request on a new connection."""
    async with httpx.AsyncClient(trust_env=False, timeout=WAIT_SECONDS) as client:
        return await client.request(method, f"http://{server.rest[0]}{path}", **options)


def infer_body(name: str = "b") -> dict[str, Any]:
    """Return an inference request of the model in the JSON of KServe."""
    return {"id": "r1", "inputs": [{"name": name, "shape": [1, 10], "datatype": "FP32", "data": [1.0] * 10}]}


def infer_over_grpc(address: str, headers: dict[str, str]) -> Any:
    """Call the model with the client of Triton, and return its output."""
    triton = triton_module("grpc")
    with triton.InferenceServerClient(address) as client:
        given = triton.InferInput("b", [1, 10], "FP32")
        given.set_data_from_numpy(np.ones((1, 10), np.float32))
        return client.infer("model", [given], request_id="r2", headers=headers).as_numpy("a")
