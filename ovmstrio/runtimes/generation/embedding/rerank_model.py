"""How well documents answer a query: a model reads each of them together with the query.

A document that does not fit beside the query is read in several parts, and scores as its best one does.
"""

from __future__ import annotations

from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Final

import trio

from ovmstrio.core.errors import InvalidField
from ovmstrio.core.generation import Task
from ovmstrio.core.text_bounds import MAX_TOKENIZED_CHARACTERS, has_enough_tokens, max_characters, weight_of
from ovmstrio.runtimes.generation.embedding.row_encoder import Row
from ovmstrio.runtimes.generation.embedding.text_encoder import MOST_DOCUMENTS, TextEncoder
from ovmstrio.runtimes.generation.embedding.text_tokens import Ids, parts_of, surround, types_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ovmstrio.openvino.tokenizing import Template
    from ovmstrio.runtimes.generation.embedding.row_encoder import RowEncoder
    from ovmstrio.runtimes.generation.embedding.row_texts import RowTexts

__all__ = ["RerankModel"]

_TOKENS_AT_ONCE: Final = 2**15
"""Tokens of which rows are made within a millisecond or two."""


class RerankModel(TextEncoder):
    """A :class:`ovmstrio.core.generation.Reranker`, and the tokenizer of its model.

    Args:
        name: what it is served as.
        texts: has the tokenizer.
        rows: makes one score of each row.
        template: what stands around a query and a document.
        most_chunks: how many parts the documents of a request may have together.
    """

    def __init__(self, name: str, texts: RowTexts, rows: RowEncoder, template: Template, most_chunks: int) -> None:
        super().__init__(name, Task.RERANK, texts, rows)
        self._template = template
        self._most_chunks = most_chunks

    async def rerank(self, query: str, documents: Sequence[str]) -> tuple[list[float], int]:
        """Give a score from 0 to 1 for each document, in their order, and how many tokens were read.

        Raises:
            InvalidRequest: there are no documents or too many, the query leaves no room for them, or they have too
                many parts.
            Overloaded: too many requests wait.
            ModelFailure: OpenVINO failed.

        Cancellation: at any checkpoint.
        """
        if not 1 <= len(documents) <= MOST_DOCUMENTS:
            raise InvalidField(f"documents must be 1 to {MOST_DOCUMENTS}", field="documents", got=str(len(documents)))
        self._check_characters(query, documents)
        asked = await self._query(query)
        room = self._room_beside(asked)
        rows: list[Row] = []
        counts: list[int] = []
        for part in parts_of(documents):
            read = await self._read([documents[number] for number in part], room, self._most_chunks - len(rows))
            make = partial(self._rows_of, asked, read, room)
            is_large = sum(map(len, read)) > _TOKENS_AT_ONCE
            made = await trio.to_thread.run_sync(make) if is_large else make()
            counts += map(len, made)
            rows += chain.from_iterable(made)
        scores = iter((await self._rows.encode(rows)).tolist())
        return [max(next(scores) for _ in range(count)) for count in counts], sum(len(row.ids) for row in rows)

    def _check_characters(self, query: str, documents: Sequence[str]) -> None:
        """Refuse texts that are too long by their characters alone.

        Raises:
            InvalidField: the query cannot fit the model, or the documents have too many parts.
        """
        longest = self._texts.max_length
        if longest is None:
            size = sum(map(weight_of, (query, *documents)))
            if size > MAX_TOKENIZED_CHARACTERS:
                message = f"documents: expected at most {MAX_TOKENIZED_CHARACTERS} bytes with the query"
                raise InvalidField(message, field="documents", got=str(size))
            return
        most = self._most_of_query(longest)
        if len(query) > max_characters(most):
            raise self._query_too_long(most, f"at least {len(query) * most // max_characters(most)}")
        if sum(map(len, documents)) > max_characters(longest * self._most_chunks):
            raise self._too_many(longest)

    async def _query(self, query: str) -> Ids:
        longest = self._texts.max_length
        encode = self._texts.tokens.encode_within
        (ids,) = await (
            encode([query], self._most_of_query(longest)) if longest else self._texts.tokens.encode([query])
        )
        return ids

    async def _read(self, documents: Sequence[str], room: int | None, chunks: int) -> list[Ids]:
        """Return the tokens of documents, which have at most ``chunks`` parts.

        Raises:
            InvalidField: they have more; of a long document no more is tokenized than is needed to know that.
        """
        if room is None:
            read = await self._texts.tokens.encode(documents)
        else:
            read = await self._texts.tokens.encode_within(documents, chunks * room)
        if sum(_count(each, room) for each in read) > chunks:
            raise self._too_many(room)
        return read

    def _too_many(self, room: int | None) -> InvalidField:
        return InvalidField(
            f"the documents have more than {self._most_chunks} parts of {room} tokens together, which is as "
            "many as may; send fewer or shorter ones",
            field="documents",
        )

    def _rows_of(self, query: Ids, documents: Sequence[Ids], room: int | None) -> list[list[Row]]:
        return [[self._row(query, part) for part in _chunks(each, room)] for each in documents]

    def _row(self, query: Ids, document: Ids) -> Row:
        return Row(surround(self._template, query, document), types_of(self._template, query, document))

    def _room_beside(self, query: Ids) -> int | None:
        """Tell how many tokens of a document fit beside a query."""
        longest = self._texts.max_length
        if longest is None:
            return None
        most = self._most_of_query(longest)
        if len(query) > most:
            at_least = "at least " if has_enough_tokens(len(query), most) else ""
            raise self._query_too_long(most, f"{at_least}{len(query)}")
        return longest - self._template.added - len(query)

    def _most_of_query(self, longest: int) -> int:
        return (longest - self._template.added) // 2

    def _query_too_long(self, most: int, got: str) -> InvalidField:
        return InvalidField(
            f"the query may have {most} tokens, half of what the model reads at once", field="query", got=got
        )


def _count(document: Ids, room: int | None) -> int:
    return 1 if room is None else max(1, -(-len(document) // room))


def _chunks(document: Ids, room: int | None) -> Iterator[Ids]:
    """Cut a document into parts; an empty one has an empty part."""
    step = room or max(1, len(document))
    for start in range(0, max(1, len(document)), step):
        yield document[start : start + step]
