from __future__ import annotations

import re

import pytest

from ovmstrio.runtimes.ops.observing.figures import PipelineFigures, percentile
from ovmstrio.runtimes.ops.observing.hooks import ChannelState
from ovmstrio.runtimes.ops.observing.observing import snapshot
from ovmstrio.runtimes.ops.observing.tracer import benchmark_document, tracer_lines

_CHANNELS = (
    ChannelState("chl0", ("@DAGExecutor",), ("uci",), 0),
    ChannelState("chl1", ("uci",), ("@DAGExecutor",), 2, 8),
)


class _Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def _figures(clock: _Clock) -> PipelineFigures:
    figures = PipelineFigures(clock)
    figures.opened(["uci"], lambda: _CHANNELS)
    return figures


def _answer(figures: PipelineFigures, data_id: int, seconds: float, code: int | None = 0, end: float = 101.0) -> None:
    figures.request_started(data_id, 0)
    figures.request_finished(data_id, 0, code, (end - seconds, end))


def test_exact_lines() -> None:
    """A window's block has the lines of an Op, of the requests and of the channels, in this order and form."""
    clock = _Clock()
    figures = _figures(clock)
    for stage, seconds in (("in", 0.5), ("prep", 0.25), ("midp", 0.125), ("postp", 0.125), ("out", 0.25)):
        figures.stage("uci", 0, stage, [0], (1.0, 1.0 + seconds))  # type: ignore[arg-type]
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
        "\t\t.50[500.0 ms]",
        "\t\t.60[500.0 ms]",
        "\t\t.70[500.0 ms]",
        "\t\t.80[500.0 ms]",
        "\t\t.90[500.0 ms]",
        "\t\t.95[500.0 ms]",
        "\t\t.99[500.0 ms]",
        "Channel (server worker num[4]):",
        "\tchl0(In: ['@DAGExecutor'], Out: ['uci']) size[0/0]",
        "\tchl1(In: ['uci'], Out: ['@DAGExecutor']) size[2/8]",
    ]


def test_window_without_traffic() -> None:
    """Without traffic only the header and the channels are told, and a window begins anew after each look."""
    clock = _Clock()
    figures = _figures(clock)
    _answer(figures, 0, 0.25)
    figures.stage("uci", 0, "prep", [0], (0, 1))
    figures.take_window()
    clock.now = 103.0
    window = figures.take_window()
    lines = tracer_lines(window, 104.0, _CHANNELS, 1)
    assert [line for line in lines if re.match(r"Op|DAG", line)] == []
    assert len(lines) == 4
    assert benchmark_document(window, 104.0) == {}
    assert figures.codes == {0: 1}
    assert figures.totals["uci"].counts["prep"] == 1


def test_no_window_that_nobody_takes() -> None:
    """Without a tracer nothing grows with the number of requests, and the figures of all time are kept."""
    figures = PipelineFigures(_Clock(), keeps_window=False)
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


def test_benchmark_document() -> None:
    """The document has the keys that load scripts read."""
    clock = _Clock()
    figures = _figures(clock)
    for data_id in range(100):
        _answer(figures, data_id, (data_id + 1) / 1000)
    figures.stage("uci", 0, "midp", range(100), (1.0, 1.5))
    document = benchmark_document(figures.take_window(), 110.0)
    dag = document["DAG"]
    assert isinstance(dag, dict)
    assert list(dag) == ["query_count", "qps", "succ", "avg", "50", "60", "70", "80", "90", "95", "99"]
    assert (dag["query_count"], dag["qps"], dag["succ"]) == (100, 10.0, 1.0)
    assert dag["50"] == pytest.approx(51.0)
    assert dag["99"] == pytest.approx(100.0)
    assert document["uci"] == {"in": 0, "prep": 0, "midp": 500.0, "postp": 0, "out": 0, "idle": 0.0}


@pytest.mark.parametrize(("values", "expected"), [([], 0.0), ([1.0], 1.0), ([1.0, 2.0], 2.0), ([1.0, 2.0, 3.0], 2.0)])
def test_percentile(values: list[float], expected: float) -> None:
    """The median is the value in the middle, the upper one of two, and 0 of none."""
    assert percentile(values, 50) == expected


def test_snapshot() -> None:
    """The live view's figures are those of all time and of the newest requests."""
    clock = _Clock()
    figures = _figures(clock)
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
    uci = seen["ops"]["uci"]
    assert list(seen["ops"]) == ["uci"]
    assert (uci["batches"], uci["deaths"], uci["idle"]) == ({"2": 1}, 1, 0.0)
    assert uci["stages"]["midp"]["count"] == 1
    assert uci["stages"]["midp"]["99"] == 500.0
    assert uci["stages"]["prep"] == {
        "count": 0,
        "avg": 0.0,
        **dict.fromkeys(map(str, (50, 60, 70, 80, 90, 95, 99)), 0.0),
    }
    assert seen["channels"][1] == {"name": "chl1", "in": ["uci"], "out": ["@DAGExecutor"], "size": 2, "capacity": 8}


def test_rate_of_many_requests() -> None:
    """The rate is right even where more requests were answered of late than are remembered."""
    clock = _Clock()
    figures = _figures(clock)
    for data_id in range(4000):
        _answer(figures, data_id, 0.001, end=100.0 + data_id / 1000)
    clock.now = 104.0
    assert snapshot(figures, 1)["requests"]["qps"] == pytest.approx(1000, rel=0.01)
