"""Rows of a step's frame: the text of new tokens, all decoded in one call, cut at stop strings, with what is echoed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from ovmstrio.core.generation import Finish, StopStrings
from ovmstrio.inference.engine.messages import FINISHES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ovmstrio.inference.engine.sequences import AskedTexts, NewTokens

__all__ = ["TextRows", "TokenWindow"]

# ----------------------------------------------------------------------
# Text of tokens as they come, from short windows: to decode all of a text for each token takes quadratic time
# ----------------------------------------------------------------------

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


# ----------------------------------------------------------------------
# Rows of a step's frame: the text of new tokens, all decoded in one call, cut at stop strings, with what is echoed
# ----------------------------------------------------------------------


class _Output:
    """What has been told of one text."""

    __slots__ = ("echoes", "stops", "window")

    def __init__(self, asked: AskedTexts) -> None:
        self.window = TokenWindow()
        self.stops = StopStrings(asked.request.stop, keeps=asked.request.keeps_stop)
        self.echoes = asked.request.echo


class TextRows:
    """Makes rows of tokens: id, index, text, how many tokens, their log-probabilities, and where it ends.

    Args:
        decode: gives the texts of rows of tokens, with the marks among them or without.
    """

    def __init__(self, decode: Callable[[list[list[int]], bool], list[str]]) -> None:
        self._decode = decode
        self._outputs: dict[tuple[int, int], _Output] = {}
        self._shown: dict[int, str] = {}

    def forget(self, asked: AskedTexts) -> None:
        """Note that nothing more comes of a request."""
        for index in range(asked.request.n):
            self._outputs.pop((asked.id, index), None)

    def make(self, news: Sequence[NewTokens]) -> list[list[Any]]:
        """Give a row for each, in their order; one whose stop string has come ends there."""
        texts = self._texts(news)
        self._learn(news)
        return [self._row(new, text) for new, text in zip(news, texts, strict=True)]

    def _output(self, new: NewTokens) -> _Output:
        key = new.asked.id, new.index
        if key not in self._outputs:
            self._outputs[key] = _Output(new.asked)
        return self._outputs[key]

    def _texts(self, news: Sequence[NewTokens]) -> list[str]:
        """Decode, in one call for those who see marks and one for those who do not."""
        asked = [(self._output(new).window.push(_visible(new)), new.asked.request.skips_special_tokens) for new in news]
        decoded: dict[bool, list[str]] = {}
        for skips in {skips for _, skips in asked}:
            decoded[skips] = self._decode([row for rows, each in asked if each is skips for row in rows], skips)
        places = {True: 0, False: 0}
        texts = []
        for new, (rows, skips) in zip(news, asked, strict=True):
            place = places[skips]
            places[skips] += len(rows)
            taken = decoded[skips][place : places[skips]]
            texts.append(self._output(new).window.take(taken, is_last=new.finish is not None))
        return texts

    def _learn(self, news: Sequence[NewTokens]) -> None:
        """Decode tokens whose log-probabilities are told, each by itself, those that nobody has asked for before."""
        tokens = {token for new in news if new.asked.request.logprobs for token in new.tokens}
        for new in news:
            if new.asked.prompt_logprobs and self._output(new).echoes:
                tokens.update(new.asked.prompt)
        unknown = sorted(tokens - self._shown.keys())
        if unknown:
            shown = self._decode([[token] for token in unknown], False)
            self._shown.update(zip(unknown, shown, strict=True))

    def _row(self, new: NewTokens, text: str) -> list[Any]:
        output, request, finish = self._output(new), new.asked.request, new.finish
        text = output.stops.feed(text)
        if output.stops.has_stopped:
            finish = Finish.STOP
        elif finish is not None:
            text += output.stops.finish()
        logprobs = self._logprobs(_visible(new), new.logprobs) if request.logprobs else None
        if output.echoes:
            output.echoes = False
            text = self._prompt_text(new.asked) + text
            if new.asked.prompt_logprobs:
                logprobs = self._logprobs(new.asked.prompt, new.asked.prompt_logprobs) + (logprobs or [])
        position = None if finish is None else FINISHES.index(finish)
        return [new.asked.id, new.index, text, len(new.tokens), logprobs, position]

    def _prompt_text(self, asked: AskedTexts) -> str:
        prompt = asked.request.prompt
        if isinstance(prompt, str):
            return prompt
        return self._decode([asked.prompt], asked.request.skips_special_tokens)[0]

    def _logprobs(self, tokens: Sequence[int], values: Sequence[float | None]) -> list[list[Any]]:
        return [[self._shown[token], value, token] for token, value in zip(tokens, values, strict=False)]


def _visible(new: NewTokens) -> list[int]:
    """Leave out the token that ended the text, unless it is to be kept as stop strings are."""
    if new.finish is Finish.STOP and not new.asked.request.keeps_stop and new.asked.request.sampling.best_of == 1:
        return new.tokens[:-1]
    return new.tokens
