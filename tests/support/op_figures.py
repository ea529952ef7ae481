"""Figures of a pipeline of Ops, as a server reports them."""

from __future__ import annotations

from typing import Any

from ovmstrio.runtimes.ops.observing.figures import PipelineFigures
from ovmstrio.runtimes.ops.observing.hooks import ChannelState
from ovmstrio.runtimes.ops.observing.observing import snapshot


def op_figures() -> dict[str, Any]:
    """Return the figures after five requests, one of which failed, and the end of a worker."""
    figures = PipelineFigures(lambda: 10.0)
    states = [ChannelState("chl0", ("@DAGExecutor",), ("det",), 3, 4), ChannelState("chl1", ("det",), ("rec",), 7)]
    figures.opened(["det", "rec\x1b[2J"], lambda: states)
    for number in range(4):
        figures.request_started(number, 0)
        figures.stage("det", 0, "midp", [number], (0.0, 0.004 * (number + 1)))
        figures.batch("det", 0, range(number + 1))
        code = 6000 if number == 3 else 0
        figures.request_finished(number, 0, code, (9.0, 9.5))
    figures.worker_died("det", 0, "killed")
    return snapshot(figures, 8)
