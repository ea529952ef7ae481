"""Stable Diffusion pipeline with a few hundred seeded weights, in Optimum's export layout.

Pictures have seeded noise whose colours depend on the prompt, the seed and every step; a step takes a millisecond.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import numpy as np
import openvino as ov
import openvino.opset13 as op

from tests.support import ir
from tests.support.model_cache import cached_folder
from tests.support.tiny_llm import byte_letters

SIZE: Final = 64
"""Width and height of pictures by default."""

FACTOR: Final = 8
"""Pixels per latent in each direction."""

_END: Final = "<|endoftext|>"
_PLACES: Final = 77
_HIDDEN: Final = 8
_LATENTS: Final = 4

Numbers = np.ndarray[Any, np.dtype[np.float32]]


_REFERENCE: Final = """
import sys, json, numpy as np, openvino as ov, openvino_genai as genai
folder, target = sys.argv[1:]
kinds = (genai.Text2ImagePipeline, genai.Image2ImagePipeline, genai.InpaintingPipeline)
found = []
for call in json.load(sys.stdin):
    inputs = [ov.Tensor(np.array(each, np.uint8)) for each in call.pop("inputs", ())]
    prompt = call.pop("prompt")
    found.append(np.array(kinds[len(inputs)](folder, "CPU").generate(prompt, *inputs, **call).data))
