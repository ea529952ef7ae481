"""Client of the sample embedding: ``python -m ovmstrio.samples.embedding.client --tokenizer FILE``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from ovmstrio.samples.asking import arguments, main
from ovmstrio.samples.embedding.wordpiece import WordPieces
from ovmstrio.samples.question import Arrays, Question

__all__ = ["questions"]

_TEXTS: Final = (
    ("a man is eating food", "a man is eating a piece of bread", "the girl is carrying a baby"),
    ("how do I reset my password?", "I forgot how to log in", "tomorrow it will rain in the mountains"),
    ("the engine does not start", "my car won't run", "she plays the violin beautifully"),
)


def _nearest(texts: Sequence[str]) -> Callable[[Arrays], str]:
    """Return a function that selects the text whose vector is most similar to the first one's."""

    def read(outputs: Arrays) -> str:
        vectors = outputs["sentence_embedding"]
        return texts[1 + int((vectors[1:] @ vectors[0]).argmax())]

    return read


def questions(pieces: WordPieces) -> list[Question]:
    """Return calls of three texts each; the second is similar to the first, the third is not."""
    return [
        Question("embedding", f"what is nearest to {texts[0]!r}", pieces.encode(texts), texts[1], _nearest(texts))
        for texts in _TEXTS
    ]


if __name__ == "__main__":
    tokenizer = (
        "--tokenizer",
        {"metavar": "FILE", "type": Path, "required": True, "help": "the model's tokenizer.json"},
    )
    options = arguments("Find the text with the most similar meaning.", tokenizer, model="embedding")
    main(options, questions(WordPieces.read(options.tokenizer)))
