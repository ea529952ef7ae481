from __future__ import annotations

import base64
import io
from pathlib import Path

import httpx
import numpy as np
from PIL import Image

from tests.support.processes import serving
from tests.support.tiny_diffusion import SIZE, write_tiny_diffusion
from tests.support.waits import until
from tests.support.worker_clients import each_worker


def _file_of_noise() -> bytes:
    file = io.BytesIO()
    pixels = np.random.default_rng(1).integers(0, 256, (SIZE, SIZE, 3), np.uint8)
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()


def _images(answer: httpx.Response) -> list[bytes]:
    return [base64.b64decode(each["b64_json"]) for each in answer.raise_for_status().json()["data"]]


def test_all_workers_generate_and_edit_with_one_engine(tmp_path: Path) -> None:
    folder, image = write_tiny_diffusion(tmp_path / "painter"), _file_of_noise()
    body = {"model": "painter", "prompt": "a cat", "seed": 3, "num_inference_steps": 2, "n": 2}
    options = ("--model_name", "painter", "--model_path", str(folder), "--workers", "2")
    with serving(*options, log=tmp_path / "log") as server:
        until(lambda: server.answers("/v2/health/ready"))
        with each_worker(server) as clients:
            generated = [_images(client.post("/v3/images/generations", json=body)) for client in clients]
            form = {**body, "n": 1}
            edits = [client.post("/v3/images/edits", data=form, files={"image": image}) for client in clients]
            edited = [_images(answer) for answer in edits]
            engines = server.descendants("image_program")
    assert len(engines) == 1
    assert generated[0] == generated[1]
    assert len(set(generated[0])) == 2
    assert edited[0] == edited[1] != generated[0][:1]
