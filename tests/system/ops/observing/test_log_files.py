"""Log files of pipelines, written by several processes."""

from __future__ import annotations

import logging
import logging.handlers
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ovmstrio.runtimes.ops.config.op_settings import LoggingSettings
from ovmstrio.runtimes.ops.observing.log_files import open_log_files

pytestmark = pytest.mark.usefixtures("log_files")


def _read(directory: Path, name: str) -> str:
    return (directory / "PipelineServingLogs" / name).read_text(encoding="utf-8")


_WORKER = """
import logging
from ovmstrio.observability.log_sinks import FileSink
from ovmstrio.observability.log_writer import LogOutlet
from ovmstrio.observability.logs import configure_logs
from ovmstrio.runtimes.ops.config.op_settings import LoggingSettings
from ovmstrio.runtimes.ops.observing.log_files import join_log_files

configure_logs(level="WARNING")
with join_log_files(LoggingSettings()):
    while (number := input()) != "end":
        logging.getLogger().info("line %s of the worker", number)
        print(flush=True)
"""


def test_worker_process_writes_into_the_same_files(tmp_path: Path) -> None:
    """Lines of a worker process are in the server's file, in the new one too once the first has been put away."""
    with (
        open_log_files(LoggingSettings(max_bytes=400, backups=1)),
        subprocess.Popen(
            [sys.executable, "-c", _WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
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
    text = _read(tmp_path, "pipeline.log.1") + _read(tmp_path, "pipeline.log")
    found = re.findall(r"line (\d) of the (server|worker)", text)
    assert found == [(str(number), of) for number in range(4) for of in ("server", "worker")]
    assert worker.returncode == 0


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


def test_nothing_is_made_before_a_server_starts(tmp_path: Path) -> None:
    """A script that imports everything and prepares a service leaves no file behind."""
    compat = Path(__file__).parents[4] / "compat"
    subprocess.run([sys.executable, "-c", _IMPORTS, str(compat)], check=True, cwd=tmp_path)
    assert list(tmp_path.iterdir()) == []
