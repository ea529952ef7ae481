"""Small LoRA adapters of random weights, a tiny model with the layers' names of Hugging Face, and the two merged."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import openvino as ov

from tests.support.model_cache import cached_folder
from tests.support.tiny_llm import write_tiny_folder

Matrices = dict[str, npt.NDArray[np.float32]]

PRECISE: Final = {
    "INFERENCE_PRECISION_HINT": "f32",
    "KV_CACHE_PRECISION": "f32",
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
}
"""Properties of exact arithmetic."""

_MODEL: Final = "openvino_model.xml"
_PREFIX: Final = "base_model.model."
_SIZES: Final = {"self_attn.q_proj": (64, 64), "self_attn.v_proj": (64, 64), "mlp.down_proj": (128, 64)}
_LAYER: Final = re.compile(r"model\.layers\[(\d+)\]\.(.*)\.weight")


@cached_folder("tests.support.tiny_llm")
def write_named_folder(directory: Path, *, seed: int = 0) -> Path:
    """Write the tiny model with the names that Optimum gives to the operations of layers."""
    write_tiny_folder(directory, seed=seed)
    model = ov.Core().read_model(directory / _MODEL)
    for node, weight in _products(model):
        if found := _LAYER.fullmatch(weight.get_friendly_name()):
            node.set_friendly_name(f"__module.model.layers.{found[1]}.{found[2]}/ov_ext::linear/MatMul")
    _save(model, directory)
    return directory


def write_merged_folder(directory: Path, matrices: Matrices, scale: float) -> Path:
    """Write the model of :func:`write_named_folder` with an adapter added to its weights."""
    write_named_folder(directory)
    model = ov.Core().read_model(directory / _MODEL)
    for node, weight in _products(model):
        layer = node.get_friendly_name().partition("/")[0].removeprefix("__module.")
        if f"{_PREFIX}{layer}.lora_A.weight" in matrices:
            down, up = (matrices[f"{_PREFIX}{layer}.lora_{each}.weight"] for each in "AB")
            merged = weight.get_data().astype(np.float32) + np.float32(scale) * (up @ down)
            node.input(1).replace_source_output(ov.opset13.constant(merged).output(0))
    _save(model, directory)
    return directory


def quantize(directory: Path) -> Path:
    """Replace the weights of a model by 8-bit ones."""
    model = ov.Core().read_model(directory / _MODEL)
    for node, weight in _products(model):
        values = weight.get_data().astype(np.float32)
        scale = np.abs(values).max(axis=1, keepdims=True) / 127
        low = ov.opset13.convert(ov.opset13.constant(np.round(values / scale).astype(np.int8)), np.float32)
        node.input(1).replace_source_output(ov.opset13.multiply(low, ov.opset13.constant(scale)).output(0))
    _save(model, directory)
    return directory


def _products(model: ov.Model) -> list[tuple[ov.Node, ov.Node]]:
    """Return the products with constant weights of two dimensions, and these."""
    found = []
    for node in model.get_ops():
        weight = node.input_value(1).get_node() if node.get_type_name() == "MatMul" else node
        while weight.get_type_name() in {"Convert", "Multiply"}:
            weight = weight.input_value(0).get_node()
        if node.get_type_name() == "MatMul" and weight.get_type_name() == "Constant" and len(weight.shape) == 2:
            found.append((node, weight))
    return found


def _save(model: ov.Model, directory: Path) -> None:
    # The weights of the model are those of the file that is replaced.
    target = directory / "saved"
    ov.save_model(model, target / _MODEL, compress_to_fp16=False)
    for file in target.iterdir():
        file.rename(directory / file.name)
    target.rmdir()


def random_matrices(*, seed: int = 0, rank: int = 4, layers: int = 2) -> Matrices:
    random = np.random.default_rng(seed)
    found: Matrices = {}
    for layer in range(layers):
        for name, (inputs, outputs) in _SIZES.items():
            for part, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                key = f"{_PREFIX}model.layers.{layer}.{name}.lora_{part}.weight"
                found[key] = (random.standard_normal(shape) * 0.2).astype(np.float32)
    return found


def write_adapter(directory: Path, matrices: Matrices, **settings: object) -> Path:
    """Write a folder in peft's format; with ``lora_alpha`` and the like, its settings, too."""
    directory.mkdir(parents=True, exist_ok=True)
    header, content = {}, b""
    for name, values in matrices.items():
        end = len(content) + values.nbytes
        header[name] = {"dtype": "F32", "shape": list(values.shape), "data_offsets": [len(content), end]}
        content += values.tobytes()
    head = json.dumps(header).encode()
    (directory / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + content)
    if settings:
        (directory / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", **settings}))
    return directory
