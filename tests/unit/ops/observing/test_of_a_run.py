"""What a pipeline that really runs leaves behind: log lines, tracer blocks, timelines, metrics."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import structlog
import trio
from structlog.testing import capture_logs

from ovmstrio.observability.logs import configure_logs
from ovmstrio.ops import Op, PipelineResponse
from ovmstrio.runtimes.ops.config.op_settings import LoggingSettings, OpSettings, PipelineSettings, TracerSettings
from ovmstrio.runtimes.ops.executor import Executor, open_executor
from ovmstrio.runtimes.ops.graph import OpGraph
from ovmstrio.runtimes.ops.observing.analyst import Analyst
from ovmstrio.runtimes.ops.observing.observing import Observing, open_observing
from tests.support.ops import asking, settings, text_graph
from tests.support.waits import until_async

_STAMP = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}"


class Telling(Op):
    def preprocess(self, input_dicts: Mapping[str, Any], data_id: int = 0, log_id: int = 0) -> Any:
        (only,) = input_dicts.values()
        logging.getLogger().info("%s got %s", self.name, only["x"])
        if only["x"] == "bad":
            raise ValueError("x is bad")
        return only

    async def postprocess(self, input_dicts: Any, fetch_data: Any, data_id: int = 0, log_id: int = 0) -> Any:
        structlog.get_logger("of.a.user").info("done", op=self.name)
        return fetch_data


@pytest.fixture(autouse=True)
def directory(log_files: Path) -> Path:
    """Let the server's own lines be in the files too."""
    configure_logs()
    return log_files


def _graph() -> OpGraph:
    return text_graph("a<@", "b<a", make=Telling)


@asynccontextmanager
async def _running(of: PipelineSettings, graph: OpGraph | None = None) -> AsyncIterator[tuple[Executor, Observing]]:
    async with (
        open_observing(of) as observing,
        open_executor(graph or _graph(), of, hooks=observing.hooks) as executor,
    ):
        yield executor, observing


async def _ask(executor: Executor, x: str, log_id: int = 0) -> PipelineResponse:
    return await executor.infer(asking(x, logid=log_id))


async def test_every_line_of_a_request_has_its_ids(directory: Path) -> None:
    """Lines of hooks in threads and on the loop, of failures and of ends are marked with data id and log id."""
    async with _running(settings()) as (executor, _), trio.open_nursery() as nursery:
        for log_id in range(70, 74):
            nursery.start_soon(_ask, executor, f"x{log_id}", log_id)
        nursery.start_soon(_ask, executor, "bad", 79)
    text = (directory / "pipeline.log").read_text()
    lines = re.findall(rf"^(?:INFO|WARNING|ERROR) {_STAMP} \[\S+:\d+\] (.*)$", text, re.MULTILINE)
    found = sorted(re.findall(r"\(data_id=\d+ log_id=(\d+)\) ([ab]) got x(\d+)", "\n".join(lines)))
    assert found == sorted((str(log_id), op, str(log_id)) for log_id in range(70, 74) for op in "ab")
    assert sum("done op=" in line and "(data_id=" in line for line in lines) == 8
    warnings = (directory / "pipeline.log.wf").read_text()
    assert re.search(r"\(data_id=\d log_id=79\) hook raised", warnings)
    assert re.search(r"\(data_id=\d log_id=79\) request failed err_no=10000 err_msg=.*Raise_msg: x is bad ", warnings)
    assert "ValueError: x is bad" in warnings
    assert "got" not in warnings


async def test_requests_that_are_answered_leave_a_line(directory: Path) -> None:
    """With data id, log id, client and method, in the file alone, unless it is open for more than that only."""
    asked = asking("x", logid=7, clientip="192.0.2.1", method="prediction")
    with capture_logs() as logs:
        async with _running(settings()) as (executor, _):
            await executor.infer(asked)
            await _ask(executor, "x", 8)
    text = (directory / "pipeline.log").read_text()
    found = re.findall(rf"^INFO {_STAMP} \[\S+:\d+\] (.*request answered .*) ms=[0-9.]+$", text, re.MULTILINE)
    assert found == [
        "(data_id=0 log_id=7) request answered client=192.0.2.1 method=prediction",
        "(data_id=1 log_id=8) request answered client=- method=-",
    ]
    assert not [entry for entry in logs if "request answered" in entry["event"]]
    async with _running(replace(settings(), logging=LoggingSettings(level=logging.WARNING))) as (executor, _):
        await executor.infer(asked)
    assert (directory / "pipeline.log").read_text().count("request answered") == 2