np.savez(target, *found)
"""


def library_images(folder: Path, calls: list[dict[str, Any]], scratch: Path) -> list[Any]:
    """Return the pixels [images, height, width, 3] that openvino-genai generates, with a new pipeline for each call.

    A call has its ``prompt``, generation options, and ``inputs``: the pixels of an image and a mask, or of an image.
    """
    plain = [{**call, "inputs": [each.tolist() for each in call.get("inputs", ())]} for call in calls]
    target = scratch / "library.npz"
    # The library would stay in the process of the tests.
    command = [sys.executable, "-c", _REFERENCE, str(folder), str(target)]
    subprocess.run(command, check=True, timeout=300, capture_output=True, input=json.dumps(plain).encode())
    with np.load(target) as found:
        return [found[f"arr_{number}"] for number in range(len(calls))]


@cached_folder("ovmstrio.samples.transcription.byte_tokenizer", "tests.support.ir")
def write_tiny_diffusion(folder: Path, *, seed: int = 0) -> Path:
    """Write the pipeline: text encoder, tokenizer, U-Net, autoencoder and scheduler."""
    random = np.random.default_rng(seed)
    _write_json(
        folder / "model_index.json",
        {
            "_class_name": "StableDiffusionPipeline",
            "scheduler": ["diffusers", "DDIMScheduler"],
            "text_encoder": ["transformers", "CLIPTextModel"],
            "tokenizer": ["transformers", "CLIPTokenizer"],
            "unet": ["diffusers", "UNet2DConditionModel"],
            "vae": ["diffusers", "AutoencoderKL"],
        },
    )
    _write_json(
        folder / "scheduler" / "scheduler_config.json",
        {
            "_class_name": "DDIMScheduler",
            "beta_end": 0.012,
            "beta_schedule": "scaled_linear",
            "beta_start": 0.00085,
            "clip_sample": False,
            "num_train_timesteps": 1000,
            "prediction_type": "epsilon",
            "set_alpha_to_one": False,
            "steps_offset": 1,
            "timestep_spacing": "leading",
        },
    )
    autoencoder = {
        "in_channels": 3,
        "out_channels": 3,
        "latent_channels": _LATENTS,
        "block_out_channels": [1] * FACTOR.bit_length(),
        "scaling_factor": 0.18215,
    }
    encoder = {"max_position_embeddings": _PLACES, "hidden_size": _HIDDEN, "num_hidden_layers": 1}
    unet = {"in_channels": _LATENTS, "sample_size": SIZE // FACTOR, "time_cond_proj_dim": None}
    _write_part(folder / "text_encoder", _text_encoder(random), encoder)
    _write_part(folder / "unet", _unet(random), unet)
    _write_part(folder / "vae_decoder", _decoder(random), autoencoder)
    _write_part(folder / "vae_encoder", _encoder(random), autoencoder)
    _write_tokenizer(folder / "tokenizer")
    return folder


def _write_json(path: Path, document: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document), encoding="utf-8")


def _write_part(folder: Path, model: ov.Model, config: dict[str, Any]) -> None:
    _write_json(folder / "config.json", config)
    ov.save_model(model, folder / "openvino_model.xml", compress_to_fp16=False)


def _weights(random: np.random.Generator, *shape: int, scale: float = 1.0) -> Numbers:
    return (random.standard_normal(shape) * scale).astype(np.float32)


def _text_encoder(random: np.random.Generator) -> ov.Model:
    ids = ir.parameter("input_ids", [-1, _PLACES], "INT64")
    words = op.gather(op.constant(_weights(random, 257, _HIDDEN)), ids, op.constant(np.int64(0)))
    mixed = op.tanh(op.add(words, op.constant(_weights(random, _PLACES, _HIDDEN))))
    pooled = op.reduce_mean(mixed, np.array([1]))
    return ir.named_model({"last_hidden_state": mixed, "pooler_output": pooled}, [ids])


def _unet(random: np.random.Generator) -> ov.Model:
    """The predicted noise is a mix of neighbours, the time and the mean of the words."""
    sample = ir.parameter("sample", [-1, _LATENTS, -1, -1])
    time = ir.parameter("timestep", [-1], "INT64")
    states = ir.parameter("encoder_hidden_states", [-1, -1, _HIDDEN])
    mixed = _convolution(sample, _weights(random, _LATENTS, _LATENTS, 3, 3, scale=1 / 6), padding=1)
    words = op.matmul(
        op.reduce_mean(states, np.array([1])), op.constant(_weights(random, _HIDDEN, _LATENTS)), False, False
    )
    late = op.divide(op.convert(time, np.float32), np.float32(1000))
    condition = op.unsqueeze(op.add(words, op.unsqueeze(late, np.array([1]))), np.array([2, 3]))
    noise = op.tanh(op.add(mixed, condition))
    return ir.named_model({"out_sample": noise}, [sample, time, states])


def _decoder(random: np.random.Generator) -> ov.Model:
    latents = ir.parameter("latent_sample", [-1, _LATENTS, -1, -1])
    colours = op.tanh(_convolution(latents, _weights(random, 3, _LATENTS, 1, 1, scale=1 / 16)))
    picture = op.interpolate(
        colours, np.array([FACTOR, FACTOR], np.float32), "nearest", "scales", axes=np.array([2, 3])
    )
    return ir.named_model({"sample": picture}, [latents])


def _encoder(random: np.random.Generator) -> ov.Model:
    picture = ir.parameter("sample", [-1, 3, -1, -1])
    small = op.avg_pool(picture, [FACTOR, FACTOR], [0, 0], [0, 0], [FACTOR, FACTOR], False)
    means = _convolution(small, _weights(random, _LATENTS, 3, 1, 1))
    spread = op.multiply(means, np.float32(0))
    return ir.named_model({"latent_parameters": op.concat([means, spread], 1)}, [picture])


def _convolution(node: Any, weights: Numbers, padding: int = 0) -> Any:
    around = [padding, padding]
    return op.convolution(node, op.constant(weights), [1, 1], around, around, [1, 1])


def _write_tokenizer(folder: Path) -> None:
    letters = byte_letters()
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    added = [{"id": len(letters), "content": _END, "special": True}]
    model = {"type": "BPE", "vocab": vocabulary, "merges": []}
    table = folder / "tokenizer.json"
    _write_json(table, {"added_tokens": added, "model": model, "decoder": {"type": "ByteLevel"}})
    _write_json(folder / "tokenizer_config.json", {"model_max_length": _PLACES, "pad_token": _END})
    # The package of tokenizers changes what every core of a process does that imports it.
    command = [sys.executable, "-m", "ovmstrio.samples.transcription.byte_tokenizer", str(table), str(folder)]
    subprocess.run(command, check=True, timeout=300, capture_output=True)
