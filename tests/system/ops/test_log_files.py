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
from ovmstrio.ops.observing.log_files import open_log_files
from ovmstrio.ops.observing.observers import open_observers
from ovmstrio.ops.settings import LoggingSettings
from ovmstrio.telemetry.logs import configure_logs
from tests.support.ops import asking, op_class, settings, text_graph

_SCRIPT = """
import logging
from ovmstrio.telemetry.logs import configure_logs
from ovmstrio.ops.settings import LoggingSettings
from ovmstrio.ops.observing.log_files import join_log_files

configure_logs(level="WARNING")
with join_log_files(LoggingSettings()):
    while (number := input()) != "end":
        logging.getLogger().info("line %s of the worker", number)
        print(flush=True)
"""


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SERVING_LOG_PATH", str(tmp_path))
    return tmp_path / "PipelineServingLogs"


def test_a_worker_process_follows_rotated_files(directory: Path) -> None:
    with (
        open_log_files(LoggingSettings(max_bytes=400, backups=1)),
        subprocess.Popen(
            [sys.executable, "-c", _SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as worker,
    ):
        assert worker.stdin is not None
        assert worker.stdout is not None
        for number in range(4):
            logging.getLogger().info("line %d of the server %s", number, 80 * "x")
            worker.stdin.write(f"{number}\n")
            worker.stdin.flush()
            assert worker.stdout.readline() == "\n"
        worker.communicate("end\n")
    text = (directory / "pipeline.log.1").read_text() + (directory / "pipeline.log").read_text()
    found = re.findall(r"line (\d) of the (server|worker)", text)
    assert found == [(str(number), of) for number in range(4) for of in ("server", "worker")]
    assert worker.returncode == 0


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
    text = (directory / "pipeline.log").read_text()
    assert "(data_id=0 log_id=33) a got x" in text
    assert re.search(r"ERROR \S+ \S+ \[stages\.py:\d+\] \(data_id=1 log_id=44\) hook raised", text)
    warnings = (directory / "pipeline.log.wf").read_text()
    assert f'File "{__file__}", line {_preprocess.__code__.co_firstlineno + 3}, in _preprocess' in warnings
    assert "ValueError: x is bad" in warnings


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
    compat = Path(__file__).parents[3] / "compat"
    subprocess.run([sys.executable, "-c", _IMPORTS, str(compat)], check=True, cwd=tmp_path)
    assert list(tmp_path.iterdir()) == []
