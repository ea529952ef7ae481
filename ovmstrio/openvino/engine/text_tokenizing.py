"""Requests for the tokens of texts, which are tokenized a few texts at a time between the steps of an engine."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from ovmstrio.core.errors import ServerError
from ovmstrio.openvino.engine.frames import CANCELLED, REFUSED, TOKENS, decode_texts, encode_failure

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["TextTokenizing"]

_CHARACTERS_AT_ONCE: Final = 2**15
"""Characters that are tokenized within some 10 ms, for which the texts that are made wait."""
_MOST_AT_ONCE: Final = 64

Tokens = npt.NDArray[np.int64]


class _Tokenized:
    """One request: its texts that are left, and the tokens of the others."""

    __slots__ = ("message", "options", "rows", "texts")

    def __init__(self, message: int, texts: list[str], options: dict[str, Any]) -> None:
        self.message = message
        self.texts = deque(texts)
        self.options = options
        self.rows: list[Tokens] = []

    def next_texts(self) -> list[str]:
        """Take one text, or several that are short; all of them take as much room as the longest one."""
        taken = [self.texts.popleft()]
        longest = len(taken[0])
        while self.texts and len(taken) < _MOST_AT_ONCE:
            longest = max(longest, len(self.texts[0]))
            if longest * (len(taken) + 1) > _CHARACTERS_AT_ONCE:
                break
            taken.append(self.texts.popleft())
        return taken


class TextTokenizing:
    """The open requests, by their numbers; the oldest one is served first.

    Args:
        tokenize: tokenizes texts, with the options of a request.
        answer: receives the number of a message and its answer.
    """

    def __init__(self, tokenize: Callable[..., list[Tokens]], answer: Callable[[int, Any], None]) -> None:
        self._tokenize = tokenize
        self._answer = answer
        self._open: dict[int, _Tokenized] = {}

    @property
    def is_busy(self) -> bool:
        """True if a request is open."""
        return bool(self._open)

    def add(self, message: int, number: int, texts: dict[str, Any], options: dict[str, Any]) -> None:
        """Add a request, which is answered by :meth:`go_on`."""
        self._open[number] = _Tokenized(message, decode_texts(texts), options)

    def cancel(self, number: int) -> None:
        """Forget a request; the rest of its texts is not tokenized."""
        tokenized = self._open.pop(number, None)
        if tokenized is not None:
            self._answer(tokenized.message, [REFUSED, encode_failure(CANCELLED)])

    def go_on(self) -> None:
        """Tokenize one text of the oldest request, or several that are short, and answer if there are no more."""
        number = next(iter(self._open), None)
        if number is None:
            return
        tokenized = self._open[number]
        try:
            if tokenized.texts:
                tokenized.rows += self._tokenize(tokenized.next_texts(), **tokenized.options)
        except ServerError as error:
            del self._open[number]
            self._answer(tokenized.message, [REFUSED, encode_failure(error)])
            return
        if not tokenized.texts:
            del self._open[number]
            counts = np.array([len(row) for row in tokenized.rows], np.int64)
            tokens = np.concatenate(tokenized.rows) if tokenized.rows else np.empty(0, np.int64)
            self._answer(tokenized.message, [TOKENS, tokens, counts])
