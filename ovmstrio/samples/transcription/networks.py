"""Whisper's models as Optimum exports them: an encoder and a stateful decoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import openvino as ov
import openvino.opset13 as op

from ovmstrio import Array
from ovmstrio.samples.speech.prepare import Transformer

__all__ = ["build_decoder", "build_encoder"]

_STRIDES: Final = (("conv1", 1), ("conv2", 2))


def _ints(*values: int) -> Array:
    return np.array(values, np.int64)


def _input(name: str, shape: list[int], dtype: type[np.generic]) -> ov.Node:
    node = op.parameter(ov.PartialShape(shape), dtype, name=name)
    node.output(0).set_names({name})
    return node


def _result(node: ov.Node, name: str) -> ov.Node:
    node.output(0).set_names({name})
    return op.result(node)


def build_encoder(weights: Mapping[str, Array]) -> ov.Model:
    """Build the encoder: ``input_features`` FP32 [-1,bands,frames] -> ``last_hidden_state`` [-1,frames/2,width]."""
    network = Transformer(weights)
    places = weights["encoder/position_encodings/encodings"]
    bands = weights["encoder/conv1/weight"].shape[1]
    features = _input("input_features", [-1, bands, 2 * len(places)], np.float32)
    x = features
    for name, stride in _STRIDES:
        kernel = op.constant(weights[f"encoder/{name}/weight"].astype(np.float32))
        bias = op.constant(weights[f"encoder/{name}/bias"].astype(np.float32)[None, :, None])
        x = op.gelu(op.add(op.convolution(x, kernel, [stride], [1], [1], [1]), bias), "erf")
    x = op.add(op.transpose(x, _ints(0, 2, 1)), op.constant(places.astype(np.float32)))
    for layer in network.layers:
        x = network.look_at_itself(x, f"encoder/layer_{layer}/self_attention", causal=False)
        x = network.feed_forward(x, f"encoder/layer_{layer}/ffn")
    hidden = network.norm(x, "encoder/layer_norm")
    return ov.Model([_result(hidden, "last_hidden_state")], [features], "whisper-encoder")


@dataclass(slots=True)
class _Memory:
    """States of the decoder, with their assignments."""

    network: Transformer
    ids: ov.Node
    beams: ov.Node
    sinks: list[ov.Node] = field(default_factory=list)

    def read(self, name: str) -> ov.Node:
        """Return the past keys or values, [batch, heads, positions, head size], initially empty."""
        heads, width = self.network.heads, self.network.width // self.network.heads
        batch = op.gather(op.shape_of(self.ids), _ints(0), _ints(0))
        nothing = op.broadcast(np.float32(0), op.concat([batch, op.constant(_ints(heads, 0, width))], 0))
        before = op.read_value(nothing, name, np.float32, ov.PartialShape([-1, heads, -1, width]))
        return op.gather(before, self.beams, _ints(0))

    def write(self, name: str, before: ov.Node, new: ov.Node) -> ov.Node:
        """Append new positions to the past ones."""
        whole = op.concat([before, new], 2)
        self.sinks.append(op.assign(whole, name))
        return whole

    def keep(self, name: str, made: ov.Node) -> ov.Node:
        """Compute a value once and store it."""
        kept = op.read_value(made, name, np.float32, made.get_output_partial_shape(0))
        self.sinks.append(op.assign(kept, name))
        return kept


def _look_back(memory: _Memory, x: ov.Node, layer: int, pasts: tuple[ov.Node, ov.Node], sees: ov.Node) -> ov.Node:
    """Add self-attention of new positions to all earlier ones."""
    network, name = memory.network, f"decoder/layer_{layer}/self_attention"
    y = network.norm(x, f"{name}/layer_norm")
    query, *new = (network.split(network.linear(y, f"{name}/linear_0", part, 1)) for part in range(3))
    key, value = (
        memory.write(f"past.{layer}.{part}", past, made)
        for part, past, made in zip(("key", "value"), pasts, new, strict=True)
    )
    seen = op.scaled_dot_product_attention(query, key, value, sees)
    return op.add(x, network.linear(network.join(seen), f"{name}/linear_1"))


def _listen(memory: _Memory, x: ov.Node, hidden: ov.Node, layer: int) -> ov.Node:
    """Add cross-attention to the encoder's output."""
    network, name = memory.network, f"decoder/layer_{layer}/attention"
    query = network.split(network.linear(network.norm(x, f"{name}/layer_norm"), f"{name}/linear_0"))
    key, value = (
        memory.keep(f"sound.{layer}.{part}", network.split(network.linear(hidden, f"{name}/linear_1", number, 1)))
        for number, part in enumerate(("key", "value"))
    )
    # openvino-genai finds the attention for word timestamps by this name and by the empty mask.
    nothing_hidden = op.constant(np.zeros((1, 1, 1, hidden.get_output_partial_shape(0)[1].get_length()), np.float32))
    seen = op.scaled_dot_product_attention(query, key, value, nothing_hidden)
    seen.set_friendly_name(f"layers.{layer}.encoder_attn")
    return op.add(x, network.linear(network.join(seen), f"{name}/linear_2"))


def build_decoder(weights: Mapping[str, Array]) -> ov.Model:
    """Build the decoder: ``input_ids`` INT64 [-1,-1], ``encoder_hidden_states``, ``beam_idx`` INT32 [-1] -> ``logits``.

    Its states are the keys and values of past tokens, and those of the encoder's output, which are computed once.
    """
    network = Transformer(weights)
    frames = len(weights["encoder/position_encodings/encodings"])
    ids = _input("input_ids", [-1, -1], np.int64)
    hidden = _input("encoder_hidden_states", [-1, frames, network.width], np.float32)
    beams = _input("beam_idx", [-1], np.int32)
    memory = _Memory(network, ids, beams)
    pasts = [(memory.read(f"past.{layer}.key"), memory.read(f"past.{layer}.value")) for layer in network.layers]
    before = op.gather(op.shape_of(pasts[0][0]), _ints(2), _ints(0))
    after = op.add(before, op.gather(op.shape_of(ids), _ints(1), _ints(0)))
    begin, end = op.squeeze(before, _ints(0)), op.squeeze(after, _ints(0))
    new = op.unsqueeze(op.range(begin, end, np.int64(1), "i64"), _ints(1))
    every = op.unsqueeze(op.range(np.int64(0), end, np.int64(1), "i64"), _ints(0))
    sees = op.unsqueeze(op.less_equal(every, new), _ints(0, 1))
    table = op.constant(weights["decoder/embeddings/weight"].astype(np.float32))
    places = op.constant(weights["decoder/position_encodings/encodings"].astype(np.float32))
    x = op.add(op.gather(table, ids, _ints(0)), op.slice(places, before, after, _ints(1), _ints(0)))
    for layer in network.layers:
        x = _look_back(memory, x, layer, pasts[layer], sees)
        x = _listen(memory, x, hidden, layer)
        x = network.feed_forward(x, f"decoder/layer_{layer}/ffn")
    logits = op.matmul(network.norm(x, "decoder/layer_norm"), table, transpose_a=False, transpose_b=True)
    result = _result(logits, "logits")
    return ov.Model([result], memory.sinks, [ids, hidden, beams], "whisper-decoder")
