from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry, Gauge

from ovmstrio.config.findings import by_line
from ovmstrio.ops import Op, WebService
from ovmstrio.runtimes.ops.config.pipeline_file import examine_pipeline_config
from ovmstrio.server.service_plan import plan_service, service_settings
from tests.support.op_pipelines import EchoExecutor, serving_pipeline


class _Service(WebService):
    def get_pipeline_response(self, read_op: Op) -> Op:
        return Op(name="one", input_ops=[read_op])


async def test_port_for_scrapers_alone() -> None:
    """A port of their own has metrics and health, and neither the pipeline nor KServe v2; HTTP's port has them too."""
    executor, registry = EchoExecutor(), CollectorRegistry()
    Gauge("up", "Whether it is there.", registry=registry).set(1)
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


def test_no_port_unless_it_is_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a port for scrapers, or without metrics, there is none."""
    monkeypatch.chdir(tmp_path)
    scraped = {"enable_prometheus": True, "prometheus_port": 9393}
    host = {"grpc_bind_address": "127.0.0.1"}
    for dag, options, addresses in (
        (scraped, {}, ("127.0.0.1:9393",)),
        ({}, {}, ()),
        ({**scraped, "enable_prometheus": False}, {}, ()),
        (scraped, {"metrics_enable": False}, ()),
    ):
        service = _Service(name="uci")
        service.prepare_pipeline_config(yml_dict={"rpc_port": 0, "http_port": 0, "dag": dag})
        assert plan_service(service, service_settings({**host, **options})).metrics == addresses


@pytest.mark.parametrize(
    ("dag", "told"),
    [
        ({"enable_prometheus": True, "prometheus_port": 9999}, ""),
        ({"enable_prometheus": True}, "no prometheus_port is given: metrics are at /metrics of http_port alone"),
        ({"prometheus_port": 9999}, "prometheus_port has no effect without enable_prometheus"),
    ],
)
def test_keys_that_belong_together(dag: dict[str, object], told: str) -> None:
    """One key of the two without the other is a warning."""
    examined = examine_pipeline_config(yml_dict={"http_port": 0, "dag": dag})
    assert "\n".join(problem.message for problem in by_line(examined.problems)) == told
