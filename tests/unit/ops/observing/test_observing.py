from __future__ import annotations

import logging
import re
from pathlib import Path

import prometheus_client
import pytest
import trio
import trio.testing
import yaml

from ovmstrio.runtimes.ops.config.op_settings import DagSettings, PipelineSettings, TracerSettings
from ovmstrio.runtimes.ops.observing.figures import PipelineFigures
from ovmstrio.runtimes.ops.observing.hooks import NULL, ChannelState, OpHooks
from ovmstrio.runtimes.ops.observing.metrics import OpMetrics
from ovmstrio.runtimes.ops.observing.observing import open_observing


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a directory of the test's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SERVING_LOG_PATH", raising=False)
    return tmp_path


def _serve_one(hooks: OpHooks, data_id: int = 0, code: int | None = 0) -> None:
    hooks.request_started(data_id, 7, profile=data_id == 0)
    hooks.batch("uci", 0, [data_id, data_id + 100])
    hooks.stage("uci", 0, "midp", [data_id, data_id + 100], (1.0, 1.5))
    hooks.request_finished(data_id, 7, code, (1.0, 2.0))


def _channels() -> list[ChannelState]:
    return [ChannelState("chl0", ("@DAGExecutor",), ("uci",), 3)]


async def test_files_of_a_run(
    directory: Path, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a pipeline is open its files exist, the tracer writes every interval, and load scripts get their file."""
    monkeypatch.setenv("FLAGS_profile_pipeline", "1")
    settings = PipelineSettings(worker_num=4, dag=DagSettings(tracer=TracerSettings(3)))
    async with open_observing(settings) as observing:
        logs = directory / "PipelineServingLogs"
        assert {path.name for path in logs.iterdir()} == {"pipeline.log", "pipeline.log.wf", "pipeline.tracer"}
        observing.hooks.opened(["uci"], _channels)
        _serve_one(observing.hooks)
        await trio.sleep(7)
        assert observing.snapshot()["requests"]["count"] == 1
    text = (logs / "pipeline.tracer").read_text()
    assert text.count("TRACER") == 2
    assert text.count("Op(uci):") == 1
    assert "\tQuery count[1]\n" in text
    assert "chl0(In: ['@DAGExecutor'], Out: ['uci']) size[3/0]" in text
    document = yaml.safe_load((directory / "benchmark.log").read_text())
    assert document["DAG"]["query_count"] == 1
    assert document["uci"]["midp"] == 500.0
    assert logging.getLogger().handlers == [
        each for each in logging.getLogger().handlers if "Rotating" not in repr(each)
    ]


async def test_file_for_load_scripts_that_cannot_be_written(
    directory: Path, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that cannot be written is logged, and ends nothing."""
    monkeypatch.setenv("FLAGS_profile_pipeline", "1")
    (directory / "benchmark.log").mkdir()
    async with open_observing(PipelineSettings(dag=DagSettings(tracer=TracerSettings(1)))) as observing:
        observing.hooks.opened(["uci"], _channels)
        _serve_one(observing.hooks)
        await trio.sleep(2.5)
    assert (directory / "PipelineServingLogs/pipeline.tracer").read_text().count("TRACER") == 2


async def test_tracer_is_off_by_default(directory: Path, autojump_clock: trio.testing.MockClock) -> None:
    """Without an interval nothing is written to the tracer's file, however long it runs."""
    async with open_observing(PipelineSettings()) as observing:
        observing.hooks.opened(["uci"], _channels)
        _serve_one(observing.hooks)
        await trio.sleep(100)
    assert (directory / "PipelineServingLogs/pipeline.tracer").read_text() == ""
    assert not (directory / "benchmark.log").exists()


def _value(text: str, name: str) -> float:
    found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
    assert found, f"{name} is not in:\n{text}"
    return float(found[1])


async def test_metrics_only_grow() -> None:
    """Counters are in microseconds, exist from the start, and reading them does not reset them."""
    async with open_observing(PipelineSettings()) as observing:
        observing.hooks.opened(["uci"], _channels)
        text = observing.render_metrics().decode()
        for name in ("query_request_success", "query_request_failure", "inference_count"):
            assert _value(text, f"pd_{name}_total") == 0
        for _ in range(2):
            assert _value(observing.render_metrics().decode(), "pd_query_request_duration_us_total") == 0
        _serve_one(observing.hooks, 0)
        _serve_one(observing.hooks, 1, code=6000)
        _serve_one(observing.hooks, 2, code=None)
        observing.hooks.worker_died("uci", 0, "SIGKILL")
        for _ in range(2):
            text = observing.render_metrics().decode()
            assert _value(text, "pd_query_request_success_total") == 1
            assert _value(text, "pd_query_request_failure_total") == 1
            assert _value(text, "pd_query_request_duration_us_total") == 2e6
            assert _value(text, "pd_inference_count_total") == 6
            assert _value(text, "pd_inference_duration_us_total") == 1.5e6
            assert _value(text, 'ovmstrio_pipeline_requests_total{code="6000"}') == 1
            assert _value(text, 'ovmstrio_pipeline_requests_total{code="left"}') == 1
            assert _value(text, 'ovmstrio_op_worker_deaths_total{op="uci"}') == 1
            assert _value(text, 'ovmstrio_op_batch_size_sum{op="uci"}') == 6
            assert _value(text, 'ovmstrio_channel_depth{channel="chl0"}') == 3


def test_metrics_on_a_registry_that_is_given() -> None:
    """The families are on the registry of the server, beside whatever else is there."""
    registry, figures = prometheus_client.CollectorRegistry(), PipelineFigures()
    registry.register(OpMetrics(figures))
    figures.request_finished(0, 0, 0, (0.0, 0.5))
    assert registry.get_sample_value("pd_query_request_duration_us_total") == 5e5


async def test_timelines_by_the_same_hooks(directory: Path) -> None:
    """A request that asks for its timeline gets it from the hooks that the executor has."""
    async with open_observing(PipelineSettings()) as observing:
        observing.hooks.opened(["uci"], _channels)
        observing.hooks.request_started(4, 0, profile=True)
        observing.hooks.stage("uci", 2, "midp", [4], (1.0, 1.5))
        assert "midp#[uci|2]_0:" in observing.hooks.timeline(4)
        assert observing.hooks.timeline(5) == ""
        observing.hooks.request_finished(4, 0, 0, (1.0, 2.0))


def test_nobody_is_told() -> None:
    """The hooks that tell nobody take everything."""
    NULL.opened(["uci"], _channels)
    _serve_one(NULL)
    NULL.worker_died("uci", 0, "")
    assert NULL.timeline(0) == ""
