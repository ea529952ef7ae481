"""The tokenizer of a model: texts become tokens on OpenVINO's threads, never on the event loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import trio

from ovmstrio.core.generation import Padding
from ovmstrio.core.text_bounds import AT_ONCE, encode_text, has_enough_tokens, prefix_lengths
from ovmstrio.openvino.network import Network
from ovmstrio.openvino.tokenizing import SpecialTokens, Template

__all__ = ["Ids", "TextTokens", "cut", "parts_of", "surround", "types_of"]

Ids = npt.NDArray[np.int64]
"""Numbers of tokens, of one text."""

_NOTHING: Final = np.empty(0, np.int64)


class TextTokens:
    """Tokenizes, with what belongs around texts.

    Args:
        network: the ragged tokenizer, compiled.
        special_tokens: what stands around texts.
        pad_id: what texts are filled up with.
    """

    def __init__(self, network: Network, special_tokens: SpecialTokens, pad_id: int) -> None:
        self.special_tokens = special_tokens
        self.pad_id = pad_id
        self._network = network

    async def encode(self, texts: Sequence[str]) -> list[Ids]:
        """Return the tokens of each text, without those around it.

        Raises:
            ModelFailure: OpenVINO failed.

        Cancellation: at any checkpoint; what is not tokenized by then is not.
        """
        made: list[Ids] = [_NOTHING] * len(texts)
        for part in parts_of(texts):
            # The tokenizer takes no empty texts.
            numbers = [number for number in part if texts[number]]
            encoded = await self._encode_at_once([texts[number] for number in numbers]) if numbers else []
            for number, tokens in zip(numbers, encoded, strict=True):
                made[number] = tokens
        return made

    async def encode_within(self, texts: Sequence[str], most: int, *, cuts_left: bool = False) -> list[Ids]:
        """Return the tokens of each text, or of its beginning if that has clearly more than ``most`` tokens.

        A text has at most ``most`` tokens if its row has. In a longer row the first ``most`` tokens are those of the
        text. So the work is bounded by ``most``, and not by the length of a text.

        Args:
            texts: each by itself.
            most: how many tokens of each are needed.
            cuts_left: whether the last tokens of a text are needed instead, and its end is tokenized.

        Raises:
            ModelFailure: OpenVINO failed.

        Cancellation: as for :meth:`encode`.
        """
        made: list[Ids] = [_NOTHING] * len(texts)
        lengths = [prefix_lengths(len(text), most) for text in texts]
        left = list(range(len(texts)))
        while left:
            sizes = [next(lengths[number]) for number in left]
            cut_texts = [
                texts[number][-size:] if cuts_left and size else texts[number][:size]
                for number, size in zip(left, sizes, strict=True)
            ]
            for number, tokens in zip(left, await self.encode(cut_texts), strict=True):
                made[number] = tokens
            left = [
                number
                for number, size in zip(left, sizes, strict=True)
                if size < len(texts[number]) and not has_enough_tokens(len(made[number]), most)
            ]
        return made

    async def _encode_at_once(self, texts: Sequence[str]) -> list[Ids]:
        is_large = sum(map(len, texts)) > AT_ONCE
        join = partial(_joined, texts)
        inputs = await trio.to_thread.run_sync(join) if is_large else join()
        first, last, tokens = await self._network.infer(inputs)
        if not tokens.size:
            # Of texts that are all empty once they are normalized the tokenizer returns one row.
            return [_NOTHING] * len(texts)
        wide = tokens[0].astype(np.int64)
        return [wide[begin:end] for begin, end in zip(first.tolist(), last.tolist(), strict=True)]

    def padded(self, rows: Sequence[Ids], length: int, side: Padding) -> list[Ids]:
        """Pad what is shorter than ``length``."""
        made = []
        for row in rows:
            missing = max(0, length - len(row))
            where = (missing, 0) if side is Padding.LEFT else (0, missing)
            made.append(np.pad(row, where, constant_values=self.pad_id))
        return made


def _joined(texts: Sequence[str]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
    """Return where texts begin and end in their bytes, and the bytes."""
    # Half of a surrogate pair, which JSON can carry, is no letter.
    written = [encode_text(text) for text in texts]
    ends = np.fromiter(accumulate(map(len, written)), np.int32, len(written))
    begins = np.concatenate((np.zeros(1, np.int32), ends[:-1]))
    return begins, ends, np.frombuffer(b"".join(written), np.uint8)


def parts_of(texts: Sequence[str]) -> Iterator[list[int]]:
    """Divide texts among inferences, by their positions."""
    part: list[int] = []
    size = 0
    for number, text in enumerate(texts):
        if part and size + len(text) > AT_ONCE:
            yield part
            part, size = [], 0
        part.append(number)
        size += len(text)
    if part:
        yield part


def surround(template: Template, *texts: Ids) -> Ids:
    """Put the tokens of a template around those of texts."""
    parts: list[Any] = [template.marks[0]]
    for text, behind in zip(texts, template.marks[1:], strict=True):
        parts += [text, behind]
    return np.concatenate([np.asarray(part, np.int64) for part in parts])


def types_of(template: Template, *texts: Ids) -> Ids:
    """Return the types of the tokens that :func:`surround` returns."""
    parts: list[Ids] = [np.array(template.mark_types[0], np.int64)]
    for text, kind, behind in zip(texts, template.types, template.mark_types[1:], strict=True):
        parts += [np.full(len(text), kind, np.int64), np.array(behind, np.int64)]
    return np.concatenate(parts)


def cut(tokens: Ids, room: int, *, left: bool) -> Ids:
    """Take as many tokens as there is room for, off the begin or off the end."""
    if len(tokens) <= room:
        return tokens
    return tokens[len(tokens) - room :] if left else tokens[:room]
