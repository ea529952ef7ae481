"""Text of tokens as they come, from short windows: to decode all of a text for each token takes quadratic time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["TokenWindow"]

_LONGEST: Final = 24
_OVERLAP: Final = 6
"""How many tokens are decoded again; a letter that is not whole yet has at most three bytes, and so tokens."""

_UNKNOWN: Final = "�"
_UNFINISHED: Final = 3
"""How many of these letters one that is not whole yet may show as."""


class TokenWindow:
    """The last tokens of one text, and how much of their text has been given.

    The owner decodes the rows of :meth:`push`, those of all texts in one call, and gives the texts to :meth:`take`.
    """

    __slots__ = ("_given", "_has_base", "_tokens")

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._given = 0
        self._has_base = False

    def push(self, tokens: Sequence[int]) -> list[list[int]]:
        """Take tokens that have come, and give the rows that are to be decoded."""
        self._has_base = len(self._tokens) > _LONGEST
        if self._has_base:
            base = self._tokens[-_OVERLAP:]
            self._tokens = [*base, *tokens]
            return [self._tokens, base]
        self._tokens += tokens
        return [self._tokens]

    def take(self, texts: Sequence[str], *, is_last: bool) -> str:
        """Give the text that is new in the decoded rows; a letter that is not whole is held back until the last."""
        if self._has_base:
            self._given = _certain(texts[1])
        whole = len(texts[0]) if is_last else _certain(texts[0])
        new = texts[0][self._given : whole]
        self._given = max(self._given, whole)
        return new


def _certain(text: str) -> int:
    """Tell how long the part of a text is that further tokens do not change."""
    length = len(text)
    least = max(0, length - _UNFINISHED)
    while length > least and text[length - 1] == _UNKNOWN:
        length -= 1
    return length
