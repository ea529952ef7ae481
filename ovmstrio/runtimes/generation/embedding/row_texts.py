"""Texts and tokens of requests as rows that a model takes: with what belongs around them, and not too long."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ovmstrio.core.errors import ContextExceeded, InvalidField
from ovmstrio.core.gathered import Gathered
from ovmstrio.core.generation import Padding, TokenIds
from ovmstrio.runtimes.generation.embedding.row_encoder import Row
from ovmstrio.runtimes.generation.embedding.text_tokens import Ids, TextTokens, cut, surround

if TYPE_CHECKING:
    from ovmstrio.runtimes.generation.embedding.text_folder import TextFolder

__all__ = ["RowTexts"]


class RowTexts:
    """Makes rows of what clients send.

    Args:
        tokens: the model's tokenizer.
        folder: what is known of the model.
        truncate: whether what is too long is cut, rather than refused.
    """

    def __init__(self, tokens: TextTokens, folder: TextFolder, *, truncate: bool) -> None:
        self.tokens = tokens
        self.max_length = folder.max_length
        self._vocabulary_size = folder.vocabulary_size
        self._cuts_left = folder.cuts_left
        self._truncate = truncate

    async def rows_of(self, inputs: Sequence[str | TokenIds]) -> list[Row]:
        """Make a row of each input; numbers of tokens are taken as they are.

        Raises:
            InvalidRequest: inputs are too long, empty, or have tokens that the model does not know.
            ModelFailure: the tokenizer failed.

        Cancellation: at any checkpoint.
        """
        written = iter(await self.tokens.encode([each for each in inputs if isinstance(each, str)]))
        rows: list[Row] = []
        wrong = Gathered()
        for number, each in enumerate(inputs):
            field = "input" if len(inputs) == 1 else f"input[{number}]"
            ids = self._text(next(written)) if isinstance(each, str) else self._given(each)
            with wrong:
                self._check(ids, field)
            rows.append(Row(ids))
        wrong.tell()
        return rows

    def _text(self, text: Ids) -> Ids:
        single = self.tokens.special_tokens.single
        if self._truncate and self.max_length is not None:
            text = cut(text, max(0, self.max_length - single.added), left=self._cuts_left)
        return surround(single, text)

    def _given(self, ids: TokenIds) -> Ids:
        given = np.array(ids, np.int64)
        if self._truncate and self.max_length is not None:
            given = cut(given, self.max_length, left=self._cuts_left)
        return given

    def _check(self, ids: Ids, field: str) -> None:
        """Refuse a row that the model cannot take.

        Raises:
            ContextExceeded: it is too long.
            InvalidField: it is empty, or has tokens that the model does not know.
        """
        if self.max_length is not None and len(ids) > self.max_length:
            message = f"Input length {len(ids)} longer than allowed {self.max_length}"
            raise ContextExceeded(message, field=field)
        if not len(ids):
            raise InvalidField(f"{field} has no tokens; send a text that is not empty", field=field)
        known = self._vocabulary_size
        if known is not None and not 0 <= ids.min() <= ids.max() < known:
            unknown = ids[(ids < 0) | (ids >= known)][0]
            raise InvalidField(
                f"{field}: token {unknown} is none of the model's, which are 0 to {known - 1}; send texts, or the "
                "tokens of this model's own tokenizer",
                field=field,
            )

    async def tokenize(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool = True,
        max_length: int | None = None,
        padding: Padding | None = None,
    ) -> list[TokenIds]:
        """Do as :class:`ovmstrio.core.generation.Tokenizer`.

        Raises:
            InvalidRequest: not even the marks around a text fit into ``max_length``.
            ModelFailure: the tokenizer failed.

        Cancellation: at any checkpoint.
        """
        single = self.tokens.special_tokens.single
        added = single.added if add_special_tokens else 0
        if max_length is not None and max_length < added:
            message = f"max_length must be {added} or more, for the tokens around a text"
            raise InvalidField(message, field="max_length", got=str(max_length))
        made: list[TokenIds] = []
        for text in await self.tokens.encode(texts):
            kept = text if max_length is None else cut(text, max_length - added, left=self._cuts_left)
            made.append(tuple((surround(single, kept) if add_special_tokens else kept).tolist()))
        if padding is None:
            return made
        length = max(map(len, made), default=0) if max_length is None else max_length
        return self.tokens.padded(made, length, padding)
