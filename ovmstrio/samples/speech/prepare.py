"""Preparation of the sample speech: builds Whisper tiny.en's encoder and decoder from its weights."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import openvino as ov
import openvino.opset13 as op

from ovmstrio import Array
from ovmstrio.conversion import save
from ovmstrio.samples.speech import ct2_file

__all__ = ["ENTRIES", "TOKENS", "Transformer", "build_decoder", "build_encoder"]

TOKENS: Final = "tokenizer.json"
_FRAMES: Final = 1500
_MELS: Final = 80


def _ints(*values: int) -> Array:
    return np.array(values, np.int64)


def _constant(values: Array) -> ov.Node:
    return op.constant(np.ascontiguousarray(values.astype(np.float32)))


def _named(node: ov.Node, name: str) -> ov.Node:
    node.output(0).set_names({name})
    return node


@dataclass(frozen=True, slots=True)
class Transformer:
    """Layers of Whisper; ``width`` is the hidden size."""

    weights: Mapping[str, Array]

    @property
    def heads(self) -> int:
        """Return the number of attention heads."""
        return int(self.weights["encoder/num_heads"])

    @property
    def width(self) -> int:
        """Return the hidden size."""
        return int(self.weights["decoder/embeddings/weight"].shape[1])

    @property
    def layers(self) -> range:
        """Return the indices of the layers; encoder and decoder have equally many."""
        return range(sum(name.startswith("decoder/") and name.endswith("ffn/linear_0/bias") for name in self.weights))

    def linear(self, x: ov.Node, name: str, first: int = 0, parts: int | None = None) -> ov.Node:
        """Multiply by (a part of) a weight matrix and add its bias; parts are ``width`` rows each."""
        rows = slice(None) if parts is None else slice(first * self.width, (first + parts) * self.width)
        weight, bias = self.weights[f"{name}/weight"][rows], self.weights[f"{name}/bias"][rows]
        return op.add(op.matmul(x, _constant(weight), transpose_a=False, transpose_b=True), _constant(bias))

    def norm(self, x: ov.Node, name: str) -> ov.Node:
        """Normalise each position, then scale and shift."""
        normal = op.mvn(x, _ints(2), normalize_variance=True, eps=1e-5, eps_mode="inside_sqrt")
        scaled = op.multiply(normal, _constant(self.weights[f"{name}/gamma"]))
        return op.add(scaled, _constant(self.weights[f"{name}/beta"]))

    def split(self, x: ov.Node) -> ov.Node:
        """Split positions by head: [batch, heads, positions, head size]."""
        shape = _ints(0, 0, self.heads, self.width // self.heads)
        return op.transpose(op.reshape(x, shape, special_zero=True), _ints(0, 2, 1, 3))

    def join(self, x: ov.Node) -> ov.Node:
        """Join the heads of every position."""
        return op.reshape(op.transpose(x, _ints(0, 2, 1, 3)), _ints(0, 0, self.width), special_zero=True)

    def _attend(self, parts: tuple[ov.Node, ov.Node, ov.Node], *, causal: bool = False) -> ov.Node:
        return self.join(op.scaled_dot_product_attention(*(self.split(part) for part in parts), causal=causal))

    def look_at_itself(self, x: ov.Node, name: str, *, causal: bool) -> ov.Node:
        """Add self-attention; with ``causal``, positions attend only to earlier ones."""
        y = self.norm(x, f"{name}/layer_norm")
        query, key, value = (self.linear(y, f"{name}/linear_0", part, 1) for part in range(3))
        return op.add(x, self.linear(self._attend((query, key, value), causal=causal), f"{name}/linear_1"))

    def look_at_sound(self, x: ov.Node, hidden: ov.Node, name: str) -> ov.Node:
        """Add cross-attention to the encoder's output."""
        query = self.linear(self.norm(x, f"{name}/layer_norm"), f"{name}/linear_0")
        key, value = (self.linear(hidden, f"{name}/linear_1", part, 1) for part in range(2))
        return op.add(x, self.linear(self._attend((query, key, value)), f"{name}/linear_2"))

    def feed_forward(self, x: ov.Node, name: str) -> ov.Node:
        """Add the feed-forward layer."""
        wide = op.gelu(self.linear(self.norm(x, f"{name}/layer_norm"), f"{name}/linear_0"), "erf")
        return op.add(x, self.linear(wide, f"{name}/linear_1"))


def build_encoder(weights: Mapping[str, Array]) -> ov.Model:
    """Build the encoder: ``mel`` FP32 [1,80,3000], thirty seconds -> ``hidden`` FP32 [1,1500,384]."""
    network = Transformer(weights)
    mel = _named(op.parameter([1, _MELS, 2 * _FRAMES], np.float32, name="mel"), "mel")
    x = mel
    for name, stride in (("conv1", 1), ("conv2", 2)):
        x = op.convolution(x, _constant(weights[f"encoder/{name}/weight"]), [stride], [1], [1], [1])
        x = op.gelu(op.add(x, _constant(weights[f"encoder/{name}/bias"][None, :, None])), "erf")
    x = op.transpose(x, _ints(0, 2, 1))
    x = op.add(x, _constant(weights["encoder/position_encodings/encodings"]))
    for layer in network.layers:
        x = network.look_at_itself(x, f"encoder/layer_{layer}/self_attention", causal=False)
        x = network.feed_forward(x, f"encoder/layer_{layer}/ffn")
    hidden = _named(network.norm(x, "encoder/layer_norm"), "hidden")
    return ov.Model([op.result(hidden)], [mel], "whisper-encoder")


def build_decoder(weights: Mapping[str, Array]) -> ov.Model:
    """Build the decoder: ``input_ids`` INT64 [1,-1], ``hidden`` -> ``logits`` FP32 [1,51864] of the next token."""
    network = Transformer(weights)
    ids = _named(op.parameter(ov.PartialShape([1, -1]), np.int64, name="input_ids"), "input_ids")
    hidden = _named(op.parameter([1, _FRAMES, network.width], np.float32, name="hidden"), "hidden")
    table = _constant(weights["decoder/embeddings/weight"])
    length = op.gather(op.shape_of(ids), _ints(1), _ints(0))
    places = _constant(weights["decoder/position_encodings/encodings"])
    x = op.add(op.gather(table, ids, _ints(0)), op.slice(places, _ints(0), length, _ints(1), _ints(0)))
    for layer in network.layers:
        x = network.look_at_itself(x, f"decoder/layer_{layer}/self_attention", causal=True)
        x = network.look_at_sound(x, hidden, f"decoder/layer_{layer}/attention")
        x = network.feed_forward(x, f"decoder/layer_{layer}/ffn")
    last = op.gather(network.norm(x, "decoder/layer_norm"), np.int64(-1), np.int64(1))
    logits = _named(op.matmul(last, table, transpose_a=False, transpose_b=True), "logits")
    return ov.Model([op.result(logits)], [ids, hidden], "whisper-decoder")


def _write(build: Callable[[Mapping[str, Array]], ov.Model]) -> Callable[[Path, Path], None]:
    def write(files: Path, directory: Path) -> None:
        save(build(ct2_file.read(files / "model.bin")), directory, fp16=True)
        shutil.copyfile(files / TOKENS, directory / TOKENS)

    return write


ENTRIES = {"speech_encoder": _write(build_encoder), "speech_decoder": _write(build_decoder)}
