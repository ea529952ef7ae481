from __future__ import annotations

import httpx
import pytest

from ovmstrio.config.findings import by_line
from ovmstrio.runtimes.ops.config.pipeline_file import examine_pipeline_config
from tests.support.op_pipelines import EchoExecutor, serving_pipeline


async def test_port_for_scrapers_alone() -> None:
    """A port of their own has metrics and health, and neither the pipeline nor KServe v2; HTTP's port has them too."""
    executor = EchoExecutor()
    async with (
        serving_pipeline(executor, render_metrics=lambda: b"up 1\n", metrics_port=0) as running,
        httpx.AsyncClient(trust_env=False) as client,
    ):
        (address,) = running.metrics
        for of in (address, running.http[0]):
            assert (await client.get(f"http://{of}/metrics")).content == b"up 1\n"
        assert (await client.get(f"http://{address}/health")).status_code == 200
        executor.problem = "no worker of uci runs"
        assert (await client.get(f"http://{address}/health")).status_code == 503
        for path in ("uci/prediction", "v2/models/uci/infer"):
            assert (await client.post(f"http://{address}/{path}", json={"key": []})).status_code in {404, 405}
        assert executor.requests == []


async def test_no_port_unless_it_is_wanted() -> None:
    """Without a port for scrapers, or without metrics, there is none."""
    async with serving_pipeline(EchoExecutor(), render_metrics=lambda: b"up 1\n") as running:
        assert running.metrics == []
    async with serving_pipeline(EchoExecutor(), metrics_port=0) as running:
        assert running.metrics == []


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
