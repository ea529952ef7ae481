"""``SentaReader``: words as the numbers of a vocabulary."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

__all__ = ["SentaReader"]


class SentaReader:
    """Reads with a vocabulary of words and numbers, a tab between them, which is not fetched.

    Raises:
        FileNotFoundError: there is no such file.
    """

    def __init__(self, vocab_path: str = "", max_seq_len: int = 20) -> None:
        self.max_seq_len = max_seq_len
        self.word_dict = self.load_vocab(vocab_path)

    def load_vocab(self, vocab_path: str) -> dict[str, int]:
        """Read a vocabulary; a line with a number alone is the empty word's, and ``<unk>`` comes last."""
        file = Path(vocab_path or "senta_vocab.txt")
        if not file.is_file():
            raise FileNotFoundError(f"SentaReader needs the vocabulary {file}: words and numbers, a tab between them")
        found: dict[str, int] = {}
        for line in file.read_text(encoding="utf-8").splitlines():
            if line.strip():
                *words, number = line.strip().split("\t")[:2]
                found[words[0] if words else ""] = int(number)
        found["<unk>"] = len(found)
        return found

    def process(self, cols: Iterable[str]) -> list[int]:
        """Give the words' numbers; an unknown one is as many as the vocabulary has words, ``<unk>`` included."""
        return [self.word_dict.get(word, len(self.word_dict)) for word in cols]
