from __future__ import annotations

import io
import json
import logging
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import trio
import trio.testing
import yaml

from ovmstrio.core.errors import ConfigError
from ovmstrio.ops.executor import open_executor
from ovmstrio.ops.observing.analyst import Analyst
from ovmstrio.ops.observing.hooks import ChannelState, OpHooks, Stage
from ovmstrio.ops.observing.observers import (
    PipelineCounters,
    Timelines,
    benchmark_document,
    open_observers,
    snapshot,
    tracer_lines,
)
from ovmstrio.ops.settings import DagSettings, PipelineSettings, TracerSettings
from tests.support.ops import asking, settings, text_graph


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SERVING_LOG_PATH", raising=False)
    return tmp_path


_CHANNELS = (
    ChannelState("chl0", ("@DAGExecutor",), ("uci",), 0),
    ChannelState("chl1", ("uci",), ("@DAGExecutor",), 2, 8),
)


@pytest.fixture
def clock() -> SimpleNamespace:
    return SimpleNamespace(now=100.0)


@pytest.fixture
def figures(clock: SimpleNamespace) -> PipelineCounters:
    made = PipelineCounters(lambda: clock.now)
    made.opened(["uci"], lambda: _CHANNELS)
    return made


def _answer(figures: PipelineCounters, data_id: int, seconds: float, code: int | None = 0, end: float = 101.0) -> None:
    figures.request_started(data_id, 0)
    figures.request_finished(data_id, 0, code, (end - seconds, end))


def _serve_one(hooks: OpHooks, data_id: int = 0, code: int | None = 0) -> None:
    hooks.request_started(data_id, 7, profile=data_id == 0)
    hooks.batch("uci", 0, [data_id, data_id + 100])
    hooks.stage("uci", 0, "midp", [data_id, data_id + 100], (1.0, 1.5))
    hooks.request_finished(data_id, 7, code, (1.0, 2.0))


