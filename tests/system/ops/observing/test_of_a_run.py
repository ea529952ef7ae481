"""Log lines of worker processes of Ops."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import structlog

from ovmstrio.observability.logs import configure_logs
from ovmstrio.ops import Op, PipelineResponse
from ovmstrio.runtimes.ops.executor import Executor, open_executor
from ovmstrio.runtimes.ops.executor.processes.pipeline_source import LoadedPipeline, PipelineSource
from ovmstrio.runtimes.ops.observing.observing import open_observing
from tests.support.ops import asking, settings, text_graph


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


class Plain(Telling):
    def postprocess(self, input_dicts: Any, fetch_data: Any, data_id: int = 0, log_id: int = 0) -> Any:
        return fetch_data


@pytest.fixture(autouse=True)
def directory(log_files: Path) -> Path:
    """Let the server's own lines be in the files too."""
    configure_logs()
    return log_files


async def _ask(executor: Executor, x: str, log_id: int = 0) -> PipelineResponse:
    return await executor.infer(asking(x, logid=log_id))


def load(argument: str) -> LoadedPipeline:
    """Make the pipeline of a worker process."""
    del argument
    return LoadedPipeline(text_graph("a<@", make=Plain), settings(is_thread_op=False))


async def test_lines_of_worker_processes(directory: Path) -> None:
    """What hooks log in processes of their own is in the same file, with its ids."""
    of = settings(is_thread_op=False)
    async with open_observing(of) as observing:
        source = PipelineSource(f"{__name__}:load")
        graph = text_graph("a<@", make=Plain)
        async with open_executor(graph, of, hooks=observing.hooks, source=source) as executor:
            await _ask(executor, "x", 33)
            await _ask(executor, "bad", 44)
    text = (directory / "pipeline.log").read_text()
    assert "(data_id=0 log_id=33) a got x" in text
    assert re.search(r"ERROR \S+ \S+ \[stages\.py:\d+\] \(data_id=1 log_id=44\) hook raised", text)
    warnings = (directory / "pipeline.log.wf").read_text()
    assert f'File "{__file__}", line {Telling.preprocess.__code__.co_firstlineno + 5}, in preprocess' in warnings
    assert "ValueError: x is bad" in warnings
