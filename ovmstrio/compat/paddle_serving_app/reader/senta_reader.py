"""``SentaReader``: word numbers from a vocabulary."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

__all__ = ["SentaReader"]


class SentaReader:
    """Reader with a vocabulary of tab-separated words and numbers, which is not downloaded.

    Raises:
        FileNotFoundError: the vocabulary is missing.
    """

    def __init__(self, vocab_path: str = "", max_seq_len: int = 20) -> None:
        self.max_seq_len = max_seq_len
        self.word_dict = self.load_vocab(vocab_path)

    def load_vocab(self, vocab_path: str) -> dict[str, int]:
        """Read a vocabulary; a line with only a number belongs to the empty word, and ``<unk>`` comes last."""
        file = Path(vocab_path or "senta_vocab.txt")
        if not file.is_file():
            raise FileNotFoundError(f"SentaReader needs the vocabulary {file} with tab-separated words and numbers")
        found: dict[str, int] = {}
        for line in file.read_text(encoding="utf-8").splitlines():
            if line.strip():
                *words, number = line.strip().split("\t")[:2]
                found[words[0] if words else ""] = int(number)
        found["<unk>"] = len(found)
        return found

    def process(self, cols: Iterable[str]) -> list[int]:
        """Return the numbers of words; an unknown word gets the size of the vocabulary including ``<unk>``."""
        return [self.word_dict.get(word, len(self.word_dict)) for word in cols]
