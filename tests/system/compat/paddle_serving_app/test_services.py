from __future__ import annotations

import base64
from pathlib import Path

import cv2
import httpx
import numpy as np

from tests.support.service_processes import running_service

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
    """A script with all readers, ``np.fromstring`` and lists of scalars in its answers runs as it is."""
    (tmp_path / "web_service.py").write_text(SCRIPT)
    (tmp_path / "config.yml").write_text("rpc_port: 1\nhttp_port: 2\nworker_num: 1\ndag:\n  is_thread_op: false\n")
    image = cv2.imencode(".png", np.full((20, 30, 3), (255, 0, 51), np.uint8))[1].tobytes()
    body = {"key": ["image"], "value": [base64.b64encode(image).decode()]}
    with running_service(tmp_path) as server:
        answer = httpx.post(f"{server.rest}/mean/prediction", json=body, timeout=60, trust_env=False).json()
    assert (answer["err_no"], answer["value"]) == (0, ["[0.2, 0.0, 1.0]"])
