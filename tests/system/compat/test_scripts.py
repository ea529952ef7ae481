from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import cv2
import httpx
import numpy as np
import pytest

from ovmstrio.ops.process_info import FILE_NAME, record_process
from paddle_serving_server.serve import main, stop_serving
from tests.support.processes import running_service

WITHOUT_OPENCV = """
import sys
sys.modules["cv2"] = None
from paddle_serving_app.reader import ChineseBertReader, LACReader, SentaReader
from paddle_serving_app.reader.imdb_reader import IMDBDataset
try:
    from paddle_serving_app.reader import Resize
except ModuleNotFoundError as error:
    print(error)
"""


def _python(code: str, folder: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, check=True, cwd=folder, env=environment, timeout=60, capture_output=True, text=True)
    return done.stdout


def test_an_import_creates_no_files(tmp_path: Path) -> None:
    _python("import paddle_serving_server.pipeline", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_readers_of_text_need_no_opencv(tmp_path: Path) -> None:
    printed = _python(WITHOUT_OPENCV, tmp_path)
    assert "image readers need OpenCV; install it: " in printed
    assert "[paddle]" in printed


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    monkeypatch.setenv("SERVING_HOME", str(tmp_path))
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with record_process([9998, 18082]) as file:
        (entry,) = json.loads(file.read_text())
    del entry["began"]
    file.write_text(json.dumps([{**entry, "pid": process.pid, "start_time": entry["start_time"] + 5}]))
    yield process
    process.kill()
    process.communicate()


def test_kill_ends_the_server_of_a_port(server: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kill", "--port", "1"]) == 1
    assert "no running service on port 1" in capsys.readouterr().out
    assert server.poll() is None
    assert main(["check"]) == 0
    assert f"process {server.pid}, ports [9998, 18082]: running" in capsys.readouterr().out
    assert main(["kill", "--port", "18082"]) == 0
    assert server.wait(60) == -9
    assert not stop_serving("stop")
    assert "already ended" in capsys.readouterr().out


def test_a_reused_process_id_is_not_signalled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVING_HOME", str(tmp_path))
    (tmp_path / FILE_NAME).write_text(json.dumps([{"pid": os.getpid(), "port": [1, 2], "start_time": 1.0}]))
    assert main(["kill"]) == 1


SCRIPT = """
import base64
import cv2
import numpy as np
from paddle_serving_server.web_service import WebService, Op
from paddle_serving_app.reader import *


class MeanOp(Op):
    def init_op(self):
        self.read = Sequential([Resize(16), CenterCrop(8), BGR2RGB(), Transpose((2, 0, 1)), Div(255.0)])

    def preprocess(self, input_dicts, data_id, log_id):
        (_, input_dict), = input_dicts.items()
        data = np.fromstring(base64.b64decode(input_dict["image"].encode("utf8")), np.uint8)
        return {"x": self.read(cv2.imdecode(data, cv2.IMREAD_COLOR))}, False, None, ""

    def postprocess(self, input_dicts, fetch_dict, data_id, log_id):
        return {"means": str([np.round(channel.mean(), 3) for channel in fetch_dict["x"]])}, None, ""


class MeanService(WebService):
    def get_pipeline_response(self, read_op):
        return MeanOp(name="mean", input_ops=[read_op])


service = MeanService(name="mean")
service.prepare_pipeline_config("config.yml")
service.run_service()
"""


def test_a_service_for_numpy_one_reads_images_in_worker_processes(tmp_path: Path) -> None:
    (tmp_path / "web_service.py").write_text(SCRIPT)
    (tmp_path / "config.yml").write_text("rpc_port: 1\nhttp_port: 2\nworker_num: 1\ndag:\n  is_thread_op: false\n")
    image = cv2.imencode(".png", np.full((20, 30, 3), (255, 0, 51), np.uint8))[1].tobytes()
    body = {"key": ["image"], "value": [base64.b64encode(image).decode()]}
    with running_service(tmp_path) as server:
        answer = httpx.post(f"{server.rest}/mean/prediction", json=body, timeout=60, trust_env=False).json()
    assert (answer["err_no"], answer["value"]) == (0, ["[0.2, 0.0, 1.0]"])
