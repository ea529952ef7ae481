from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from prometheus_client import CollectorRegistry, Gauge

from ovmstrio.config.documents import sorted_by_line
from ovmstrio.encoding.messages import METHOD, REQUEST, RESPONSE
from ovmstrio.ext.ops import Op, WebService
from ovmstrio.ops.config_file import validate_pipeline_config
from ovmstrio.server.service_plan import plan_service, service_settings
from tests.support.api_clients import call
from tests.support.op_pipelines import EchoExecutor, serving_pipeline


class _Service(WebService):
    def get_pipeline_response(self, read_op: Op) -> Op:
        return Op(name="one", input_ops=[read_op])


async def test_metrics_port_serves_metrics_and_health_only() -> None:
    executor, registry = EchoExecutor(), CollectorRegistry()
    Gauge("up", "Up.", registry=registry).set(1)
    async with (
        serving_pipeline(executor, collectors=[registry], metrics_enable=True, scrapers=True) as running,
        httpx.AsyncClient(trust_env=False) as client,
    ):
        (address,) = running.metrics
        for of in (address, running.rest[0]):
            lines = (await client.get(f"http://{of}/metrics")).text.splitlines()
            assert "up 1.0" in lines
            assert "ovmstrio_ready 1.0" in lines
        assert (await client.get(f"http://{address}/health")).status_code == 200
        executor.problem = "no worker of uci runs"
        assert (await client.get(f"http://{address}/health")).status_code == 503
        for path in ("uci/prediction", "v2/models/uci/infer"):
            assert (await client.post(f"http://{address}/{path}", json={"key": []})).status_code in {404, 405}
        assert executor.requests == []


_SCRAPED = {"enable_prometheus": True, "prometheus_port": 9393}


@pytest.mark.parametrize(
    ("dag", "options", "addresses"),
    [
        (_SCRAPED, {}, ("127.0.0.1:9393",)),
        ({}, {}, ()),
        ({**_SCRAPED, "enable_prometheus": False}, {}, ()),
        (_SCRAPED, {"metrics_enable": False}, ()),
    ],
)
def test_metrics_port_is_opened_if_metrics_are_enabled(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    dag: dict[str, object],
    options: dict[str, Any],
    addresses: tuple[str, ...],
) -> None:
    monkeypatch.chdir(tmp_path)
    service = _Service(name="uci")
    service.prepare_pipeline_config(yml_dict={"rpc_port": 0, "http_port": 0, "dag": dag})
    plan = plan_service(service, service_settings({"grpc_bind_address": "127.0.0.1", **options}))
    assert plan.metrics == addresses


@pytest.mark.parametrize(
    ("dag", "message"),
    [
        ({"enable_prometheus": True, "prometheus_port": 9999}, ""),
        ({"enable_prometheus": True}, "no prometheus_port: metrics are served only at /metrics of http_port"),
        ({"prometheus_port": 9999}, "prometheus_port has no effect without enable_prometheus"),
    ],
)
def test_incomplete_metrics_keys_are_reported(dag: dict[str, object], message: str) -> None:
    examined = validate_pipeline_config(yml_dict={"http_port": 0, "dag": dag})
    assert "\n".join(problem.message for problem in sorted_by_line(examined.problems)) == message


async def test_messages_larger_than_the_limit_are_refused() -> None:
    executor = EchoExecutor()
    text = "x" * 5000
    async with (
        serving_pipeline(executor, max_message_size=4096) as running,
        httpx.AsyncClient(base_url=f"http://{running.rest[0]}", trust_env=False) as client,
    ):
        answer = await client.post("/uci/prediction", json={"key": ["x"], "value": [text]})
        assert (answer.status_code, answer.json()["code"]) == (413, 8)
        request = REQUEST(key=["x"], value=[text])
        with pytest.raises(grpc.RpcError) as raised:
            await call(running.grpc[0], METHOD, request, RESPONSE.DESCRIPTOR.full_name)
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert executor.requests == []
