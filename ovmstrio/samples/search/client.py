"""Client of the sample search: ``python -m ovmstrio.samples.search.client [--input TEXT]``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from openai import OpenAIError

from ovmstrio.samples.command_line import arguments
from ovmstrio.samples.openai_client import openai_client

__all__ = ["Found", "Passage", "passages", "search"]

_MOST_AT_ONCE = 100
_LETTERS = 600
"""Maximum length of a passage in characters; the model reads about 500 tokens."""


class Passage(NamedTuple):
    """Part of a document, with its heading."""

    file: str
    heading: str
    text: str


class Found(NamedTuple):
    """Passage with its similarity to the question, at most 1."""

    score: float
    passage: Passage


def passages(folder: Path) -> Iterator[Passage]:
    """Split the documents of a folder into passages with one heading each."""
    for path in sorted(folder.glob("*.md")):
        heading, lines = path.stem, list[str]()
        for line in [*path.read_text(encoding="utf-8").splitlines(), "# "]:
            if line.startswith("#") or sum(map(len, lines)) + len(line) > _LETTERS:
                if text := " ".join(lines).strip():
                    yield Passage(path.name, heading, text[: 2 * _LETTERS])
                lines = []
            if line.startswith("#"):
                heading = line.strip("# ")
            else:
                lines.append(line)


def search(url: str, question: str, among: Sequence[Passage], *, model: str = "search", best: int = 3) -> list[Found]:
    """Return the most similar passages, best first; ``url`` is the address of the server's REST port.

    Raises:
        OpenAIError: the server does not respond, refuses the request, or the response is incomplete.
    """
    with openai_client(url) as client:
        texts = [f"{passage.heading}: {passage.text}" for passage in among]
        parts = [texts[start : start + _MOST_AT_ONCE] for start in range(0, len(texts), _MOST_AT_ONCE)]
        answers = [client.embeddings.create(model=model, input=part).data for part in (*parts, [question])]
    vectors = np.array([each.embedding for answer in answers for each in answer])
    scores = vectors[:-1] @ vectors[-1]
    return [Found(float(scores[number]), among[number]) for number in np.argsort(-scores)[:best]]


if __name__ == "__main__":
    text = {"metavar": "TEXT", "default": "How can I limit the number of requests that are under way?"}
    folder = ("--folder", {"metavar": "DIR", "type": Path, "default": Path("docs"), "help": "Markdown (default: docs)"})
    options = arguments(
        "Search documents by what they mean.", folder, url="http://127.0.0.1:8000", model="search", given=text
    )
    known = list(passages(options.folder))
    if not known:
        raise SystemExit(f"error: no text found in {options.folder}/*.md; check --folder")
    try:
        for score, passage in search(options.url, options.input, known, model=options.model):
            print(f"{score:.2f}  {passage.file}, {passage.heading}\n      {passage.text[:200]}")
    except OpenAIError as error:
        raise SystemExit(f"error: {error}") from error
