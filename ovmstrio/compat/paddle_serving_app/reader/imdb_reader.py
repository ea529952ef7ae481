"""``IMDBDataset``: word numbers of reviews."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from random import shuffle
from typing import Final

__all__ = ["IMDBDataset"]

_Sample = tuple[list[int], list[int]]

_SEPARATORS: Final = re.compile(r"([;,.?!\s()])")


class IMDBDataset:
    """Splitter of reviews into words and punctuation; call ``load_resource`` first."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def load_resource(self, dictfile: str | Path) -> None:
        """Read a vocabulary with one word per line; unknown words get the number after the last."""
        with Path(dictfile).open(encoding="utf-8") as file:
            self._numbers = {word.strip(): number for number, word in enumerate(file)}

    def get_words_only(self, line: str) -> list[int]:
        """Return the word numbers of a review."""
        text = line.lower().replace("<br />", " ").strip()
        words = (word for word in _SEPARATORS.split(text) if word not in {"", " "})
        return [self._numbers.get(word, len(self._numbers)) for word in words]

    def get_words_and_label(self, line: str) -> _Sample:
        """Return the word numbers and the label of a review; the label follows the last ``|``."""
        text, _, label = line.rpartition("|")
        return self.get_words_only(text), [int(label)]

    def infer_reader(
        self, infer_filelist: Iterable[str | Path], batch: int, buf_size: int
    ) -> Callable[[], Iterator[list[_Sample]]]:  # fmt: skip
        """Return a function that reads files in batches, shuffled within ``buf_size`` samples."""
        files = list(infer_filelist)

        def read() -> Iterator[list[_Sample]]:
            samples = chain.from_iterable(_shuffled(self._samples(files), buf_size))
            while group := list(islice(samples, batch)):
                yield group

        return read

    def generate_sample(self, line: str) -> Callable[[], Iterator[tuple[tuple[str, list[int]], tuple[str, list[int]]]]]:
        """Return a function that yields a line's sample in the form of Paddle's training."""

        def read() -> Iterator[tuple[tuple[str, list[int]], tuple[str, list[int]]]]:
            words, label = self.get_words_and_label(line)
            yield ("words", words), ("label", label)

        return read

    def _samples(self, files: Iterable[str | Path]) -> Iterator[_Sample]:
        for each in files:
            with Path(each).open(encoding="utf-8") as file:
                yield from map(self.get_words_and_label, file)


def _shuffled(samples: Iterator[_Sample], size: int) -> Iterator[list[_Sample]]:
    while buffered := list(islice(samples, max(1, size))):
        shuffle(buffered)
        yield buffered
