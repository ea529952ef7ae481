"""Compile what models of texts are made of: a tokenizer, and a transformer that gives a row a text."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from ovmstrio.config.specs import ModelSpec
from ovmstrio.openvino.compile import ModelFile, compile_read
from ovmstrio.openvino.compiled import Compiled
from ovmstrio.openvino.pooling import Pooling, pool_embeddings, score_pairs
from ovmstrio.openvino.reading import read_model
from ovmstrio.openvino.tokenizing import SpecialTokens, read_tokenizer
from ovmstrio.work.placement import Placement

__all__ = ["CompiledTokenizer", "compile_embedder", "compile_scorer", "compile_tokenizer"]

_EXACT: Final = {"INFERENCE_PRECISION_HINT": "f32"}
"""Vectors are compared with others that another machine made, which does not round as this one does."""
_MOST_TOKENIZED_AT_ONCE: Final = 4
_HINTS: Final = {"PERFORMANCE_HINT", "NUM_STREAMS"}
_MANY: Final = {"PERFORMANCE_HINT": "THROUGHPUT"}
"""Rows of several requests are joined, and a processor's cores do more on a batch each than on one together."""


@dataclass(frozen=True, slots=True)
class CompiledTokenizer:
    """A ragged tokenizer, what stands around its texts, and the token to fill them up with."""

    compiled: Compiled
    special_tokens: SpecialTokens
    pad_id: int


def compile_tokenizer(file: Path, name: str) -> CompiledTokenizer:
    """Read and compile a tokenizer, which never runs on the event loop: texts may have any length.  Blocks.

    Raises:
        ConfigError: it cannot be read, or is not of the form that ``openvino_tokenizers`` gives tokenizers.
    """
    read = read_tokenizer(file)
    spec = ModelSpec(name=name, base_path=file.parent, plugin_config=_one_thread_each())
    compiled = compile_read(read.model, ModelFile(file, spec))
    return CompiledTokenizer(replace(compiled, placement=Placement.away(), loop=None), read.special_tokens, read.pad_id)


def compile_embedder(source: ModelFile, pooling: Pooling, *, normalize: bool) -> Compiled:
    """Read and compile a model of embeddings, see :func:`pool_embeddings`.  Blocks.

    Raises:
        ConfigError: as there, or it cannot be read or compiled.
    """
    model = pool_embeddings(read_model(source.file), pooling, normalize=normalize, file=str(source.file))
    return compile_read(model, _settled(source))


def compile_scorer(source: ModelFile) -> Compiled:
    """Read and compile a model that scores pairs, see :func:`score_pairs`.  Blocks.

    Raises:
        ConfigError: as there, or it cannot be read or compiled.
    """
    return compile_read(score_pairs(read_model(source.file), str(source.file)), _settled(source))


def _settled(source: ModelFile) -> ModelFile:
    """Choose what the configuration does not say."""
    chosen = source.spec.plugin_config
    config = {**_EXACT, **({} if _HINTS & chosen.keys() else _MANY), **chosen}
    return replace(source, spec=source.spec.model_copy(update={"plugin_config": config}))


def _one_thread_each() -> dict[str, str]:
    """Let a few texts be tokenized side by side, each by one thread, which none of a tokenizer's operations divides."""
    count = str(min(len(os.sched_getaffinity(0)), _MOST_TOKENIZED_AT_ONCE))
    return {"NUM_STREAMS": count, "INFERENCE_NUM_THREADS": count, "ENABLE_CPU_PINNING": "NO"}
