"""The figures of a running pipeline as JSON, for the live view."""

from __future__ import annotations

from typing import Any, Final

from ovmstrio.runtimes.ops.observing.figures import Figures, percentile
from ovmstrio.runtimes.ops.observing.hooks import STAGES
from ovmstrio.runtimes.ops.observing.tracer import PERCENTS

__all__ = ["snapshot"]

_MS: Final = 1e3
_RATE_SECONDS: Final = 10.0


def snapshot(figures: Figures, worker_num: int) -> dict[str, Any]:
    """Give what there is to see now; times are milliseconds, percentiles those of the newest values."""
    latencies = [seconds for _, seconds in figures.newest_requests]
    return {
        "uptime_s": figures.now - figures.began,
        "worker_num": worker_num,
        "running": figures.running,
        "left": figures.left,
        "codes": {str(code): count for code, count in sorted(figures.codes.items())},
        "requests": {"count": figures.codes.total(), "qps": _rate(figures), "latency_ms": _times(latencies)},
        "ops": {name: _op(figures, name) for name in figures.totals},
        "channels": [
            {
                "name": each.name,
                "in": list(each.producers),
                "out": list(each.consumers),
                "size": each.size,
                "capacity": each.capacity,
            }
            for each in figures.channels
        ],
    }


def _op(figures: Figures, name: str) -> dict[str, Any]:
    of_op = figures.totals[name]
    return {
        "idle": of_op.idle,
        "deaths": of_op.deaths,
        "batches": {str(size): count for size, count in sorted(of_op.batches.items())},
        "stages": {
            stage: {"count": of_op.counts.get(stage, 0), **_times(list(figures.newest.get((name, stage), ())))}
            for stage in STAGES
        },
    }


def _times(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(each * _MS for each in seconds)
    average = sum(ordered) / len(ordered) if ordered else 0.0
    return {"avg": average, **{str(percent): percentile(ordered, percent) for percent in PERCENTS}}


def _rate(figures: Figures) -> float:
    """Give how many requests a second were answered of late."""
    ended = [at for at, _ in figures.newest_requests]
    since = max(figures.now - _RATE_SECONDS, figures.began)
    if len(ended) == figures.newest_requests.maxlen:
        since = max(since, ended[0])
    recent = sum(1 for at in ended if at >= since)
    return recent / (figures.now - since) if figures.now > since else 0.0