async def test_line_of_a_batch_lists_its_samples(directory: Path) -> None:
    """The samples that go through an Op together are on one line, with their log ids."""
    batched = {"a": OpSettings("a", batch_size=3, auto_batching_timeout=60_000)}
    async with _running(settings(ops=batched)) as (executor, observing), trio.open_nursery() as nursery:
        for log_id in (5, 6, 7):
            nursery.start_soon(_ask, executor, "x", log_id)
    ids = " ".join(rf"\(data_id={data_id} log_id=[567]\)" for data_id in range(3))
    text = (directory / "pipeline.log").read_text()
    assert re.search(rf"\] {ids} batch op=a worker=0 data_ids=\[0, 1, 2\]\n", text)
    seen = observing.snapshot()["ops"]["a"]
    assert seen["batches"] == {"3": 1}


async def test_tracer_of_real_traffic(directory: Path) -> None:
    """A block of the tracer has every line of its form for what went through."""
    async with _running(settings(tracer=TracerSettings(1), worker_num=7)) as (executor, _):
        for x in ("x", "x", "bad"):
            await _ask(executor, x)
        await until_async(lambda: "chl1(" in (directory / "pipeline.tracer").read_text())
    lines = (directory / "pipeline.tracer").read_text().splitlines()
    texts = [re.fullmatch(rf"{_STAMP} (.*)", line) for line in lines]
    ms = r"\[[0-9.e-]+ ms\]"
    stages = [rf"\t{stage}{ms}" for stage in ("in", "prep", "midp", "postp", "out")]
    expected = [r"={20} TRACER ={22}"]
    for op in "ab":
        expected += [rf"Op\({op}\):", *stages, r"\tidle\[[0-9.e-]+\]"]
    expected += [
        "DAGExecutor:",
        r"\tQuery count\[3\]",
        r"\tQPS\[[0-9.]+ q/s\]",
        r"\tSucc\[0\.66+\d*\]",
        r"\tError req\[2\]",
        r"\tLatency:",
        rf"\t\tave{ms}",
        *(rf"\t\t\.{percent}{ms}" for percent in (50, 60, 70, 80, 90, 95, 99)),
        r"Channel \(server worker num\[7\]\):",
        r"\tchl0\(In: \['@DAGExecutor'\], Out: \['a'\]\) size\[0/0\]",
        r"\tchl1\(In: \['a'\], Out: \['b'\]\) size\[0/0\]",
    ]
    for form, text in zip(expected, texts, strict=False):
        assert text is not None
        assert re.fullmatch(form, text[1]), (form, text[1])
    assert len(texts) >= len(expected)


async def test_profile_of_real_traffic(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Timelines that a server writes become a trace for Chrome, with a begin and an end of each stage."""
    async with _running(settings(use_profile=True)) as (executor, _):
        for _ in range(3):
            await _ask(executor, "x")
    captured = tmp_path / "profile.txt"
    captured.write_text(capsys.readouterr().err)
    analyst = Analyst(captured)
    analyst.save_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())
    names = {(event["name"], event["tid"]) for event in events}
    assert {("prep", "[a|0]"), ("postp", "[a|0]"), ("prep", "[b|0]"), ("postp", "[b|0]")} <= names
    assert {(f"call_{data_id}", "DAG") for data_id in range(3)} <= names
    assert sorted(event["ph"] for event in events) == ["B"] * (len(events) // 2) + ["E"] * (len(events) // 2)
    assert set(analyst.get_op_analyst().times()) == {"a", "b"}
    assert analyst.get_profile()["call"] > 0


async def test_metrics_of_real_traffic() -> None:
    """Counters only grow from one look to the next, and agree with what was asked."""
    seen: list[dict[str, float]] = []
    async with _running(settings()) as (executor, observing):
        for x in ("x", "bad", "x"):
            await _ask(executor, x)
            pairs = re.findall(r"^(\S+_total\S*) (\S+)$", observing.render_metrics().decode(), re.MULTILINE)
            seen.append({name: float(value) for name, value in pairs})
    for before, after in pairwise(seen):
        assert all(after[name] >= value for name, value in before.items())
    assert seen[-1]["pd_query_request_success_total"] == 2
    assert seen[-1]["pd_query_request_failure_total"] == 1
    assert seen[-1]["pd_query_request_duration_us_total"] > 0
    assert seen[-1]['ovmstrio_op_stage_us_total{op="a",stage="prep"}'] > 0


async def test_files_that_are_turned_off(directory: Path) -> None:
    """A pipeline without log files runs as well."""
    of = PipelineSettings(logging=LoggingSettings(enabled=False))
    async with _running(of) as (executor, _):
        assert (await _ask(executor, "x")).values == ["x"]
    assert not await trio.Path(directory).exists()
