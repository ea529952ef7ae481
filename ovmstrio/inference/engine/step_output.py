"""Output rows of a step: incremental detokenization, stop strings, echo and log-probabilities."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from ovmstrio.core.generation import Finish, StopStrings
from ovmstrio.inference.engine.messages import FINISH_REASONS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ovmstrio.inference.engine.sequences import QueuedRequest, SequenceOutput

_MAX_WINDOW: Final = 24
_OVERLAP: Final = 6  # tokens decoded again; an incomplete UTF-8 character has at most three bytes, and so tokens
_UNKNOWN: Final = "�"
_UNFINISHED: Final = 3  # replacement characters of one incomplete character


class TokenWindow:
    """Sliding window of a sequence's last tokens, for incremental detokenization.

    The owner decodes the rows of :meth:`push` for all sequences in one call and passes the texts to :meth:`take`.
    """

    __slots__ = ("_emitted", "_has_base", "_tokens")

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._emitted = 0
        self._has_base = False

    def push(self, tokens: Sequence[int]) -> list[list[int]]:
        """Append tokens and return the rows to decode."""
        self._has_base = len(self._tokens) > _MAX_WINDOW
        if self._has_base:
            base = self._tokens[-_OVERLAP:]
            self._tokens = [*base, *tokens]
            return [self._tokens, base]
        self._tokens += tokens
        return [self._tokens]

    def take(self, texts: Sequence[str], *, is_last: bool) -> str:
        """Return the new text; an incomplete character is held back until the last call."""
        if self._has_base:
            self._emitted = _stable_length(texts[1])
        end = len(texts[0]) if is_last else _stable_length(texts[0])
        new = texts[0][self._emitted : end]
        self._emitted = max(self._emitted, end)
        return new


def _stable_length(text: str) -> int:
    """Return the length of the text that later tokens cannot change."""
    length = len(text)
    minimum = max(0, length - _UNFINISHED)
    while length > minimum and text[length - 1] == _UNKNOWN:
        length -= 1
    return length


class _Output:
    __slots__ = ("echoes", "stops", "window")

    def __init__(self, queued: QueuedRequest) -> None:
        self.window = TokenWindow()
        self.stops = StopStrings(queued.request.stop, keeps=queued.request.includes_stop)
        self.echoes = queued.request.echo


class OutputRows:
    """Builds output rows: id, index, text, token count, log-probabilities and finish reason."""

    def __init__(self, decode: Callable[[list[list[int]], bool], list[str]]) -> None:
        self._decode = decode
        self._outputs: dict[tuple[int, int], _Output] = {}
        self._token_texts: dict[int, str] = {}

    def forget(self, queued: QueuedRequest) -> None:
        """Drop the state of a request."""
        for index in range(queued.request.n):
            self._outputs.pop((queued.id, index), None)

    def make(self, news: Sequence[SequenceOutput]) -> list[list[Any]]:
        """Return a row for each item, in order; a row ends at a stop string."""
        texts = self._texts(news)
        self._decode_single_tokens(news)
        return [self._row(new, text) for new, text in zip(news, texts, strict=True)]

    def _output(self, new: SequenceOutput) -> _Output:
        key = new.asked.id, new.index
        if key not in self._outputs:
            self._outputs[key] = _Output(new.asked)
        return self._outputs[key]

    def _texts(self, news: Sequence[SequenceOutput]) -> list[str]:
        """Decode in one call per setting of special tokens."""
        queued = [
            (self._output(new).window.push(_output_tokens(new)), new.asked.request.skips_special_tokens) for new in news
        ]
        decoded: dict[bool, list[str]] = {}
        for skips in {skips for _, skips in queued}:
            decoded[skips] = self._decode([row for rows, each in queued if each is skips for row in rows], skips)
        places = {True: 0, False: 0}
        texts = []
        for new, (rows, skips) in zip(news, queued, strict=True):
            place = places[skips]
            places[skips] += len(rows)
            taken = decoded[skips][place : places[skips]]
            texts.append(self._output(new).window.take(taken, is_last=new.finish is not None))
        return texts

    def _decode_single_tokens(self, news: Sequence[SequenceOutput]) -> None:
        tokens = {token for new in news if new.asked.request.logprobs for token in new.tokens}
        for new in news:
            if new.asked.prompt_logprobs and self._output(new).echoes:
                tokens.update(new.asked.prompt)
        unknown = sorted(tokens - self._token_texts.keys())
        if unknown:
            shown = self._decode([[token] for token in unknown], False)
            self._token_texts.update(zip(unknown, shown, strict=True))

    def _row(self, new: SequenceOutput, text: str) -> list[Any]:
        output, request, finish = self._output(new), new.asked.request, new.finish
        text = output.stops.feed(text)
        if output.stops.has_stopped:
            finish = Finish.STOP
        elif finish is not None:
            text += output.stops.finish()
        logprobs = self._logprobs(_output_tokens(new), new.logprobs) if request.logprobs else None
        if output.echoes:
            output.echoes = False
            prompt = request.prompt
            if not isinstance(prompt, str):
                prompt = self._decode([new.asked.prompt], request.skips_special_tokens)[0]
            text = prompt + text
            if new.asked.prompt_logprobs:
                logprobs = self._logprobs(new.asked.prompt, new.asked.prompt_logprobs) + (logprobs or [])
        position = None if finish is None else FINISH_REASONS.index(finish)
        return [new.asked.id, new.index, text, len(new.tokens), logprobs, position]

    def _logprobs(self, tokens: Sequence[int], values: Sequence[float | None]) -> list[list[Any]]:
        return [[self._token_texts[token], value, token] for token, value in zip(tokens, values, strict=False)]


def _output_tokens(new: SequenceOutput) -> list[int]:
    """Return the tokens without the one that ended the text, unless stop strings are kept."""
    if new.finish is Finish.STOP and not new.asked.request.includes_stop and new.asked.request.sampling.best_of == 1:
        return new.tokens[:-1]
    return new.tokens
