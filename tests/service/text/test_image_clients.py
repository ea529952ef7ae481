from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai import BadRequestError, OpenAI
from openai.types import ImagesResponse
from PIL import Image

from tests.support.served_in_thread import serving_in_thread
from tests.support.tiny_diffusion import SIZE, library_images, write_tiny_diffusion

_GRAPH = """
input_stream: "HTTP_REQUEST_PAYLOAD:input"
output_stream: "HTTP_RESPONSE_PAYLOAD:output"
node: {
  name: "ImageGenExecutor"
  calculator: "ImageGenCalculator"
  input_stream: "HTTP_REQUEST_PAYLOAD:input"
  input_side_packet: "IMAGE_GEN_NODE_RESOURCES:pipes"
  output_stream: "HTTP_RESPONSE_PAYLOAD:output"
  node_options: {
      [type.googleapis.com / mediapipe.ImageGenCalculatorOptions]: {
          models_path: "./"
          device: "CPU"
          default_resolution: "96x32"
          max_num_images_per_prompt: 3
          default_num_inference_steps: 3
      }
  }
}
"""
OPTIONS: dict[str, Any] = {"num_inference_steps": 3, "rng_seed": 11}


def _configure(folder: Path) -> Path:
    write_tiny_diffusion(folder / "painter")
    (write_tiny_diffusion(folder / "graph") / "graph.pbtxt").write_text(_GRAPH)
    config = {
        "model_config_list": [{"config": {"name": "graph", "base_path": "graph"}}],
        "text_model_config_list": [{"config": {"name": "painter", "base_path": "painter"}}],
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder / "config.json"


def _pixels(text: str | None) -> Any:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(text or ""))))


def _file(pixels: Any) -> tuple[str, bytes]:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return "a.png", file.getvalue()


def _vary(client: OpenAI, **fields: Any) -> ImagesResponse:
    with pytest.warns(DeprecationWarning, match="deprecated"):  # the client recommends edits
        return client.images.create_variation(model="painter", **fields)


def test_client_generates_changes_and_streams_the_pictures_of_the_library(tmp_path: Path) -> None:
    image = np.random.default_rng(5).integers(0, 256, (SIZE, SIZE, 3), np.uint8)
    mask = np.zeros((SIZE, SIZE, 4), np.uint8)
    mask[:, SIZE // 2 :, 3] = 255  # the left half is transparent
    extra: dict[str, Any] = {"extra_body": OPTIONS}
    with serving_in_thread(config_path=_configure(tmp_path)) as server:
        with OpenAI(base_url=f"http://{server.http}/v3", api_key="unused", max_retries=0) as client:
            answers = [
                client.images.generate(model="painter", prompt="a cat", n=2, size="48x64", **extra),
                client.images.edit(model="painter", prompt="a cat", image=_file(image), **extra),
                client.images.edit(model="painter", prompt="a cat", image=_file(image), mask=_file(mask), **extra),
                _vary(client, image=_file(image), **extra),
                client.images.generate(model="graph", prompt="a cat", extra_body={"rng_seed": 11}),
            ]
            events = list(client.images.generate(model="painter", prompt="a cat", stream=True, **extra))
            with pytest.raises(BadRequestError, match=r"n must be at most 3 \(max_num_images_per_prompt\); got 4"):
                client.images.generate(model="graph", prompt="a cat", n=4)
            with pytest.raises(BadRequestError, match="Image parsing failed") as refused:
                client.images.edit(model="painter", prompt="a cat", image=("a.png", b"no picture"))
        metrics = server.ask("GET", "/metrics").text

    repainted = np.repeat(255 - mask[..., 3:], 3, 2)
    calls = [
        {"prompt": "a cat", "num_images_per_prompt": 2, "width": 48, "height": 64, **OPTIONS},
        {"prompt": "a cat", "inputs": [image[None]], **OPTIONS},
        {"prompt": "a cat", "inputs": [image[None], repainted[None]], **OPTIONS},
        {"prompt": "", "inputs": [image[None]], **OPTIONS},
        {"prompt": "a cat", "width": 96, "height": 32, **OPTIONS},
        {"prompt": "a cat", **OPTIONS},
    ]
    expected = library_images(tmp_path / "painter", calls, tmp_path)
    made = [np.stack([_pixels(each.b64_json) for each in answer.data or ()]) for answer in answers]
    assert [each.tolist() for each in made] == [each.tolist() for each in expected[:5]]
    assert [answer.size for answer in answers] == ["48x64", *["64x64"] * 3, "96x32"]
    assert events[-1].type == "image_generation.completed"
    assert _pixels(events[-1].b64_json).tolist() == expected[5][0].tolist()
    assert refused.value.param == "image"
    assert 'ovmstrio_image_progress{model_name="painter"} 0.0' in metrics
    assert 'ovms_requests_success{api="V3"' in metrics
