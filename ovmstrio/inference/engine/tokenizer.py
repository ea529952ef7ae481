"""Tokenizer of openvino-genai without a bound on the length of texts.

The library's tokenizer of a GGUF file keeps the last 8192 tokens of a text, and earlier versions of openvino_tokenizers
wrote the model's maximum length into the file.  Both cut longer texts without an error, whatever is requested.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final
from xml.etree import ElementTree as ET

import numpy as np
import openvino_genai as genai

from ovmstrio.inference.engine.messages import TOKENIZER_FILE
from ovmstrio.util.regular_files import read_regular_bytes

_WEIGHTS: Final = "openvino_tokenizer.bin"
_THREADS: Final = {"INFERENCE_NUM_THREADS": 1}  # its work is shorter than a thread switch
_TYPES: Final = {"i32": np.int32, "i64": np.int64}
_UNIT: Final = " a"


def load_tokenizer(folder: Path) -> Any:
    """Load the library's tokenizer of a model folder, without its bound where that is possible.

    Raises:
        RuntimeError: it cannot be loaded.
    """
    try:
        lifted = _without_bound(folder)
        if lifted is not None:
            with TemporaryDirectory(prefix="ovmstrio-tokenizer-") as copy:
                for file in folder.iterdir():
                    (Path(copy) / file.name).symlink_to(file.absolute())
                _write(Path(copy), *lifted)
                return genai.Tokenizer(copy, _THREADS)
    except (OSError, ValueError, LookupError, ET.ParseError):
        pass  # the library has the error, or loads the file with its bound
    return genai.Tokenizer(folder, _THREADS)


def lift_token_bound(folder: Path) -> None:
    """Remove the bound from the tokenizer of a model folder, if it has one."""
    lifted = _without_bound(folder)
    if lifted is not None:
        _write(folder, *lifted)


def find_token_bound(tokenizer: Any, limit: int) -> int | None:
    """Return the number of tokens to which a tokenizer cuts texts; None if it is more than ``limit``."""
    text = _UNIT * (limit + 1)
    count = _count(tokenizer, text)
    # A tokenizer may drop the text or join unknown letters, whatever their number.
    is_cut = count <= limit and _count(tokenizer, _UNIT) < count == _count(tokenizer, text * 2)
    return count if is_cut else None


def _count(tokenizer: Any, text: str) -> int:
    return int(tokenizer.encode(text, add_special_tokens=False).attention_mask.data.sum())


def _write(folder: Path, model: bytes, weights: bytes) -> None:
    for name, data in ((TOKENIZER_FILE, model), (_WEIGHTS, weights)):
        (folder / name).unlink()
        (folder / name).write_bytes(data)


def _without_bound(folder: Path) -> tuple[bytes, bytes] | None:
    """Return the model and weights of a tokenizer with its bound replaced; None if it has none.

    The bound is a constant: the number of tokens of a text is the minimum of it and the difference of end and begin.
    """
    model = read_regular_bytes(folder / TOKENIZER_FILE)
    if b'"Minimum"' not in model:
        return None
    root = ET.fromstring(model)  # noqa: S314 - expat limits the expansion of entities
    layers = {layer.get("id"): layer for layer in root.iter("layer")}
    edges = [(edge.get("from-layer"), edge.get("to-layer")) for edge in root.iter("edge")]
    weights, is_bounded = read_regular_bytes(folder / _WEIGHTS), False
    for number, layer in layers.items():
        sources = [layers[source] for source, target in edges if target == number]
        if layer.get("type") != "Minimum" or "Subtract" not in {each.get("type") for each in sources}:
            continue
        for constant in sources:
            data = constant.find("data")
            uses = [target for source, target in edges if source == constant.get("id")]
            if constant.get("type") != "Const" or data is None or len(uses) > 1:
                continue
            kind = _TYPES[data.get("element_type", "")]
            count = int(data.get("size", "")) // np.dtype(kind).itemsize
            # Layers may share a place in the weights.
            data.set("offset", str(len(weights)))
            weights += np.full(count, np.iinfo(np.int32).max, kind).tobytes()
            is_bounded = True
    return (ET.tostring(root), weights) if is_bounded else None
