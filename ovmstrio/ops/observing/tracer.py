"""Tracer lines and request timelines, in the formats of Paddle Serving."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final, TextIO

from ovmstrio.ops.observing.figures import OpFigures, RequestFigures, Window, percentile
from ovmstrio.ops.observing.hooks import NOBODY, STAGES, Asker, ChannelState, OpHooks, Span, Stage

__all__ = ["PERCENTS", "Timelines", "benchmark_document", "tracer_lines"]

_RECORDED: Final = frozenset({"prep", "midp", "postp"})
_MICROSECONDS: Final = 1e6
_MAX_TIMELINES: Final = 10_000


class Timelines(OpHooks):
    """Hooks that record timelines on request, or of ``everything``, which go to ``out`` or standard error."""

    def __init__(self, *, everything: bool = False, out: TextIO | None = None) -> None:
        self._everything = everything
        self._out = out
        self._timelines: dict[int, list[str]] = {}
        self.wants_stages = False
        self._began: dict[int, float] = {}
        self._offset = time.time() - time.perf_counter()

    def request_started(self, data_id: int, log_id: int, *, profile: bool = False, caller: Asker = NOBODY) -> None:
        """Start a timeline if requested."""
        del log_id, caller
        if (profile or self._everything) and len(self._timelines) < _MAX_TIMELINES:
            self._timelines[data_id] = []
            self._began[data_id] = time.perf_counter()
            self.wants_stages = True

    def stage(self, op: str, worker: int, stage: Stage, data_ids: Sequence[int], span: Span) -> None:
        """Add a stage to the timelines of its samples."""
        for data_id in data_ids:
            if data_id in self._timelines and (name := _name(op, worker, stage, data_id)):
                self._timelines[data_id] += self._marks(name, span)

    def timeline(self, data_id: int) -> str:
        """Return the timeline of a running request; empty if none is recorded."""
        if data_id not in self._timelines:
            return ""
        call = (self._began[data_id], time.perf_counter())
        return self._line(data_id, call)

    def request_finished(self, data_id: int, log_id: int, code: int | None, span: Span, message: str = "") -> None:
        """Write the timeline if all are written, and drop it."""
        del log_id, code, message
        if data_id not in self._timelines:
            return
        if self._everything:
            # A closed output stream must not fail the request.
            with suppress(OSError, ValueError):
                print(self._line(data_id, span), file=self._out or sys.stderr, flush=True)
        del self._timelines[data_id], self._began[data_id]
        self.wants_stages = bool(self._timelines)

    def _line(self, data_id: int, call: Span) -> str:
        marks = [*self._timelines[data_id], *self._marks(f"call_{data_id}#DAG", call)]
        return f"PROFILE\tpid:{os.getpid()}\t{' '.join(marks)}"

    def _marks(self, name: str, span: Span) -> list[str]:
        return [f"{name}_{tag}:{round((at + self._offset) * _MICROSECONDS)}" for tag, at in enumerate(span)]


def _name(op: str, worker: int, stage: Stage, data_id: int) -> str:
    if stage in {"prepack", "postpack"}:
        return f"{stage}_{data_id}#{op}"
    return f"{stage}#[{op}|{worker}]" if stage in _RECORDED else ""


PERCENTS: Final = (50, 60, 70, 80, 90, 95, 99)

_HEADER: Final = "==================== TRACER ======================"
_MS: Final = 1e3


def tracer_lines(window: Window, now: float, channels: Sequence[ChannelState], worker_num: int) -> list[str]:
    """Return the lines of one window; Ops and requests without events are omitted."""
    lines = [_HEADER]
    for name, figures in window.ops.items():
        lines += _op_lines(name, figures)
    if window.requests.count:
        lines += _request_lines(window.requests, now - window.began)
    return [*lines, *_channel_lines(channels, worker_num)]


def benchmark_document(window: Window, now: float) -> dict[str, object]:
    """Return the figures of a window as a mapping for load scripts; empty without events."""
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
