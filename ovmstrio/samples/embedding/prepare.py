"""Preparation of the sample embedding: builds the BERT encoder of all-MiniLM-L6-v2 with pooling from its weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino.opset13 as op

from ovmstrio import Array
from ovmstrio.conversion import save
from ovmstrio.samples.embedding import safetensors

__all__ = ["ENTRIES", "build"]


def _ints(*values: int) -> Array:
    return np.array(values, np.int64)


def _constant(values: Array) -> ov.Node:
    return op.constant(np.ascontiguousarray(values))


def _input(name: str) -> ov.Node:
    node = op.parameter(ov.PartialShape([-1, -1]), np.int64, name=name)
    node.output(0).set_names({name})
    return node


@dataclass(frozen=True, slots=True)
class _Encoder:
    """Layers of a BERT encoder; shapes have ``N`` texts, ``T`` tokens and hidden size ``H``."""

    weights: Mapping[str, Array]
    hidden: int
    heads: int
    epsilon: float

    def linear(self, x: ov.Node, name: str) -> ov.Node:
        """Multiply by a weight matrix and add a bias."""
        transposed = {"transpose_a": False, "transpose_b": True}
        product = op.matmul(x, _constant(self.weights[f"{name}.weight"]), **transposed)
        return op.add(product, _constant(self.weights[f"{name}.bias"]))

    def norm(self, x: ov.Node, name: str) -> ov.Node:
        """Normalise each token, then scale and shift."""
        normal = op.mvn(x, _ints(2), normalize_variance=True, eps=self.epsilon, eps_mode="inside_sqrt")
        scaled = op.multiply(normal, _constant(self.weights[f"{name}.weight"]))
        return op.add(scaled, _constant(self.weights[f"{name}.bias"]))

    def embed(self, ids: ov.Node) -> ov.Node:
        """Add word and position embeddings: [N,T] -> [N,T,H]."""
        table = "embeddings.{}_embeddings.weight"
        length = op.gather(op.shape_of(ids), _ints(1), _ints(0))
        positions = op.slice(_constant(self.weights[table.format("position")]), _ints(0), length, _ints(1), _ints(0))
        words = op.gather(_constant(self.weights[table.format("word")]), ids, _ints(0))
        first_text = _constant(self.weights[table.format("token_type")][0])
        return self.norm(op.add(op.add(words, first_text), positions), "embeddings.LayerNorm")

    def _split(self, x: ov.Node) -> ov.Node:
        size = self.hidden // self.heads
        apart = op.reshape(x, _ints(0, 0, self.heads, size), special_zero=True)
        return op.transpose(apart, _ints(0, 2, 1, 3))

    def layer(self, x: ov.Node, bias: ov.Node, prefix: str) -> ov.Node:
        """Apply attention and feed-forward; ``bias`` masks the padding."""
        parts = (self._split(self.linear(x, f"{prefix}attention.self.{part}")) for part in ("query", "key", "value"))
        seen = op.transpose(op.scaled_dot_product_attention(*parts, bias), _ints(0, 2, 1, 3))
        seen = op.reshape(seen, _ints(0, 0, self.hidden), special_zero=True)
        x = op.add(self.linear(seen, f"{prefix}attention.output.dense"), x)
        x = self.norm(x, f"{prefix}attention.output.LayerNorm")
        wide = op.gelu(self.linear(x, f"{prefix}intermediate.dense"), "erf")
        return self.norm(op.add(self.linear(wide, f"{prefix}output.dense"), x), f"{prefix}output.LayerNorm")


def _pool(x: ov.Node, mask: ov.Node) -> ov.Node:
    """Average the tokens that are not padding and normalise to length one: [N,T,H] -> [N,H]."""
    mask = op.unsqueeze(mask, _ints(2))
    total = op.reduce_sum(op.multiply(x, mask), _ints(1), keep_dims=False)
    count = op.maximum(op.reduce_sum(mask, _ints(1), keep_dims=False), np.float32(1e-9))
    return op.normalize_l2(op.divide(total, count), _ints(1), 1e-12, "add")


def build(files: Path) -> ov.Model:
    """Build the model: ``input_ids``, ``attention_mask`` INT64 [-1,-1] -> ``sentence_embedding`` FP32 [-1,384]."""
    settings: dict[str, Any] = json.loads((files / "config.json").read_text(encoding="utf-8"))
    weights = safetensors.read(files / "model.safetensors")
    encoder = _Encoder(
        weights, settings["hidden_size"], settings["num_attention_heads"], float(settings["layer_norm_eps"])
    )
    ids, mask = _input("input_ids"), _input("attention_mask")
    present = op.convert(mask, np.float32)
    bias = op.unsqueeze(op.multiply(op.subtract(present, np.float32(1)), np.float32(1e4)), _ints(1, 2))
    x = encoder.embed(ids)
    for layer in range(settings["num_hidden_layers"]):
        x = encoder.layer(x, bias, f"encoder.layer.{layer}.")
    embedding = _pool(x, present)
    embedding.output(0).set_names({"sentence_embedding"})
    return ov.Model([op.result(embedding)], [ids, mask], "all-MiniLM-L6-v2")


def write(files: Path, directory: Path) -> None:
    """Write the version directory: the model in FP16, and ``tokenizer.json`` for clients."""
    save(build(files), directory, fp16=True)
    shutil.copyfile(files / "tokenizer.json", directory / "tokenizer.json")


ENTRIES = {"embedding": write}
