"""Vectors of texts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ovmstrio.core.errors import InvalidField
from ovmstrio.core.generation import Embeddings, Task
from ovmstrio.runtimes.generation.embedding.text_encoder import MOST_DOCUMENTS, TextEncoder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ovmstrio.core.generation import TokenIds
    from ovmstrio.runtimes.generation.embedding.row_encoder import RowEncoder
    from ovmstrio.runtimes.generation.embedding.row_texts import RowTexts

__all__ = ["EmbeddingModel"]


class EmbeddingModel(TextEncoder):
    """An :class:`ovmstrio.core.generation.Embedder`, and the tokenizer of its model; arguments as there."""

    def __init__(self, name: str, texts: RowTexts, rows: RowEncoder) -> None:
        super().__init__(name, Task.EMBEDDINGS, texts, rows)

    async def embed(self, inputs: Sequence[str | TokenIds]) -> Embeddings:
        """Give a vector for each input, in their order; ``tokens`` are those of all rows, marks included.

        Raises:
            InvalidRequest: there are no inputs or too many, or one is too long, empty, or has unknown tokens.
            Overloaded: too many requests wait.
            ModelFailure: OpenVINO failed.

        Cancellation: at any checkpoint.
        """
        if not 1 <= len(inputs) <= MOST_DOCUMENTS:
            raise InvalidField(f"input must have 1 to {MOST_DOCUMENTS} texts", field="input", got=str(len(inputs)))
        rows = await self._texts.rows_of(inputs)
        return Embeddings(await self._rows.encode(rows), sum(len(row.ids) for row in rows))