async def test_files_of_a_run(
    directory: Path, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLAGS_profile_pipeline", "1")
    settings = PipelineSettings(worker_num=4, dag=DagSettings(tracer=TracerSettings(3)))
    async with open_observers(settings) as observing:
        logs = directory / "PipelineServingLogs"
        assert {path.name for path in logs.iterdir()} == {"pipeline.log", "pipeline.log.wf", "pipeline.tracer"}
        observing.hooks.opened(["uci"], lambda: _CHANNELS)
        _serve_one(observing.hooks)
        await trio.sleep(7)
        assert observing.snapshot()["requests"]["count"] == 1
    text = (logs / "pipeline.tracer").read_text()
    assert text.count("TRACER") == 2
    assert text.count("Op(uci):") == 1
    assert "\tQuery count[1]\n" in text
    assert "chl1(In: ['uci'], Out: ['@DAGExecutor']) size[2/8]" in text
    document = yaml.safe_load((directory / "benchmark.log").read_text())
    assert document["DAG"]["query_count"] == 1
    assert document["uci"]["midp"] == 500.0
    assert logging.getLogger().handlers == [
        each for each in logging.getLogger().handlers if "Rotating" not in repr(each)
    ]


async def test_a_benchmark_file_that_cannot_be_written_stops_nothing(
    directory: Path, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLAGS_profile_pipeline", "1")
    (directory / "benchmark.log").mkdir()
    async with open_observers(PipelineSettings(dag=DagSettings(tracer=TracerSettings(1)))) as observing:
        observing.hooks.opened(["uci"], lambda: _CHANNELS)
        _serve_one(observing.hooks)
        await trio.sleep(2.5)
    assert (directory / "PipelineServingLogs/pipeline.tracer").read_text().count("TRACER") == 2


async def test_the_tracer_is_disabled_by_default(directory: Path, autojump_clock: trio.testing.MockClock) -> None:
    async with open_observers(PipelineSettings()) as observing:
        observing.hooks.opened(["uci"], lambda: _CHANNELS)
        _serve_one(observing.hooks)
        await trio.sleep(100)
    assert (directory / "PipelineServingLogs/pipeline.tracer").read_text() == ""
    assert not (directory / "benchmark.log").exists()


async def test_metrics_count_from_zero_and_are_not_reset() -> None:

    async with open_observers(PipelineSettings()) as observing:
        observing.hooks.opened(["uci"], lambda: _CHANNELS)
        text = observing.render_metrics().decode()
        for name in ("query_request_success", "query_request_failure", "query_request_duration_us", "inference_count"):
            assert f"\npd_{name}_total 0.0\n" in text
        _serve_one(observing.hooks, 0)
        _serve_one(observing.hooks, 1, code=6000)
        _serve_one(observing.hooks, 2, code=None)
        observing.hooks.worker_died("uci", 0, "SIGKILL")
        first, second = (observing.render_metrics().decode().splitlines() for _ in range(2))
    assert first == second
    assert {
        "pd_query_request_success_total 1.0",
        "pd_query_request_failure_total 1.0",
        "pd_query_request_duration_us_total 2e+06",
        "pd_inference_count_total 6.0",
        "pd_inference_duration_us_total 1.5e+06",
        'ovmstrio_pipeline_requests_total{code="6000"} 1.0',
        'ovmstrio_pipeline_requests_total{code="left"} 1.0',
        'ovmstrio_op_worker_deaths_total{op="uci"} 1.0',
        'ovmstrio_op_batch_size_sum{op="uci"} 6.0',
        'ovmstrio_channel_depth{channel="chl1"} 2.0',
    } <= set(first)


# The tracer


def test_lines_of_the_tracer(figures: PipelineCounters, clock: SimpleNamespace) -> None:
    stages: list[tuple[Stage, float]] = [("in", 0.5), ("prep", 0.25), ("midp", 0.125), ("postp", 0.125), ("out", 0.25)]
    for stage, seconds in stages:
        figures.stage("uci", 0, stage, [0], (1.0, 1.0 + seconds))
    figures.stage("uci", 0, "in", [1], (2.0, 2.0))
    _answer(figures, 0, 0.25)
    _answer(figures, 1, 0.5, code=5000)
    _answer(figures, 2, 0.75, code=None)
    clock.now = 104.0
    assert tracer_lines(figures.take_window(), clock.now, _CHANNELS, 4) == [
        "==================== TRACER ======================",
        "Op(uci):",
        "\tin[250.0 ms]",
        "\tprep[250.0 ms]",
        "\tmidp[125.0 ms]",
        "\tpostp[125.0 ms]",
        "\tout[250.0 ms]",
        "\tidle[0.5]",
        "DAGExecutor:",
        "\tQuery count[2]",
        "\tQPS[0.5 q/s]",
        "\tSucc[0.5]",
        "\tError req[1]",
        "\tLatency:",
        "\t\tave[375.0 ms]",
        *(f"\t\t.{percent}[500.0 ms]" for percent in (50, 60, 70, 80, 90, 95, 99)),
        "Channel (server worker num[4]):",
        "\tchl0(In: ['@DAGExecutor'], Out: ['uci']) size[0/0]",
        "\tchl1(In: ['uci'], Out: ['@DAGExecutor']) size[2/8]",
    ]


def test_a_window_without_traffic_has_only_channels(figures: PipelineCounters) -> None:
    _answer(figures, 0, 0.25)
    figures.stage("uci", 0, "prep", [0], (0, 1))
    figures.take_window()
    window = figures.take_window()
    lines = tracer_lines(window, 104.0, _CHANNELS, 1)
    assert [line for line in lines if re.match(r"Op|DAG", line)] == []
    assert len(lines) == 4
    assert benchmark_document(window, 104.0) == {}
    assert figures.codes == {0: 1}
    assert figures.totals["uci"].counts["prep"] == 1


def test_without_a_tracer_memory_is_bounded() -> None:
    figures = PipelineCounters(keeps_window=False)
    figures.opened(["uci"], lambda: _CHANNELS)
    for data_id in range(3000):
        _answer(figures, data_id, 0.25, code=data_id % 2)
        figures.stage("uci", 0, "midp", [data_id], (0.0, 1.0))
        figures.batch("uci", 0, [data_id])
    window = figures.take_window()
    assert (window.requests.count, window.requests.failed, window.ops) == (0, [], {})
    assert figures.codes == {0: 1500, 1: 1500}
    assert figures.totals["uci"].counts["midp"] == 3000
    assert len(figures.newest_requests) == len(figures.newest["uci", "midp"]) == 1024


def test_the_document_for_load_scripts(figures: PipelineCounters) -> None:
    for data_id in range(100):
        _answer(figures, data_id, (data_id + 1) / 1000)
    figures.stage("uci", 0, "midp", range(100), (1.0, 1.5))
    document = benchmark_document(figures.take_window(), 110.0)
    dag = document["DAG"]
    assert isinstance(dag, dict)
    assert list(dag) == ["query_count", "qps", "succ", "avg", "50", "60", "70", "80", "90", "95", "99"]
    assert (dag["query_count"], dag["qps"], dag["succ"]) == (100, 10.0, 1.0)
    assert (dag["50"], dag["99"]) == (pytest.approx(51.0), pytest.approx(100.0))
    assert document["uci"] == {"in": 0, "prep": 0, "midp": 500.0, "postp": 0, "out": 0, "idle": 0.0}


def test_the_snapshot_has_all_requests_and_the_newest_times(figures: PipelineCounters, clock: SimpleNamespace) -> None:
    figures.request_started(9, 0)
    _answer(figures, 0, 0.25, end=101.0)
    _answer(figures, 1, 0.75, code=6000, end=119.0)
    _answer(figures, 2, 0.75, code=None)
    figures.stage("uci", 0, "midp", [0, 1], (1.0, 1.5))
    figures.stage("@DAGExecutor", 0, "prepack", [0], (1.0, 1.5))
    figures.batch("uci", 0, [0, 1])
    figures.worker_died("uci", 0, "SIGKILL")
    clock.now = 120.0
    seen = snapshot(figures, 3)
    assert (seen["uptime_s"], seen["worker_num"], seen["running"], seen["left"]) == (20.0, 3, 1, 1)
    assert seen["codes"] == {"0": 1, "6000": 1}
    assert seen["requests"]["count"] == 2
    assert seen["requests"]["qps"] == pytest.approx(0.1)
    assert seen["requests"]["latency_ms"]["avg"] == 500.0
    assert list(seen["ops"]) == ["uci"]
    uci = seen["ops"]["uci"]
    assert (uci["batches"], uci["deaths"], uci["idle"]) == ({"2": 1}, 1, 0.0)
    assert (uci["stages"]["midp"]["count"], uci["stages"]["midp"]["99"]) == (1, 500.0)
    percentiles = dict.fromkeys(map(str, (50, 60, 70, 80, 90, 95, 99)), 0.0)
    assert uci["stages"]["prep"] == {"count": 0, "avg": 0.0, **percentiles}
    assert seen["channels"][1] == {"name": "chl1", "in": ["uci"], "out": ["@DAGExecutor"], "size": 2, "capacity": 8}


def test_the_rate_counts_more_requests_than_are_kept(figures: PipelineCounters, clock: SimpleNamespace) -> None:
    for data_id in range(4000):
        _answer(figures, data_id, 0.001, end=100.0 + data_id / 1000)
    clock.now = 104.0
    assert snapshot(figures, 1)["requests"]["qps"] == pytest.approx(1000, rel=0.01)


# Timelines

_TIMES: list[tuple[str, Stage, float, float]] = [
    ("@DAGExecutor", "prepack", 10.0, 10.001),
    ("det", "in", 10.0, 10.001),
    ("det", "prep", 10.001, 10.002),
    ("det", "midp", 10.002, 10.006),
    ("det", "postp", 10.006, 10.007),
    ("rec", "midp", 10.007, 10.0104),
    ("@DAGExecutor", "postpack", 10.010, 10.012),
]


def _run(timelines: Timelines, data_id: int, *, profile: bool = False) -> None:
    timelines.request_started(data_id, 0, profile=profile)
    for op, stage, begin, end in _TIMES:
        timelines.stage(op, 1, stage, [data_id], (begin, end))


def test_the_timeline_of_a_request_that_asks_for_it() -> None:
    out = io.StringIO()
    timelines = Timelines(out=out)
    _run(timelines, 5, profile=True)
    _run(timelines, 6)
    head, pid, marks = timelines.timeline(5).split("\t")
    assert (head, bool(re.fullmatch(r"pid:\d+", pid))) == ("PROFILE", True)
    names = [mark.rpartition(":")[0] for mark in marks.split(" ")]
    stages = ["prepack_5#@DAGExecutor", "prep#[det|1]", "midp#[det|1]", "postp#[det|1]", "midp#[rec|1]"]
    stages += ["postpack_5#@DAGExecutor", "call_5#DAG"]
    assert names == [f"{stage}_{tag}" for stage in stages for tag in (0, 1)]
    at = {mark.rpartition(":")[0]: int(mark.rpartition(":")[2]) for mark in marks.split(" ")}
    assert at["midp#[det|1]_1"] - at["midp#[det|1]_0"] == pytest.approx(4000, abs=1)
    assert timelines.timeline(6) == ""
    timelines.request_finished(5, 0, 0, (10.0, 10.012))
    assert timelines.timeline(5) == ""
    assert out.getvalue() == ""


def test_a_request_ends_though_its_timeline_cannot_be_written() -> None:
    out = io.StringIO()
    out.close()
    timelines = Timelines(everything=True, out=out)
    _run(timelines, 0)
    timelines.request_finished(0, 0, 0, (10.0, 10.012))
    assert timelines.timeline(0) == ""


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """Write the timelines of three requests below another line."""
    out = io.StringIO("another line\n")
    out.seek(0, io.SEEK_END)
    timelines = Timelines(everything=True, out=out)
    for data_id in range(3):
        _run(timelines, data_id)
        timelines.request_finished(data_id, 0, 10000, (10.0, 10.012))
    path = tmp_path / "profile.txt"
    path.write_text(out.getvalue())
    return path


def test_timelines_become_a_trace_for_chrome(profile: Path, tmp_path: Path) -> None:
    Analyst(profile).save_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())
    assert len(events) == 3 * 7 * 2
    assert set(events[0]) == {"name", "tid", "pid", "ts", "ph"}
    first, second = events[2:4]
    assert (first["name"], first["tid"], first["ph"], second["ph"]) == ("prep", "[det|1]", "B", "E")
    assert second["ts"] - first["ts"] == pytest.approx(1000, abs=1)


def test_average_times_of_timelines(profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    analyst = Analyst(profile)
    assert analyst.get_profile() == pytest.approx({"prepack": 1.0, "postpack": 2.0, "call": 12.0}, abs=0.01)
    analyst.print_profile()
    assert "call: 12.0" in capsys.readouterr().out


def test_slower_ops_get_more_workers(profile: Path, tmp_path: Path) -> None:
    ops = Analyst(profile).get_op_analyst()
    assert ops.times()["det"] == pytest.approx({"prep": 1.0, "midp": 4.0, "postp": 1.0}, abs=0.01)
    assert ops.times("det") == ops.times()["det"]
    assert ops.qps("det") == ops.qps()["det"] == pytest.approx({"prep": 1000, "midp": 250, "postp": 1000}, rel=0.02)
    with pytest.raises(KeyError, match="nothing"):
        ops.times("nothing")
    config = tmp_path / "config.yml"
    local = "{local_service_conf: {model_config: m, devices: '%s'}}"
    config.write_text(f"rpc_port: 9998\nop:\n  det: {local % '0'}\n  rec: {local % '1,2'}\n")
    assert ops.concurrency_analysis(config) == {"det": 4, "rec": 2}
    config.write_text(f"rpc_port: 9998\nop:\n  det: {local % '0'}\n  rec: {local % '1,0'}\n")
    with pytest.raises(ConfigError, match="device 0 has several models: det, rec"):
        ops.concurrency_analysis(config)


def test_devices_of_stages_select_the_slowest_one(profile: Path, tmp_path: Path) -> None:
    ops = Analyst(profile).get_op_analyst()
    stages = tmp_path / "analyse.yaml"
    stages.write_text("det:\n  midp: 0\nrec:\n  midp: 1\n")
    assert ops.concurrency_analysis(stages) == {"det": 2, "rec": 1}
    stages.write_text("det: {midp: '0,1,2'}\n")
    assert ops.concurrency_analysis(stages)["det"] == 5
    stages.write_text("det: {midp: 0}\nrec: {midp: '1,0'}\n")
    with pytest.raises(ConfigError, match="device 0 has several models: det, rec"):
        ops.concurrency_analysis(stages)
    stages.write_text("dat: {midp: 0}\n")
    with pytest.raises(ConfigError, match=r"analyse\.yaml: .* lack a stage of the file.*det: prep.*dat: midp"):
        ops.concurrency_analysis(stages)


def test_a_missing_profile_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.txt: cannot be read"):
        Analyst(tmp_path / "nothing.txt").get_profile()


async def test_timelines_of_a_running_pipeline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    of = settings(use_profile=True)
    async with (
        open_observers(of) as observing,
        open_executor(text_graph("a<@", "b<a"), of, hooks=observing.hooks) as executor,
    ):
        for _ in range(3):
            await executor.infer(asking())
    captured = tmp_path / "profile.txt"
    captured.write_text(capsys.readouterr().err)
    analyst = Analyst(captured)
    analyst.save_trace(tmp_path / "trace.json")
    names = {(event["name"], event["tid"]) for event in json.loads((tmp_path / "trace.json").read_text())}
    assert {("prep", "[a|0]"), ("postp", "[a|0]"), ("prep", "[b|0]"), ("postp", "[b|0]")} <= names
    assert {(f"call_{data_id}", "DAG") for data_id in range(3)} <= names
    assert set(analyst.get_op_analyst().times()) == {"a", "b"}
    assert analyst.get_profile()["call"] > 0
