"""How well documents answer a query: a model reads each of them together with the query.

A document that does not fit beside the query is read in several parts, and scores as its best one does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ovmstrio.core.errors import InvalidField
from ovmstrio.core.generation import Task
from ovmstrio.runtimes.generation.embedding.row_encoder import Row
from ovmstrio.runtimes.generation.embedding.text_encoder import MOST_DOCUMENTS, TextEncoder
from ovmstrio.runtimes.generation.embedding.text_tokens import Ids, surround, types_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ovmstrio.openvino.tokenizing import Template
    from ovmstrio.runtimes.generation.embedding.row_encoder import RowEncoder
    from ovmstrio.runtimes.generation.embedding.row_texts import RowTexts

__all__ = ["RerankModel"]


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
        asked, *read = await self._texts.tokens.encode([query, *documents])
        room = self._room_beside(asked)
        rows: list[Row] = []
        counts = []
        for document in read:
            before = len(rows)
            rows += (self._row(asked, part) for part in _chunks(document, room))
            counts.append(len(rows) - before)
            if len(rows) > self._most_chunks:
                raise InvalidField(
                    f"the documents have more than {self._most_chunks} parts of {room} tokens together, which is as "
                    "many as may; send fewer or shorter ones",
                    field="documents",
                )
        scores = iter((await self._rows.encode(rows)).tolist())
        return [max(next(scores) for _ in range(count)) for count in counts], sum(len(row.ids) for row in rows)

    def _row(self, query: Ids, document: Ids) -> Row:
        return Row(surround(self._template, query, document), types_of(self._template, query, document))

    def _room_beside(self, query: Ids) -> int | None:
        """Tell how many tokens of a document fit beside a query."""
        longest = self._texts.max_length
        if longest is None:
            return None
        most = (longest - self._template.added) // 2
        if len(query) > most:
            message = f"the query may have {most} tokens, half of what the model reads at once"
            raise InvalidField(message, field="query", got=str(len(query)))
        return longest - self._template.added - len(query)


def _chunks(document: Ids, room: int | None) -> Iterator[Ids]:
    """Cut a document into parts; an empty one has an empty part."""
    step = room or max(1, len(document))
    for start in range(0, max(1, len(document)), step):
        yield document[start : start + step]
