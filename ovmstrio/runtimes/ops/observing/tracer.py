"""The tracer: what each Op, the whole pipeline and the channels did since the last block of lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from ovmstrio.runtimes.ops.observing.figures import OpFigures, RequestFigures, Window, percentile
from ovmstrio.runtimes.ops.observing.hooks import STAGES, ChannelState

__all__ = ["PERCENTS", "benchmark_document", "tracer_lines"]

PERCENTS: Final = (50, 60, 70, 80, 90, 95, 99)

_HEADER: Final = "==================== TRACER ======================"
_MS: Final = 1e3


def tracer_lines(window: Window, now: float, channels: Sequence[ChannelState], worker_num: int) -> list[str]:
    """Give the block of one window; Ops and requests are left out where there were none."""
    lines = [_HEADER]
    for name, figures in window.ops.items():
        lines += _op_lines(name, figures)
    if window.requests.count:
        lines += _request_lines(window.requests, now - window.began)
    return [*lines, *_channel_lines(channels, worker_num)]


def benchmark_document(window: Window, now: float) -> dict[str, object]:
    """Give the same figures as a mapping, as load scripts read it; empty where there was nothing."""
    document: dict[str, object] = {name: _op_figures(figures) for name, figures in window.ops.items()}
    if window.requests.count:
        document["DAG"] = _request_figures(window.requests, now - window.began)
    return document


def _op_lines(name: str, figures: OpFigures) -> list[str]:
    stages = [f"\t{stage}[{figures.average(stage) * _MS} ms]" for stage in STAGES]
    return [f"Op({name}):", *stages, f"\tidle[{figures.idle}]"]


def _request_lines(requests: RequestFigures, seconds: float) -> list[str]:
    figures = _request_figures(requests, seconds)
    return [
        "DAGExecutor:",
        f"\tQuery count[{requests.count}]",
        f"\tQPS[{figures['qps']} q/s]",
        f"\tSucc[{figures['succ']}]",
        f"\tError req[{', '.join(map(str, requests.failed))}]",
        "\tLatency:",
        f"\t\tave[{figures['avg']} ms]",
        *(f"\t\t.{percent}[{figures[str(percent)]} ms]" for percent in PERCENTS),
    ]


def _channel_lines(channels: Sequence[ChannelState], worker_num: int) -> list[str]:
    return [
        f"Channel (server worker num[{worker_num}]):",
        *(
            f"\t{each.name}(In: {list(each.producers)}, Out: {list(each.consumers)}) size[{each.size}/{each.capacity}]"
            for each in channels
        ),
    ]


def _op_figures(figures: OpFigures) -> dict[str, float]:
    return {**{stage: figures.average(stage) * _MS for stage in STAGES}, "idle": figures.idle}


def _request_figures(requests: RequestFigures, seconds: float) -> Mapping[str, float]:
    times = sorted(each * _MS for each in requests.seconds)
    return {
        "query_count": requests.count,
        "qps": requests.count / seconds if seconds > 0 else 0.0,
        "succ": 1 - len(requests.failed) / requests.count,
        "avg": sum(times) / len(times),
        **{str(percent): percentile(times, percent) for percent in PERCENTS},
    }
