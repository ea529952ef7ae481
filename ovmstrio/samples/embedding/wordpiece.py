"""WordPiece tokenizer for English text, with the vocabulary in ``tokenizer.json``."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from ovmstrio import Array

__all__ = ["WordPieces"]

_WORD: Final = re.compile(r"\w+|[^\w\s]")
_LONGEST_WORD: Final = 100


@dataclass(frozen=True, slots=True)
class WordPieces:
    """Vocabulary of word pieces; ``encode`` returns the model's inputs."""

    numbers: Mapping[str, int]

    @classmethod
    def read(cls, path: Path) -> WordPieces:
        """Load the vocabulary from a ``tokenizer.json``."""
        return cls(json.loads(path.read_text(encoding="utf-8"))["model"]["vocab"])

    def _pieces(self, word: str) -> Iterator[int]:
        """Split a word greedily into the longest known pieces."""
        pieces = []
        start = 0
        while start < len(word):
            prefix = "##" if start else ""
            ends = range(len(word), start, -1)
            end = next((end for end in ends if prefix + word[start:end] in self.numbers), None)
            if end is None or len(word) > _LONGEST_WORD:
                yield self.numbers["[UNK]"]
                return
            pieces.append(self.numbers[prefix + word[start:end]])
            start = end
        yield from pieces

    def _encode_one(self, text: str, longest: int) -> list[int]:
        plain = unicodedata.normalize("NFD", text.lower())
        plain = "".join(letter for letter in plain if unicodedata.category(letter) != "Mn").replace("_", " _ ")
        pieces = [number for word in _WORD.findall(plain) for number in self._pieces(word)]
        return [self.numbers["[CLS]"], *pieces[: longest - 2], self.numbers["[SEP]"]]

    def encode(self, texts: Sequence[str], longest: int = 256) -> dict[str, Array]:
        """Return ``input_ids`` and ``attention_mask``, INT64 [texts,longest text]."""
        rows = [self._encode_one(text, longest) for text in texts]
        shape = len(rows), max(map(len, rows))
        ids, mask = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        for number, row in enumerate(rows):
            ids[number, : len(row)] = row
            mask[number, : len(row)] = 1
        return {"input_ids": ids, "attention_mask": mask}
