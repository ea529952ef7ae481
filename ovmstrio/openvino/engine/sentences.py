"""Texts cut into what is spoken in one go: sentences, and parts of those that are too long."""

from __future__ import annotations

import re
import unicodedata
from typing import Final

__all__ = ["MOST_CHARACTERS", "sentences_of"]

MOST_CHARACTERS: Final = 300
"""Of one sentence: about twenty seconds, after which a request can be left, and the next one has its turn."""
_WIDE: Final = 5
"""As how many characters one counts that takes the place of two on a screen: it is a syllable, a word or a picture."""

_END: Final = re.compile(
    r"(?<=[.!?\u2026\u3002\uff01\uff1f])[\"'\u201d\u2019\u00bb)\]]*\s+|\n+|(?<=[\u3002\uff01\uff1f])"
)
_PAUSE: Final = re.compile(r"(?<=[,;:\uff0c\u3001\uff1b\uff1a\u2014\u2013])\s*")
_SPACE: Final = re.compile(r"\s+")
_ABBREVIATED: Final = re.compile(r"(?:^|[\s(])(?:[^\W\d_]|Mr|Mrs|Ms|Dr|Prof|St|vs|etc|e\.g|i\.e)\.$")
_ABBREVIATED_CHARACTERS: Final = len(" Prof.")
_SPOKEN: Final = frozenset("LNS")
"""First letters of the categories of Unicode that letters, numbers and symbols have."""


def sentences_of(text: str) -> list[str]:
    """Give the sentences of a text in their order, without what nobody can speak; none if that is all of it."""
    said = "".join(" " if unicodedata.category(letter) == "Cc" and letter != "\n" else letter for letter in text)
    found = [part for sentence in _whole_sentences(said) for part in _cut(sentence)]
    return [each for each in found if any(unicodedata.category(letter)[0] in _SPOKEN for letter in each)]


def _whole_sentences(text: str) -> list[str]:
    found: list[str] = []
    start = 0
    for end in _END.finditer(text):
        # Of what has been said no more is looked at than one abbreviation: a text may be nothing else.
        closed = end.start() + len(end[0].rstrip())
        said = text[max(start, closed - _ABBREVIATED_CHARACTERS) : closed]
        follower = text[end.end() : end.end() + 1]
        goes_on = "\n" not in end[0] and (follower.islower() or _ABBREVIATED.search(said))
        if not goes_on:
            found.append(text[start : end.end()])
            start = end.end()
    return [_SPACE.sub(" ", each).strip() for each in (*found, text[start:])]


def _cut(sentence: str) -> list[str]:
    """Cut a sentence that is too long, at its pauses, else between words, else anywhere."""
    parts: list[str] = []
    while (most := _fitting(sentence)) < len(sentence):
        head = sentence[:most]
        pauses = [each.end() for each in _PAUSE.finditer(head) if each.end() >= most // 4]
        at = pauses[-1] if pauses else head.rfind(" ") + 1 or most
        parts.append(sentence[:at].strip())
        sentence = sentence[at:].strip()
    return [*parts, sentence]


def _fitting(sentence: str) -> int:
    """Tell how many characters of a sentence are spoken in one go at most."""
    room = MOST_CHARACTERS
    for at, letter in enumerate(sentence):
        room -= _WIDE if unicodedata.east_asian_width(letter) in "WF" else 1
        if room < 0:
            return at
    return len(sentence)
