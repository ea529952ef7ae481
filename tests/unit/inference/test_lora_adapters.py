from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
import openvino as ov
import pytest

from ovmstrio.inference.engine.lora import read_adapter
from tests.support.lora_adapters import Matrices, random_matrices, write_adapter

_QUERY: Final = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
_SIZES: Final = {"self_attn.q_proj": (64, 64), "self_attn.v_proj": (64, 64), "mlp.down_proj": (128, 64)}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Write a model with the layers of the adapters; in one of two the weights are transposed."""
    results = []
    for layer in range(2):
        for name, (inputs, outputs) in _SIZES.items():
            shape = (outputs, inputs) if layer else (inputs, outputs)
            given = ov.opset13.parameter([-1, inputs], np.float32)
            product = ov.opset13.matmul(given, np.zeros(shape, np.float32), transpose_a=False, transpose_b=bool(layer))
            product.set_friendly_name(f"__module.model.layers.{layer}.{name}/ov_ext::linear/MatMul")
            results.append((product, given))
    found = ov.Model([product for product, _ in results], [given for _, given in results])
    ov.save_model(found, tmp_path / "model" / "openvino_model.xml", compress_to_fp16=False)
    return tmp_path / "model"


@pytest.mark.parametrize(
    ("settings", "scale"),
    [
        ({}, 1.0),
        ({"r": 4, "lora_alpha": 16}, 4.0),
        ({"r": 4, "lora_alpha": 16, "use_rslora": True, "alpha_pattern": {}}, 8.0),
    ],
    ids=["none", "peft", "rslora"],
)
def test_scale_is_that_of_peft(tmp_path: Path, model: Path, settings: dict[str, Any], scale: float) -> None:
    adapter = write_adapter(tmp_path / "adapter", random_matrices(), **settings)
    assert read_adapter(adapter, model) == (adapter / "adapter_model.safetensors", scale)


def _without(name: str) -> Matrices:
    return {key: value for key, value in random_matrices().items() if key != name}


@pytest.mark.parametrize(
    ("matrices", "settings", "message"),
    [
        (random_matrices(layers=4), {}, r"layers.2.mlp.down_proj: the model has no such layer; .*; and 1 more$"),
        (
            {**random_matrices(), _QUERY: np.zeros((4, 60), np.float32)},
            {},
            r"layers.0.self_attn.q_proj: expected A \[rank,64\] and B \[64,rank\], got \[4, 60\] and \[64, 4\]$",
        ),
        (
            {**random_matrices(), _QUERY: np.zeros((3, 64), np.float32)},
            {},
            r"layers.0.self_attn.q_proj: expected .*, got \[3, 64\] and \[64, 4\]$",
        ),
        (_without(_QUERY), {}, "layers.0.self_attn.q_proj: A or B is missing$"),
        (
            {**random_matrices(), "base_model.model.lm_head.weight": np.zeros((4, 4), np.float32)},
            {},
            "base_model.model.lm_head.weight: unsupported tensor, expected base_model.model.LAYER.lora_A.weight",
        ),
        ({**random_matrices(), _QUERY: np.zeros(4, np.float32)}, {}, r"F32, F16 or BF16 \[\?,\?\], got F32 \[4\]$"),
        ({}, {}, "no tensors$"),
        (random_matrices(), {"lora_alpha": 8, "use_dora": True}, "expected peft_type LORA, got DORA$"),
        (random_matrices(), {"lora_alpha": 8, "peft_type": "LOHA"}, "expected peft_type LORA, got LOHA$"),
        (random_matrices(), {"r": 4}, "expected settings of peft with lora_alpha$"),
        (random_matrices(), {"lora_alpha": 8, "alpha_pattern": {"q_proj": 1}}, "layers have different scales"),
        (
            {**random_matrices(), **random_matrices(layers=1, rank=2)},
            {"lora_alpha": 8},
            "layers have different scales, expected one lora_alpha and rank$",
        ),
    ],
    ids=["layer", "size", "rank", "half", "other", "shape", "empty", "dora", "kind", "alpha", "pattern", "ranks"],
)
def test_adapter_that_does_not_fit_is_refused_with_its_tensors(
    tmp_path: Path, model: Path, matrices: Matrices, settings: dict[str, Any], message: str
) -> None:
    adapter = write_adapter(tmp_path / "adapter", matrices, **settings)
    with pytest.raises(ValueError, match=f"^LoRA adapter .*{message}"):
        read_adapter(adapter, model)


@pytest.mark.parametrize("content", [b"", b"\xff" * 40, b"\x02" + bytes(7) + b"[]"], ids=["empty", "noise", "list"])
def test_damaged_adapter_is_refused(tmp_path: Path, model: Path, content: bytes) -> None:
    file = tmp_path / "adapter.safetensors"
    file.write_bytes(content)
    with pytest.raises(ValueError, match="expected a safetensors file, got a damaged header"):
        read_adapter(file, model)


def test_truncated_adapter_is_refused(tmp_path: Path, model: Path) -> None:
    file = write_adapter(tmp_path, random_matrices()) / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"truncated, expected \d+ bytes of tensors, got \d+"):
        read_adapter(file, model)
