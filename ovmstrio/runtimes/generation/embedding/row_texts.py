"""Texts and tokens of requests as rows that a model takes: with what belongs around them, and not too long."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ovmstrio.core.errors import ContextExceeded, InvalidField
from ovmstrio.core.gathered import Gathered
from ovmstrio.core.generation import Padding, TokenIds
from ovmstrio.core.text_bounds import MAX_TOKENIZED_CHARACTERS, has_enough_tokens, max_characters, weight_of
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
        texts = [each for each in inputs if isinstance(each, str)]
        self._check_characters(inputs)
        written = iter(await self._encoded(texts))
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

    async def _encoded(self, texts: Sequence[str]) -> list[Ids]:
        """Return the tokens of texts, of long ones at least as many as the model takes."""
        if self.max_length is None:
            return await self.tokens.encode(texts)
        if self._truncate:
            most = max_characters(self.max_length)
            texts = [text[-most:] if self._cuts_left else text[:most] for text in texts]
        return await self.tokens.encode_within(texts, self.max_length, cuts_left=self._cuts_left and self._truncate)

    def _check_characters(self, inputs: Sequence[str | TokenIds]) -> None:
        """Refuse texts that are too long by their characters alone.

        Raises:
            ContextExceeded: a text cannot fit the model.
            InvalidField: the model has no limit, and the texts together have more characters than one request may.
        """
        if self.max_length is None:
            size = sum(weight_of(each) for each in inputs if isinstance(each, str))
            if size > MAX_TOKENIZED_CHARACTERS:
                message = f"input: expected at most {MAX_TOKENIZED_CHARACTERS} bytes in one request"
                raise InvalidField(message, field="input", got=str(size))
        elif not self._truncate:
            most, wrong = max_characters(self.max_length), Gathered()
            for number, each in enumerate(inputs):
                if len(each) > (most if isinstance(each, str) else self.max_length):
                    wrong.add(self._too_long(each, "input" if len(inputs) == 1 else f"input[{number}]"))
            wrong.tell()

    def _too_long(self, each: str | TokenIds, field: str) -> ContextExceeded:
        what, length = "", len(each)
        if isinstance(each, str) and self.max_length is not None:
            what, length = "of at least ", length * self.max_length // max_characters(self.max_length)
        return ContextExceeded(f"Input length {what}{length} longer than allowed {self.max_length}", field=field)

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
            # Of a text that is much longer only the beginning was tokenized.
            at_least = "of at least " if has_enough_tokens(len(ids), self.max_length) else ""
            message = f"Input length {at_least}{len(ids)} longer than allowed {self.max_length}"
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
    ) -> list[Ids]:
        """Do as :class:`ovmstrio.core.generation.Tokenizer`.

        Raises:
            InvalidRequest: not even the marks around a text fit into ``max_length``, or the padded rows are too large.
            ModelFailure: the tokenizer failed.

        Cancellation: at any checkpoint.
        """
        single = self.tokens.special_tokens.single
        added = single.added if add_special_tokens else 0
        if max_length is not None and max_length < added:
            message = f"max_length must be {added} or more, for the tokens around a text"
            raise InvalidField(message, field="max_length", got=str(max_length))
        made: list[Ids] = []
        if max_length is None:
            encoded = await self.tokens.encode(texts)
        else:
            encoded = await self.tokens.encode_within(texts, max_length, cuts_left=self._cuts_left)
        for text in encoded:
            kept = text if max_length is None else cut(text, max_length - added, left=self._cuts_left)
            made.append(surround(single, kept) if add_special_tokens else kept)
        if padding is None:
            return made
        length = max(map(len, made), default=0) if max_length is None else max_length
        if length * len(made) > MAX_TOKENIZED_CHARACTERS:
            message = f"pad_to_max_length: expected at most {MAX_TOKENIZED_CHARACTERS} tokens with the padding"
            raise InvalidField(message, field="pad_to_max_length", got=str(length * len(made)))
        return self.tokens.padded(made, length, padding)
