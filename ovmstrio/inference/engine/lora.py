"""LoRA adapters: their files and scale, and the check that every tensor fits a layer of the model.

openvino-genai skips tensors without a matching layer (one line on stderr) and ignores the scale in the files.
"""

from __future__ import annotations

import json
import math
import struct
from collections import defaultdict
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

import openvino as ov

from ovmstrio.inference.engine.messages import ADAPTER_FILE, LANGUAGE_MODEL_FILE
from ovmstrio.util.regular_files import open_regular, read_regular_text
from ovmstrio.util.truncation import cut

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

_CONFIG: Final = "adapter_config.json"
_KIND: Final = "LORA"
_PREFIX: Final = "base_model.model."  # of peft's names; openvino-genai skips tensors without it
_SUFFIXES: Final = {".lora_A.weight": 0, ".lora_B.weight": 1}
_TYPES: Final = frozenset({"F32", "F16", "BF16"})
_MAX_HEADER_BYTES: Final = 2**26
_LENGTH: Final = struct.Struct("<Q")
_MAX_SHOWN: Final = 5
_DIMENSIONS: Final = 2


class _Tensor(NamedTuple):
    dtype: str
    shape: tuple[int, ...]


class _Matrices(NamedTuple):
    """Shapes of A [rank, inputs] and B [outputs, rank] of a layer."""

    down: tuple[int, ...]
    up: tuple[int, ...]


class LoraAdapter(NamedTuple):
    """An adapter that fits its model."""

    file: Path
    scale: float  # factor of B x A


def read_adapter(path: Path, model: Path) -> LoraAdapter:
    """Read the adapter in a folder, or in a ``.safetensors`` file, and check it against a model. Blocks.

    Raises:
        ValueError: the adapter is damaged, or has tensors that cannot be applied to the model; the message names them.
        OSError: a file cannot be read.
    """
    file = path / ADAPTER_FILE if path.is_dir() else path
    layers, faults = _layers(_tensors(file))
    if layers and not faults:
        faults += _mismatches(layers, _weights(model))
    if faults or not layers:
        raise ValueError(f"LoRA adapter {path}: {_join_problems(faults) or 'no tensors'}")
    return LoraAdapter(file, _scale(file.with_name(_CONFIG), {each.down[0] for each in layers.values()}))


def _join_problems(faults: list[str]) -> str:
    shown = "; ".join(cut(each, 200) for each in islice(faults, _MAX_SHOWN))
    return shown + (f"; and {len(faults) - _MAX_SHOWN} more" if len(faults) > _MAX_SHOWN else "")


def _tensors(file: Path) -> dict[str, _Tensor]:
    """Return the tensors in the header of a safetensors file."""
    with open_regular(file) as opened:
        start = opened.read(_LENGTH.size)
        size = _LENGTH.unpack(start)[0] if len(start) == _LENGTH.size else 0
        data = opened.read(size) if size <= _MAX_HEADER_BYTES else b""
        left = opened.seek(0, 2) - _LENGTH.size - size
    try:
        header = json.loads(data)
        header.pop("__metadata__", None)
        found = {name: _Tensor(each["dtype"], tuple(each["shape"])) for name, each in header.items()}
        end = max((each["data_offsets"][1] for each in header.values()), default=0)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        raise ValueError(f"LoRA adapter {file}: expected a safetensors file, got a damaged header") from None
    if end > left:
        raise ValueError(f"LoRA adapter {file}: truncated, expected {end} bytes of tensors, got {max(left, 0)}")
    return found


def _layers(tensors: dict[str, _Tensor]) -> tuple[dict[str, _Matrices], list[str]]:
    """Return the matrices by layer, and the problems of other tensors."""
    found: defaultdict[str, list[tuple[int, ...]]] = defaultdict(lambda: [(), ()])
    faults = []
    for name, tensor in sorted(tensors.items()):
        end = next((each for each in _SUFFIXES if name.endswith(each)), "")
        if not end or not name.startswith(_PREFIX):
            expected = " or ".join(f"{_PREFIX}LAYER{each}" for each in _SUFFIXES)
            faults.append(f"{name}: unsupported tensor, expected {expected}")
        elif tensor.dtype not in _TYPES or len(tensor.shape) != _DIMENSIONS:
            faults.append(f"{name}: expected F32, F16 or BF16 [?,?], got {tensor.dtype} {list(tensor.shape)}")
        else:
            found[name.removeprefix(_PREFIX).removesuffix(end)][_SUFFIXES[end]] = tensor.shape
    layers = {layer: _Matrices(*shapes) for layer, shapes in found.items()}
    if not faults:
        faults += [f"{_PREFIX}{layer}: A or B is missing" for layer, each in layers.items() if not all(each)]
    return layers, faults


def _weights(model: Path) -> list[tuple[str, int, int]]:
    """Return name, inputs and outputs of each matrix multiplication of a model with constant weights."""
    found = []
    file = next(file for file in (model / LANGUAGE_MODEL_FILE, model / "openvino_model.xml") if file.is_file())
    for node in ov.Core().read_model(file).get_ops():
        if node.get_type_name() == "MatMul" and (shape := node.input_value(1).get_partial_shape()).is_static:
            first, last = [each.get_length() for each in shape][-_DIMENSIONS:]
            inputs, outputs = (last, first) if node.get_attributes()["transpose_b"] else (first, last)
            found.append((node.get_friendly_name(), inputs, outputs))
    return found


def _mismatches(layers: dict[str, _Matrices], weights: Iterable[tuple[str, int, int]]) -> list[str]:
    """Return the problems of layers that the model lacks or has with another size.

    openvino-genai looks the name of a layer up in the names of operations, also in those with ``_`` for ``.``.
    """
    named = [(name, name.replace(".", "_"), size) for name, *size in weights]
    faults = []
    for layer, (down, up) in layers.items():
        sizes = [size for name, plain, size in named if layer in name or layer in plain]
        given = [down[1], up[0]]
        if not sizes:
            faults.append(f"{_PREFIX}{layer}: the model has no such layer")
        elif down[0] != up[1] or any(size != given for size in sizes):
            expected = f"expected A [rank,{sizes[0][0]}] and B [{sizes[0][1]},rank]"
            faults.append(f"{_PREFIX}{layer}: {expected}, got {list(down)} and {list(up)}")
    return faults


def _scale(config: Path, ranks: set[int]) -> float:
    """Return the scale of all layers by peft's settings; 1 without such a file."""
    if not config.is_file():
        return 1.0
    try:
        settings = json.loads(read_regular_text(config))
        scales = {settings["lora_alpha"] / (math.sqrt(rank) if settings.get("use_rslora") else rank) for rank in ranks}
        kind = "DORA" if settings.get("use_dora") else settings.get("peft_type", _KIND)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        raise ValueError(f"LoRA adapter {config}: expected settings of peft with lora_alpha") from None
    if kind != _KIND:
        raise ValueError(f"LoRA adapter {config}: expected peft_type {_KIND}, got {kind}")
    if len(scales) > 1 or settings.get("alpha_pattern"):
        raise ValueError(f"LoRA adapter {config}: layers have different scales, expected one lora_alpha and rank")
    return float(*scales)
