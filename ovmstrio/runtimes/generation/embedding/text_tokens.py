"""The tokenizer of a model: texts become tokens on OpenVINO's threads, never on the event loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ovmstrio.core.generation import Padding, TokenIds
from ovmstrio.openvino.network import Network
from ovmstrio.openvino.tokenizing import SpecialTokens, Template

__all__ = ["Ids", "TextTokens", "cut", "surround", "types_of"]

Ids = npt.NDArray[np.int64]
"""Numbers of tokens, of one text."""

_BYTES_AT_ONCE: Final = 256 * 1024
"""What is tokenized in some 10 ms."""


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
        """Give the tokens of each text, without those around it.

        Raises:
            ModelFailure: OpenVINO failed.

        Cancellation: at any checkpoint.
        """
        # Half of a surrogate pair, which JSON can carry, is no letter.
        written = [text.encode("utf-8", "replace") for text in texts]
        made: list[Ids] = [np.empty(0, np.int64)] * len(texts)
        for part in _parts(written):
            for number, tokens in zip(part, await self._encode_at_once([written[each] for each in part]), strict=True):
                made[number] = tokens
        return made

    async def _encode_at_once(self, texts: Sequence[bytes]) -> list[Ids]:
        ends = np.fromiter(accumulate(map(len, texts)), np.int32, len(texts))
        begins = np.concatenate((np.zeros(1, np.int32), ends[:-1]))
        letters = np.frombuffer(b"".join(texts), np.uint8)
        first, last, tokens = await self._network.infer((begins, ends, letters))
        wide = tokens[0].astype(np.int64)
        return [wide[begin:end] for begin, end in zip(first.tolist(), last.tolist(), strict=True)]

    def padded(self, rows: Sequence[TokenIds], length: int, side: Padding) -> list[TokenIds]:
        """Fill up what is shorter than ``length``."""
        made = []
        for row in rows:
            fill = (self.pad_id,) * (length - len(row))
            made.append(fill + row if side is Padding.LEFT else row + fill)
        return made


def _parts(texts: Sequence[bytes]) -> Iterator[list[int]]:
    """Divide texts among inferences, by their positions; empty ones, which have no tokens, are left out."""
    part: list[int] = []
    size = 0
    for number, text in enumerate(texts):
        if not text:
            continue
        if part and size + len(text) > _BYTES_AT_ONCE:
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
    """Give the types of what :func:`surround` gives."""
    parts = [template.mark_types[0]]
    for text, kind, behind in zip(texts, template.types, template.mark_types[1:], strict=True):
        parts += [(kind,) * len(text), behind]
    return np.array([kind for part in parts for kind in part], np.int64)


def cut(tokens: Ids, room: int, *, left: bool) -> Ids:
    """Take as many tokens as there is room for, off the begin or off the end."""
    if len(tokens) <= room:
        return tokens
    return tokens[len(tokens) - room :] if left else tokens[:room]
