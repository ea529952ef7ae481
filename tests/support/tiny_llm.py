"""A language model of 0.2 million seeded weights, which any engine loads and steps within milliseconds.

Its text is noise, the same one each time: 267 tokens, which are all bytes, a few words and the marks of ChatML.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Final

import gguf
import numpy as np
import openvino as ov
import openvino.opset13 as op

from ovmstrio.inference.runtime import core
from ovmstrio.inference.text_models import load_tokenizer_operations
from tests.support.model_cache import cached_folder

CONTEXT: Final = 2048
"""Maximum number of tokens of the model."""

CHAT_TEMPLATE: Final = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_MARKS: Final = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_MERGES: Final = (("t", "h"), ("th", "e"), ("i", "n"), ("e", "r"), ("a", "n"), ("o", "n"), ("Ġ", "t"), ("Ġ", "a"))
_HIDDEN: Final = 64
_FORWARD: Final = 128
_HEADS: Final = 4
_CONVERT: Final = "import sys, openvino_genai as g; g.LLMPipeline(sys.argv[1], 'CPU', enable_save_ov_model=True)"


def byte_letters() -> list[str]:
    """Return the letters that byte-level tokenizers write bytes as, by byte."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in shown}
    for number, byte in enumerate(byte for byte in range(256) if byte not in letters):
        letters[byte] = chr(256 + number)
    return [letters[byte] for byte in range(256)]


VOCABULARY: Final = (*_MARKS, *byte_letters(), *(left + right for left, right in _MERGES))
"""The tokens, by their numbers; the second one ends a text."""


def write_tiny_gguf(path: Path, *, seed: int = 0, layers: int = 2, context: int = CONTEXT) -> Path:
    writer = gguf.GGUFWriter(str(path), "llama")
    _write_settings(writer, layers, context)
    _write_tokenizer(writer)
    _write_weights(writer, np.random.default_rng(seed), layers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@cached_folder()
def write_tiny_folder(directory: Path, *, seed: int = 0, layers: int = 2, context: int = CONTEXT) -> Path:
    """Write the model, its tokenizer and detokenizer as OpenVINO's IR, the folder that openvino-genai loads."""
    directory.mkdir(parents=True, exist_ok=True)
    source = write_tiny_gguf(directory / "tiny.gguf", seed=seed, layers=layers, context=context)
    subprocess.run([sys.executable, "-c", _CONVERT, str(source)], check=True, timeout=120, capture_output=True)
    source.unlink()
    (directory / "config.json").write_text(json.dumps({"max_position_embeddings": context}))
    return directory


def bound_tokenizer(folder: Path, tokens: int, *, by_minimum: bool = True) -> Path:
    """Replace the bound of a folder's tokenizer, which keeps the last tokens of a text; return the folder.

    Args:
        folder: of a tiny model.
        tokens: the new bound.
        by_minimum: as converters write it; otherwise by operations that no converter writes.
    """
    load_tokenizer_operations()
    file = folder / "openvino_tokenizer.xml"
    tokenizer = core().read_model(file.read_bytes(), file.with_suffix(".bin").read_bytes())
    (minimum,) = (node for node in tokenizer.get_ops() if node.get_type_name() == "Minimum")
    length, bound = minimum.input_value(0), op.constant(np.int32(tokens))
    if by_minimum:
        minimum.input(1).replace_source_output(bound.output(0))
    else:
        minimum.output(0).replace(op.select(op.less(length, bound), length, bound).output(0))
    ov.save_model(tokenizer, file)
    return folder


def _write_settings(writer: gguf.GGUFWriter, layers: int, context: int) -> None:
    writer.add_context_length(context)
    writer.add_embedding_length(_HIDDEN)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(_FORWARD)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(_HIDDEN // _HEADS)
    writer.add_vocab_size(len(VOCABULARY))
    writer.add_file_type(1)


def _write_tokenizer(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(list(VOCABULARY))
    writer.add_token_types([3] * len(_MARKS) + [1] * (len(VOCABULARY) - len(_MARKS)))
    writer.add_token_merges([f"{left} {right}" for left, right in _MERGES])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(value=False)
    writer.add_chat_template(CHAT_TEMPLATE)


def _write_weights(writer: gguf.GGUFWriter, random: np.random.Generator, layers: int) -> None:
    def add(name: str, rows: int, columns: int, scale: float) -> None:
        weights = random.standard_normal((rows, columns)) * scale / math.sqrt(columns)
        writer.add_tensor(f"{name}.weight", weights.astype(np.float16))

    add("token_embd", len(VOCABULARY), _HIDDEN, math.sqrt(_HIDDEN))
    for layer in range(layers):
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{norm}.weight", np.ones(_HIDDEN, np.float32))
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add(f"blk.{layer}.{name}", _HIDDEN, _HIDDEN, 0.6)
        add(f"blk.{layer}.ffn_gate", _FORWARD, _HIDDEN, 0.6)
        add(f"blk.{layer}.ffn_up", _FORWARD, _HIDDEN, 0.6)
        add(f"blk.{layer}.ffn_down", _HIDDEN, _FORWARD, 0.6)
    writer.add_tensor("output_norm.weight", np.ones(_HIDDEN, np.float32))
    add("output", len(VOCABULARY), _HIDDEN, 3.0)
