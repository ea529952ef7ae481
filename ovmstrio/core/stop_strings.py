"""Where a text ends that comes in pieces and is to end at one of several strings.

A string has come when the text so far ends with it, so that the same text ends at the same place however it was cut
into pieces; of several that end there the longest counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["StopStrings"]


class StopStrings:
    """Watches one text.  What may be the beginning of a stop string is held back until that is known.

    Args:
        strings: at which the text ends; empty ones are passed over.
        keeps: whether the text ends behind the string, which is left out otherwise.

    Attributes:
        has_stopped: whether a string has come; nothing is given from then on.
    """

    __slots__ = ("_held", "_keeps", "_matchers", "has_stopped")

    def __init__(self, strings: Iterable[str], *, keeps: bool = False) -> None:
        self.has_stopped = False
        self._matchers = [_Matcher(string) for string in strings if string]
        self._keeps = keeps
        self._held = ""

    def feed(self, text: str) -> str:
        """Take what has come; give what is certain to be part of the text."""
        if self.has_stopped:
            return ""
        if not self._matchers:
            return text
        held = self._held + text
        for position, letter in enumerate(text, len(held) - len(text) + 1):
            found = max([matcher.length for matcher in self._matchers if matcher.step(letter)], default=0)
            if found:
                self.has_stopped = True
                self._held = ""
                return held[: position if self._keeps else position - found]
        certain = len(held) - max(matcher.matched for matcher in self._matchers)
        self._held = held[certain:]
        return held[:certain]

    def finish(self) -> str:
        """Give what was held back, for no more comes."""
        held, self._held = self._held, ""
        return held


class _Matcher:
    """Follows a text letter by letter, after Knuth, Morris and Pratt: ``matched`` letters of a string end it so far."""

    __slots__ = ("_shorter", "_string", "length", "matched")

    def __init__(self, string: str) -> None:
        self.length = len(string)
        self.matched = 0
        self._string = string
        # By how many letters have matched, how many of the string's beginning end these as well.
        self._shorter = [0, 0]
        border = 0
        for letter in string[1:]:
            border = self._longer(border, letter)
            self._shorter.append(border)

    def step(self, letter: str) -> bool:
        """Take a letter; tell whether the string ends with it."""
        self.matched = self._longer(self.matched, letter)
        return self.matched == self.length

    def _longer(self, matched: int, letter: str) -> int:
        """Give how many letters match behind one more."""
        while matched and self._string[matched] != letter:
            matched = self._shorter[matched]
        return matched + (self._string[matched] == letter)
