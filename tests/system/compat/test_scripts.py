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
from tests.support.paddle_files import layers, write_described
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


PROCESSES = """
import numpy as np
from paddle_serving_server.pipeline import LocalServiceHandler
from paddle_serving_server.pipeline.channel import ChannelData
from paddle_serving_server.web_service import WebService, Op


class Base(Op):
    def preprocess(self, input_dicts, data_id, log_id):
        (_, request), = input_dicts.items()
        return {"feed": np.array([request["x"].split(",")], "float32")}, False, None, ""

    def postprocess(self, input_dicts, fetch_dict, data_id, log_id):
        return {self.name: str(fetch_dict["first"].round(1).tolist())}, None, ""


class Printed(Base):
    def process(self, feed_dict_list, typical_logid):
        err, err_info = ChannelData.check_batch_npdata(feed_dict_list)
        if err != 0:
            raise NotImplementedError("{} Please override preprocess func.".format(err_info))
        return self.client.predict(feed=feed_dict_list, fetch=self._fetch_names, log_id=typical_logid)


class Sample(Printed):
    def preprocess(self, input_dicts, data_id, log_id):
        feed, *others = super().preprocess(input_dicts, data_id, log_id)
        return {"feed": feed["feed"][0]}, *others


class Release(Base):
    def init_op(self):
        assert self.client.predict(feed={"feed": np.zeros((1, 3))}, batch=True)["first"].shape == (1, 2)

    def process(self, feed_batch, typical_logid=0):
        assert self._fetch_names == self.client.fetch_names_ == ["first"], self._fetch_names
        return self.client.predict(
            feed=feed_batch[0], fetch=self._fetch_names, batch=True, log_id=typical_logid), 0, ""


class Inherited(Base):
    def process(self, feed_batch, typical_logid=0):
        return super().process(feed_batch, typical_logid)


class OnLoop(Base):
    async def process(self, feed_batch, typical_logid=0):
        return await self.client.predict(feed_batch[0])


class Created(Base):
    def init_op(self):
        self.client = LocalServiceHandler("model").get_client(self.concurrency_idx)


class PipelineService(WebService):
    def get_pipeline_response(self, read_op):
        ops = [make(name=make.__name__, input_ops=[read_op]) for make in (Printed, Sample, Release, Inherited, OnLoop)]
        ops.append(Base(name="Handler", input_ops=[read_op], local_service_handler=LocalServiceHandler("model")))
        ops.append(Created(name="Created", input_ops=[read_op]))
        return Joined(name="joined", input_ops=ops)


class Joined(Op):
    def preprocess(self, input_dicts, data_id, log_id):
        return {key: value for one in input_dicts.values() for key, value in one.items()}, False, None, ""


service = PipelineService(name="all")
service.prepare_pipeline_config("config.yml")
service.run_service()
"""
"""Ops that run their model in each way that scripts for Paddle Serving do."""

WAYS = ["Printed", "Sample", "Release", "Inherited", "OnLoop", "Handler", "Created"]
MODEL = "local_service_conf: {model_config: model, client_type: local_predictor}"


@pytest.mark.parametrize("is_thread_op", ["true", "false"], ids=["threads", "processes"])
def test_a_process_of_a_script_runs_the_model_with_a_client(tmp_path: Path, is_thread_op: str) -> None:
    (layer,) = layers(1)
    write_described(tmp_path / "model", layer)
    (tmp_path / "web_service.py").write_text(PROCESSES)
    ops = "".join(f"  {name}: {{{MODEL}}}\n" for name in WAYS[:5])
    (tmp_path / "config.yml").write_text(
        f"rpc_port: 1\nhttp_port: 2\nworker_num: 4\ndag: {{is_thread_op: {is_thread_op}}}\nop:\n{ops}"
    )
    with running_service(tmp_path) as server:
        body = {"key": ["x"], "value": ["1,2,3"]}
        answer = httpx.post(f"{server.rest}/all/prediction", json=body, timeout=60, trust_env=False).json()
        wrong = {"key": ["x"], "value": ["1,2"]}
        refused = httpx.post(f"{server.rest}/all/prediction", json=wrong, timeout=60, trust_env=False).json()
    expected = str(layer.of(np.array([[1, 2, 3]])).round(1).tolist())
    assert (answer["err_no"], answer["err_msg"]) == (0, "")
    assert dict(zip(answer["key"], answer["value"], strict=True)) == dict.fromkeys(WAYS, expected)
    assert refused["err_no"] == 5000, refused
