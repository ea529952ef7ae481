"""All that observes one running pipeline, opened with the server and closed with it."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import prometheus_client
import structlog
import trio
import yaml

from ovmstrio.runtimes.ops.observing.figures import Figures
from ovmstrio.runtimes.ops.observing.hooks import OpHooks, Several
from ovmstrio.runtimes.ops.observing.log_files import open_log_files
from ovmstrio.runtimes.ops.observing.metrics import OpMetrics
from ovmstrio.runtimes.ops.observing.op_log import OpLog
from ovmstrio.runtimes.ops.observing.snapshot import snapshot
from ovmstrio.runtimes.ops.observing.timeline import Timelines
from ovmstrio.runtimes.ops.observing.tracer import benchmark_document, tracer_lines

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from ovmstrio.runtimes.ops.config.op_settings import PipelineSettings
    from ovmstrio.runtimes.ops.observing.log_files import LogFiles

__all__ = ["BENCHMARK_VARIABLE", "Observing", "open_observing"]

BENCHMARK_VARIABLE: Final = "FLAGS_profile_pipeline"
"""Set to 1, the tracer's figures are also written to ``benchmark.log`` in the current directory."""

_BENCHMARK_FILE: Final = Path("benchmark.log")
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Observing:
    """What observes a pipeline: ``hooks`` is for the executor, the rest for whoever serves figures."""

    hooks: OpHooks
    figures: Figures
    registry: CollectorRegistry
    _worker_num: int

    def snapshot(self) -> dict[str, Any]:
        """Give the figures for the live view."""
        return snapshot(self.figures, self._worker_num)

    @property
    def collectors(self) -> tuple[CollectorRegistry]:
        """What gives the families of the metrics."""
        return (self.registry,)

    def render_metrics(self) -> bytes:
        """Print the metrics in Prometheus's text format."""
        return prometheus_client.generate_latest(self.registry)


@asynccontextmanager
async def open_observing(
    settings: PipelineSettings, registry: CollectorRegistry | None = None
) -> AsyncIterator[Observing]:
    """Open log files, and run the tracer where one is wanted, until the block is left.

    Owns the open files and the tracer's task; may be cancelled at any time.  An error of the block is in an exception
    group, as one of a nursery's is.

    Args:
        settings: the pipeline's.
        registry: where the metrics go; one of their own if None.

    Raises:
        ConfigError: the log files cannot be made.
    """
    registry = prometheus_client.CollectorRegistry() if registry is None else registry
    figures = Figures(keeps_window=settings.dag.tracer.enabled)
    timelines = Timelines(everything=settings.dag.use_profile)
    with open_log_files(settings.logging) as files:
        registry.register(OpMetrics(figures))
        hooks = Several(figures, timelines, OpLog())
        async with trio.open_nursery() as nursery:
            if settings.dag.tracer.enabled:
                nursery.start_soon(_trace, settings, figures, files)
            yield Observing(hooks, figures, registry, settings.worker_num)
            nursery.cancel_scope.cancel()


async def _trace(settings: PipelineSettings, figures: Figures, files: LogFiles | None) -> None:
    """Write a block of the tracer at every interval; cancelled when the pipeline ends."""
    wants_benchmark = os.environ.get(BENCHMARK_VARIABLE) == "1"
    while True:
        await trio.sleep(settings.dag.tracer.interval_s)
        _write(figures, settings.worker_num, files, wants_benchmark=wants_benchmark)


def _write(figures: Figures, worker_num: int, files: LogFiles | None, *, wants_benchmark: bool) -> None:
    window, now = figures.take_window(), figures.now
    if files is not None:
        for line in tracer_lines(window, now, figures.channels, worker_num):
            files.trace(line)
    document = benchmark_document(window, now) if wants_benchmark else {}
    if document:
        try:
            _BENCHMARK_FILE.write_text(yaml.safe_dump(document), encoding="utf-8")
        except OSError as error:
            _log.warning("file cannot be written", file=str(_BENCHMARK_FILE), reason=str(error))
