from __future__ import annotations

import logging
import logging.handlers
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ovmstrio.ext.ops import Op
from ovmstrio.ops.executor import open_executor
from ovmstrio.ops.executor.pipeline_source import LoadedPipeline, PipelineSource
from ovmstrio.ops.observing.observers import open_observers
from ovmstrio.telemetry.logs import configure_logs
from tests.support.ops import asking, op_class, settings, text_graph


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SERVING_LOG_PATH", str(tmp_path))
    return tmp_path / "PipelineServingLogs"


def _preprocess(op: Op, inputs: Mapping[str, Any]) -> Any:
    logging.getLogger().info("%s got %s", op.name, inputs["@DAGExecutor"]["x"])
    if inputs["@DAGExecutor"]["x"] == "bad":
        raise ValueError("x is bad")
    return inputs["@DAGExecutor"]


def load(argument: str) -> LoadedPipeline:
    del argument
    return LoadedPipeline(text_graph("a<@", make=op_class(preprocess=_preprocess)), settings(is_thread_op=False))


async def test_lines_of_hooks_in_worker_processes_have_their_ids(directory: Path) -> None:
    configure_logs()
    pipeline = load("")
    async with open_observers(pipeline.settings) as observing:
        source = PipelineSource(f"{__name__}:load")
        async with open_executor(pipeline.graph, pipeline.settings, hooks=observing.hooks, source=source) as executor:
            await executor.infer(asking("x", logid=33))
            await executor.infer(asking("bad", logid=44))
    lines = (directory / "pipeline.log").read_text().splitlines()
    (found,) = [line for line in lines if "a got x" in line]
    assert re.fullmatch(
        rf"INFO \S+ \S+ \[test_log_files\.py:{_preprocess.__code__.co_firstlineno + 1}\] "
        r"\(data_id=0 log_id=33\) a got x",
        found,
    )
    (failure,) = [line for line in lines if "hook raised" in line]
    assert re.match(r"ERROR \S+ \S+ \[op_instance\.py:\d+\] \(data_id=1 log_id=44\) hook raised", failure)
    warnings = (directory / "pipeline.log.wf").read_text()
    assert warnings.count("hook raised") == 1
    assert f'File "{__file__}", line {_preprocess.__code__.co_firstlineno + 3}, in _preprocess' in warnings
    assert warnings.count("ValueError: x is bad") == 1


_IMPORTS = """
import sys
sys.path.insert(0, sys.argv[1])
from paddle_serving_server.web_service import Op, WebService
import paddle_serving_server.pipeline.analyse, paddle_serving_server.pipeline.pipeline_server

class Service(WebService):
    def get_pipeline_response(self, read_op):
        return Op(name="a", input_ops=[read_op])

Service("s").prepare_pipeline_config(yml_dict={"rpc_port": 0})
"""


def test_a_prepared_service_creates_no_files(tmp_path: Path) -> None:
    compat = Path(__file__).parents[3] / "ovmstrio" / "compat"
    subprocess.run([sys.executable, "-c", _IMPORTS, str(compat)], check=True, cwd=tmp_path)
    assert list(tmp_path.iterdir()) == []
