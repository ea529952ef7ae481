"""Bounds on the work that a text may cause: how long it may be, and how much of it is tokenized for a token limit.

A text is measured by its characters, whose number is known without reading it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = [
    "AT_ONCE",
    "MAX_ITEMS",
    "MAX_TOKENIZED_CHARACTERS",
    "encode_text",
    "has_enough_tokens",
    "max_characters",
    "prefix_lengths",
    "size_of",
    "weight_of",
]

MAX_ITEMS: Final = 16_384
"""Members of a list of one request: texts, messages, content parts, tools, token numbers of a stop condition."""

MAX_TOKENIZED_CHARACTERS: Final = 4 * 2**20
"""Characters of the texts of one request where no token limit applies: a million tokens of prose, or ten novels.

As :func:`weight_of` counts them.
"""

AT_ONCE: Final = 2**18
"""Characters that are encoded within a millisecond."""

_CHARACTERS_PER_TOKEN: Final = 128
"""The longest token of common vocabularies is a run of 128 blanks; tokens of prose have 3 to 5 characters.

The factor between the two is for tokenizers that drop characters, such as repeated blanks and accents.
"""
_LEAST_CHARACTERS: Final = 2**18
"""A text of so few characters is tokenized in some 10 ms, so that a limit of few tokens need not be exact."""
_FIRST_CHARACTERS_PER_TOKEN: Final = 8
_LEAST_PREFIX: Final = 4096
_GROWTH: Final = 4
_MARGIN: Final = 256
"""Tokens at the end of a prefix that may differ from those of the complete text.

A prefix may end within a word. WordPiece splits a word of up to 100 characters, of which it makes 100 tokens at most;
BPE and Unigram choose other tokens for a few characters before the end.
"""


def weight_of(text: str) -> int:
    """Return the characters of a text, of one that is not ASCII three for each: about its bytes, without counting."""
    return len(text) if text.isascii() else 3 * len(text)


def max_characters(tokens: int, longest_token: int = 0) -> int:
    """Return how many characters a text of ``tokens`` tokens may have; a longer text cannot fit.

    Args:
        tokens: the limit of the model.
        longest_token: characters of the longest token of the vocabulary, added tokens included; 0 if unknown.
    """
    return max(_LEAST_CHARACTERS, tokens * max(_CHARACTERS_PER_TOKEN, longest_token))


def prefix_lengths(characters: int, tokens: int) -> Iterator[int]:
    """Return the lengths of prefixes to tokenize, one after the other, until one has enough tokens.

    The last length is ``characters``.  All prefixes together have less than 7/3 of the characters of the last one.

    Args:
        characters: of the text.
        tokens: how many of its tokens are needed.
    """
    length = max(_LEAST_PREFIX, tokens * _FIRST_CHARACTERS_PER_TOKEN)
    while length < characters:
        yield length
        length *= _GROWTH
    yield characters


def has_enough_tokens(found: int, tokens: int) -> bool:
    """Return whether a prefix of ``found`` tokens begins with the first ``tokens`` tokens of the text, or has more."""
    return found >= tokens + _MARGIN


def encode_text(text: str) -> bytes:
    """Encode a text as UTF-8; half of a surrogate pair becomes ``?``.

    A long text is encoded in slices, so that a thread that does it does not keep the interpreter for itself.
    """
    if len(text) <= AT_ONCE:
        return text.encode("utf-8", "replace")
    return b"".join(text[start : start + AT_ONCE].encode("utf-8", "replace") for start in range(0, len(text), AT_ONCE))


def size_of(value: Any, most: int) -> int:
    """Return the size of a JSON value: its characters, keys included, and one for each member.

    Counting stops once the size is above ``most``.
    """
    size = 0
    left: list[Iterator[Any] | Sequence[Any]] = [(value,)]
    while left and size <= most:
        for each in left.pop():
            size += 1
            if isinstance(each, str):
                size += len(each)
            elif isinstance(each, dict | list | tuple):
                if len(each) > most:
                    return size + len(each)
                if isinstance(each, dict):
                    size += sum(map(len, each))
                left.append(tuple(each.values()) if isinstance(each, dict) else each)
            if size > most:
                break
    return size
