"""Encoders of texts with a few thousand seeded weights, as the folders that Optimum writes, and the same in numpy."""

from __future__ import annotations

import json
import math
import shutil
import string
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import openvino as ov
import openvino.opset13 as op

from ovmstrio.samples.embedding.wordpiece import WordPieces
from tests.support.model_cache import cached_folder

LONGEST: Final = 20
"""Maximum number of tokens of the models; no multiple of a usual padding."""

SPECIAL: Final = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4}
_HIDDEN: Final = 8
_WORDS: Final = ("the", "cat", "dog", "sat", "ran", "red", "blue", "house", ".", ",", "!", "?", "##s", "##ing")
VOCABULARY: Final = (
    *SPECIAL,
    *_WORDS,
    *string.ascii_lowercase,
    *string.digits,
    *(f"##{letter}" for letter in string.ascii_lowercase),
)
"""The tokens, by their numbers."""

Numbers = np.ndarray[Any, Any]


@dataclass(frozen=True)
class TinyEncoder:
    """One layer of attention over embeddings of words, positions and types; deterministic for each seed."""

    seed: int = 0
    longest: int = LONGEST

    def _weights(self) -> tuple[Numbers, Numbers, Numbers, Numbers]:
        random = np.random.default_rng(self.seed)
        shapes = ((len(VOCABULARY), _HIDDEN), (self.longest, _HIDDEN), (2, _HIDDEN), (_HIDDEN, 1))
        words, positions, types, head = (random.standard_normal(shape).astype(np.float32) for shape in shapes)
        return words, positions, types, head

    def hidden(self, ids: Sequence[int], types: Sequence[int] = ()) -> Numbers:
        words, positions, kinds, _ = self._weights()
        mixed = words[list(ids)] + positions[: len(ids)] + kinds[list(types) or [0] * len(ids)]
        weights = np.exp(mixed @ mixed.T / math.sqrt(_HIDDEN))
        seen: Numbers = np.tanh(weights / weights.sum(1, keepdims=True) @ mixed)
        return seen

    def score(self, ids: Sequence[int], types: Sequence[int]) -> float:
        return float(1 / (1 + np.exp(-(self.hidden(ids, types)[0] @ self._weights()[3])[0])))

    def model(self, *, scores: bool = False, has_types: bool = True) -> ov.Model:
        words, positions, kinds, head = self._weights()
        names = ("input_ids", "attention_mask", "token_type_ids")[: 3 if has_types else 2]
        inputs = [op.parameter(ov.PartialShape([-1, -1]), np.int64, name=name) for name in names]
        for name, node in zip(names, inputs, strict=True):
            node.output(0).set_names({name})
        axis = op.constant(np.int64(0))
        length = op.gather(op.shape_of(inputs[0]), np.array([1]), axis)
        rows = op.slice(op.constant(positions), np.array([0]), length, np.array([1]), np.array([0]))
        of_type = op.gather(op.constant(kinds), inputs[2], axis) if has_types else op.constant(kinds[0])
        mixed = op.add(op.add(op.gather(op.constant(words), inputs[0], axis), rows), of_type)
        products = op.matmul(mixed, mixed, transpose_a=False, transpose_b=True)
        scaled = op.divide(products, np.float32(math.sqrt(_HIDDEN)))
        hides = op.multiply(op.subtract(op.convert(inputs[1], np.float32), np.float32(1)), np.float32(1e9))
        weights = op.softmax(op.add(scaled, op.unsqueeze(hides, np.array([1]))), 2)
        seen = op.tanh(op.matmul(weights, mixed, transpose_a=False, transpose_b=False))
        name = "last_hidden_state"
        if scores:
            name = "logits"
            first = op.gather(seen, op.constant(np.int64(0)), op.constant(np.int64(1)))
            seen = op.matmul(first, op.constant(head), transpose_a=False, transpose_b=False)
        seen.output(0).set_names({name})
        return ov.Model([op.result(seen)], inputs, "tiny")


def word_pieces() -> WordPieces:
    return WordPieces({token: number for number, token in enumerate(VOCABULARY)})


@cached_folder("ovmstrio.samples.search.bert_tokenizer")
def write_embedder(folder: Path, *, seed: int = 0, has_types: bool = True) -> Path:
    _write(folder, TinyEncoder(seed).model(has_types=has_types))
    tokens = {token: number for number, token in enumerate(VOCABULARY)}
    piece = {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "vocab": tokens}
    added = [{"content": token, "id": number} for token, number in SPECIAL.items()]
    table = folder / "tokenizer.json"
    table.write_text(json.dumps({"added_tokens": added, "model": piece}), encoding="utf-8")
    # The package of tokenizers changes what every core of a process does that imports it.
    command = [sys.executable, "-m", "ovmstrio.samples.search.bert_tokenizer", str(table), str(folder)]
    subprocess.run(command, check=True, timeout=300, capture_output=True)
    return folder


def write_reranker(folder: Path, embedder: Path, *, seed: int = 0) -> Path:
    """Write a model that scores pairs, with the tokenizer of another one."""
    _write(folder, TinyEncoder(seed).model(scores=True))
    for file in embedder.glob("openvino_tokenizer.*"):
        shutil.copyfile(file, folder / file.name)
    return folder


def _write(folder: Path, model: ov.Model) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    ov.save_model(model, folder / "openvino_model.xml", compress_to_fp16=False)
    config = {"model_type": "bert", "max_position_embeddings": LONGEST, "vocab_size": len(VOCABULARY)}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 1e30}', encoding="utf-8")
