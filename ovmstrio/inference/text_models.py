"""Compilation of embedding and reranking models and their tokenizers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

import numpy as np
import openvino as ov
import openvino.opset13 as op

from ovmstrio.config.specs import ModelSpec
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.inference.compile import ModelFile, compile_loaded
from ovmstrio.inference.compiled import Compiled
from ovmstrio.inference.model_readers import read_model
from ovmstrio.inference.tokenizers import SpecialTokens, read_tokenizer
from ovmstrio.inference.tuner import Placement

Pooling = Literal["CLS", "LAST", "MEAN"]

TEXT_MODEL_INPUTS: Final = frozenset({"input_ids", "attention_mask", "token_type_ids", "position_ids"})
_POOLED_OUTPUT: Final = "sentence_embedding"
_TOKEN_OUTPUTS: Final = ("last_hidden_state", "token_embeddings")
_SCORES: Final = "logits"
_RANK_OF_TEXTS: Final = 2
_RANK_OF_TOKENS: Final = 3
_NORM_EPSILON: Final = 1e-12
_EXPECTED_INPUTS: Final = "input_ids, attention_mask and, if any, token_type_ids and position_ids"


def add_pooling(model: ov.Model, pooling: Pooling, *, normalize: bool, file: str) -> ov.Model:
    """Return the model with a single output ``embeddings``, f32 [texts, dimensions], of length 1 if ``normalize``.

    An existing output ``sentence_embedding`` (Optimum's name for pooled embeddings) is used as is. MEAN excludes
    padding.

    Raises:
        ConfigError: inputs or outputs are not those of an embedding model.
    """
    inputs = _inputs(model, file)
    outputs = _outputs(model)
    pooled = outputs.get(_POOLED_OUTPUT)
    if pooled is None or pooled.get_partial_shape().rank != _RANK_OF_TEXTS:
        pooled = _pooled(_token_output(outputs, file), inputs["attention_mask"], pooling)
    result = op.convert(pooled, np.float32)
    if normalize:
        result = op.normalize_l2(result, _ints(1), _NORM_EPSILON, "max")
    return _named(model, result, "embeddings")


def add_scoring(model: ov.Model, file: str) -> ov.Model:
    """Return the model with a single output ``scores``, f32 [texts], from 0 to 1.

    One logit per text is passed through the logistic function; of two the softmax of the second is used.

    Raises:
        ConfigError: the model has no logits per text, or more than two.
    """
    _inputs(model, file)
    logits = _outputs(model).get(_SCORES)
    shape = None if logits is None else logits.get_partial_shape()
    count = shape[1].get_length() if shape is not None and shape.rank == _RANK_OF_TEXTS and shape[1].is_static else 0
    if logits is None or count not in (1, 2):
        found = ", ".join(f"{name} {each.get_partial_shape()}" for name, each in _outputs(model).items())
        message = "not a reranking model"
        raise ConfigError([Problem(message, file=file, expected="an output logits [?,1] or [?,2]", found=found)])
    wide = op.convert(logits, np.float32)
    scores = op.sigmoid(wide) if count == 1 else op.softmax(wide, 1)
    return _named(model, op.gather(scores, _scalar(count - 1), _scalar(1)), "scores")


def _pooled(tokens: ov.Output, mask: ov.Output, pooling: Pooling) -> ov.Node:
    """[texts, tokens, numbers] -> [texts, numbers]; padding follows the tokens."""
    if pooling == "CLS":
        return op.gather(tokens, _scalar(0), _scalar(1))
    counted = op.convert(mask, np.int64)
    if pooling == "LAST":
        last = op.subtract(op.reduce_sum(counted, _ints(1), keep_dims=False), _scalar(1))
        picked = op.gather(tokens, op.unsqueeze(last, _ints(1)), _scalar(1), batch_dims=1)
        return op.squeeze(picked, _ints(1))
    wide = op.convert(tokens, np.float32)
    present = op.unsqueeze(op.convert(counted, np.float32), _ints(2))
    total = op.reduce_sum(op.multiply(wide, present), _ints(1), keep_dims=False)
    return op.divide(total, op.reduce_sum(present, _ints(1), keep_dims=False))


def _inputs(model: ov.Model, file: str) -> Mapping[str, ov.Output]:
    found = {name: port for port in model.inputs for name in port.get_names() & TEXT_MODEL_INPUTS}
    if len(found) == len(model.inputs) and {"input_ids", "attention_mask"} <= found.keys():
        return found
    names = ", ".join(sorted(name for port in model.inputs for name in port.get_names()))
    raise ConfigError([Problem("not a text model", file=file, expected=_EXPECTED_INPUTS, found=names)])


def _outputs(model: ov.Model) -> dict[str, ov.Output]:
    return {name: port.get_node().input_value(0) for port in model.outputs for name in port.get_names()}


def _token_output(outputs: Mapping[str, ov.Output], file: str) -> ov.Output:
    for name in (*_TOKEN_OUTPUTS, *outputs):
        if name in outputs and outputs[name].get_partial_shape().rank == _RANK_OF_TOKENS:
            return outputs[name]
    found = ", ".join(f"{name} {each.get_partial_shape()}" for name, each in outputs.items())
    expected = f"an output {' or '.join(_TOKEN_OUTPUTS)} [?,?,?], or {_POOLED_OUTPUT} [?,?]"
    raise ConfigError([Problem("not an embedding model", file=file, expected=expected, found=found)])


def _named(model: ov.Model, result: ov.Node, name: str) -> ov.Model:
    result.output(0).set_names({name})
    return ov.Model([op.result(result)], model.get_parameters(), model.get_friendly_name())


def _ints(*values: int) -> ov.Node:
    return op.constant(np.array(values, np.int64))


def _scalar(value: int) -> ov.Node:
    return op.constant(np.int64(value))


# Embeddings are compared with those of other machines, which round differently in lower precision.
_EXACT: Final = {"INFERENCE_PRECISION_HINT": "f32"}
_MOST_TOKENIZED_AT_ONCE: Final = 4
_HINTS: Final = {"PERFORMANCE_HINT", "NUM_STREAMS"}
# Requests are batched, and one batch per core is faster than all cores on one batch.
_THROUGHPUT: Final = {"PERFORMANCE_HINT": "THROUGHPUT"}


@dataclass(frozen=True, slots=True)
class CompiledTokenizer:
    """Compiled ragged tokenizer with its special and padding tokens."""

    compiled: Compiled
    special_tokens: SpecialTokens
    pad_id: int


def compile_tokenizer(file: Path, name: str) -> CompiledTokenizer:
    """Read and compile a tokenizer, which never runs on the event loop: texts may have any length. Blocks."""
    read = read_tokenizer(file)
    # A few texts in parallel, each on one thread: no tokenizer operation uses more.
    count = str(min(len(os.sched_getaffinity(0)), _MOST_TOKENIZED_AT_ONCE))
    config = {"NUM_STREAMS": count, "INFERENCE_NUM_THREADS": count, "ENABLE_CPU_PINNING": "NO"}
    spec = ModelSpec(name=name, base_path=file.parent, plugin_config=config)
    compiled = compile_loaded(read.model, ModelFile(file, spec))
    return CompiledTokenizer(replace(compiled, placement=Placement.away(), loop=None), read.special_tokens, read.pad_id)


def compile_embedder(source: ModelFile, pooling: Pooling, *, normalize: bool) -> Compiled:
    """Read and compile an embedding model; see :func:`add_pooling`. Blocks."""
    model = add_pooling(read_model(source.file), pooling, normalize=normalize, file=str(source.file))
    return compile_loaded(model, _with_defaults(source))


def compile_scorer(source: ModelFile) -> Compiled:
    """Read and compile a reranking model; see :func:`add_scoring`. Blocks."""
    return compile_loaded(add_scoring(read_model(source.file), str(source.file)), _with_defaults(source))


def _with_defaults(source: ModelFile) -> ModelFile:
    chosen = source.spec.plugin_config
    config = {**_EXACT, **({} if _HINTS & chosen.keys() else _THROUGHPUT), **chosen}
    return replace(source, spec=source.spec.model_copy(update={"plugin_config": config}))
