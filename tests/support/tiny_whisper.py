"""Whisper model with seeded weights and a constant transcript, in Optimum's export layout.

It hears three seconds at once.  Of a short recording without times it says :data:`SAID`; else each window has a segment
of a second and a half, :data:`SEGMENT`, or :data:`TRANSLATED`.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from itertools import pairwise
from math import erf, sqrt
from pathlib import Path
from typing import Any, Final

import numpy as np

from ovmstrio.samples.transcription.prepare import write_folder
from tests.support.model_cache import cached_folder
from tests.support.tiny_llm import byte_letters

SAID: Final = "Whisper."
SEGMENT: Final = "Tmd?"
TRANSLATED: Final = "Engl?"
LANGUAGE: Final = "de"
SEGMENT_SECONDS: Final = 1.5

_PLACES: Final = 150
_WIDTH: Final = 64
_FORWARD: Final = 128
_BANDS: Final = 80
_LONGEST: Final = 448
_END, _START, _UNTIMED = "<|endoftext|>", "<|startoftranscript|>", "<|notimestamps|>"
_TASKS: Final = ("<|en|>", "<|de|>", "<|translate|>", "<|transcribe|>", "<|startofprev|>", "<|nospeech|>")
_MARKS: Final = (_END, _START, *_TASKS, _UNTIMED)
_MERGES: Final = (("t", "h"), ("th", "e"), ("i", "n"))

Numbers = np.ndarray[Any, Any]


@cached_folder(
    "tests.support.tiny_llm",
    "ovmstrio.samples.transcription.byte_tokenizer",
    "ovmstrio.samples.transcription.networks",
    "ovmstrio.samples.transcription.prepare",
)
def write_tiny_whisper(folder: Path, *, seed: int = 0) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    letters = byte_letters()
    vocabulary = [*letters, *(left + right for left, right in _MERGES)]
    tokens = {token: number for number, token in enumerate((*vocabulary, *_MARKS))}
    with tempfile.TemporaryDirectory() as scratch:
        table = Path(scratch) / "tokenizer.json"
        table.write_text(json.dumps(_table(vocabulary, tokens)), encoding="utf-8")
        generation = {"suppress_tokens": [], "begin_suppress_tokens": [], "alignment_heads": [[0, 0]]}
        weights = _weights(np.random.default_rng(seed), tokens)
        write_folder(weights, table, folder, generation, is_multilingual=True, fp16=False)
    return folder


def _table(vocabulary: list[str], tokens: Mapping[str, int]) -> dict[str, Any]:
    pieces = {token: tokens[token] for token in vocabulary}
    model = {"type": "BPE", "vocab": pieces, "merges": [f"{left} {right}" for left, right in _MERGES]}
    added = [{"id": tokens[mark], "content": mark, "special": True} for mark in _MARKS]
    return {"added_tokens": added, "model": model, "decoder": {"type": "ByteLevel"}}


def _followers(tokens: Mapping[str, int]) -> dict[int, int]:
    times = len(tokens)
    end = times + round(SEGMENT_SECONDS * 50)
    chains = (
        [tokens[_START], tokens[f"<|{LANGUAGE}|>"]],
        [tokens[_UNTIMED], *(tokens[letter] for letter in SAID), tokens[_END]],
        [tokens["<|transcribe|>"], times, *(tokens[letter] for letter in SEGMENT), end, tokens[_END]],
        [tokens["<|translate|>"], times + 1, *(tokens[letter] for letter in TRANSLATED), end],
    )
    return {first: then for chain in chains for first, then in pairwise(chain)}


def _weights(random: np.random.Generator, tokens: Mapping[str, int]) -> dict[str, Numbers]:
    size = len(tokens) + _PLACES + 1
    table = random.standard_normal((size, _WIDTH))
    table -= table.mean(1, keepdims=True)
    table /= table.std(1, keepdims=True)
    found: dict[str, Numbers] = {
        "encoder/num_heads": np.array(2),
        "encoder/conv1/weight": random.standard_normal((_WIDTH, _BANDS, 3)) / 16,
        "encoder/conv1/bias": np.zeros(_WIDTH),
        "encoder/conv2/weight": random.standard_normal((_WIDTH, _WIDTH, 3)) / 16,
        "encoder/conv2/bias": np.zeros(_WIDTH),
        "encoder/position_encodings/encodings": np.zeros((_PLACES, _WIDTH)),
        "decoder/position_encodings/encodings": np.zeros((_LONGEST, _WIDTH)),
        "decoder/embeddings/weight": table,
    }
    for name, parts in (("encoder/layer_0/self_attention", (3, 1)), ("decoder/layer_0/self_attention", (3, 1))):
        _attention(found, name, parts)
    _attention(found, "decoder/layer_0/attention", (1, 2, 1))
    for side in ("encoder", "decoder"):
        _norm(found, f"{side}/layer_norm")
        _norm(found, f"{side}/layer_0/ffn/layer_norm")
        found[f"{side}/layer_0/ffn/linear_0/weight"] = random.standard_normal((_FORWARD, _WIDTH)) / 8
        found[f"{side}/layer_0/ffn/linear_0/bias"] = np.zeros(_FORWARD)
        found[f"{side}/layer_0/ffn/linear_1/weight"] = np.zeros((_WIDTH, _FORWARD))
        found[f"{side}/layer_0/ffn/linear_1/bias"] = np.zeros(_WIDTH)
    follow = _followers(tokens)
    before, after = table[list(follow)], table[list(follow.values())]
    bent = _gelu(before @ found["decoder/layer_0/ffn/linear_0/weight"].T)
    found["decoder/layer_0/ffn/linear_1/weight"] = np.linalg.lstsq(bent, 10 * after - before, rcond=None)[0].T
    return {name: numbers.astype(np.float32) for name, numbers in found.items()}


def _attention(found: dict[str, Numbers], name: str, parts: tuple[int, ...]) -> None:
    _norm(found, f"{name}/layer_norm")
    for number, part in enumerate(parts):
        found[f"{name}/linear_{number}/weight"] = np.zeros((part * _WIDTH, _WIDTH))
        found[f"{name}/linear_{number}/bias"] = np.zeros(part * _WIDTH)


def _norm(found: dict[str, Numbers], name: str) -> None:
    found[f"{name}/gamma"] = np.ones(_WIDTH)
    found[f"{name}/beta"] = np.zeros(_WIDTH)


def _gelu(numbers: Numbers) -> Numbers:
    bent: Numbers = numbers / 2 * (1 + np.vectorize(erf)(numbers / sqrt(2)))
    return bent
